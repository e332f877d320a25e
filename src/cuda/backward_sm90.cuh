// Backward attention with the copy engine and the asynchronous tensor cores (sm_90a).
//
// A block stays on its multiprocessor and takes key block after key block: block_n keys of one key head. It walks the queries
// that see them, head by head of the group, in tiles of block_m rows:
//
//   S^T  = K Q^T - lse / scale        dP^T = V dO^T - delta
//   P^T  = 2^(S^T scale log2 e)       dS^T = P^T * dP^T
//   dV  += P^T dO                     dK  += dS^T Q                  dQ += dS K
//
// Two consumer warpgroups keep dK and dV in registers. Up to head dim 128 each has 64 keys of its own. Above, both have the
// same 64 keys: one makes P and dV, the other, from that P, dS and dK. (That with options; without, two passes make dQ, and dK and
// dV: backward_sm90_query.cuh, backward_sm90_key.cuh.)
//
// The third warpgroup makes dQ from the dS that is left in shared memory, and adds it to a float32 sum in global memory. It is
// a step behind, so nobody waits for anybody at once, and the tensor cores have three warpgroups to choose from. lse and delta
// come as columns of the products, three bfloat16 each, times -1: read one by one they would wait behind the tensor cores'
// own reads of shared memory. Queries of the next key block are loaded while this one ends, its keys as soon as this one's
// have been used for the last time. In some kernels a fourth warpgroup loads, hands out key blocks and minds the turns of ordered sums
// (backward_sm90_helpers.cuh). docs/kernels/backward_sm90.md has the timeline.
#pragma once
#include "cuda/backward_pre.cuh"
#include "cuda/backward_sm90_helpers.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/bias_sm90.cuh"

namespace tilewise::cuda {

// ---- dQ -------------------------------------------------------------------------------------------------------------

template <BackwardSm90Config C, DqSums kSums>
struct QueryGradientSm90 {
  using T = typename ElementType<C.element>::Type;
  using Keys = Panels<C.block_n()>;
  static constexpr int kDqColumns = 64;  // at a time, of 64 queries
  static constexpr int kPerRow = C.head_dim / kDqColumns, kParts = C.block_m / 64 * kPerRow;
  static constexpr int kDQ = kDqColumns / 2;

  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  const LoaderSm90<C, kSums> loader;
  const int warp, lane;

  // dS and K of a part, as descriptors.
  __device__ __forceinline__ uint32_t ds_of(int slot, int part) const {
    return ptx::descriptor(shared.ds(slot) + part / kPerRow * Keys::kPanelBytes);
  }
  __device__ __forceinline__ uint32_t k_of(int n, int part) const {
    const int column = part % kPerRow * kDqColumns;
    return ptx::descriptor(shared.k(n) + column / 64 * Keys::kPanelBytes + column % 64 * 2);
  }
  __device__ __forceinline__ void issue(float (&dq)[kDQ], uint32_t a, uint32_t b) const {
    ptx::wgmma_pin(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.block_n() / 16; ++step)
      ptx::Wgmma<T, kDqColumns>::template ss<1, 1>(dq, a + Keys::row_step(step), b + Keys::row_step(step), step != 0);
    ptx::wgmma_commit();
  }

