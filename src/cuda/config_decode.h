// Tile shapes of decode_sm80: a reason per number, and the sum of shared memory that it costs.
#pragma once
#include "cuda/config_sm80.h"

namespace tilewise::cuda {

// K and V pass once, so bytes under way are all that counts: at 4.3 TB/s and 1.2 us from request to arrival, 39 KiB a
// multiprocessor of an H200. Two blocks of these shapes keep 96 to 128 KiB requested, so that a warp may be late.
struct DecodeConfig {
  Element element;
  int head_dim;   // of q, k and v, rounded up; columns beyond the real ones are zeros
  int num_warps;  // each walks keys of its own
  int keys;       // of a warp and step
  int ahead;      // steps whose K and V are under way

  static constexpr int kRows = 16;  // of a tensor-core product: the packed query heads of one key head

  TW_HOST_DEVICE constexpr int units() const { return 2 * ahead + 1; }  // a unit: K or V of a step; one more is being read
  TW_HOST_DEVICE constexpr int num_threads() const { return num_warps * 32; }
  TW_HOST_DEVICE constexpr int block_n() const { return num_warps * keys; }
  TW_HOST_DEVICE constexpr int row_bytes() const { return head_dim * element_bytes(element); }
  TW_HOST_DEVICE constexpr int unit_bytes() const { return keys * row_bytes(); }
  TW_HOST_DEVICE constexpr int ring_bytes() const { return units() * unit_bytes(); }  // of a warp
  TW_HOST_DEVICE constexpr int shared_bytes() const { return kRows * row_bytes() + num_warps * ring_bytes(); }
  // Where the warps' results meet, once the rings are empty: o, padded so that a fragment's rows lie in different banks; then
  // reference, sum and maximum.
  TW_HOST_DEVICE constexpr int merge_columns() const { return head_dim + 8; }
  TW_HOST_DEVICE constexpr int merge_bytes() const { return num_warps * kRows * (merge_columns() + 3) * 4; }
  TW_HOST_DEVICE constexpr bool valid() const {
    return element_bytes(element) == 2 && (head_dim == 64 || head_dim == 128 || head_dim == 256) && keys % 16 == 0 &&
           merge_bytes() <= num_warps * ring_bytes() && shared_bytes() <= kSharedLimit;
  }
};

// Units of 4 KiB (8 at d = 256, where 16 keys are the least that a product takes). 84 and 80 KiB a block: one fits the smallest
// GPUs, two fit the 228 KiB of sm_90 and sm_100.
TW_HOST_DEVICE constexpr DecodeConfig decode_config(Element element, int head_dim) {
  if (head_dim <= 64) return {element, head_dim, 4, 32, 2};
  if (head_dim <= 128) return {element, head_dim, 4, 16, 2};
  return {element, head_dim, 3, 16, 1};  // more warps rather than more units each: a step of one takes long
}

}  // namespace tilewise::cuda
