// core/dropout.h: the generator against its published vectors, the decision's rate, and its independence.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
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

// Of a program that shares nothing with this one (Python's integers).
TEST(Draws, KnownAnswers) {
  const auto expect = [](const DropoutHead& head, int64_t row, int64_t column, const Draw& want) {
    const Draw got = DropoutHead::draw(head.row_part(row), head.column_part(column));
    for (int n = 0; n < 4; ++n) EXPECT_EQ(got.word[n], want.word[n]) << n;
  };
  expect(DropoutHead(1, 2, 3), 4, 5, {{0xc68aee91, 0x2ac61b84, 0xe9d23ee1, 0xcb685dd}});
  expect(DropoutHead(0x123456789abcdef0, 0xfedcba9876543210, 70000), 0x1fffffff, 0x7ffffff, {{0x604fdcbc, 0x7859764d, 0xaf3fc209, 0xb7b194db}});
}

TEST(Draws, ColumnsCanBeCountedFromAnyOfThem) {
  const DropoutHead head(5, 6, 7);
  for (uint32_t first = 0; first < 4; ++first)
    for (int64_t column = 0; column < 64; column += 4) {
      const DropoutHead::Part got = head.from_column(first).column_part(column), want = head.column_part(column + first);
      EXPECT_EQ(got.first, want.first);
      EXPECT_EQ(got.second, want.second);
    }
}

// What a row and a column leave of themselves in a draw. The strongest test of it that we know is the rectangle: the exclusive or of the draws
// of rows i, i' and columns j, j', in which everything cancels that rows and columns contribute each for itself. Its bits, and the
// exclusive or of any two of them, must be even. mix() is draw() with any number of rounds: with one fewer than it has, the test fails.
Draw mix(const DropoutHead::Part& row, const DropoutHead::Part& column, int rounds) {
  constexpr uint32_t kFactor[4] = {0x9E3779B9u, 0xBB67AE85u, 0xD2511F53u, 0xCD9E8D57u};
  uint32_t a = row.first * column.second + column.first, b = column.first, c = row.second * column.first + column.second, d = column.second;
  for (int n = 0; n < rounds; ++n) {
    d = (d ^ a) >> 16 | (d ^ a) << 16, b = (b ^ c) >> 16 | (b ^ c) << 16;
    a = a * kFactor[2 * n % 4] + b, c = c * kFactor[2 * n % 4 + 1] + d;
  }
  return {{a, b ^ c, c, d ^ a}};
}

// Largest deviation, in sigma, of the bits of 2^14 blocks and of all 8128 pairs of bits.
template <class Block>
double unevenness(Block&& block) {
  constexpr int kBlocks = 1 << 14;
  static int64_t count[128][128];  // [x][x]: bit x; [x][y]: bit x ^ bit y
  for (auto& row : count)
    for (int64_t& n : row) n = 0;
  for (int first = 0; first < kBlocks; first += 64) {
    uint64_t bits[128] = {};
    for (int n = 0; n < 64; ++n) {
      const Draw draw = block(first + n);
      for (int k = 0; k < 128; ++k) bits[k] |= static_cast<uint64_t>(draw.word[k / 32] >> k % 32 & 1) << n;
    }
    for (int x = 0; x < 128; ++x) {
      count[x][x] += std::popcount(bits[x]);
      for (int y = 0; y < x; ++y) count[x][y] += std::popcount(bits[x] ^ bits[y]);
    }
  }
  double worst = 0;
  for (int x = 0; x < 128; ++x)
    for (int y = 0; y <= x; ++y) worst = std::max(worst, std::abs(static_cast<double>(count[x][y]) - kBlocks / 2) / (std::sqrt(kBlocks) / 2));
  return worst;
}

Draw operator^(const Draw& x, const Draw& y) {
  return {{x.word[0] ^ y.word[0], x.word[1] ^ y.word[1], x.word[2] ^ y.word[2], x.word[3] ^ y.word[3]}};
}

constexpr double kUneven = 6.5;  // of about 2 million numbers below, one beyond it by chance has a probability of 2e-4

// Pairs of rows (or columns) n * 2 distance + m and that + distance, m below distance: all of them once.
int64_t lower(int64_t n, int64_t distance) { return n / distance * 2 * distance + n % distance; }

double rectangles(const DropoutHead& head, int64_t rows_apart, int64_t columns_apart, int rounds) {
  return unevenness([&](int n) {
    const int64_t i = lower(n >> 7, rows_apart), j = lower(n & 127, columns_apart);
    const DropoutHead::Part r0 = head.row_part(i), r1 = head.row_part(i + rows_apart);
    const DropoutHead::Part c0 = head.column_part(j), c1 = head.column_part(j + columns_apart);
    return mix(r0, c0, rounds) ^ mix(r1, c0, rounds) ^ mix(r0, c1, rounds) ^ mix(r1, c1, rounds);
  });
}

