// Rung 6. The backward pass without storing P: recompute it.
//
// The textbook keeps P [n, n] from the forward pass. It need not: P is one exp away from what is already there, if the
// forward pass keeps one number per row, the log-sum-exp lse_i = m_i + log(l_i):
//
//   P_ij = exp(S_ij - lse_i)
//
// With dO the gradient of O, delta_i = rowsum(dO * O) and scale = 1 / sqrt(d):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K      dK = scale dS^T Q
//
// delta_i stands for sum_j P_ij dP_ij, which the softmax derivative asks for: O = P V turns that sum over n keys into
// one over d columns. The price is one more product, Q K^T; the gain is memory that is linear in n, and less traffic.
#include "ladder.h"

using namespace ladder;

constexpr size_t kBlockM = 64, kBlockN = 128;

static float dot(const float* a, const float* b, size_t d) {
  float sum = 0;
  for (size_t c = 0; c < d; ++c) sum += a[c] * b[c];
  return sum;
}

static void add_scaled(float* y, float a, const float* x, size_t d) {
  for (size_t c = 0; c < d; ++c) y[c] += a * x[c];
}

// Rung 5 with block_m = 1 and block_n = 1, for brevity; new here: it returns lse, n floats.
static void forward(const Floats& q, const Floats& k, const Floats& v, size_t n, size_t d, Floats& o, Floats& lse) {
  const float softmax_scale = 1 / std::sqrt(static_cast<float>(d));
  std::fill(o.begin(), o.end(), 0.0f);
  for (size_t i = 0; i < n; ++i) {
    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    for (size_t j = 0; j < n; ++j) {
      const float s = dot(&q[i * d], &k[j * d], d) * softmax_scale;
      if (s > max) {
        const float rescale = std::exp(max - s);
        for (size_t c = 0; c < d; ++c) o[i * d + c] *= rescale;
        sum *= rescale;
        max = s;
      }
      const float p = std::exp(s - max);
      sum += p;
      add_scaled(&o[i * d], p, &v[j * d], d);
    }
    for (size_t c = 0; c < d; ++c) o[i * d + c] /= sum;
    lse[i] = max + std::log(sum);
  }
}

struct Gradients {
  Floats dq, dk, dv;
};

static Gradients backward(const Floats& q, const Floats& k, const Floats& v, const Floats& o, const Floats& lse,
                          const Floats& dout, size_t n, size_t d) {
  const float softmax_scale = 1 / std::sqrt(static_cast<float>(d));
  Gradients g{Floats(n * d), Floats(n * d), Floats(n * d)};
  Floats delta(n);
  for (size_t i = 0; i < n; ++i) delta[i] = dot(&dout[i * d], &o[i * d], d);

  // Keys outside, queries inside: a block of dK and dV is finished in one go and moves once; dQ comes back per block.
  for (size_t n0 = 0; n0 < n; n0 += kBlockN) {
    for (size_t m0 = 0; m0 < n; m0 += kBlockM) {
      for (size_t i = m0; i < std::min(m0 + kBlockM, n); ++i) {
        for (size_t j = n0; j < std::min(n0 + kBlockN, n); ++j) {
          const float s = dot(&q[i * d], &k[j * d], d) * softmax_scale;
          const float p = std::exp(s - lse[i]);  // no maximum, no sum: lse holds both
          const float dp = dot(&dout[i * d], &v[j * d], d);
          const float ds = p * (dp - delta[i]) * softmax_scale;
          add_scaled(&g.dv[j * d], p, &dout[i * d], d);
          add_scaled(&g.dk[j * d], ds, &q[i * d], d);
          add_scaled(&g.dq[i * d], ds, &k[j * d], d);
        }
      }
    }
  }
  return g;
}

// Slope of loss = sum(dO * O) along a direction in one of q, k, v, by a central difference in float64. It shares no
// formula with the code above, and a random direction tests every element of the gradient at once.
static double finite_difference(const Floats* inputs[3], int which, const Floats& direction, const Floats& dout,
                                size_t n, size_t d) {
  constexpr double kStep = 1e-5;  // error about kStep^2 from truncation and 1e-10 from rounding
  double loss[2] = {0, 0};
  for (int side = 0; side < 2; ++side) {
    Doubles x[3];
    for (int t = 0; t < 3; ++t) x[t].assign(inputs[t]->begin(), inputs[t]->end());
    for (size_t c = 0; c < n * d; ++c) x[which][c] += (side == 0 ? -kStep : kStep) * double(direction[c]);
    const Doubles o = attention_float64(x[0], x[1], x[2], n, d);
    for (size_t c = 0; c < n * d; ++c) loss[side] += double(dout[c]) * o[c];
  }
  return (loss[1] - loss[0]) / (2 * kStep);
}

int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, 500), d = 64;
  std::printf("forward and backward by recomputation, n = %zu, d = %zu\n\n", n, d);

  const Floats q = normal(n * d, 1), k = normal(n * d, 2), v = normal(n * d, 3), dout = normal(n * d, 4);
  Floats o(n * d), lse(n);
  Gradients g;
  const double forward_time = milliseconds([&] { forward(q, k, v, n, d, o, lse); });
  const double backward_time = milliseconds([&] { g = backward(q, k, v, o, lse, dout, n, d); });

  const Floats* inputs[3] = {&q, &k, &v};
  const Floats* gradients[3] = {&g.dq, &g.dk, &g.dv};
  const char* names[3] = {"dq", "dk", "dv"};
  double worst = 0;
  for (int which = 0; which < 3; ++which) {
    for (unsigned seed = 5; seed < 7; ++seed) {
      const Floats direction = normal(n * d, seed);
      double got = 0, norm = 0;
      for (size_t c = 0; c < n * d; ++c) {
        const double gradient = double((*gradients[which])[c]);
        got += gradient * double(direction[c]);
        norm += gradient * gradient;
      }
      const double expected = finite_difference(inputs, which, direction, dout, n, d);
      std::printf("slope    %s along a random direction: %12.6f, finite difference %12.6f\n", names[which], got,
                  expected);
      worst = std::max(worst, std::fabs(got - expected) / std::sqrt(norm));
    }
  }
  const double forward_error = max_error(o, attention_float64(q, k, v, n, d));
  print_result("forward", forward_error, forward_time);
  print_result("backward", worst, backward_time);

  // Standard: P is read twice, dP written and read, dS written and read twice. Tiled: per block of keys, Q, dO and dQ
  // pass by (dQ both ways) with lse and delta; K and V, dK and dV move once.
  const double matrix = double(n) * double(n), input = double(n) * double(d), row = double(n);
  const double num_n_blocks = double((n + kBlockN - 1) / kBlockN);
  print_traffic("tiled", num_n_blocks * (3 * input + 2 * row) + 4 * input, num_n_blocks * input + 2 * input);
  print_traffic("(standard, P kept)", 5 * matrix + 7 * input, 2 * matrix + 3 * input);
  std::printf("memory   %.3f MB for lse and delta; standard %.2f MB for P and dP\n\n", megabytes(2 * row),
              megabytes(2 * matrix));
  check(forward_error < 1e-5, "O agrees with float64");
  check(worst < 1e-5, "gradients agree with finite differences in float64");
  return exit_code();
}
