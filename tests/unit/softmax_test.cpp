// core/softmax.h's recurrences, exp, tw_softmax's rows, the accumulator and the merge of partial results.
#include "cpu/softmax.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/softmax.h"
#include "cpu/exp.h"
#include "unit/helpers.h"

namespace tilewise {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_numbers(int64_t n, float low, float high, int seed = 1) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& value : x) value = std::uniform_real_distribution<float>(low, high)(random);
  return x;
}

struct Exact {
  std::vector<double> p;
  double lse;
};
Exact exact_softmax(const std::vector<float>& x) {
  double max = -INFINITY, sum = 0;
  for (float value : x) max = std::max<double>(max, value);
  Exact out{std::vector<double>(x.size()), -INFINITY};
  if (max == -INFINITY) return out;
  for (size_t n = 0; n < x.size(); ++n) sum += out.p[n] = std::exp(x[n] - max);
  for (double& p : out.p) p /= sum;
  out.lse = max + std::log(sum);
  return out;
}

// What float32 may lose: half a unit when the maximum is subtracted, which exp turns into a relative error, and a few
// units for exp, the sum and the division.
double float32_error(double p, double logit, double max) {
  return p * (std::abs(logit - max) * 0x1p-24 + 3e-7) + 1e-38;
}

TEST(OnlineSoftmaxTest, LateMaximaRescale) {
  for (const std::vector<float>& x : std::vector<std::vector<float>>{{1, 2, 3},
                                                                     {3, 2, 1},
                                                                     {-1000, 0, 1000},
                                                                     {0, 88, 89, 200},
                                                                     {-1e30f, -1e30f},
                                                                     {5},
                                                                     {-kInf, 4, -kInf, 9, -kInf}}) {
    OnlineSoftmax<double> state;
    for (float value : x) state.push(value);
    EXPECT_NEAR(state.lse(), exact_softmax(x).lse, 1e-12 * std::max(1.0, std::abs(exact_softmax(x).lse)));
  }
}

TEST(OnlineSoftmaxTest, FactorScalesTheWeightedSum) {
  const std::vector<float> x = {-3, 7, 2, 30, 29.5f, -kInf}, v = {1, -2, 4, 0.5f, 3, 100};
  OnlineSoftmax<double> state;
  double sum = 0, want = 0;
  for (size_t n = 0; n < x.size(); ++n) {
    sum *= state.push(x[n]);
    sum += OnlineSoftmax<double>::weight(x[n], state.max) * v[n];
    want += exact_softmax(x).p[n] * v[n];
  }
  EXPECT_NEAR(sum / state.sum, want, 1e-14);
}

TEST(OnlineSoftmaxTest, EmptyStaysEmpty) {
  OnlineSoftmax<float> state;
  EXPECT_EQ(state.lse(), -kInf);
  for (int n = 0; n < 3; ++n) EXPECT_EQ(state.push(-kInf), 1);
  EXPECT_EQ(state.lse(), -kInf);
  EXPECT_EQ(state.sum, 0);
  OnlineSoftmax<float> other;
  state.merge(other);
  EXPECT_EQ(state.lse(), -kInf);
  other.push(-5);
  state.merge(other);
  EXPECT_EQ(state.lse(), -5);
  state.merge(OnlineSoftmax<float>());
  EXPECT_EQ(state.lse(), -5);
}

TEST(OnlineSoftmaxTest, VeryNegativeLogitsAreOrdinary) {
  OnlineSoftmax<float> state;
  for (int n = 0; n < 4; ++n) state.push(-1e30f);
  EXPECT_EQ(state.max, -1e30f);
  EXPECT_EQ(state.sum, 4);
}

