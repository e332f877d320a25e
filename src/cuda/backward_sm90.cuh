// Backward attention with the copy engine and the asynchronous tensor cores (sm_90a).
//
// A block owns block_n keys of one key head and walks the queries that see them, head by head of its group, in tiles of
// block_m rows:
//
//   S^T  = K Q^T - lse / scale        dP^T = V dO^T - delta
//   P^T  = 2^(S^T scale log2 e)       dS^T = P^T * dP^T
//   dV  += P^T dO                     dK  += dS^T Q                  dQ += dS K
//
// Two consumer warpgroups keep dK and dV in registers. Up to head dim 128 each has 64 keys of its own. Above, both have the
// same 64 keys: one makes P and dV, the other, from that P, dS and dK.
//
// The third warpgroup makes dQ from the dS that is left in shared memory, and adds it to a float32 sum in global memory. It is
// a step behind, so nobody waits for anybody at once, and the tensor cores have three warpgroups to choose from. lse and delta
// come as columns of the products, three bfloat16 each, times -1: read one by one they would wait behind the tensor cores'
// own reads of shared memory. docs/kernels/backward_sm90.md has the timeline.
#pragma once
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/gradient_sm90.cuh"

namespace tilewise::cuda {

// The tiles of a block, in order: head by head of the group. Blocks of a head that run side by side start with different
// tiles, so that their sums of dQ do not meet in the same place. With ordered sums all of them start with the last queries:
// those with fewer tiles stop earlier, and nobody waits for long.
struct TileWalk {
  int head, tile;
  __device__ __forceinline__ explicit TileWalk(const KeyBlock& block)
      : head(block.head_k * block.group), tile(block.start_tile) {}
  __device__ __forceinline__ void advance(const KeyBlock& block) {
    tile += block.direction;
    if (tile < block.first_tile) tile = block.first_tile + block.num_tiles - 1;
    if (tile >= block.first_tile + block.num_tiles) tile = block.first_tile;
    if (tile == block.start_tile) ++head;
  }
};

// The same number in all threads, and now the compiler knows. What a descriptor is made of must be such, or every product
// needs four moves to uniform registers.
__device__ __forceinline__ int uniform(int n) { return __shfl_sync(0xffffffffu, n, 0); }

// Tiles of all heads.
__device__ __forceinline__ int num_steps(const KeyBlock& block) { return uniform(block.group * block.num_tiles); }

// Where dQ of a tile goes, found out when the tile is loaded.
struct alignas(16) DqTarget {
  float* sum;     // [row / 16, column / 8, lane, 4]
  int32_t* turn;  // ordered sums: counts the key blocks that have added theirs, one count a warp
};

// ---- loads ----------------------------------------------------------------------------------------------------------

// Of a warp that loads. In shared memory: its warpgroup is short of registers.
struct LoadState {
  TileWalk at;
  int stage, loaded;
  uint32_t parity;
};
static_assert(sizeof(LoadState) <= 32);

// A whole warp executes all of this, and one lane the copies: after a branch of one thread that waits in a loop the compiler
// would no longer believe anything to be the same in all threads, descriptors included.
template <BackwardSm90Config C>
struct LoaderSm90 {
  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  const KeyBlock& block;
  unsigned char* const memory;

  __device__ __forceinline__ LoadState& state(int which) const {
    return reinterpret_cast<LoadState*>(memory + C.load_offset())[which];
  }
  __device__ __forceinline__ DqTarget& target(int n) const {
    return reinterpret_cast<DqTarget*>(memory + C.target_offset())[n % C.kTargets];
  }

  // One box of all panels of a tile, or a box a panel whose columns end at head_dim.
  __device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int rows, int row, int head,
                                           int batch, int count) const {
#pragma unroll
    for (int n = 0; n < C.panels(); ++n)
      if (n < count) ptx::tma_load(to + n * rows * 128, map, barrier, {{n * 64, row, 0, head, batch}});
  }

  // By one lane.
  __device__ __forceinline__ void load_keys() const {
    const SequenceParams& sequence = p.backward.sequence;
    const int row = static_cast<int>(block.s.k_begin) + block.first_key, batch = sequence.packed_k ? 0 : block.b;
    ptx::mbarrier_arrive_expect(shared.keys_full(), 2 * C.k_bytes());
    load_box(shared.k(), p.k, shared.keys_full(), C.block_n(), row, block.head_k, batch, p.qk_loads);
    load_box(shared.v(), p.v, shared.keys_full(), C.block_n(), row, block.head_k, batch, p.v_loads);
  }

