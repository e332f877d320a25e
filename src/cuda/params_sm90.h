// What the sm_90a forward kernels are told.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/params.h"

namespace tilewise::cuda {

// Division by a number that many threads divide by: a product instead of an instruction sequence of 130 clocks.
struct Divisor {
  uint32_t by, inverse;  // inverse = floor(2^32 / by), or 2^32 - 1

  static Divisor of(int64_t by) {
    const uint32_t n = static_cast<uint32_t>(by);
    return {n, n == 1 ? 0xffffffffu : static_cast<uint32_t>((uint64_t{1} << 32) / n)};
  }
#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {  // short of the quotient by 1 at most: n < 2^32
    const uint32_t quotient = __umulhi(n, inverse);
    return quotient + (n - quotient * by >= by);
  }
#endif
};

// The order in which blocks take tiles (of one batch entry, of one query head or of several that share keys).
struct TileOrder {
  int32_t num_tiles;
  // A tile has `tile_rows` rows of each of `tile_heads` query heads that share keys, head by head. Either one head and block_m
  // rows, or a power of two of both, at least 16 rows: a warp's rows are of one head.
  int32_t tile_rows, tile_heads;
  int32_t row_bits;         // row n of a tile is row n % 2^row_bits of its head n >> row_bits
  int32_t num_blocks;       // row blocks of the longest sequence
  int32_t num_heads;        // of all batch entries, in tiles' heads
  int32_t section_heads;    // 0: by head, row blocks in order. Else: sections of so many heads, longest rows first
  unsigned long long* counter;  // null: tile n of block x is x + n * blocks. Else: tiles are taken from this counter
  // Without a counter, all tiles have `key_tiles` key tiles. Those of the tiles from whole_tiles on, one after the other, may be
  // shared out among the first `sharing_blocks` blocks: shared_each for each, and one more for the first shared_rest.
  int32_t sharing_blocks;  // 0: every tile has one block
  int32_t whole_tiles, key_tiles, shared_each, shared_rest;
  int32_t lead;             // with a counter: the next tile is taken when so many key tiles are still to be loaded
  uint64_t launch;          // differs from launch to launch, 40 bits, not 0: a counter that holds another is at 0

  // How many of the shared key tiles the blocks before this one have.
  TW_HOST_DEVICE int32_t share_begin(int32_t block) const {
    block = block < sharing_blocks ? block : sharing_blocks;
    return block * shared_each + (block < shared_rest ? block : shared_rest);
  }
};

// How a tile of bias lies in shared memory, 64 rows of 64 keys: 16 bits of q's type, a row 128 bytes; bytes of a boolean mask, a row 64
// bytes; float32, two panels of 32 keys.
enum class BiasKind : int32_t { k16, kMask, kFloat32 };

// ScoreKind::kBias.
struct BiasParams {
  CUtensorMap map;        // see bias_map()
  BiasKind kind;
  int32_t boxes;          // of a tile, next to each other in keys
  int32_t box_keys, box_bytes;
  int32_t row_mask;       // 63; 0: all rows have the same bias, and a box has one
  int32_t stage_bits;     // log2 of the stages of its rings
  float scale;            // logit = (q . k, or what softcap makes of it) * scale + bias. Not used with a mask
  bool alone;             // no other option of ScoreKind::kGeneral is asked for
  float unit;             // natural units of what the exponentials see
};

struct ForwardSm90Params {
  CUtensorMap q, k, v, o;   // [batch, head, panel, row, column]; one box = all panels, or one of them
  int32_t loads_per_tile;   // of q and o. 1: a box has every panel of a tile. Else: boxes of one panel
  int32_t key_loads;        // of k and v, the same
  int32_t page_rows;        // paged: keys of a box, a divisor of block_n and of the page size. Else 0
  int32_t key_align;        // ScoreKind::kGeneral, kBias: key tiles start at multiples of it, a power of two (work_sm90.cuh)
  bool natural;             // ScoreKind::kGeneral, kBias: options() leaves logits in natural units (of a float bias, add_bias() does)
  ForwardParams forward;    // options, and what rows that are computed again need
  TileOrder order;
  float scale_log2;         // from what the exponentials see to base 2, never 0
  int32_t window_left, window_right;  // -1 = unbounded; causal: right = 0
  bool check;               // some score may be masked: P = 0 times a value that is not finite is NaN
  int32_t always;           // 1. The compiler does not know
  int32_t* again;           // [head of a batch entry, 16 rows]: links of the lists of rows to be computed again
  int32_t again_stride;     // links per head
  float* parts;             // [block]: O and statistics of a part of a tile that another block finishes
  unsigned long long* part_ready;  // [block, consumer, warp]: order.launch as soon as they are there; 0 again when they are read
  // By order.num_blocks; by the tiles and by the heads of a section; by the query heads of a batch entry and of a key head.
  Divisor by_blocks, by_section_tiles, by_section_heads, by_heads_q, by_group;
  BiasParams bias;
};

}  // namespace tilewise::cuda
