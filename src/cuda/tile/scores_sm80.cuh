// Between the products of forward_sm80: where a thread's rows are, and what becomes of a tile of S, in registers, on its way to the operand of
// P V: softcap, scale, ALiBi, bias, masks and dropout, and the pairs of P and of V that is not finite. The softmax: softmax_sm80.cuh.
#pragma once
#include "cuda/config_sm80.h"
#include "cuda/params.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/bias_tile.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

template <ForwardConfig C>
struct ScoresSm80 {
  using T = typename ElementType<C.element>::Type;
  static constexpr bool kGeneral = C.kind == ForwardKind::kGeneral || C.kind == ForwardKind::kFewRows;
  static constexpr bool kMayPack = kGeneral || sizeof(T) == 2;  // plain kernels never do; float32 of 256 columns ran 6 % slower for the question
  static constexpr bool kDrops = kGeneral || C.kind == ForwardKind::kDropout;
  static constexpr int kM = C.row_groups();      // row groups of 16 per warp
  static constexpr int kN = C.block_n / 8;       // n8 tiles of S
  static constexpr int kD = C.head_dim / 8;      // n8 tiles of O

  const ForwardParams& p;
  int b, head_k, first_head, first_row, split;  // first_head: of the packed heads; first_row: packed row
  DeviceSequence s;
  int warp, lane;
  uint32_t s_bias;  // tile of the bias; 0: there is none in shared memory
  bool natural;  // logits carry the scale already, as softcap, ALiBi, bias and a scale <= 0 need it

  // Packed row r of this block -> query and head.
  __device__ __forceinline__ int query(int r) const { return kGeneral && p.pack > 1 ? (first_row + r) / p.pack : first_row + r; }
  __device__ __forceinline__ int head(int r) const {
    return kGeneral && p.pack > 1 ? first_head + (first_row + r) % p.pack : first_head;
  }
  __device__ __forceinline__ int64_t query_offset(const RowTensor& x, int r) const {
    return query(r) * x.row + (head(r) - first_head) * x.head;
  }
  __device__ __forceinline__ int warp_row(int m, int half) const { return warp * kM * 16 + m * 16 + half * 8 + (lane >> 2); }

