#include "cli/standard.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "core/dtype.h"

namespace tilewise::cli {
namespace {

#define TW_INLINE inline __attribute__((always_inline))

constexpr int64_t kRows = 6;  // rows of the register tile

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// c[m, n] = a[m, depth] b[depth, n]; m a multiple of 6, n of the tile's width (4 vectors), so that no edge is left.
template <class Vector, int kVectors>
TW_INLINE void multiply(int64_t m, int64_t n, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                        float* c, int64_t ldc) {
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(float);
  for (int64_t j = 0; j < n; j += kVectors * kLanes)  // a panel of b stays in the cache for all rows
    for (int64_t i = 0; i < m; i += kRows) {
      Vector sum[kRows][kVectors] = {};
      for (int64_t x = 0; x < depth; ++x) {
        Vector row[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&row[v], b + x * ldb + j + v * kLanes, sizeof row[v]);
#pragma GCC unroll 6
        for (int64_t r = 0; r < kRows; ++r) {
          const float factor = a[(i + r) * lda + x];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sum[r][v] += factor * row[v];
        }
      }
#pragma GCC unroll 6
      for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          __builtin_memcpy(c + (i + r) * ldc + j + v * kLanes, &sum[r][v], sizeof sum[r][v]);
    }
}

TW_INLINE float exp_of(float x) {  // x <= 0; relative error below 2e-7, 0 below -87
  const float scaled = x * 1.44269504f;
  const float shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the integer part in the low bits
  const float r = (scaled - (shifted - 12582912.0f)) * 0.693147181f;
  const float poly =
      1 + r * (1 + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f + r * 0.00138888889f)))));
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - 0x4b400000;
  const float result = std::bit_cast<float>(std::bit_cast<int32_t>(poly) + (exponent << 23));
  return x < -87 ? 0 : result;
}

struct Head {  // one head's operands in float32, padded to whole tiles
  int64_t rows, seqlen_k, head_dim, head_dim_v;
  int64_t padded_rows, padded_k, padded_v;
  int64_t first_row, shift;  // causal: row i sees keys up to first_row + i + shift
  bool causal;
  float scale;
  std::vector<float> q, k, v, s, o;  // [rows, d], [d, sk], [sk, dv], [rows, sk], [rows, dv]
};

template <class Vector, int kVectors>
TW_INLINE void attend(Head& h) {
  multiply<Vector, kVectors>(h.padded_rows, h.padded_k, h.head_dim, h.q.data(), h.head_dim, h.k.data(), h.padded_k,
                             h.s.data(), h.padded_k);
  for (int64_t i = 0; i < h.rows; ++i) {
    float* s = h.s.data() + i * h.padded_k;
    const int64_t visible = h.causal ? std::clamp<int64_t>(h.first_row + i + h.shift + 1, 0, h.seqlen_k) : h.seqlen_k;
    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t j = 0; j < visible; ++j) max = std::max(max, s[j]);
    for (int64_t j = 0; j < visible; ++j) s[j] = exp_of((s[j] - max) * h.scale);
    for (int64_t j = 0; j < visible; ++j) sum += s[j];
    const float inverse = sum > 0 ? 1 / sum : 0;
    for (int64_t j = 0; j < visible; ++j) s[j] *= inverse;
    std::fill(s + visible, s + h.padded_k, 0.0f);
  }
  multiply<Vector, kVectors>(h.padded_rows, h.padded_v, h.seqlen_k, h.s.data(), h.padded_k, h.v.data(), h.padded_v,
                             h.o.data(), h.padded_v);
}

typedef float Vector16 __attribute__((vector_size(16)));
typedef float Vector32 __attribute__((vector_size(32)));
typedef float Vector64 __attribute__((vector_size(64)));

constexpr int64_t kTileColumns = 64;  // a multiple of every tile below

#if defined(__x86_64__)
__attribute__((target("avx512f,fma"))) void attend_avx512(Head& h) { attend<Vector64, 4>(h); }
__attribute__((target("avx2,fma"))) void attend_avx2(Head& h) { attend<Vector32, 2>(h); }
#endif
void attend_any(Head& h) { attend<Vector16, 2>(h); }

