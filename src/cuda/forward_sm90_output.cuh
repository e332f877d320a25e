// The end of a tile in forward_sm90: from O, its sums and references in the registers of a consumer warpgroup to o and lse in memory, by the
// store warp, by these threads, as a part for another block that finishes the tile, or computed again.
#pragma once
#include "cuda/forward_sm90_shared.cuh"
#include "cuda/params_sm90.h"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/exact_rows.cuh"
#include "cuda/tile/panel_sm90.cuh"
#include "cuda/tile/softmax_sm90.cuh"

namespace tilewise::cuda {

template <ForwardSm90Config C>
struct OutputSm90 {
  using T = typename ElementType<C.element>::Type;
  static constexpr int kO = C.pv_columns() / 2;  // registers of O and, from the ones, of the sums
  static constexpr bool kSum = !C.ones();
  // Is the store warp told of a tile's O behind the products of the next step? Gains 1 to 2 % with few keys, and costs as much under a
  // causal mask, whose inner steps have no clock to spare.
  static constexpr bool kLate = C.whole() && C.store_warps();

  // Is all of a tile's end that needs no O over before O is there, lse and the vote, too? With a bias, registers are short.
  static constexpr bool kEarly = C.biased();

  const ForwardSm90Params& p;
  const SharedSm90<C> shared;
  unsigned char* const memory;
  const int consumer, warp, lane;  // warp of the warpgroup

  // Where the consumer stands. All of it here, in this order: with the rings beside the steps the compiler renames the registers of kWhole.
  float o[kO];
  RowStatistics rows;
  bool o_empty = true;  // the next product starts a tile: it does not add to what O holds
  int untold = -1;          // kLate: Work of a tile whose O is staged, until the store warp is told
  float untold_lse[2];
  bool told_last = false;   // the store warp knows that there is no more
  Ring<C.q_slots> q;
  Ring<C.stages> k, v;
  uint32_t o_parity = 1;

