// core/dropout.h: the generator against its published vectors, the decision's rate, and its independence.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace tilewise {
namespace {

TEST(Philox, KnownAnswers) {  // of the authors' distribution (Random123, philox4x32 with 7 rounds)
  const auto expect = [](Philox4 counter, uint32_t key0, uint32_t key1, Philox4 want) {
    const Philox4 got = philox_4x32(counter, key0, key1);
    for (int n = 0; n < 4; ++n) EXPECT_EQ(got.word[n], want.word[n]) << n;
  };
  expect({{0, 0, 0, 0}}, 0, 0, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}});
  expect({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff,
         {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}});
  expect({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
         {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}});
}

// Three rounds apart for rows and columns, four together: the same as seven of the counter.
TEST(Philox, RowsAndColumnsMeetInTheFourthRound) {
  for (uint64_t n = 0; n < 1000; ++n) {
    const uint64_t seed = n * 0x9E3779B97F4A7C15u, offset = seed * 0xD1B54A32D192ED03u;
    const auto head = static_cast<uint32_t>(seed >> 7), row = static_cast<uint32_t>(offset >> 9), column = static_cast<uint32_t>(offset >> 33);
    const DropoutHead draws(seed, offset, head);
    const Philox4 got = draws.draw(draws.row_part(row), draws.column_part(column));
    const Philox4 want = philox_4x32({{head, column, static_cast<uint32_t>(offset), row}}, static_cast<uint32_t>(seed),
                                     static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
    for (int k = 0; k < 4; ++k) ASSERT_EQ(got.word[k], want.word[k]);
  }
}

TEST(Dropout, LimitAndScale) {
  EXPECT_FALSE(Dropout::make(0, 1, 2).active());
  EXPECT_EQ(Dropout::make(0, 1, 2).scale, 1);
  EXPECT_EQ(Dropout::make(0.5, 1, 2).scale, 2);
  EXPECT_TRUE(Dropout::make(1 - 1e-9, 1, 2).active());
  for (int64_t j = 0; j < 1000; ++j) EXPECT_TRUE(Dropout::make(0, 1, 2).keep(0, 3, j));
}

// All 65536 numbers, for every share that p can ask for near the corners of the order (NaN, both zeros, one half) and for some between.
TEST(Dropout, KeepsExactlyTheShareOfNumbers) {
  std::vector<int> wanted = {1, 2, 655, 2045, 2046, 2047, 6554, 31743, 31744, 31746, 32767, 32768, 32769, 33790, 33792, 58982, 63489, 65535, 65536};
  for (int kept = 100; kept < 65536; kept += 1777) wanted.push_back(kept);
  for (const int want : wanted) {
    const Dropout dropout = Dropout::make(1 - want / 65536.0, 1, 2);
    int kept = 0;
    for (uint32_t number = 0; number < 65536; ++number) kept += dropout.keeps(number);
    EXPECT_EQ(kept, want);
  }
  for (const int want : {31745, 33791}) {  // +0 and -0 are below the same limits: one number off
    const Dropout dropout = Dropout::make(1 - want / 65536.0, 1, 2);
    int kept = 0;
    for (uint32_t number = 0; number < 65536; ++number) kept += dropout.keeps(number);
    EXPECT_NEAR(kept, want, 1);
  }
}

// Every element of a block of 16 x 32 has a number of its own: (draw, element) is a bijection.
TEST(Dropout, ElementsOfABlockAreDistinct) {
  std::set<std::vector<int64_t>> seen;
  for (int64_t i = 0; i < 16; ++i)
    for (int64_t j = 0; j < 32; ++j) seen.insert({i & 7, (j & 7) >> 1, Dropout::element(i, j)});
  EXPECT_EQ(seen.size(), 512u);
}

// Each of the 16 bytes is the high byte of one number and the low byte of another, so that two numbers share one byte at most.
TEST(Dropout, NumbersShareABytePairwise) {
  const Philox4 bytes = {{0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c}};
  std::set<uint32_t> high, low, pairs;
  for (int e = 0; e < 16; ++e) {
    const uint32_t number = Dropout::number(bytes, e);
    high.insert(number >> 8), low.insert(number & 0xff);
    pairs.insert(number), pairs.insert((number & 0xff) << 8 | number >> 8);
  }
  EXPECT_EQ(high.size(), 16u);
  EXPECT_EQ(low.size(), 16u);
  EXPECT_EQ(pairs.size(), 32u);  // no two numbers of the same two bytes
  EXPECT_EQ(Dropout::number(bytes, Dropout::element(0, 0)), 0x0100u);
  EXPECT_EQ(Dropout::number(bytes, Dropout::element(0, 9)), 0x0706u);
  EXPECT_EQ(Dropout::number(bytes, Dropout::element(8, 0)), 0x0005u);   // low byte of word 0, second byte of word 1
  EXPECT_EQ(Dropout::number(bytes, Dropout::element(8, 9)), 0x0603u);   // third byte of word 1, last of word 0
  EXPECT_EQ(Dropout::number(bytes, Dropout::element(0, 17)), 0x0b0au);
}

// A draw's 16 decisions as they must be: the probability of keeping any two is that of two independent ones, but for the low byte that one may
// share with the high byte of the other. Exactly, over all bytes: the correlation is at most 1/256.
TEST(Dropout, PairsOfADrawAreNearlyIndependent) {
  for (const double p : {0.001, 0.1, 0.3, 0.5, 0.9}) {
    const Dropout dropout = Dropout::make(p, 1, 2);
    // number = high << 8 | shared and number' = shared << 8 | low, over the shared byte.
    double both = 0, one = 0;
    for (uint32_t shared = 0; shared < 256; ++shared) {
      double first = 0, second = 0;
      for (uint32_t other = 0; other < 256; ++other) first += dropout.keeps(other << 8 | shared), second += dropout.keeps(shared << 8 | other);
      both += first / 256 * (second / 256) / 256;
      one += first / 65536;
    }
    EXPECT_LT(std::abs(both - one * one) / (one * (1 - one)), 1 / 256.0) << p;
  }
}

class DropoutRate : public testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(P, DropoutRate, testing::Values(0.1, 0.48, 0.99));

constexpr int64_t kRows = 512, kColumns = 512;

std::vector<uint8_t> draw(const Dropout& dropout, int64_t batch_head) {
  std::vector<uint8_t> kept(kRows * kColumns);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kColumns; ++j) kept[i * kColumns + j] = dropout.keep(batch_head, i, j);
  return kept;
}

