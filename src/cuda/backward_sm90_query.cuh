// One of two passes of backward_sm90 above head dim 128, without options: dQ by blocks of queries, like a forward pass. Nothing is summed in global memory.
//
// A block stays on its multiprocessor and takes query block after query block: 128 rows of one query head, 64 for each of two consumer
// warpgroups, which keep Q and dO in shared memory and dQ in registers. It walks the tiles of 64 keys that they see:
//
//   S = Q K^T        P = 2^(S scale log2 e - lse log2 e)        dP = dO V^T        dS = P * (dP - delta)        dQ += dS K
//
// Rows are queries here, so lse and delta are two numbers a thread. A step issues dQ of the tile before, S and dP, and computes P beside dP.
// dK and dV are backward_sm90_key.cuh's. docs/kernels/backward_sm90.md has the order of the products and why it matters.
#pragma once
#include "cuda/backward_sm90_common.cuh"
#include "cuda/config_backward_sm90_query.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/panel_sm90.cuh"
#include "cuda/tile/query_block.cuh"

namespace tilewise::cuda {

// Addresses in shared memory.
template <BackwardQuerySm90Config C>
struct SharedQuerySm90 {
  uint32_t base;
  __device__ __forceinline__ uint32_t q(int consumer) const { return base + consumer * C.tile_bytes(); }           // [64, d]
  __device__ __forceinline__ uint32_t dout(int consumer) const { return base + C.dout_offset() + consumer * C.tile_bytes(); }
  __device__ __forceinline__ uint32_t k(int slot) const { return base + C.k_offset() + slot * C.tile_bytes(); }    // [block_n, d]
  __device__ __forceinline__ uint32_t v() const { return base + C.v_offset(); }
  __device__ __forceinline__ uint32_t barrier(int n) const { return base + C.barrier_offset() + 8 * n; }
  __device__ __forceinline__ uint32_t q_full(int consumer) const { return barrier(consumer); }
  __device__ __forceinline__ uint32_t q_empty(int consumer) const { return barrier(2 + consumer); }
  __device__ __forceinline__ uint32_t dout_full(int consumer) const { return barrier(4 + consumer); }
  __device__ __forceinline__ uint32_t dout_empty(int consumer) const { return barrier(6 + consumer); }
  __device__ __forceinline__ uint32_t k_full(int slot) const { return barrier(8 + slot); }
  __device__ __forceinline__ uint32_t k_empty(int slot) const { return barrier(10 + slot); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(12); }
  __device__ __forceinline__ uint32_t v_empty() const { return barrier(13); }
  __device__ __forceinline__ uint32_t block_full(int slot) const { return barrier(14 + slot); }
  __device__ __forceinline__ uint32_t block_empty(int slot) const { return barrier(16 + slot); }
  // Arrivals that complete a phase of barrier n: consumers arrive once a warp, the producer with what it loads.
  static __device__ __forceinline__ constexpr uint32_t arrivals(int n) {
    if (n < 8) return n / 2 % 2 == 0 ? 1 : 4;
    if (n < 12) return n < 10 ? 1 : 4 * C.kConsumers;
    if (n < 14) return n < 13 ? 1 : 4 * C.kConsumers;
    return n < 16 ? 1 : 4 * C.kConsumers;
  }
};

// ---- query blocks and loads -----------------------------------------------------------------------------------------

// One thread of the third warpgroup: takes tickets, says what they stand for, and loads.
template <BackwardQuerySm90Config C>
struct QueryProducerSm90 {
  using T = typename ElementType<C.element>::Type;
  const BackwardSm90Params& p;
  const SharedQuerySm90<C> shared;
  unsigned char* const memory;

  __device__ __forceinline__ QueryBlock& at(int n) const {
    return *reinterpret_cast<QueryBlock*>(memory + C.block_offset() + (n & 1) * C.kBlockBytes);
  }
  __device__ __forceinline__ int take_ticket() const { return atomicAdd(p.backward.ticket + 1, 1); }

  // Query block n of this block of threads. Those that do not exist are passed over.
  __device__ __forceinline__ bool publish(int n, int ticket) const {
    ptx::mbarrier_wait(shared.block_empty(n & 1), (n >> 1 & 1) ^ 1);
    volatile QueryBlock& block = at(n);
    for (;; ticket = take_ticket()) {
      if (ticket >= p.num_query_tasks) {
        block.b = -1;
        break;
      }
      if (find_query_block<C.block_m(), C.block_n>(block, p.backward, static_cast<unsigned>(ticket), p.query_section)) break;
    }
    asm volatile("" : "+r"(n));  // or the barrier's address would be kept through the loop above, in local memory
    ptx::mbarrier_arrive(shared.block_full(n & 1));
    return block.b >= 0;
  }

