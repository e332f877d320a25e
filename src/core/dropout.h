// Dropout: keep or drop is a pure function of (seed, offset, batch * num_heads_q + head, i, j), independent of tile
// shape, backend and layout, so that CPU and CUDA, forward and backward draw the same mask.
//
// One draw of 16 bytes serves 16 elements: of a block of 16 rows and 32 columns, those that one thread of a tensor-core fragment
// owns: rows g and g + 8, columns 2t, 2t + 1 of each of the four groups of 8 columns. Each element has a number of 16 bits (see number())
// and is decided by comparing it with a limit, both read as float16: two such comparisons are one instruction of a GPU, and with equally
// likely patterns any order does.
//
// A draw is made from two words of its row and two of its column, which a loop over columns or rows keeps: 16 instructions of a GPU in two
// chains, and none of them a multiplication of 32 x 32 to 64 bits, which beside matrix products costs as much as six others (docs/adr/0004).
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace tilewise {

struct Philox4 {
  uint32_t word[4];
};

struct Product {
  uint32_t high, low;
  TW_HOST_DEVICE Product(uint32_t a, uint32_t b) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    high = static_cast<uint32_t>(product >> 32), low = static_cast<uint32_t>(product);
  }
};

// Philox-4x32-7 (Salmon et al. 2011), which gives each head its keys. Seven rounds are the fewest that pass BigCrush.
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

TW_HOST_DEVICE inline Philox4 philox_4x32(Philox4 x, uint32_t key0, uint32_t key1) {
  for (uint32_t round = 0; round < 7; ++round) {
    const Product product0(kPhiloxMultiplier0, x.word[0]), product1(kPhiloxMultiplier1, x.word[2]);
    x = {{product1.high ^ x.word[1] ^ (key0 + round * kPhiloxKeyStep0), product1.low,
          product0.high ^ x.word[3] ^ (key1 + round * kPhiloxKeyStep1), product0.low}};
  }
  return x;
}

TW_HOST_DEVICE inline uint32_t swap_halves(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(x, 0, 0x1032);
#else
  return x << 16 | x >> 16;
#endif
}

struct Draw {
  uint32_t word[4];
};

// The draws of one head. Rows and columns are those of draws: row 8 * (i / 16) + i % 8, column 4 * (j / 32) + j % 8 / 2.
struct DropoutHead {
  uint32_t row_key[2], column_key;

  TW_HOST_DEVICE DropoutHead(uint64_t seed, uint64_t offset, int64_t batch_head) {
    const Philox4 keys = philox_4x32({{static_cast<uint32_t>(batch_head), static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0}},
                                     static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    row_key[0] = keys.word[0], row_key[1] = keys.word[1], column_key = keys.word[2];
  }
  // The same with columns counted from `column`: a thread adds its own part of the number once.
  TW_HOST_DEVICE DropoutHead from_column(uint32_t column) const {
    DropoutHead head = *this;
    head.column_key += column * kMultiplier0;
    return head;
  }

  struct Part {
    uint32_t first, second;
  };
  TW_HOST_DEVICE Part row_part(int64_t row) const { return spread(static_cast<uint32_t>(row) * kMultiplier0 + row_key[0], row_key[1]); }
  TW_HOST_DEVICE Part column_part(int64_t column) const { return spread(static_cast<uint32_t>(column) * kMultiplier0 + column_key, 0); }

  // Row and column meet in two products, each of a word of the one and a word of the other; with constants instead it takes twice the rounds
  // until nothing is left of what the draws of two rows, or of two columns, have in common.
  TW_HOST_DEVICE static Draw draw(const Part& row, const Part& column) {
    uint32_t a = row.first * column.second + column.first, b = column.first;
    uint32_t c = row.second * column.first + column.second, d = column.second;
    d = swap_halves(d ^ a), b = swap_halves(b ^ c);
    a = a * kMultiplier2 + b, c = c * kMultiplier3 + d;
    d = swap_halves(d ^ a), b = swap_halves(b ^ c);
    a = a * kMultiplier0 + b, c = c * kMultiplier1 + d;
    return {{a, b ^ c, c, d ^ a}};
  }

 private:
  static constexpr uint32_t kMultiplier0 = kPhiloxMultiplier0, kMultiplier1 = kPhiloxMultiplier1, kMultiplier2 = kPhiloxKeyStep0,
                            kMultiplier3 = kPhiloxKeyStep1;

  // Two words, every bit of which hangs on all of u.
  TW_HOST_DEVICE static Part spread(uint32_t u, uint32_t key) {
    uint32_t v = swap_halves(u ^ key);
    u = u * kMultiplier3 + v, v = swap_halves(v ^ u);
    u = u * kMultiplier1 + v, v = swap_halves(v ^ u);
    u = u * kMultiplier2 + v, v ^= u;
    return {u, v};
  }
};

// The bits of a float16 as an integer in the floats' order; both zeros are 0. NaN lies beyond +-kFloat16Infinity.
inline constexpr int32_t kFloat16Infinity = 0x7c00;
TW_HOST_DEVICE inline int32_t float16_order(uint32_t bits) {
  const auto magnitude = static_cast<int32_t>(bits & 0x7fff);
  return bits & 0x8000 ? -magnitude : magnitude;
}

struct Dropout {
  static constexpr uint32_t kNothingBelow = 0xfc00fc00;  // -inf, -inf