TEST_P(DropoutRate, KeepsTheRightShare) {
  const double keep = 1 - GetParam();
  double total = 0, count = 0;
  for (int64_t head = 0; head < 4; ++head) {
    const std::vector<uint8_t> kept = draw(Dropout::make(GetParam(), 42 + head, 7), head);
    double by_element[16] = {};
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t j = 0; j < kColumns; ++j) by_element[Dropout::element(i, j)] += kept[i * kColumns + j];
    const double n = kRows * kColumns / 16.0;
    for (double sum : by_element) {
      total += sum, count += n;
      EXPECT_NEAR(sum / n, keep, 5 * std::sqrt(keep * (1 - keep) / n));  // every place in the draw, within 5 sigma
    }
  }
  EXPECT_NEAR(total / count, keep, 5 * std::sqrt(keep * (1 - keep) / count));
}

double correlation(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, int64_t shift_i, int64_t shift_j,
                   double keep) {
  double sum = 0, count = 0;
  for (int64_t i = 0; i + shift_i < kRows; ++i)
    for (int64_t j = 0; j + shift_j < kColumns; ++j, ++count)
      sum += (a[i * kColumns + j] - keep) * (b[(i + shift_i) * kColumns + j + shift_j] - keep);
  return sum / count / (keep * (1 - keep));
}

// Two elements of a draw may share a byte, which matters in 1 of 256 cases: their correlation stays below 1/256; all others are within the
// noise.
TEST_P(DropoutRate, PlacesAreIndependent) {
  const double keep = 1 - GetParam();
  const Dropout dropout = Dropout::make(GetParam(), 5, 9);
  const std::vector<uint8_t> kept = draw(dropout, 3);
  const double noise = 5 / std::sqrt(static_cast<double>(kRows * kColumns));
  for (const auto& [i, j] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 0}, {8, 0}, {0, 8}, {8, 8}, {8, 1}, {0, 2}, {0, 16}, {16, 0}, {0, 32}})
    EXPECT_LT(std::abs(correlation(kept, kept, i, j, keep)), 1 / 256.0 + noise) << i << ", " << j;
  EXPECT_LT(std::abs(correlation(kept, draw(dropout, 4), 0, 0, keep)), noise) << "next head";
  EXPECT_LT(std::abs(correlation(kept, draw(Dropout::make(GetParam(), 6, 9), 3), 0, 0, keep)), noise) << "next seed";
  EXPECT_LT(std::abs(correlation(kept, draw(Dropout::make(GetParam(), 5, 10), 3), 0, 0, keep)), noise) << "next offset";
  EXPECT_LT(std::abs(correlation(kept, draw(Dropout::make(GetParam(), 5, 9 + (uint64_t{1} << 32)), 3), 0, 0, keep)),
            noise)
      << "offset beyond 32 bits";
  EXPECT_LT(std::abs(correlation(kept, draw(Dropout::make(GetParam(), 5 + (uint64_t{1} << 32), 9), 3), 0, 0, keep)),
            noise)
      << "seed beyond 32 bits";
}

// Decisions of columns 64 to 95, computed by a program that shares nothing with this one: numpy's float16 makes the comparison.
TEST(Dropout, PinnedDecisions) {
  constexpr int64_t kRowsPinned[6] = {0, 5, 8, 13, 20, 31};
  const auto expect = [&](const Dropout& dropout, int64_t batch_head, const uint32_t (&want)[6]) {
    for (int r = 0; r < 6; ++r) {
      uint32_t bits = 0;
      for (int64_t j = 0; j < 32; ++j) bits |= static_cast<uint32_t>(dropout.keep(batch_head, kRowsPinned[r], 64 + j)) << j;
      EXPECT_EQ(bits, want[r]) << "row " << kRowsPinned[r];
    }
  };
  expect(Dropout::make(0.1, 1, 2), 3, {0xfff7feff, 0x77dfffff, 0xfffffdfb, 0xffffefff, 0xffff7f76, 0xfffffffe});
  expect(Dropout::make(0.5, 0x123456789abcdef0, 0xfedcba9876543210), 70000,
         {0x80f51009, 0x92da15b2, 0x56bd00d7, 0xd085412d, 0x840e1e62, 0x81f88073});
  expect(Dropout::make(0.98, 7, 0), 0, {0x4000000, 0, 0, 0, 0, 0});
}

TEST(Dropout, IsAPureFunction) {
  const Dropout a = Dropout::make(0.3, 123, 456), b = Dropout::make(0.3, 123, 456);
  for (int64_t n = 0; n < 4096; ++n) ASSERT_EQ(a.keep(n % 7, n, 3 * n), b.keep(n % 7, n, 3 * n));
}

}  // namespace
}  // namespace tilewise
