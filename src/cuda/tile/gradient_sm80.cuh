// What a block of backward_sm80 does with a tile of queries apart from its products: the copies of Q, dO, lse and delta, the
// pointwise step from S and dP to P and dS under masks, options and dropout, and inf and NaN in what is masked.
#pragma once
#include "cuda/config_sm80.h"
#include "cuda/params.h"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/key_block.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

template <BackwardConfig C>
struct GradientSm80 {
  static_assert(C.valid());
  using T = typename ElementType<C.element>::Type;
  static constexpr bool kGeneral = C.kind == BackwardKind::kGeneral;
  static constexpr bool kDrops = C.kind == BackwardKind::kDropout;  // the general kernel asks at run time
  static constexpr int kSplit = C.column_split;
  static constexpr int kBlockM = C.block_m, kBlockN = C.block_n();
  static constexpr int kM = C.row_groups;                // groups of 16 keys per warp
  static constexpr int kN = kBlockM / 8 / kSplit;        // n8 tiles of S^T: queries
  static constexpr int kD = C.head_dim / 8 / kSplit;     // n8 tiles of dK, dV: columns
  static constexpr int kSteps = C.head_dim / 16;
  static constexpr bool kWide = sizeof(T) == 4;  // float32: long steps that need registers, so fewer of them at once
  static constexpr bool kSplits = C.split;
  static constexpr int kUnroll = kWide ? 1 : kSteps;
  static_assert((kN % 2 == 0 || (kSplits && kN == 1)) && kD % 2 == 0);
  using KCopy = TileCopy<T, kBlockN, C.head_dim, C.num_threads()>;
  using QCopy = TileCopy<T, kBlockM, C.head_dim, C.num_threads()>;
  static constexpr int kBytes = C.head_dim * static_cast<int>(sizeof(T));      // of a row of K, V, Q, dO
  static constexpr int kPairBytes = kBlockM * static_cast<int>(sizeof(T));     // of a row of P^T, dS^T [key, query]
  static constexpr int kTileQ = kBlockM * kBytes, kTileK = kBlockN * kBytes, kTilePair = kBlockN * kPairBytes;
  static constexpr int kPartQ = kSplits ? kTileQ / 2 : 0, kPartK = kSplits ? kTileK / 2 : 0, kPartPair = kSplits ? kTilePair / 2 : 0;
  // Bytes of a tile in shared memory: as it is, or of its three parts.
  TW_HOST_DEVICE static constexpr int in_shared(int tile) { return kSplits ? tile / 2 * 3 : tile; }

  const BackwardParams& p;
  int b, head_k, key_block;
  DeviceSequence s;
  int warp, lane;
  int group, first_tile, num_tiles;  // query heads per key head; tiles of queries that see the block
  float dbias_unit;                  // 2^exponent, see DbiasSum

  __device__ __forceinline__ int key_row(int m, int half) const {  // in the block
    return (warp / kSplit * kM + m) * 16 + half * 8 + (lane >> 2);
  }
  __device__ __forceinline__ int query_column(int n) const {  // in the tile; and its right neighbour
    return warp % kSplit * (kBlockM / kSplit) + n * 8 + 2 * (lane & 3);
  }

