// Dropout, softcap, ALiBi, bias and masks in backward_sm90: what takes the place of GradientSm90's pointwise steps in the kernels that
// have them.
//
// P^T goes two ways: with zeros where a pair is dropped into dV, and whole into dS. The second keeps the decision in its sign bits, which
// P has no other use for. delta is no column of the product as without options, since a dropped pair's dS is -P delta whatever its dP
// was: it is read from shared memory.
#pragma once
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/gradient_sm90.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

template <BackwardSm90Config C>
struct OptionsSm90 : GradientSm90<C> {
  using G = GradientSm90<C>;
  using typename G::T;
  using G::block, G::kA, G::kS, G::key_row, G::lane, G::p, G::shared, G::unpack, G::warp;
  static constexpr bool kGeneral = C.general();

  // Of a tile's elements of this thread. Pair n of operand registers: bit n % 16 of word n / 16 is its first query's, bit 16 + n % 16
  // its second's.
  struct State {
    uint32_t kept[kA / 16];
    DropoutHead head{0, 0, 0};  // from load_facts() to draw()
    DropoutHead::Part keys;
    uint32_t weights[kA];  // P, or P times the softcap's derivative; sign bits: dropped
  };
  __device__ __forceinline__ static const uint32_t (&for_gradients(const uint32_t (&)[kA], const State& state))[kA] { return state.weights; }

  // A question that the compiler cannot know to have been asked before: else it makes code of its own for each set of answers, products
  // included.
  __device__ __forceinline__ static bool asked(bool answer) {
    auto opaque = static_cast<uint32_t>(answer);
    asm volatile("" : "+r"(opaque));
    return opaque != 0;
  }

  // What a head's draws have in common, what a key brings to them (four pairs of neighbouring keys differ), and ALiBi's: found out
  // where head or keys change, and kept in shared memory, since registers are short between two tiles' draws. A warp has its own.
  struct Facts {
    DropoutHead head;
    DropoutHead::Part keys[4];
    float slope, shift;  // of ALiBi; where the warp's first key stands, seen from query 0
  };
  __device__ __forceinline__ Facts& facts() const {
    static_assert(sizeof(Facts) <= C.kFactBytes);
    return *static_cast<Facts*>(__cvta_shared_to_generic(shared.base + C.facts_offset() + (G::consumer * 4 + warp) * C.kFactBytes));
  }
  __device__ __forceinline__ void begin_head(const KeyBlock& keys, int head) const {
    const ScoreParams& score = p.backward.score;
    const uint4 seed = ptx::load_shared_16(shared.base + C.seed_offset());
    const DropoutHead draws(static_cast<uint64_t>(seed.y) << 32 | seed.x, static_cast<uint64_t>(seed.w) << 32 | seed.z,
                            static_cast<int64_t>(keys.b) * p.backward.sequence.num_heads_q + head);
    __syncwarp();
    if (lane < 4) facts().keys[lane] = draws.column_part(((keys.first_key + G::first_row() + warp * 16) >> 5) * 4 + lane);
    if (lane == 4) facts().head = draws;
    if (kGeneral && score.alibi && lane == 5) {
      facts().slope = (C.copies_bias() ? 1.f : kLog2E) * score.alibi[keys.b * score.alibi_batch + head * score.alibi_head];
      facts().shift = static_cast<float>(keys.s.seqlen_k - keys.s.seqlen_q - keys.first_key - G::first_row() - warp * 16);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_facts(State& state) const { state.head = facts().head, state.keys = facts().keys[lane >> 3]; }

  // Which elements of a tile of queries are kept. A draw is 16 queries by 32 keys, of which the lanes of two neighbouring keys need the same:
  // each makes the one for the query of its own parity, and they exchange the decisions, 16 in a register. Between products and
  // behind them, where registers leave room for that: in a loop behind the last product it takes 4 % longer, and fewer registers.
  __device__ __forceinline__ void draw(State& state, int tile) const {
    const Dropout& dropout = p.backward.score.dropout;
    if (kGeneral && !asked(dropout.active())) {
#pragma unroll
      for (int n = 0; n < kA / 16; ++n) state.kept[n] = 0xffffffffu;
      return;
    }
    int parity = lane >> 2 & 1;
    asm volatile("" : "+r"(parity));  // or what follows from it would be kept from tile to tile
    const bool odd = (warp & 1) != 0;  // the upper 16 of the 32 keys
#pragma unroll
    for (int word = 0; word < kA / 16; ++word) {
      uint32_t bits = 0;  // lower half: of the even key
#pragma unroll(kGeneral ? 1 : 4)
      for (int row = 0; row < 4; ++row) {
        const auto draw = state.head.draw(state.head.row_part((tile * (C.block_m / 16) + word * 4 + row) * 8 + 2 * (lane & 3) + parity), state.keys);
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // second eight queries, second eight keys
          const uint32_t numbers = odd ? numbers_of(draw, 2 + n % 2, n / 2) : numbers_of(draw, n % 2, n / 2);
          bits |= keep_mask(numbers, dropout) & 0x00010001u << (4 * row + n);
        }
      }
      const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, 4);
      state.kept[word] = __byte_perm(bits, other, parity ? 0x3276 : 0x5410);
    }
  }

