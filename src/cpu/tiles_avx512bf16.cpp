// Tiles for AVX-512 with bfloat16 dot products.
#include "cpu/simd_avx512.h"
#include "cpu/tile_kernels.h"

namespace tilewise {

const TileKernels& tiles_avx512bf16() {
  static constexpr TileKernels kTiles = make_tiles<simd_avx512::Simd<true>>(Isa::kAvx512Bf16);
  return kTiles;
}

}  // namespace tilewise