  // The next tile of Q with lse and delta (kQ), of dO (kDout), or of all.
  template <bool kQ, bool kDout>
  __device__ __forceinline__ void load_next(int lane) const {
    LoadState& kept = state(kQ ? 0 : 1);
    const int stage = uniform(kept.stage), parity = uniform(static_cast<int>(kept.parity));
    ptx::mbarrier_wait(kQ ? shared.empty(stage) : shared.dout_empty(stage), static_cast<uint32_t>(parity));
    if (lane == 0) {
      LoadState s = kept;
      const BackwardParams& b = p.backward;
      const int64_t padded = s.at.head * b.padded_rows + padded_row(b.sequence, block.s.q_begin, block.b) + s.at.tile * C.block_m;
      const int row = static_cast<int>(block.s.q_begin) + s.at.tile * C.block_m, batch = b.sequence.packed_q ? 0 : block.b;
      const uint32_t full = kQ ? shared.full(stage) : shared.dout_full(stage);
      if constexpr (kQ) {
        DqTarget& to = target(s.loaded);
        to.sum = b.dq_sum + padded * C.head_dim;
        to.turn = b.turn + ((static_cast<int64_t>(s.at.head) * b.sequence.batch + block.b) * b.num_query_blocks + s.at.tile) * 4;
      }
      ptx::mbarrier_arrive_expect(full, (kQ + kDout) * C.q_bytes() + (kQ ? C.row_bytes() : 0));
      if constexpr (kQ) {
        load_box(shared.q(stage), p.q, full, C.block_m, row, s.at.head, batch, p.qk_loads);
        ptx::bulk_load(shared.rows(stage), b.row_columns + padded * 32, C.row_bytes(), full);
      }
      if constexpr (kDout) load_box(shared.dout(stage), p.dout, full, C.block_m, row, s.at.head, batch, p.v_loads);
      s.at.advance(block);
      ++s.loaded;
      if (++s.stage == C.stages) s.stage = 0, s.parity ^= 1;
      kept = s;
    }
    __syncwarp();
  }

  template <bool kQ, bool kDout, bool kKeys>
  __device__ __forceinline__ void start(int total, int lane) const {
    if (lane == 0) {
      if constexpr (kKeys) load_keys();
      state(kQ ? 0 : 1) = {TileWalk(block), 0, 0, 1};
    }
    __syncwarp();
    for (int n = 0; n < min(C.stages, total); ++n) load_next<kQ, kDout>(lane);
  }
};

// ---- dQ -------------------------------------------------------------------------------------------------------------

template <BackwardSm90Config C>
struct QueryGradientSm90 {
  using T = typename ElementType<C.element>::Type;
  using Keys = Panels<C.block_n()>;
  static constexpr int kDqColumns = 64;  // at a time, of 64 queries
  static constexpr int kPerRow = C.head_dim / kDqColumns, kParts = C.block_m / 64 * kPerRow;
  static constexpr int kDQ = kDqColumns / 2;

  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  const KeyBlock& block;
  const LoaderSm90<C> loader;
  const int warp, lane;

  // Ordered sums: how many key blocks see the tile before this one.
  __device__ __forceinline__ int turn_of(const TileWalk& at) const {
    const ScoreParams& score = p.backward.score;
    if (score.window_left < 0) return block.index;
    return block.index - max(0, at.tile * C.block_m + block.s.seqlen_k - block.s.seqlen_q - score.window_left) / C.block_n();
  }