  __device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int row, int head, int batch, int count) const {
    ptx::mbarrier_arrive_expect(barrier, C.tile_bytes());
#pragma unroll
    for (int n = 0; n < C.panels(); ++n)
      if (n < count) ptx::tma_load(to + n * 64 * 128, map, barrier, {{n * 64, row, 0, head, batch}});
  }

  // Q or dO of both consumers, as soon as each has used the one before it for the last time.
  template <bool kQ>
  __device__ __forceinline__ void load_queries(const QueryBlock& block, uint32_t parity) const {
#pragma unroll 1
    for (int c = 0; c < C.kConsumers; ++c) {
      ptx::mbarrier_wait(kQ ? shared.q_empty(c) : shared.dout_empty(c), parity ^ 1);
      load_box(kQ ? shared.q(c) : shared.dout(c), kQ ? p.q : p.dout, kQ ? shared.q_full(c) : shared.dout_full(c),
               block.q_begin + block.first_row + c * 64, block.head, p.backward.sequence.packed_q ? 0 : block.b,
               kQ ? p.qk_loads : p.v_loads);
    }
  }

  // Tickets are asked for with so many tiles left to load; the answer takes a microsecond.
  static constexpr int kAsk = 2;

  // at_block: number of the query block, and in bit 0 the parity of Q and dO; at_tile: number of the tile.
  __device__ __forceinline__ void run() const {
    int ticket = take_ticket();
    uint32_t at_block = 0, at_tile = 0;
#pragma unroll 1
    for (; publish(at_block >> 1, ticket); at_block += 2) {
      const QueryBlock& block = at(at_block >> 1);
      int left = block.num_tiles;
      if (left == 0) {
        ticket = take_ticket();
        continue;
      }
      load_queries<true>(block, at_block & 1);
      int row = block.k_begin + block.first_tile * C.block_n;
#pragma unroll 1
      do {
        if (left == min(kAsk, block.num_tiles)) ticket = take_ticket();
        ptx::mbarrier_wait(shared.k_empty(at_tile & 1), (at_tile >> 1 & 1) ^ 1);
        load_box(shared.k(at_tile & 1), p.k, shared.k_full(at_tile & 1), row, block.head_k, p.backward.sequence.packed_k ? 0 : block.b, p.qk_loads);
        if (left == block.num_tiles) load_queries<false>(block, at_block & 1);
        ptx::mbarrier_wait(shared.v_empty(), (at_tile & 1) ^ 1);
        load_box(shared.v(), p.v, shared.v_full(), row, block.head_k, p.backward.sequence.packed_k ? 0 : block.b, p.v_loads);
        row += C.block_n;
        ++at_tile;
      } while (--left > 0);
      at_block ^= 1;
    }
  }
};

// ---- dQ of 64 queries -----------------------------------------------------------------------------------------------

template <BackwardQuerySm90Config C>
struct QueryConsumerSm90 {
  using T = typename ElementType<C.element>::Type;
  using Rows = Panels<64>;
  static constexpr int kS = C.block_n / 2;   // registers of S and of dP
  static constexpr int kA = C.block_n / 4;   // of P and of dS as an operand
  static constexpr int kD = C.head_dim / 2;  // of dQ
  static constexpr int kSteps = C.head_dim / 16;

  const BackwardSm90Params& p;
  const SharedQuerySm90<C> shared;
  unsigned char* const memory;
  const int consumer, warp, lane;  // warp of the warpgroup

  struct Rings {  // where this consumer stands
    uint32_t step = 0;    // tiles so far
    uint32_t parity = 0;  // of Q and dO
  };

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    ptx::stress();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ int row(int half) const { return consumer * 64 + warp * 16 + half * 8 + (lane >> 2); }