  __device__ __forceinline__ void release(uint32_t barrier) const {
    ptx::stress();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // Rows are counted in their head of the tile; several heads may share a tile.
  __device__ __forceinline__ int in_head(int row) const { return C.whole() ? row : row & ((1u << p.order.row_bits) - 1); }
  __device__ __forceinline__ int head_of_warp(const Work& w) const {
    return w.head + (C.whole() ? 0 : (consumer * 64 + warp * 16) >> p.order.row_bits);
  }
  __device__ __forceinline__ int row_of_warp() const { return in_head(consumer * 64 + warp * 16); }
  __device__ __forceinline__ int row_of_thread(int half) const { return row_of_warp() + half * 8 + (lane >> 2); }
  __device__ __forceinline__ int first_of_consumer() const { return in_head(consumer * 64); }  // its last one: 63 below, at most
  __device__ __forceinline__ int rows_of_consumer() const { return min(64, p.order.tile_rows); }
  __device__ __forceinline__ const Work& work(unsigned n) const { return *shared.work(memory, n); }

  // The end of a tile: o = O / sum, lse, and a note of rows to be computed again. What needs no O is done while the tensor
  // cores still work on it; one vote of the warp finds out whether anything is out of the ordinary. The warpgroup issues no
  // products from here to the next step, and the other one soon waits for it: 100 clocks are 1 % of a tile of 512 keys.
  struct Ending {
    uint32_t flags;
    float inverse[2];
    float lse[2];
  };
  static constexpr uint32_t kSees = 1;    // this thread's first row sees a key; its second one: kSees << 1
  static constexpr uint32_t kNoRows = 4;  // block_m reaches past the end
  static constexpr uint32_t kTail = 8;    // of a packed sequence: the next one's rows follow, a box would overwrite them
  static constexpr uint32_t kLook = 16;   // values may not be finite
  static constexpr uint32_t kAgain = 32;  // some row of the warp has to be computed again

  __device__ __forceinline__ Ending begin_ending(const Work& done, const RowStatistics& statistics) const {
    const ForwardParams& f = p.forward;
    Ending end;
    end.flags = kSees | kSees << 1 | (!C.whole() && p.check ? kLook : 0);
    if (!C.whole() && !done.plain) {
      const int first = done.first_row + first_of_consumer();
      end.flags = (first >= done.capacity_q ? kNoRows : 0) |
                  (f.sequence.packed_q && first + rows_of_consumer() > done.capacity_q ? kTail : 0) |
                  (p.check ? kLook : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = done.first_row + row_of_thread(half);
        const int diagonal = i + done.seqlen_k - done.seqlen_q;
        const int last_key = p.window_right < 0 ? done.seqlen_k - 1 : min(done.seqlen_k - 1, diagonal + p.window_right);
        const int first_key = p.window_left < 0 ? 0 : max(0, diagonal - p.window_left);
        end.flags |= i < done.seqlen_q && last_key >= first_key ? kSees << half : 0;
      }
    }
    if constexpr (C.biased())  // the bias may hide all keys of a row
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (statistics.reference[half] == -kMinusInf) end.flags &= ~(kSees << half);
    const uint32_t mine = end.flags;  // the vote will add those of other lanes
    if constexpr (kSum) {
      const float weight[2] = {ptx::quad_sum(statistics.sum[0]), ptx::quad_sum(statistics.sum[1])};
      float sink = kMinusInf, sum[2] = {weight[0], weight[1]};
      if (!C.whole() && f.score.sink) {
        sink = f.score.sink[head_of_warp(done) * f.score.sink_head] * kLog2E;
        sum[0] += ptx::exp2_approx(sink - whole_reference(statistics, 0));
        sum[1] += ptx::exp2_approx(sink - whole_reference(statistics, 1));
      }
      divide(end, weight, sum);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        end.lse[half] = C.whole() || mine & (kSees << half) ? (statistics.reference[half] + ptx::log2_approx(sum[half])) * kLn2
                        : done.first_row + row_of_thread(half) < done.seqlen_q ? sink * kLn2 : kMinusInf;
      if constexpr (C.biased())
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const LateReference<C.element> late(statistics.reference[half]);
          if (mine & (kSees << half)) end.lse[half] = fmaf(late.base, p.bias.unit, (late.reference + ptx::log2_approx(sum[half])) * kLn2);
        }
      if constexpr (kEarly) store_lse(done, end.lse);
    }
    if constexpr (C.general()) {
      if (f.max_logit) {  // one atomic a warp
        float maximum = kMinusInf;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (mine & (kSees << half)) maximum = fmaxf(maximum, statistics.maximum[half]);
#pragma unroll
        for (int n = 1; n < 32; n *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, n));
        if (lane == 0 && maximum != kMinusInf)
          ptx::atomic_max(f.max_logit + done.batch * f.max_logit_batch + head_of_warp(done) * f.max_logit_head, maximum);
      }
    }
    if constexpr (kEarly) end.flags = __reduce_or_sync(0xffffffffu, end.flags);
    return end;
  }

  __device__ __forceinline__ float whole_reference(const RowStatistics& statistics, int half) const {
    if constexpr (C.biased()) {
      const LateReference<C.element> late(statistics.reference[half]);
      return fmaf(late.base, p.scale_log2, late.reference);
    }
    return statistics.reference[half];
  }
  // The inverse sums. weight: of the keys; sum: with the sink.
  __device__ __forceinline__ void divide(Ending& end, const float (&weight)[2], const float (&sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool sees = C.whole() || end.flags & (kSees << half);
      // The first tile's maximum is in the sum, so in float32 it is never small unless something went wrong.
      if (sees && !(weight[half] > 0x1p-60f && sum[half] < 0x1p127f)) end.flags |= kAgain;
      // |O| <= sum max |V| cannot overflow while the sum is below 1, nor in float16, whose V end at 2^16.
      // A row that sees no key has O = 0 or, from masked values that are not finite, NaN.
      if ((C.element == Element::kBfloat16 && weight[half] >= 1.f) || !sees) end.flags |= kLook;
      end.inverse[half] = sees ? ptx::reciprocal_approx(sum[half]) : 0.f;
      if constexpr (C.drops()) end.inverse[half] *= p.forward.score.dropout.active() ? p.forward.score.dropout.scale : 1.f;
    }
  }

