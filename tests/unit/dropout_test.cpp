// core/dropout.h: the generator against its published vectors, the decision's rate, and its independence.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace tilewise {
namespace {

TEST(Philox, KnownAnswers) {  // of the authors' distribution (Random123, philox4x32 10 rounds)
  const auto expect = [](Philox4 counter, uint32_t key0, uint32_t key1, Philox4 want) {
    const Philox4 got = philox_4x32_10(counter, key0, key1);
    for (int n = 0; n < 4; ++n) EXPECT_EQ(got.word[n], want.word[n]) << n;
  };
  expect({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  expect({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff,
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  expect({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

TEST(Dropout, ThresholdAndScale) {
  EXPECT_FALSE(Dropout::make(0, 1, 2).active());
  EXPECT_EQ(Dropout::make(0, 1, 2).scale, 1);
  EXPECT_EQ(Dropout::make(0.5, 1, 2).threshold, 32768u);
  EXPECT_EQ(Dropout::make(0.5, 1, 2).scale, 2);
  EXPECT_EQ(Dropout::make(0.75, 1, 2).threshold, 16384u);
  EXPECT_GE(Dropout::make(1 - 1e-9, 1, 2).threshold, 1u);  // a p below 1 never drops all
  for (int64_t j = 0; j < 1000; ++j) EXPECT_TRUE(Dropout::make(0, 1, 2).keep(0, 3, j));
}

// Every element of a block of 16 x 32 has a number of its own: (draw, element) is a bijection.
TEST(Dropout, ElementsOfABlockAreDistinct) {
  std::set<std::vector<int64_t>> seen;
  for (int64_t i = 0; i < 16; ++i)
    for (int64_t j = 0; j < 32; ++j) seen.insert({i & 7, (j & 7) >> 1, Dropout::element(i, j)});
  EXPECT_EQ(seen.size(), 512u);
}

TEST(Dropout, NumberTakesTwoNeighbouringBytes) {
  const Philox4 bytes = {{0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c}};
  for (uint32_t e = 0; e < 16; ++e) EXPECT_EQ(Dropout::number(bytes, static_cast<int>(e)), e << 8 | ((e + 1) & 15));
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

// Neighbours share one byte of the draw, which matters in 1 of 256 cases: their correlation stays below 1/100 (it is
// near 1/256 or less), and all others are within the noise.
TEST_P(DropoutRate, PlacesAreIndependent) {
  const double keep = 1 - GetParam();
  const Dropout dropout = Dropout::make(GetParam(), 5, 9);
  const std::vector<uint8_t> kept = draw(dropout, 3);
  const double noise = 5 / std::sqrt(static_cast<double>(kRows * kColumns));
  for (const auto& [i, j] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 0}, {8, 0}, {0, 8}, {8, 1}, {0, 2}, {16, 0}, {0, 32}})
    EXPECT_LT(std::abs(correlation(kept, kept, i, j, keep)), 0.01 + noise) << i << ", " << j;
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

TEST(Dropout, IsAPureFunction) {
  const Dropout a = Dropout::make(0.3, 123, 456), b = Dropout::make(0.3, 123, 456);
  for (int64_t n = 0; n < 4096; ++n) ASSERT_EQ(a.keep(n % 7, n, 3 * n), b.keep(n % 7, n, 3 * n));
}

}  // namespace
}  // namespace tilewise
