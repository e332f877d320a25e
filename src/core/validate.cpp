// Options and shapes against each other. One sentence per rule: the argument, the value got, what is allowed.
#include "core/validate.h"

#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "core/problem.h"

namespace tilewise {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int32_t kMaxSplits = 256;

constexpr uint32_t kBothPasses = TW_HAS_BIAS | TW_HAS_ALIBI | TW_HAS_SINK | TW_HAS_RNG_STATE | TW_HAS_SEQUSED_Q | TW_HAS_SEQUSED_K;
constexpr uint32_t kForwardOnly = TW_HAS_LSE | TW_HAS_MAX_LOGIT | TW_HAS_DROPOUT_MASK | TW_HAS_CACHE_BATCH_IDX |
                                  TW_HAS_LEFTPAD_K | TW_HAS_ROTARY_SEQLENS;
constexpr uint32_t kBackwardOnly =
    TW_HAS_DLSE | TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV | TW_HAS_DBIAS | TW_HAS_DALIBI | TW_HAS_DSINK;

bool is_flag(int32_t value) { return value == 0 || value == 1; }

Status validate_options(const tw_problem& p) {
  if (p.pass != TW_FORWARD && p.pass != TW_BACKWARD)
    return invalid("pass ", p.pass, ": must be 0 (TW_FORWARD) or 1 (TW_BACKWARD)");
  if (!is_flag(p.causal)) return invalid("causal ", p.causal, ": must be 0 or 1");
  if (p.device != TW_CPU && p.device != TW_CUDA) return invalid("device ", p.device, ": must be 0 (TW_CPU) or 1 (TW_CUDA)");
  if (p.window_left < -1) return invalid("window_left ", p.window_left, ": must be >= -1 (-1 = unbounded)");
  if (p.window_right < -1) return invalid("window_right ", p.window_right, ": must be >= -1 (-1 = unbounded)");
  if (p.causal && p.window_right > 0)
    return invalid("window_right ", p.window_right, ": causal makes it 0; must be -1 or 0 with causal");
  if (std::isinf(p.softmax_scale)) return invalid("softmax_scale ", p.softmax_scale, ": must be finite, or NaN for 1 / sqrt(head_dim)");
  if (!std::isfinite(p.softcap) || p.softcap < 0) return invalid("softcap ", p.softcap, ": must be finite and >= 0 (0 = off)");
  if (!(p.dropout_p >= 0 && p.dropout_p < 1)) return invalid("dropout_p ", p.dropout_p, ": must be in [0, 1)");
  if (!is_flag(p.rotary_interleaved)) return invalid("rotary_interleaved ", p.rotary_interleaved, ": must be 0 or 1");
  if (!is_flag(p.deterministic)) return invalid("deterministic ", p.deterministic, ": must be 0 or 1");
  if (!is_flag(p.batch_invariant)) return invalid("batch_invariant ", p.batch_invariant, ": must be 0 or 1");
  if (p.num_splits < 0 || p.num_splits > kMaxSplits)
    return invalid("num_splits ", p.num_splits, ": must be in [0, ", kMaxSplits, "] (0 = the plan decides)");
  if (p.sm_margin < 0) return invalid("sm_margin ", p.sm_margin, ": must be >= 0");
  return Status();
}

Status validate_shapes(const tw_problem& p) {
  if (!is_float(p.dtype)) return invalid("dtype ", dtype_name(p.dtype), " (", p.dtype, "): must be f32, f16, bf16 or f64");
  if (p.q_layout != TW_DENSE && p.q_layout != TW_PACKED) return invalid("q_layout ", p.q_layout, ": must be 0 (TW_DENSE) or 1 (TW_PACKED)");
  if (p.k_layout < TW_DENSE || p.k_layout > TW_PAGED)
    return invalid("k_layout ", p.k_layout, ": must be 0 (TW_DENSE), 1 (TW_PACKED) or 2 (TW_PAGED)");
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"batch", p.batch},           {"seqlen_q", p.seqlen_q},     {"seqlen_k", p.seqlen_k},
               {"num_heads_q", p.num_heads_q}, {"num_heads_k", p.num_heads_k}, {"total_q", p.total_q},
               {"total_k", p.total_k},       {"num_pages", p.num_pages},   {"page_size", p.page_size},
               {"cache_batch", p.cache_batch}, {"seqlen_new", p.seqlen_new}, {"rotary_dim", p.rotary_dim}};
  for (const auto& size : sizes)
    if (size.value < 0) return invalid(size.name, " ", size.value, ": must be >= 0");
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim) return invalid("head_dim ", p.head_dim, ": must be in [1, ", kMaxHeadDim, "]");
  if (p.head_dim_v < 1 || p.head_dim_v > kMaxHeadDim)
    return invalid("head_dim_v ", p.head_dim_v, ": must be in [1, ", kMaxHeadDim, "]");
  if (p.num_heads_k == 0 ? p.num_heads_q != 0 : p.num_heads_q % p.num_heads_k != 0)
    return invalid("num_heads_q ", p.num_heads_q, ": must be a multiple of num_heads_k, which is ", p.num_heads_k);
  if (p.q_layout != TW_PACKED && p.total_q != 0) return invalid("total_q ", p.total_q, ": must be 0 for a dense q");
  if (p.k_layout != TW_PACKED && p.total_k != 0) return invalid("total_k ", p.total_k, ": must be 0 for a dense or paged k");
  if (p.k_layout == TW_PAGED && p.page_size == 0) return invalid("page_size 0: must be > 0 for a paged k");
  if (p.k_layout != TW_PAGED && p.page_size != 0) return invalid("page_size ", p.page_size, ": must be 0 unless k is paged");
  if (p.k_layout != TW_PAGED && p.num_pages != 0) return invalid("num_pages ", p.num_pages, ": must be 0 unless k is paged");
  if (p.k_layout != TW_DENSE && p.cache_batch != 0) return invalid("cache_batch ", p.cache_batch, ": must be 0 unless k is dense");
  return Status();
}

