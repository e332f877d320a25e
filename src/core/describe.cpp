// Tensors against the problem: infers the shapes, then checks every tensor. Runs on each call, so the good path
// allocates nothing.
#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "core/problem.h"
#include "core/validate.h"

namespace tilewise {
std::string list_text(const int64_t* values, int32_t count) {
  std::string text = "[";
  for (int32_t n = 0; n < count; ++n) text += concat(n ? ", " : "", values[n]);
  return text + "]";
}

namespace {

// What a tensor must be, besides its shape.
struct Rule {
  bool output = false;           // no two elements in one place
  bool last_contiguous = false;  // last stride 1
};
constexpr Rule kInput{}, kOutput{true, false}, kVectors{false, true}, kOutputVectors{true, true};

class Describer {
 public:
  Describer(const tw_problem& options, const tw_tensors& tensors) : options_(options), t_(tensors), p_(options) {}

  Status run(tw_problem* out) {
    if (options_.struct_size != sizeof options_)
      return invalid("tw_problem.struct_size ", options_.struct_size, ": must be ", sizeof options_, "; call tw_problem_init first");
    if (t_.struct_size != sizeof t_)
      return invalid("tw_tensors.struct_size ", t_.struct_size, ": must be ", sizeof t_, " (= sizeof(tw_tensors))");
    if (t_.reserved != 0) return invalid("tw_tensors.reserved ", t_.reserved, ": must be 0");
    if (p_.pass != TW_FORWARD && p_.pass != TW_BACKWARD)
      return invalid("pass ", p_.pass, ": must be 0 (TW_FORWARD) or 1 (TW_BACKWARD)");
    TW_RETURN_IF_ERROR(presence());
    TW_RETURN_IF_ERROR(infer());
    TW_RETURN_IF_ERROR(validate_problem(p_));
    TW_RETURN_IF_ERROR(main_tensors());
    TW_RETURN_IF_ERROR(option_tensors());
    TW_RETURN_IF_ERROR(cache_tensors());
    if (p_.pass == TW_BACKWARD) TW_RETURN_IF_ERROR(gradient_tensors());
    if (p_.device == TW_CPU) TW_RETURN_IF_ERROR(contents());
    *out = p_;
    return Status();
  }

 private:
  // ---- which tensors are there ----

  Status presence() {
    const auto need = [](const char* name, const void* tensor) {
      return tensor != nullptr ? Status() : invalid(name, ": is NULL, and is required");
    };
    TW_RETURN_IF_ERROR(need("q", t_.q));
    TW_RETURN_IF_ERROR(need("k", t_.k));
    TW_RETURN_IF_ERROR(need("v", t_.v));
    TW_RETURN_IF_ERROR(need("o", t_.o));
    if (p_.pass == TW_BACKWARD) {
      TW_RETURN_IF_ERROR(need("lse", t_.lse));
      TW_RETURN_IF_ERROR(need("dout", t_.dout));
      if (t_.page_table) return invalid("page_table: not in the backward pass: gradients need a dense or packed k");
      if (t_.k_new || t_.v_new) return invalid(t_.k_new ? "k_new" : "v_new", ": not in the backward pass: appending to the cache has no gradient");
      if (t_.rotary_cos || t_.rotary_sin)
        return invalid(t_.rotary_cos ? "rotary_cos" : "rotary_sin", ": not in the backward pass: rotate q and k outside, where the rotation has its gradient");
    } else if (t_.dout) {
      return invalid("dout: belongs to the backward pass, and this is forward");
    }
    if (t_.cu_seqlens_k && t_.page_table) return invalid("page_table: k is packed (cu_seqlens_k is given); must be one or the other");
    if (!t_.k_new != !t_.v_new) return invalid(t_.k_new ? "v_new" : "k_new", ": is NULL; k_new and v_new come together");
    if (!t_.rotary_cos != !t_.rotary_sin)
      return invalid(t_.rotary_cos ? "rotary_sin" : "rotary_cos", ": is NULL; rotary_cos and rotary_sin come together");
    if (t_.rotary_seqlens && !t_.rotary_cos) return invalid("rotary_seqlens: needs rotary_cos and rotary_sin");
    return Status();
  }

  // ---- shapes ----

  Status ndim_is(const char* name, const tw_tensor& x, int32_t ndim, const char* dims) const {
    if (x.ndim == ndim) return Status();
    return invalid(name, ": ndim ", x.ndim, ": must be ", ndim, " (", dims, ")");
  }