  // Softcap, scale, ALiBi and bias of a tile of S, in natural units.
  __device__ __forceinline__ void options(float (&x)[kM][kN][4], int j0) const {
    const ScoreParams& score = p.score;
    if (!natural) return;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] *= score.scale;
    if (score.softcap > 0) {
      const float inverse = 1.f / score.softcap;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][n][e] = score.softcap * tanh_of<T>(x[m][n][e] * inverse);
    }
    if (score.alibi)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row(m, half);
        const float slope = score.alibi[b * score.alibi_batch + head(r) * score.alibi_head];
        const float distance = static_cast<float>(query(r) + s.seqlen_k - s.seqlen_q - j0 - 2 * (lane & 3));
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) x[m][n][2 * half + e] -= slope * fabsf(distance - (n * 8 + e));
      }
    if (score.bias) with_bias(score, [&](const auto* bias) { add_bias(x, j0, bias); });
  }

  template <class B>
  __device__ __forceinline__ void add_bias(float (&x)[kM][kN][4], int j0, const B* bias) const {
    using Tile = BiasTile<C.block_m, C.block_n>;
    const ScoreParams& score = p.score;
    const int column = 2 * (lane & 3), pitch = Tile::one_row(score, p.pack) ? 0 : Tile::pitch(sizeof(B));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row(m, half);
        const auto add = [&](int n, int e, float value) {
          float& logit = x[m][n][2 * half + e];
          logit = sizeof(B) == 1 && value == kMinusInf ? kMinusInf : logit + value;  // what a boolean mask hides may be NaN
        };
        if (s_bias != 0) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const float2 pair = shared_bias_pair(s_bias + r * pitch + (n * 8 + column) * sizeof(B), bias);
            add(n, 0, pair.x), add(n, 1, pair.y);
          }
        } else {
          const B* row = bias + bias_offset(r) + (j0 + column) * score.bias_key;
          const int keys = query(r) < s.seqlen_q ? s.seqlen_k - j0 - column : 0;  // of other rows, anything: nobody reads them
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e < keys) add(n, e, bias_of(row[(n * 8 + e) * score.bias_key]));
        }
      }
  }
  __device__ __forceinline__ int64_t bias_offset(int r) const {
    return b * p.score.bias_batch + head(r) * p.score.bias_head + query(r) * p.score.bias_row;
  }
  __device__ __forceinline__ void load_bias_tile(int j0) const {
    if constexpr (kGeneral)
      if (s_bias != 0)
        BiasTile<C.block_m, C.block_n>::load(s_bias, p.score, p.pack, j0, s.seqlen_k - j0, C.num_threads(),
                                             [&](int r) { return query(r) < s.seqlen_q ? bias_offset(r) : int64_t{-1}; });
  }

  __device__ __forceinline__ void mask(float (&x)[kM][kN][4], int j0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Range keys = visible_keys(p.score, query(warp_row(m, half)), s.seqlen_q, s.seqlen_k);
        const int begin = keys.begin - j0 - 2 * (lane & 3), end = keys.end - j0 - 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (n * 8 + e < begin || n * 8 + e >= end) x[m][n][2 * half + e] = kMinusInf;
      }
  }

  // What of dropout's draws is fixed for this thread's rows. The general kernel, mostly without dropout, finds it out again for each draw.
  struct Draws {
    DropoutHead head;
    DropoutHead::Part rows[kM];  // or at row_words()
  };
  __device__ __forceinline__ static uint32_t row_words() {  // its address costs fewer registers than a copy of it
    extern __shared__ __align__(128) unsigned char shared[];
    return ptx::shared_address(shared) + C.row_words_offset() + ptx::thread_index() * 16;
  }
  __device__ __forceinline__ Draws draws_of_rows() const {
    const Dropout dropout = resolve_dropout(p.score);
    Draws draws{DropoutHead(dropout.seed, dropout.offset, static_cast<int64_t>(b) * p.sequence.num_heads_q + first_head), {}};
#pragma unroll
    for (int m = 0; m < kM; ++m) draws.rows[m] = draws.head.row_part((first_row / 16 + warp * kM + m) * 8 + (lane >> 2));
    draws.head = draws.head.from_column(lane & 3);
    if constexpr (C.shares_row_words()) {
      static_assert(kM <= 2);
      ptx::store_shared(row_words(), make_uint4(draws.rows[0].first, draws.rows[0].second, draws.rows[kM - 1].first, draws.rows[kM - 1].second));
    }
    return draws;
  }
  // The draws for this thread's rows and 32 keys.
  __device__ __forceinline__ void draw_keys(Draw (&drawn)[kM], int j0, const Draws& fixed) const {
    Draws draws = fixed;
    if constexpr (kGeneral) draws = draws_of_rows();
    if constexpr (C.shares_row_words()) {
      const uint4 words = ptx::load_shared_16(row_words());
      draws.rows[0] = {words.x, words.y};
      draws.rows[kM - 1] = {words.z, words.w};
    }
    const DropoutHead::Part keys = draws.head.column_part(j0 >> 3);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      drawn[m] = draws.head.draw(draws.rows[m], keys);
      // One after the other: side by side they take registers that the general kernel's loop has not, with dropout or without.
      if constexpr (kGeneral) __syncwarp();
    }
  }

  // The operand of 16 keys, with zeros for what dropout takes; the sums have it. float32: in x, too, see pair_at().
  __device__ __forceinline__ void operand_of_kept(OperandA<T> (&a)[kM], float (&x)[kM][kN][4], int step, const Draw (&drawn)[kM],
                                                  bool drops) const {
    const Dropout& dropout = p.score.dropout;
    if constexpr (sizeof(T) == 4) {
      if (drops)
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const KeptPair kept = kept_pair(numbers_of(drawn[m], n % 4, half), dropout);
              if (!kept.low) x[m][n][2 * half] = 0.f;
              if (!kept.high) x[m][n][2 * half + 1] = 0.f;
            }
    }
    operand_of<T>(a, x, step);
    if constexpr (sizeof(T) == 2) {
      if (drops)
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int quarter = 0; quarter < 4; ++quarter)
            a[m].x[quarter] &= keep_mask(numbers_of(drawn[m], (2 * step + quarter / 2) % 4, quarter % 2), dropout);
    }
  }

  // The probabilities of row (m, half) for the keys 2t and 2t + 1 of the eight that hold key j, from what went into P V. No
  // dynamic index.
  __device__ __forceinline__ static float2 pair_at(const OperandA<T> (&operand)[kN / 2][kM], const float (&x)[kM][kN][4], int m,
                                                   int half, int j) {
    uint32_t first = 0, second = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t here = -static_cast<uint32_t>(n == j / 8);
      if constexpr (sizeof(T) == 4) {
        first |= __float_as_uint(x[m][n][2 * half]) & here;
        second |= __float_as_uint(x[m][n][2 * half + 1]) & here;
      } else {
        first |= operand[n / 2][m].x[(n & 1) * 2 + half] & here;
      }
    }
    if constexpr (sizeof(T) == 4) return make_float2(__uint_as_float(first), __uint_as_float(second));
    else return ptx::unpack<T>(first);
  }

  // Adds p_ij v_j for the visible pairs of the chunks of V that remove_nonfinite() took out. Rare, so compact.
  __device__ __forceinline__ void add_nonfinite(const OperandA<T> (&operand)[kN / 2][kM], const float (&x)[kM][kN][4],
                                                float (&o)[kM][kD][4], int j0, const uint32_t* marks, const T* v_base) const {
#pragma unroll 1
    for (int j = 0; j < C.block_n; ++j) {
      const uint32_t mark = marks[j];
      if (mark == 0) continue;
      const T* v_row = v_base + (p.sequence.page_size > 0 ? paged_row(p.v, p.sequence, s, b, j0 + j) : (j0 + j) * p.v.row);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 both = pair_at(operand, x, m, half, j);
          const float weight = __shfl_sync(0xffffffffu, j & 1 ? both.y : both.x, (lane & ~3) | (j % 8) / 2);
          const int r = warp_row(m, half), i = query(r);
          if (i >= s.seqlen_q || !visible(p.score, score_row(p.score, s, b, head(r), i), j0 + j)) continue;
#pragma unroll
          for (int n = 0; n < kD; ++n)
            if (mark >> n & 1) {
              const int col = n * 8 + 2 * (lane & 3);
              if (col < p.head_dim_v) o[m][n][2 * half] += weight * ptx::to_float(v_row[col]);
              if (col + 1 < p.head_dim_v) o[m][n][2 * half + 1] += weight * ptx::to_float(v_row[col + 1]);
            }
        }
    }
  }
};

}  // namespace tilewise::cuda
