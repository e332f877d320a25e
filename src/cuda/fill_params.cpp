#include "cuda/fill_params.h"

#include <algorithm>

#include "core/dtype.h"

namespace tilewise::cuda {
namespace {

IndexVector index_vector(const tw_tensor* tensor) {
  if (tensor == nullptr) return {};
  return {static_cast<const int32_t*>(tensor->data), tensor->stride[0]};
}

// Bounds beyond which every key is visible become -1, so that the kernels' 32-bit sums cannot overflow.
int32_t clamp_window(int64_t bound, int64_t unbounded_from) {
  return bound < 0 || bound >= unbounded_from ? -1 : static_cast<int32_t>(bound);
}

}  // namespace

SequenceParams sequence_params(const tw_problem& p, const tw_tensors& t) {
  SequenceParams s = {};
  s.batch = static_cast<int32_t>(p.batch);
  s.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  s.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  s.seqlen_new = t.k_new ? static_cast<int32_t>(p.seqlen_new) : 0;
  s.num_heads_q = static_cast<int32_t>(p.num_heads_q);
  s.num_heads_k = static_cast<int32_t>(p.num_heads_k);
  s.total_q = p.total_q;
  s.total_k = p.total_k;
  s.packed_q = p.q_layout == TW_PACKED;
  s.packed_k = p.k_layout == TW_PACKED;
  s.page_size = p.k_layout == TW_PAGED ? static_cast<int32_t>(p.page_size) : 0;
  s.cu_seqlens_q = index_vector(t.cu_seqlens_q);
  s.cu_seqlens_k = index_vector(t.cu_seqlens_k);
  s.seqused_q = index_vector(t.seqused_q);
  s.seqused_k = index_vector(t.seqused_k);
  s.cache_batch_idx = index_vector(t.cache_batch_idx);
  s.leftpad_k = index_vector(t.leftpad_k);
  if (t.page_table) {
    s.page_table = static_cast<const int32_t*>(t.page_table->data);
    s.page_table_batch = t.page_table->stride[0];
    s.page_table_page = t.page_table->stride[1];
  }
  return s;
}

ScoreParams score_params(const tw_problem& p, const tw_tensors& t) {
  ScoreParams s = {};
  const double scale = softmax_scale_of(p);
  s.scale = static_cast<float>(scale);
  s.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  s.softcap = static_cast<float>(p.softcap);
  const Mask mask = mask_of(p);
  s.window_left = clamp_window(mask.left, p.seqlen_k + p.seqlen_new);
  s.window_right = clamp_window(mask.right, p.seqlen_q);
  if (t.bias) {
    s.bias = t.bias->data;
    s.bias_dtype = t.bias->dtype;
    s.bias_batch = broadcast_stride(*t.bias, 0);
    s.bias_head = broadcast_stride(*t.bias, 1);
    s.bias_row = broadcast_stride(*t.bias, 2);
    s.bias_key = broadcast_stride(*t.bias, 3);
  }
  if (t.alibi_slopes) {
    s.alibi = static_cast<const float*>(t.alibi_slopes->data);
    s.alibi_batch = t.alibi_slopes->ndim == 1 ? 0 : t.alibi_slopes->stride[0];
    s.alibi_head = t.alibi_slopes->stride[t.alibi_slopes->ndim - 1];
  }
  if (t.sink) {
    s.sink = static_cast<const float*>(t.sink->data);
    s.sink_head = t.sink->stride[0];
  }
  s.dropout = Dropout::make(p.dropout_p, p.dropout_seed, p.dropout_offset);
  if (t.rng_state && p.dropout_p > 0) {
    s.rng_state = static_cast<const int64_t*>(t.rng_state->data);
    s.rng_stride = t.rng_state->stride[0];
  }
  return s;
}

int64_t broadcast_stride(const tw_tensor& x, int dim) { return x.shape[dim] == 1 ? 0 : x.stride[dim]; }

RowTensor row_tensor(const tw_tensor& x) {
  if (x.ndim == 3) return {x.data, 0, x.stride[0], x.stride[1]};
  return {x.data, x.stride[0], x.stride[1], x.stride[2]};
}

RowScalar row_scalar(const tw_tensor* x) {
  if (x == nullptr) return {};
  auto* data = static_cast<float*>(x->data);
  if (x->ndim == 2) return {data, 0, x->stride[0], x->stride[1]};
  return {data, x->stride[0], x->stride[1], x->stride[2]};
}

bool rows_aligned(const tw_tensor& x) {
  const int64_t per_chunk = 16 / dtype_size(x.dtype);  // elements in 16 bytes
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0 || x.shape[x.ndim - 1] % per_chunk != 0) return false;
  for (int n = 0; n + 1 < x.ndim; ++n)
    if (x.shape[n] > 1 && x.stride[n] % per_chunk != 0) return false;
  return true;
}

bool bias_copies(const ScoreParams& s) {
  const auto aligned = [&](int64_t stride) { return stride * dtype_size(s.bias_dtype) % 16 == 0; };
  return s.bias != nullptr && s.bias_key == 1 && reinterpret_cast<uintptr_t>(s.bias) % 16 == 0 && aligned(s.bias_batch) && aligned(s.bias_head) &&
         aligned(s.bias_row);
}

int32_t heads_together(int64_t heads, double most) {
  if (heads <= 0) return 1;
  const auto size = static_cast<int64_t>(std::clamp(most, 1.0, static_cast<double>(heads)));
  const int64_t sections = (heads + size - 1) / size;
  return static_cast<int32_t>((heads + sections - 1) / sections);
}

Element element_of(int32_t dtype) {
  return dtype == TW_FLOAT16 ? Element::kFloat16 : dtype == TW_BFLOAT16 ? Element::kBfloat16 : Element::kFloat32;
}

}  // namespace tilewise::cuda