TEST(MergeWeightsTest, EmptyParts) {
  const auto both = merge_weights(-kInf, -kInf), left = merge_weights(2.0f, -kInf), right = merge_weights(-kInf, 2.0f);
  EXPECT_TRUE(both.weight_a == 0 && both.weight_b == 0 && both.lse == -kInf);
  EXPECT_TRUE(left.weight_a == 1 && left.weight_b == 0 && left.lse == 2);
  EXPECT_TRUE(right.weight_a == 0 && right.weight_b == 1 && right.lse == 2);
  const auto equal = merge_weights(300.0f, 300.0f);
  EXPECT_TRUE(equal.weight_a == 0.5f && equal.weight_b == 0.5f);
  EXPECT_FLOAT_EQ(equal.lse, 300 + std::log(2.0f));
}

TEST(Exp, WithinOneUlp) {
  double worst = 0;
  for (uint64_t bits = 0; bits <= 0xffffffff; bits += 1009) {  // a prime: all exponents, scattered mantissas
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (!(x >= -110 && x <= 95)) continue;
    const double want = std::exp(static_cast<double>(x));
    const float got = exp_float(x), rounded = static_cast<float>(want);
    if (std::isinf(rounded) || std::isinf(got)) {
      ASSERT_EQ(got, rounded) << x;
      continue;
    }
    worst = std::max(worst, std::abs(got - want) / (std::nextafterf(rounded, kInf) - rounded));
  }
  EXPECT_LT(worst, 1);
}

TEST(Exp, ExactPoints) {
  EXPECT_EQ(exp_float(0), 1);
  EXPECT_EQ(exp_float(-0.0f), 1);
  EXPECT_EQ(exp_float(-kInf), 0);
  EXPECT_EQ(exp_float(-1e30f), 0);
  EXPECT_EQ(exp_float(kInf), kInf);
  EXPECT_TRUE(std::isnan(exp_float(kFloatNan)));
  EXPECT_TRUE(std::isnan(exp_float(-kFloatNan)));
}

class SoftmaxRows : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Lengths, SoftmaxRows, testing::Values(1, 2, 15, 16, 17, 100, 4095, 4096, 4097, 10000, 33000));

TEST_P(SoftmaxRows, EqualsExact) {
  const int64_t n = GetParam(), rows = 3;
  std::vector<float> x = random_numbers(rows * n, -20, 20), y(rows * n, kFloatNan), lse(rows, kFloatNan);
  for (int64_t k = 0; k < n; ++k) x[n + k] = -1000 + 0.1f * static_cast<float>(k);  // the maximum arrives last
  for (int64_t k = 0; k < n; ++k) x[2 * n + k] = 1e4f;                              // constant
  tw_tensor x_view = view(x, {rows, n}), y_view = view(y, {rows, n}), lse_view = view(lse, {rows});
  ASSERT_TRUE(softmax(x_view, y_view, &lse_view, 2).ok());
  for (int64_t r = 0; r < rows; ++r) {
    const Exact want = exact_softmax(std::vector<float>(x.begin() + r * n, x.begin() + (r + 1) * n));
    const float max = *std::max_element(x.begin() + r * n, x.begin() + (r + 1) * n);
    for (int64_t k = 0; k < n; ++k)
      ASSERT_NEAR(y[r * n + k], want.p[k], float32_error(want.p[k], x[r * n + k], max)) << r << " " << k;
    ASSERT_NEAR(lse[r], want.lse, 1e-6 * std::max(1.0, std::abs(want.lse)));
  }
  if (n == 1) {
    EXPECT_EQ(y[0], 1);
  }
}