  // Shapes that the options carry already must agree; `value` is the tensors'.
  Status agree(const char* name, int64_t value, int64_t* member) {
    if (*member != 0 && *member != value)
      return invalid(name, " ", *member, ": the tensors have ", value, "; must agree, or be 0 to be filled in");
    *member = value;
    return Status();
  }
  Status agree(const char* name, int32_t value, int32_t* member) {
    int64_t wide = *member;
    TW_RETURN_IF_ERROR(agree(name, int64_t{value}, &wide));
    *member = value;
    return Status();
  }

  Status infer() {
    TW_RETURN_IF_ERROR(agree("q_layout", t_.cu_seqlens_q ? TW_PACKED : TW_DENSE, &p_.q_layout));
    TW_RETURN_IF_ERROR(agree("k_layout", t_.page_table ? TW_PAGED : t_.cu_seqlens_k ? TW_PACKED : TW_DENSE, &p_.k_layout));
    if (t_.q->device != TW_CPU && t_.q->device != TW_CUDA) return invalid("q: device ", t_.q->device, ": must be 0 (TW_CPU) or 1 (TW_CUDA)");
    TW_RETURN_IF_ERROR(agree("device", t_.q->device, &p_.device));
    if (!is_float(t_.q->dtype)) return invalid("q: dtype ", dtype_name(t_.q->dtype), ": must be f32, f16, bf16 or f64");
    TW_RETURN_IF_ERROR(agree("dtype", t_.q->dtype, &p_.dtype));
    TW_RETURN_IF_ERROR(infer_query());
    TW_RETURN_IF_ERROR(infer_key());
    if (t_.k_new) {
      TW_RETURN_IF_ERROR(ndim_is("k_new", *t_.k_new, 4, "[batch, seqlen_new, num_heads_k, head_dim]"));
      TW_RETURN_IF_ERROR(agree("seqlen_new", t_.k_new->shape[1], &p_.seqlen_new));
      if (p_.seqlen_new == 0 && !t_.seqused_k) return invalid("k_new: needs seqused_k, the place to append at");
    } else {
      TW_RETURN_IF_ERROR(agree("seqlen_new", int64_t{0}, &p_.seqlen_new));
    }
    if (t_.rotary_cos) {
      TW_RETURN_IF_ERROR(ndim_is("rotary_cos", *t_.rotary_cos, 2, "[positions, rotary_dim / 2]"));
      const int64_t half = t_.rotary_cos->shape[1];
      if (half < 1 || half > 128) return invalid("rotary_cos: shape[1] ", half, ": must be rotary_dim / 2, in [1, head_dim / 2]");
      TW_RETURN_IF_ERROR(agree("rotary_dim", 2 * half, &p_.rotary_dim));
    } else {
      TW_RETURN_IF_ERROR(agree("rotary_dim", int64_t{0}, &p_.rotary_dim));
    }
    infer_features();
    return infer_bias();
  }

  Status infer_query() {
    const tw_tensor& q = *t_.q;
    if (p_.q_layout == TW_PACKED) {
      TW_RETURN_IF_ERROR(ndim_is("q", q, 3, "[total_q, num_heads_q, head_dim], as cu_seqlens_q is given"));
      TW_RETURN_IF_ERROR(ndim_is("cu_seqlens_q", *t_.cu_seqlens_q, 1, "[batch + 1]"));
      if (t_.cu_seqlens_q->shape[0] < 1) return invalid("cu_seqlens_q: shape [", t_.cu_seqlens_q->shape[0], "]: must be [batch + 1]");
      TW_RETURN_IF_ERROR(agree("total_q", q.shape[0], &p_.total_q));
      TW_RETURN_IF_ERROR(agree("batch", t_.cu_seqlens_q->shape[0] - 1, &p_.batch));
      TW_RETURN_IF_ERROR(longest("seqlen_q", "cu_seqlens_q", *t_.cu_seqlens_q, q.shape[0], &p_.seqlen_q));
    } else {
      TW_RETURN_IF_ERROR(ndim_is("q", q, 4, "[batch, seqlen_q, num_heads_q, head_dim]; packed needs cu_seqlens_q"));
      TW_RETURN_IF_ERROR(agree("batch", q.shape[0], &p_.batch));
      TW_RETURN_IF_ERROR(agree("seqlen_q", q.shape[1], &p_.seqlen_q));
      TW_RETURN_IF_ERROR(agree("total_q", int64_t{0}, &p_.total_q));
    }
    TW_RETURN_IF_ERROR(agree("num_heads_q", q.shape[q.ndim - 2], &p_.num_heads_q));
    return agree("head_dim", q.shape[q.ndim - 1], &p_.head_dim);
  }

