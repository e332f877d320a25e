// Where the rows of one batch entry lie: dense, packed, paged, cached, padded, resolved once per call.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "tilewise/tilewise.h"

namespace tilewise {

inline int64_t index_at(const tw_tensor* tensor, int64_t n) {  // element n of an int32 vector
  return static_cast<const int32_t*>(tensor->data)[n * tensor->stride[0]];
}

struct Sequence {
  int64_t batch;         // its number in the batch
  int64_t q_begin;       // packed: its first row in q; dense: 0
  int64_t seqlen_q;      // rows in use
  int64_t k_begin;       // packed: its first row in k
  int64_t seqlen_k;      // keys in use, appended ones included, left padding excluded
  int64_t leftpad;       // key j lies at position j + leftpad
  int64_t cache_row;     // dense: its row in k
  int64_t append_begin;  // position of the first appended key
};

inline Sequence sequence_of(const tw_problem& p, const tw_tensors& t, int64_t b) {
  Sequence s{b, 0, p.seqlen_q, 0, p.seqlen_k, 0, b, 0};
  if (p.q_layout == TW_PACKED) {
    s.q_begin = index_at(t.cu_seqlens_q, b);
    s.seqlen_q = index_at(t.cu_seqlens_q, b + 1) - s.q_begin;
  }
  if (t.seqused_q) s.seqlen_q = index_at(t.seqused_q, b);
  if (p.k_layout == TW_PACKED) {
    s.k_begin = index_at(t.cu_seqlens_k, b);
    s.seqlen_k = index_at(t.cu_seqlens_k, b + 1) - s.k_begin;
  }
  if (t.seqused_k) s.seqlen_k = index_at(t.seqused_k, b);
  if (t.cache_batch_idx) s.cache_row = index_at(t.cache_batch_idx, b);
  s.append_begin = s.seqlen_k;
  if (t.k_new) s.seqlen_k += p.seqlen_new;
  if (t.leftpad_k) {
    s.leftpad = index_at(t.leftpad_k, b);
    s.seqlen_k = s.seqlen_k > s.leftpad ? s.seqlen_k - s.leftpad : 0;
  }
  return s;
}

// Element offset of row `i` of head `h` in q, o, dout, dq.
inline int64_t query_offset(const tw_problem& p, const tw_tensor& x, const Sequence& s, int64_t i, int64_t h) {
  return p.q_layout == TW_PACKED ? (s.q_begin + i) * x.stride[0] + h * x.stride[1]
                                 : s.batch * x.stride[0] + i * x.stride[1] + h * x.stride[2];
}

// Element offset of row `i` of head `h` in lse, dlse: [b, hq, sq] or [hq, total_q].
inline int64_t lse_offset(const tw_problem& p, const tw_tensor& x, const Sequence& s, int64_t i, int64_t h) {
  return p.q_layout == TW_PACKED ? h * x.stride[0] + (s.q_begin + i) * x.stride[1]
                                 : s.batch * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}

// Element offset of the key at `position` (= j + leftpad) of head `h` in k, v, dk, dv.
inline int64_t key_offset(const tw_problem& p, const tw_tensors& t, const tw_tensor& x, const Sequence& s,
                          int64_t position, int64_t h) {
  switch (p.k_layout) {
    case TW_PACKED: return (s.k_begin + position) * x.stride[0] + h * x.stride[1];
    case TW_PAGED: {
      const tw_tensor& table = *t.page_table;
      const int64_t page = static_cast<const int32_t*>(
          table.data)[s.batch * table.stride[0] + position / p.page_size * table.stride[1]];
      return page * x.stride[0] + position % p.page_size * x.stride[1] + h * x.stride[2];
    }
    default: return s.cache_row * x.stride[0] + position * x.stride[1] + h * x.stride[2];
  }
}

// Element offset of (b, h, i, j) in bias or dbias; broadcast dimensions (size 1) do not move.
inline int64_t bias_offset(const tw_tensor& bias, int64_t b, int64_t h, int64_t i, int64_t j) {
  return (bias.shape[0] == 1 ? 0 : b * bias.stride[0]) + (bias.shape[1] == 1 ? 0 : h * bias.stride[1]) +
         (bias.shape[2] == 1 ? 0 : i * bias.stride[2]) + (bias.shape[3] == 1 ? 0 : j * bias.stride[3]);
}

// ALiBi slope of (b, h): [hq] or [b, hq].
inline int64_t alibi_offset(const tw_tensor& slopes, int64_t b, int64_t h) {
  return slopes.ndim == 1 ? h * slopes.stride[0] : b * slopes.stride[0] + h * slopes.stride[1];
}

}  // namespace tilewise
