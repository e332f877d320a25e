// Rung 2. Safe softmax: subtract the maximum first.
//
//   m = max_j x_j        l = sum_j exp(x_j - m)        y_i = exp(x_i - m) / l
//
// Every exponent is at most 0, so nothing overflows, and the largest term is exp(0) = 1, so l >= 1 and the division
// is always defined. Terms that underflow to 0 really are negligible against that 1. The price is a third pass: m must
// be known before the first exp, so x is read once for m, once for l and once for y.
#include "ladder.h"

using namespace ladder;

// Three passes: x is read three times, y written once.
static void safe_softmax(const Floats& x, Floats& y) {
  float max = -std::numeric_limits<float>::infinity();
  for (float value : x) max = std::max(max, value);  // pass 1
  double sum = 0;
  for (float value : x) sum += std::exp(value - max);  // pass 2
  const float scale = static_cast<float>(1 / sum);
  for (size_t i = 0; i < x.size(); ++i) y[i] = std::exp(x[i] - max) * scale;  // pass 3
}

int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, size_t{1} << 22);
  std::printf("safe softmax of %zu logits\n\n", n);

  Floats y(n);
  const Floats x = normal(n, 1);
  const double time = milliseconds([&] { safe_softmax(x, y); });
  const double error = max_error(y, softmax_float64(x));
  print_result("logits around 0", error, time);
  print_traffic("3 passes", 3.0 * double(n), double(n));

  // What broke rung 1, and worse. The reference sees the same rounded float inputs, so the errors compare like with
  // like: only the arithmetic differs.
  double worst = 0;
  for (const float mean : {100.0f, -200.0f, 1e6f, -1e30f}) {
    const Floats shifted = normal(1000, 2, mean, 3);
    Floats y_small(1000);
    safe_softmax(shifted, y_small);
    const double shifted_error = max_error(y_small, softmax_float64(shifted));
    std::printf("shifted  logits around %-8g %25.1e error\n", double(mean), shifted_error);
    worst = std::max(worst, shifted_error);
  }

  // One logit of 1e12 among ordinary ones: its probability is 1 and all others are 0, exactly.
  Floats peaked = normal(1000, 3), y_peaked(1000);
  peaked[617] = 1e12f;
  safe_softmax(peaked, y_peaked);
  std::printf("peaked   one logit of 1e12: its probability is %g\n\n", double(y_peaked[617]));

  check(error < 2e-6, "moderate logits: as accurate as rung 1");
  check(worst < 2e-6, "logits of any size: no overflow, no NaN");
  check(y_peaked[617] == 1 && y_peaked[616] == 0, "one huge logit takes all of the probability");
  return exit_code();
}
