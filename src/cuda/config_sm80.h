// Tile shapes of the sm_80 rows: a reason per number, and the sums of registers and shared memory that it costs.
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace tilewise::cuda {

enum class Element : int { kFloat16, kBfloat16, kFloat32 };

TW_HOST_DEVICE constexpr int element_bytes(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// What a block gets on sm_86, sm_89 and sm_120, on sm_80, and on sm_90 and sm_100.
inline constexpr int kSharedLimit = 99 * 1024;
inline constexpr int kSharedLimitLarge = 163 * 1024;
inline constexpr int kSharedLimitRoomy = 227 * 1024;

enum class ForwardKind : int {
  kPlain,    // full, causal and window; scale > 0; 16-byte aligned rows: what training mostly runs
  kDropout,  // the same with dropout
  kGeneral,  // every option
  kFewRows,  // every option, for at most 64 rows: decoding
};

// float32 operands are three bfloat16 parts. Who splits the elements of K and V?
enum class Split : int {
  kWarp,    // every warp for itself, as it reads them (also: nobody, for 16-bit elements)
  kInTurn,  // the block, as they arrive; K and V take turns in one set of tiles
  kKeys,    // the block, K and V into tiles of their own
  kAll,     // the block, and Q as well
};

struct ForwardConfig {
  Element element;
  ForwardKind kind;
  int head_dim;  // of q, k and v, rounded up; columns beyond the real ones are zeros
  int block_m;   // queries
  int block_n;   // keys
  int num_warps;
  Split split = Split::kWarp;
  int unroll = 1;  // float32: steps of the head dim in one turn of the loop
  int num_stages = 1;  // 16 bits: of K and V

  TW_HOST_DEVICE constexpr int num_threads() const { return num_warps * 32; }
  TW_HOST_DEVICE constexpr int row_groups() const { return block_m / (num_warps * 16); }  // of 16 rows, per warp
  TW_HOST_DEVICE constexpr int query_bytes() const { return block_m * head_dim * (split == Split::kAll ? 6 : element_bytes(element)); }
  TW_HOST_DEVICE constexpr int key_bytes() const { return block_n * head_dim * (split == Split::kWarp ? element_bytes(element) : 6); }
  // Dropout's words of a thread's rows wait in shared memory where two stages leave no registers (d 128: 7 words spilled).
  TW_HOST_DEVICE constexpr bool shares_row_words() const { return kind == ForwardKind::kDropout && num_stages == 2; }
  TW_HOST_DEVICE constexpr int row_words_offset() const { return shared_bytes() - block_n * 4 - (shares_row_words() ? num_threads() * 16 : 0); }
  // K, V, the floats of either as they arrive, and marks of keys.
  TW_HOST_DEVICE constexpr int shared_bytes() const {
    return query_bytes() + (split == Split::kInTurn ? 1 : 2) * num_stages * key_bytes() + (split == Split::kWarp ? 0 : block_n * head_dim * 4) +
           (shares_row_words() ? num_threads() * 16 : 0) + block_n * 4;
  }
  // Live 32-bit registers of the main loop: O, S, an operand of one step (of float32 three parts and sums), and the addresses
  // and counters of about 40 more.
  TW_HOST_DEVICE constexpr int registers() const {
    return row_groups() * (head_dim / 2 + block_n / 2 + (element == Element::kFloat32 ? 20 : 4)) + 40;
  }
  TW_HOST_DEVICE constexpr bool valid() const {
    return block_m % (num_warps * 16) == 0 && block_n % 32 == 0 && head_dim % 32 == 0 && registers() <= 255;
  }
};

// Two groups of 16 rows per warp halve the shared-memory reads of K and V per product; from d = 192 on the output of
// two groups (2 x 96 registers) leaves no room, so eight warps of one group share a tile. Measured on an H200, 16k keys,
// full, bf16, TFLOP/s (docs/kernels/forward_sm80.md): d 64 309 (one group 268, 128 keys 295, Q in registers 278),
// d 128 341 (one group 291, 32 keys 337), d 256 318 (32 keys 264). Two stages of K and V need one barrier a tile instead of two: d 64
// 333 instead of 309; measured for plain and dropout alone. d 128 then takes 97 KiB, of which sm_80 has no room for two blocks: one stage.
TW_HOST_DEVICE constexpr ForwardConfig forward_config(Element element, ForwardKind kind, int head_dim, bool small) {
  // float32: rows of twice the bytes, operands of three parts. What counts is that K and V are split once and that two warps a
  // scheduler share the waiting: d 128 60 TFLOP/s (every warp splits: 51), d 256 53 (24; four warps 32).
  if (element == Element::kFloat32) {
    if (small && head_dim > 192) return {element, kind, head_dim, 32, 32, 2};
    if (kind == ForwardKind::kFewRows)  // at 128 alone one step a turn spills
      return {element, kind, head_dim, 64, 32, 4, Split::kWarp, head_dim == 128 ? 2 : 1};
    if (head_dim <= 64) return {element, kind, head_dim, 128, 32, 4, Split::kAll};
    if (head_dim <= 96) return {element, kind, head_dim, 128, 32, 4, Split::kInTurn, 2};
    if (head_dim <= 128)
      return small ? ForwardConfig{element, kind, head_dim, 128, 32, 4} : ForwardConfig{element, kind, head_dim, 128, 32, 8, Split::kAll};
    if (head_dim <= 192)
      return small ? ForwardConfig{element, kind, head_dim, 64, 32, 4} : ForwardConfig{element, kind, head_dim, 128, 32, 8, Split::kInTurn, 2};
    return {element, kind, head_dim, 64, 32, 4, Split::kInTurn};
  }
  if (kind == ForwardKind::kFewRows)  // 64 rows are mostly empty already; the loads of K and V are all that counts
    return {element, kind, head_dim, 64, head_dim <= 128 ? 64 : 32, 4};
  if (head_dim <= 128) {
    const bool staged = kind != ForwardKind::kGeneral && (head_dim <= 96 || !small);
    return {element, kind, head_dim, 128, 64, 4, Split::kWarp, 1, staged ? 2 : 1};
  }
  if (head_dim <= 192 || !small) return {element, kind, head_dim, 128, 64, 8};
  return {element, kind, head_dim, 64, 64, 4};
}

// The shape for GPUs with 227 KiB, where it is another one. For plain problems, so that few more kernels are to be compiled.
TW_HOST_DEVICE constexpr ForwardConfig roomy_config(Element element, ForwardKind kind, int head_dim) {
  if (element == Element::kFloat32 && head_dim > 192 && kind == ForwardKind::kPlain)
    return {element, kind, head_dim, 128, 32, 8, Split::kInTurn, 2};
  return forward_config(element, kind, head_dim, false);
}

// Two blocks a multiprocessor do better than one of a larger shape: one's softmax runs beside the other's products. H200, d 256:
// 338 TFLOP/s in two blocks of 64 rows instead of 318 in one of 128. `limit`: of a block; a multiprocessor has 1 KiB more, and a
// block takes 1 KiB more than it asks for.
TW_HOST_DEVICE constexpr bool fits_twice(const ForwardConfig& config, int limit) { return 2 * (config.shared_bytes() + 1024) <= limit + 1024; }
TW_HOST_DEVICE constexpr bool prefers_small(const ForwardConfig& large, const ForwardConfig& small, int limit) {
  return element_bytes(large.element) == 2 && fits_twice(small, limit) && !fits_twice(large, limit);
}

enum class BackwardKind : int {
  kPlain,    // as ForwardKind
  kDropout,  // the same with dropout
  kGeneral,  // everything
  kOrdered,  // plain, with ordered sums of dQ, where BackwardConfig::knows_order()
  kBias,     // sm_90a: a bias or mask whose tiles are copied ahead, with everything but softcap and dropout
};

struct BackwardConfig {
  Element element;
  BackwardKind kind;
  int head_dim;
  int block_m;       // queries
  int num_warps;
  int row_groups;    // of 16 keys, per warp
  int column_split;  // warps that share the same keys, each with its part of the queries of S and the columns of dK, dV
  int num_stages;    // of Q and dO
  bool split = false;  // float32: the block splits K, Q, dO, P and dS into three bfloat16 parts, once; V is left to the warps
  bool one_pair_tile = false;  // P and dS go through the same shared memory, one after the other

  TW_HOST_DEVICE constexpr int num_threads() const { return num_warps * 32; }
  TW_HOST_DEVICE constexpr int block_n() const { return num_warps / column_split * 16 * row_groups; }
  TW_HOST_DEVICE constexpr int shared_bytes() const {
    const int bytes = element_bytes(element);
    return (part_bytes() + bytes) * block_n() * head_dim + num_stages * (2 * block_m * head_dim * part_bytes() + 2 * block_m * 4) +
           (split ? block_m * head_dim * bytes : 0) + pair_tiles() * block_n() * block_m * part_bytes() + mark_bytes() + 64;
  }
  // Up to d 64 ordered sums are a kind of their own: to ask at run time costs either 3 to 4 %. Above, the plain kernel asks.
  TW_HOST_DEVICE constexpr bool knows_order() const {
    return element != Element::kFloat32 && head_dim <= 64 && (kind == BackwardKind::kPlain || kind == BackwardKind::kOrdered);
  }
  // Queries whose ordered sums go together. The fence that passes a turn on takes as long as a fifth of a tile of 32 queries: 16k causal 275
  // TFLOP/s, a turn a tile 261.
  TW_HOST_DEVICE constexpr int turn_rows() const { return kind == BackwardKind::kOrdered && knows_order() ? 128 : block_m; }
  TW_HOST_DEVICE constexpr int part_bytes() const { return split ? 6 : element_bytes(element); }
  TW_HOST_DEVICE constexpr int pair_tiles() const { return column_split > 1 && !one_pair_tile ? 2 : 1; }  // dS; and P, if it is exchanged
  TW_HOST_DEVICE constexpr int mark_bytes() const { return (block_n() + 2 * block_m) * 4; }  // rows with inf or NaN
  // dK, dV; S, dP; operands of float32; and about 40 of addresses, counters and fragments.
  TW_HOST_DEVICE constexpr int registers() const {
    return row_groups * (2 * head_dim / 2 / column_split + 2 * block_m / 2 / column_split + (element == Element::kFloat32 ? 20 : 0)) + 40;
  }
  TW_HOST_DEVICE constexpr bool valid() const {
    return num_warps % column_split == 0 && block_m / column_split % (split ? 8 : 16) == 0 && kRowPad % block_m == 0 &&
           num_warps % (block_m / 16) == 0 && head_dim % (16 * column_split) == 0 && registers() <= 255;
  }
  static constexpr int kRowPad = 128;
};

// Keys as rows of S^T. d <= 64: two groups of 16 keys per warp halve the reads of Q and dO from shared memory, and dK and
// dV of both still fit, so that P and dS stay in registers. Above, several warps share 32 keys and split the columns of
// dK and dV; P and dS pass through shared memory. Measured on an H200, 16k, full, bf16, TFLOP/s
// (docs/kernels/backward_sm80.md): d 128 303 (16 keys a warp, no split: 278), d 256 238 (16 keys, two column parts: 225).
TW_HOST_DEVICE constexpr BackwardConfig backward_config(Element element, BackwardKind kind, int head_dim, bool small) {
  if (element == Element::kFloat32) {  // twice the bytes: what fills the shared memory decides. d 64 55 TFLOP/s (every warp splits: 41)
    if (head_dim <= 64) return {element, kind, head_dim, 32, 4, 1, 1, 1, true};
    if (head_dim <= 96) return {element, kind, head_dim, 32, 4, 1, 2, 1, true};
    if (head_dim <= 128)
      return small ? BackwardConfig{element, kind, head_dim, 32, 4, 1, 2, 1} : BackwardConfig{element, kind, head_dim, 64, 8, 2, 4, 1};
    if (head_dim <= 192)
      return small ? BackwardConfig{element, kind, head_dim, 32, 2, 1, 2, 1} : BackwardConfig{element, kind, head_dim, 64, 8, 1, 4, 1};
    // 138 KiB; in 99 there is room for 16 keys, of which P and dS take turns.
    return small ? BackwardConfig{element, kind, head_dim, 32, 2, 1, 2, 1, false, true} : BackwardConfig{element, kind, head_dim, 32, 4, 1, 2, 1};
  }
  if (head_dim <= 64)
    return {element, kind, head_dim, 32, 4, 2, 1, 2};
  if (head_dim <= 128)
    return small ? BackwardConfig{element, kind, head_dim, 32, 4, 2, 2, 2} : BackwardConfig{element, kind, head_dim, 64, 8, 2, 2, 2};
  return small ? BackwardConfig{element, kind, head_dim, 32, 4, 1, 2, 1} : BackwardConfig{element, kind, head_dim, 64, 8, 2, 4, 1};
}

// float32: d 128 50 TFLOP/s (44), d 256 41 (22). 16 bits: 128 queries a tile instead of 64, so that a warp computes 32 x 32 of S and dP and
// reads half an operand a product instead of three quarters: d 256 304 (248).
TW_HOST_DEVICE constexpr BackwardConfig roomy_config(Element element, BackwardKind kind, int head_dim) {
  if (element == Element::kFloat32 && head_dim > 96 && (kind == BackwardKind::kPlain || kind == BackwardKind::kOrdered)) {
    if (head_dim <= 128) return {element, kind, head_dim, 32, 8, 1, 2, 1, true};
    return {element, kind, head_dim, 32, 8, 1, 4, 1, true};
  }
  if (element != Element::kFloat32 && head_dim > 192) return {element, kind, head_dim, 128, 8, 2, 4, 1};
  return backward_config(element, kind, head_dim, false);
}

// Behind a row of sm_90, with every option and in both orders.
TW_HOST_DEVICE constexpr BackwardConfig conditional_config(Element element, int head_dim) {
  return backward_config(element, BackwardKind::kGeneral, head_dim, false);
}

// Is there a shape of its own for GPUs with less shared memory?
TW_HOST_DEVICE constexpr bool has_small(const auto& large, const auto& small) { return small.shared_bytes() < large.shared_bytes(); }

// Is there a shape of its own for GPUs with 227 KiB, and does this one have as much?
TW_HOST_DEVICE constexpr bool is_roomy(const auto& roomy, int limit) {
  return roomy.shared_bytes() > kSharedLimitLarge && roomy.shared_bytes() <= limit;
}

// Which shape a GPU takes whose blocks get `limit` bytes (0: unknown): the large one, unless there is no room for it, or room for two of
// the small one, or for a larger one.
enum class Shape : int { kLarge, kSmall, kRoomy };

TW_HOST_DEVICE constexpr Shape shape_for(const ForwardConfig& large, const ForwardConfig& small, const ForwardConfig& roomy, int limit) {
  if (is_roomy(roomy, limit)) return Shape::kRoomy;
  return limit != 0 && (large.shared_bytes() > limit || prefers_small(large, small, limit)) ? Shape::kSmall : Shape::kLarge;
}
TW_HOST_DEVICE constexpr Shape shape_for(const BackwardConfig& large, const BackwardConfig&, const BackwardConfig& roomy, int limit) {
  if (is_roomy(roomy, limit)) return Shape::kRoomy;
  return limit != 0 && large.shared_bytes() > limit ? Shape::kSmall : Shape::kLarge;
}

// Is a kernel of this shape ever launched where the code that is being compiled runs? Code for 90a runs on GPUs with 227 KiB and on no
// others, and a third of the kernels are for less: left empty there, which takes a tenth off a build. TILEWISE_ALL_SHAPES is for tests of
// them there (shared_cap() in device.cpp).
TW_HOST_DEVICE constexpr bool taken_here([[maybe_unused]] const auto& large, [[maybe_unused]] const auto& small,
                                         [[maybe_unused]] const auto& roomy, [[maybe_unused]] Shape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(TILEWISE_ALL_SHAPES)
  return shape_for(large, small, roomy, kSharedLimitRoomy) == shape;
#else
  return true;
#endif
}

}  // namespace tilewise::cuda
