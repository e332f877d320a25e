// One of two passes of backward_sm90 above head dim 128, without options: dK and dV by blocks of 64 keys. dQ is backward_sm90_query.cuh's.
//
//   S^T  = K Q^T - lse / scale        dP^T = V dO^T - delta
//   P^T  = 2^(S^T scale log2 e)       dS^T = P^T * dP^T
//   dV  += P^T dO                     dK  += dS^T Q
//
// Both consumer warpgroups have the same 64 keys: one makes P and dV, the other, from that P, dS and dK. The first computes the next P while
// its dV is under way. Three warps of the third warpgroup load. docs/kernels/backward_sm90.md has the order of the products and why it
// matters.
#pragma once
#include "cuda/backward_sm90_producer.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/gradient_sm90.cuh"

namespace tilewise::cuda {

// What backward_sm90's layout has for dQ serves P and the loads: two slots of P, and 8 KiB for rows on their way out.
template <BackwardSm90Config C>
struct SharedKeySm90 : SharedBackwardSm90<C> {
  using B = SharedBackwardSm90<C>;
  __device__ __forceinline__ uint32_t weights(uint32_t step) const { return step & 1 ? B::ds(0) : B::weights(); }
  __device__ __forceinline__ uint32_t weights_full(uint32_t step) const { return B::barrier(step & 1); }
  __device__ __forceinline__ uint32_t weights_empty(uint32_t step) const { return B::barrier(2 + (step & 1)); }
  __device__ __forceinline__ uint32_t k_empty() const { return B::barrier(4); }
  __device__ __forceinline__ uint32_t v_empty() const { return B::barrier(5); }
  __device__ __forceinline__ uint32_t wanted() const { return B::barrier(11); }  // the next key block
  __device__ __forceinline__ uint32_t staging() const { return B::ds(1); }
};

// ---- key blocks and loads -------------------------------------------------------------------------------------------

// Three warps: key blocks with their K and V; Q, lse and delta; dO.
template <BackwardSm90Config C>
struct KeyProducerSm90 {
  const LoaderSm90<C, DqSums::kAny> loader;
  const SharedKeySm90<C> shared;
  const int warp, lane;

  __device__ __forceinline__ void hand_out() const {
    const KeyBlocksSm90<C>& blocks = loader.blocks;
    int ticket = blocks.take_ticket(lane);
#pragma unroll 1
    for (int n = 0;; ++n) {
      blocks.publish(n, ticket, lane);
      if (uniform(blocks.at(n).b) < 0) break;
      if (lane == 0) {
        ptx::mbarrier_wait(shared.k_empty(), (n & 1) ^ 1);
        loader.template load_keys<true>(n);
        ptx::mbarrier_wait(shared.v_empty(), (n & 1) ^ 1);
        loader.template load_keys<false>(n);
        ptx::mbarrier_wait(shared.wanted(), n & 1);
      }
      __syncwarp();
      ticket = blocks.take_ticket(lane);
    }
  }

  // The next key block is asked for with so many tiles left to load.
  static constexpr int kAsk = 3;

  template <bool kQ>
  __device__ __forceinline__ void load_tiles() const {
    const BackwardSm90Params& p = loader.p;
    int stage = 0;
    uint32_t parity = 1;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const KeyBlock& block = loader.blocks.wait(n);
      if (block.b < 0) break;
      TileWalk at(block);
      const int steps = block.group * block.num_tiles;
#pragma unroll 1
      for (int left = steps; left > 0; --left) {
        ptx::mbarrier_wait(kQ ? shared.empty(stage) : shared.dout_empty(stage), parity);
        const int row = static_cast<int>(block.s.q_begin) + at.tile * C.block_m, batch = p.backward.sequence.packed_q ? 0 : block.b;
        if (kQ) {
          loader.load_queries(block, at, stage, row, batch);
          if (left == min(kAsk, steps)) ptx::mbarrier_arrive(shared.wanted());
        } else {
          ptx::mbarrier_arrive_expect(shared.dout_full(stage), C.q_bytes());
          loader.load_box(shared.dout(stage), p.dout, shared.dout_full(stage), C.block_m, row, at.head, batch, p.v_loads);
        }
        at.advance(block);
        if (++stage == C.stages) stage = 0, parity ^= 1;
      }
      ptx::mbarrier_arrive(shared.block_empty(n & 1));
    }
  }

