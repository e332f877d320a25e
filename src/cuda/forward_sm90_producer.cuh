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
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier, int loads, int rows,
                                          ptx::BoxOrigin box) {
  ptx::tma_load(to, map, barrier, box);
  if constexpr (C.panels() > 1)
    for (int n = 1; n < loads; ++n) {
      box.at[0] = n * 64;
      ptx::tma_load(to + n * rows * 128, map, barrier, box);
    }
}

// One thread: decides which tile comes next, and loads its Q as soon as there is room. With a counter, it takes the next
// tile as late as it can without waiting, so that blocks finish together.
template <ForwardSm90Config C>
__device__ __forceinline__ void hand_out_tiles(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory) {
  Ring<C.q_slots> q;
  TileSource<C> source(p);
  uint32_t parity = 0;
  for (unsigned tile = 0;; ++tile) {
    Work& work = *shared.work(memory, tile);
    source.write(work);
    ptx::mbarrier_arrive(shared.work_full(tile));
    for (int row = 0; row < C.block_m(); row += C.q_rows, q.advance()) {
      ptx::mbarrier_wait(shared.q_empty(q.stage), q.parity ^ 1);
      if (work.first_row < 0) {
        ptx::mbarrier_arrive(shared.q_full(q.stage));
        continue;
      }
      ptx::mbarrier_arrive_expect(shared.q_full(q.stage), C.q_bytes());
      load_tile<C>(shared.q(q.stage), p.q, shared.q_full(q.stage), p.loads_per_tile, C.q_rows, query_box<C>(p, work, row));
    }
    if (work.first_row < 0) return;
    if (!C.whole() && p.order.counter != nullptr) {
      ptx::mbarrier_wait(shared.take_next(), parity);
      parity ^= 1;
    }
    source.tile = source.take_next();
  }
}

// A tile of keys or values.
struct KeyRows {
  int row, end;     // rows [row, row + block_n) of a head; end: of the sequence
  int head, batch;  // batch < 0: there is no such tile
  int page;         // paged: of the rows from `row` + lane * page_rows on, which this lane loads. < 0: none, zeros arrive
};
template <ForwardSm90Config C>
__device__ __forceinline__ void load_key_rows(const ForwardSm90Params& p, uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                              const KeyRows& rows, int lane) {
  if (lane == 0) ptx::mbarrier_arrive_expect(barrier, C.k_bytes());
  if constexpr (C.general()) {
    __syncwarp();  // no lane may be phases of a barrier behind
    if (p.page_rows > 0) {  // a box a page, or what a tile has of it
      const int n = lane * p.page_rows;
      if (n < C.block_n)
        load_tile<C>(to + n * 128, map, barrier, p.key_loads, C.block_n,
                     {{0, (rows.row + n) % p.forward.sequence.page_size, 0, rows.head, rows.page}});
      return;
    }
  }
  if (lane == 0) load_tile<C>(to, map, barrier, p.key_loads, C.block_n, {{0, rows.row, 0, rows.head, rows.batch}});
}
template <ForwardSm90Config C>
__device__ __forceinline__ int find_page(const ForwardSm90Params& p, const KeyRows& rows, int lane) {
  const SequenceParams& s = p.forward.sequence;
  const int position = rows.row + lane * p.page_rows;
  if (lane * p.page_rows >= C.block_n || position < 0 || position >= rows.end) return -1;
  return s.page_table[rows.batch * s.page_table_batch + position / s.page_size * s.page_table_page];
}