  __device__ __forceinline__ void load_queries(int head, int tile, uint32_t s_q, uint32_t s_do, uint32_t s_lse) const {
    const int i0 = tile * kBlockM;
    const T* q = query_rows<const T>(p.q, p.sequence, s, b, head);
    const T* dout = query_rows<const T>(p.dout, p.sequence, s, b, head);
    if (!kGeneral || p.aligned) {
      QCopy::template load<false>(s_q, q + i0 * p.q.row, p.q.row, s.seqlen_q - i0, p.head_dim);
      QCopy::template load<false>(s_do, dout + i0 * p.dout.row, p.dout.row, s.seqlen_q - i0, p.head_dim_v);
    } else {
      QCopy::load_rows(s_q, q, [&](int r) { return (i0 + r) * p.q.row; }, s.seqlen_q - i0, p.head_dim, false);
      QCopy::load_rows(s_do, dout, [&](int r) { return (i0 + r) * p.dout.row; }, s.seqlen_q - i0, p.head_dim_v, false);
    }
    load_row_scalars(head, tile, s_lse);
  }
  // Q or dO alone, where they arrive one after the other to be split.
  __device__ __forceinline__ void load_rows(const RowTensor& x, int head, int tile, uint32_t to, int cols) const {
    const int i0 = tile * kBlockM;
    const T* from = query_rows<const T>(x, p.sequence, s, b, head);
    if (!kGeneral || p.aligned)
      QCopy::template load<false>(to, from + i0 * x.row, x.row, s.seqlen_q - i0, cols);
    else
      QCopy::load_rows(to, from, [&](int r) { return (i0 + r) * x.row; }, s.seqlen_q - i0, cols, false);
  }
  __device__ __forceinline__ void load_row_scalars(int head, int tile, uint32_t s_lse) const {
    const int i0 = tile * kBlockM;
    const int64_t padded = head * p.padded_rows + padded_row(p.sequence, s.q_begin, b) + i0;
    if constexpr (kSplit == 2 || kWide) {  // four bytes a copy: d 128 2 % faster than with the leaner code
      for (int n = threadIdx.x; n < 2 * kBlockM; n += C.num_threads())
        ptx::cp_async_4(s_lse + n * 4, n < kBlockM ? p.lse_log2 + padded + n : p.delta + padded + n - kBlockM);
    } else {  // both arrays are padded and aligned
      constexpr int kChunks = kBlockM / 4;
      const int chunk = threadIdx.x;
      if (chunk < 2 * kChunks)
        ptx::cp_async_16(s_lse + chunk * 16, chunk < kChunks ? p.lse_log2 + padded + chunk * 4 : p.delta + padded + (chunk - kChunks) * 4);
    }
  }

