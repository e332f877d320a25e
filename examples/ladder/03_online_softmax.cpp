// Rung 3. Online softmax: maximum and sum in one pass (Milakov and Gimelshein 2018).
//
// The sum needs the maximum of what has been seen so far, not the final one. Keep the state (m, l) with
// l = sum exp(x_j - m) over the x_j seen. When a larger x arrives, every term of l is too large by the same factor:
//
//   m' = max(m, x)        l' = l * exp(m - m') + exp(x - m')
//
// That saves the third pass. It also makes the state mergeable: two parts of a row, each with its own (m, l), combine
// in any order. Everything above this rung - tiles, threads, split keys, rings of devices - rests on that merge.
#include "ladder.h"

using namespace ladder;

struct OnlineSoftmax {
  float max = -std::numeric_limits<float>::infinity();  // empty: max = -inf, sum = 0
  double sum = 0;
  size_t num_rescales = 0;  // for the lesson only

  void push(float x) {
    if (x > max) {
      sum = sum * std::exp(max - x) + 1;  // the first push: 0 * exp(-inf) + 1
      max = x;
      ++num_rescales;
    } else if (x > -std::numeric_limits<float>::infinity()) {  // -inf weighs nothing, and -inf - -inf is NaN
      sum += std::exp(x - max);
    }
  }

  void merge(const OnlineSoftmax& other) {
    if (other.sum == 0) return;  // an empty part leaves the other unchanged
    const float new_max = std::max(max, other.max);
    sum = sum * std::exp(max - new_max) + other.sum * std::exp(other.max - new_max);
    max = new_max;
  }

  double lse() const { return max + std::log(sum); }  // log(sum exp(x)), finite where the sum itself would not be
};

static OnlineSoftmax max_and_sum(const float* x, size_t n) {
  OnlineSoftmax state;
  for (size_t i = 0; i < n; ++i) state.push(x[i]);
  return state;
}

// Two passes: x is read twice, y written once, as in rung 1 but safe.
static void online_softmax(const Floats& x, Floats& y) {
  const OnlineSoftmax state = max_and_sum(x.data(), x.size());  // pass 1
  const float scale = static_cast<float>(1 / state.sum);
  for (size_t i = 0; i < x.size(); ++i) y[i] = std::exp(x[i] - state.max) * scale;  // pass 2
}

int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, size_t{1} << 22);
  std::printf("online softmax of %zu logits\n\n", n);

  Floats x = normal(n, 1), y(n);
  const double time = milliseconds([&] { online_softmax(x, y); });
  const double error = max_error(y, softmax_float64(x));
  print_result("2 passes", error, time);
  print_traffic("2 passes", 2.0 * double(n), double(n));
  print_traffic("(rung 2: 3 passes)", 3.0 * double(n), double(n));

  // In random order a new maximum is rare: about ln(n) times. Growing logits are the worst case: every one.
  const OnlineSoftmax whole = max_and_sum(x.data(), n);
  OnlineSoftmax growing;
  for (size_t i = 0; i < n; ++i) growing.push(static_cast<float>(i) * 1e-5f);
  std::printf("rescales %zu of %zu in random order (ln n = %.1f), %zu when the logits grow\n", whole.num_rescales, n,
              std::log(double(n)), growing.num_rescales);

  // Two halves, each blind to the other, in both orders; the second half is shifted so that its maximum is far away.
  for (size_t i = n / 2; i < n; ++i) x[i] += 500;
  const OnlineSoftmax shifted = max_and_sum(x.data(), n);
  const OnlineSoftmax left = max_and_sum(x.data(), n / 2), right = max_and_sum(x.data() + n / 2, n - n / 2);
  OnlineSoftmax left_right = left, right_left = right, with_empty = left;
  left_right.merge(right);
  right_left.merge(left);
  with_empty.merge(OnlineSoftmax{});
  OnlineSoftmax from_empty;
  from_empty.merge(left);
  std::printf("merge    lse: left %.6f, right %.6f, merged %.6f, all at once %.6f\n\n", left.lse(), right.lse(),
              left_right.lse(), shifted.lse());

  check(error < 2e-6, "one pass less than rung 2, the same accuracy");
  check(std::fabs(left_right.lse() - shifted.lse()) < 1e-9 * shifted.lse(), "two halves merge into the whole");
  check(left_right.sum == right_left.sum && left_right.max == right_left.max, "the order of a merge does not matter");
  check(with_empty.sum == left.sum && from_empty.sum == left.sum, "an empty part changes nothing");
  return exit_code();
}