  Status infer_key() {
    const tw_tensor &k = *t_.k, &v = *t_.v;
    int64_t total_k = 0, num_pages = 0, page_size = 0, cache_batch = 0;
    switch (p_.k_layout) {
      case TW_PACKED:
        TW_RETURN_IF_ERROR(ndim_is("k", k, 3, "[total_k, num_heads_k, head_dim], as cu_seqlens_k is given"));
        TW_RETURN_IF_ERROR(ndim_is("cu_seqlens_k", *t_.cu_seqlens_k, 1, "[batch + 1]"));
        total_k = k.shape[0];
        TW_RETURN_IF_ERROR(vector_of("cu_seqlens_k", t_.cu_seqlens_k, p_.batch + 1, "[batch + 1]"));
        TW_RETURN_IF_ERROR(longest("seqlen_k", "cu_seqlens_k", *t_.cu_seqlens_k, total_k, &p_.seqlen_k));
        break;
      case TW_PAGED: {
        TW_RETURN_IF_ERROR(ndim_is("k", k, 4, "[num_pages, page_size, num_heads_k, head_dim], as page_table is given"));
        TW_RETURN_IF_ERROR(ndim_is("page_table", *t_.page_table, 2, "[batch, max_pages]"));
        num_pages = k.shape[0];
        page_size = k.shape[1];
        const int64_t max_pages = t_.page_table->shape[1];
        if (page_size < 1) return invalid("k: shape[1] ", page_size, ": must be page_size, > 0");
        int64_t capacity;
        if (max_pages < 0 || __builtin_mul_overflow(max_pages, page_size, &capacity))
          return invalid("page_table: shape[1] ", max_pages, ": must be >= 0, and times page_size within int64");
        // A given seqlen_k may end inside the last page.
        if (p_.seqlen_k == 0 || p_.seqlen_k > capacity || p_.seqlen_k <= capacity - page_size)
          TW_RETURN_IF_ERROR(agree("seqlen_k", capacity, &p_.seqlen_k));
        break;
      }
      default:
        TW_RETURN_IF_ERROR(ndim_is("k", k, 4, "[batch, seqlen_k, num_heads_k, head_dim]; packed needs cu_seqlens_k, paged page_table"));
        TW_RETURN_IF_ERROR(agree("seqlen_k", k.shape[1], &p_.seqlen_k));
        if (k.shape[0] != p_.batch) {
          if (!t_.cache_batch_idx || k.shape[0] == 0)
            return invalid("k: shape[0] ", k.shape[0], ": must be batch, which is ", p_.batch, " (other sizes, > 0, need cache_batch_idx)");
          cache_batch = k.shape[0];
        }
        if (p_.cache_batch == k.shape[0]) cache_batch = p_.cache_batch;  // given although it is batch
        break;
    }
    TW_RETURN_IF_ERROR(agree("total_k", total_k, &p_.total_k));
    TW_RETURN_IF_ERROR(agree("num_pages", num_pages, &p_.num_pages));
    TW_RETURN_IF_ERROR(agree("page_size", page_size, &p_.page_size));
    TW_RETURN_IF_ERROR(agree("cache_batch", cache_batch, &p_.cache_batch));
    TW_RETURN_IF_ERROR(agree("num_heads_k", k.shape[k.ndim - 2], &p_.num_heads_k));
    TW_RETURN_IF_ERROR(ndim_is("v", v, k.ndim, "like k"));
    return agree("head_dim_v", v.shape[v.ndim - 1], &p_.head_dim_v);
  }

  // seqlen_q or seqlen_k of packed sequences: given, or the longest.
  Status longest(const char* name, const char* cu_name, const tw_tensor& cu, int64_t total, int64_t* member) {
    if (*member != 0 || total == 0) return Status();  // contents() checks every length against it
    if (cu.device != TW_CPU) return invalid(name, " 0: must be given for packed tensors on CUDA, where ", cu_name, " cannot be read");
    TW_RETURN_IF_ERROR(vector_of(cu_name, &cu, p_.batch + 1, "[batch + 1]"));
    for (int64_t b = 0; b < p_.batch; ++b) *member = std::max(*member, at(cu, b + 1) - at(cu, b));
    return Status();
  }