  // Inf and NaN in K, Q and dO. The products dQ = dS K, dK = dS^T Q, dV = P^T dO run over whole tiles, and 0 * NaN of a
  // masked pair would reach rows that do not see each other. So the non-finite chunks of K, and those of Q and dO in
  // tiles with a masked pair, are zeros in shared memory, and the scores of their rows become NaN, which the visible
  // pairs carry into every gradient that they take part in. V needs no care: it only meets the masked product P * dP.
  __device__ __forceinline__ void restore_nonfinite(float (&x)[kM][kN][4], const uint32_t* key_marks,
                                                    const uint32_t* query_marks) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (key_marks[key_row(m, e >> 1)] | query_marks[query_column(n) + (e & 1)]) x[m][n][e] = __int_as_float(0x7fffffff);
  }

  // A dropped pair's P is 0, not NaN, but 0 * dO is NaN where the pair is visible, which zeros in place of dO do not show: notes the keys of
  // this block that see such a query, one bit each in `rows`.
  static constexpr uint32_t kBadQ = 1, kBadDout = 2;  // marks of queries
  __device__ __forceinline__ void note_nan_rows(uint32_t* rows, const uint32_t* query_marks, int i0, int head) const {
    for (int r = threadIdx.x; r < kBlockN; r += C.num_threads()) {
      const int j = key_block * kBlockN + r;
      const Range queries = visible_queries(p.score, j, s.seqlen_q, s.seqlen_k);
#pragma unroll 1
      for (int i = max(i0, queries.begin); i < min(i0 + kBlockM, queries.end); ++i)
        if ((query_marks[i - i0] & kBadDout) != 0 && visible(p.score, score_row(p.score, s, b, head, i), j)) atomicOr(rows + r / 32, 1u << r % 32);
    }
  }

  // The numbers of dropout for this thread's keys and queries i, i + 1 (i even) and i + 8, i + 9. Draws belong to rows of queries; here keys
  // are rows, so of the two draws that a thread needs it makes the one of its own parity of key, and keeps the halves of that parity. The
  // others it gives to the lane of the neighbouring key, which has made the other one.
  struct Numbers {
    uint32_t own[kM], other[kM];  // words of 32 keys, 16 at a time: key group of 8 in the half
    uint32_t swap;                // `own` is of query i + 1

    // Of a pair of queries and key (m, half): those of a Dropout::number each.
    __device__ __forceinline__ uint32_t at(bool second_rows, int m, int half) const {
      const uint32_t selector = second_rows ? (half ? 0x6521 : 0x4703) : (half ? 0x7632 : 0x5410);
      return __byte_perm(own[m], other[m], selector ^ swap);
    }
  };
  // What of the draws is fixed for this thread's keys and a head.
  struct Draws {
    DropoutHead head;
    DropoutHead::Part keys;
  };
  __device__ __forceinline__ Draws draws_of_keys(const Dropout& dropout, int head) const {
    Draws draws{DropoutHead(dropout.seed, dropout.offset, static_cast<int64_t>(b) * p.sequence.num_heads_q + head), {}};
    draws.keys = draws.head.column_part(((key_block * kBlockN + key_row(0, 0)) >> 5) * 4 + (lane >> 3));
    return draws;
  }
  __device__ __forceinline__ Numbers draw_numbers(const Draws& draws, int i) const {
    static_assert(kM <= 2);  // one block of 32 columns
    const int parity = lane >> 2 & 1;
    const Draw draw = draws.head.draw(draws.head.row_part((i >> 4) * 8 + (i & 7) + parity), draws.keys);
    Numbers numbers;
    numbers.swap = parity ? 0x4444 : 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t first = draw.word[2 * m], second = draw.word[2 * m + 1];
      if (kM == 1 && (key_block * (kBlockN / 16) + warp / kSplit) % 2 == 1) first = draw.word[2], second = draw.word[3];
      numbers.own[m] = __byte_perm(first, second, parity ? 0x7632 : 0x5410);
      numbers.other[m] = __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, parity ? 0x5410 : 0x7632), 4);
    }
    return numbers;
  }
  // Are these queries rows g + 8 of the draws?
  __device__ __forceinline__ static bool second_rows(int i, int n) { return kN == 1 ? (i >> 3 & 1) != 0 : n % 2 == 1; }

  // x: S^T becomes P^T (dropped and scaled, as dV wants it); dp: dP^T becomes dS^T, the gradient of scale * (q . k).
  // Masked: zero where a query does not see a key. Not by a product: dP of such a pair may be NaN.
  __device__ __forceinline__ void pointwise(float (&x)[kM][kN][4], float (&dp)[kM][kN][4], uint32_t s_lse, bool masked, int i0,
                                            const Dropout& dropout, const Draws& draws) const {
    const float c = p.score.scale_log2;
    Range queries[kM][2];
    if (masked) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          queries[m][half] = visible_queries(p.score, key_block * kBlockN + key_row(m, half), s.seqlen_q, s.seqlen_k);
          queries[m][half].begin -= i0 + query_column(0);
          queries[m][half].end -= i0 + query_column(0);
        }
    }
    Numbers numbers;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 lse = ptx::load_shared_8(s_lse + query_column(n) * 4);
      const float2 delta = ptx::load_shared_8(s_lse + (kBlockM + query_column(n)) * 4);
      if (kDrops && n % 2 == 0) numbers = draw_numbers(draws, i0 + query_column(n));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[m][n][e] = ptx::exp2_approx(fmaf(x[m][n][e], c, e & 1 ? -lse.y : -lse.x));
          if constexpr (kDrops) {  // 1 / (1 - p) comes at the end, into dV, dK and dQ; delta carries 1 - p
            const KeptPair pair = kept_pair(numbers.at(second_rows(i0 + query_column(n), n), m, e >> 1), dropout);
            const float without = x[m][n][e] * -(e & 1 ? delta.y : delta.x);
            const bool kept = e & 1 ? pair.high : pair.low;
            dp[m][n][e] = kept ? fmaf(x[m][n][e], dp[m][n][e], without) : without;
            if (!kept) x[m][n][e] = 0.f;
          } else {
            dp[m][n][e] = x[m][n][e] * (dp[m][n][e] - (e & 1 ? delta.y : delta.x));
          }
          if (masked && (n * 8 + (e & 1) < queries[m][e >> 1].begin || n * 8 + (e & 1) >= queries[m][e >> 1].end))
            x[m][n][e] = dp[m][n][e] = 0.f;
        }
    }
  }

  // The same zeros afterwards.
  __device__ __forceinline__ void mask(float (&x)[kM][kN][4], float (&dp)[kM][kN][4], int i0) const {
    // With a mask to the right alone, and whole tiles, the first query of a key says it all.
    const bool first_only = p.score.window_left < 0 && i0 + kBlockM <= s.seqlen_q && key_block * kBlockN + kBlockN <= s.seqlen_k;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Range queries = visible_queries(p.score, key_block * kBlockN + key_row(m, half), s.seqlen_q, s.seqlen_k);
        const int begin = queries.begin - i0 - query_column(0), end = queries.end - i0 - query_column(0);
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (n * 8 + e < begin) x[m][n][2 * half + e] = dp[m][n][2 * half + e] = 0.f;
        if (first_only) continue;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (n * 8 + e >= end) x[m][n][2 * half + e] = dp[m][n][2 * half + e] = 0.f;
      }
  }

  __device__ __forceinline__ void add_dbias(int64_t at, float term) const {
    if (isfinite(term))
      atomicAdd(reinterpret_cast<unsigned long long*>(p.dbias.sum) + at,
                static_cast<unsigned long long>(__float2ll_rn(term * dbias_unit)));
    else
      atomicOr(p.dbias.not_finite + at / 32, 1u << at % 32);
  }

  // The same with every option. Returns this thread's part of dalibi.
  __device__ __forceinline__ float pointwise_general(float (&x)[kM][kN][4], float (&dp)[kM][kN][4], uint32_t s_lse, int i0,
                                                     int head, const Dropout& dropout) const {
    const ScoreParams& score = p.score;
    const bool drops = dropout.active();
    const float slope = score.alibi ? score.alibi[b * score.alibi_batch + head * score.alibi_head] : 0.f;
    const int64_t bias_base = b * score.bias_batch + head * score.bias_head;
    const int64_t dbias_base = b * p.dbias.batch + head * p.dbias.head;
    const float inverse_cap = score.softcap > 0 ? 1.f / score.softcap : 0.f;
    const int j0 = key_block * kBlockN;
    float dalibi = 0.f;
    Range queries[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        queries[m][half] = visible_queries(score, j0 + key_row(m, half), s.seqlen_q, s.seqlen_k);
    Draws draws{DropoutHead(0, 0, 0), {}};
    if (drops) draws = draws_of_keys(dropout, head);
    Numbers numbers;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 lse = ptx::load_shared_8(s_lse + query_column(n) * 4);
      const float2 delta = ptx::load_shared_8(s_lse + (kBlockM + query_column(n)) * 4);
      if (drops && n % 2 == 0) numbers = draw_numbers(draws, i0 + query_column(n));
      float biases[kM][4] = {};
      if (score.bias)
        with_bias(score, [&](const auto* bias) {
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = i0 + query_column(n) + (e & 1), j = j0 + key_row(m, e >> 1);
              if (i < s.seqlen_q && j < s.seqlen_k) biases[m][e] = bias_of(bias[bias_base + i * score.bias_row + j * score.bias_key]);
            }
        });
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e >> 1, column = e & 1;
          const int i = i0 + query_column(n) + column, j = j0 + key_row(m, half);
          bool sees = i >= queries[m][half].begin && i < queries[m][half].end;
          float logit = x[m][n][e] * score.scale, derivative = 1.f;
          if (score.softcap > 0) {
            const float tangent = tanh_of<T>(logit * inverse_cap);
            logit = score.softcap * tangent;
            derivative = 1.f - tangent * tangent;
          }
          const float distance = fabsf(static_cast<float>(i + s.seqlen_k - s.seqlen_q - j));
          if (score.alibi) logit -= slope * distance;
          if (score.bias) {
            sees = sees && (score.bias_dtype != TW_BOOL || biases[m][e] != kMinusInf);
            logit += biases[m][e];
          }
          const float probability = ptx::exp2_approx(fmaf(logit, kLog2E, column ? -lse.y : -lse.x));
          float dropped = probability, change = dp[m][n][e];  // P and dP after dropout
          if (drops) {
            const KeptPair pair = kept_pair(numbers.at(second_rows(i0 + query_column(n), n), m, half), dropout);
            const bool kept = column ? pair.high : pair.low;
            dropped = kept ? probability * dropout.scale : 0.f;
            change = kept ? change * dropout.scale : 0.f;
          }
          const float gradient = sees ? probability * (change - (column ? delta.y : delta.x)) : 0.f;
          if (p.dbias.sum && sees) add_dbias(dbias_base + i * p.dbias.row + j * p.dbias.key, gradient);
          if (p.dalibi_parts) dalibi -= gradient * distance;
          x[m][n][e] = sees ? dropped : 0.f;
          dp[m][n][e] = sees ? gradient * derivative : 0.f;
        }
    }
    return dalibi;
  }
};

}  // namespace tilewise::cuda
