// A tile in shared memory: rows of kRowBytes, contiguous, the 16-byte chunks of a row permuted by XOR with the row number,
// so that eight rows at the same column lie in eight different groups of four banks (ldmatrix, cp.async and the epilogue
// then never collide).
#pragma once
#include <cstdint>

namespace tilewise::cuda {

template <int kBytes>
struct TileLayout {
  static_assert(kBytes % 64 == 0);
  // A row of 128 n bytes spans all 32 banks n times: permute 8 chunks by row % 8. A row of 128 n + 64 bytes starts half a
  // bank line further than the one before: permute 4 chunks by (row / 2) % 4.
  static constexpr bool kFull = kBytes % 128 == 0;
  static constexpr int kRowBytes = kBytes;
  static constexpr int kGroup = kFull ? 128 : 64;  // bytes within which chunks are permuted

  static __device__ __forceinline__ int swizzle(int row) { return kFull ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {  // bytes
    return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
  }
  static __device__ __forceinline__ uint32_t byte_offset(int row, int byte) {
    return chunk_offset(row, byte >> 4) + (byte & 15);
  }
};

// An address of one lane for any place of a tile: fixed are its row (of 8 or 16) and its chunk among the first ones; at()
// adds multiples of 8 rows, and of as many bytes as the lanes' chunks span.
template <int kBytes>
struct LaneAddress {
  using Layout = TileLayout<kBytes>;
  uint32_t row;    // address of the lane's row
  uint32_t chunk;  // its permuted chunk, in bytes

  __device__ __forceinline__ LaneAddress(uint32_t tile, int lane_row, int lane_chunk, int byte_in_chunk = 0)
      : row(tile + lane_row * kBytes + byte_in_chunk), chunk((lane_chunk ^ Layout::swizzle(lane_row)) << 4) {}

  __device__ __forceinline__ void move(uint32_t bytes) { row += bytes; }  // to another tile

  __device__ __forceinline__ uint32_t at(int rows, int bytes) const {
    return row + rows * kBytes + ((chunk ^ (bytes % Layout::kGroup)) + bytes / Layout::kGroup * Layout::kGroup);
  }
};

// The same in one register, for tiles that start at a multiple of kGroup: the bits of the permuted chunk stand alone in the
// address, so that one XOR reaches another chunk, and what is left is a constant. The backward kernels use so many tiles that
// they worked their addresses out anew in every iteration otherwise.
template <int kBytes>
struct PackedAddress {
  using Layout = TileLayout<kBytes>;
  uint32_t base;

  __device__ __forceinline__ explicit PackedAddress(const LaneAddress<kBytes>& from) : base(from.row + from.chunk) {}

  __device__ __forceinline__ void move(uint32_t bytes) { base += bytes; }  // to another tile, a multiple of kGroup away

  __device__ __forceinline__ uint32_t at(int rows, int bytes) const {
    return (base ^ bytes % Layout::kGroup) + (rows * kBytes + bytes / Layout::kGroup * Layout::kGroup);
  }
  // The same lane for a part of the tile; at() may then add what stays in the part.
  __device__ __forceinline__ PackedAddress moved(int rows, int bytes) const {
    PackedAddress result = *this;
    result.base = at(rows, bytes);
    return result;
  }
};

template <int kBytes>
__device__ __forceinline__ PackedAddress<kBytes> packed(const LaneAddress<kBytes>& from) {
  return PackedAddress<kBytes>(from);
}

}  // namespace tilewise::cuda
