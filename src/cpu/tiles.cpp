#include "cpu/tiles.h"

#include <algorithm>
#include <bit>

namespace tilewise {
namespace {

// b without what the masked halves of `a` would multiply.
float visible_part(uint32_t a, float b, bool pairs) {
  if (!pairs) return a == 0x80000000u ? 0.0f : b;
  uint32_t bits = std::bit_cast<uint32_t>(b);
  if ((a & 0xffffu) == 0x8000u) bits &= 0xffff0000u;
  if ((a >> 16) == 0x8000u) bits &= 0x0000ffffu;
  return std::bit_cast<float>(bits);
}

}  // namespace

void accumulate_visible(const TileKernels& kernels, const ProductTile& t, int64_t rows, int64_t columns) {
  constexpr int64_t kChunk = 64;
  float cleaned[kChunk * kMaxPanel];
  const bool strided = t.step_stride != 1;
  for (int64_t r = 0; r < rows; ++r) {
    float sum[kMaxPanel] = {};
    for (int64_t s = 0; s < t.steps; s += kChunk) {
      ProductTile part = t;
      part.steps = std::min(kChunk, t.steps - s);
      part.a = t.a + r * t.row_stride + s * t.step_stride;
      part.b = cleaned;
      part.ldb = columns;
      part.c = sum;
      part.resume = true;
      for (int64_t x = 0; x < part.steps; ++x) {
        const uint32_t a = std::bit_cast<uint32_t>(part.a[x * t.step_stride]);
        for (int64_t c = 0; c < columns; ++c)
          cleaned[x * columns + c] = visible_part(a, t.b[(s + x) * t.ldb + c], kernels.pairs);
      }
      kernels.product[strided][0][columns / kernels.lanes - 1](part);
    }
    for (int64_t c = 0; c < columns; ++c) t.c[r * t.ldc + c] += sum[c];
  }
}

}  // namespace tilewise