  // A part of a tile's sums. Who adds first to a tile stores: nobody has to write zeros, or to read them.
  __device__ __forceinline__ void add(float* sum, int part, bool first, const float (&dq)[kDQ]) const {
    float* const out = sum + part / kPerRow * 64 * C.head_dim + part % kPerRow * kDqColumns * 16;
    if (kSums != DqSums::kAny && first) {
#pragma unroll
      for (int i = 0; i < kDQ / 4; ++i)
        *reinterpret_cast<float4*>(out + i * 128) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kDQ / 4; ++i) ptx::add_global(out + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }

  // With helpers: products and sums of the tiles, and nothing else.
  __device__ __forceinline__ void run_beside_helpers() const {
    const KeyBlocksSm90<C>& blocks = loader.blocks;
    const uint32_t own = warp * 16 * C.head_dim + lane * 4;  // in a tile's sum
    uint32_t step = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const KeyBlock& block = blocks.wait(n);
      if (uniform(block.b) < 0) break;
      int left = num_steps(block);
      ptx::mbarrier_wait(shared.k_full(n), n >> 1 & 1);
#pragma unroll 1
      for (; left > 0; --left, ++step) {
        ptx::mbarrier_wait(shared.ds_full(step & 1), step >> 1 & 1);
        __syncwarp();
        add_tile(n, uniform(step), own);
      }
      if constexpr (kSums == DqSums::kAny) arrive(shared.sums(n));
      blocks.release(n, lane);
    }
  }
  __device__ __forceinline__ void add_tile(int n, uint32_t step, uint32_t own) const {
    const int slot = static_cast<int>(step & 1);
    const uint32_t ds = ds_of(slot, 0), k = k_of(n, 0), panel = Keys::kPanelBytes >> 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float dq[kDQ];
      issue(dq, ds + part / kPerRow * panel, k + part % kPerRow * kDqColumns / 64 * panel);
      if (part == 0 && kSums != DqSums::kAny) ptx::mbarrier_wait(shared.turn(step), step >> 1 & 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dq);
      if (part == kParts - 1 && lane == 0) ptx::mbarrier_arrive(shared.ds_empty(slot));
      // Read here, and once a part: beside the products, where reads wait for theirs, or before them it is 2 to 3 % slower.
      const DqTarget& target = loader.target(step);
      if (p.backward.dq_sum != nullptr) add(target.sum + own, part, target.turn == 0, dq);
    }
    if constexpr (kSums != DqSums::kAny) arrive(shared.sums(step));
  }
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // Without: these warps pass turns, too, and one hands out the key blocks, one loads tiles.
  static constexpr bool kOrdered = kSums == DqSums::kOrdered;
  static constexpr int kClaimed = 1, kStored = 2, kAllStored = kClaimed + C.turns_per_block() * kStored;
  __device__ __forceinline__ int* counter(uint32_t step) const {
    return p.backward.turn + loader.target(step).counters + (kOrdered ? warp : 0);
  }

  // Lets the next key block add to the tile of a step, or all others, once this warp's sums have arrived. Ordered sums: counted
  // warp by warp.
  __device__ __forceinline__ void pass_turn(uint32_t step) const {
    __syncwarp();  // the release is for what all lanes have added
    if (lane == 0) ptx::add_release(counter(step), kOrdered ? 1 : kStored);
  }

  // By one thread for all, see add_tile(): what the counter was.
  __device__ __forceinline__ int claim(uint32_t step) const {
    return kSums == DqSums::kFirst && threadIdx.x == 0 ? atomicOr(counter(step), kClaimed) : 0;
  }

  // Products and sums of one tile of key block n.
  // `owes`: the turn of the tile before has not been passed. It is, behind this tile's products: sums take a microsecond to
  // arrive, and who waited for that first would be slower than the consumers. The turn is asked for before, and the answer is
  // there after. No value is read that another key block wrote, only added to in the second-level cache, so a relaxed load that
  // finds the turn is enough. Returns whether this tile's has to be passed.
  __device__ __forceinline__ bool add_tile(int n, uint32_t step, bool owes, int turn) const {
    const int slot = uniform(static_cast<int>(step & 1));
    DqTarget& target = loader.target(step);
    float* const sum = target.sum + warp * 16 * C.head_dim + lane * 4;
    if (kOrdered && lane == 0) turn = ptx::load_relaxed(counter(step));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float dq[kDQ];
      issue(dq, ds_of(slot, part), k_of(n, part));
      if (part == 0 && kSums != DqSums::kAny) {
        if (owes) pass_turn(step - 1);
        if constexpr (kOrdered) {
          if (lane == 0)
            while (turn != target.turn) turn = ptx::load_acquire(counter(step));
          __syncwarp();
        } else {
          // One warp asks for all: if each did, one could wait for a tile of another block while the next has claimed the tile
          // that the other block waits for, and cannot go on, since products are of the four together.
          if (warp == 0 && lane == 0) {
            while (turn != 0 && turn < kAllStored) turn = ptx::load_acquire(counter(step));
            target.turn = turn;
          }
          ptx::barrier_sync(1, 128);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dq);
      if (part == kParts - 1 && lane == 0) ptx::mbarrier_arrive(shared.ds_empty(slot));
      if (p.backward.dq_sum != nullptr) add(sum, part, target.turn == 0, dq);
    }
    return kOrdered || (kSums == DqSums::kFirst && target.turn == 0);
  }

