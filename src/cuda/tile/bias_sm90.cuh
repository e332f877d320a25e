// Bias and masks in backward_sm90 that the copy engine can read: what takes the place of OptionsSm90's pointwise steps in the kernels for
// them. (Others are read where they are needed, by the general kernel: a latency for every four scores.)
//
// A warp has 16 keys, so its part of a tile of bias is a strip that nobody else needs: it asks for that itself, a tile ahead, and waits for
// no other warp. ldmatrix.trans turns [queries, keys] into the rows of keys that S^T has.
//
// Scores are natural here, as the bias is, and not multiples of log2(e).
#pragma once
#include <type_traits>

#include "cuda/ptx/tma.cuh"
#include "cuda/tile/options_sm90.cuh"

namespace tilewise::cuda {

template <BackwardSm90Config C>
struct BiasSm90 : OptionsSm90<C> {
  using O = OptionsSm90<C>;
  using G = GradientSm90<C>;
  using typename G::T;
  using G::block, G::kA, G::kS, G::lane, G::p, G::shared, G::unpack, G::warp;
  using O::asked, O::load_pair;
  static constexpr int kChunks = C.bias_chunks();  // 16 queries each, of a tile
  static constexpr int kRow = 16;                  // elements of a query in a chunk: the warp's keys

  // lse of a tile and then delta, this thread's queries': read while products run, since reads wait behind those of the tensor cores. Above
  // head dim 128 there are no registers for that.
  static constexpr bool kReadsAhead = !C.split;
  struct State {
    float2 rows[kReadsAhead ? kS / 4 : 1];
  };
  __device__ __forceinline__ float2 row_pair(const State& state, int eight, uint32_t s_scalars) const {
    if constexpr (kReadsAhead) return state.rows[eight];
    else return load_pair(s_scalars, eight);
  }
  __device__ __forceinline__ static const uint32_t (&for_gradients(const uint32_t (&a)[kA], const State&))[kA] { return a; }
  __device__ __forceinline__ void load_lse(State& state, uint32_t s_rows) const {
#pragma unroll
    for (int n = 0; n < kS / 4; ++n) state.rows[n] = load_pair(s_rows, n);
  }
  __device__ __forceinline__ void load_delta(State& state, uint32_t s_rows) const { load_lse(state, s_rows + C.delta_offset()); }
  // No dropout here.
  __device__ __forceinline__ void begin_head(const KeyBlock& keys, int head) const {
    if (asked(p.backward.score.alibi != nullptr)) O::begin_head(keys, head);
  }
  __device__ __forceinline__ void load_facts(State&) const {}
  __device__ __forceinline__ void draw(State&, int) const {}
  __device__ __forceinline__ void prefetch_bias(const KeyBlock&, int, int) const {}

  // Anew each time: what follows from them would be kept from tile to tile, and registers are short.
  __device__ __forceinline__ static int anew(int number) {
    asm volatile("" : "+r"(number));
    return number;
  }
  __device__ __forceinline__ int own_lane() const { return anew(lane); }
  __device__ __forceinline__ int own_warp() const { return anew(G::consumer * 4 + warp); }
  __device__ __forceinline__ int dtype() const { return anew(p.backward.score.bias_dtype); }  // see asked()

  // ---- copies -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t strip() const { return shared.base + C.bias_offset() + own_warp() * C.strip_bytes(); }
  __device__ __forceinline__ uint32_t chunk_at(int slot) const { return strip() + slot * p.bias.chunk_bytes; }
  __device__ __forceinline__ bool rows_differ() const { return p.bias.chunk_bytes != 0; }
  // As the copy engine writes it, 16-byte pieces of a row change places with the row, so that eight rows of them lie in different banks:
  // "32-byte swizzle" of two pieces, "64-byte" of four.
  template <int kBytes>
  __device__ __forceinline__ static uint32_t piece_at(int query, int piece) {
    constexpr int kPieces = kBytes;  // of a row
    const int turned = kPieces == 4 ? query >> 1 & 3 : kPieces == 2 ? query >> 2 & 1 : 0;
    return query * (kPieces * 16) + ((piece ^ turned) << 4);
  }