// One message per feature that needs something, or that the pass has no use for.
Status validate_features(const tw_problem& p) {
  const bool backward = p.pass == TW_BACKWARD;
  if (p.features & ~(kBothPasses | kForwardOnly | kBackwardOnly))
    return invalid("features ", p.features, ": has bits that are no tw_feature");
  if (!backward && (p.features & kBackwardOnly)) {
    const char* name = has(p, TW_HAS_DLSE)    ? "dlse"
                       : has(p, TW_HAS_DQ)    ? "dq"
                       : has(p, TW_HAS_DK)    ? "dk"
                       : has(p, TW_HAS_DV)    ? "dv"
                       : has(p, TW_HAS_DBIAS) ? "dbias"
                       : has(p, TW_HAS_DALIBI) ? "dalibi"
                                              : "dsink";
    return invalid(name, ": belongs to the backward pass, and this is forward");
  }
  if (backward) {
    const auto refuse = [](const char* name, const char* why) { return invalid(name, ": not in the backward pass: ", why); };
    if (has(p, TW_HAS_LSE)) return refuse("TW_HAS_LSE", "there lse is an input that is always needed");
    if (has(p, TW_HAS_MAX_LOGIT)) return refuse("max_logit", "it is an output of the forward pass");
    if (has(p, TW_HAS_DROPOUT_MASK)) return refuse("dropout_mask", "it is an output of the forward pass");
    if (p.k_layout == TW_PAGED) return refuse("page_table", "gradients need a dense or packed k");
    if (has(p, TW_HAS_CACHE_BATCH_IDX) || p.cache_batch != 0)
      return refuse("cache_batch_idx", "two entries of the batch could share a row of dk; gather k first");
    if (has(p, TW_HAS_LEFTPAD_K)) return refuse("leftpad_k", "gradients need a k without left padding; pack it with cu_seqlens_k");
    if (p.seqlen_new != 0) return refuse("k_new", "appending to the cache has no gradient");
    if (p.rotary_dim != 0) return refuse("rotary_cos", "rotate q and k outside, where the rotation has its gradient");
    if (has(p, TW_HAS_ROTARY_SEQLENS)) return refuse("rotary_seqlens", "rotate q and k outside, where the rotation has its gradient");
  }
  if (has(p, TW_HAS_BIAS)) {
    if (!is_float(p.bias_dtype) && p.bias_dtype != TW_BOOL)
      return invalid("bias: dtype ", dtype_name(p.bias_dtype), ": must be f32, f16, bf16, f64 (added) or bool (true = visible)");
    if (p.bias_dims & ~15) return invalid("bias_dims ", p.bias_dims, ": must be an or of tw_dim");
  }
  if (has(p, TW_HAS_ALIBI) && p.alibi_dims != TW_DIM_H && p.alibi_dims != (TW_DIM_B | TW_DIM_H))
    return invalid("alibi_dims ", p.alibi_dims, ": must be TW_DIM_H or TW_DIM_B | TW_DIM_H");
  if (has(p, TW_HAS_DBIAS) && !has(p, TW_HAS_BIAS)) return invalid("dbias: needs bias");
  if (has(p, TW_HAS_DBIAS) && p.bias_dtype == TW_BOOL) return invalid("dbias: bias is a bool mask, which has no gradient; must be float");
  if (has(p, TW_HAS_DALIBI) && !has(p, TW_HAS_ALIBI)) return invalid("dalibi: needs alibi_slopes");
  if (has(p, TW_HAS_DSINK) && !has(p, TW_HAS_SINK)) return invalid("dsink: needs sink");
  if (has(p, TW_HAS_DROPOUT_MASK) && p.dropout_p == 0) return invalid("dropout_mask: needs dropout_p > 0");
  return Status();
}

