// The backward pass's unit of work: a block of keys of one key head, and the tiles of queries that see it.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/tile/sequence.cuh"

namespace tilewise::cuda {

// Queries that see key j, of [0, seqlen_q).
__device__ __forceinline__ Range visible_queries(const ScoreParams& p, int j, int seqlen_q, int seqlen_k) {
  const int at = j - (seqlen_k - seqlen_q);
  Range rows{0, seqlen_q};
  if (p.window_right >= 0) rows.begin = max(0, at - p.window_right);
  if (p.window_left >= 0) rows.end = min(seqlen_q, at + p.window_left + 1);
  if (j >= seqlen_k) rows.end = 0;
  rows.end = max(rows.end, rows.begin);
  return rows;
}

struct KeyBlock {
  int b, head_k, index, first_key;  // b < 0: there are no more
  int group;                  // query heads per key head
  int first_tile, num_tiles;  // of queries
  int start_tile, direction;  // in which order they are taken
  int full_rows[2][2];        // queries [begin, end) that see all keys of the first, of the second 64
  DeviceSequence s;
  // The sequence's rows in BackwardParams::dq_sum and row_columns, of query head 0; found out once and not a tile at a time.
  float* dq_sum;
  uint8_t* row_columns;
  int64_t padded_rows;  // to the next head
};

// Ordered sums of dQ, if the window has an end (causal): the last key block comes first, and every block starts with the first
// queries that it sees. It finds a tile just after the block that must come before has left it, and nobody waits.
__device__ __forceinline__ bool last_keys_first(const BackwardParams& p) { return p.deterministic && p.score.window_right >= 0; }

// Do batch entries have the same bias? (With packed keys there is one more, of rows that belong to nobody.)
__device__ __forceinline__ bool shares_bias(const BackwardParams& p) { return p.score.bias_batch == 0 && !p.sequence.packed_k; }

// Task n: key block inside key head inside batch entry; b == batch: rows of no sequence. Where `section` is not 0, so many heads
// take turns: the first key blocks of all, then the second, and so on.
// - Causal: the first key blocks are the longest. Sections are counted from the end, so that the last one is whole, and no long
//   key block begins when the others are done: 2 to 5 % of the kernel.
// - Ordered sums: so few blocks of a head are under way that each has two tiles of queries for itself (d 128: see heads_in_turns()), and the time of one of
//   them for passing a turn. Without an end of the window a key block starts later than the one before it, by the time that a turn
//   takes; whoever follows on the same multiprocessor then is as late as it must be.
// kInMemory: `block` is in shared memory, and what has been found is read from there again, since the warp has few registers.
// kBatchInside: heads are counted batch entry inside key head where these share a bias, so that they meet in the second-level cache with it
// and with the sums of its gradient.
template <int kBlockM, int kBlockN, bool kInMemory, bool kBatchInside = false>
__device__ __forceinline__ void find_key_block(KeyBlock& block, const BackwardParams& p, unsigned n, unsigned section) {
  const auto forget_registers = [] {
    if constexpr (kInMemory) asm volatile("" ::: "memory");
  };
  block.num_tiles = 0;
  const unsigned blocks = p.num_key_blocks;
  if (section != 0) {
    const unsigned heads = p.sequence.num_heads_k * (p.sequence.batch + p.sequence.packed_k);
    if (!p.deterministic) n = heads * blocks - 1 - n;
    const unsigned first = n / (section * blocks) * section, inside = n - first * blocks, width = min(section, heads - first);
    block.index = static_cast<int>(inside / width);
    n = first + inside % width;
    if (!p.deterministic) n = heads - 1 - n;
    if (!p.deterministic || last_keys_first(p)) block.index = p.num_key_blocks - 1 - block.index;
  } else {
    block.index = static_cast<int>(n % blocks);
    if (last_keys_first(p)) block.index = p.num_key_blocks - 1 - block.index;
    n /= blocks;
  }
  if (kBatchInside && shares_bias(p)) {
    block.b = static_cast<int>(n % p.sequence.batch);
    block.head_k = static_cast<int>(n / p.sequence.batch);
  } else {
    block.head_k = static_cast<int>(n % p.sequence.num_heads_k);
    block.b = static_cast<int>(n / p.sequence.num_heads_k);
  }
  block.group = p.sequence.num_heads_q / p.sequence.num_heads_k;
  block.first_key = block.index * kBlockN;
  forget_registers();
  if (block.b >= p.sequence.batch) return;
  block.s = resolve(p.sequence, block.b);
  forget_registers();
  if (block.first_key >= block.s.seqlen_k || block.s.seqlen_q <= 0) return;
  const auto queries_of = [&](int key) { return visible_queries(p.score, key, block.s.seqlen_q, block.s.seqlen_k); };
  // Ranges of consecutive keys overlap or touch, and both ends rise with the key.
  const int begin = queries_of(block.first_key).begin, end = queries_of(min(block.first_key + kBlockN, block.s.seqlen_k) - 1).end;
  if (end <= begin) return;
  block.first_tile = begin / kBlockM;
  block.num_tiles = (end + kBlockM - 1) / kBlockM - block.first_tile;
  forget_registers();
  const bool last_tile_first = p.deterministic && !last_keys_first(p);
  block.direction = last_tile_first ? -1 : 1;
  block.start_tile = block.first_tile;
  if (last_tile_first) block.start_tile += block.num_tiles - 1;
  if (!p.deterministic) block.start_tile += block.first_key / kBlockM % block.num_tiles;
  forget_registers();
  const int64_t padded = padded_row(p.sequence, block.s.q_begin, block.b);
  block.dq_sum = p.dq_sum + padded * p.head_dim_rounded;
  block.row_columns = p.row_columns + padded * 32;
  block.padded_rows = p.padded_rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    forget_registers();
    const int first = block.first_key + 64 * half, last = first + 63;
    block.full_rows[half][0] = queries_of(min(last, block.s.seqlen_k - 1)).begin;
    block.full_rows[half][1] = last < block.s.seqlen_k ? queries_of(first).end : -1;
  }
}