  uint64_t seed = 0;
  uint64_t offset = 0;
  uint32_t limit = kNothingBelow;  // float16, twice: numbers below it are dropped, all others and NaN are kept;
  bool keeps_below = false;        // or the other way round. What lies below is the rarer of both, so that it never needs a NaN
  float scale = 1;                 // 1 / (1 - p), for kept values

  // Of the 65536 numbers, round((1 - p) * 65536) are kept, and one at the least. Only a half of 31745 does not exist (+0 and -0
  // are below the same limits); it becomes 31746.
  static Dropout make(double p, uint64_t seed, uint64_t offset) {
    const int32_t rounded = static_cast<int32_t>((1 - p) * 65536 + 0.5), kept = rounded > 1 ? rounded : 1;
    const bool keeps_below = kept <= 32768;
    const int32_t below = keeps_below ? kept : 65536 - kept;
    const int32_t above = below - kFloat16Infinity, order = above > 1 ? above - 1 : above;
    const auto limit = static_cast<uint32_t>(order < 0 ? 0x8000 | -order : order);
    return {seed, offset, limit * 0x10001u, keeps_below, static_cast<float>(1 / (1 - p))};
  }

  TW_HOST_DEVICE bool active() const { return limit != kNothingBelow || keeps_below; }

  // Which of the 16 elements of its draw (i, j) is: 4 * group of 8 columns + 2 * (row is g + 8) + odd column.
  TW_HOST_DEVICE static int element(int64_t i, int64_t j) {
    return static_cast<int>(((j >> 3) & 3) * 4 + ((i >> 3) & 1) * 2 + (j & 1));
  }

  // The number of an element of a draw. Row g: a half of word n = group of 8 columns, so that the word is the pair of columns.
  // Row g + 8: the half's low byte is the number's high byte, and its low byte is the high byte of that half of word n ^ 1. Thus an
  // element's low byte is the high byte of one other, to which it matters only if its high byte ties with the limit's (1 in 256).
  TW_HOST_DEVICE static uint32_t number(const Draw& draw, int e) {
    const int n = e >> 2, shift = e & 1 ? 16 : 0;
    const uint32_t half = draw.word[n] >> shift & 0xffff;
    return e & 2 ? (half & 0xff) << 8 | (draw.word[n ^ 1] >> shift >> 8 & 0xff) : half;
  }

  TW_HOST_DEVICE bool keeps(uint32_t number) const {
    const int32_t order = float16_order(number);
    return (order >= -kFloat16Infinity && order < float16_order(limit & 0xffff)) == keeps_below;
  }

  TW_HOST_DEVICE bool keep(int64_t batch_head, int64_t i, int64_t j) const {
    const DropoutHead draws(seed, offset, batch_head);
    const Draw draw = draws.draw(draws.row_part((i >> 4) * 8 + (i & 7)), draws.column_part((j >> 5) * 4 + ((j & 7) >> 1)));
    return keeps(number(draw, element(i, j)));
  }
};

}  // namespace tilewise