  // number: of the tile's Work; last: this consumer has no other tile.
  __device__ __forceinline__ void finish(unsigned number, Ending& end, bool last) {
    const Work& done = work(number);
    if constexpr (!kSum) {
      const float weight[2] = {o[kO - 4], o[kO - 2]};
      divide(end, weight, weight);
    }
    if constexpr (!kEarly) end.flags = __reduce_or_sync(0xffffffffu, end.flags);  // takes a while: nothing asks for it yet
#pragma unroll
    for (int n = 0; n < C.head_dim / 2; ++n) o[n] *= end.inverse[n >> 1 & 1];
    if (!C.whole() && end.flags & kNoRows) return;
    store(number, end.flags, last);
    if constexpr (kSum) {
      if constexpr (kEarly) return;
      if (kLate && untold >= 0) untold_lse[0] = end.lse[0], untold_lse[1] = end.lse[1];
      else store_lse(done, end.lse);
    }
  }

  // kLate: what is left of a tile with its O in shared memory; the fence waits for that. A vote for what all threads know: the
  // compiler does not, and would move descriptors in every step.
  __device__ __forceinline__ void tell() {
    if constexpr (kLate) {
      if (!__any_sync(0xffffffffu, untold >= 0)) return;
      ptx::fence_async_shared();
      tell_store_warp(untold, false);
      if constexpr (kSum) store_lse(work(untold), untold_lse);
      untold = -1;
    }
  }

  __device__ __forceinline__ void store_lse(const Work& done, const float (&lse)[2]) const {
    const RowScalar& to = p.forward.lse;
    if (!to || (lane & 3) != 0) return;
    float* out = to.data + done.lse + row_of_thread(0) * to.row;
    if constexpr (!C.whole()) out += (head_of_warp(done) - done.head) * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (C.whole() || done.plain || done.first_row + row_of_thread(half) < done.capacity_q) out[8 * half * to.row] = lse[half];
  }

  __device__ __forceinline__ void store(unsigned number, uint32_t flags, bool last) {
    const Work& done = work(number);
    const bool unusual = flags & (kAgain | kLook);
    uint32_t largest = 0;
    if (!C.stages_o || (!C.whole() && flags & kTail)) largest = store_rows(done);
    else if (unusual) largest = store_box_of<true>(done, number, last);
    else store_box_of<false>(done, number, last);
    if (unusual) note_again(done, flags & kAgain || ptx::has_nonfinite<T>(largest));
  }

  // A warp's rows to be computed again form a list through memory: one link for 16 rows, written only if they need it.
  __device__ __forceinline__ void note_again(const Work& done, bool again) const {
    if (!__any_sync(0xffffffffu, again) || lane != 0) return;
    const int head = done.batch * p.forward.sequence.num_heads_q + head_of_warp(done);
    const int rows16 = head * p.again_stride + (done.first_row + row_of_warp()) / 16;
    int* const list = shared.again(memory, consumer, warp);
    p.again[rows16] = *list;
    *list = rows16;
  }
  __device__ __forceinline__ void compute_again() const {
    __syncwarp();
    int rows16 = *shared.again(memory, consumer, warp);
#pragma unroll 1
    while (rows16 >= 0) {
      ExactRows<T, C.head_dim, C.general(), C.biased()>(p.forward, rows16 / p.again_stride, rows16 % p.again_stride * 16).run();
      rows16 = p.again[rows16];  // as lane 0 of this warp wrote it
    }
  }