  __device__ __forceinline__ void run() const {
    if (warp == 0) hand_out();
    else if (lane == 0 && warp == 1) load_tiles<true>();
    else if (lane == 0 && warp == 2) load_tiles<false>();
  }
};

// ---- dV and dK of the same 64 keys ----------------------------------------------------------------------------------

// What both consumers do. Fragments of P between them: the same thread of both has the same elements.
template <BackwardSm90Config C>
struct KeyConsumerSm90 : GradientSm90<C> {
  using G = GradientSm90<C>;
  using G::kA, G::kD, G::kS;
  __device__ __forceinline__ SharedKeySm90<C> key_shared() const { return {G::shared.base}; }
  __device__ __forceinline__ uint32_t weights_at(uint32_t step, int n) const {
    return key_shared().weights(step) + (G::warp * (kA / 4) + n) * 512 + G::lane * 16;
  }
  __device__ __forceinline__ uint32_t staging() const { return key_shared().staging() + G::warp * 2048; }
  __device__ __forceinline__ static void clear(float (&d)[kD]) {
#pragma unroll
    for (int i = 0; i < kD; ++i) d[i] = 0.f;
  }
  // The last product of a key block.
  __device__ __forceinline__ void finish(float (&d)[kD], uint32_t (&a)[kA], uint32_t rows, RingPosition& ring) const {
    G::issue_gradient(d, a, rows);
    ring.next_step();
    ring.next_stage(C.stages);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(d);
    ptx::wgmma_pin(a);
  }
};

// S, P, dV. The next S first, and P of it beside dV.
template <BackwardSm90Config C>
struct KeyPassValueSm90 : KeyConsumerSm90<C> {
  using Base = KeyConsumerSm90<C>;
  using G = GradientSm90<C>;
  using G::arrive, G::block, G::kA, G::kD, G::kS, G::shared;

  // S to P, in place. Hidden pairs: zeros, and the flag if their scores are not finite: see GradientSm90::weights.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(float (&x)[kS], int i0) const {
    uint32_t visible[2] = {}, largest = 0;
    if constexpr (kMasked) G::see(visible, i0);
#pragma unroll
    for (int n = 0; n < kS; ++n) {
      const float weight = ptx::exp2_approx(x[n] * G::p.scale_log2);
      if constexpr (kMasked) {
        const bool sees = (visible[n >> 1 & 1] >> (2 * (n / 4) + n % 2) & 1) != 0;
        largest = max(largest, sees ? 0u : __float_as_uint(x[n]) & 0x7fffffffu);
        x[n] = sees ? weight : 0.f;
      } else {
        x[n] = weight;
      }
    }
    if (kMasked && largest >= 0x7f800000u) G::tell_nonfinite();
  }

  // P of a tile, for the other consumer.
  __device__ __forceinline__ void hand_over(float (&x)[kS], int tile, uint32_t step) const {
    if (G::masked(tile * C.block_m))
      exponentials<true>(x, tile * C.block_m);
    else
      exponentials<false>(x, tile * C.block_m);
    ptx::mbarrier_wait(Base::key_shared().weights_empty(step), (step >> 1 & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < kA / 4; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = ptx::pack<typename G::T>(x[8 * i + 2 * e], x[8 * i + 2 * e + 1]);
      ptx::store_shared(Base::weights_at(step, i), make_uint4(a[0], a[1], a[2], a[3]));
    }
    __syncwarp();
    arrive(Base::key_shared().weights_full(step));
  }
  // And for dV. Packed again, behind the wait for the product before: its operands must not be written while it is under way. In a branch
  // (scale_log2 is never 0), or the compiler would do it between the next scores and the product that needs it, and take turns with both.
  __device__ __forceinline__ void pack(uint32_t (&a)[kA], const float (&x)[kS]) const {
    if (G::p.scale_log2 == 0.f) return;
#pragma unroll
    for (int n = 0; n < kA; ++n) a[n] = ptx::pack<typename G::T>(x[2 * n], x[2 * n + 1]);
  }

  __device__ __forceinline__ void walk(float (&dv)[kD], int left, RingPosition& ring, int n) const {
    TileWalk at(*block);
    float x[kS];
    uint32_t a_p[kA];
    ring.wait_k(shared, n);
    ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
    G::template issue_scores<false>(x, shared.k(0), shared.q(ring.stage), shared.rows(ring.stage));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(x);
    arrive(shared.empty(ring.stage));
    if (left == 1) arrive(Base::key_shared().k_empty());
    hand_over(x, at.tile, ring.step());
    pack(a_p, x);
    int done = uniform(ring.stage);
    ptx::mbarrier_wait(shared.dout_full(done), ring.parity());
    if (--left > 0) do {
        ring.next_step();
        ring.next_stage(C.stages);
        at.advance(*block);
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
        G::template issue_scores<false>(x, shared.k(0), shared.q(ring.stage), shared.rows(ring.stage));
        G::issue_gradient(dv, a_p, shared.dout(done));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(x);
        arrive(shared.empty(ring.stage));
        if (left == 1) arrive(Base::key_shared().k_empty());
        hand_over(x, at.tile, ring.step());
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dv);
        ptx::wgmma_pin(a_p);
        arrive(shared.dout_empty(done));
        ptx::wgmma_pin(x);
        pack(a_p, x);
        done = uniform(ring.stage);
        ptx::mbarrier_wait(shared.dout_full(done), ring.parity());
      } while (--left > 0);
    Base::finish(dv, a_p, shared.dout(done), ring);
    arrive(shared.dout_empty(done));
  }

  __device__ __forceinline__ void run(RingPosition& ring, int n) const {
    float dv[kD];
    Base::clear(dv);
    walk(dv, num_steps(*block), ring, n);
    ptx::mbarrier_wait(Base::key_shared().weights_empty(ring.step()), (ring.step() >> 1 & 1) ^ 1);
    G::store_dv(dv, Base::weights_at(ring.step(), 0) - G::lane * 16);
  }
};