  // S = Q K^T or dP = dO V^T
  __device__ __forceinline__ void issue_scores(float (&x)[kS], uint32_t s_rows, uint32_t s_keys) const {
    uint32_t a = ptx::descriptor(s_rows), b = ptx::descriptor(s_keys);
    asm volatile("" : "+r"(a), "+r"(b));
    ptx::wgmma_pin(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::Wgmma<T, C.block_n>::ss(x, a + Rows::column_step(step), b + Rows::column_step(step), step != 0);
    ptx::wgmma_commit();
  }

  // dQ += dS K
  __device__ __forceinline__ void issue_gradient(float (&dq)[kD], uint32_t (&a)[kA], uint32_t s_keys) const {
    const uint32_t b = ptx::descriptor(s_keys, Rows::kPanelBytes);
    ptx::wgmma_pin(dq);
    ptx::wgmma_pin(a);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.block_n / 16; ++step)
      ptx::Wgmma<T, C.head_dim>::template rs<1>(dq, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                                                b + Rows::row_step(step), 1);
    ptx::wgmma_commit();
  }

  // This thread has the columns 8 n + 2 (lane % 4) + {0, 1}: bits of those before `column`.
  __device__ __forceinline__ uint32_t elements_before(int column) const {
    const int own = max(column - 2 * (lane & 3), 0), count = own / 8 * 2 + min(own % 8, 2);
    return count < 32 ? (1u << count) - 1 : 0xffffffffu;
  }
  __device__ __forceinline__ bool masked(const QueryBlock& block, int j0) const {
    const volatile int* full = block.full_keys[consumer];  // from shared memory each time: registers are short
    return j0 < full[0] || j0 + C.block_n > full[1];
  }
  // A row of K, V, Q or dO that is not finite met a pair that does not see each other: see GradientSm90.
  __device__ __forceinline__ void tell_nonfinite() const {
    if (p.backward.again) p.backward.again->wanted = 1;
  }

