// Shapes of the sm_90a backward rows: a reason per number, and the sums of registers and shared memory that they cost.
#pragma once
#include <cstdint>

#include "core/host_device.h"
#include "cuda/config_sm80.h"

namespace tilewise::cuda {

// How key blocks add to the sums of dq: a kernel each, since to decide it while running costs 1 to 3 %. Where the first stores,
// nobody writes zeros and nobody reads them, and the others wait for that. Counters: BackwardParams::turn.
enum class DqSums {
  kAny,     // to zeros that pre has written
  kFirst,   // The first stores. A tile's counter says whether anybody has claimed it, and whether he (without helpers: how many of his warps) has stored.
  kOrdered  // In the order of the key blocks, and the first stores. Counters of the key blocks that have added; without helpers one a warp.
};

struct BackwardSm90Config {
  Element element;
  int head_dim;    // of q, k and v, rounded up; columns beyond the real ones are zeros
  int block_m;     // queries a step
  int stages;      // of Q; lse and delta
  bool split;      // one warpgroup has dV, the other dK, of the same 64 keys. Else: each has both, of 64 keys of its own
  BackwardKind kind = BackwardKind::kPlain;
  // A fourth warpgroup loads, hands out key blocks and minds the turns (backward_sm90_helpers.cuh). Else consumers and dQ's warps do it.
  bool helpers = false;

  TW_HOST_DEVICE constexpr bool plain() const { return kind == BackwardKind::kPlain; }
  TW_HOST_DEVICE constexpr bool copies_bias() const { return kind == BackwardKind::kBias; }
  TW_HOST_DEVICE constexpr bool general() const { return kind == BackwardKind::kGeneral || copies_bias(); }
  // dK and dV by one kernel, dq by another (config_backward_sm90_query.h), and no sums of dq: these would limit it.
  TW_HOST_DEVICE constexpr bool two_passes() const { return split && plain(); }
  static constexpr int kConsumers = 2;  // warpgroups
  TW_HOST_DEVICE constexpr int block_n() const { return split ? 64 : 64 * kConsumers; }
  static constexpr int kDoutStages = 2;
  TW_HOST_DEVICE constexpr int k_slots() const { return split ? 1 : 2; }  // the next key block's arrives while this one ends
  TW_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }
  TW_HOST_DEVICE constexpr int num_threads() const { return 128 * (kConsumers + 1 + helpers); }
  TW_HOST_DEVICE constexpr int turns_per_block() const { return helpers ? 1 : 4; }  // counters of a tile, see DqSums

  // Key blocks that see a tile up to which DqSums::kFirst is worth asking for each tile: 8 % faster at d 128, causal 512, and 5 %
  // slower at 4k.
  TW_HOST_DEVICE constexpr int few_key_blocks() const { return head_dim <= 64 ? 16 : 5; }

  // setmaxnreg: 3 x 168 = 2 x 216 + 72, with helpers 4 x 128 = 2 x 208 + 64 + 32. A consumer holds 128 of dK and dV, block_m / 2 of S or
  // dP, and block_m / 4 each of P and dS as operands: 192. The third warpgroup holds 64 x 64 of dQ at a time: 32, and as the compiler puts
  // products behind the first 24 registers and keeps two more, 56 would not do.
  TW_HOST_DEVICE constexpr int consumer_registers() const { return helpers ? 208 : 216; }
  TW_HOST_DEVICE constexpr int dq_registers() const { return helpers ? 64 : 72; }
  static constexpr int kHelperRegisters = 32;

  // Shared memory, in bytes. Every panel starts at a multiple of 1024, the period of the 128-byte swizzle.
  TW_HOST_DEVICE constexpr int k_bytes() const { return block_n() * head_dim * 2; }
  TW_HOST_DEVICE constexpr int q_bytes() const { return block_m * head_dim * 2; }
  TW_HOST_DEVICE constexpr int ds_bytes() const { return block_n() * block_m * 2; }
  TW_HOST_DEVICE constexpr int p_bytes() const { return split ? block_n() * block_m * 2 : 0; }
  // lse and delta of a tile: as columns of a product; with options delta, where lse gains nothing by it both, as float32.
  TW_HOST_DEVICE constexpr bool lse_is_column() const { return plain() || (kind == BackwardKind::kDropout && head_dim > 64); }
  TW_HOST_DEVICE constexpr int lse_bytes() const { return block_m * (lse_is_column() ? 32 : 4); }  // in columns with delta
  TW_HOST_DEVICE constexpr int row_bytes() const { return lse_bytes() + (plain() ? 0 : block_m * 4); }
  TW_HOST_DEVICE constexpr int delta_offset() const { return lse_bytes(); }
  // A tile's is needed until its turn has been passed, when dQ is one tile ahead (with helpers two), and loads four more.
  static constexpr int kTargets = 8;
  static constexpr int kLoadBytes = 48;  // of a LoadState, of which there are two
  static constexpr int kBlockBytes = 128;  // of a KeyBlock; there are the present one and the next