// dP, dS, dK. dK first: with the next dP, which waits for a load, in front of it, the place of Q, and with it that load, comes later; each
// step took 3,500 cycles instead of 2,800.
template <BackwardSm90Config C>
struct KeyPassKeySm90 : KeyConsumerSm90<C> {
  using Base = KeyConsumerSm90<C>;
  using G = GradientSm90<C>;
  using G::arrive, G::block, G::kA, G::kD, G::kS, G::shared;

  // dP to dS, in place, with the P that the other consumer has left.
  __device__ __forceinline__ void take_over(float (&dp)[kS], uint32_t step) const {
    ptx::mbarrier_wait(Base::key_shared().weights_full(step), step >> 1 & 1);
#pragma unroll
    for (int n = 0; n < kA / 4; ++n) {
      const uint4 weights = ptx::load_shared_16(Base::weights_at(step, n));
      const uint32_t a_p[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 weight = G::unpack(a_p[e]);
        dp[8 * n + 2 * e] *= weight.x;
        dp[8 * n + 2 * e + 1] *= weight.y;
      }
    }
    __syncwarp();
    arrive(Base::key_shared().weights_empty(step));
  }
  // A dO that is not finite shows in dS, even where P is 0.
  __device__ __forceinline__ void pack(uint32_t (&a)[kA], const float (&ds)[kS], int tile) const {
#pragma unroll
    for (int n = 0; n < kA; ++n) a[n] = ptx::pack<typename G::T>(ds[2 * n], ds[2 * n + 1]);
    if (!G::masked(tile * C.block_m)) return;
    uint32_t largest = 0;
#pragma unroll
    for (int n = 0; n < kA; ++n) largest = ptx::max_magnitude<typename G::T>(largest, a[n]);
    if (ptx::has_nonfinite<typename G::T>(largest)) G::tell_nonfinite();
  }

