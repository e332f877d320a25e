// Sixteen query rows of one head by one warp, exactly: the row maximum before every exponential, and no NaN or infinity of
// a masked value let through. Operands go from global memory into the registers of mma.sync, without shared memory or a
// barrier: a warp can do this wherever it stands. It is for rows that a faster softmax could not do, so it is short.
//
// mma.sync sums over k in any order, so a lane takes neighbouring columns where the instruction's own layout has pairs: of
// 32 columns, 8 t .. 8 t + 7 of Q and K (t = lane % 4) and 4 g .. 4 g + 3 of V (g = lane / 4). O of a lane then has columns
// 8 t .. 8 t + 7.
#pragma once
#include "cuda/params.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

// kOptions: softcap, ALiBi, dropout, max_logit or pages may be asked for
template <class T, int kHeadDim, bool kOptions, bool kBias = false>
struct ExactRows {
  static constexpr int kKeys = 16;
  static constexpr int kSlices = kHeadDim / 32;  // of 32 columns

  const ForwardParams& p;
  const int head, first_row;  // head: of all batch entries
  int seqlen_q, seqlen_k;
  const T *kept_k, *kept_v;
  float o[kSlices][4][4];    // [slice][i][row g: column 8 t + i, 8 t + 4 + i; row g + 8: the same]
  float maximum[2], sum[2];  // of rows g, g + 8; sum: of this lane's keys

  __device__ __forceinline__ ExactRows(const ForwardParams& params, int head_of_batch, int row)
      : p(params), head(head_of_batch), first_row(row) {
    const DeviceSequence s = resolve(p.sequence, head / p.sequence.num_heads_q);
    seqlen_q = s.seqlen_q;
    seqlen_k = s.seqlen_k;
    kept_k = first_key(p.k);
    kept_v = first_key(p.v);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = kMinusInf;
      sum[half] = 0.f;
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[slice][i][e] = 0.f;
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int row(int half) const { return first_row + half * 8 + (lane() >> 2); }
  __device__ __forceinline__ bool sees(int half, int j) const {
    const Range keys = visible_keys(p.score, row(half), seqlen_q, seqlen_k);
    if constexpr (kBias)  // a mask hides; a bias of -inf is added
      if (p.score.bias_dtype == TW_BOOL && row(half) < seqlen_q && j >= keys.begin && j < keys.end) return bias(half, j) != kMinusInf;
    return row(half) < seqlen_q && j >= keys.begin && j < keys.end;
  }
  __device__ __forceinline__ float bias(int half, int j) const {  // of a pair that exists
    const int b = head / p.sequence.num_heads_q, h = head % p.sequence.num_heads_q;
    return load_bias(p.score, b * p.score.bias_batch + h * p.score.bias_head + row(half) * p.score.bias_row + j * p.score.bias_key);
  }

  // Key 0 of K or V, of the head's page 0 if paged. d 64: made anew where it is used, for the sake of registers.
  __device__ __forceinline__ const T* keys(const RowTensor& x, const T* kept) const {
    if constexpr (kHeadDim > 64) return kept;
    return first_key(x);
  }
  __device__ __forceinline__ const T* first_key(const RowTensor& x) const {
    const int b = head / p.sequence.num_heads_q, h = head % p.sequence.num_heads_q;
    if (kOptions && p.sequence.page_size > 0)
      return static_cast<const T*>(x.data) + h / (p.sequence.num_heads_q / p.sequence.num_heads_k) * x.head;
    return key_rows<const T>(x, p.sequence, resolve(p.sequence, b), h / (p.sequence.num_heads_q / p.sequence.num_heads_k));
  }

  // From there to key j.
  __device__ __forceinline__ int64_t key_offset(const RowTensor& x, int j) const {
    if constexpr (kOptions) {
      if (p.sequence.page_size > 0) {
        const int b = head / p.sequence.num_heads_q;
        DeviceSequence s{};
        s.leftpad = p.sequence.leftpad_k ? p.sequence.leftpad_k.at(b) : 0;
        return paged_row(x, p.sequence, s, b, j);
      }
    }
    return j * x.row;
  }

  // Eight columns of a row; zeros where there are none. volatile: a load that is moved up only costs registers.
  static __device__ __forceinline__ uint4 load(const T* row, int column, int columns, bool exists) {
    uint4 x = {0, 0, 0, 0};
    if (exists && column < columns)
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(row + column));
    return x;
  }

