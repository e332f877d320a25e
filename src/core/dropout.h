// Dropout: keep or drop is a pure function of (seed, offset, batch * num_heads_q + head, i, j), independent of tile
// shape, backend and layout, so that CPU and CUDA, forward and backward draw the same mask.
//
// Philox-4x32-10 (Salmon et al. 2011) gives 16 bytes per call. One call serves 16 elements: of a block of 16 rows and
// 32 columns, those that one thread of a tensor-core fragment owns: rows g and g + 8, columns 2t, 2t + 1 of each of
// the four groups of 8 columns. Element e keeps iff the 16-bit number made of bytes e and e + 1 (mod 16) is below the
// threshold round((1 - p) * 65536). The windows overlap, so a kept probability is exact to 2^-17 at one byte per
// element; the shared byte matters to a neighbour only when its high byte ties with the threshold (1 in 256).
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace tilewise {

struct Philox4 {
  uint32_t word[4];
};

TW_HOST_DEVICE inline uint32_t multiply_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

TW_HOST_DEVICE inline Philox4 philox_4x32_10(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = multiply_high(0xD2511F53u, counter.word[0]), low0 = 0xD2511F53u * counter.word[0];
    const uint32_t high1 = multiply_high(0xCD9E8D57u, counter.word[2]), low1 = 0xCD9E8D57u * counter.word[2];
    counter = {{high1 ^ counter.word[1] ^ key0, low1, high0 ^ counter.word[3] ^ key1, low0}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

struct Dropout {
  uint64_t seed = 0;
  uint64_t offset = 0;
  uint32_t threshold = 65536;  // keep iff the 16-bit draw is below it; 65536 keeps all
  float scale = 1;             // 1 / (1 - p), for kept values

  static Dropout make(double p, uint64_t seed, uint64_t offset) {
    const auto threshold = static_cast<uint32_t>((1 - p) * 65536 + 0.5);
    return {seed, offset, threshold == 0 ? 1u : threshold, static_cast<float>(1 / (1 - p))};
  }

  TW_HOST_DEVICE bool active() const { return threshold < 65536; }

  // The 16 bytes for rows {16 * row_block + g, + 8} and columns 32 * col_block + 8 n + {2 t, 2 t + 1}.
  TW_HOST_DEVICE Philox4 draw(int64_t batch_head, int64_t row_block, int g, int64_t col_block, int t) const {
    const Philox4 counter = {{static_cast<uint32_t>(col_block * 4 + t), static_cast<uint32_t>(row_block * 8 + g),
                              static_cast<uint32_t>(batch_head), static_cast<uint32_t>(offset)}};
    return philox_4x32_10(counter, static_cast<uint32_t>(seed),
                          static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
  }

  // Which of the 16 elements of its draw (i, j) is.
  TW_HOST_DEVICE static int element(int64_t i, int64_t j) {
    return static_cast<int>(((j >> 3) & 3) * 4 + ((i >> 3) & 1) * 2 + (j & 1));
  }

  // Element e of a draw: bytes e (high) and e + 1 mod 16 (low); byte e is bits 8 (e mod 4) .. of word e / 4.
  TW_HOST_DEVICE static uint32_t number(const Philox4& bytes, int e) {
    const uint32_t high = bytes.word[e >> 2] >> (8 * (e & 3)) & 0xff;
    const int next = (e + 1) & 15;
    return high << 8 | (bytes.word[next >> 2] >> (8 * (next & 3)) & 0xff);
  }

  TW_HOST_DEVICE bool keep(int64_t batch_head, int64_t i, int64_t j) const {
    const Philox4 bytes = draw(batch_head, i >> 4, static_cast<int>(i & 7), j >> 5, static_cast<int>((j & 7) >> 1));
    return number(bytes, element(i, j)) < threshold;
  }
};

}  // namespace tilewise
