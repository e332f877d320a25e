// Tiles for AVX-512 F, DQ, BW, VL.
#include "cpu/simd_avx512.h"
#include "cpu/tile_kernels.h"

namespace tilewise {

const TileKernels& tiles_avx512() {
  static constexpr TileKernels kTiles = make_tiles<simd_avx512::Simd<false>>(Isa::kAvx512);
  return kTiles;
}

}  // namespace tilewise
