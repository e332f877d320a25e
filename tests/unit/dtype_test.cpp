// core/dtype.h: the 16-bit types value by value, rounding against double arithmetic.
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

namespace tilewise {
namespace {

struct Format {
  const char* name;
  int mantissa_bits, min_exponent, max_exponent;  // of normal numbers 1.m * 2^e
  uint16_t infinity;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
};
constexpr Format kFormats[] = {{"f16", 10, -14, 15, 0x7c00, f16_to_float, float_to_f16},
                               {"bf16", 7, -126, 127, 0x7f80, bf16_to_float, float_to_bf16}};

class Dtype16 : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Dtype16, testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

// The value that the bits stand for, from the definition of the format.
double defined_value(const Format& f, uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = (bits & 0x7fff) >> f.mantissa_bits, mantissa = bits & ((1 << f.mantissa_bits) - 1);
  if (exponent == f.max_exponent - f.min_exponent + 2)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, f.min_exponent - f.mantissa_bits);
  return sign * std::ldexp((1 << f.mantissa_bits) + mantissa, exponent - 1 + f.min_exponent - f.mantissa_bits);
}

// Round to nearest, ties to even, in double arithmetic (exact: every float is a multiple of its unit here).
double rounded(const Format& f, float value) {
  if (std::isnan(value) || std::isinf(value) || value == 0) return value;
  const int exponent = std::max(std::ilogb(value), f.min_exponent);
  const double unit = std::ldexp(1.0, exponent - f.mantissa_bits);
  const double result = std::nearbyint(value / unit) * unit;  // the default rounding mode is nearest, ties to even
  const double overflow = std::ldexp(1.0, f.max_exponent + 1);
  return std::abs(result) >= overflow ? std::copysign(INFINITY, value) : result;
}

TEST_P(Dtype16, EveryValueReadsRightAndRoundTrips) {
  const Format& f = GetParam();
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = f.to_float(static_cast<uint16_t>(bits));
    const double want = defined_value(f, static_cast<uint16_t>(bits));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      const uint16_t back = f.from_float(value);
      ASSERT_GT(back & 0x7fff, f.infinity) << "NaN became a number: " << bits;
      ASSERT_EQ(back & 0x8000u, bits & 0x8000u);
      continue;
    }
    ASSERT_EQ(value, want) << bits;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(f.from_float(value), bits);
  }
}

void expect_rounds(const Format& f, float value) {
  const float got = f.to_float(f.from_float(value));
  const double want = rounded(f, value);
  if (std::isnan(want)) {
    ASSERT_TRUE(std::isnan(got));
    return;
  }
  ASSERT_EQ(got, want) << std::hexfloat << value;
  ASSERT_EQ(std::signbit(got), std::signbit(value)) << std::hexfloat << value;
}

TEST_P(Dtype16, RoundsToNearestEven) {
  const Format& f = GetParam();
  std::mt19937 random(1);
  for (int n = 0; n < 2000000; ++n)
    expect_rounds(f, std::bit_cast<float>(static_cast<uint32_t>(random())));  // any bits
  for (int n = 0; n < 500000; ++n) {  // the range of the subnormals and around it
    const double scale = std::ldexp(1.0, f.min_exponent - f.mantissa_bits - 2 + static_cast<int>(random() % 16));
    expect_rounds(f, static_cast<float>(std::uniform_real_distribution<double>(-1, 1)(random) * scale));
  }
  for (uint32_t bits = 0; bits < f.infinity; ++bits) {  // halfway to the next value, and one float to either side
    const double low = defined_value(f, static_cast<uint16_t>(bits));
    const double high = bits + 1 == f.infinity ? std::ldexp(1.0, f.max_exponent + 1)
                                               : defined_value(f, static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    for (float value : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, INFINITY)}) {
      expect_rounds(f, value);
      expect_rounds(f, -value);
    }
  }
}

TEST(Dtype, NamesAndSizes) {
  const int64_t sizes[] = {4, 2, 2, 8, 4, 8, 1};
  for (int32_t dtype = TW_FLOAT32; dtype <= TW_BOOL; ++dtype) {
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
    EXPECT_EQ(dtype_size(dtype), sizes[dtype]);
    EXPECT_EQ(is_float(dtype), dtype <= TW_FLOAT64);
  }
  EXPECT_EQ(dtype_from_name("f8"), -1);
  EXPECT_EQ(dtype_from_name("unknown"), -1);
  EXPECT_EQ(dtype_size(99), 0);
  EXPECT_FALSE(is_float(-1));
}

TEST(Dtype, LoadAndStore) {
  for (int32_t dtype = TW_FLOAT32; dtype <= TW_BOOL; ++dtype) {
    alignas(8) unsigned char memory[3 * 8];
    std::memset(memory, 0xab, sizeof memory);
    store_element(memory, dtype, 1, 1);
    EXPECT_EQ(load_element(memory, dtype, 1), 1) << dtype_name(dtype);
    const auto size = static_cast<size_t>(dtype_size(dtype));
    for (size_t n = 0; n < sizeof memory; ++n)
      if (n < size || n >= 2 * size) {
        EXPECT_EQ(memory[n], 0xab) << "neighbour of a " << dtype_name(dtype);
      }
  }
  double value = 0;
  store_element(&value, TW_FLOAT64, 0, 0.1);
  EXPECT_EQ(value, 0.1);
}

}  // namespace
}  // namespace tilewise