  // The next key block; with two slots, its K is loaded at once.
  __device__ __forceinline__ void publish(int n, int ticket) const {
    loader.blocks.publish(n, ticket, lane);
    if (C.k_slots() == 2 && lane == 0) loader.template load_keys<true>(n);
    __syncwarp();
  }

  // With so many tiles left of a key block the next ticket is asked for, and what it stands for is found out: 3,000 cycles by one warp.
  static constexpr int kAsk = 6, kPublish = 4;

  // One of these warps also hands out the key blocks and loads keys, and another, if not split, loads tiles: while one warp did both, Q
  // came 3,000 cycles late.
  __device__ __forceinline__ void run() const {
    const KeyBlocksSm90<C>& blocks = loader.blocks;
    const bool leads = uniform(warp) == (C.split ? 0 : 1), loads = !C.split && uniform(warp) == 0;
    int ticket = 0;
    if (leads) {
      publish(0, blocks.take_ticket(lane));
      if (lane == 0) {
        if (C.k_slots() == 1) loader.template load_keys<true>(0);
        loader.template load_keys<false>(0);
      }
      __syncwarp();
    }
    RingPosition ring;
    bool owes = false;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const KeyBlock& block = blocks.wait(n);
      if (uniform(block.b) < 0) break;
      int left = num_steps(block);
      if (loads) loader.template load<true>(ring.step() + 2, n, false, lane);
      ring.wait_k(shared, n);
      if (leads && left < kAsk) ticket = blocks.take_ticket(lane);
      if (leads && left < kPublish) publish(n + 1, ticket);
#pragma unroll 1
      for (; left > 0; --left, ring.next_step()) {
        if (leads && left == kAsk) ticket = blocks.take_ticket(lane);
        if (leads && left == kPublish) publish(n + 1, ticket);
        const uint32_t barrier = shared.ds_full(ring.step() & 1), parity = ring.step() >> 1 & 1;
        if (owes && !uniform(ptx::mbarrier_done(barrier, parity))) pass_turn(ring.step() - 1), owes = false;
        const int turn = claim(ring.step());  // the answer is there after the wait
        // Q as soon as consumers have left that of the tile before this one. When they write the dS of this one, they have left
        // its dO, too.
        const bool loaded = loads && loader.template load_next<true>(ring.step() + 3, n, left <= 3, left > 2, lane);
        ptx::mbarrier_wait(barrier, parity);
        if (loaded) loader.load_dout(lane);
        if (C.split && leads && left == 1 && lane == 0) loader.template load_keys<false>(n + 1);  // they have left V, with dP
        __syncwarp();
        owes = add_tile(n, ring.step(), owes, turn);
      }
      if constexpr (C.k_slots() == 1) {
        ptx::barrier_sync(1, 128);  // the four warps' products with K are done
        if (leads && lane == 0) loader.template load_keys<true>(n + 1);
      }
      if (owes) pass_turn(ring.step() - 1), owes = false;
      int done = n;
      asm volatile("" : "+r"(done));  // or the address would be kept through the loop above, in local memory
      if (p.backward.done != nullptr) {
        // One warp for all, since it waits until all sums have arrived, 2,500 cycles, and not the one that loads.
        ptx::barrier_sync(1, 128);
        if (uniform(warp) == 2 && lane == 0) blocks.count_done(blocks.at(done));
      }
      blocks.release(done, lane);
    }
  }
};

// ---- dK and dV of 64 keys --------------------------------------------------------------------------------------------

template <BackwardSm90Config C>
struct KeyGradientSm90 : PointwiseSm90<C> {
  using G = PointwiseSm90<C>;
  using G::arrive, G::block, G::consumer, G::kA, G::kD, G::kS, G::shared;
  float dk[kD], dv[kD];

  __device__ __forceinline__ void make_gradients(uint32_t (&a)[kA], const uint32_t (&a_p)[kA], const float (&dp)[kS], int i0,
                                                 uint32_t s_rows) const {
    uint32_t largest = 0;
    if (G::masked(i0)) {
#pragma unroll
      for (int n = 0; n < kA; n += 4) G::template gradients4<true>(a + n, a_p + n, dp + 2 * n, largest, n, s_rows);
      if (ptx::has_nonfinite<typename G::T>(largest)) G::tell_nonfinite();
    } else {
#pragma unroll
      for (int n = 0; n < kA; n += 4) G::template gradients4<false>(a + n, a_p + n, dp + 2 * n, largest, n, s_rows);
    }
  }

