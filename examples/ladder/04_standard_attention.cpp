// Rung 4. Standard attention, one head: three steps, each with a matrix in memory between it and the next.
//
//   S = Q K^T / sqrt(d)      [n, n]
//   P = softmax(S), by rows  [n, n]
//   O = P V                  [n, d]
//
// The inputs and the output are n x d; S and P are n x n. At n = 2000 and d = 64 each is 31 times larger than Q. Both
// are written once and read once, so for long sequences the traffic is that of S and P: 16 n^2 bytes, and the memory
// is 8 n^2 bytes that nobody asked for.
#include "ladder.h"

using namespace ladder;

static void standard_attention(const Floats& q, const Floats& k, const Floats& v, size_t n, size_t d, Floats& s,
                               Floats& p, Floats& o) {
  const float softmax_scale = 1 / std::sqrt(static_cast<float>(d));
  for (size_t i = 0; i < n; ++i) {  // S = Q K^T / sqrt(d)
    for (size_t j = 0; j < n; ++j) {
      float dot = 0;
      for (size_t c = 0; c < d; ++c) dot += q[i * d + c] * k[j * d + c];
      s[i * n + j] = dot * softmax_scale;
    }
  }
  for (size_t i = 0; i < n; ++i) {  // P = softmax(S). One row (8 KB) stays in the cache over the three passes
    const float* s_row = &s[i * n];
    float* p_row = &p[i * n];
    const float max = *std::max_element(s_row, s_row + n);
    float sum = 0;
    for (size_t j = 0; j < n; ++j) sum += p_row[j] = std::exp(s_row[j] - max);
    for (size_t j = 0; j < n; ++j) p_row[j] /= sum;
  }
  std::fill(o.begin(), o.end(), 0.0f);
  for (size_t i = 0; i < n; ++i) {  // O = P V
    for (size_t j = 0; j < n; ++j) {
      for (size_t c = 0; c < d; ++c) o[i * d + c] += p[i * n + j] * v[j * d + c];
    }
  }
}

int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, 2000), d = 64;
  std::printf("standard attention, n = %zu, d = %zu\n\n", n, d);

  const Floats q = normal(n * d, 1), k = normal(n * d, 2), v = normal(n * d, 3);
  Floats s(n * n), p(n * n), o(n * d);
  const double time = milliseconds([&] { standard_attention(q, k, v, n, d, s, p, o); });
  const double error = max_error(o, attention_float64(q, k, v, n, d));
  print_result("S and P in memory", error, time);

  // Counted as a small fast memory (a cache, a GPU's shared memory) sees it: a tile that is in use stays, a matrix does
  // not. Q, K and V are counted once; that flatters this rung.
  const double matrix = double(n) * double(n), input = double(n) * double(d);
  print_traffic("S = Q K^T", 2 * input, matrix);
  print_traffic("P = softmax(S)", matrix, matrix);
  print_traffic("O = P V", matrix + input, input);
  print_traffic("all", 2 * matrix + 3 * input, 2 * matrix + input);
  std::printf("memory   %.2f MB for S and P, next to %.2f MB of inputs and outputs; grows as n^2\n\n",
              megabytes(2 * matrix), megabytes(4 * input));

  double worst_sum = 0;
  for (size_t i = 0; i < n; ++i) {
    double sum = 0;
    for (size_t j = 0; j < n; ++j) sum += double(p[i * n + j]);
    worst_sum = std::max(worst_sum, std::fabs(sum - 1));
  }
  check(error < 1e-5, "O agrees with float64");
  check(worst_sum < 1e-5, "every row of P sums to 1");
  return exit_code();
}