// K(0), K(1), V(0), K(2), V(1), ..., on into the next tile. One thread; with ScoreKind::kGeneral a warp, whose lanes know a page
// each. Their numbers are asked for a tile ahead: one after the other, in time, they took 9 of 10 parts of it at pages of 16 keys.
template <ForwardSm90Config C>
__device__ __forceinline__ void load_keys_and_values(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory,
                                                     int lane) {
  Ring<C.stages> k, v;
  KeyRows values = {0, 0, 0, -1, -1};  // that go with the last keys; none yet
  const auto load_v = [&] {
    ptx::mbarrier_wait(shared.v_empty(v.stage), v.parity ^ 1);
    load_key_rows<C>(p, shared.v(v.stage), p.v, shared.v_full(v.stage), values, lane);
    v.advance();
  };

  const SequenceParams& s = p.forward.sequence;
  const bool paged = C.general() && p.page_rows > 0;
  for (unsigned tile = 0;; ++tile) {
    ptx::mbarrier_wait(shared.work_full(tile), tile / C.kWorkSlots & 1);
    const Work& work = *shared.work(memory, tile);
    if (work.first_row < 0) break;
    const KeyTiles tiles = key_tiles<C>(p, work);
    KeyRows next;
    next.row = work.k_begin + tiles.top - C.block_n;
    next.end = work.k_begin + work.seqlen_k;
    next.head = work.head_k;
    next.batch = C.whole() ? work.batch : s.packed_k ? 0 : s.cache_batch_idx ? s.cache_batch_idx.at(work.batch) : work.batch;
    next.page = paged ? find_page<C>(p, next, lane) : -1;
    const int take_next_at = min(tiles.count, p.order.lead);
    for (int n = tiles.count; n > 0; --n) {
      if (!C.whole() && lane == 0 && n == take_next_at && p.order.counter != nullptr) ptx::mbarrier_arrive(shared.take_next());
      const KeyRows keys = next;
      next.row -= C.block_n;
      if (paged && n > 1) next.page = find_page<C>(p, next, lane);
      ptx::mbarrier_wait(shared.k_empty(k.stage), k.parity ^ 1);
      load_key_rows<C>(p, shared.k(k.stage), p.k, shared.k_full(k.stage), keys, lane);
      k.advance();
      if (values.batch >= 0) load_v();
      values = keys;
    }
  }
  if (values.batch >= 0) load_v();
}

// The bias of every step of every consumer, in the order of the steps, and of those that it skips. One thread.
template <ForwardSm90Config C>
__device__ __forceinline__ void load_bias_tiles(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory) {
  const BiasParams& bias = p.bias;
  uint32_t turn = 0;  // tiles of each consumer so far
  for (unsigned tile = 0;; ++tile) {
    ptx::mbarrier_wait(shared.work_full(tile), tile / C.kWorkSlots & 1);
    const Work& work = *shared.work(memory, tile);
    if (work.first_row < 0) return;
    const KeyTiles tiles = key_tiles<C>(p, work);
    for (int n = 0; n < tiles.count; ++n, ++turn)
      for (int consumer = 0; consumer < C.consumers; ++consumer) {
        const uint32_t stage = turn & ((1u << bias.stage_bits) - 1);
        const uint32_t full = shared.bias_full(consumer, stage);
        ptx::mbarrier_wait(shared.bias_empty(consumer, stage), (turn >> bias.stage_bits & 1) ^ 1);
        ptx::mbarrier_arrive_expect(full, bias.boxes * bias.box_bytes);
        const int row = bias.row_mask ? work.first_row + consumer * 64 : 0;
        for (int box = 0; box < bias.boxes; ++box)
          ptx::tma_load(shared.bias(consumer, stage) + box * C.kBiasBytes, bias.map, full,
                        {{tiles.top - (n + 1) * C.block_n + box * bias.box_keys, row, 0, work.head, work.batch}});
      }
  }
}

template <ForwardSm90Config C>
__device__ __forceinline__ void store_box(const ForwardSm90Params& p, uint32_t from, const ptx::BoxOrigin& box) {
  const int boxes = p.loads_per_tile == 1 ? 1 : C.panels();
  for (int n = 0; n < boxes; ++n) {
    ptx::BoxOrigin at = box;
    at.at[0] += n * 64;
    ptx::tma_store(p.o, from + n * 64 * 128, at);
  }
  ptx::tma_store_commit();
}

// One thread per consumer: sends what it staged, of the tiles that it is told of.
template <ForwardSm90Config C>
__device__ __forceinline__ void store_output(const ForwardSm90Params& p, SharedSm90<C> shared, unsigned char* memory,
                                             int consumer) {
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.o_full(consumer), parity);
    const StagedTile staged = *shared.staged(memory, consumer);
    if (staged.tile >= 0) store_box<C>(p, shared.o(consumer), query_box<C>(p, *shared.work(memory, staged.tile), consumer * 64));
    if (staged.last) break;
    ptx::tma_store_wait_read<0>();
    ptx::mbarrier_arrive(shared.o_empty(consumer));
  }
  ptx::tma_store_wait_all();  // shared memory lives until the block ends
  ptx::mbarrier_arrive(shared.o_empty(consumer));
}

}  // namespace tilewise::cuda