Status validate_cache(const tw_problem& p) {
  if (p.k_layout == TW_PACKED) {
    const auto refuse = [](const char* name) { return invalid(name, ": needs a dense or paged k, not a packed one"); };
    if (has(p, TW_HAS_LEFTPAD_K)) return refuse("leftpad_k");
    if (has(p, TW_HAS_CACHE_BATCH_IDX)) return refuse("cache_batch_idx");
    if (p.seqlen_new != 0) return refuse("k_new");
    if (p.rotary_dim != 0) return refuse("rotary_cos");
  }
  if (p.k_layout == TW_PAGED && has(p, TW_HAS_CACHE_BATCH_IDX))
    return invalid("cache_batch_idx: needs a dense k; with a paged one, permute the rows of page_table");
  if (p.cache_batch != 0 && p.cache_batch != p.batch && !has(p, TW_HAS_CACHE_BATCH_IDX))
    return invalid("cache_batch ", p.cache_batch, ": differs from batch ", p.batch, ", so that cache_batch_idx is needed");
  if (p.seqlen_new != 0 && !has(p, TW_HAS_SEQUSED_K)) return invalid("k_new: needs seqused_k, the place to append at");
  if (p.seqlen_new > p.seqlen_k) return invalid("k_new: seqlen_new ", p.seqlen_new, ": must be <= the capacity of k, which is ", p.seqlen_k);
  if (p.rotary_dim != 0) {
    if (p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim)
      return invalid("rotary_dim ", p.rotary_dim, ": must be even and <= head_dim, which is ", p.head_dim);
    if (p.seqlen_new == 0 && !has(p, TW_HAS_SEQUSED_K) && !has(p, TW_HAS_ROTARY_SEQLENS))
      return invalid("rotary_cos: needs k_new, seqused_k or rotary_seqlens, which tell the positions");
  } else {
    if (has(p, TW_HAS_ROTARY_SEQLENS)) return invalid("rotary_seqlens: needs rotary_cos and rotary_sin");
  }
  return Status();
}

// Bytes of every tensor must be countable in int64 (at 8 bytes an element).
Status validate_sizes(const tw_problem& p) {
  const auto fits = [](std::initializer_list<int64_t> factors) {
    int64_t product = 8;
    for (int64_t factor : factors)  // 0 counts as 1, so that the strides of an empty tensor fit as well
      if (__builtin_mul_overflow(product, factor > 0 ? factor : 1, &product)) return false;
    return true;
  };
  const int64_t width = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  const auto too_large = [&](const char* name) { return invalid(name, ": the product of its sizes overflows int64; problem \"", format(p), "\""); };
  if (!(p.q_layout == TW_PACKED ? fits({p.total_q, p.num_heads_q, width}) : fits({p.batch, p.seqlen_q, p.num_heads_q, width})))
    return too_large("q");
  const int64_t rows = p.cache_batch != 0 ? p.cache_batch : p.batch;
  if (!(p.k_layout == TW_PACKED  ? fits({p.total_k, p.num_heads_k, width})
        : p.k_layout == TW_PAGED ? fits({p.num_pages, p.page_size, p.num_heads_k, width})
                                 : fits({rows, p.seqlen_k, p.num_heads_k, width})))
    return too_large("k");
  if (!fits({p.k_layout == TW_PACKED ? 1 : p.batch, p.seqlen_k, p.num_heads_k, width})) return too_large("seqlen_k");
  if (!fits({p.batch, p.seqlen_new, p.num_heads_k, width})) return too_large("k_new");
  if (!fits({p.batch, p.num_heads_q, p.seqlen_q})) return too_large("lse");
  const auto pairs_fit = [&](int32_t dims) {
    return fits({dims & TW_DIM_B ? p.batch : 1, dims & TW_DIM_H ? p.num_heads_q : 1, dims & TW_DIM_Q ? p.seqlen_q : 1,
                 dims & TW_DIM_K ? p.seqlen_k : 1});
  };
  if (has(p, TW_HAS_BIAS) && !pairs_fit(p.bias_dims)) return too_large("bias");
  if (has(p, TW_HAS_DROPOUT_MASK) && !pairs_fit(15)) return too_large("dropout_mask");
  return Status();
}

}  // namespace

Status validate_problem(const tw_problem& p) {
  if (p.struct_size != sizeof p)
    return invalid("tw_problem.struct_size ", p.struct_size, ": must be ", sizeof p, "; call tw_problem_init first");
  TW_RETURN_IF_ERROR(validate_options(p));
  TW_RETURN_IF_ERROR(validate_shapes(p));
  TW_RETURN_IF_ERROR(validate_features(p));
  TW_RETURN_IF_ERROR(validate_cache(p));
  return validate_sizes(p);
}

}  // namespace tilewise
