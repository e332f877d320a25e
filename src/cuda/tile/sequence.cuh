// One batch entry on the device: core/sequence.h with the index vectors in device memory.
#pragma once
#include "core/mask.h"
#include "cuda/params.h"

namespace tilewise::cuda {

struct DeviceSequence {
  int64_t q_begin;   // packed: first row in q
  int64_t k_begin;   // packed: first row in k
  int64_t cache_row; // dense: row of the batch dimension of k
  int32_t capacity_q, seqlen_q;  // rows that exist; rows in use
  int32_t capacity_k, seqlen_k;  // the same for keys, left padding excluded from seqlen_k
  int32_t leftpad;
};

__device__ __forceinline__ DeviceSequence resolve(const SequenceParams& p, int b) {
  DeviceSequence s{0, 0, b, p.seqlen_q, p.seqlen_q, p.seqlen_k, p.seqlen_k, 0};
  if (p.packed_q) {
    s.q_begin = p.cu_seqlens_q.at(b);
    s.capacity_q = s.seqlen_q = p.cu_seqlens_q.at(b + 1) - static_cast<int32_t>(s.q_begin);
  }
  if (p.seqused_q) s.seqlen_q = p.seqused_q.at(b);
  if (p.packed_k) {
    s.k_begin = p.cu_seqlens_k.at(b);
    s.capacity_k = s.seqlen_k = p.cu_seqlens_k.at(b + 1) - static_cast<int32_t>(s.k_begin);
  }
  if (p.seqused_k) s.seqlen_k = p.seqused_k.at(b);
  s.seqlen_k += p.seqlen_new;
  if (p.cache_batch_idx) s.cache_row = p.cache_batch_idx.at(b);
  if (p.leftpad_k) {
    s.leftpad = p.leftpad_k.at(b);
    s.seqlen_k = s.seqlen_k > s.leftpad ? s.seqlen_k - s.leftpad : 0;
  }
  return s;
}

// Rows of q-like tensors: pointer to row 0 of head h.
template <class T>
__device__ __forceinline__ T* query_rows(const RowTensor& x, const SequenceParams& p, const DeviceSequence& s, int b,
                                         int h) {
  const int64_t offset = (p.packed_q ? s.q_begin * x.row : b * x.batch) + h * x.head;
  return static_cast<T*>(x.data) + offset;
}

// Rows of k-like tensors: pointer to key 0 (after left padding) of head h; not for paged tensors.
template <class T>
__device__ __forceinline__ T* key_rows(const RowTensor& x, const SequenceParams& p, const DeviceSequence& s, int h) {
  const int64_t offset = (p.packed_k ? s.k_begin * x.row : s.cache_row * x.batch) + s.leftpad * x.row + h * x.head;
  return static_cast<T*>(x.data) + offset;
}

// Element offset of key j of a paged tensor.
__device__ __forceinline__ int64_t paged_row(const RowTensor& x, const SequenceParams& p, const DeviceSequence& s, int b,
                                             int j) {
  const int position = j + s.leftpad;
  const int64_t page = p.page_table[b * p.page_table_batch + position / p.page_size * p.page_table_page];
  return page * x.batch + position % p.page_size * x.row;
}

__device__ __forceinline__ float* row_scalars(const RowScalar& x, const SequenceParams& p, const DeviceSequence& s, int b,
                                              int h) {
  return x.data + (p.packed_q ? s.q_begin * x.row : b * x.batch) + h * x.head;
}

struct Range {
  int begin, end;
};

// Keys that row i sees; 32-bit form of Mask::keys (the host clamps windows to the sequence lengths).
__device__ __forceinline__ Range visible_keys(const ScoreParams& p, int i, int seqlen_q, int seqlen_k) {
  const int diagonal = i + seqlen_k - seqlen_q;
  Range keys{0, seqlen_k};
  if (p.window_left >= 0) keys.begin = max(0, diagonal - p.window_left);
  if (p.window_right >= 0) keys.end = min(seqlen_k, diagonal + p.window_right + 1);
  keys.end = max(keys.end, keys.begin);
  return keys;
}

}  // namespace tilewise::cuda
