#include "cpu/kv_append.h"

#include <cstring>

#include "core/dtype.h"

namespace tilewise {
namespace {

const char* element(const tw_tensor& x, int64_t offset) {
  return static_cast<const char*>(x.data) + offset * dtype_size(x.dtype);
}

// Pair n of the first rotary_dim elements turns by the angle of (position, n):
//   (x, y) -> (x cos - y sin, x sin + y cos).
// Pairs are neighbours (interleaved) or lie rotary_dim / 2 apart; elements from rotary_dim on stay. `store(c, value)`
// takes element c.
template <class Real, class Store>
void rotate(const tw_problem& p, const tw_tensors& t, const void* row, int32_t dtype, int64_t position, Store&& store) {
  const tw_tensor &cosines = *t.rotary_cos, &sines = *t.rotary_sin;
  const int64_t half = p.rotary_dim / 2;
  for (int64_t n = 0; n < half; ++n) {
    const int64_t first = p.rotary_interleaved ? 2 * n : n, second = p.rotary_interleaved ? 2 * n + 1 : n + half;
    const auto x = static_cast<Real>(load_element(row, dtype, first));
    const auto y = static_cast<Real>(load_element(row, dtype, second));
    const auto cosine = static_cast<Real>(
        load_element(cosines.data, cosines.dtype, position * cosines.stride[0] + n * cosines.stride[1]));
    const auto sine =
        static_cast<Real>(load_element(sines.data, sines.dtype, position * sines.stride[0] + n * sines.stride[1]));
    store(first, x * cosine - y * sine);
    store(second, x * sine + y * cosine);
  }
  for (int64_t c = 2 * half; c < p.head_dim; ++c) store(c, load_element(row, dtype, c));
}

template <class Store>
void rotate_row(const tw_problem& p, const tw_tensors& t, const void* row, int32_t dtype, int64_t position,
                Store&& store) {
  if (dtype == TW_FLOAT64)
    rotate<double>(p, t, row, dtype, position, store);
  else
    rotate<float>(p, t, row, dtype, position, store);
}

// Position of the first query and of the first new key.
int64_t rotary_base(const tw_tensors& t, const Sequence& s) {
  return t.rotary_seqlens ? index_at(t.rotary_seqlens, s.batch) : s.append_begin;
}

double round_to(int32_t dtype, double value) {
  alignas(double) char stored[sizeof(double)];
  store_element(stored, dtype, 0, value);
  return load_element(stored, dtype, 0);
}

template <class Out>
void query_row(const tw_problem& p, const tw_tensors& t, const Sequence& s, int64_t i, int64_t h, Out* out) {
  const void* row = element(*t.q, query_offset(p, *t.q, s, i, h));
  const int32_t dtype = t.q->dtype;
  if (t.rotary_cos == nullptr) {
    for (int64_t c = 0; c < p.head_dim; ++c) out[c] = static_cast<Out>(load_element(row, dtype, c));
    return;
  }
  // Queries that see all keys alike stand at one position; with a diagonal, row i stands i further.
  const Mask mask = mask_of(p);
  const int64_t position = rotary_base(t, s) + (mask.left >= 0 || mask.right >= 0 ? i : 0);
  rotate_row(p, t, row, dtype, position,
             [&](int64_t c, double value) { out[c] = static_cast<Out>(round_to(dtype, value)); });
}

}  // namespace

void append_kv(const tw_problem& p, const tw_tensors& t) {
  if (t.k_new == nullptr) return;
  const tw_tensor &k = *t.k, &v = *t.v, &k_new = *t.k_new, &v_new = *t.v_new;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, t, b);
    for (int64_t n = 0; n < p.seqlen_new; ++n)
      for (int64_t h = 0; h < p.num_heads_k; ++h) {
        const void* k_row = element(k_new, b * k_new.stride[0] + n * k_new.stride[1] + h * k_new.stride[2]);
        const void* v_row = element(v_new, b * v_new.stride[0] + n * v_new.stride[1] + h * v_new.stride[2]);
        const int64_t k_at = key_offset(p, t, k, s, s.append_begin + n, h);
        const int64_t v_at = key_offset(p, t, v, s, s.append_begin + n, h);
        if (t.rotary_cos)
          rotate_row(p, t, k_row, k_new.dtype, rotary_base(t, s) + n,
                     [&](int64_t c, double value) { store_element(k.data, k.dtype, k_at + c, value); });
        else  // bit for bit
          std::memcpy(const_cast<char*>(element(k, k_at)), k_row,
                      static_cast<size_t>(p.head_dim * dtype_size(k.dtype)));
        std::memcpy(const_cast<char*>(element(v, v_at)), v_row,
                    static_cast<size_t>(p.head_dim_v * dtype_size(v.dtype)));
      }
  }
}

void rotate_query_row(const tw_problem& p, const tw_tensors& t, const Sequence& s, int64_t i, int64_t h, float* out) {
  query_row(p, t, s, i, h, out);
}

void rotate_query_row(const tw_problem& p, const tw_tensors& t, const Sequence& s, int64_t i, int64_t h, double* out) {
  query_row(p, t, s, i, h, out);
}

}  // namespace tilewise