  __device__ __forceinline__ void walk(float (&dk)[kD], int left, RingPosition& ring, int n) const {
    TileWalk at(*block);
    float dp[kS];
    uint32_t a_ds[kA];
    ring.wait_v(shared);
    ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
    ptx::mbarrier_wait(shared.dout_full(ring.stage), ring.parity());
    G::template issue_scores<true>(dp, shared.v(), shared.dout(ring.stage), shared.rows(ring.stage));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(dp);
    arrive(shared.dout_empty(ring.stage));
    if (left == 1) arrive(Base::key_shared().v_empty());
    take_over(dp, ring.step());
    pack(a_ds, dp, at.tile);
    int done = uniform(ring.stage);
    if (--left > 0) do {
        ring.next_step();
        ring.next_stage(C.stages);
        at.advance(*block);
        G::issue_gradient(dk, a_ds, shared.q(done));
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
        ptx::mbarrier_wait(shared.dout_full(ring.stage), ring.parity());
        G::template issue_scores<true>(dp, shared.v(), shared.dout(ring.stage), shared.rows(ring.stage));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(dk);
        ptx::wgmma_pin(a_ds);
        arrive(shared.empty(done));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        arrive(shared.dout_empty(ring.stage));
        if (left == 1) arrive(Base::key_shared().v_empty());
        take_over(dp, ring.step());
        pack(a_ds, dp, at.tile);
        done = uniform(ring.stage);
      } while (--left > 0);
    Base::finish(dk, a_ds, shared.q(done), ring);
    arrive(shared.empty(done));
  }

  __device__ __forceinline__ void run(RingPosition& ring, int n) const {
    float dk[kD];
    Base::clear(dk);
    walk(dk, num_steps(*block), ring, n);
    G::store_dk(dk, Base::staging());
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Grid and tasks: see backward_sm90_kernel.
template <Element kElement, int kHeadDim>
__global__ void __launch_bounds__(backward_sm90_config(kElement, kHeadDim, BackwardKind::kPlain, DqSums::kAny).num_threads(), 1)
    backward_sm90_key_kernel(const __grid_constant__ BackwardSm90Params p) {
  constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim, BackwardKind::kPlain, DqSums::kAny);
  static_assert(C.valid() && C.two_passes());
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedKeySm90<C> shared{ptx::shared_address(memory)};
  const int warpgroup = uniform(threadIdx.x / 128);
  const KeyBlocksSm90<C> blocks{p, shared, memory};
  const LoaderSm90<C, DqSums::kAny> loader{p, shared, blocks, memory};

  if (threadIdx.x == 0) {
    prefetch_maps(p);
    // Arrivals are once per warp: wgmma_wait is a wait of the warp.
    ptx::mbarrier_init(shared.k_full(0), 1);
    ptx::mbarrier_init(shared.v_full(), 1);
    ptx::mbarrier_init(shared.k_empty(), 4);
    ptx::mbarrier_init(shared.v_empty(), 4);
    ptx::mbarrier_init(shared.wanted(), 1);
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(shared.weights_full(n), 4);
      ptx::mbarrier_init(shared.weights_empty(n), 4);
      ptx::mbarrier_init(shared.block_full(n), 1);
      ptx::mbarrier_init(shared.block_empty(n), 4 * C.kConsumers + 2);
      ptx::mbarrier_init(shared.full(n), 1);
      ptx::mbarrier_init(shared.empty(n), 4 * C.kConsumers);
      ptx::mbarrier_init(shared.dout_full(n), 1);
      ptx::mbarrier_init(shared.dout_empty(n), 4 * C.kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  start_pass(p);

  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (warpgroup == 0) {
    ptx::give_registers<C.dq_registers()>();
    KeyProducerSm90<C>{loader, shared, warp, lane}.run();
  } else {
    ptx::take_registers<C.consumer_registers()>();  // of which 176 hold dK or dV, S or dP, P or dS as an operand
    KeyConsumerSm90<C> base{{p, shared, nullptr, warpgroup - 1, warp, lane}};
    RingPosition ring;
#pragma unroll 1
    for (int n = 0;; ++n) {
      base.block = &blocks.wait(n);
      if (uniform(base.block->b) < 0) break;
      if (warpgroup == 1)
        KeyPassValueSm90<C>{base}.run(ring, n);
      else
        KeyPassKeySm90<C>{base}.run(ring, n);
      blocks.release(n, lane);
    }
  }
  end_pass(p);
}

}  // namespace tilewise::cuda
