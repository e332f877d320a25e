// What the reference's two passes share: the score of a pair and its mask, rows as doubles, the worker's memory.
#pragma once
#include <algorithm>
#include <cmath>

#include "core/dropout.h"
#include "core/dtype.h"
#include "core/mask.h"
#include "core/plan.h"
#include "core/sequence.h"
#include "core/softmax.h"

namespace tilewise::reference {

inline constexpr double kInfinity = INFINITY;

// Elements [offset, offset + n) of a tensor whose last dimension is contiguous.
inline void load_row(const tw_tensor& x, int64_t offset, int64_t n, double* out) {
  const auto convert = [&](auto* data, auto&& to_double) {
    for (int64_t c = 0; c < n; ++c) out[c] = to_double(data[offset + c]);
  };
  switch (x.dtype) {
    case TW_FLOAT32: return convert(static_cast<const float*>(x.data), [](float value) { return value; });
    case TW_FLOAT64: return convert(static_cast<const double*>(x.data), [](double value) { return value; });
    case TW_FLOAT16: return convert(static_cast<const uint16_t*>(x.data), f16_to_float);
    default: return convert(static_cast<const uint16_t*>(x.data), bf16_to_float);
  }
}

inline void store_row(const tw_tensor& x, int64_t offset, int64_t n, const double* row) {
  for (int64_t c = 0; c < n; ++c) store_element(x.data, x.dtype, offset + c, row[c]);
}

// Every element of a tensor of any strides.
inline void fill(const tw_tensor& x, double value) {
  int64_t shape[TW_MAX_DIMS] = {1, 1, 1, 1}, stride[TW_MAX_DIMS] = {};
  std::copy_n(x.shape, x.ndim, shape);
  std::copy_n(x.stride, x.ndim, stride);
  for (int64_t a = 0; a < shape[0]; ++a)
    for (int64_t b = 0; b < shape[1]; ++b)
      for (int64_t c = 0; c < shape[2]; ++c)
        for (int64_t d = 0; d < shape[3]; ++d)
          store_element(x.data, x.dtype, a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3], value);
}

inline double dot(const double* a, const double* b, int64_t n) {
  double part[8] = {};  // eight sums, for the compiler to keep in vectors
  int64_t c = 0;
  for (; c + 8 <= n; c += 8)
    for (int lane = 0; lane < 8; ++lane) part[lane] += a[c + lane] * b[c + lane];
  for (; c < n; ++c) part[0] += a[c] * b[c];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

inline void add_scaled(double factor, const double* row, int64_t n, double* sum) {  // sum += factor * row
  for (int64_t c = 0; c < n; ++c) sum[c] += factor * row[c];
}

// The call, with its options resolved.
struct Call {
  const tw_problem& p;
  const tw_tensors& t;
  double scale;
  Mask mask;
  Dropout dropout;
  double dropout_scale;  // of a kept weight: 1 / (1 - p)

  Call(const tw_problem& problem, const tw_tensors& tensors)
      : p(problem), t(tensors), scale(softmax_scale_of(problem)), mask(mask_of(problem)) {
    uint64_t seed = p.dropout_seed, offset = p.dropout_offset;
    if (t.rng_state) {
      const auto* state = static_cast<const int64_t*>(t.rng_state->data);
      seed = static_cast<uint64_t>(state[0]);
      offset = static_cast<uint64_t>(state[t.rng_state->stride[0]]);
    }
    dropout = Dropout::make(p.dropout_p, seed, offset);
    dropout_scale = dropout.active() ? 1 / (1 - p.dropout_p) : 1;
  }

  int64_t key_head(int64_t h) const { return h / group_size(p); }

  // Beyond the range of Mask::keys: does a boolean bias hide key j? What is hidden is skipped, never multiplied by 0.
  bool visible(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    return t.bias == nullptr || t.bias->dtype != TW_BOOL ||
           load_element(t.bias->data, TW_BOOL, bias_offset(*t.bias, s.batch, h, i, j)) != 0;
  }

  // scale * (q . k), softcapped.
  double capped(double q_dot_k) const {
    const double score = scale * q_dot_k;
    return p.softcap > 0 ? p.softcap * std::tanh(score / p.softcap) : score;
  }

  // d capped / d (scale * (q . k)), from its value: the derivative of tanh is 1 - tanh^2.
  double capped_derivative(double capped) const {
    if (!(p.softcap > 0)) return 1;
    const double tangent = capped / p.softcap;
    return 1 - tangent * tangent;
  }

  static double distance(const Sequence& s, int64_t i, int64_t j) {  // |i + sk - sq - j|
    return std::abs(static_cast<double>(i + s.seqlen_k - s.seqlen_q - j));
  }

  // What is added after the cap.
  double added(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    double sum = 0;
    if (t.alibi_slopes) {
      const double slope = load_element(t.alibi_slopes->data, TW_FLOAT32, alibi_offset(*t.alibi_slopes, s.batch, h));
      sum -= slope * distance(s, i, j);
    }
    if (t.bias && t.bias->dtype != TW_BOOL)
      sum += load_element(t.bias->data, t.bias->dtype, bias_offset(*t.bias, s.batch, h, i, j));
    return sum;
  }

  double sink(int64_t h) const {  // -inf: none
    return t.sink ? load_element(t.sink->data, TW_FLOAT32, h * t.sink->stride[0]) : -kInfinity;
  }

  // Factor that dropout puts on the weight of (i, j): 0 or 1 / (1 - p).
  double dropout_factor(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    if (!dropout.active()) return 1;
    return dropout.keep(s.batch * p.num_heads_q + h, i, j) ? dropout_scale : 0;
  }
  // x after dropout: a dropped one is 0, whatever it was.
  static double after_dropout(double factor, double x) { return factor == 0 ? 0 : factor * x; }
};

// A workspace cut into arrays of doubles, in the order of the calls; with no memory behind it, it counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<double*>(memory)) {}
  double* take(int64_t n) {
    double* const array = memory_ ? memory_ + used_ : nullptr;
    used_ += (n + 7) / 8 * 8;  // cache lines of their own
    return array;
  }
  int64_t used() const { return used_; }  // doubles

 private:
  double* memory_;
  int64_t used_ = 0;
};

int64_t forward_workspace(const tw_problem& problem, int num_workers);  // doubles
int64_t backward_workspace(const tw_problem& problem, int num_workers);
void forward(const Plan& plan, const tw_tensors& tensors, void* workspace);
void backward(const Plan& plan, const tw_tensors& tensors, void* workspace);

}  // namespace tilewise::reference
