#include "cpu/query_rows.h"

#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "core/problem.h"

namespace tilewise {
namespace {

void zero_vector(const tw_tensor& x, int64_t offset, int64_t n) {
  const int64_t size = dtype_size(x.dtype);
  std::memset(static_cast<char*>(x.data) + offset * size, 0, static_cast<size_t>(n * size));
}

// Calls f(first, last) for each run of packed rows that lies in no sequence. `used(b)` gives [begin, end) of sequence b.
template <class Used, class F>
void each_gap(int64_t batch, int64_t total, Used&& used, F&& f) {
  int64_t at = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const auto [begin, end] = used(b);
    if (begin > at) f(at, begin);
    at = end;
  }
  if (total > at) f(at, total);
}

}  // namespace

void clear_unused_query_rows(const tw_problem& p, const tw_tensors& t, const tw_tensor& x, const tw_tensor* lse) {
  const float empty = -std::numeric_limits<float>::infinity();
  const int64_t columns = x.shape[x.ndim - 1];
  const auto clear = [&](const Sequence& s, int64_t i) {
    for (int64_t h = 0; h < p.num_heads_q; ++h) {
      zero_vector(x, query_offset(p, x, s, i, h), columns);
      if (lse != nullptr) static_cast<float*>(lse->data)[lse_offset(p, *lse, s, i, h)] = empty;
    }
  };
  if (p.q_layout == TW_PACKED) {
    const Sequence whole{};  // q_begin 0: row i is packed row i
    each_gap(p.batch, p.total_q, [&](int64_t b) {
      const Sequence s = sequence_of(p, t, b);
      return KeyRange{s.q_begin, s.q_begin + s.seqlen_q};
    }, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) clear(whole, i);
    });
    return;
  }
  if (t.seqused_q == nullptr) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, t, b);
    for (int64_t i = s.seqlen_q; i < p.seqlen_q; ++i) clear(s, i);
  }
}

void clear_unused_key_rows(const tw_problem& p, const tw_tensors& t, const tw_tensor& x) {
  const int64_t columns = x.shape[x.ndim - 1];
  const auto clear = [&](const Sequence& s, int64_t position) {
    for (int64_t h = 0; h < p.num_heads_k; ++h) zero_vector(x, key_offset(p, t, x, s, position, h), columns);
  };
  if (p.k_layout == TW_PACKED) {
    const Sequence whole{};
    each_gap(p.batch, p.total_k, [&](int64_t b) {
      const Sequence s = sequence_of(p, t, b);
      return KeyRange{s.k_begin, s.k_begin + s.seqlen_k};
    }, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; ++j) clear(whole, j);
    });
    return;
  }
  if (t.seqused_k == nullptr) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, t, b);
    for (int64_t j = s.seqlen_k; j < p.seqlen_k; ++j) clear(s, j);
  }
}

void write_dropout_mask(const tw_problem& p, const tw_tensors& t, const Dropout& dropout) {
  const tw_tensor& mask = *t.dropout_mask;
  auto* data = static_cast<uint8_t*>(mask.data);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, t, b);
    for (int64_t h = 0; h < p.num_heads_q; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        uint8_t* row = data + b * mask.stride[0] + h * mask.stride[1] + i * mask.stride[2];
        for (int64_t j = 0; j < p.seqlen_k; ++j)
          row[j * mask.stride[3]] = i < s.seqlen_q && j < s.seqlen_k && dropout.keep(b * p.num_heads_q + h, i, j);
      }
  }
}

}  // namespace tilewise