  __device__ __forceinline__ void issue(float (&dq)[kDQ], int slot, int part) const {
    const int column = part % kPerRow * kDqColumns;
    const uint32_t a = ptx::descriptor(shared.ds(slot) + part / kPerRow * Keys::kPanelBytes);
    const uint32_t b = ptx::descriptor(shared.k() + column / 64 * Keys::kPanelBytes + column % 64 * 2);
    ptx::wgmma_pin(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.block_n() / 16; ++step)
      ptx::Wgmma<T, kDqColumns>::template ss<1, 1>(dq, a + Keys::row_step(step), b + Keys::row_step(step), step != 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void run() const {
    const int total = num_steps(block);
    const bool loads = !C.split && uniform(warp) == 0;
    if (loads) loader.template start<true, true, true>(total, lane);
    ptx::mbarrier_wait(shared.keys_full(), 0);
    TileWalk at(block);
#pragma unroll 1
    for (int n = 0; n < total; ++n) {
      ptx::mbarrier_wait(shared.ds_full(n & 1), n >> 1 & 1);
      // Consumers have left tile n - 1 when they write the dS of tile n.
      if (loads && n > 0 && n - 1 + C.stages < total) loader.template load_next<true, true>(lane);
      const int slot = uniform(n & 1);
      const DqTarget target = loader.target(n);
      float* const sum = target.sum + warp * 16 * C.head_dim + lane * 4;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float dq[kDQ];
        issue(dq, slot, part);
        if (part == 0 && p.backward.deterministic) {
          if (lane == 0)
            while (ptx::load_acquire(target.turn + warp) != turn_of(at)) {
            }
          __syncwarp();
          at.advance(block);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dq);
        if (part == kParts - 1 && lane == 0) ptx::mbarrier_arrive(shared.ds_empty(slot));
        if (p.backward.dq_sum == nullptr) continue;
        float* const out = sum + part / kPerRow * 64 * C.head_dim + part % kPerRow * kDqColumns * 16;
#pragma unroll
        for (int i = 0; i < kDQ / 4; ++i) ptx::add_global(out + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      }
      if (p.backward.deterministic) {  // once this warp's sums have arrived
        __threadfence();
        __syncwarp();
        if (lane == 0) ptx::add_release(target.turn + warp, 1);
      }
    }
  }
};

// ---- dK and dV of 64 keys --------------------------------------------------------------------------------------------

template <BackwardSm90Config C>
struct KeyGradientSm90 : GradientSm90<C> {
  using G = GradientSm90<C>;
  using G::arrive, G::block, G::consumer, G::kA, G::kD, G::kS, G::shared;
  float dk[kD], dv[kD];

  __device__ __forceinline__ void make_gradients(uint32_t (&a)[kA], const uint32_t (&a_p)[kA], const float (&dp)[kS], int i0) const {
    if (G::masked(i0)) {
#pragma unroll
      for (int n = 0; n < kA; n += 4) G::template gradients4<true>(a + n, a_p + n, dp + 2 * n);
    } else {
#pragma unroll
      for (int n = 0; n < kA; n += 4) G::template gradients4<false>(a + n, a_p + n, dp + 2 * n);
    }
  }

  // A step finds P of its tile: dV and dP; dS; dK, and S of the next tile. Products go out in pairs, and nothing is under way
  // during the pointwise phases: the other warpgroups fill the gaps. (Phases that run behind products of their own
  // warpgroup take 8 registers from dQ's, which then computes 32 columns at a time: 8 % slower.)
  __device__ __forceinline__ void walk(int total) {
    TileWalk at(block);
    int stage = 0, n = 0;
    uint32_t parity = 0;
    float x[kS];
    ptx::mbarrier_wait(shared.keys_full(), 0);
    ptx::mbarrier_wait(shared.full(0), 0);
    G::template issue_scores<false>(x, shared.k(), shared.q(0), shared.rows(0));
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(x);
#pragma unroll 1
    do {
      const int i0 = at.tile * C.block_m, done = stage;
      uint32_t a_p[kA], a_ds[kA];
      float dp[kS];
      G::make_weights(a_p, x, i0);
      G::template issue_both<true>(dv, a_p, shared.dout(stage), dp, shared.v(), shared.dout(stage), shared.rows(stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dv);
      ptx::wgmma_pin(a_p);
      ptx::wgmma_pin(dp);
      make_gradients(a_ds, a_p, dp, i0);
      G::write_ds(a_ds, n);
      if (++stage == C.stages) stage = 0, parity ^= 1;
      if (n + 1 < total) ptx::mbarrier_wait(shared.full(stage), parity);  // else: S of an old tile, not used
      G::template issue_both<false>(dk, a_ds, shared.q(done), x, shared.k(), shared.q(stage), shared.rows(stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dk);
      ptx::wgmma_pin(a_ds);
      ptx::wgmma_pin(x);
      arrive(shared.empty(done));
      at.advance(block);
    } while (++n < total);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < kD; ++n) dk[n] = dv[n] = 0.f;
    if (const int total = num_steps(block); total > 0) walk(total);
    ptx::barrier_sync(1 + consumer, 128);  // every warp is done with this warpgroup's rows of V
    G::store_dv(shared.v(), dv);
    G::store_dk(shared.v(), dk);
  }
};

// ---- split: dV and dK of the same 64 keys ----------------------------------------------------------------------------

// Fragments of P between the two warpgroups: the same thread of both has the same elements.
template <BackwardSm90Config C>
__device__ __forceinline__ uint32_t weights_at(const GradientSm90<C>& g, int n) {
  return g.shared.weights() + (g.warp * (g.kA / 4) + n) * 512 + g.lane * 16;
}

// S, P, dV. One of its warps loads K, V and dO.
template <BackwardSm90Config C>
struct SplitValueSm90 : GradientSm90<C> {
  using G = GradientSm90<C>;
  using G::arrive, G::block, G::kA, G::kD, G::kS, G::shared;
  const LoaderSm90<C> loader;

  __device__ __forceinline__ void run() {
    float dv[kD];
#pragma unroll
    for (int n = 0; n < kD; ++n) dv[n] = 0.f;
    const int total = num_steps(block);
    const bool loads = uniform(G::warp) == 0;
    if (total > 0) {
      if (loads) loader.template start<false, true, true>(total, G::lane);
      TileWalk at(block);
      int stage = 0, n = 0;
      uint32_t parity = 0;
      float x[kS];
      ptx::mbarrier_wait(shared.keys_full(), 0);
      ptx::mbarrier_wait(shared.full(0), 0);
      G::template issue_scores<false>(x, shared.k(), shared.q(0), shared.rows(0));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(x);
      arrive(shared.empty(0));
#pragma unroll 1
      do {
        uint32_t a_p[kA];
        G::make_weights(a_p, x, at.tile * C.block_m);
        ptx::mbarrier_wait(shared.weights_empty(), (n & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < kA / 4; ++i)
          ptx::store_shared(weights_at(*this, i), make_uint4(a_p[4 * i], a_p[4 * i + 1], a_p[4 * i + 2], a_p[4 * i + 3]));
        __syncwarp();
        arrive(shared.weights_full());
        ptx::mbarrier_wait(shared.dout_full(stage), parity);
        const int done = uniform(stage);
        if (stage = done ^ 1; stage == 0) parity ^= 1;
        if (n + 1 < total) ptx::mbarrier_wait(shared.full(stage), parity);  // else: S of an old tile, not used
        G::template issue_both<false>(dv, a_p, shared.dout(done), x, shared.k(), shared.q(stage), shared.rows(stage));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dv);
        ptx::wgmma_pin(a_p);
        ptx::wgmma_pin(x);
        arrive(shared.dout_empty(done));
        if (n + 1 < total) arrive(shared.empty(stage));
        if (loads && n + C.stages < total) loader.template load_next<false, true>(G::lane);
        at.advance(block);
      } while (++n < total);
    }
    ptx::barrier_sync(1, 256);  // the other warpgroup is done with V
    G::store_dv(shared.v(), dv);
  }
};

// dP, dS, dK. One of its warps loads Q, lse and delta.
template <BackwardSm90Config C>
struct SplitKeySm90 : GradientSm90<C> {
  using G = GradientSm90<C>;
  using G::arrive, G::block, G::kA, G::kD, G::kS, G::shared;
  const LoaderSm90<C> loader;

  template <bool kMasked>
  __device__ __forceinline__ void make_gradients(uint32_t (&a)[kA], const float (&dp)[kS]) const {
#pragma unroll
    for (int n = 0; n < kA; n += 4) {
      const uint4 weights = ptx::load_shared_16(weights_at(*this, n / 4));
      const uint32_t a_p[4] = {weights.x, weights.y, weights.z, weights.w};
      G::template gradients4<kMasked>(a + n, a_p, dp + 2 * n);
    }
  }

  __device__ __forceinline__ void run() {
    float dk[kD];
#pragma unroll
    for (int n = 0; n < kD; ++n) dk[n] = 0.f;
    const int total = num_steps(block);
    const bool loads = uniform(G::warp) == 0;
    if (total > 0) {
      if (loads) loader.template start<true, false, false>(total, G::lane);
      TileWalk at(block);
      int stage = 0, n = 0;
      uint32_t parity = 0;
      float dp[kS];
      ptx::mbarrier_wait(shared.keys_full(), 0);
      ptx::mbarrier_wait(shared.full(0), 0);
      ptx::mbarrier_wait(shared.dout_full(0), 0);
      G::template issue_scores<true>(dp, shared.v(), shared.dout(0), shared.rows(0));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(dp);
      arrive(shared.dout_empty(0));
#pragma unroll 1
      do {
        uint32_t a_ds[kA];
        ptx::mbarrier_wait(shared.weights_full(), n & 1);
        if (G::masked(at.tile * C.block_m))
          make_gradients<true>(a_ds, dp);
        else
          make_gradients<false>(a_ds, dp);
        __syncwarp();
        arrive(shared.weights_empty());
        G::write_ds(a_ds, n);
        const int done = uniform(stage);
        if (stage = done ^ 1; stage == 0) parity ^= 1;
        if (n + 1 < total) {  // else: dP of an old tile, not used
          ptx::mbarrier_wait(shared.full(stage), parity);
          ptx::mbarrier_wait(shared.dout_full(stage), parity);
        }
        G::template issue_both<true>(dk, a_ds, shared.q(done), dp, shared.v(), shared.dout(stage), shared.rows(stage));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        ptx::wgmma_pin(a_ds);
        ptx::wgmma_pin(dp);
        arrive(shared.empty(done));
        if (n + 1 < total) arrive(shared.dout_empty(stage));
        if (loads && n + C.stages < total) loader.template load_next<true, false>(G::lane);
        at.advance(block);
      } while (++n < total);
    }
    ptx::barrier_sync(1, 256);
    G::store_dk(shared.q(0), dk);  // no tile is on its way there
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Grid: key block inside key head inside batch entry (one more when keys are packed); under causal masks the blocks with
// the most queries come first.
template <Element kElement, int kHeadDim>
__global__ void __launch_bounds__(backward_sm90_config(kElement, kHeadDim).num_threads(), 1)
    backward_sm90_kernel(const __grid_constant__ BackwardSm90Params p) {
  constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim);
  static_assert(C.valid() && sizeof(KeyBlock) <= 128);
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedBackwardSm90<C> shared{ptx::shared_address(memory)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler knows
  KeyBlock& block = *reinterpret_cast<KeyBlock*>(memory + C.block_offset());

  if (threadIdx.x == 0) {
    unsigned index = blockIdx.x;
    // Whoever waits for a turn waits for a block that has started before.
    if (p.backward.deterministic) index = atomicAdd(reinterpret_cast<unsigned*>(p.backward.ticket), 1u);
    block = key_block_of<C.block_m, C.block_n()>(p.backward, index);
    ptx::tma_prefetch(p.q);
    ptx::tma_prefetch(p.k);
    ptx::tma_prefetch(p.v);
    ptx::tma_prefetch(p.dout);
    // Arrivals are once per warp: wgmma_wait is a wait of the warp.
    ptx::mbarrier_init(shared.keys_full(), 1);
    for (int n = 0; n < 2; ++n) {
      ptx::mbarrier_init(shared.ds_full(n), C.split ? 4 : 4 * C.kConsumers);
      ptx::mbarrier_init(shared.ds_empty(n), 4);
    }
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
  if (block.b >= p.backward.sequence.batch) {
    zero_key_tail<typename ElementType<kElement>::Type>(p.backward, block.head_k, block.index, C.block_n());
    return;
  }
  if (block.first_key >= block.s.capacity_k) return;

  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const LoaderSm90<C> loader{p, shared, block, memory};
  if (warpgroup == 0) {
    ptx::give_registers<C.kDqRegisters>();
    if (block.num_tiles > 0) QueryGradientSm90<C>{p, shared, block, loader, warp, lane}.run();
  } else {
    ptx::take_registers<C.kConsumerRegisters>();
    const GradientSm90<C> base{p, shared, block, warpgroup - 1, warp, lane};
    if constexpr (!C.split) {
      KeyGradientSm90<C> gradient{base};
      gradient.run();
    } else if (warpgroup == 1) {
      SplitValueSm90<C>{base, loader}.run();
    } else {
      SplitKeySm90<C>{base, loader}.run();
    }
  }
}

}  // namespace tilewise::cuda
