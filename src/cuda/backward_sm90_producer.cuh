// Who feeds a block of backward_sm90: the key blocks that it takes by tickets, and the copies of K, V, Q and dO that tiles of queries need.
// backward_sm90.cuh has what is computed from them.
#pragma once
#include "cuda/backward_sm90_common.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/gradient_sm90.cuh"

namespace tilewise::cuda {

// The tiles of a block, in order: head by head of the group. Blocks of a head that run side by side start with different
// tiles, so that their sums of dQ do not meet in the same place. With ordered sums: see last_keys_first(); without an end of
// the window, all of them start with the last queries.
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

// Tiles of all heads.
__device__ __forceinline__ int num_steps(const KeyBlock& block) { return uniform(block.group * block.num_tiles); }

// Where dQ of a tile goes, found out when the tile is loaded.
struct alignas(16) DqTarget {
  float* sum;        // [row / 16, column / 8, lane, 4]
  int32_t counters;  // where BackwardParams::turn has this tile's
  int32_t turn;      // how many key blocks must have added before; if the order does not matter, 0: this one is the first
};

// ---- key blocks -----------------------------------------------------------------------------------------------------

// Key block n of this block of threads, and the one after it: a ring of two. One warp publishes, all wait and release. (Two of
// the helpers do not release: who is behind `wanted` or a tile's turn is behind them, too.)
template <BackwardSm90Config C>
struct KeyBlocksSm90 {
  static_assert(sizeof(KeyBlock) <= C.kBlockBytes);
  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  unsigned char* const memory;

  __device__ __forceinline__ KeyBlock& at(int n) const {
    return *reinterpret_cast<KeyBlock*>(memory + C.block_offset() + (n & 1) * C.kBlockBytes);
  }
  __device__ __forceinline__ const KeyBlock& wait(int n) const {
    ptx::mbarrier_wait(shared.block_full(n & 1), n >> 1 & 1);
    return at(n);
  }
  __device__ __forceinline__ void release(int n, int lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.block_empty(n & 1));
  }
  // For post: all that this key block has is added to dq. By one thread, behind the sums.
  __device__ __forceinline__ void count_done(const KeyBlock& block) const {
    if (p.backward.done != nullptr && block.b < p.backward.sequence.batch)
      ptx::add_release(p.backward.done + block.b * p.backward.sequence.num_heads_k + block.head_k, 1);
  }
  // As late as possible, or the last key blocks are not spread evenly, but before it is needed: the answer takes a microsecond. Lane 0
  // has it.
  __device__ __forceinline__ int take_ticket(int lane) const { return lane == 0 ? atomicAdd(p.backward.ticket, 1) : 0; }
  // By a whole warp. With ordered sums, whoever waits for a turn waits for a ticket that was taken before. Key blocks that no
  // query sees get their zeros here.
  __device__ __forceinline__ void publish(int n, int ticket, int lane) const {
    ptx::mbarrier_wait(shared.block_empty(n & 1), (n >> 1 & 1) ^ 1);
    KeyBlock registers = {};
    KeyBlock& next = C.helpers ? at(n) : registers;
    for (;; ticket = take_ticket(lane)) {
      ticket = uniform(ticket);
      const bool exists = ticket < p.num_tasks;
      if (!C.helpers || lane == 0) {
        next.b = -1;
        if (exists) find_key_block<C.block_m, C.block_n(), C.helpers, C.copies_bias()>(next, p.backward, static_cast<unsigned>(ticket), p.section);
      }
      if (C.helpers) __syncwarp();
      if (!exists || uniform(next.num_tiles) > 0) break;
      if (lane == 0) count_done(next);
      using T = typename ElementType<C.element>::Type;
      if (uniform(next.b) >= p.backward.sequence.batch)
        zero_key_tail<T>(p.backward, next.head_k, next.index, C.block_n(), 0, 1);
      else
        zero_keys<T, C.helpers ? 1 : 4>(p.backward, next, C.block_n(), lane, p.dk_aligned, p.dv_aligned);
    }
    if (lane == 0) {
      if (!C.helpers) at(n) = next;
      ptx::mbarrier_arrive(shared.block_full(n & 1));
    }
    __syncwarp();
  }
};

// Where a warp stands in the rings that go on from key block to key block. In two registers: they are short.
struct RingPosition {
  int stage = 0;  // of Q and dO
  uint32_t bits = 0;

