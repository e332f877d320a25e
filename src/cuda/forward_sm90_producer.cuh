// The producer warpgroup of forward_sm90: tiles handed out, Q, K and V loaded ahead of their use, O stored after it.
#pragma once
#include "cuda/params_sm90.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/forward_sm90_shared.cuh"

namespace tilewise::cuda {

// One box of all panels of a tile, or a box a panel whose columns end at head_dim.
template <ForwardSm90Config C>
__device__ __forceinline__ void load_tile(const ForwardSm90Params& p, uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                          int rows, int row, int head, int batch) {
  ptx::tma_load(to, map, barrier, {{0, row, 0, head, batch}});
  if constexpr (C.panels() > 1)
    for (int n = 1; n < p.loads_per_tile; ++n)
      ptx::tma_load(to + n * rows * 128, map, barrier, {{n * 64, row, 0, head, batch}});
}

// One thread: decides which tile comes next, and loads its Q as soon as there is room. With a counter, it takes the next
// tile as late as it can without waiting, so that blocks finish together.
template <ForwardSm90Config C>
__device__ __forceinline__ void hand_out_tiles(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory) {
  Ring<C.q_slots> q;
  TileSource<C.block_m()> source(p);
  uint32_t parity = 0;
  for (unsigned tile = 0;; ++tile) {
    Work& work = *shared.work(memory, tile);
    source.write(work);
    ptx::mbarrier_arrive(shared.work_full(tile));
    ptx::mbarrier_wait(shared.q_empty(q.stage), q.parity ^ 1);
    if (work.first_row < 0) {
      ptx::mbarrier_arrive(shared.q_full(q.stage));
      return;
    }
    ptx::mbarrier_arrive_expect(shared.q_full(q.stage), C.q_bytes());
    load_tile<C>(p, shared.q(q.stage), p.q, shared.q_full(q.stage), C.block_m(), work.q_begin + work.first_row, work.head,
                 p.forward.sequence.packed_q ? 0 : work.batch);
    q.advance();
    if (p.order.counter != nullptr) {
      ptx::mbarrier_wait(shared.take_next(), parity);
      parity ^= 1;
    }
    source.tile = source.take_next();
  }
}

// One thread: K(0), K(1), V(0), K(2), V(1), ..., on into the next tile.
template <ForwardSm90Config C>
__device__ __forceinline__ void load_keys_and_values(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory) {
  Ring<C.stages> k, v;
  int v_row = 0, v_head = 0, v_batch = -1;  // the V that goes with the last K; none yet
  const auto load_v = [&] {
    ptx::mbarrier_wait(shared.v_empty(v.stage), v.parity ^ 1);
    ptx::mbarrier_arrive_expect(shared.v_full(v.stage), C.k_bytes());
    load_tile<C>(p, shared.v(v.stage), p.v, shared.v_full(v.stage), C.block_n, v_row, v_head, v_batch);
    v.advance();
  };

  const int group = p.forward.sequence.num_heads_q / p.forward.sequence.num_heads_k;
  for (unsigned tile = 0;; ++tile) {
    ptx::mbarrier_wait(shared.work_full(tile), tile / C.kWorkSlots & 1);
    const Work& work = *shared.work(memory, tile);
    if (work.first_row < 0) break;
    const KeyTiles tiles = key_tiles<C.block_m(), C.block_n>(p, work);
    const IndexVector& cache_row = p.forward.sequence.cache_batch_idx;
    const int head = work.head / group;
    const int batch = p.forward.sequence.packed_k ? 0 : cache_row ? cache_row.at(work.batch) : work.batch;
    const int take_next_at = min(tiles.count, p.order.lead);
    int row = work.k_begin + tiles.top;
    for (int n = tiles.count; n > 0; --n) {
      if (n == take_next_at && p.order.counter != nullptr) ptx::mbarrier_arrive(shared.take_next());
      row -= C.block_n;
      ptx::mbarrier_wait(shared.k_empty(k.stage), k.parity ^ 1);
      ptx::mbarrier_arrive_expect(shared.k_full(k.stage), C.k_bytes());
      load_tile<C>(p, shared.k(k.stage), p.k, shared.k_full(k.stage), C.block_n, row, head, batch);
      k.advance();
      if (v_batch >= 0) load_v();
      v_row = row, v_head = head, v_batch = batch;
    }
  }
  if (v_batch >= 0) load_v();
}

template <ForwardSm90Config C>
__device__ __forceinline__ void store_box(const ForwardSm90Params& p, uint32_t from, const ptx::BoxOrigin& box) {
  const int boxes = p.loads_per_tile == 1 ? 1 : C.o_columns / 64;
  for (int n = 0; n < boxes; ++n) {
    ptx::BoxOrigin at = box;
    at.at[0] += n * 64;
    ptx::tma_store(p.o, from + n * 64 * 128, at);
  }
  ptx::tma_store_commit();
}

// One thread per consumer: sends what it staged, column group by column group.
template <ForwardSm90Config C>
__device__ __forceinline__ void store_output(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory,
                                             int consumer) {
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.o_full(consumer), parity);
    const ptx::BoxOrigin box = *shared.o_box(memory, consumer);
    if (box.at[1] < 0) break;
    store_box<C>(p, shared.o(consumer), box);
    ptx::tma_store_wait_read<0>();
    ptx::mbarrier_arrive(shared.o_empty(consumer));
  }
  ptx::tma_store_wait_all();  // shared memory lives until the block ends
  ptx::mbarrier_arrive(shared.o_empty(consumer));
}

}  // namespace tilewise::cuda