TEST_P(SoftmaxRows, MaskedNanAndInfinity) {
  const int64_t n = GetParam(), rows = 5;
  std::vector<float> x = random_numbers(rows * n, -2, 2), y(rows * n, kFloatNan), lse(rows, 5);
  std::fill_n(x.begin(), n, -kInf);          // row 0: all masked
  x[n + n - 1] = kFloatNan;                       // row 1: NaN at the end
  x[2 * n + n / 2] = kInf;                   // row 2: +inf
  std::fill_n(x.begin() + 3 * n, n, -kInf);  // row 3: one key alone
  x[3 * n + n - 1] = -3;
  std::fill_n(x.begin() + 4 * n, n, -kInf);  // row 4: masked but for a NaN
  x[4 * n] = kFloatNan;
  tw_tensor x_view = view(x, {rows, n}), y_view = view(y, {rows, n}), lse_view = view(lse, {rows});
  ASSERT_TRUE(softmax(x_view, y_view, &lse_view, 1).ok());
  for (int64_t k = 0; k < n; ++k) {
    ASSERT_EQ(y[k], 0);
    ASSERT_TRUE(std::isnan(y[n + k])) << k;
    ASSERT_TRUE(std::isnan(y[2 * n + k])) << k;
    ASSERT_EQ(y[3 * n + k], k == n - 1 ? 1 : 0);
    ASSERT_TRUE(std::isnan(y[4 * n + k])) << k;
  }
  EXPECT_EQ(lse[0], -kInf);
  EXPECT_TRUE(std::isnan(lse[1]));
  EXPECT_TRUE(std::isnan(lse[2]));
  EXPECT_EQ(lse[3], -3);
  EXPECT_TRUE(std::isnan(lse[4]));
}

TEST(SoftmaxTest, EveryDtypeAndStride) {
  constexpr int64_t kA = 3, kB = 2, kN = 37;
  for (int32_t from : {TW_FLOAT32, TW_FLOAT16, TW_BFLOAT16, TW_FLOAT64})
    for (int32_t to : {TW_FLOAT32, TW_FLOAT16, TW_BFLOAT16, TW_FLOAT64}) {
      const std::vector<float> numbers = random_numbers(2000, -9, 9);
      std::vector<double> x_memory(2000), y_memory(2000, 0);
      tw_tensor x = {x_memory.data(), from,        TW_CPU, 0, 3,
                     {kA, kB, kN},    {5, 500, 15}};  // rows interleave; last stride 15
      tw_tensor y = {y_memory.data(), to, TW_CPU, 0, 3, {kA, kB, kN}, {1, 3, 6}};
      std::vector<float> lse_memory(20, 99);
      tw_tensor lse = {lse_memory.data(), TW_FLOAT32, TW_CPU, 0, 2, {kA, kB}, {1, 7}};
      for (int64_t n = 0; n < 2000; ++n) store_element(x.data, from, n, numbers[n]);
      ASSERT_TRUE(softmax(x, y, &lse, 2).ok());
      const double unit = to == TW_FLOAT16    ? 0x1p-11
                          : to == TW_BFLOAT16 ? 0x1p-8
                                              : 0,
                   tiny = to == TW_FLOAT16 ? 0x1p-25 : 0;
      for (int64_t a = 0; a < kA; ++a)
        for (int64_t b = 0; b < kB; ++b) {
          std::vector<float> row(kN);
          for (int64_t n = 0; n < kN; ++n)
            row[n] = static_cast<float>(load_element(x.data, from, 5 * a + 500 * b + 15 * n));
          const Exact want = exact_softmax(row);
          const float max = *std::max_element(row.begin(), row.end());
          for (int64_t n = 0; n < kN; ++n)
            ASSERT_NEAR(load_element(y.data, to, a + 3 * b + 6 * n), want.p[n],
                        float32_error(want.p[n], row[n], max) + unit * want.p[n] + tiny)
                << dtype_name(from) << " " << dtype_name(to);
          ASSERT_NEAR(lse_memory[a + 7 * b], want.lse, 2e-6);
        }
    }
}

TEST(SoftmaxTest, Float64IsComputedInFloat64) {
  std::vector<double> x = {1e300, 1e300, 0, 1}, y(4);
  tw_tensor x_view = view(x.data(), TW_FLOAT64, {2, 2}), y_view = view(y.data(), TW_FLOAT64, {2, 2});
  ASSERT_TRUE(softmax(x_view, y_view, nullptr, 1).ok());
  EXPECT_EQ(y[0], 0.5);
  EXPECT_NEAR(y[3], 1 / (1 + std::exp(-1.0)), 1e-15);
}