  void infer_features() {
    uint32_t features = 0;
    const auto add = [&](const void* tensor, tw_feature feature) { features |= tensor ? uint32_t{feature} : 0u; };
    if (p_.pass == TW_FORWARD) add(t_.lse, TW_HAS_LSE);
    add(t_.max_logit, TW_HAS_MAX_LOGIT);
    add(t_.bias, TW_HAS_BIAS);
    add(t_.alibi_slopes, TW_HAS_ALIBI);
    add(t_.sink, TW_HAS_SINK);
    add(t_.rng_state, TW_HAS_RNG_STATE);
    add(t_.dropout_mask, TW_HAS_DROPOUT_MASK);
    add(t_.seqused_q, TW_HAS_SEQUSED_Q);
    add(t_.seqused_k, TW_HAS_SEQUSED_K);
    add(t_.cache_batch_idx, TW_HAS_CACHE_BATCH_IDX);
    add(t_.leftpad_k, TW_HAS_LEFTPAD_K);
    add(t_.rotary_seqlens, TW_HAS_ROTARY_SEQLENS);
    add(t_.dlse, TW_HAS_DLSE);
    add(t_.dq, TW_HAS_DQ);
    add(t_.dk, TW_HAS_DK);
    add(t_.dv, TW_HAS_DV);
    add(t_.dbias, TW_HAS_DBIAS);
    add(t_.dalibi, TW_HAS_DALIBI);
    add(t_.dsink, TW_HAS_DSINK);
    p_.features = features;
  }

  Status infer_bias() {
    const int32_t given = options_.bias_dims;
    p_.bias_dtype = p_.bias_dims = p_.alibi_dims = 0;
    if (t_.bias) {
      const tw_tensor& bias = *t_.bias;
      TW_RETURN_IF_ERROR(ndim_is("bias", bias, 4, "[batch | 1, num_heads_q | 1, seqlen_q | 1, seqlen_k | 1]"));
      const int64_t full[4] = {p_.batch, p_.num_heads_q, p_.seqlen_q, p_.seqlen_k};
      for (int32_t n = 0; n < 4; ++n) {
        if (bias.shape[n] != full[n] && bias.shape[n] != 1)
          return invalid("bias: shape ", list_text(bias.shape, 4), ": must be ", list_text(full, 4),
                         " or 1 in each dimension ([batch, num_heads_q, seqlen_q, seqlen_k])");
        // Where the full size is 1, both readings are the same tensor: the options' reading stands.
        if (full[n] == 1 ? (given >> n & 1) != 0 : bias.shape[n] == full[n]) p_.bias_dims |= 1 << n;
      }
      p_.bias_dtype = bias.dtype;
    }
    if (t_.alibi_slopes) {
      const int32_t ndim = t_.alibi_slopes->ndim;
      if (ndim != 1 && ndim != 2) return invalid("alibi_slopes: ndim ", ndim, ": must be 1 ([num_heads_q]) or 2 ([batch, num_heads_q])");
      p_.alibi_dims = ndim == 1 ? TW_DIM_H : TW_DIM_B | TW_DIM_H;
    }
    return Status();
  }

  // ---- one tensor ----

  Status check(const char* name, const tw_tensor* tensor, std::initializer_list<int64_t> shape, const char* dims, Rule rule) const {
    const tw_tensor& x = *tensor;
    TW_RETURN_IF_ERROR(ndim_is(name, x, static_cast<int32_t>(shape.size()), dims));
    if (!std::equal(shape.begin(), shape.end(), x.shape))
      return invalid(name, ": shape ", list_text(x.shape, x.ndim), ": must be ", list_text(shape.begin(), x.ndim), " (", dims, ")");
    if (x.device != p_.device || x.device_index != t_.q->device_index)
      return invalid(name, ": device ", x.device, ":", x.device_index, ": must be that of q, ", t_.q->device, ":", t_.q->device_index);
    bool empty = false;
    int64_t last = 0;  // offset of the last element
    for (int32_t n = 0; n < x.ndim; ++n) {
      if (x.shape[n] == 0) empty = true;
      if (x.shape[n] <= 1) continue;
      int64_t step;
      if (x.stride[n] < 0) return invalid(name, ": stride[", n, "] ", x.stride[n], ": must be >= 0");
      if (__builtin_mul_overflow(x.shape[n] - 1, x.stride[n], &step) || __builtin_add_overflow(last, step, &last))
        return invalid(name, ": strides ", list_text(x.stride, x.ndim), ": the last element's offset overflows int64");
    }
    if (empty) return Status();
    if (__builtin_mul_overflow(last, dtype_size(x.dtype), &last))
      return invalid(name, ": strides ", list_text(x.stride, x.ndim), ": the last element's offset overflows int64");
    if (rule.last_contiguous && x.shape[x.ndim - 1] > 1 && x.stride[x.ndim - 1] != 1)
      return invalid(name, ": stride[", x.ndim - 1, "] ", x.stride[x.ndim - 1], ": must be 1 in the last dimension");
    if (rule.output) TW_RETURN_IF_ERROR(distinct(name, x));
    if (x.data == nullptr) return invalid(name, ": data is NULL, and the tensor has elements");
    if (reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(dtype_size(x.dtype)) != 0)
      return invalid(name, ": data is not aligned to its element size of ", dtype_size(x.dtype), " bytes");
    return Status();
  }

