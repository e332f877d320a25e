#include "cpu/tiles.h"

#include <bit>

namespace tilewise {

void accumulate_visible(const TileKernels& kernels, const ProductTile& t, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t s = 0; s < t.steps; ++s) {
      const uint32_t a = std::bit_cast<uint32_t>(t.a[r * t.row_stride + s * t.step_stride]);
      const float* b = t.b + s * t.ldb;
      float* c = t.c + r * t.ldc;
      if (!kernels.pairs) {
        if (a == 0x80000000u) continue;
        for (int64_t x = 0; x < columns; ++x) c[x] += std::bit_cast<float>(a) * b[x];
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        const uint32_t bits = half == 0 ? a << 16 : a & 0xffff0000u;
        if (bits == 0x80000000u) continue;
        for (int64_t x = 0; x < columns; ++x) {
          const uint32_t pair = std::bit_cast<uint32_t>(b[x]);
          c[x] += std::bit_cast<float>(bits) * std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000u);
        }
      }
    }
}

}  // namespace tilewise