TEST(SoftmaxTest, InPlace) {
  for (int64_t n : {7, 9000}) {
    std::vector<float> x = random_numbers(4 * n, -5, 5), y(4 * n), z = x;
    tw_tensor x_view = view(x, {4, n}), y_view = view(y, {4, n}), z_view = view(z, {4, n});
    ASSERT_TRUE(softmax(x_view, y_view, nullptr, 1).ok());
    ASSERT_TRUE(softmax(z_view, z_view, nullptr, 2).ok());
    EXPECT_EQ(y, z);
  }
}

TEST(SoftmaxTest, OneDimensionAndNoElements) {
  std::vector<float> x = {0, 0}, y(2), lse(1);
  tw_tensor x_view = view(x, {2}), y_view = view(y, {2}), lse_view = view(lse, {1});
  ASSERT_TRUE(softmax(x_view, y_view, &lse_view, 1).ok());
  EXPECT_EQ(y[0], 0.5f);
  EXPECT_FLOAT_EQ(lse[0], std::log(2.0f));
  std::vector<float> lse_3(3, 7);
  tw_tensor none = view(nullptr, TW_FLOAT32, {3, 0}), lse_3_view = view(lse_3, {3});
  ASSERT_TRUE(softmax(none, none, &lse_3_view, 1).ok());
  EXPECT_EQ(lse_3, std::vector<float>(3, -kInf));
  tw_tensor no_rows = view(nullptr, TW_FLOAT32, {0, 5});
  EXPECT_TRUE(softmax(no_rows, no_rows, nullptr, 1).ok());
}

void expect_error(const Status& status, const std::string& begin) {
  EXPECT_EQ(status.code(), TW_INVALID_ARGUMENT);
  EXPECT_EQ(status.message().substr(0, begin.size()), begin);
}

TEST(SoftmaxTest, ErrorsNameTheArgument) {
  std::vector<float> memory(64, 3);
  tw_tensor x = view(memory, {4, 8}), y = view(memory.data() + 32, TW_FLOAT32, {4, 8}), lse = view(memory, {4});
  const auto changed = [](tw_tensor t, auto&& change) {
    change(t);
    return t;
  };
  tw_tensor bad = changed(x, [](tw_tensor& t) { t.dtype = TW_INT32; });
  expect_error(softmax(bad, y, nullptr, 1), "x: dtype i32");
  bad = changed(x, [](tw_tensor& t) { t.device = TW_CUDA; });
  expect_error(softmax(bad, y, nullptr, 1), "x: device 1");
  bad = changed(x, [](tw_tensor& t) { t.ndim = 5; });
  expect_error(softmax(bad, y, nullptr, 1), "x: ndim 5");
  bad = changed(x, [](tw_tensor& t) { t.ndim = 0; });
  expect_error(softmax(bad, y, nullptr, 1), "x: ndim 0");
  bad = changed(x, [](tw_tensor& t) { t.shape[0] = -1; });
  expect_error(softmax(bad, y, nullptr, 1), "x: shape [-1, 8]");
  bad = changed(x, [](tw_tensor& t) { t.data = nullptr; });
  expect_error(softmax(bad, y, nullptr, 1), "x: data is NULL");
  bad = changed(y, [](tw_tensor& t) { t.shape[1] = 7; });
  expect_error(softmax(x, bad, nullptr, 1), "y: shape [4, 7], must be [4, 8]");
  bad = changed(y, [](tw_tensor& t) { t.stride[0] = 0; });
  expect_error(softmax(x, bad, nullptr, 1), "y: stride 0 in dimension 0");
  bad = changed(x, [](tw_tensor& t) { t.stride[0] = 1, t.stride[1] = 4; });
  expect_error(softmax(x, bad, nullptr, 1), "y: the same memory as x");
  bad = changed(lse, [](tw_tensor& t) { t.shape[0] = 5; });
  expect_error(softmax(x, y, &bad, 1), "lse: shape [5], must be [4]");
  bad = changed(lse, [](tw_tensor& t) { t.dtype = TW_FLOAT16; });
  expect_error(softmax(x, y, &bad, 1), "lse: dtype f16, must be f32");
  EXPECT_EQ(memory, std::vector<float>(64, 3)) << "written in spite of an error";
}