  // Packed rows that no sequence owns: zeros, lse -inf. By all consumers of all blocks.
  __device__ __forceinline__ void zero_unowned_rows() const {
    const ForwardParams& f = p.forward;
    const int64_t begin = f.sequence.cu_seqlens_q.at(f.sequence.batch), heads = f.sequence.num_heads_q;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * C.consumers + consumer) * 4 + warp;
    for (int64_t n = first; n < (f.sequence.total_q - begin) * heads; n += gridDim.x * C.consumers * 4) {
      const int64_t row = begin + n / heads, head = n % heads;
      T* const out = static_cast<T*>(f.o.data) + row * f.o.row + head * f.o.head;
      for (int column = 8 * lane; column < f.head_dim_v; column += 256) *reinterpret_cast<uint4*>(out + column) = {0, 0, 0, 0};
      if (f.lse && lane == 0) f.lse.data[head * f.lse.head + row * f.lse.row] = kMinusInf;
    }
  }

  // Both return the largest magnitudes that they stored (if kCheck).
  template <bool kCheck>
  __device__ __forceinline__ uint32_t store_box_of(const Work& done, unsigned number, bool last) {
    uint32_t largest = 0;
    const uint32_t to = shared.o(consumer);
    const int r = warp * 16 + (lane & 15);
    if constexpr (C.store_warps()) {
      ptx::mbarrier_wait(shared.o_empty(consumer), o_parity);
    } else {
      if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<0>();
      ptx::barrier_sync(5 + consumer, 128);
    }
#pragma unroll
    for (int step = 0; step < C.head_dim / 16; ++step) {
      const float* x = o + step * 8;
      const uint32_t a = ptx::pack<T>(x[0], x[1]), b = ptx::pack<T>(x[2], x[3]);
      const uint32_t c = ptx::pack<T>(x[4], x[5]), d = ptx::pack<T>(x[6], x[7]);
      if constexpr (kCheck)
        largest = ptx::max_magnitude<T>(ptx::max_magnitude<T>(ptx::max_magnitude<T>(largest, a), b), ptx::max_magnitude<T>(c, d));
      ptx::stmatrix_x4(to + Panels<64>::chunk_offset(r, 2 * step + (lane >> 4)), a, b, c, d);
    }
    o_parity ^= 1;
    if constexpr (kLate) {
      untold = static_cast<int>(number % C.kWorkSlots);
      if (last) {
        ptx::fence_async_shared();
        tell_store_warp(untold, true);
        untold = -1;
      }
      return largest;
    }
    ptx::fence_async_shared();
    if constexpr (!C.store_warps()) ptx::barrier_sync(5 + consumer, 128);
    if constexpr (C.store_warps())
      tell_store_warp(static_cast<int>(number % C.kWorkSlots), last);
    else if (threadIdx.x % 128 == 0)
      store_box<C>(p, to, query_box<C>(p, done, consumer * 64));
    return largest;
  }

  __device__ __forceinline__ void tell_store_warp(int number, bool last) {
    if (threadIdx.x % 128 == 0) *shared.staged(memory, consumer) = {number, last};
    __syncwarp();
    release(shared.o_full(consumer));
    told_last = last;
  }

  // A quad holds 8 columns of a row in pairs: exchanged, every thread has 16 bytes of two rows to write.
  __device__ __forceinline__ uint32_t store_rows(const Work& done) const {
    uint32_t largest = 0;
    const int r = done.first_row + row_of_thread(0), column = 8 * (lane & 3);
    T* const out = static_cast<T*>(p.forward.o.data) + head_of_warp(done) * p.forward.o.head + column +
                   (p.forward.sequence.packed_q ? 0 : done.batch * p.forward.o.batch) + (done.q_begin + r) * p.forward.o.row;
#pragma unroll
    for (int n = 0; n < C.head_dim / 32; ++n) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = o + 16 * n + 4 * i;
        upper[i] = ptx::pack<T>(x[0], x[1]), lower[i] = ptx::pack<T>(x[2], x[3]);
        largest = ptx::max_magnitude<T>(ptx::max_magnitude<T>(largest, upper[i]), lower[i]);
      }
      transpose_quad(upper, lane & 3);
      transpose_quad(lower, lane & 3);
      const bool exists = 32 * n + column < p.forward.head_dim_v;
      ptx::store_global_if(exists && r < done.capacity_q, out + 32 * n, upper);
      ptx::store_global_if(exists && r + 8 < done.capacity_q, out + 32 * n + 8 * p.forward.o.row, lower);
    }
    return largest;
  }

  // A part of a tile goes to memory as this thread holds it, for the same thread of the block that finishes the tile.
  static __device__ __forceinline__ bool is_part(const Work& w) {
    return C.shares_tiles() && w.num_key_tiles > 0;
  }
  __device__ __forceinline__ float4* part(int block) const {  // [kO / 4: O, 1: statistics][128]
    return reinterpret_cast<float4*>(p.parts + block * C.part_floats() + consumer * (128 * (kO + 4))) + threadIdx.x % 128;
  }
  __device__ __forceinline__ volatile unsigned long long* part_ready(int block) const {
    return p.part_ready + block * C.part_flags() + consumer * 4 + warp;
  }
  __device__ __forceinline__ void hand_over(const RowStatistics& done_rows) const {
    float4* const to = part(blockIdx.x);
#pragma unroll
    for (int n = 0; n < kO / 4; ++n) to[n * 128] = make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]);
    to[kO / 4 * 128] =
        make_float4(done_rows.reference[0], done_rows.reference[1], done_rows.sum[0], done_rows.sum[1]);
    __syncwarp();
    __threadfence();
    if (lane == 0) *part_ready(blockIdx.x) = p.order.launch;
  }
  // Adds what the blocks before this one have of its tile: always in the same order, whoever comes first.
  __device__ __forceinline__ void take_over() {
    const TileOrder& order = p.order;
    const int tile_begin = order.share_begin(blockIdx.x) / order.key_tiles * order.key_tiles;
#pragma unroll 1
    for (int block = blockIdx.x; order.share_begin(block) > tile_begin;) {
      --block;
      if (lane == 0) {
        while (*part_ready(block) != p.order.launch) __nanosleep(100);
        *part_ready(block) = 0;  // the same launch may come again, from a graph
      }
      __threadfence();
      __syncwarp();
      const float4* const from = part(block);
      const float4 theirs = ptx::load_from_l2(from + kO / 4 * 128);
      const float reference[2] = {fmaxf(rows.reference[0], theirs.x), fmaxf(rows.reference[1], theirs.y)};
      const float mine[2] = {ptx::exp2_approx(rows.reference[0] - reference[0]),
                             ptx::exp2_approx(rows.reference[1] - reference[1])};
      const float factor[2] = {ptx::exp2_approx(theirs.x - reference[0]), ptx::exp2_approx(theirs.y - reference[1])};
      const float sums[2] = {theirs.z, theirs.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.reference[half] = reference[half];
        rows.sum[half] = rows.sum[half] * mine[half] + sums[half] * factor[half];
      }
#pragma unroll
      for (int n = 0; n < kO / 4; ++n) {
        const float4 x = ptx::load_from_l2(from + n * 128);
        o[4 * n] = o[4 * n] * mine[0] + x.x * factor[0], o[4 * n + 1] = o[4 * n + 1] * mine[0] + x.y * factor[0];
        o[4 * n + 2] = o[4 * n + 2] * mine[1] + x.z * factor[1], o[4 * n + 3] = o[4 * n + 3] * mine[1] + x.w * factor[1];
      }
    }
  }
};

}  // namespace tilewise::cuda