  __device__ __forceinline__ uint32_t parity() const { return bits & 1; }  // of the stage
  __device__ __forceinline__ void next_stage(int stages) {
    if (++stage == stages) stage = 0, bits ^= 1;
  }
  // Of K's slots, and of V.
  template <BackwardSm90Config C>
  __device__ __forceinline__ void wait_k(const SharedBackwardSm90<C>& shared, int n) {
    const int bit = 2 + n % C.k_slots();
    ptx::mbarrier_wait(shared.k_full(n), bits >> bit & 1);
    bits ^= 1u << bit;
  }
  template <BackwardSm90Config C>
  __device__ __forceinline__ void wait_v(const SharedBackwardSm90<C>& shared) {
    ptx::mbarrier_wait(shared.v_full(), bits >> 1 & 1);
    bits ^= 2;
  }
  __device__ __forceinline__ uint32_t step() const { return bits >> 4; }  // tiles so far
  __device__ __forceinline__ void next_step() { bits += 16; }
};

// ---- loads ----------------------------------------------------------------------------------------------------------

// Of a warp that loads tiles beside something else. In shared memory: its warpgroup is short of registers.
struct LoadState {
  TileWalk at;
  int block, left;  // the key block, and its tiles that are not loaded yet
  int stage, loaded;
  uint32_t parity;
  int row, head, batch;  // of the latest tile
};

// A whole warp executes all of this, and one lane the copies: after a branch of one thread that waits in a loop the compiler
// would no longer believe anything to be the same in all threads, descriptors included.
template <BackwardSm90Config C, DqSums kSums>
struct LoaderSm90 {
  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  const KeyBlocksSm90<C> blocks;
  unsigned char* const memory;

  __device__ __forceinline__ LoadState& state(int which) const {
    static_assert(sizeof(LoadState) <= C.kLoadBytes);
    return *reinterpret_cast<LoadState*>(memory + C.load_offset() + which * C.kLoadBytes);
  }
  __device__ __forceinline__ DqTarget& target(uint32_t n) const {
    return reinterpret_cast<DqTarget*>(memory + C.target_offset())[n % C.kTargets];
  }