std::unique_ptr<Accumulator> accumulator(int64_t rows, int64_t dim) {
  std::unique_ptr<Accumulator> out;
  EXPECT_TRUE(Accumulator::create(rows, dim, &out).ok());
  return out;
}

TEST(AccumulatorTest, ChunksEqualOneSoftmax) {
  constexpr int64_t kRows = 3, kN = 9000, kDim = 4;
  std::vector<float> scores = random_numbers(kRows * kN, -30, 30), values = random_numbers(kN * kDim, -2, 2, 2),
                     lse(kRows), result(kRows * kDim), p(kRows * kN);
  scores[kN - 1] = 500;  // a maximum that arrives late
  for (int64_t k = 0; k < kN; k += 2) scores[kN + k] = -kInf;
  for (int64_t chunk : {1, 7, 4096, 5000, 9000}) {
    const auto state = accumulator(kRows, kDim);
    for (int64_t begin = 0; begin < kN; begin += chunk) {
      const int64_t n = std::min(chunk, kN - begin);
      tw_tensor scores_view = view(scores.data() + begin, TW_FLOAT32, {kRows, n}),
                values_view = view(values.data() + begin * kDim, TW_FLOAT32, {n, kDim});
      scores_view.stride[0] = kN;
      ASSERT_TRUE(state->push(scores_view, &values_view).ok());
    }
    tw_tensor lse_view = view(lse, {kRows}), result_view = view(result, {kRows, kDim}),
              scores_view = view(scores, {kRows, kN}), p_view = view(p, {kRows, kN});
    ASSERT_TRUE(state->lse(lse_view).ok());
    ASSERT_TRUE(state->result(result_view).ok());
    ASSERT_TRUE(state->probabilities(scores_view, p_view).ok());
    for (int64_t r = 0; r < kRows; ++r) {
      const Exact want = exact_softmax(std::vector<float>(scores.begin() + r * kN, scores.begin() + (r + 1) * kN));
      ASSERT_NEAR(lse[r], want.lse, 1e-6 * std::abs(want.lse));
      const float max = *std::max_element(scores.begin() + r * kN, scores.begin() + (r + 1) * kN);
      for (int64_t k = 0; k < kN; ++k)
        ASSERT_NEAR(p[r * kN + k], want.p[k], want.p[k] == 0 ? 0 : float32_error(want.p[k], scores[r * kN + k], max));
      for (int64_t c = 0; c < kDim; ++c) {
        double sum = 0;
        for (int64_t k = 0; k < kN; ++k) sum += want.p[k] * values[k * kDim + c];
        ASSERT_NEAR(result[r * kDim + c], sum, 2e-6);
      }
    }
  }
}

TEST(AccumulatorTest, MergeEqualsOneStream) {
  const std::vector<float> scores = random_numbers(60, -50, 50), values = random_numbers(60, -1, 1, 3);
  const auto push = [&](Accumulator& state, int64_t begin, int64_t n) {
    tw_tensor s = view(const_cast<float*>(scores.data()) + begin, TW_FLOAT32, {1, n}),
              v = view(const_cast<float*>(values.data()) + begin, TW_FLOAT32, {n, 1});
    ASSERT_TRUE(state.push(s, &v).ok());
  };
  const auto whole = accumulator(1, 1), left = accumulator(1, 1), right = accumulator(1, 1), empty = accumulator(1, 1);
  push(*whole, 0, 60), push(*left, 0, 25), push(*right, 25, 35);
  ASSERT_TRUE(left->merge(*empty).ok());
  ASSERT_TRUE(left->merge(*right).ok());
  ASSERT_TRUE(empty->merge(*left).ok());
  const auto read = [](const Accumulator& state) {
    std::vector<float> out(2);
    tw_tensor lse = view(out.data(), TW_FLOAT32, {1}), result = view(out.data() + 1, TW_FLOAT32, {1, 1});
    EXPECT_TRUE(state.lse(lse).ok() && state.result(result).ok());
    return out;
  };
  for (const auto* state : {&left, &empty}) {
    EXPECT_NEAR(read(**state)[0], read(*whole)[0], 1e-5);
    EXPECT_NEAR(read(**state)[1], read(*whole)[1], 1e-6);
  }
}

