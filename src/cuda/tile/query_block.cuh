// The unit of work of a pass by queries: a block of rows of one query head, and the tiles of keys that they see.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/sequence.cuh"

namespace tilewise::cuda {

struct QueryBlock {
  int b, head, head_k, first_row;  // b < 0: there are no more; b == batch: rows of no sequence
  int first_tile, num_tiles;       // of keys
  int own_tiles[2][2];             // tiles [begin, end) that the first, the second 64 rows see
  int full_keys[2][2];             // keys [begin, end) that all of these 64 rows see
  int q_begin, k_begin;            // packed: first row of the sequence. Else 0
  int capacity_q, seqlen_q, seqlen_k;
};

// Task n: query block inside query head inside batch entry. Causal: the last query blocks have the most keys, and of `section` heads, which
// take turns, they come first. Sections are counted from the end, so that the last one is whole. Written as it is found out: who does this
// has 24 registers. False: there are no such rows.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool find_query_block(volatile QueryBlock& block, const BackwardParams& p, unsigned n, unsigned section) {
  const unsigned blocks = (p.sequence.seqlen_q + kBlockM - 1) / kBlockM;
  unsigned index;
  if (section != 0) {
    const unsigned heads = p.sequence.num_heads_q * (p.sequence.batch + p.sequence.packed_q);
    n = heads * blocks - 1 - n;
    const unsigned first = n / (section * blocks) * section, inside = n - first * blocks, width = min(section, heads - first);
    index = inside / width;
    n = heads - 1 - (first + inside - index * width);
  } else {
    index = n % blocks;
    n /= blocks;
  }
  const int b = static_cast<int>(n / p.sequence.num_heads_q), head = static_cast<int>(n - b * p.sequence.num_heads_q);
  const int first_row = static_cast<int>(index) * kBlockM;
  block.b = b;
  block.head = head;
  block.head_k = head / (p.sequence.num_heads_q / p.sequence.num_heads_k);
  block.first_row = first_row;
  block.first_tile = 0;
  block.num_tiles = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) block.own_tiles[c / 2][c % 2] = 0;
  if (b >= p.sequence.batch) return true;
  int q_begin = 0, capacity_q = p.sequence.seqlen_q, seqlen_k = p.sequence.seqlen_k;
  if (p.sequence.packed_q) {
    q_begin = p.sequence.cu_seqlens_q.at(b);
    capacity_q = p.sequence.cu_seqlens_q.at(b + 1) - q_begin;
  }
  if (first_row >= capacity_q) return false;
  block.q_begin = q_begin;
  block.capacity_q = capacity_q;
  const int seqlen_q = p.sequence.seqused_q ? p.sequence.seqused_q.at(b) : capacity_q;
  block.seqlen_q = seqlen_q;
  block.k_begin = 0;
  if (p.sequence.packed_k) {
    const int k_begin = p.sequence.cu_seqlens_k.at(b);
    block.k_begin = k_begin;
    seqlen_k = p.sequence.cu_seqlens_k.at(b + 1) - k_begin;
  }
  if (p.sequence.seqused_k) seqlen_k = p.sequence.seqused_k.at(b);
  block.seqlen_k = seqlen_k;
  // Ranges of consecutive rows overlap or touch, and both ends rise with the row.
  int begin = 0x7fffffff, end = 0;
#pragma unroll 1
  for (int c = 0; c < 2; ++c) {
    const int first = block.first_row + c * kBlockM / 2, last = min(first + kBlockM / 2, block.seqlen_q) - 1;
    if (last < first) continue;
    const Range of_first = visible_keys(p.score, first, block.seqlen_q, block.seqlen_k);
    const Range of_last = visible_keys(p.score, last, block.seqlen_q, block.seqlen_k);
    block.full_keys[c][0] = of_last.begin;
    block.full_keys[c][1] = of_first.end;
    if (of_last.end <= of_first.begin) continue;
    block.own_tiles[c][0] = of_first.begin / kBlockN;
    block.own_tiles[c][1] = (of_last.end + kBlockN - 1) / kBlockN;
    begin = min(begin, of_first.begin / kBlockN);
    end = max(end, (of_last.end + kBlockN - 1) / kBlockN);
  }
  if (end == 0) return true;
  block.first_tile = begin;
  block.num_tiles = end - begin;
#pragma unroll 1
  for (int c = 0; c < 2; ++c)
    if (block.own_tiles[c][1] == 0) {
      block.own_tiles[c][0] = begin;
      block.own_tiles[c][1] = begin;
    }
  return true;
}

// Rows of dq that no sequence owns, by `warps` warps.
template <class T>
__device__ void zero_query_tail(const BackwardParams& p, const QueryBlock& block, int rows, int warp, int warps, int lane) {
  const int64_t stride = static_cast<int64_t>((p.sequence.seqlen_q + rows - 1) / rows) * rows;
  for (int64_t first = p.sequence.cu_seqlens_q.at(p.sequence.batch) + block.first_row; first < p.sequence.total_q; first += stride)
    for (int64_t row = first + warp; row < min(first + rows, p.sequence.total_q); row += warps)
      for (int c = lane * 2; c < p.head_dim; c += 64)
        store_columns<T>(p.dq.data, row * p.dq.row + block.head * p.dq.head + c, p.dq_is_float, false, c + 1 < p.head_dim, 0.f, 0.f);
}

}  // namespace tilewise::cuda