  // A step finds S of its tile in x: P; dV and dP; dS; dK, and S of the next tile, be it of the next key block. Products go out
  // in pairs, and nothing is under way during the pointwise phases: the other warpgroups fill the gaps. (Phases that run behind
  // products of their own warpgroup take 8 registers from dQ's, which then computes 32 columns at a time: 8 % slower.)
  template <DqSums kSums>
  __device__ __forceinline__ void run(const LoaderSm90<C, kSums>& loader) {
    const KeyBlocksSm90<C>& blocks = loader.blocks;
    RingPosition ring;
    int n = 0;
    block = &blocks.wait(n);
    if (uniform(block->b) < 0) return;
    int left = num_steps(*block);
    TileWalk at(*block);
    float x[kS];
    uint32_t a_p[kA], a_ds[kA];
    typename G::State state;
    clear();
    ring.wait_k(shared, n);
    G::begin_head(*block, at.head);
    G::load_facts(state);
    G::copy_bias(*block, at.head, at.tile);
    ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
    G::template issue_scores<false>(x, shared.k(n), shared.q(ring.stage), shared.rows(ring.stage));
    G::load_lse(state, shared.rows(ring.stage));
    G::draw(state, at.tile);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(x);
    ring.wait_v(shared);
#pragma unroll 1
    for (;;) {
      const int i0 = at.tile * C.block_m, done = ring.stage;
      float dp[kS];
      G::make_weights(a_p, state, x, i0, at.head, shared.rows(done), ring.step());
      G::template issue_both<true>(dv, a_p, shared.dout(ring.step()), dp, shared.v(), shared.dout(ring.step()), shared.rows(done));
      if constexpr (C.copies_bias()) {
        if (left > 1 && G::copies_early()) {
          TileWalk next = at;
          next.advance(*block);
          G::copy_bias(*block, next.head, next.tile);
        }
      }
      G::load_delta(state, shared.rows(done));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dv);
      ptx::wgmma_pin(a_p);
      ptx::wgmma_pin(dp);
      if constexpr (C.copies_bias())
        G::make_gradients(a_ds, [&](int n) { return make_uint4(a_p[4 * n], a_p[4 * n + 1], a_p[4 * n + 2], a_p[4 * n + 3]); }, dp, state, shared.rows(done));
      else
        make_gradients(a_ds, G::for_gradients(a_p, state), dp, i0, shared.rows(done));
      G::write_ds(a_ds, ring.step());
      G::add_sums(a_ds, i0, at.head);
      ring.next_step();
      ring.next_stage(C.stages);
      bool more = true;
      int keys = n;
      if (--left == 0) {
        more = uniform(blocks.wait(++keys).b) >= 0;
        if (more) {
          loader.load_v_by_last(keys, G::lane);
          ring.wait_k(shared, keys);
        }
      }
      if constexpr (!C.plain()) {
        const int head = at.head;
        if (left > 0) at.advance(*block);
        else if (more) at = TileWalk(blocks.at(keys));
        if (left == 0 || at.head != head) {
          G::end_head(head);
          if (more) G::begin_head(blocks.at(keys), at.head);
        }
        G::load_facts(state);
      }
      if (more) {
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
        G::template issue_both<false>(dk, a_ds, shared.q(done), x, shared.k(keys), shared.q(ring.stage), shared.rows(ring.stage));
        G::draw(state, at.tile);
        G::prefetch_bias(blocks.at(keys), at.head, at.tile);
        if (left == 0 || !G::copies_early()) G::copy_bias(blocks.at(keys), at.head, at.tile);
        G::load_lse(state, shared.rows(ring.stage));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        ptx::wgmma_pin(a_ds);
        ptx::wgmma_pin(x);
      } else {
        G::issue_gradient(dk, a_ds, shared.q(done));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        ptx::wgmma_pin(a_ds);
#pragma unroll
        for (int i = 0; i < kS; ++i) x[i] = 0.f;  // or this tile's S would have to be kept until here
      }
      arrive(shared.empty(done));
      if constexpr (C.plain()) at.advance(*block);
      if (left > 0) continue;
      G::wait_ds(ring.step());
      G::store_dv(dv, G::ds_rows(ring.step()));
      G::store_dk(dk, G::ds_rows(ring.step()));
      blocks.release(n, G::lane);
      if (!more) return;
      block = &blocks.at(++n);
      left = num_steps(*block);
      at = TileWalk(*block);
      clear();
      ring.wait_v(shared);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kD; ++i) dk[i] = dv[i] = 0.f;
  }
};