// How many key blocks have added to a tile of queries before this one, when sums are ordered. Blocks that see a tile are
// consecutive.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int turn_of(const BackwardParams& p, const KeyBlock& block, int tile) {
  const int offset = block.s.seqlen_k - block.s.seqlen_q;
  if (last_keys_first(p)) {
    const int last_query = min((tile + 1) * kBlockM, block.s.seqlen_q) - 1;
    return min(last_query + offset + p.score.window_right, block.s.seqlen_k - 1) / kBlockN - block.index;
  }
  if (p.score.window_left < 0) return block.index;
  return block.index - max(0, tile * kBlockM + offset - p.score.window_left) / kBlockN;
}

// Rows of dk and dv that no sequence owns, by `warps` warps.
template <class T>
__device__ void zero_key_tail(const BackwardParams& p, int h, int block, int rows_per_block, int warp, int warps) {
  const int64_t stride = static_cast<int64_t>(p.num_key_blocks) * rows_per_block;
  for (int64_t first = p.sequence.cu_seqlens_k.at(p.sequence.batch) + static_cast<int64_t>(block) * rows_per_block;
       first < p.sequence.total_k; first += stride)
    for (int r = warp; r < rows_per_block && first + r < p.sequence.total_k; r += warps)
      for (int which = 0; which < 2; ++which) {
        const RowTensor& x = which ? p.dv : p.dk;
        if (x.data == nullptr) continue;
        const int64_t at = (first + r) * x.row + h * x.head;
        for (int c = threadIdx.x % 32; c < (which ? p.head_dim_v : p.head_dim); c += 32) {
          if (which ? p.dv_is_float : p.dk_is_float)
            static_cast<float*>(x.data)[at + c] = 0.f;
          else
            static_cast<T*>(x.data)[at + c] = ptx::from_float<T>(0.f);
        }
      }
}

// dk and dv of keys that no query sees, by one warp. kUnrolled: elements at a time, for which it needs registers.
template <class T, int kUnrolled>
__device__ void zero_keys(const BackwardParams& p, const KeyBlock& block, int rows, int lane, bool dk_aligned, bool dv_aligned) {
  const int end = min(rows, block.s.capacity_k - block.first_key);
  for (int which = 0; which < 2; ++which) {
    const RowTensor& x = which ? p.dv : p.dk;
    if (x.data == nullptr) continue;
    const int columns = which ? p.head_dim_v : p.head_dim;
    const int64_t base = (p.sequence.packed_k ? block.s.k_begin * x.row : block.s.cache_row * x.batch) + block.head_k * x.head;
    for (int r = 0; r < end; ++r) {
      const int64_t at = base + (block.first_key + r) * x.row;
      if (which ? dv_aligned : dk_aligned) {
        if (lane * 8 < columns) *reinterpret_cast<uint4*>(static_cast<T*>(x.data) + at + lane * 8) = make_uint4(0, 0, 0, 0);
        continue;
      }
#pragma unroll(kUnrolled)
      for (int c = lane; c < columns; c += 32) {
        if (which ? p.dv_is_float : p.dk_is_float)
          static_cast<float*>(x.data)[at + c] = 0.f;
        else
          static_cast<T*>(x.data)[at + c] = ptx::from_float<T>(0.f);
      }
    }
  }
}

}  // namespace tilewise::cuda