  TW_HOST_DEVICE constexpr int v_offset() const { return k_slots() * k_bytes(); }
  TW_HOST_DEVICE constexpr int q_offset() const { return v_offset() + k_bytes(); }
  TW_HOST_DEVICE constexpr int do_offset() const { return q_offset() + stages * q_bytes(); }
  TW_HOST_DEVICE constexpr int ds_offset() const { return do_offset() + kDoutStages * q_bytes(); }
  TW_HOST_DEVICE constexpr int p_offset() const { return ds_offset() + 2 * ds_bytes(); }
  TW_HOST_DEVICE constexpr int bias_offset() const { return p_offset() + p_bytes(); }
  TW_HOST_DEVICE constexpr int rows_offset() const { return bias_offset() + bias_bytes(); }
  TW_HOST_DEVICE constexpr int barrier_offset() const { return rows_offset() + stages * row_bytes(); }
  TW_HOST_DEVICE constexpr int num_barriers() const { return 13 + 4 * stages + (helpers ? 5 + kTargets : 0) + (copies_bias() ? 2 * bias_warps() : 0); }
  TW_HOST_DEVICE constexpr int target_offset() const { return barrier_offset() + (num_barriers() + 1) / 2 * 16; }
  TW_HOST_DEVICE constexpr int load_offset() const { return target_offset() + 16 * kTargets; }
  TW_HOST_DEVICE constexpr int count_offset() const { return load_offset() + 2 * kLoadBytes; }  // of warps that have left V
  // Gradients of bias and ALiBi slopes; where one warpgroup has dK alone, registers do not suffice.
  TW_HOST_DEVICE constexpr bool has_sums() const { return general() && !split; }
  static constexpr int kDalibiParts = 4 * kConsumers;  // of a key block and head: one a warp

  TW_HOST_DEVICE constexpr int dalibi_lanes() const { return copies_bias() ? 1 : 32; }  // sums of a warp, on their way to one

  static constexpr int kFactBytes = 64;  // of a head, a warp: see OptionsSm90

  // Tiles of bias, a strip of 16 keys for each warp that makes P (BiasSm90): chunks of 16 queries, 512 bytes at 16 bits an element. A strip
  // holds those of a whole tile, at head dim 64 seven of eight; the last one, or the rest of float32, takes the place of what has been read.
  TW_HOST_DEVICE constexpr int bias_chunks() const { return block_m / 16; }
  TW_HOST_DEVICE constexpr int bias_warps() const { return split ? 4 : 4 * kConsumers; }
  TW_HOST_DEVICE constexpr int strip_bytes() const { return 512 * (bias_chunks() < 8 ? bias_chunks() : 7); }
  TW_HOST_DEVICE constexpr int bias_bytes() const { return copies_bias() ? bias_warps() * strip_bytes() : 0; }
  TW_HOST_DEVICE constexpr int bias_slots(int element_bytes) const {  // chunks that fit
    const int fit = strip_bytes() / (256 * element_bytes);
    return fit < bias_chunks() ? fit : bias_chunks();
  }
  TW_HOST_DEVICE constexpr int bias_box(int element_bytes) const {  // rows copied at a time
    const int slots = bias_slots(element_bytes);
    return 16 * (bias_chunks() % slots == 0 ? slots : 1);
  }

  // Options: seed and offset of dropout; the unit of dbias; facts of a head; sums of dalibi.
  TW_HOST_DEVICE constexpr int seed_offset() const { return count_offset() + 16; }
  TW_HOST_DEVICE constexpr int unit_offset() const { return seed_offset() + 16; }
  TW_HOST_DEVICE constexpr int facts_offset() const { return unit_offset() + 16; }
  TW_HOST_DEVICE constexpr int dalibi_offset() const { return facts_offset() + kConsumers * 4 * kFactBytes; }
  TW_HOST_DEVICE constexpr int block_offset() const {
    return plain() ? count_offset() + 16 : dalibi_offset() + (has_sums() ? kConsumers * 4 * dalibi_lanes() * 4 : 0);
  }
  TW_HOST_DEVICE constexpr int shared_bytes() const { return block_offset() + 2 * kBlockBytes; }

  TW_HOST_DEVICE constexpr bool valid() const {
    return head_dim % 64 == 0 && block_m % 64 == 0 && shared_bytes() <= 227 * 1024 &&
           (split ? head_dim == 256 && block_m == 64 && stages == 2 : head_dim + block_m <= 192 && stages == 3);
  }
};

// With helpers d 128 is 4 to 12 % faster, and d 64 where sums are ordered; d 64 is up to 3 % slower else, and the general kernel at d 128 4 %.
TW_HOST_DEVICE constexpr BackwardSm90Config backward_sm90_config(Element element, int head_dim, BackwardKind kind, DqSums sums) {
  const bool plain = kind == BackwardKind::kPlain;
  if (head_dim <= 64) return {element, 64, 128, 3, false, kind, plain && sums == DqSums::kOrdered};
  if (head_dim <= 128) return {element, 128, 64, 3, false, kind, plain};
  return {element, 256, 64, 2, true, kind};
}

}  // namespace tilewise::cuda
