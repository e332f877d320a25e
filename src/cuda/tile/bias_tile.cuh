// A tile of the bias in shared memory, [block_m rows, block_n keys] in its own type: copied with K, read where S is. Element by element from
// global memory, scores wait for their bias again and again.
#pragma once
#include <cstdint>

#include "core/host_device.h"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

// Two neighbours of a row.
template <class B>
__device__ __forceinline__ float2 shared_bias_pair(uint32_t address, const B*) {
  if constexpr (sizeof(B) == 4) {
    return ptx::load_shared_8(address);
  } else if constexpr (sizeof(B) == 2) {
    return ptx::unpack<B>(__float_as_uint(ptx::load_shared_4(address)));
  } else {
    const uint32_t pair = ptx::load_shared_2(address);
    return make_float2(bias_of(static_cast<uint8_t>(pair)), bias_of(static_cast<uint8_t>(pair >> 8)));
  }
}

template <int kBlockM, int kBlockN>
struct BiasTile {
  // Bytes from row to row: sixteen more than a row has, so that eight rows and four pairs of their keys lie in different banks.
  TW_HOST_DEVICE static constexpr int pitch(int element_bytes) { return kBlockN * element_bytes + 16; }
  TW_HOST_DEVICE static constexpr int bytes(int element_bytes) { return kBlockM * pitch(element_bytes); }
  // Are all rows the same one, which then is there once? `pack`: heads whose rows a tile mixes.
  static __device__ __forceinline__ bool one_row(const ScoreParams& p, int pack) { return p.bias_row == 0 && pack == 1; }

  // offset_of(r): of row r from the bias's first element; < 0: there is no such row. keys: how many of the tile's there are.
  template <class OffsetOf>
  static __device__ __forceinline__ void load(uint32_t tile, const ScoreParams& p, int pack, int j0, int keys, int threads, const OffsetOf& offset_of) {
    const int element = bias_bytes(p.bias_dtype), rows = one_row(p, pack) ? 1 : kBlockM;
    const int bits = 31 - __clz(kBlockN * element / 16);  // of the number of a row's chunk
#pragma unroll 1
    for (int n = threadIdx.x; n < rows << bits; n += threads) {
      const int r = n >> bits, byte = (n - (r << bits)) * 16;
      const int64_t offset = offset_of(r);
      const int bytes = offset < 0 ? 0 : min(16, max(0, keys * element - byte));
      ptx::cp_async_16(tile + r * pitch(element) + byte, static_cast<const char*>(p.bias) + (bytes > 0 ? (offset + j0) * element + byte : 0), bytes);
    }
  }
};

}  // namespace tilewise::cuda