  // Every element of an output in a place of its own: dimensions, by rising stride, must not reach into the next.
  static Status distinct(const char* name, const tw_tensor& x) {
    int32_t order[TW_MAX_DIMS], count = 0;
    for (int32_t n = 0; n < x.ndim; ++n) {
      if (x.shape[n] <= 1) continue;
      if (x.stride[n] == 0)
        return invalid(name, ": stride[", n, "] 0 in a dimension of size ", x.shape[n], ": an output must not be broadcast");
      int32_t at = count++;
      for (; at > 0 && x.stride[order[at - 1]] > x.stride[n]; --at) order[at] = order[at - 1];
      order[at] = n;
    }
    int64_t extent = 1;
    for (int32_t n = 0; n < count; ++n) {
      const int32_t dim = order[n];
      if (x.stride[dim] < extent)
        return invalid(name, ": strides ", list_text(x.stride, x.ndim), " for shape ", list_text(x.shape, x.ndim), ": elements of an output must not overlap");
      extent = x.stride[dim] * (x.shape[dim] - 1) + extent;
    }
    return Status();
  }

  Status dtype_is(const char* name, const tw_tensor* tensor, int32_t dtype, const char* like = "") const {
    if (tensor->dtype == dtype) return Status();
    return invalid(name, ": dtype ", dtype_name(tensor->dtype), ": must be ", dtype_name(dtype), like);
  }
  Status dtype_or_f32(const char* name, const tw_tensor* tensor, int32_t dtype, const char* like) const {
    if (tensor->dtype == dtype || tensor->dtype == TW_FLOAT32) return Status();
    return invalid(name, ": dtype ", dtype_name(tensor->dtype), ": must be ", dtype_name(dtype), " like ", like, ", or f32");
  }

  // int32 vector of `count` elements; NULL passes.
  Status vector_of(const char* name, const tw_tensor* tensor, int64_t count, const char* dims) const {
    if (tensor == nullptr) return Status();
    TW_RETURN_IF_ERROR(dtype_is(name, tensor, TW_INT32));
    return check(name, tensor, {count}, dims, kInput);
  }

  // ---- groups of tensors ----

  // A tensor with the rows of q (width d) or of o (width dv).
  Status query_like(const char* name, const tw_tensor* x, int64_t width, const char* dense, const char* packed, Rule rule) const {
    return p_.q_layout == TW_PACKED ? check(name, x, {p_.total_q, p_.num_heads_q, width}, packed, rule)
                                    : check(name, x, {p_.batch, p_.seqlen_q, p_.num_heads_q, width}, dense, rule);
  }
  Status key_like(const char* name, const tw_tensor* x, int64_t width, bool output) const {
    const Rule rule = output ? kOutputVectors : kVectors;
    const bool is_v = width == p_.head_dim_v && (name[0] == 'v' || name[1] == 'v');
    switch (p_.k_layout) {
      case TW_PACKED:
        return check(name, x, {p_.total_k, p_.num_heads_k, width},
                     is_v ? "[total_k, num_heads_k, head_dim_v]" : "[total_k, num_heads_k, head_dim]", rule);
      case TW_PAGED:
        return check(name, x, {p_.num_pages, p_.page_size, p_.num_heads_k, width},
                     is_v ? "[num_pages, page_size, num_heads_k, head_dim_v]" : "[num_pages, page_size, num_heads_k, head_dim]", rule);
      default:
        return check(name, x, {p_.cache_batch != 0 ? p_.cache_batch : p_.batch, p_.seqlen_k, p_.num_heads_k, width},
                     is_v ? "[batch, seqlen_k, num_heads_k, head_dim_v]" : "[batch, seqlen_k, num_heads_k, head_dim]", rule);
    }
  }
  static constexpr const char* kQDense = "[batch, seqlen_q, num_heads_q, head_dim]";
  static constexpr const char* kQPacked = "[total_q, num_heads_q, head_dim]";
  static constexpr const char* kODense = "[batch, seqlen_q, num_heads_q, head_dim_v]";
  static constexpr const char* kOPacked = "[total_q, num_heads_q, head_dim_v]";