  // One box of all panels of a tile, or a box a panel whose columns end at head_dim.
  __device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int rows, int row, int head,
                                           int batch, int count) const {
#pragma unroll
    for (int n = 0; n < C.panels(); ++n)
      if (n < count) ptx::tma_load(to + n * rows * 128, map, barrier, {{n * 64, row, 0, head, batch}});
  }

  // K or V of key block n, when nobody needs any more what is there. By one lane.
  template <bool kK>
  __device__ __forceinline__ void load_keys(int n) const {
    const KeyBlock& block = blocks.at(n);
    if (block.b < 0) return;
    const uint32_t full = kK ? shared.k_full(n) : shared.v_full();
    ptx::mbarrier_arrive_expect(full, C.k_bytes());
    load_box(kK ? shared.k(n) : shared.v(), kK ? p.k : p.v, full, C.block_n(), static_cast<int>(block.s.k_begin) + block.first_key,
             block.head_k, p.backward.sequence.packed_k ? 0 : block.b, kK ? p.qk_loads : p.v_loads);
  }

  // By all consumers' warps when they need V no more: the last of them loads that of key block n.
  __device__ __forceinline__ void load_v_by_last(int n, int lane) const {
    constexpr unsigned kWarps = 4 * C.kConsumers;
    if (lane == 0 && atomicAdd(reinterpret_cast<unsigned*>(memory + C.count_offset()), 1u) % kWarps == kWarps - 1)
      load_keys<false>(n);
    __syncwarp();
  }

  // The first row of a tile in the sums and columns.
  __device__ __forceinline__ static int64_t padded_row_of(const KeyBlock& block, const TileWalk& at) {
    return at.head * block.padded_rows + at.tile * C.block_m;
  }
  __device__ __forceinline__ void set_target(DqTarget& to, const KeyBlock& block, const TileWalk& at) const {
    const BackwardParams& b = p.backward;
    to.sum = block.dq_sum + padded_row_of(block, at) * C.head_dim;
    if constexpr (kSums != DqSums::kAny)
      to.counters = ((at.head * b.sequence.batch + block.b) * b.num_query_blocks + at.tile) * C.turns_per_block();
    if constexpr (kSums == DqSums::kOrdered) to.turn = turn_of<C.block_m, C.block_n()>(b, block, at.tile);
  }

  // Q, lse and delta of a tile. By one lane. dO ends in the same barrier, unless it has its own (split).
  __device__ __forceinline__ void load_queries(const KeyBlock& block, const TileWalk& at, int stage, int row, int batch) const {
    const BackwardParams& b = p.backward;
    const int64_t padded = padded_row_of(block, at);
    const uint32_t full = shared.full(stage);
    ptx::mbarrier_arrive_expect(full, (C.split ? 1 : 2) * C.q_bytes() + C.row_bytes());
    load_box(shared.q(stage), p.q, full, C.block_m, row, at.head, batch, p.qk_loads);
    [[maybe_unused]] const int64_t first = (block.row_columns - b.row_columns) / 32 + padded;
    if constexpr (C.lse_is_column())
      ptx::bulk_load(shared.rows(stage), block.row_columns + padded * 32, C.lse_bytes(), full);
    else
      ptx::bulk_load(shared.rows(stage), (C.copies_bias() ? reinterpret_cast<const float*>(b.row_columns) : b.lse_log2) + first, C.lse_bytes(), full);
    if constexpr (!C.plain()) ptx::bulk_load(shared.rows(stage) + C.delta_offset(), b.delta + first, C.block_m * 4, full);
  }

  // The next tile of Q with lse and delta (kQ), or of dO if that has barriers of its own (split), if fewer than `limit` have
  // been loaded and it belongs to key block `present` or, if `ahead`, the one after it. `sure`: so it is.
  template <bool kQ>
  __device__ __forceinline__ bool load_next(int limit, int present, bool ahead, bool sure, int lane) const {
    LoadState& kept = state(kQ ? 0 : 1);
    if (!sure) {
      if (static_cast<int32_t>((static_cast<uint32_t>(limit) - uniform(kept.loaded)) << 4) <= 0) return false;  // steps have 28 bits
      if (uniform(kept.left) == 0) {
        const int next = uniform(kept.block) + 1;
        if (next > present + ahead) return false;
        const KeyBlock& block = blocks.wait(next);
        __syncwarp();  // all have read
        if (lane == 0) kept.block = next, kept.left = block.b < 0 ? 0 : block.group * block.num_tiles, kept.at = TileWalk(block);
        __syncwarp();
        if (uniform(kept.left) == 0) return false;
      }
    }
    const int stage = uniform(kept.stage), parity = uniform(static_cast<int>(kept.parity));
    ptx::mbarrier_wait(kQ ? shared.empty(stage) : shared.dout_empty(stage), static_cast<uint32_t>(parity));
    __syncwarp();
    if (lane == 0) {
      LoadState s = kept;
      const KeyBlock& block = blocks.at(s.block);
      const int row = static_cast<int>(block.s.q_begin) + s.at.tile * C.block_m, batch = p.backward.sequence.packed_q ? 0 : block.b;
      if constexpr (kQ) {
        set_target(target(s.loaded), block, s.at);
        load_queries(block, s.at, stage, row, batch);
        if (!C.split) s.row = row, s.head = s.at.head, s.batch = batch;
      } else {
        const uint32_t full = shared.dout_full(stage);
        ptx::mbarrier_arrive_expect(full, C.q_bytes());
        load_box(shared.dout(s.loaded), p.dout, full, C.block_m, row, s.at.head, batch, p.v_loads);
      }
      s.at.advance(block);
      ++s.loaded;
      --s.left;
      if (++s.stage == C.stages) s.stage = 0, s.parity ^= 1;
      kept = s;
    }
    __syncwarp();
    return true;
  }

  // Not split: dO of the tile whose Q was loaded last, once its slot is free.
  __device__ __forceinline__ void load_dout(int lane) const {
    if (lane == 0) {
      const LoadState& s = state(0);
      const int last = s.stage == 0 ? C.stages - 1 : s.stage - 1;
      load_box(shared.dout(s.loaded - 1), p.dout, shared.full(last), C.block_m, s.row, s.head, s.batch, p.v_loads);
    }
    __syncwarp();
  }

  template <bool kQ>
  __device__ __forceinline__ void load(int limit, int present, bool ahead, int lane) const {
    while (load_next<kQ>(limit, present, ahead, false, lane))
      if (!C.split) load_dout(lane);
  }
};

}  // namespace tilewise::cuda
