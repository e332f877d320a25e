// Which tile comes next, and which keys it needs.
#pragma once
#include "cuda/params_sm90.h"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/sequence.cuh"

namespace tilewise::cuda {

struct alignas(64) Work {
  int32_t first_row;   // < 0: there is no more work
  int32_t head, batch;  // head: the first of the tile
  int32_t seqlen_q, seqlen_k;  // in use
  int32_t capacity_q;          // rows that exist; they are all written
  int32_t q_begin, k_begin;    // packed: first row of the sequence. Else 0
  // Of the tile's key tiles, counted from the top, those that this block takes; num_key_tiles = 0: all.
  int32_t first_key_tile, num_key_tiles;
  int32_t finishes;  // this part has the tile's last key tile: other blocks hand theirs over to it
  int32_t plain;     // every row of the tile is in use and sees a key
  int32_t head_k;    // of head
  int64_t lse;       // where the lse of its first row is
};
static_assert(sizeof(Work) == ForwardSm90Config::kWorkBytes);

// Where rows [row, ...) of a tile begin in q and o, whose maps have panels before heads only if a tile has one head.
template <ForwardSm90Config C>
__device__ __forceinline__ ptx::BoxOrigin query_box(const ForwardSm90Params& p, const Work& work, int row) {
  if constexpr (C.whole()) return {{0, work.first_row + row, 0, work.head, work.batch}};
  const int head = work.head + (row >> p.order.row_bits), in_head = row & ((1u << p.order.row_bits) - 1);
  const bool several = p.order.tile_heads > 1;
  return {{0, work.q_begin + work.first_row + in_head, several ? head : 0, several ? 0 : head,
           p.forward.sequence.packed_q ? 0 : work.batch}};
}

// The key tiles of a tile of queries, from the last to the first: tile n covers keys [top - (n + 1) block_n, top - n
// block_n). If the window has an end (causal: the diagonal), `top` is one past the end of the tile's last row, less whole
// tiles beyond the sequence: every row then meets a visible key in the first tile of its warpgroup, and only that tile has
// rows that end inside it. Keys below 0 and beyond the sequence are masked.
// kAligned: pages and draws of dropout need tiles that start at multiples of key_align (paged: of positions in the cache).
// `top` is rounded up, so a row may meet its first visible key a tile later.
struct KeyTiles {
  int top, count;
};

template <ForwardSm90Config C>
__device__ __forceinline__ KeyTiles key_tiles(const ForwardSm90Params& p, const Work& work) {
  constexpr int kBlockN = C.block_n;
  const int offset = work.seqlen_k - work.seqlen_q;
  KeyTiles tiles;
  tiles.top = (work.seqlen_k + kBlockN - 1) / kBlockN * kBlockN;
  if (!C.whole() && p.window_right >= 0) {
    tiles.top = work.first_row + p.order.tile_rows + offset + p.window_right;
    tiles.top -= max(0, tiles.top - work.seqlen_k) / kBlockN * kBlockN;
  }
  if constexpr (C.general()) {
    const int padding = p.page_rows > 0 ? work.k_begin : 0;
    tiles.top = ((tiles.top + padding + p.key_align - 1) & -p.key_align) - padding;
  }
  int low = 0;
  if (!C.whole() && p.window_left >= 0) low = max(0, work.first_row + offset - p.window_left);
  tiles.count = max(1, (tiles.top - low + kBlockN - 1) / kBlockN);
  if (C.shares_tiles() && work.num_key_tiles > 0) {  // a part
    tiles.top -= work.first_key_tile * kBlockN;
    tiles.count = work.num_key_tiles;
  }
  return tiles;
}

// Hands out tiles. One thread of a block uses it.
template <ForwardSm90Config C>
struct TileSource {
  static constexpr int kCountBits = 24;
  const ForwardSm90Params& p;
  int tile;
  int share_end;  // of this block's share of the tiles from whole_tiles on, what is left

  __device__ __forceinline__ explicit TileSource(const ForwardSm90Params& params)
      : p(params), tile(blockIdx.x), share_end(params.order.share_begin(blockIdx.x + 1)) {
    // The workspace holds anything. The first block to come writes this launch's number; one exchange decides, so that
    // the blocks, which all come at once, do not wait for each other in a loop (that took 20 us).
    if (p.order.counter == nullptr) return;
    const unsigned long long start = static_cast<unsigned long long>(p.order.launch) << kCountBits;
    const unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(p.order.counter);
    if (seen >> kCountBits != p.order.launch) atomicCAS(p.order.counter, seen, start);
  }