constexpr int kRounds = 2;

TEST(Draws, AreTheMixOfTwoRounds) {
  const DropoutHead head(3, 4, 5);
  for (int64_t n = 0; n < 1000; ++n) {
    const DropoutHead::Part row = head.row_part(n * 77), column = head.column_part(n * 1234567);
    const Draw got = DropoutHead::draw(row, column), want = mix(row, column, kRounds);
    for (int k = 0; k < 4; ++k) ASSERT_EQ(got.word[k], want.word[k]);
  }
}

TEST(Draws, RowsAndColumnsLeaveNoTrace) {
  for (const uint64_t seed : {0, 1, 2})
    for (const int64_t rows_apart : {1, 2, 8, 64, 1024})
      for (const int64_t columns_apart : {1, 4, 32, 512}) {
        const DropoutHead head(seed, 0, 1);
        EXPECT_LT(rectangles(head, rows_apart, columns_apart, kRounds), kUneven) << seed << ", " << rows_apart << " x " << columns_apart;
        EXPECT_GT(rectangles(head, rows_apart, columns_apart, kRounds - 1), 2 * kUneven) << seed << ", " << rows_apart << " x " << columns_apart;
      }
}

// The draws along every axis, and the differences of neighbours: rows, columns, heads, offsets, and the small seeds that people take.
TEST(Draws, AreEvenAlongEveryAxis) {
  const auto draw = [](const DropoutHead& head, int64_t row, int64_t column) { return DropoutHead::draw(head.row_part(row), head.column_part(column)); };
  const DropoutHead head(1, 0, 0);
  EXPECT_LT(unevenness([&](int n) { return draw(head, n, 3); }), kUneven) << "rows";
  EXPECT_LT(unevenness([&](int n) { return draw(head, 3, n); }), kUneven) << "columns";
  EXPECT_LT(unevenness([&](int n) { return draw(DropoutHead(1, 0, n), 0, 0); }), kUneven) << "heads";
  EXPECT_LT(unevenness([&](int n) { return draw(DropoutHead(1, n, 0), 0, 0); }), kUneven) << "offsets";
  EXPECT_LT(unevenness([&](int n) { return draw(DropoutHead(n, 0, 0), 0, 0); }), kUneven) << "seeds";
  for (const int64_t apart : {1, 2, 3, 16, 100}) {
    EXPECT_LT(unevenness([&](int n) { return draw(head, lower(n, apart), 5) ^ draw(head, lower(n, apart) + apart, 5); }), kUneven) << "rows " << apart;
    EXPECT_LT(unevenness([&](int n) { return draw(head, 5, lower(n, apart)) ^ draw(head, 5, lower(n, apart) + apart); }), kUneven) << "columns " << apart;
  }
  for (int bit = 0; bit < 27; bit += 3) {  // of rows and columns: a long sequence's, too
    const int64_t flip = int64_t{1} << bit;
    EXPECT_LT(unevenness([&](int n) { return draw(head, lower(n >> 5, flip), n & 31) ^ draw(head, lower(n >> 5, flip) + flip, n & 31); }), kUneven) << "row bit " << bit;
    EXPECT_LT(unevenness([&](int n) { return draw(head, n & 31, lower(n >> 5, flip)) ^ draw(head, n & 31, lower(n >> 5, flip) + flip); }), kUneven) << "column bit " << bit;
  }
  const DropoutHead others[] = {{1, 0, 1}, {1, 1, 0}, {2, 0, 0}, {0, 0, 0}, {1, uint64_t{1} << 32, 0}, {1 + (uint64_t{1} << 32), 0, 0}};
  for (const DropoutHead& other : others)
    EXPECT_LT(unevenness([&](int n) { return draw(head, n >> 7, n & 127) ^ draw(other, n >> 7, n & 127); }), kUneven) << &other - others;
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
  const Draw bytes = {{0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c}};
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
  expect(Dropout::make(0.1, 1, 2), 3, {0xdfffbfeb, 0xefff7fff, 0xffffbfff, 0xefffffff, 0xffffed7f, 0xfbffdf7f});
  expect(Dropout::make(0.5, 0x123456789abcdef0, 0xfedcba9876543210), 70000,
         {0x3fb83658, 0x8e23797, 0xc9e52cf2, 0xbe474dc2, 0x1b2caa47, 0x3aa0cc});
  expect(Dropout::make(0.98, 7, 0), 0, {0, 0x40001, 0, 0, 0, 0x10});
}

TEST(Dropout, IsAPureFunction) {
  const Dropout a = Dropout::make(0.3, 123, 456), b = Dropout::make(0.3, 123, 456);
  for (int64_t n = 0; n < 4096; ++n) ASSERT_EQ(a.keep(n % 7, n, 3 * n), b.keep(n % 7, n, 3 * n));
}

}  // namespace
}  // namespace tilewise
