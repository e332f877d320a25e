// A tile in shared memory as the copy engine writes it and the tensor cores read it: panels of 64 columns, a row of a
// panel 128 bytes, its eight 16-byte chunks permuted by XOR with row % 8 ("128-byte swizzle").
#pragma once
#include <cstdint>

namespace tilewise::cuda {

template <int kRows>
struct Panels {
  static constexpr int kPanelBytes = kRows * 128;

  // Bytes from the tile's start to 16-byte chunk `chunk` (8 columns) of a row.
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return (chunk >> 3) * kPanelBytes + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  }
  // Descriptor units (16 bytes) from the tile's start to its k-step of 16 columns, for an operand whose columns are
  // summed over. The hardware permutes by address bits, so a step inside a panel is an addition.
  static __device__ __forceinline__ constexpr uint32_t column_step(int step) {
    return (step / 4 * kPanelBytes + step % 4 * 32) >> 4;
  }
  // The same for an operand whose rows are summed over: 16 rows down.
  static __device__ __forceinline__ constexpr uint32_t row_step(int step) { return (step * 16 * 128) >> 4; }
};

// The same for bytes, 64 keys a row of 64 bytes ("64-byte swizzle"): bytes from the tile's start to a key's.
__device__ __forceinline__ uint32_t mask_offset(int row, int key) {
  return row * 64 + (((key >> 4) ^ (row >> 1 & 3)) << 4) + (key & 15);
}

// Position in a ring of stages, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tilewise::cuda