// ---- split: dV and dK of the same 64 keys ----------------------------------------------------------------------------

// Fragments of P between the two warpgroups: the same thread of both has the same elements.
template <BackwardSm90Config C>
__device__ __forceinline__ uint32_t weights_at(const GradientSm90<C>& g, int n) {
  return g.shared.weights() + (g.warp * (g.kA / 4) + n) * 512 + g.lane * 16;
}

// S, P, dV. One of its warps loads dO.
template <BackwardSm90Config C, DqSums kSums>
struct SplitValueSm90 : PointwiseSm90<C> {
  using G = PointwiseSm90<C>;
  using G::arrive, G::block, G::kA, G::kD, G::kS, G::shared;
  const LoaderSm90<C, kSums> loader;

  static constexpr bool kLeavesRows = C.lse_is_column();  // with the product of S

  // n: of the key block.
  __device__ __forceinline__ void walk(float (&dv)[kD], int left, RingPosition& ring, int n) const {
    const bool loads = uniform(G::warp) == 0;
    if (loads) loader.template load<false>(ring.step() + C.stages, n, true, G::lane);
    TileWalk at(*block);
    float x[kS];
    uint32_t a_p[kA];
    typename G::State state;
    int done;
    ring.wait_k(shared, n);
    G::begin_head(*block, at.head);
    G::load_facts(state);
    G::copy_bias(*block, at.head, at.tile);
    ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
    G::template issue_scores<false>(x, shared.k(0), shared.q(ring.stage), shared.rows(ring.stage));
    G::draw(state, at.tile);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(x);
    if constexpr (kLeavesRows) arrive(shared.empty(ring.stage));
#pragma unroll 1
    for (;;) {
      G::make_weights(a_p, state, x, at.tile * C.block_m, at.head, shared.rows(ring.stage), ring.step());
      if constexpr (!kLeavesRows) arrive(shared.empty(ring.stage));
      ptx::mbarrier_wait(shared.weights_empty(), (ring.step() & 1) ^ 1);
      const auto& weights = G::for_gradients(a_p, state);
#pragma unroll
      for (int i = 0; i < kA / 4; ++i)
        ptx::store_shared(weights_at(*this, i), make_uint4(weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]));
      __syncwarp();
      arrive(shared.weights_full());
      ptx::mbarrier_wait(shared.dout_full(ring.stage), ring.parity());
      done = uniform(ring.stage);
      ring.next_step();
      ring.next_stage(C.stages);
      if (--left == 0) break;
      const int head = at.head;
      at.advance(*block);
      if (at.head != head) G::begin_head(*block, at.head);
      G::load_facts(state);
      ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
      G::template issue_both<false>(dv, a_p, shared.dout(done), x, shared.k(0), shared.q(ring.stage), shared.rows(ring.stage));
      G::draw(state, at.tile);
      G::prefetch_bias(*block, at.head, at.tile);
      G::copy_bias(*block, at.head, at.tile);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dv);
      ptx::wgmma_pin(a_p);
      ptx::wgmma_pin(x);
      arrive(shared.dout_empty(done));
      if constexpr (kLeavesRows) arrive(shared.empty(ring.stage));
      if (loads) loader.template load_next<false>(ring.step() + C.stages, n, true, left > 1, G::lane);
    }
    G::issue_gradient(dv, a_p, shared.dout(done));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(dv);
    ptx::wgmma_pin(a_p);
    arrive(shared.dout_empty(done));
    if (loads) loader.template load_next<false>(ring.step() + C.stages, n, true, false, G::lane);
  }

  __device__ __forceinline__ void run(RingPosition& ring, int n) const {
    float dv[kD];
#pragma unroll
    for (int i = 0; i < kD; ++i) dv[i] = 0.f;
    walk(dv, num_steps(*block), ring, n);
    ptx::mbarrier_wait(shared.weights_empty(), (ring.step() & 1) ^ 1);
    G::store_dv(dv, weights_at(*this, 0) - G::lane * 16);
  }
};

// dP, dS, dK. One of its warps loads Q, lse and delta.
template <BackwardSm90Config C, DqSums kSums>
struct SplitKeySm90 : PointwiseSm90<C> {
  using G = PointwiseSm90<C>;
  using G::arrive, G::block, G::kA, G::kD, G::kS, G::shared;
  const LoaderSm90<C, kSums> loader;

