// A tile in shared memory: [rows, kCols] 16-bit elements, rows contiguous, the 16-byte chunks of a row permuted by XOR
// with the row number, so that eight rows at the same column lie in eight different groups of four banks (ldmatrix,
// cp.async and the epilogue then never collide).
#pragma once
#include <cstdint>

namespace tilewise::cuda {

template <int kCols>
struct TileLayout {
  static_assert(kCols % 32 == 0);
  // A row of 64 n elements spans all 32 banks n times: permute 8 chunks by row % 8. A row of 64 n + 32 elements starts
  // half a bank line further than the one before: permute 4 chunks by (row / 2) % 4.
  static constexpr bool kFull = kCols % 64 == 0;
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kSteps = kFull ? 4 : 2;  // steps of 16 columns per permuted group

  static __device__ __forceinline__ int swizzle(int row) { return kFull ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {  // bytes
    return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
  }
  static __device__ __forceinline__ uint32_t pair_offset(int row, int col) {  // bytes; col even
    return chunk_offset(row, col >> 3) + (col & 7) * 2;
  }
};

// The address that one lane hands to ldmatrix, for any 16-row and 16-column step of a tile.
template <int kCols>
struct LaneAddress {
  using Layout = TileLayout<kCols>;
  uint32_t row;    // address of the lane's row
  uint32_t chunk;  // its permuted chunk, in bytes, at column step 0

  __device__ __forceinline__ LaneAddress(uint32_t tile, int lane_row, int lane_chunk)
      : row(tile + lane_row * Layout::kRowBytes), chunk((lane_chunk ^ Layout::swizzle(lane_row)) << 4) {}

  // Rows 16 row_step .., columns 16 col_step ..
  __device__ __forceinline__ uint32_t at(int row_step, int col_step) const {
    return row + row_step * 16 * Layout::kRowBytes +
           ((chunk ^ ((col_step % Layout::kSteps) * 32)) + col_step / Layout::kSteps * (Layout::kSteps * 32));
  }
};

// A operand [16 rows, 16 k]: matrices (0-7, 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15) of (row, k).
template <int kCols>
__device__ __forceinline__ LaneAddress<kCols> lane_address_a(uint32_t tile, int lane) {
  return {tile, lane & 15, lane >> 4};
}

// B operand from rows of n (K in S = Q K^T): two n8 tiles of 16 k: (n 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
template <int kCols>
__device__ __forceinline__ LaneAddress<kCols> lane_address_b(uint32_t tile, int lane) {
  return {tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1};
}

// B operand from rows of k (V in O = P V), through ldmatrix.trans: (k 0-7, n 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
template <int kCols>
__device__ __forceinline__ LaneAddress<kCols> lane_address_bt(uint32_t tile, int lane) {
  return {tile, lane & 15, lane >> 4};
}

// A operand [16 rows, 16 k] from rows of k (P^T, dS^T stored as [q, key]), through ldmatrix.trans:
// (k 0-7, row 0-7), (k 0-7, row 8-15), (k 8-15, row 0-7), (k 8-15, row 8-15).
template <int kCols>
__device__ __forceinline__ LaneAddress<kCols> lane_address_at(uint32_t tile, int lane) {
  return {tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1};
}

}  // namespace tilewise::cuda
