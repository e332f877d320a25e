// Four warps of backward_sm90 that do what would keep dQ's warps from products: one loads tiles, one hands out key blocks, one waits for
// turns, one passes them.
#pragma once
#include "cuda/backward_sm90_producer.cuh"

namespace tilewise::cuda {

template <BackwardSm90Config C, DqSums kSums>
struct HelpersSm90 {
  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  const LoaderSm90<C, kSums> loader;
  const int lane;

  __device__ __forceinline__ void run(int warp) const {
    const int role = uniform(warp);
    if (role == 1) return hand_out();
    if (lane != 0) return;
    if (role == 0) load_tiles();
    if (role == 2 && kSums != DqSums::kAny) await_turns();
    if (role == 3) pass_turns();
  }

  // With so many tiles of a key block left to load the next one is asked for: as late as possible, see KeyBlocksSm90::take_ticket(), but
  // ticket and answer take 5,000 cycles.
  static constexpr int kAsk = 3;

  // The tiles of all key blocks. Q as soon as consumers have left that of three tiles before; when they have written the dS of the tile
  // before the last one, they have left its dO.
  __device__ __forceinline__ void load_tiles() const {
    int stage = 0;
    uint32_t parity = 1, step = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const KeyBlock& block = loader.blocks.wait(n);
      if (block.b < 0) return;
      TileWalk at(block);
      int left = block.group * block.num_tiles;
      if (left < kAsk) ptx::mbarrier_arrive(shared.wanted());
#pragma unroll 1
      for (; left > 0; --left, ++step) {
        if (left == kAsk) ptx::mbarrier_arrive(shared.wanted());
        ptx::mbarrier_wait(shared.empty(stage), parity);
        const int row = static_cast<int>(block.s.q_begin) + at.tile * C.block_m, batch = p.backward.sequence.packed_q ? 0 : block.b;
        // In any order it is the arrival in load_queries() that dQ's warps know it by.
        if constexpr (kSums == DqSums::kAny) loader.set_target(loader.target(step), block, at);
        loader.load_queries(block, at, stage, row, batch);
        if constexpr (kSums != DqSums::kAny) {
          loader.set_target(loader.target(step), block, at);
          ptx::mbarrier_arrive(shared.target_full(step));
        }
        ptx::mbarrier_wait(shared.ds_full(step & 1), (step >> 1 & 1) ^ 1);
        loader.load_box(shared.dout(step), p.dout, shared.full(stage), C.block_m, row, at.head, batch, p.v_loads);
        at.advance(block);
        if (++stage == C.stages) stage = 0, parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ void publish(int n) const {
    loader.blocks.publish(n, loader.blocks.take_ticket(lane), lane);
    if (lane == 0) loader.template load_keys<true>(n);
    __syncwarp();
  }

  __device__ __forceinline__ void hand_out() const {
    publish(0);
    if (lane == 0) loader.template load_keys<false>(0);
    __syncwarp();
#pragma unroll 1
    for (int n = 0; uniform(loader.blocks.at(n).b) >= 0; ++n) {
      ptx::mbarrier_wait(shared.wanted(), n & 1);
      __syncwarp();
      publish(n + 1);
    }
  }

  // Tells dQ's warps of each tile that they may add to it: once all that come before have.
  static constexpr int kClaimed = 1, kStored = 2, kAllStored = kClaimed + C.turns_per_block() * kStored;
  __device__ __forceinline__ void await_turns() const {
    uint32_t step = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const KeyBlock& block = loader.blocks.wait(n);
      if (block.b < 0) return;
#pragma unroll 1
      for (int left = block.group * block.num_tiles; left > 0; --left, ++step) {
        ptx::mbarrier_wait(shared.target_full(step), step / C.kTargets & 1);
        DqTarget& target = loader.target(step);
        int* const counter = p.backward.turn + target.counters;
        if constexpr (kSums == DqSums::kOrdered) {
          ptx::wait_acquire(counter, target.turn);
        } else {
          const int seen = atomicOr(counter, kClaimed);
          if (seen != 0) ptx::wait_acquire(counter, kAllStored);
          target.turn = seen;
        }
        ptx::mbarrier_wait(shared.turn(step), (step >> 1 & 1) ^ 1);
        ptx::mbarrier_arrive(shared.turn(step));
      }
    }
  }

  // Lets others add to a tile once the sums of all four warps have arrived.
  __device__ __forceinline__ void pass_turns() const {
    uint32_t step = 0;
    if constexpr (kSums != DqSums::kAny) {
      ptx::mbarrier_arrive(shared.turn(0));
      ptx::mbarrier_arrive(shared.turn(1));
    }
#pragma unroll 1
    for (int n = 0;; ++n) {
      const KeyBlock& block = loader.blocks.wait(n);
      if (block.b < 0) return;
      if constexpr (kSums == DqSums::kAny) {
        ptx::mbarrier_wait(shared.sums(n), n >> 1 & 1);
      } else {
#pragma unroll 1
        for (int left = block.group * block.num_tiles; left > 0; --left, ++step) {
          ptx::mbarrier_wait(shared.sums(step), step >> 1 & 1);
          const DqTarget& target = loader.target(step);
          if (kSums == DqSums::kOrdered || target.turn == 0)
            ptx::add_release(p.backward.turn + target.counters, kSums == DqSums::kOrdered ? 1 : kStored);
          ptx::mbarrier_arrive(shared.turn(step));
        }
      }
      loader.blocks.count_done(block);
      ptx::mbarrier_arrive(shared.block_empty(n & 1));
    }
  }
};

}  // namespace tilewise::cuda
