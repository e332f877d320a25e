// Shapes of the sm_90a forward rows: a reason per number, and the sums of registers and shared memory that they cost.
#pragma once
#include <cstdint>

#include "core/host_device.h"
#include "cuda/config_sm80.h"

namespace tilewise::cuda {

enum class RowSum : int {
  kFloat32,     // one addition per score: what an exported lse needs (1e-6)
  kOnesColumn,  // eight columns of ones behind V: sums of the rounded P, right for o, too coarse for lse (2^-8 on few keys)
};

enum class ScoreKind : int {
  kPlain,    // scale, windows, sinks
  kGeneral,  // also softcap, ALiBi, max_logit, a negative scale
  kWhole,    // scale alone, and no edges: all rows of all tiles exist and see all keys, whole key tiles; a tile has one block
  kBias,     // kGeneral and a bias or a boolean mask
};

enum class Sm90Shape : int {
  kD64,        // long sequences
  kD64Short,   // more rows a block and smaller key tiles: less waste at the ends
  kD64Causal,  // the same without turns: warpgroups have different numbers of tiles, and would wait for each other
  kD64General, // ScoreKind::kGeneral and kBias: their registers
  kD128,
  kD128Short,  // the same, with half the keys a tile: less of a causal tile is masked
  kD256,
};

struct ForwardSm90Config {
  Element element;
  Sm90Shape shape;
  RowSum row_sum;
  ScoreKind score;
  int head_dim;         // of q, k and v, rounded up; columns beyond the real ones are zeros
  int consumers;        // warpgroups, 64 query rows each
  int block_n;          // keys
  int stages;           // of K and of V
  int q_slots;          // of queries in shared memory
  bool q_in_registers;  // fragments are loaded once a tile, and the slot is free at once
  bool ping_pong;       // warpgroups take turns at issuing products
  int q_rows;           // of a slot: block_m, or 64, those of one consumer
  bool stages_o;        // O leaves through shared memory and the copy engine. Else threads write it, 16 bytes at a time

  TW_HOST_DEVICE constexpr int block_m() const { return 64 * consumers; }
  TW_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }  // of 64 columns, 128 bytes a row
  TW_HOST_DEVICE constexpr int num_threads() const { return 128 * (consumers + 1); }
  TW_HOST_DEVICE constexpr bool general() const { return score == ScoreKind::kGeneral || biased(); }
  TW_HOST_DEVICE constexpr bool biased() const { return score == ScoreKind::kBias; }
  TW_HOST_DEVICE constexpr bool drops() const { return general() && !(biased() && head_dim > 128); }  // is dropout compiled? registers
  TW_HOST_DEVICE constexpr bool whole() const { return score == ScoreKind::kWhole; }
  TW_HOST_DEVICE constexpr bool ones() const { return row_sum == RowSum::kOnesColumn; }
  TW_HOST_DEVICE constexpr int pv_columns() const { return head_dim + (ones() ? 8 : 0); }

  // setmaxnreg: what the launch gives (65,536 / threads, in steps of 8) is moved from producer to consumers; the sums
  // over all warpgroups must agree: 3 x 168 = 40 + 2 x 232, 4 x 128 = 32 + 3 x 160 = 56 + 3 x 152, 5 x 96 = 32 + 4 x 112.
  // Pages take more registers of the producer than 32.
  TW_HOST_DEVICE constexpr int consumer_registers() const {
    return consumers == 2 ? 232 : consumers == 3 ? (general() ? 152 : 160) : 112;
  }
  TW_HOST_DEVICE constexpr int producer_registers() const {
    return consumers == 2 ? 40 : consumers == 3 && general() ? 56 : 32;
  }

  // The producer's warps: one loads K and V, one hands out tiles and loads Q, and two store O, one for each of two
  // consumers; more consumers store their own, and those whose bias another warp loads.
  TW_HOST_DEVICE constexpr bool store_warps() const { return stages_o && consumers == 2 && !biased(); }

  // Tiles that are described in shared memory, a power of two. A consumer that enters tile n may still have to finish
  // n - 2, while tile n + 2 is handed out.
  static constexpr int kWorkSlots = 8;

  // Shared memory, in bytes. Every panel starts at a multiple of 1024, the period of the 128-byte swizzle.
  TW_HOST_DEVICE constexpr int q_bytes() const { return q_rows * head_dim * 2; }  // of a slot
  TW_HOST_DEVICE constexpr int slots_per_tile() const { return block_m() / q_rows; }
  TW_HOST_DEVICE constexpr int k_bytes() const { return block_n * head_dim * 2; }
  TW_HOST_DEVICE constexpr int ones_bytes() const { return ones() ? block_n * 128 : 0; }
  // From d = 128 on every stage of V has its own panel of ones at the distance of its own panels; one panel of V can
  // name any distance to a panel that all stages share.
  TW_HOST_DEVICE constexpr int v_stage_bytes() const { return k_bytes() + (panels() > 1 ? ones_bytes() : 0); }
  TW_HOST_DEVICE constexpr int o_bytes() const { return stages_o ? 64 * head_dim * 2 : 0; }  // per warpgroup