  // Sign bits of the halves: the pair is kept.
  __device__ __forceinline__ static uint32_t kept_signs(const State& state, int n) { return state.kept[n / 16] << (15 - n % 16); }

  // lse or delta of this thread's queries of eight.
  __device__ __forceinline__ float2 load_pair(uint32_t s_scalars, int eight) const {
    return ptx::load_shared_8(s_scalars + (eight * 8 + 2 * (lane & 3)) * 4);
  }

  // From S to P's exponents of 2, of kColumns times eight queries from `column` on; slopes: the softcap's derivatives. Softcap, ALiBi and bias
  // each stand behind a branch that all take. Eight queries at a time, or the compiler would begin with so many at once that registers do
  // not suffice.
  static constexpr int kColumns = kGeneral ? 1 : kS / 4;
  template <bool kMasked>
  __device__ __forceinline__ void score(float (&y)[4 * kColumns], float (&slopes)[4 * kColumns], const float* x, const uint32_t (&visible)[2],
                                        int column, int i0, int head, uint32_t s_rows) const {
    const ScoreParams& score = p.backward.score;
    const int first = 2 * (lane & 3);  // this thread's first query of eight
    if (asked(score.softcap > 0)) {
      const float inward = score.scale / score.softcap, outward = score.softcap * kLog2E;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const float2 lse = load_pair(s_rows, column + n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float tangent = tanh_of<T>(x[4 * n + e] * inward);
          y[4 * n + e] = fmaf(tangent, outward, e % 2 ? -lse.y : -lse.x);
          slopes[4 * n + e] = fmaf(-tangent, tangent, 1.f);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const float2 lse = load_pair(s_rows, column + n);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[4 * n + e] = fmaf(x[4 * n + e], p.scale_log2, e % 2 ? -lse.y : -lse.x), slopes[4 * n + e] = 1.f;
      }
    }
    if (asked(score.alibi != nullptr)) {
      const float slope = facts().slope;
      const float distance = distance_of(i0 + first + column * 8);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) y[4 * n + e] -= slope * fabsf(distance + static_cast<float>(8 * n - 8 * (e / 2) + e % 2));
    }
    if constexpr (kMasked) {
      if (asked(score.bias != nullptr)) {
        const int i = i0 + first + column * 8;
        switch (score.bias_dtype) {
          case TW_FLOAT32: add_bias<float>(y, visible, column, i, head); break;
          case TW_FLOAT16: add_bias<ptx::float16>(y, visible, column, i, head); break;
          case TW_BFLOAT16: add_bias<ptx::bfloat16>(y, visible, column, i, head); break;
          default: add_bias<uint8_t>(y, visible, column, i, head); break;
        }
      }
    }
  }
  // Of a tile that comes next, into the second-level cache: a few elements at a time can be asked for when they are needed.
  __device__ __forceinline__ void prefetch_bias(const KeyBlock& keys, int head, int tile) const {
    if constexpr (kGeneral) {
      const ScoreParams& score = p.backward.score;
      if (!asked(score.bias != nullptr)) return;
      const int bytes = score.bias_dtype == TW_FLOAT32 ? 4 : score.bias_dtype == TW_BOOL ? 1 : 2, j = keys.first_key + G::first_row() + warp * 16;
#pragma unroll
      for (int row = 0; row < C.block_m; row += 32) {
        const int i = tile * C.block_m + row + lane;
        if (i < keys.s.seqlen_q && j < keys.s.seqlen_k)
          ptx::prefetch_l2(static_cast<const char*>(score.bias) +
                           bytes * (keys.b * score.bias_batch + head * score.bias_head + i * score.bias_row + j * score.bias_key));
      }
    }
  }
  // uint8_t: a boolean mask. Of query i on; only where a pair is visible by length and window.
  template <class B>
  __device__ __forceinline__ void add_bias(float (&y)[4 * kColumns], const uint32_t (&visible)[2], int column, int i, int head) const {
    const ScoreParams& score = p.backward.score;
    const B* bias = static_cast<const B*>(score.bias) + block->b * score.bias_batch + head * score.bias_head + i * score.bias_row +
                    (block->first_key + key_row(0)) * score.bias_key;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((visible[half] >> (2 * (column + n) + e) & 1) == 0) continue;
          const B value = bias[(8 * n + e) * score.bias_row + half * 8 * score.bias_key];
          float& to = y[4 * n + 2 * half + e];
          if constexpr (sizeof(B) == 1) to = value != 0 ? to : kMinusInf;
          else to = fmaf(ptx::to_float(value), kLog2E, to);
        }
  }

  // Of 2: the general kernel has it already.
  __device__ __forceinline__ float exponent(float score, float lse) const {
    if constexpr (kGeneral) return score;
    return C.lse_is_column() ? score * p.scale_log2 : fmaf(score, p.scale_log2, -lse);
  }

  // S^T to P^T. A pair whose P is zero, as that of one that is not seen is, counts as kept: its dP is then looked at, too.
  template <bool kMasked>
  __device__ __forceinline__ void weights(uint32_t (&a)[kA], State& state, const float (&x)[kS], int i0, int head, uint32_t s_rows) const {
    uint32_t visible[2] = {}, largest = 0;
    if constexpr (kMasked) G::see(visible, i0);
#pragma unroll
    for (int column = 0; column < kS / 4; column += kColumns) {
      float y[4 * kColumns], slopes[4 * kColumns];
      if constexpr (kGeneral) {
        if constexpr (kMasked)
#pragma unroll
          for (int n = 0; n < 4 * kColumns; ++n) largest = max(largest, __float_as_uint(x[4 * column + n]) & 0x7fffffffu);
        score<kMasked>(y, slopes, x + 4 * column, visible, column, i0, head, s_rows);
      }
#pragma unroll
      for (int n = column; n < column + kColumns; ++n) {
        float2 lse = make_float2(0.f, 0.f);
        if constexpr (!kGeneral && !C.lse_is_column()) lse = load_pair(s_rows, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t kept = kept_signs(state, 2 * n + half);
          float pair[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int element = 2 * half + e;
            pair[e] = ptx::exp2_approx(exponent(kGeneral ? y[4 * (n - column) + element] : x[4 * n + element], e ? lse.y : lse.x));
            if constexpr (kMasked) {
              const bool sees = (visible[half] >> (2 * n + e) & 1) != 0;
              if (!kGeneral) largest = max(largest, sees ? 0u : __float_as_uint(x[4 * n + element]) & 0x7fffffffu);
              pair[e] = sees ? pair[e] : 0.f;
              kept |= pair[e] != 0.f ? 0u : e ? 0x80000000u : 0x8000u;
            }
          }
          uint32_t both = ptx::pack<T>(pair[0], pair[1]);
          a[2 * n + half] = both & ptx::spread_signs(kept);
          if constexpr (kGeneral) {
            const float* const slope = slopes + 4 * (n - column) + 2 * half;
            both = ptx::pack<T>(pair[0] * slope[0], pair[1] * slope[1]);
          }
          state.weights[2 * n + half] = (both & 0x7fff7fffu) | (~kept & 0x80008000u);
        }
      }
    }
    if (kMasked && largest >= 0x7f800000u) G::tell_nonfinite();
  }
  // With a bias any pair may be hidden.
  __device__ __forceinline__ bool masked(int i0) const { return (kGeneral && asked(p.backward.score.bias != nullptr)) || G::masked(i0); }
  __device__ __forceinline__ void make_weights(uint32_t (&a)[kA], State& state, const float (&x)[kS], int i0, int head, uint32_t s_rows, uint32_t) const {
    if (masked(i0))
      weights<true>(a, state, x, i0, head, s_rows);
    else
      weights<false>(a, state, x, i0, head, s_rows);
  }

  // dP^T to dS^T for four operand registers, from register `at` on.
  template <bool kMasked>
  __device__ __forceinline__ void gradients4(uint32_t* a, const uint32_t* weights, const float* dp, uint32_t& largest, int at,
                                             uint32_t s_rows) const {
    const float scale = p.backward.score.dropout.scale;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 delta = load_pair(s_rows + C.delta_offset(), (at + n) / 2);
      const float2 weight = unpack(weights[n]);
      const float first = __float_as_int(weight.x) < 0 ? 0.f : dp[2 * n], second = __float_as_int(weight.y) < 0 ? 0.f : dp[2 * n + 1];
      a[n] = ptx::pack<T>(fabsf(weight.x) * fmaf(first, scale, -delta.x), fabsf(weight.y) * fmaf(second, scale, -delta.y));
      if constexpr (kMasked) largest = ptx::max_magnitude<T>(largest, a[n]);
    }
  }

  // dbias and dalibi of a tile, from its dS as dK and dQ take it. Not with softcap, whose dS is the gradient of another score.
  __device__ __forceinline__ void add_sums(const uint32_t (&a)[kA], int i0, int head) const {
    if constexpr (C.has_sums()) {
      add_dalibi(a, i0);
      if (asked(p.backward.dbias.sum != nullptr)) add_dbias(a, i0, head);
    }
  }
  __device__ __forceinline__ void add_dalibi(const uint32_t (&a)[kA], int i0) const {
    if (!asked(p.backward.dalibi_parts != nullptr)) return;
    float sum = 0.f;
    const float distance = distance_of(i0 + 2 * (lane & 3));
#pragma unroll
    for (int n = 0; n < kA; ++n) {
      const float2 gradient = unpack(a[n]);
      const int step = 8 * (n / 2) - 8 * (n % 2);
      sum -= gradient.x * fabsf(distance + static_cast<float>(step)) + gradient.y * fabsf(distance + static_cast<float>(step + 1));
    }
#pragma unroll
    for (int mask = 16; mask >= C.dalibi_lanes(); mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (C.dalibi_lanes() == 32 || lane < C.dalibi_lanes()) ptx::store_shared(dalibi_at(), __float_as_uint(ptx::load_shared_4(dalibi_at()) + sum));
  }
  __device__ __forceinline__ uint32_t dalibi_at() const {
    return shared.base + C.dalibi_offset() + ((G::consumer * 4 + warp) * C.dalibi_lanes() + lane % C.dalibi_lanes()) * 4;
  }
  __device__ __forceinline__ float distance_of(int i) const {  // of this thread's first key to query i
    return static_cast<float>(i - (lane >> 2)) + facts().shift;
  }
  // In integers, see DbiasSum.
  __device__ __forceinline__ void add_dbias(const uint32_t (&a)[kA], int i0, int head) const {
    const DbiasSum& dbias = p.backward.dbias;
    const float unit = ptx::load_shared_4(shared.base + C.unit_offset());
    uint32_t visible[2];
    G::see(visible, i0);
    const int64_t first = block->b * dbias.batch + head * dbias.head + (i0 + 2 * (lane & 3)) * dbias.row + (block->first_key + key_row(0)) * dbias.key;
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 gradient = unpack(a[2 * n + half]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((visible[half] >> (2 * n + e) & 1) == 0) continue;
          const float term = e ? gradient.y : gradient.x;
          const int64_t at = first + (8 * n + e) * dbias.row + half * 8 * dbias.key;
          if (isfinite(term))
            atomicAdd(reinterpret_cast<unsigned long long*>(dbias.sum) + at, static_cast<unsigned long long>(__float2ll_rn(term * unit)));
          else
            atomicOr(dbias.not_finite + at / 32, 1u << at % 32);
        }
      }
  }
  // This warp's part of a head's dalibi.
  __device__ __forceinline__ void end_head(int head) const {
    if constexpr (C.has_sums()) {
      if (!asked(p.backward.dalibi_parts != nullptr)) return;
      float sum = 0.f;
      if (C.dalibi_lanes() == 32 || lane < C.dalibi_lanes()) {
        sum = ptx::load_shared_4(dalibi_at());
        ptx::store_shared(dalibi_at(), 0u);
      }
#pragma unroll
      for (int mask = C.dalibi_lanes() / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      const int64_t part = (static_cast<int64_t>(block->b) * p.backward.sequence.num_heads_q + head) * p.backward.num_key_blocks + block->index;
      if (lane == 0) p.backward.dalibi_parts[part * C.kDalibiParts + G::consumer * 4 + warp] = sum;
    }
  }

  __device__ __forceinline__ void store_dv(const float (&dv)[G::kD], uint32_t to) const { G::store_dv(dv, to, p.backward.score.dropout.scale); }
};

}  // namespace tilewise::cuda
