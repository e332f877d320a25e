// Tiles for any machine.
#include "cpu/simd_scalar.h"
#include "cpu/tile_kernels.h"

namespace tilewise {

const TileKernels& tiles_scalar() {
  static constexpr TileKernels kTiles = make_tiles<simd_scalar::Simd>(Isa::kScalar);
  return kTiles;
}

}  // namespace tilewise