void attend_best(Head& h) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return attend_avx512(h);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return attend_avx2(h);
#endif
  attend_any(h);
}

float load(const tw_tensor& x, int64_t b, int64_t s, int64_t h, int64_t c) {
  const int64_t at = b * x.stride[0] + s * x.stride[1] + h * x.stride[2] + c;
  return x.dtype == TW_FLOAT32 ? static_cast<const float*>(x.data)[at]
                               : static_cast<float>(load_element(x.data, x.dtype, at));
}

}  // namespace

bool standard_takes(const tw_problem& p) {
  return p.pass == TW_FORWARD && p.q_layout == TW_DENSE && p.k_layout == TW_DENSE && p.dtype != TW_FLOAT64 &&
         p.window_left < 0 && p.window_right < 0 && p.softcap == 0 && p.dropout_p == 0 && p.rotary_dim == 0 &&
         (p.features & ~uint32_t{TW_HAS_LSE}) == 0 && !(p.softmax_scale <= 0);
}

void standard_attention(const tw_problem& p, const tw_tensors& t, float* o, int threads) {
  const int64_t heads = p.batch * p.num_heads_q;
  const int64_t pieces = heads > 0 ? std::max<int64_t>(1, (threads + heads - 1) / heads) : 1;  // of a head's rows
  const int64_t piece_rows = std::max<int64_t>(1, (p.seqlen_q + pieces - 1) / pieces);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    Head h;
    for (int64_t task; (task = next++) < heads * pieces;) {
      const int64_t b = task / pieces / p.num_heads_q, hq = task / pieces % p.num_heads_q;
      const int64_t hk = hq / (p.num_heads_q / p.num_heads_k);
      h.first_row = task % pieces * piece_rows;
      h.rows = std::min(piece_rows, p.seqlen_q - h.first_row);
      if (h.rows <= 0) continue;
      h.seqlen_k = p.seqlen_k, h.head_dim = p.head_dim, h.head_dim_v = p.head_dim_v;
      h.padded_rows = round_up(h.rows, kRows), h.padded_k = round_up(p.seqlen_k, kTileColumns),
      h.padded_v = round_up(p.head_dim_v, kTileColumns);
      h.causal = p.causal != 0, h.shift = p.seqlen_k - p.seqlen_q;
      h.scale = static_cast<float>(std::isnan(p.softmax_scale) ? 1 / std::sqrt(static_cast<double>(p.head_dim))
                                                               : p.softmax_scale);
      h.q.assign(static_cast<size_t>(h.padded_rows * h.head_dim), 0);
      h.k.assign(static_cast<size_t>(h.head_dim * h.padded_k), 0);
      h.v.assign(static_cast<size_t>(h.seqlen_k * h.padded_v), 0);
      h.s.resize(static_cast<size_t>(h.padded_rows * h.padded_k));
      h.o.resize(static_cast<size_t>(h.padded_rows * h.padded_v));
      for (int64_t i = 0; i < h.rows; ++i)
        for (int64_t c = 0; c < h.head_dim; ++c)
          h.q[static_cast<size_t>(i * h.head_dim + c)] = load(*t.q, b, h.first_row + i, hq, c);
      for (int64_t j = 0; j < h.seqlen_k; ++j) {
        for (int64_t c = 0; c < h.head_dim; ++c) h.k[static_cast<size_t>(c * h.padded_k + j)] = load(*t.k, b, j, hk, c);
        for (int64_t c = 0; c < h.head_dim_v; ++c)
          h.v[static_cast<size_t>(j * h.padded_v + c)] = load(*t.v, b, j, hk, c);
      }
      attend_best(h);
      for (int64_t i = 0; i < h.rows; ++i)
        std::copy_n(&h.o[static_cast<size_t>(i * h.padded_v)], h.head_dim_v,
                    o + ((b * p.seqlen_q + h.first_row + i) * p.num_heads_q + hq) * p.head_dim_v);
    }
  };
  std::vector<std::thread> pool;
  for (int n = 1; n < threads; ++n) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
}

}  // namespace tilewise::cli
