// Tiles for AVX2, FMA, F16C.
#include "cpu/simd_avx2.h"
#include "cpu/tile_kernels.h"

namespace tilewise {

const TileKernels& tiles_avx2() {
  static constexpr TileKernels kTiles = make_tiles<simd_avx2::Simd>(Isa::kAvx2);
  return kTiles;
}

}  // namespace tilewise