  Status lse_like(const char* name, const tw_tensor* x, Rule rule) const {
    TW_RETURN_IF_ERROR(dtype_is(name, x, TW_FLOAT32));
    return p_.q_layout == TW_PACKED ? check(name, x, {p_.num_heads_q, p_.total_q}, "[num_heads_q, total_q]", rule)
                                    : check(name, x, {p_.batch, p_.num_heads_q, p_.seqlen_q}, "[batch, num_heads_q, seqlen_q]", rule);
  }

  Status main_tensors() const {
    const bool forward = p_.pass == TW_FORWARD, append = t_.k_new != nullptr;
    TW_RETURN_IF_ERROR(query_like("q", t_.q, p_.head_dim, kQDense, kQPacked, kVectors));
    TW_RETURN_IF_ERROR(dtype_is("k", t_.k, p_.dtype, " like q"));
    TW_RETURN_IF_ERROR(key_like("k", t_.k, p_.head_dim, append));
    TW_RETURN_IF_ERROR(dtype_is("v", t_.v, p_.dtype, " like q"));
    TW_RETURN_IF_ERROR(key_like("v", t_.v, p_.head_dim_v, append));
    TW_RETURN_IF_ERROR(dtype_or_f32("o", t_.o, p_.dtype, "q"));
    TW_RETURN_IF_ERROR(query_like("o", t_.o, p_.head_dim_v, kODense, kOPacked, forward ? kOutputVectors : kVectors));
    if (t_.lse) TW_RETURN_IF_ERROR(lse_like("lse", t_.lse, forward ? kOutput : kInput));
    if (t_.max_logit) {
      TW_RETURN_IF_ERROR(dtype_is("max_logit", t_.max_logit, TW_FLOAT32));
      TW_RETURN_IF_ERROR(check("max_logit", t_.max_logit, {p_.batch, p_.num_heads_q}, "[batch, num_heads_q]", kOutput));
    }
    TW_RETURN_IF_ERROR(vector_of("cu_seqlens_q", t_.cu_seqlens_q, p_.batch + 1, "[batch + 1]"));
    TW_RETURN_IF_ERROR(vector_of("cu_seqlens_k", t_.cu_seqlens_k, p_.batch + 1, "[batch + 1]"));
    TW_RETURN_IF_ERROR(vector_of("seqused_q", t_.seqused_q, p_.batch, "[batch]"));
    return vector_of("seqused_k", t_.seqused_k, p_.batch, "[batch]");
  }

  Status alibi_like(const char* name, const tw_tensor* x, Rule rule) const {
    TW_RETURN_IF_ERROR(dtype_is(name, x, TW_FLOAT32));
    return p_.alibi_dims == TW_DIM_H ? check(name, x, {p_.num_heads_q}, "[num_heads_q]", rule)
                                     : check(name, x, {p_.batch, p_.num_heads_q}, "[batch, num_heads_q]", rule);
  }

  Status option_tensors() const {
    if (t_.bias) {
      const int64_t* s = t_.bias->shape;
      TW_RETURN_IF_ERROR(check("bias", t_.bias, {s[0], s[1], s[2], s[3]}, "", kInput));
    }
    if (t_.alibi_slopes) TW_RETURN_IF_ERROR(alibi_like("alibi_slopes", t_.alibi_slopes, kInput));
    if (t_.sink) {
      TW_RETURN_IF_ERROR(dtype_is("sink", t_.sink, TW_FLOAT32));
      TW_RETURN_IF_ERROR(check("sink", t_.sink, {p_.num_heads_q}, "[num_heads_q]", kInput));
    }
    if (t_.rng_state) {
      TW_RETURN_IF_ERROR(dtype_is("rng_state", t_.rng_state, TW_INT64));
      TW_RETURN_IF_ERROR(check("rng_state", t_.rng_state, {2}, "{seed, offset}", kVectors));
    }
    if (t_.dropout_mask) {
      TW_RETURN_IF_ERROR(dtype_is("dropout_mask", t_.dropout_mask, TW_BOOL));
      TW_RETURN_IF_ERROR(check("dropout_mask", t_.dropout_mask, {p_.batch, p_.num_heads_q, p_.seqlen_q, p_.seqlen_k},
                               "[batch, num_heads_q, seqlen_q, seqlen_k]", kOutput));
    }
    return Status();
  }