  // S to P. Hidden pairs: zeros.
  template <bool kMasked>
  __device__ __forceinline__ void weights(float (&s)[kS], const float (&lse)[2], const QueryBlock& block, int j0) const {
    uint32_t visible[2] = {}, largest = 0;  // a bit an element of a row; magnitude of the hidden scores
    if constexpr (kMasked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Range keys = visible_keys(p.backward.score, block.first_row + row(half), block.seqlen_q, block.seqlen_k);
        visible[half] = elements_before(keys.end - j0) & ~elements_before(keys.begin - j0);
      }
    }
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * half + e];
          const float weight = ptx::exp2_approx(fmaf(x, p.scale_log2, -lse[half]));
          if constexpr (kMasked) {
            const bool sees = (visible[half] >> (2 * n + e) & 1) != 0;
            largest = max(largest, sees ? 0u : __float_as_uint(x) & 0x7fffffffu);
            x = sees ? weight : 0.f;
          } else {
            x = weight;
          }
        }
    if (kMasked && largest >= 0x7f800000u) tell_nonfinite();
  }

  // dP and P to dS. A V that is not finite shows in dS, even where P is 0.
  template <bool kMasked>
  __device__ __forceinline__ void gradients(uint32_t (&a)[kA], const float (&weight)[kS], const float (&dp)[kS],
                                            const float (&delta)[2]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int n = 0; n < kA; ++n) {
      a[n] = ptx::pack<T>(weight[2 * n] * (dp[2 * n] - delta[n & 1]), weight[2 * n + 1] * (dp[2 * n + 1] - delta[n & 1]));
      if constexpr (kMasked) largest = ptx::max_magnitude<T>(largest, a[n]);
    }
    if (kMasked && ptx::has_nonfinite<T>(largest)) tell_nonfinite();
  }

  // Tiles that only the other consumer needs.
  __device__ __forceinline__ void skip(Rings& rings, int tiles) const {
#pragma unroll 1
    for (; tiles > 0; --tiles, ++rings.step) {
      ptx::mbarrier_wait(shared.k_full(rings.step & 1), rings.step >> 1 & 1);
      __syncwarp();
      arrive(shared.k_empty(rings.step & 1));
      ptx::mbarrier_wait(shared.v_full(), rings.step & 1);
      __syncwarp();
      arrive(shared.v_empty());
    }
  }

  // P and dS of a tile from its products, which are under way: S, then dP.
  __device__ __forceinline__ void make_gradients(uint32_t (&a)[kA], float (&s)[kS], float (&dp)[kS], const float (&lse)[2],
                                                 const float (&delta)[2], const QueryBlock& block, int j0) const {
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(s);
    const bool hides = masked(block, j0);
    if (hides)
      weights<true>(s, lse, block, j0);
    else
      weights<false>(s, lse, block, j0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(dp);
    arrive(shared.v_empty());
    if (hides)
      gradients<true>(a, s, dp, delta);
    else
      gradients<false>(a, s, dp, delta);
  }

  // Tiles [begin, begin + count) of keys. A step issues dQ(j-1), S(j), dP(j). dQ first: with the next S in front of it, K(j-1) and what takes
  // its place come later, and every step waits for loads.
  __device__ __forceinline__ void walk(float (&dq)[kD], const QueryBlock& block, Rings& rings, int begin, int count) const {
    float lse[2], delta[2];
    const int64_t padded = block.head * p.backward.padded_rows + padded_row(p.backward.sequence, block.q_begin, block.b) + block.first_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = padded + row(half);
      lse[half] = __ldcg(p.backward.lse_log2 + at), delta[half] = __ldcg(p.backward.delta + at);
    }
    float s[kS], dp[kS];
    uint32_t a[kA];
    const uint32_t s_q = shared.q(consumer), s_dout = shared.dout(consumer);
    int slot = uniform(rings.step & 1);
    ptx::mbarrier_wait(shared.q_full(consumer), rings.parity);
    ptx::mbarrier_wait(shared.k_full(slot), rings.step >> 1 & 1);
    issue_scores(s, s_q, shared.k(slot));
    ptx::mbarrier_wait(shared.dout_full(consumer), rings.parity);
    ptx::mbarrier_wait(shared.v_full(), rings.step & 1);
    issue_scores(dp, s_dout, shared.v());
    int j0 = begin * C.block_n;
    make_gradients(a, s, dp, lse, delta, block, j0);
    // do, not for: a loop that might run zero times makes the compiler copy the accumulators.
    if (--count > 0) do {
      ++rings.step;
      j0 += C.block_n;
      slot = uniform(rings.step & 1);
      issue_gradient(dq, a, shared.k(slot ^ 1));
      ptx::mbarrier_wait(shared.k_full(slot), rings.step >> 1 & 1);
      issue_scores(s, s_q, shared.k(slot));
      ptx::mbarrier_wait(shared.v_full(), rings.step & 1);
      issue_scores(dp, s_dout, shared.v());
      ptx::wgmma_wait<2>();
      ptx::wgmma_pin(dq);
      ptx::wgmma_pin(a);
      arrive(shared.k_empty(slot ^ 1));
      make_gradients(a, s, dp, lse, delta, block, j0);
    } while (--count > 0);
    if (p.backward.dq_aligned) arrive(shared.q_empty(consumer));
    arrive(shared.dout_empty(consumer));
    issue_gradient(dq, a, shared.k(slot));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(dq);
    ptx::wgmma_pin(a);
    arrive(shared.k_empty(slot));
    ++rings.step;
  }

  __device__ __forceinline__ int64_t base_of(const QueryBlock& block) const {
    const BackwardParams& b = p.backward;
    return (b.sequence.packed_q ? block.q_begin * b.dq.row : block.b * b.dq.batch) + block.head * b.dq.head;
  }

  // Quads exchange their pairs, so that a lane stores 16 bytes of a row.
  __device__ __forceinline__ void store_aligned(const float (&dq)[kD], const QueryBlock& block) const {
    const BackwardParams& b = p.backward;
    const int first = block.first_row + row(0), quad = lane & 3;
    T* const out = static_cast<T*>(b.dq.data) + base_of(block) + first * b.dq.row + quad * 8;
#pragma unroll
    for (int n = 0; n < kD / 4; n += 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = ptx::pack<T>(dq[4 * (n + i) + 2 * half] * b.gradient_scale, dq[4 * (n + i) + 2 * half + 1] * b.gradient_scale);
        transpose_quad(x, quad);
        const bool used = first + 8 * half < block.seqlen_q;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = used ? x[i] : 0u;
        ptx::store_global_if(first + 8 * half < block.capacity_q && (n + quad) * 8 < b.head_dim, out + 8 * half * b.dq.row + n * 8, x);
      }
    }
  }

  // float32, or rows that cannot be written by 16 bytes: through the slot of Q, half of the columns at a time.
  __device__ __forceinline__ void store_elements(const float (&dq)[kD], const QueryBlock& block) const {
    const BackwardParams& b = p.backward;
    constexpr int kColumns = C.head_dim / 2;
    const uint32_t mine = shared.q(consumer) + warp * 16 * kColumns * 4;
    const int first = block.first_row + consumer * 64 + warp * 16, rows = min(16, block.capacity_q - first);
    ptx::barrier_sync(1 + consumer, 128);  // nobody needs Q any more
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::store_shared(mine + (half * 8 + (lane >> 2)) * kColumns * 4 + (n * 8 + 2 * (lane & 3)) * 4,
                            make_float2(dq[part * kD / 2 + 4 * n + 2 * half], dq[part * kD / 2 + 4 * n + 2 * half + 1]));
      __syncwarp();
#pragma unroll 1
      for (int r = 0; r < rows; ++r)
#pragma unroll 1
        for (int c = lane; c < kColumns; c += 32) {
          const float x = first + r < block.seqlen_q ? ptx::load_shared_4(mine + (r * kColumns + c) * 4) * b.gradient_scale : 0.f;
          const int column = part * kColumns + c;
          if (column < b.head_dim)
            store_columns<T>(b.dq.data, base_of(block) + (first + r) * b.dq.row + column, b.dq_is_float, false, false, x, 0.f);
        }
      __syncwarp();
    }
    ptx::fence_async_shared();
    __syncwarp();
    arrive(shared.q_empty(consumer));
  }

  // These 64 rows see no key.
  __device__ __forceinline__ void store_zeros(const QueryBlock& block) const {
    const BackwardParams& b = p.backward;
    const int first = block.first_row + consumer * 64 + warp * 16;
#pragma unroll 1
    for (int r = 0; r < min(16, block.capacity_q - first); ++r)
#pragma unroll 1
      for (int c = lane; c < b.head_dim; c += 32)
        store_columns<T>(b.dq.data, base_of(block) + (first + r) * b.dq.row + c, b.dq_is_float, false, false, 0.f, 0.f);
  }

  __device__ __forceinline__ void run() const {
    Rings rings;
#pragma unroll 1
    for (int n = 0;; ++n) {
      ptx::mbarrier_wait(shared.block_full(n & 1), n >> 1 & 1);
      const QueryBlock& block = *reinterpret_cast<const QueryBlock*>(memory + C.block_offset() + (n & 1) * C.kBlockBytes);
      if (uniform(block.b) < 0) break;
      if (uniform(block.b) >= p.backward.sequence.batch) {
        zero_query_tail<T>(p.backward, block, C.block_m(), consumer * 4 + warp, 4 * C.kConsumers, lane);
      } else {
        const int begin = uniform(block.own_tiles[consumer][0]), end = uniform(block.own_tiles[consumer][1]);
        skip(rings, begin - block.first_tile);
        if (end > begin) {
          float dq[kD];
#pragma unroll
          for (int i = 0; i < kD; ++i) dq[i] = 0.f;
          walk(dq, block, rings, begin, end - begin);
          if (p.backward.dq_aligned)
            store_aligned(dq, block);
          else
            store_elements(dq, block);
        } else {
          if (block.num_tiles > 0) {  // they have been loaded for nothing
            ptx::mbarrier_wait(shared.q_full(consumer), rings.parity);
            ptx::mbarrier_wait(shared.dout_full(consumer), rings.parity);
            __syncwarp();
            arrive(shared.q_empty(consumer));
            arrive(shared.dout_empty(consumer));
          }
          store_zeros(block);
        }
        if (block.num_tiles > 0) rings.parity ^= 1;
        skip(rings, block.first_tile + block.num_tiles - end);
      }
      __syncwarp();
      arrive(shared.block_empty(n & 1));
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Grid: one block a multiprocessor, or fewer. Tasks: query block inside query head inside batch entry (one more when queries are packed).
template <Element kElement, int kHeadDim>
__global__ void __launch_bounds__(BackwardQuerySm90Config{kElement, kHeadDim}.num_threads(), 1)
    backward_sm90_query_kernel(const __grid_constant__ BackwardSm90Params p) {
  constexpr BackwardQuerySm90Config C{kElement, kHeadDim};
  static_assert(C.valid() && sizeof(QueryBlock) <= C.kBlockBytes);
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedQuerySm90<C> shared{ptx::shared_address(memory)};
  const int warpgroup = uniform(threadIdx.x / 128);
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_maps(p);
#pragma unroll
    for (int n = 0; n < C.kBarriers; ++n) ptx::mbarrier_init(shared.barrier(n), shared.arrivals(n));
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  start_pass(p);

  if (warpgroup == 0) {
    ptx::give_registers<C.kProducerRegisters>();
    if (threadIdx.x == 0) QueryProducerSm90<C>{p, shared, memory}.run();
  } else {
    ptx::take_registers<C.kConsumerRegisters>();
    QueryConsumerSm90<C>{p, shared, memory, warpgroup - 1, warp, lane}.run();
  }
  end_pass(p);
}

}  // namespace tilewise::cuda