  // Part 0 of a tile: as many chunks as have slots. Each further part takes the place of the one before. Beyond the tensor's rows and keys
  // zeros arrive.
  __device__ __forceinline__ void copy_part(const KeyBlock& keys, int head, int tile, int part) const {
    const int first = part * p.bias.part_rows, rows = min(p.bias.part_rows, C.block_m - first);
    const uint32_t full = shared.bias_full(own_warp(), part > 0), to = strip();
    const int key = keys.first_key + G::first_row() + warp * 16, b = keys.b;
    if (lane == 0) ptx::mbarrier_arrive_expect(full, rows * kRow * p.bias.bytes);
#pragma unroll 1
    for (int row = 0; row < rows; row += p.bias.box_rows)  // by all, or the compiler would no longer believe descriptors to be the same in all
      if (lane == 0) ptx::tma_load(to + row * kRow * p.bias.bytes, p.bias.map, full, {{key, tile * C.block_m + first + row, 0, head, b}});
    __syncwarp();
  }
  __device__ __forceinline__ void copy_bias(const KeyBlock& keys, int head, int tile) const { copy_part(keys, head, tile, 0); }
  // Can the next tile's be asked for as soon as this one's have been read? Not where dbias takes their place first.
  __device__ __forceinline__ bool copies_early() const { return asked(p.dbias.data == nullptr); }

  // In front of reading chunks from `first` on, in what step of this warpgroup: those of a part come together.
  template <int kBytes>
  __device__ __forceinline__ void wait_chunk(int first, uint32_t step) const {
    constexpr int kSlots = C.bias_slots(kBytes), kFollowing = (kChunks - 1) / kSlots;
    if (first % kSlots != 0) return;
    const int part = first / kSlots;
    if (part > 0 && !asked(rows_differ())) return;
    ptx::mbarrier_wait(shared.bias_full(uniform(own_warp()), part > 0), (part == 0 ? step : step * kFollowing + part - 1) & 1);
  }
  // Behind reading chunks [first, end): may the next part take their places?
  template <int kBytes>
  __device__ __forceinline__ void replace_chunks(int first, int end, int head, int tile) const {
    constexpr int kSlots = C.bias_slots(kBytes);
    const int next = first / kSlots + 1, count = min(kSlots, kChunks - next * kSlots);  // its chunks
    const int last = (next - 1) * kSlots + count - 1;                                   // whose place its last one takes
    if (next * kSlots >= kChunks || last < first || last >= end || !asked(rows_differ())) return;
    __syncwarp();  // all have read
    copy_part(*block, head, tile, next);
  }
  // How many chunks to read at once from `first` on.
  template <int kBytes>
  __device__ __forceinline__ static constexpr int group(int first, int most) {
    const int slots = C.bias_slots(kBytes), end = (first / slots + 1) * slots, left = (end < kChunks ? end : kChunks) - first;
    return left < most ? left : most;
  }

  // ---- P ------------------------------------------------------------------------------------------------------------