  Status cache_tensors() const {
    if (t_.page_table) {
      TW_RETURN_IF_ERROR(dtype_is("page_table", t_.page_table, TW_INT32));
      TW_RETURN_IF_ERROR(check("page_table", t_.page_table, {p_.batch, t_.page_table->shape[1]}, "[batch, max_pages]", kInput));
    }
    TW_RETURN_IF_ERROR(vector_of("cache_batch_idx", t_.cache_batch_idx, p_.batch, "[batch]"));
    TW_RETURN_IF_ERROR(vector_of("leftpad_k", t_.leftpad_k, p_.batch, "[batch]"));
    if (t_.k_new) {
      TW_RETURN_IF_ERROR(dtype_is("k_new", t_.k_new, p_.dtype, " like k"));
      TW_RETURN_IF_ERROR(check("k_new", t_.k_new, {p_.batch, p_.seqlen_new, p_.num_heads_k, p_.head_dim},
                               "[batch, seqlen_new, num_heads_k, head_dim]", kVectors));
      TW_RETURN_IF_ERROR(dtype_is("v_new", t_.v_new, p_.dtype, " like v"));
      TW_RETURN_IF_ERROR(check("v_new", t_.v_new, {p_.batch, p_.seqlen_new, p_.num_heads_k, p_.head_dim_v},
                               "[batch, seqlen_new, num_heads_k, head_dim_v]", kVectors));
    }
    if (t_.rotary_cos) {
      TW_RETURN_IF_ERROR(dtype_or_f32("rotary_cos", t_.rotary_cos, p_.dtype, "q"));
      TW_RETURN_IF_ERROR(dtype_is("rotary_sin", t_.rotary_sin, t_.rotary_cos->dtype, " like rotary_cos"));
      const int64_t positions = t_.rotary_cos->shape[0];
      TW_RETURN_IF_ERROR(check("rotary_cos", t_.rotary_cos, {positions, p_.rotary_dim / 2}, "[positions, rotary_dim / 2]", kVectors));
      TW_RETURN_IF_ERROR(check("rotary_sin", t_.rotary_sin, {positions, p_.rotary_dim / 2}, "[positions, rotary_dim / 2], like rotary_cos", kVectors));
    }
    return vector_of("rotary_seqlens", t_.rotary_seqlens, p_.batch, "[batch]");
  }

  Status gradient_tensors() const {
    TW_RETURN_IF_ERROR(dtype_is("dout", t_.dout, t_.o->dtype, " like o"));
    TW_RETURN_IF_ERROR(query_like("dout", t_.dout, p_.head_dim_v, kODense, kOPacked, kVectors));
    if (t_.dlse) TW_RETURN_IF_ERROR(lse_like("dlse", t_.dlse, kInput));
    if (t_.dq) {
      TW_RETURN_IF_ERROR(dtype_or_f32("dq", t_.dq, p_.dtype, "q"));
      TW_RETURN_IF_ERROR(query_like("dq", t_.dq, p_.head_dim, kQDense, kQPacked, kOutputVectors));
    }
    if (t_.dk) {
      TW_RETURN_IF_ERROR(dtype_or_f32("dk", t_.dk, p_.dtype, "k"));
      TW_RETURN_IF_ERROR(key_like("dk", t_.dk, p_.head_dim, true));
    }
    if (t_.dv) {
      TW_RETURN_IF_ERROR(dtype_or_f32("dv", t_.dv, p_.dtype, "v"));
      TW_RETURN_IF_ERROR(key_like("dv", t_.dv, p_.head_dim_v, true));
    }
    if (t_.dbias) {
      const int64_t* s = t_.bias->shape;
      TW_RETURN_IF_ERROR(dtype_or_f32("dbias", t_.dbias, p_.bias_dtype, "bias"));
      TW_RETURN_IF_ERROR(check("dbias", t_.dbias, {s[0], s[1], s[2], s[3]}, "the shape of bias", kOutput));
    }
    if (t_.dalibi) TW_RETURN_IF_ERROR(alibi_like("dalibi", t_.dalibi, kOutput));
    if (t_.dsink) {
      TW_RETURN_IF_ERROR(dtype_is("dsink", t_.dsink, TW_FLOAT32));
      TW_RETURN_IF_ERROR(check("dsink", t_.dsink, {p_.num_heads_q}, "[num_heads_q]", kOutput));
    }
    return Status();
  }

  // ---- lengths and indices (on the CPU) ----

  static int64_t at(const tw_tensor& x, int64_t n) { return static_cast<const int32_t*>(x.data)[n * x.stride[0]]; }

  Status boundaries(const char* name, const tw_tensor* cu, int64_t total, const char* longest_name, int64_t longest) const {
    if (cu == nullptr) return Status();
    if (at(*cu, 0) != 0) return invalid(name, "[0] ", at(*cu, 0), ": must be 0");
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t length = at(*cu, b + 1) - at(*cu, b);
      if (length < 0) return invalid(name, "[", b + 1, "] ", at(*cu, b + 1), ": must not be less than the one before, ", at(*cu, b));
      if (length > longest)
        return invalid(name, ": sequence ", b, " has ", length, " rows: must be <= ", longest_name, ", which is ", longest);
    }
    if (at(*cu, p_.batch) > total)
      return invalid(name, "[", p_.batch, "] ", at(*cu, p_.batch), ": must be <= the rows of the packed tensor, ", total);
    return Status();
  }

