// What every rung of the ladder shares: random inputs, a clock, the float64 reference, error and a check that can fail.
// Nothing here is about the ideas; read the numbered files.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

namespace ladder {

using std::size_t;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline Floats normal(size_t count, unsigned seed, float mean = 0, float sigma = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw(mean, sigma);
  Floats x(count);
  for (float& value : x) value = draw(engine);
  return x;
}

// First command-line argument as a size, so that every rung can be tried larger: ./ladder_05_tiled_attention 8000
inline size_t size_argument(int argc, char** argv, size_t fallback) {
  const long long n = argc > 1 ? std::atoll(argv[1]) : 0;
  return n > 0 ? static_cast<size_t>(n) : fallback;
}

// Best of three: on a shared machine the fastest run is the one least disturbed.
template <class Function>
double milliseconds(Function&& function) {
  double best = kInfinity;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    function();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

inline Doubles softmax_float64(const Floats& x) {
  double max = -kInfinity, sum = 0;
  for (float value : x) max = std::max(max, double(value));
  Doubles y(x.size());
  for (size_t i = 0; i < x.size(); ++i) sum += y[i] = std::exp(double(x[i]) - max);
  for (double& value : y) value /= sum;
  return y;
}

// o = softmax(q k^T / sqrt(d)) v for one head, row by row; q, k, v, o are [n, d].
template <class Real>
Doubles attention_float64(const std::vector<Real>& q, const std::vector<Real>& k, const std::vector<Real>& v, size_t n,
                          size_t d) {
  Doubles o(n * d), s(n);
  for (size_t i = 0; i < n; ++i) {
    double max = -kInfinity, sum = 0;
    for (size_t j = 0; j < n; ++j) {
      double dot = 0;
      for (size_t c = 0; c < d; ++c) dot += double(q[i * d + c]) * double(k[j * d + c]);
      max = std::max(max, s[j] = dot / std::sqrt(double(d)));
    }
    for (size_t j = 0; j < n; ++j) {
      const double p = std::exp(s[j] - max);
      sum += p;
      for (size_t c = 0; c < d; ++c) o[i * d + c] += p * double(v[j * d + c]);
    }
    for (size_t c = 0; c < d; ++c) o[i * d + c] /= sum;
  }
  return o;
}

// Largest |x - expected| relative to the largest |expected|; infinite if any x is not a number.
template <class Real>
double max_error(const std::vector<Real>& x, const Doubles& expected) {
  double error = 0, scale = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::fabs(double(x[i]) - expected[i]);
    if (!(difference <= error)) error = std::isnan(difference) ? kInfinity : difference;
    scale = std::max(scale, std::fabs(expected[i]));
  }
  return error / scale;
}

inline int& failures() {
  static int count = 0;
  return count;
}

// Prints a claim and whether it held; main returns exit_code(), so that every rung is a test.
inline void check(bool held, const char* claim) {
  std::printf("%-8s %s\n", held ? "ok" : "FAILED", claim);
  failures() += held ? 0 : 1;
}

inline int exit_code() { return failures() == 0 ? 0 : 1; }

inline double megabytes(double floats) { return floats * sizeof(float) / 1e6; }

// What the algorithm moves, counted from its loops in float32 elements.
inline void print_traffic(const char* name, double floats_read, double floats_written) {
  std::printf("traffic  %-22s %9.2f MB read, %8.2f MB written\n", name, megabytes(floats_read),
              megabytes(floats_written));
}

inline void print_result(const char* name, double error, double time_ms) {
  std::printf("result   %-22s %9.1e error against float64, %8.2f ms\n", name, error, time_ms);
}

}  // namespace ladder