  template <bool kMasked>
  __device__ __forceinline__ void make_gradients(uint32_t (&a)[kA], const float (&dp)[kS], uint32_t s_rows) const {
    uint32_t largest = 0;
#pragma unroll
    for (int n = 0; n < kA; n += 4) {
      const uint4 weights = ptx::load_shared_16(weights_at(*this, n / 4));
      const uint32_t a_p[4] = {weights.x, weights.y, weights.z, weights.w};
      G::template gradients4<kMasked>(a + n, a_p, dp + 2 * n, largest, n, s_rows);
    }
    if (kMasked && ptx::has_nonfinite<typename G::T>(largest)) G::tell_nonfinite();
  }

  __device__ __forceinline__ void walk(float (&dk)[kD], int left, RingPosition& ring, int n) const {
    const bool loads = uniform(G::warp) == 0;
    if (loads) loader.template load<true>(ring.step() + C.stages, n, true, G::lane);
    TileWalk at(*block);
    float dp[kS];
    uint32_t a_ds[kA];
    [[maybe_unused]] typename G::State state;
    int done;
    ring.wait_v(shared);
    ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
    ptx::mbarrier_wait(shared.dout_full(ring.stage), ring.parity());
    G::template issue_scores<true>(dp, shared.v(), shared.dout(ring.stage), shared.rows(ring.stage));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(dp);
    arrive(shared.dout_empty(ring.stage));
#pragma unroll 1
    for (;;) {
      ptx::mbarrier_wait(shared.weights_full(), ring.step() & 1);
      if constexpr (C.copies_bias())
        G::make_gradients(a_ds, [&](int n) { return ptx::load_shared_16(weights_at(*this, n)); }, dp, state, shared.rows(ring.stage));
      else if (G::masked(at.tile * C.block_m))
        make_gradients<true>(a_ds, dp, shared.rows(ring.stage));
      else
        make_gradients<false>(a_ds, dp, shared.rows(ring.stage));
      __syncwarp();
      arrive(shared.weights_empty());
      G::write_ds(a_ds, ring.step());
      ring.next_step();
      done = uniform(ring.stage);
      ring.next_stage(C.stages);
      if (--left == 0) break;
      ptx::mbarrier_wait(shared.full(ring.stage), ring.parity());
      ptx::mbarrier_wait(shared.dout_full(ring.stage), ring.parity());
      G::template issue_both<true>(dk, a_ds, shared.q(done), dp, shared.v(), shared.dout(ring.stage), shared.rows(ring.stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dk);
      ptx::wgmma_pin(a_ds);
      ptx::wgmma_pin(dp);
      arrive(shared.empty(done));
      arrive(shared.dout_empty(ring.stage));
      if (loads) loader.template load_next<true>(ring.step() + C.stages, n, true, left > 1, G::lane);
      at.advance(*block);
    }
    G::issue_gradient(dk, a_ds, shared.q(done));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(dk);
    ptx::wgmma_pin(a_ds);
    arrive(shared.empty(done));
    if (loads) loader.template load_next<true>(ring.step() + C.stages, n, true, false, G::lane);
  }

  __device__ __forceinline__ void run(RingPosition& ring, int n) const {
    float dk[kD];
#pragma unroll
    for (int i = 0; i < kD; ++i) dk[i] = 0.f;
    walk(dk, num_steps(*block), ring, n);
    G::wait_ds(ring.step());
    G::store_dk(dk, G::ds_rows(ring.step()));
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Grid: one block a multiprocessor, or fewer. Tasks: key block inside key head inside batch entry (one more when keys are
// packed); under causal masks the key blocks with the most queries come first, unless sums are ordered.
template <Element kElement, int kHeadDim, DqSums kSums, BackwardKind kKind>
__global__ void __launch_bounds__(backward_sm90_config(kElement, kHeadDim, kKind, kSums).num_threads(), 1)
    backward_sm90_kernel(const __grid_constant__ BackwardSm90Params p) {
  constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim, kKind, kSums);
  static_assert(C.valid() && !C.two_passes());
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedBackwardSm90<C> shared{ptx::shared_address(memory)};
  const int warpgroup = uniform(threadIdx.x / 128);
  const KeyBlocksSm90<C> blocks{p, shared, memory};
  const LoaderSm90<C, kSums> loader{p, shared, blocks, memory};

  if (p.backward.done == nullptr) ptx::let_next_kernel_start();
  if (threadIdx.x == 0) {
    prefetch_maps(p);
    // Arrivals are once per warp: wgmma_wait is a wait of the warp.
    ptx::mbarrier_init(shared.v_full(), 1);
    ptx::store_shared(shared.base + C.count_offset(), 0u);
    for (int n = 0; n < C.k_slots(); ++n) ptx::mbarrier_init(shared.k_full(n), 1);
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(shared.ds_full(n), C.split ? 4 : 4 * C.kConsumers);
      ptx::mbarrier_init(shared.ds_empty(n), 4);
      ptx::mbarrier_init(shared.block_full(n), 1);
      ptx::mbarrier_init(shared.block_empty(n), 4 * (C.kConsumers + 1) + C.helpers);
      LoadState& s = loader.state(n);
      s.block = -1, s.left = s.stage = s.loaded = 0, s.parity = 1;
    }
    if constexpr (C.helpers) {
      ptx::mbarrier_init(shared.wanted(), 1);
      for (int n = 0; n < 2; ++n) {
        ptx::mbarrier_init(shared.turn(n), 2);
        ptx::mbarrier_init(shared.sums(n), 4);
      }
      for (int n = 0; n < C.kTargets; ++n) ptx::mbarrier_init(shared.target_full(n), 1);
    }
    if constexpr (C.copies_bias())
      for (int n = 0; n < 2 * C.bias_warps(); ++n) ptx::mbarrier_init(shared.bias_full(n / 2, n % 2), 1);
    ptx::mbarrier_init(shared.weights_full(), 4);
    ptx::mbarrier_init(shared.weights_empty(), 4);
    for (int n = 0; n < C.stages; ++n) {
      ptx::mbarrier_init(shared.full(n), 1);
      ptx::mbarrier_init(shared.empty(n), 4 * C.kConsumers);
      ptx::mbarrier_init(shared.dout_full(n), 1);
      ptx::mbarrier_init(shared.dout_empty(n), 4 * C.kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::wait_for_previous_kernels();
  if (p.backward.done != nullptr) ptx::let_next_kernel_start();  // post looks at what pre has cleared
  if constexpr (!C.plain()) {
    if (C.has_sums() && warpgroup > 0 && (C.dalibi_lanes() == 32 || threadIdx.x - 128 < C.kConsumers * 4 * C.dalibi_lanes()))
      ptx::store_shared(shared.base + C.dalibi_offset() + (threadIdx.x - 128) * 4, 0u);
    if (threadIdx.x == 0) {
      if (C.has_sums() && p.backward.dbias.sum)
        ptx::store_shared(shared.base + C.unit_offset(), __float_as_uint(ldexpf(1.f, dbias_exponent(p.backward.dbias, p.backward.head_dim_v))));
      const Dropout dropout = resolve_dropout(p.backward.score);
      ptx::store_shared(shared.base + C.seed_offset(),
                        make_uint4(dropout.seed, dropout.seed >> 32, dropout.offset, dropout.offset >> 32));
    }
    __syncthreads();
  }

  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (warpgroup == 0) {
    ptx::give_registers<C.dq_registers()>();
    const QueryGradientSm90<C, kSums> gradient{p, shared, loader, warp, lane};
    if constexpr (C.helpers)
      gradient.run_beside_helpers();
    else
      gradient.run();
  } else if (C.helpers && warpgroup == 3) {
    ptx::give_registers<C.kHelperRegisters>();
    HelpersSm90<C, kSums>{p, shared, loader, lane}.run(warp);
  } else {
    ptx::take_registers<C.consumer_registers()>();
    PointwiseSm90<C> base{p, shared, nullptr, warpgroup - 1, warp, lane};
    if constexpr (!C.split) {
      KeyGradientSm90<C>{base}.run(loader);
    } else {
      RingPosition ring;
#pragma unroll 1
      for (int n = 0;; ++n) {
        base.block = &blocks.wait(n);
        if (uniform(base.block->b) < 0) break;
        if (warpgroup == 1)
          SplitValueSm90<C, kSums>{base, loader}.run(ring, n);
        else
          SplitKeySm90<C, kSums>{base, loader}.run(ring, n);
        blocks.release(n, lane);
      }
    }
  }
}

}  // namespace tilewise::cuda