  Status in_range(const char* name, int64_t b, int64_t value, int64_t low, int64_t high, const char* what) const {
    if (value >= low && value <= high) return Status();
    return invalid(name, "[", b, "] ", value, ": must be in [", low, ", ", high, "] (", what, ")");
  }

  Status contents() const {
    TW_RETURN_IF_ERROR(boundaries("cu_seqlens_q", t_.cu_seqlens_q, p_.total_q, "seqlen_q", p_.seqlen_q));
    TW_RETURN_IF_ERROR(boundaries("cu_seqlens_k", t_.cu_seqlens_k, p_.total_k, "seqlen_k", p_.seqlen_k));
    if (!t_.seqused_q && !t_.seqused_k && !t_.page_table && !t_.cache_batch_idx && !t_.leftpad_k && !t_.rotary_cos) return Status();
    for (int64_t b = 0; b < p_.batch; ++b) {
      int64_t length_q = t_.cu_seqlens_q ? at(*t_.cu_seqlens_q, b + 1) - at(*t_.cu_seqlens_q, b) : p_.seqlen_q;
      if (t_.seqused_q) {
        TW_RETURN_IF_ERROR(in_range("seqused_q", b, at(*t_.seqused_q, b), 0, length_q, "the length of the sequence"));
        length_q = at(*t_.seqused_q, b);
      }
      int64_t used_k = t_.cu_seqlens_k ? at(*t_.cu_seqlens_k, b + 1) - at(*t_.cu_seqlens_k, b) : p_.seqlen_k;
      if (t_.seqused_k) {
        TW_RETURN_IF_ERROR(in_range("seqused_k", b, at(*t_.seqused_k, b), 0, used_k - p_.seqlen_new,
                                    p_.seqlen_new ? "the capacity less the keys to append" : "the length of the sequence"));
        used_k = at(*t_.seqused_k, b);
      }
      if (t_.cache_batch_idx)
        TW_RETURN_IF_ERROR(in_range("cache_batch_idx", b, at(*t_.cache_batch_idx, b), 0, t_.k->shape[0] - 1, "rows of k"));
      if (t_.leftpad_k) TW_RETURN_IF_ERROR(in_range("leftpad_k", b, at(*t_.leftpad_k, b), 0, p_.seqlen_k, "the capacity of k"));
      if (t_.rotary_cos) TW_RETURN_IF_ERROR(positions(b, length_q, used_k));
      if (t_.page_table) TW_RETURN_IF_ERROR(pages(b, used_k + p_.seqlen_new));
    }
    return Status();
  }

  Status positions(int64_t b, int64_t length_q, int64_t used_k) const {
    const int64_t rows = t_.rotary_cos->shape[0];
    int64_t base = used_k;
    if (t_.rotary_seqlens) {
      base = at(*t_.rotary_seqlens, b);
      TW_RETURN_IF_ERROR(in_range("rotary_seqlens", b, base, 0, rows, "rows of rotary_cos"));
    }
    const bool moving = p_.causal || p_.window_left >= 0 || p_.window_right >= 0;
    const int64_t count = std::max(p_.seqlen_new, moving ? length_q : std::min<int64_t>(length_q, 1));
    if (count > 0 && base + count > rows)
      return invalid("rotary_cos: ", rows, " rows: must be >= ", base + count, ", as batch entry ", b, " reaches position ", base + count - 1);
    return Status();
  }

  Status pages(int64_t b, int64_t used) const {
    const tw_tensor& table = *t_.page_table;
    const auto* row = static_cast<const int32_t*>(table.data) + b * table.stride[0];
    const int64_t count = used / p_.page_size + (used % p_.page_size != 0);
    for (int64_t n = 0; n < count; ++n)
      if (row[n * table.stride[1]] < 0 || row[n * table.stride[1]] >= p_.num_pages)
        return invalid("page_table[", b, ", ", n, "] ", row[n * table.stride[1]], ": must be in [0, ", p_.num_pages - 1, "], as ", used, " keys are in use");
    return Status();
  }

  const tw_problem& options_;
  const tw_tensors& t_;
  tw_problem p_;
};

}  // namespace

Status describe(const tw_problem& options, const tw_tensors& tensors, tw_problem* problem) {
  return Describer(options, tensors).run(problem);
}

}  // namespace tilewise