TEST(AccumulatorTest, EmptyMaskedAndNan) {
  const auto state = accumulator(3, 2);
  std::vector<float> scores = {-kInf, -kInf, 1, -kInf, 2, kFloatNan}, values = {1, 2, kFloatNan, kFloatNan}, lse(3, 9), result(6, 9);
  tw_tensor scores_view = view(scores, {3, 2}), values_view = view(values, {2, 2}), lse_view = view(lse, {3}),
            result_view = view(result, {3, 2});
  ASSERT_TRUE(state->lse(lse_view).ok() && state->result(result_view).ok());
  EXPECT_EQ(lse, std::vector<float>(3, -kInf));
  EXPECT_EQ(result, std::vector<float>(6, 0));
  ASSERT_TRUE(state->push(scores_view, &values_view).ok());
  ASSERT_TRUE(state->lse(lse_view).ok() && state->result(result_view).ok());
  EXPECT_EQ(lse[0], -kInf);
  EXPECT_EQ(lse[1], 1);  // the masked key's NaN value stays out
  EXPECT_TRUE(std::isnan(lse[2]));
  EXPECT_EQ(std::vector<float>(result.begin(), result.begin() + 4), (std::vector<float>{0, 0, 1, 2}));
  EXPECT_TRUE(std::isnan(result[4]));
}

TEST(AccumulatorTest, ALongStreamOfEqualLogits) {  // a float32 sum would stand still at 2^24
  const auto state = accumulator(1, 0);
  std::vector<float> chunk(1 << 16, 0), lse(1);
  tw_tensor wide = view(chunk, {1, 1 << 16}), one = view(chunk, {1, 1}), lse_view = view(lse, {1});
  for (int n = 0; n < 256; ++n) ASSERT_TRUE(state->push(wide, nullptr).ok());  // 2^24
  for (int n = 0; n < 1 << 20; ++n) ASSERT_TRUE(state->push(one, nullptr).ok());
  ASSERT_TRUE(state->lse(lse_view).ok());
  EXPECT_FLOAT_EQ(lse[0], static_cast<float>(std::log(16777216.0 + 1048576)));
}

TEST(AccumulatorTest, ValuesPerRowAndErrors) {
  const auto state = accumulator(2, 1), plain = accumulator(2, 0), other = accumulator(3, 1), wide = accumulator(2, 2);
  std::vector<float> scores = {0, 0, 0, 0}, values = {1, 3, 10, 30}, out(2);
  tw_tensor scores_view = view(scores, {2, 2}), values_view = view(values, {2, 2, 1}), out_view = view(out, {2, 1}),
            bad = view(scores, {4});
  ASSERT_TRUE(state->push(scores_view, &values_view).ok());
  ASSERT_TRUE(state->result(out_view).ok());
  EXPECT_EQ(out, (std::vector<float>{2, 20}));
  expect_error(state->push(scores_view, nullptr), "values: NULL, must be given");
  expect_error(plain->push(scores_view, &values_view), "values: given, must be NULL");
  expect_error(state->push(bad, &values_view), "scores: shape [4], must be [2, 0]");
  expect_error(state->merge(*other), "from: num_rows 3, must be 2");
  expect_error(state->merge(*wide), "from: value_dim 2, must be 1");
  expect_error(state->lse(out_view), "lse: shape [2, 1], must be [2]");
  expect_error(wide->result(out_view), "result: shape [2, 1], must be [2, 2]");
  expect_error(state->probabilities(scores_view, out_view), "probabilities: shape [2, 1], must be [2, 2]");
  std::unique_ptr<Accumulator> none;
  expect_error(Accumulator::create(-1, 0, &none), "num_rows: -1");
  expect_error(Accumulator::create(1, -1, &none), "value_dim: -1");
  ASSERT_TRUE(state->result(out_view).ok());
  EXPECT_EQ(out, (std::vector<float>{2, 20})) << "changed by an error";
}

