// core/mask.h against the definition, over all small sequences and windows.
#include "core/mask.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace tilewise {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kBounds[] = {-1, 0, 1, 2, 3, 5, 8, 100, int64_t{1} << 40, kHuge - 1, kHuge};

// i + sk - sq - left <= j <= i + sk - sq + right, in arithmetic that cannot overflow.
bool defined_visible(const Mask& mask, int64_t i, int64_t j, int64_t sq, int64_t sk) {
  const __int128 diagonal = static_cast<__int128>(i) + sk - sq;
  return (mask.left < 0 || j >= diagonal - mask.left) && (mask.right < 0 || j <= diagonal + mask.right);
}

template <class F>
void for_all(F&& f) {
  for (int64_t sq = 1; sq <= 8; ++sq)
    for (int64_t sk = 0; sk <= 8; ++sk)
      for (int64_t left : kBounds)
        for (int64_t right : kBounds) f(Mask{left, right}, sq, sk);
}

TEST(Mask, KeysOfARow) {
  for_all([](const Mask& mask, int64_t sq, int64_t sk) {
    for (int64_t i = 0; i < sq; ++i) {
      const KeyRange range = mask.keys(i, sq, sk);
      ASSERT_TRUE(0 <= range.begin && range.begin <= range.end && range.end <= sk)
          << range.begin << ".." << range.end << " sq " << sq << " sk " << sk << " i " << i;
      for (int64_t j = 0; j < sk; ++j)
        ASSERT_EQ(range.begin <= j && j < range.end, defined_visible(mask, i, j, sq, sk))
            << "left " << mask.left << " right " << mask.right << " sq " << sq << " sk " << sk << " i " << i << " j "
            << j;
    }
  });
}

TEST(Mask, KeysOfRowsCoverEachRow) {
  for_all([](const Mask& mask, int64_t sq, int64_t sk) {
    for (int64_t begin = 0; begin < sq; ++begin)
      for (int64_t end = begin + 1; end <= sq; ++end) {
        const KeyRange all = mask.keys_of_rows(begin, end, sq, sk);
        ASSERT_TRUE(0 <= all.begin && all.begin <= all.end && all.end <= sk);
        int64_t lowest = sk, highest = 0;  // of what is visible
        for (int64_t i = begin; i < end; ++i)
          for (int64_t j = 0; j < sk; ++j)
            if (defined_visible(mask, i, j, sq, sk)) lowest = std::min(lowest, j), highest = std::max(highest, j + 1);
        if (lowest >= highest) continue;
        ASSERT_LE(all.begin, lowest);
        ASSERT_EQ(all.end, highest);
      }
  });
}

TEST(Mask, RowsOfKeysIsTheTranspose) {
  for_all([](const Mask& mask, int64_t sq, int64_t sk) {
    for (int64_t begin = 0; begin < sk; ++begin)
      for (int64_t end = begin + 1; end <= sk; ++end) {
        const KeyRange rows = mask.rows_of_keys(begin, end, sq, sk);
        ASSERT_TRUE(0 <= rows.begin && rows.begin <= rows.end && rows.end <= sq);
        for (int64_t i = 0; i < sq; ++i) {
          bool any = false;
          for (int64_t j = begin; j < end; ++j) any |= defined_visible(mask, i, j, sq, sk);
          const bool inside = rows.begin <= i && i < rows.end;
          ASSERT_TRUE(inside || !any) << "row " << i << " of keys " << begin << ".." << end;
          if (end == begin + 1) {
            ASSERT_EQ(inside, any) << "row " << i << " of key " << begin;
          }
        }
      }
  });
}

TEST(Mask, AWindowAsLongAsTheSequenceIsNone) {
  for (int64_t i = 0; i < 5; ++i) {
    const KeyRange windowed = Mask{7, 7}.keys(i, 5, 7), full = Mask{}.keys(i, 5, 7);
    EXPECT_EQ(windowed.begin, full.begin);
    EXPECT_EQ(windowed.end, full.end);
  }
}

}  // namespace
}  // namespace tilewise