  TW_HOST_DEVICE constexpr int o_offset() const { return q_slots * q_bytes(); }
  TW_HOST_DEVICE constexpr int k_offset() const { return o_offset() + consumers * o_bytes(); }
  TW_HOST_DEVICE constexpr int v_offset() const { return k_offset() + stages * k_bytes(); }
  TW_HOST_DEVICE constexpr int ones_offset() const { return v_offset() + stages * v_stage_bytes(); }
  // Bias: a ring for each consumer, of two tiles [64, block_n] of 16 bits, one of 32, or two of a boolean mask.
  static constexpr int kBiasBytes = 64 * 128, kBiasStages = 2;
  TW_HOST_DEVICE constexpr int bias_offset() const { return ones_offset() + (panels() > 1 ? 0 : ones_bytes()); }
  TW_HOST_DEVICE constexpr int bias_rings() const { return biased() ? consumers * kBiasStages : 0; }
  TW_HOST_DEVICE constexpr int barrier_offset() const { return bias_offset() + bias_rings() * kBiasBytes; }
  TW_HOST_DEVICE constexpr int other_barriers() const { return 2 * (q_slots + 2 * stages + consumers) + kWorkSlots + 1; }
  TW_HOST_DEVICE constexpr int num_barriers() const { return other_barriers() + 2 * bias_rings(); }
  TW_HOST_DEVICE constexpr int work_offset() const { return barrier_offset() + (num_barriers() + 1) / 2 * 16; }
  // Does a causal mask leave whole key tiles of the block to its lower warpgroups alone?
  TW_HOST_DEVICE constexpr int max_skip() const { return (block_m() - 64) / block_n; }
  TW_HOST_DEVICE constexpr bool skips() const { return max_skip() > 0; }
  static constexpr int kWorkBytes = 64;  // sizeof(Work)
  TW_HOST_DEVICE constexpr int staged_offset() const { return work_offset() + kWorkSlots * kWorkBytes; }
  TW_HOST_DEVICE constexpr int again_offset() const { return staged_offset() + consumers * 8; }
  TW_HOST_DEVICE constexpr int shared_bytes() const { return again_offset() + consumers * 16; }

  // Can several blocks do a tile together? Not where tiles differ in length, and with more than two consumers there are no
  // registers for it.
  TW_HOST_DEVICE constexpr bool shares_tiles() const {
    return consumers == 2 && score == ScoreKind::kPlain && shape != Sm90Shape::kD128Short;
  }
  // A part of a tile on its way to the block that finishes it: O as its threads hold it, and four statistics a thread.
  TW_HOST_DEVICE constexpr int part_floats() const { return consumers * 128 * (pv_columns() / 2 + 4); }
  TW_HOST_DEVICE constexpr int part_flags() const { return consumers * 4; }

  // Which combinations are compiled. A column of ones gains nothing at d 256, at d 64 with many keys, and there in float16, where
  // P's growth must be seen besides. Options have one shape a head dimension.
  TW_HOST_DEVICE constexpr bool exists() const {
    if (shape == Sm90Shape::kD64General && !general()) return false;
    if (general() && shape != Sm90Shape::kD64General && shape != Sm90Shape::kD128Short && shape != Sm90Shape::kD256) return false;
    if (whole() && shape != Sm90Shape::kD128) return false;  // others: Q's descriptors leave the uniform registers
    const bool pays = head_dim == 128 || (head_dim == 64 && element == Element::kBfloat16 && shape != Sm90Shape::kD64);
    return !ones() || (!general() && pays);
  }

  // A consumer lets go of the values that it skips only with its next product. Until then it holds those of its first tile,
  // its own last ones and those of the next tile; with fewer stages the keys that it waits for would never be loaded.
  // With no more slots of Q than a tile has, that of the next tile arrives late: what the room for a bias costs at d 256.
  TW_HOST_DEVICE constexpr bool valid() const {
    return head_dim % 64 == 0 && block_n % 64 == 0 && shared_bytes() <= 227 * 1024 && (!biased() || block_n == 64) &&
           stages >= 2 * max_skip() && consumers >= 2 && consumers <= 4 && (q_in_registers || biased() || q_slots > slots_per_tile());
  }
};

TW_HOST_DEVICE constexpr ForwardSm90Config forward_sm90_shape(Element element, Sm90Shape shape, RowSum row_sum, ScoreKind score) {
  switch (shape) {
    case Sm90Shape::kD64: return {element, shape, row_sum, score, 64, 3, 128, 3, 2, false, true, 192, true};
    case Sm90Shape::kD64Short: return {element, shape, row_sum, score, 64, 4, 64, 6, 2, false, true, 256, true};
    case Sm90Shape::kD64Causal: return {element, shape, row_sum, score, 64, 4, 64, 6, 2, false, false, 256, true};
    case Sm90Shape::kD64General: return {element, shape, row_sum, score, 64, 3, 64, 6, 2, false, true, 192, true};
    case Sm90Shape::kD128: return {element, shape, row_sum, score, 128, 2, 128, 2, 1, true, true, 128, true};
    case Sm90Shape::kD128Short: return {element, shape, row_sum, score, 128, 2, 64, 4, 1, true, true, 128, true};
    default: return {element, shape, row_sum, score, 256, 2, 64, 2, score == ScoreKind::kBias ? 2 : 3, false, true, 64, false};
  }
}

// The configuration of a kernel. A stress build (ptx/mbarrier.cuh) may ask for shallower rings: TILEWISE_STRESS=stages.
TW_HOST_DEVICE constexpr ForwardSm90Config forward_sm90_config(Element element, Sm90Shape shape, RowSum row_sum, ScoreKind score) {
  ForwardSm90Config config = forward_sm90_shape(element, shape, row_sum, score);
#if defined(TILEWISE_STRESS)
  const int fewest = config.max_skip() > 0 ? 2 * config.max_skip() : config.biased() ? 2 : 1;
  const int depth = config.biased() ? TILEWISE_STRESS / 2 * 2 : TILEWISE_STRESS, wanted = depth < fewest ? fewest : depth;
  if (wanted < config.stages) config.stages = wanted;
#endif
  return config;
}

}  // namespace tilewise::cuda