  // The number of the tile after this one.
  __device__ __forceinline__ int take_next() const {
    if (p.order.counter == nullptr) return tile + gridDim.x;
    const int n = static_cast<int>(atomicAdd(p.order.counter, 1ull) & ((1u << kCountBits) - 1));
    // Every block stops at its first number past the end, so this is the last one ever taken: forget the launch.
    if (n == p.order.num_tiles - 1) *reinterpret_cast<volatile unsigned long long*>(p.order.counter) = 0;
    return static_cast<int>(gridDim.x) + n;
  }

  // Tile number -> rows of a head, written where the consumers read it; false if the sequence has no such rows.
  __device__ __forceinline__ bool decode(Work& work) const {
    int block, head;
    if (C.whole() || p.order.section_heads == 0) {
      head = p.by_blocks.divide(tile);
      block = tile - head * p.order.num_blocks;
    } else {
      const int section = p.by_section_tiles.divide(tile), inside = tile - section * static_cast<int>(p.by_section_tiles.by);
      const int heads = min(p.order.section_heads, p.order.num_heads - section * p.order.section_heads);
      const int turn = heads == p.order.section_heads ? static_cast<int>(p.by_section_heads.divide(inside)) : inside / heads;
      block = p.order.num_blocks - 1 - turn;
      head = section * p.order.section_heads + inside - turn * heads;
    }
    const SequenceParams& s = p.forward.sequence;
    if constexpr (!C.whole()) head *= p.order.tile_heads;
    work.batch = p.by_heads_q.divide(head);
    work.head = head - work.batch * s.num_heads_q;
    work.head_k = p.by_group.divide(work.head);
    work.first_row = block * p.order.tile_rows;
    // tile/sequence.cuh's resolve() in 32 bits: one thread with few registers, and plans refuse more than 2^31 rows.
    work.q_begin = work.k_begin = 0;
    work.capacity_q = work.seqlen_q = s.seqlen_q;
    work.seqlen_k = s.seqlen_k;
    work.plain = true;
    const RowScalar& lse = p.forward.lse;
    work.lse = work.head * lse.head + work.first_row * lse.row;
    if (C.whole() || !s.packed_q) work.lse += work.batch * lse.batch;
    if constexpr (C.whole()) return true;
    if (s.packed_q) {
      work.q_begin = s.cu_seqlens_q.at(work.batch);
      work.capacity_q = s.cu_seqlens_q.at(work.batch + 1) - work.q_begin;
      work.lse += work.q_begin * lse.row;
    }
    work.seqlen_q = s.seqused_q ? s.seqused_q.at(work.batch) : work.capacity_q;
    if (s.packed_k) {
      work.k_begin = s.cu_seqlens_k.at(work.batch);
      work.seqlen_k = s.cu_seqlens_k.at(work.batch + 1) - work.k_begin;
    }
    if (s.seqused_k) work.seqlen_k = s.seqused_k.at(work.batch);
    if (s.leftpad_k) {
      const int leftpad = s.leftpad_k.at(work.batch);
      work.k_begin += leftpad;
      work.seqlen_k = max(0, work.seqlen_k - leftpad);
    }
    const int end = work.first_row + p.order.tile_rows, offset = work.seqlen_k - work.seqlen_q;
    work.plain = end <= work.seqlen_q && work.seqlen_k > 0 &&
                 (p.window_right < 0 || work.first_row + offset + p.window_right >= 0) &&
                 (p.window_left < 0 || end + offset - p.window_left <= work.seqlen_k);
    return work.first_row < work.capacity_q;
  }

  // From the tile number on: the first one with rows, or the end.
  __device__ __forceinline__ void write(Work& work) {
    work.num_key_tiles = 0;
    if constexpr (C.shares_tiles())
      if (p.order.sharing_blocks > 0 && tile >= p.order.whole_tiles) return write_part(work);
    for (; tile < p.order.num_tiles; tile = take_next())
      if (decode(work)) return;
    work.first_row = -1;
  }

  // A share reaches into two tiles at most. Backwards: first what this block hands over, then the part that it finishes with
  // what blocks before it, which never wait for it, have handed over.
  __device__ __forceinline__ void write_part(Work& work) {
    const int begin = p.order.share_begin(blockIdx.x), all = p.order.key_tiles;
    work.first_row = -1;
    if (begin == share_end) return;
    const int shared_tile = (share_end - 1) / all, tile_begin = shared_tile * all, from = max(begin, tile_begin);
    tile = p.order.whole_tiles + shared_tile;
    decode(work);
    work.finishes = share_end == tile_begin + all;
    work.first_key_tile = from - tile_begin;
    work.num_key_tiles = share_end - from == all ? 0 : share_end - from;
    share_end = from;
  }
};

}  // namespace tilewise::cuda