  // Of a chunk, as the accumulators have it: eight queries, keys, pairs of queries. Packed, and as floats.
  __device__ __forceinline__ void load_halves(uint32_t (&pairs)[4], int chunk) const {
    const int lane = own_lane();
    ptx::ldmatrix_x4_trans(pairs, chunk_at(chunk % C.bias_slots(2)) + piece_at<2>((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1));
  }
  __device__ __forceinline__ void load_floats(float (&bias)[8], int chunk) const {
    const int lane = own_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the keys
      const uint32_t from = chunk_at(chunk % C.bias_slots(4)) + piece_at<4>(2 * (lane & 3), (lane >> 4) + 2 * half) + (lane >> 2 & 3) * 4;
#pragma unroll
      for (int n = 0; n < 4; ++n)  // 8 and 1 queries on
        bias[n / 2 * 4 + 2 * half + n % 2] = ptx::load_shared_4(from + (n / 2 * 8 + n % 2) * 64);
    }
  }
  template <class B>
  __device__ __forceinline__ static void unpack_halves(float (&bias)[8], const uint32_t (&pairs)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 pair;
      if constexpr (__is_same(B, T)) pair = unpack(pairs[n]);
      else pair = ptx::unpack<B>(pairs[n]);
      bias[2 * n] = pair.x, bias[2 * n + 1] = pair.y;
    }
  }
  // A mask's tile at once: clears the bits of `visible` (GradientSm90::see()) of pairs that it hides.
  __device__ __forceinline__ void see_mask(uint32_t (&visible)[2], uint32_t step) const {
    wait_chunk<1>(0, step);
    const int lane = own_lane();
    // Read as pairs of keys: this lane gets keys 2 r and 2 r + 1 of two queries, and wants r and r + 8. A bit each first, in byte
    // 2 * (query) + (key), then a shuffle each from those who have the keys.
    uint32_t found[kS / 32] = {}, four[kS / 16][4];
#pragma unroll
    for (int n = 0; n < kS / 16; ++n) ptx::ldmatrix_x4_trans(four[n], chunk_at(2 * n + (lane >> 4)) + (lane & 15) * 16);
#pragma unroll
    for (int n = 0; n < kS / 16; ++n)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint32_t set = ((four[n][m] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four[n][m];  // the sign of each byte that is not 0
        found[n / 2] |= (set & 0x80808080u) >> (7 - (n % 2 * 4 + m));
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t seen = 0;
#pragma unroll
      for (int n = 0; n < kS / 32; ++n) {
        const uint32_t other = __shfl_sync(0xffffffffu, found[n], (lane & 3) + ((lane >> 3) + 4 * half) * 4) >> (lane & 4 ? 8 : 0);
        seen |= spread(other & 0xff, other >> 16 & 0xff) << (16 * n);
      }
      visible[half] &= seen;
    }
  }
  // Bits of two bytes, taking turns.
  __device__ __forceinline__ static uint32_t spread(uint32_t even, uint32_t odd) {
    uint32_t x = even | odd << 16;
    x = (x | x << 4) & 0x0f0f0f0fu;
    x = (x | x << 2) & 0x33333333u;
    x = (x | x << 1) & 0x55555555u;
    return (x | x >> 15) & 0xffffu;
  }
  // By length, window, and mask.
  __device__ __forceinline__ void see_all(uint32_t (&visible)[2], int i0, uint32_t step) const {
    if (G::masked(i0)) G::see(visible, i0);
    if (dtype() == TW_BOOL) see_mask(visible, step);
  }

  // S^T to P^T, with a bias of type B alone, or a mask (bool). Where a pair may be hidden, by length, window or mask (a bias of -inf is a sum, and
  // hides no NaN), every score is looked at. What a group of chunks needs is read from shared memory at once: each read by itself would wait
  // behind those of the tensor cores.
  template <bool kMasked, class B>
  __device__ __forceinline__ void weights(uint32_t (&a)[kA], const float (&x)[kS], int i0, int head, const State& state, uint32_t s_rows, uint32_t step) const {
    uint32_t visible[2] = {0xffffffffu, 0xffffffffu}, trap[2] = {};
    if constexpr (kMasked) see_all(visible, i0, step);
    weights_from<kMasked, B, 0>(a, x, visible, trap, i0, head, state, s_rows, step);
    if constexpr (kMasked) look(trap);
  }
  template <bool kMasked, class B, int kFirst>
  __device__ __forceinline__ void weights_from(uint32_t (&a)[kA], const float (&x)[kS], const uint32_t (&visible)[2], uint32_t (&trap)[2], int i0,
                                               int head, const State& state, uint32_t s_rows, uint32_t step) const {
    constexpr bool kFloat = sizeof(B) == 4, kBool = sizeof(B) == 1;
    constexpr int kCount = group<sizeof(B)>(kFirst, kFloat ? 1 : 4), kEnd = kFirst + kCount;
    const float scale = p.backward.score.scale;
    float floats[kFloat ? kCount : 1][8];
    uint32_t pairs[kCount][4];
    if constexpr (!kBool) {
      wait_chunk<sizeof(B)>(kFirst, step);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if constexpr (kFloat) load_floats(floats[n], kFirst + n);
        else load_halves(pairs[n], kFirst + n);
      }
      replace_chunks<sizeof(B)>(kFirst, kEnd, head, i0 / C.block_m);
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      float bias[8] = {};
      if constexpr (kFloat) {
#pragma unroll
        for (int n = 0; n < 8; ++n) bias[n] = floats[c][n];
      } else if constexpr (!kBool) {
        unpack_halves<B>(bias, pairs[c]);
      }
      const float2 lse[2] = {row_pair(state, 2 * (kFirst + c), s_rows), row_pair(state, 2 * (kFirst + c) + 1, s_rows)};
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // pairs of queries
        const int at = 4 * (kFirst + c) + n;
        const float2 minus = lse[n / 2];
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float s = x[2 * at + e];
          if constexpr (kMasked) trap[e] = ptx::add_zero_times<float>(__float_as_uint(s), trap[e]);
          if constexpr (kBool) pair[e] = fmaf(s, scale, e ? -minus.y : -minus.x);
          else pair[e] = fmaf(s, scale, bias[2 * n + e]) - (e ? minus.y : minus.x);
          pair[e] = ptx::exp2_approx(pair[e] * kLog2E);
          if constexpr (kMasked) pair[e] = (visible[n % 2] >> (2 * (at / 2) + e) & 1) != 0 ? pair[e] : 0.f;
        }
        a[at] = ptx::pack<T>(pair[0], pair[1]);
      }
    }
    if constexpr (kEnd < kChunks) weights_from<kMasked, B, kEnd>(a, x, visible, trap, i0, head, state, s_rows, step);
  }
  __device__ __forceinline__ void look(const uint32_t (&trap)[2]) const {
    if (ptx::has_nonfinite<float>(trap[0]) || ptx::has_nonfinite<float>(trap[1])) G::tell_nonfinite();
  }

  // With ALiBi beside it, or a bias in the other 16-bit type.
  __device__ __forceinline__ void weights_more(uint32_t (&a)[kA], const float (&x)[kS], int i0, int head, const State& state, uint32_t s_rows,
                                               uint32_t step) const {
    const ScoreParams& score = p.backward.score;
    const int tile = i0 / C.block_m;
    uint32_t visible[2] = {0xffffffffu, 0xffffffffu}, trap[2] = {};
    see_all(visible, i0, step);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float bias[8] = {};
      const int type = dtype();
      if (type == TW_FLOAT32) {
        wait_chunk<4>(chunk, step);
        load_floats(bias, chunk);
        replace_chunks<4>(chunk, chunk + 1, head, tile);
      } else if (type != TW_BOOL) {
        uint32_t pairs[4];
        wait_chunk<2>(chunk, step);
        load_halves(pairs, chunk);
        replace_chunks<2>(chunk, chunk + 1, head, tile);
        if (type == TW_FLOAT16) unpack_halves<ptx::float16>(bias, pairs);
        else unpack_halves<ptx::bfloat16>(bias, pairs);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = 4 * chunk + n;
        const float2 minus = row_pair(state, at / 2, s_rows);
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float s = x[2 * at + e];
          trap[e] = ptx::add_zero_times<float>(__float_as_uint(s), trap[e]);
          pair[e] = fmaf(s, score.scale, bias[2 * n + e]);
        }
        if (asked(score.alibi != nullptr)) {
          const float slope = O::facts().slope, distance = O::distance_of(i0 + at / 2 * 8 + 2 * (lane & 3) - at % 2 * 8);
#pragma unroll
          for (int e = 0; e < 2; ++e) pair[e] -= slope * fabsf(distance + static_cast<float>(e));
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          pair[e] = ptx::exp2_approx((pair[e] - (e ? minus.y : minus.x)) * kLog2E);
          pair[e] = (visible[at % 2] >> (at / 2 * 2 + e) & 1) != 0 ? pair[e] : 0.f;
        }
        a[at] = ptx::pack<T>(pair[0], pair[1]);
      }
    }
    look(trap);
  }
  __device__ __forceinline__ void make_weights(uint32_t (&a)[kA], const State& state, const float (&x)[kS], int i0, int head, uint32_t s_rows,
                                               uint32_t step) const {
    constexpr int kOther = __is_same(T, ptx::bfloat16) ? TW_FLOAT16 : TW_BFLOAT16;
    const int type = dtype();
    if (type == kOther || asked(p.backward.score.alibi != nullptr)) weights_more(a, x, i0, head, state, s_rows, step);
    else if (type == TW_BOOL) weights<true, bool>(a, x, i0, head, state, s_rows, step);
    else if (type == TW_FLOAT32 && G::masked(i0)) weights<true, float>(a, x, i0, head, state, s_rows, step);
    else if (type == TW_FLOAT32) weights<false, float>(a, x, i0, head, state, s_rows, step);
    else if (G::masked(i0)) weights<true, T>(a, x, i0, head, state, s_rows, step);
    else weights<false, T>(a, x, i0, head, state, s_rows, step);
  }

  // ---- dS -----------------------------------------------------------------------------------------------------------

  // dP^T to dS^T, every one of which is looked at. `weights_of`: four registers of P.
  template <class Weights>
  __device__ __forceinline__ void make_gradients(uint32_t (&a)[kA], const Weights& weights_of, const float (&dp)[kS], const State& state,
                                                 uint32_t s_rows) const {
    uint32_t largest = 0;
#pragma unroll
    for (int first = 0; first < kA; first += 4) {
      const uint4 weights = weights_of(first / 4);
      const uint32_t four[4] = {weights.x, weights.y, weights.z, weights.w};
      const float2 delta[2] = {row_pair(state, first / 2, s_rows + C.delta_offset()), row_pair(state, first / 2 + 1, s_rows + C.delta_offset())};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 weight = unpack(four[n]), minus = delta[n / 2];
        a[first + n] = ptx::pack<T>(weight.x * (dp[2 * (first + n)] - minus.x), weight.y * (dp[2 * (first + n) + 1] - minus.y));
        largest = ptx::max_magnitude<T>(largest, a[first + n]);
      }
    }
    if (ptx::has_nonfinite<T>(largest)) G::tell_nonfinite();
  }

  // ---- dbias --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void add_sums(const uint32_t (&a)[kA], int i0, int head) const {
    if constexpr (C.has_sums()) {
      O::add_dalibi(a, i0);
      if (asked(p.dbias.data != nullptr)) store_dbias(a, i0, head);
      else if (asked(p.backward.dbias.sum != nullptr)) O::add_dbias(a, i0, head);
    }
  }
  // dS of a tile as dK and dQ take it, where each element of dbias belongs to one pair: 16 bytes of a row at a time, turned in this warp's
  // strip, whose bias has been read.
  __device__ __forceinline__ void store_dbias(const uint32_t (&a)[kA], int i0, int head) const {
    const int lane = own_lane(), query = lane >> 1, piece = lane & 1;
    const uint32_t to = strip() + piece_at<2>((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1), from = strip() + piece_at<2>(query, piece);
    const int key = block->first_key + G::first_row() + warp * 16 + piece * 8;
    int64_t at = block->b * p.dbias.batch + head * p.dbias.head + static_cast<int64_t>(i0 + query) * p.dbias.seqlen_k + key;
#pragma unroll
    for (int first = 0; first < kChunks; first += 4) {
      if (first > 0) __syncwarp();  // all have read
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t* const chunk = a + 4 * (first + n);
        ptx::stmatrix_x4_trans(to + n * 512, chunk[0], chunk[1], chunk[2], chunk[3]);
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 4; ++n, at += 16 * static_cast<int64_t>(p.dbias.seqlen_k)) {
        const uint4 x = ptx::load_shared_16(from + n * 512);
        if (i0 + (first + n) * 16 + query >= block->s.seqlen_q || key >= p.dbias.seqlen_k) continue;
        if (p.dbias.dtype == (__is_same(T, ptx::bfloat16) ? TW_BFLOAT16 : TW_FLOAT16)) {
          __stcs(reinterpret_cast<uint4*>(static_cast<T*>(p.dbias.data) + at), x);
        } else {
          const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 y = unpack(pairs[e]);
            using Other = std::conditional_t<__is_same(T, ptx::bfloat16), ptx::float16, ptx::bfloat16>;
            if (p.dbias.dtype == TW_FLOAT32) __stcs(reinterpret_cast<float2*>(static_cast<float*>(p.dbias.data) + at + 2 * e), y);
            else __stcs(reinterpret_cast<uint32_t*>(static_cast<Other*>(p.dbias.data) + at + 2 * e), ptx::pack<Other>(y.x, y.y));
          }
        }
      }
    }
    ptx::fence_async_shared();  // what the copy engine writes next comes behind
    __syncwarp();
  }
};

template <BackwardSm90Config C>
struct PointwiseOf {
  using Type = OptionsSm90<C>;
};
template <BackwardSm90Config C>
  requires(C.plain())
struct PointwiseOf<C> {
  using Type = GradientSm90<C>;
};
template <BackwardSm90Config C>
  requires(C.copies_bias())
struct PointwiseOf<C> {
  using Type = BiasSm90<C>;
};
template <BackwardSm90Config C>
using PointwiseSm90 = typename PointwiseOf<C>::Type;

}  // namespace tilewise::cuda