  // Logits of keys j0 .. j0 + 15 in natural units, -inf where a row does not see the key: x[n][2 half + e] is that of key
  // j0 + 8 n + 2 t + e.
  __device__ __forceinline__ void logits(float (&x)[2][4], int j0) const {
    const int g = lane() >> 2, t = lane() & 3, b = head / p.sequence.num_heads_q;
    const T* const q = query_rows<const T>(p.q, p.sequence, resolve(p.sequence, b), b, head % p.sequence.num_heads_q);
    const T* const k = keys(p.k, kept_k);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = 0.f;
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const int column = 32 * slice + 8 * t;
      const uint4 upper = load(q + row(0) * p.q.row, column, p.head_dim, row(0) < seqlen_q);
      const uint4 lower = load(q + row(1) * p.q.row, column, p.head_dim, row(1) < seqlen_q);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int j = j0 + 8 * n + g;
        const uint4 key = load(k + (j < seqlen_k ? key_offset(p.k, j) : 0), column, p.head_dim, j < seqlen_k);
        const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
        ptx::mma_m16n8k16<T>(x[n], first, key.x, key.y);
        ptx::mma_m16n8k16<T>(x[n], second, key.z, key.w);
      }
    }
    float slope = 0.f;
    if (kOptions && p.score.alibi)
      slope = p.score.alibi[b * p.score.alibi_batch + head % p.sequence.num_heads_q * p.score.alibi_head];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = j0 + 8 * n + 2 * t + (e & 1), distance = row(e >> 1) + seqlen_k - seqlen_q - j;
        float logit = x[n][e] * p.score.scale;
        if constexpr (kOptions) logit = capped(p.score, x[n][e]) - slope * fabsf(static_cast<float>(distance));
        x[n][e] = sees(e >> 1, j) ? logit : kMinusInf;
        if constexpr (kBias)
          if (x[n][e] != kMinusInf) x[n][e] += bias(e >> 1, j);
      }
  }

  // x becomes exp(x - maximum), after the maxima have been raised and what was computed against old ones scaled down.
  __device__ __forceinline__ void weights(float (&x)[2][4]) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = ptx::quad_max(fmaxf(fmaxf(x[0][2 * half], x[0][2 * half + 1]), fmaxf(x[1][2 * half], x[1][2 * half + 1])));
      const float now = fmaxf(maximum[half], largest);
      factor[half] = now == maximum[half] ? 1.f : ptx::exp2_approx((maximum[half] - now) * kLog2E);
      maximum[half] = now;
      sum[half] *= factor[half];
    }
    if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[slice][i][e] *= factor[e >> 1];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // The difference first: a product of a large logit is rounded to more than 1.
        const float difference = x[n][e] == kMinusInf ? kMinusInf : x[n][e] - maximum[e >> 1];
        x[n][e] = ptx::exp2_approx(difference * kLog2E);
        sum[e >> 1] += x[n][e];
      }
  }

  // Zeros for what dropout takes; the sums have it.
  __device__ __forceinline__ void drop(float (&x)[2][4], int j0) const {
    if constexpr (kOptions) {
      if (!p.score.dropout.active()) return;
      const Dropout dropout = resolve_dropout(p.score);
      const DropoutHead draws(dropout.seed, dropout.offset, head);
      const Draw draw = draws.draw(draws.row_part(first_row / 2 + (lane() >> 2)), draws.column_part(j0 / 32 * 4 + (lane() & 3)));
#pragma unroll
      for (int e = 0; e < 16; ++e)
        if (e / 8 == (j0 >> 4 & 1) && !dropout.keeps(Dropout::number(draw, e))) x[e / 4 % 2][e & 3] = 0.f;
    }
  }

  // Values of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9, as pairs of columns.
  __device__ __forceinline__ void load_values(uint32_t (&x)[4][2], const T* v, int j0, int slice) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int j = j0 + 2 * (lane() & 3) + (n & 1) + (n >> 1) * 8, column = 32 * slice + 4 * (lane() >> 2);
      x[n][0] = x[n][1] = 0;
      if (j < seqlen_k && column < p.head_dim_v)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[n][0]), "=r"(x[n][1]) : "l"(v + key_offset(p.v, j) + column));
    }
  }

  __device__ __forceinline__ bool any_nonfinite(int j0) const {
    const T* const v = keys(p.v, kept_v);
    bool found = false;
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t x[4][2];
      load_values(x, v, j0, slice);
#pragma unroll
      for (int n = 0; n < 8; ++n) found |= ptx::has_nonfinite<T>(x[n / 2][n % 2]);
    }
    return __any_sync(0xffffffffu, found);
  }

  // O += P V for 16 keys. One by one if zero weights must not meet values that are not finite: then a row takes over what
  // the keys that it sees add.
  __device__ __forceinline__ void add_values(const uint32_t (&weight)[4], int j0, bool one_by_one) {
    const T* const v = keys(p.v, kept_v);
#pragma unroll 1
    for (int key = 0; key < (one_by_one ? kKeys : 1); ++key) {
      const bool takes[2] = {!one_by_one || sees(0, j0 + key), !one_by_one || sees(1, j0 + key)};
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        uint32_t x[4][2];
        load_values(x, v, j0, slice);
        if (one_by_one) {
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
              if (2 * (lane() & 3) + (n & 1) + (n >> 1) * 8 != key) x[n][pair] = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int halves = i & 1 ? 0x7632 : 0x5410;  // upper or lower half of two words
          float added[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) added[e] = o[slice][i][e];
          ptx::mma_m16n8k16<T>(added, weight, __byte_perm(x[0][i / 2], x[1][i / 2], halves),
                               __byte_perm(x[2][i / 2], x[3][i / 2], halves));
#pragma unroll
          for (int e = 0; e < 4; ++e) o[slice][i][e] = takes[e >> 1] ? added[e] : o[slice][i][e];
        }
      }
    }
  }

  __device__ __forceinline__ void store() {
    const int b = head / p.sequence.num_heads_q, h = head % p.sequence.num_heads_q;
    const DeviceSequence s = resolve(p.sequence, b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row(half);
      float total = ptx::quad_sum(sum[half]), factor = 1.f;
      const bool used = i < s.seqlen_q;
      if (kOptions && p.max_logit && used && (lane() & 3) == 0 && (maximum[half] != kMinusInf || isnan(total)))
        ptx::atomic_max(p.max_logit + b * p.max_logit_batch + h * p.max_logit_head, isnan(total) ? total : maximum[half]);
      if (p.score.sink && used) {
        const float sink = p.score.sink[h * p.score.sink_head];
        if (sink > maximum[half]) {  // the larger one as reference, so that neither exponential overflows
          factor = ptx::exp2_approx((maximum[half] - sink) * kLog2E);
          maximum[half] = sink;
          total = total * factor + 1.f;
        } else if (sink != kMinusInf) {
          total += ptx::exp2_approx((sink - maximum[half]) * kLog2E);
        }
      }
      const bool empty = maximum[half] == kMinusInf && !isnan(total);
      float inverse = factor / total;
      if (kOptions && p.score.dropout.active()) inverse *= p.score.dropout.scale;
      if (i >= s.capacity_q) continue;
      if (p.lse && (lane() & 3) == 0)
        row_scalars(p.lse, p.sequence, s, b, h)[i * p.lse.row] = empty ? kMinusInf : maximum[half] + logf(total);
      T* const out = query_rows<T>(p.o, p.sequence, s, b, h) + i * p.o.row;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = 32 * slice + 8 * (lane() & 3);
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float low = o[slice][n % 2 * 2][2 * half + n / 2], high = o[slice][n % 2 * 2 + 1][2 * half + n / 2];
          x[n] = empty ? 0u : ptx::pack<T>(low * inverse, high * inverse);
        }
        if (column < p.head_dim_v) *reinterpret_cast<uint4*>(out + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int last_row = min(first_row + 15, seqlen_q - 1);
    // Bounds are computed anew every time: kernels of four consumer warpgroups have 112 registers.
    if (last_row >= first_row) {
      const auto keys_of = [&](int i) { return visible_keys(p.score, i, seqlen_q, seqlen_k); };
#pragma unroll 1
      for (int j0 = keys_of(first_row).begin / kKeys * kKeys; j0 < keys_of(last_row).end; j0 += kKeys) {
        float x[2][4];
        logits(x, j0);
        weights(x);
        drop(x, j0);
        const uint32_t weight[4] = {ptx::pack<T>(x[0][0], x[0][1]), ptx::pack<T>(x[0][2], x[0][3]), ptx::pack<T>(x[1][0], x[1][1]),
                                    ptx::pack<T>(x[1][2], x[1][3])};
        const bool masked = kBias || last_row < first_row + 15 || j0 < keys_of(last_row).begin || j0 + kKeys > keys_of(first_row).end;
        add_values(weight, j0, masked && any_nonfinite(j0));
      }
    }
    store();
  }
};

}  // namespace tilewise::cuda