class MergeStates : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Layouts, MergeStates, testing::Bool());

TEST_P(MergeStates, EqualsAttentionOverAllKeys) {
  const bool packed = GetParam();
  const int64_t b = packed ? 1 : 2, s = 3, h = 2, d = 5;
  const std::vector<int64_t> o_shape = packed ? std::vector<int64_t>{s, h, d} : std::vector<int64_t>{b, s, h, d},
                             lse_shape = packed ? std::vector<int64_t>{h, s} : std::vector<int64_t>{b, h, s};
  std::vector<float> o = random_numbers(b * s * h * d, -1, 1), other = random_numbers(b * s * h * d, -1, 1, 2),
                     lse = random_numbers(b * s * h, -40, 40, 3), lse_other = random_numbers(b * s * h, -40, 40, 4);
  lse[0] = lse_other[1] = lse[2] = lse_other[2] = -kInf;
  const auto o_before = o, lse_before = lse;
  const auto row_o = [&](int64_t n, int64_t i, int64_t head) { return ((n * s + i) * h + head) * d; };
  const auto row_lse = [&](int64_t n, int64_t i, int64_t head) { return (n * h + head) * s + i; };
  for (int64_t c = 0; c < d; ++c)  // empty parts hold rubbish: they take no part
    o[row_o(0, 0, 0) + c] = other[row_o(0, 1, 0) + c] = o[row_o(0, 2, 0) + c] = other[row_o(0, 2, 0) + c] = kFloatNan;
  tw_tensor o_view = view(o, o_shape), lse_view = view(lse, lse_shape), other_view = view(other, o_shape),
            lse_other_view = view(lse_other, lse_shape);
  ASSERT_TRUE(merge_states(o_view, lse_view, other_view, lse_other_view).ok());
  for (int64_t n = 0; n < b; ++n)
    for (int64_t i = 0; i < s; ++i)
      for (int64_t head = 0; head < h; ++head) {
        const double a = lse_before[row_lse(n, i, head)], z = lse_other[row_lse(n, i, head)], max = std::max(a, z);
        const double want = max == -INFINITY ? max : max + std::log(std::exp(a - max) + std::exp(z - max));
        const float got = lse[row_lse(n, i, head)];
        ASSERT_TRUE(got == static_cast<float>(want) || std::abs(got - want) < 1e-5) << got << " " << want;
        for (int64_t c = 0; c < d; ++c) {
          const int64_t at = row_o(n, i, head) + c;
          if (max == -INFINITY)
            ASSERT_EQ(o[at], 0);
          else if (a == -INFINITY)
            ASSERT_EQ(o[at], other[at]);  // unchanged, bit for bit
          else if (z == -INFINITY)
            ASSERT_EQ(o[at], o_before[at]);
          else
            ASSERT_NEAR(o[at], std::exp(a - want) * o_before[at] + std::exp(z - want) * other[at], 1e-5);
        }
      }
}

TEST(MergeStatesTest, ErrorsNameTheArgument) {
  std::vector<float> memory(24, 1);
  tw_tensor o = view(memory, {2, 3, 4}), lse = view(memory, {3, 2}), flat = view(memory, {6, 4}),
            wrong = view(memory, {2, 3});
  tw_tensor f16 = view(memory.data(), TW_FLOAT16, {3, 2});
  expect_error(merge_states(flat, lse, o, lse), "o: ndim 2");
  expect_error(merge_states(o, lse, flat, lse), "o_other: shape [6, 4], must be [2, 3, 4]");
  expect_error(merge_states(o, wrong, o, lse), "lse: shape [2, 3], must be [3, 2]");
  expect_error(merge_states(o, lse, o, wrong), "lse_other: shape [2, 3], must be [3, 2]");
  expect_error(merge_states(o, f16, o, lse), "lse: dtype f16, must be f32");
}

}  // namespace
}  // namespace tilewise
