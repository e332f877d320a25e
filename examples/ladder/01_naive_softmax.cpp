// Rung 1. Softmax as the textbook writes it, and why nobody computes it so.
//
//   y_i = exp(x_i) / sum_j exp(x_j)
//
// In exact arithmetic that is all there is. In float32 exp(x) overflows to inf at x = 88.73 and underflows to 0 at
// x = -103.98, so a row of large logits gives inf / inf and a row of very negative ones gives 0 / 0. Both are NaN,
// although the answer is an ordinary probability: softmax does not change when a constant is added to every logit.
#include "ladder.h"

using namespace ladder;

// Two passes: x is read twice, y written once.
static void naive_softmax(const Floats& x, Floats& y) {
  // The sum is a double: adding 4 million float terms in float would lose about three of seven digits.
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += std::exp(x[i]);  // pass 1
  for (size_t i = 0; i < x.size(); ++i) y[i] = std::exp(x[i]) / static_cast<float>(sum);  // pass 2
}

static size_t count_not_finite(const Floats& y) {
  return static_cast<size_t>(std::count_if(y.begin(), y.end(), [](float value) { return !std::isfinite(value); }));
}

int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, size_t{1} << 22);
  std::printf("naive softmax of %zu logits\n\n", n);

  const Floats x = normal(n, 1);
  Floats y(n);
  const double time = milliseconds([&] { naive_softmax(x, y); });
  const double error = max_error(y, softmax_float64(x));
  print_result("logits around 0", error, time);
  print_traffic("2 passes", 2.0 * double(n), double(n));

  // The same distribution, shifted. The right answer is the same as before.
  Floats overflow(1000), underflow(1000), y_small(1000);
  for (size_t i = 0; i < 1000; ++i) overflow[i] = x[i % n] + 100, underflow[i] = x[i % n] - 200;

  naive_softmax(overflow, y_small);
  const size_t bad_overflow = count_not_finite(y_small);
  // Every exp is inf, the sum is inf, and inf / inf is NaN.
  std::printf("lesson   logits around +100: exp(100) = %g in float32, %zu of 1000 results are not numbers\n",
              double(std::exp(100.0f)), bad_overflow);

  naive_softmax(underflow, y_small);
  const size_t bad_underflow = count_not_finite(y_small);
  std::printf("lesson   logits around -200: exp(-200) = %g in float32, %zu of 1000 results are not numbers\n\n",
              double(std::exp(-200.0f)), bad_underflow);

  check(error < 2e-6, "moderate logits: the textbook formula is accurate");
  check(bad_overflow == 1000, "large logits: it overflows (the failure that rung 2 repairs)");
  check(bad_underflow == 1000, "very negative logits: it divides 0 by 0");
  return exit_code();
}
