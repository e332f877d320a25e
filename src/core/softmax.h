// The online softmax in scalar form (Milakov and Gimelshein 2018), and the merge of partial results.
//
// State per row: the maximum m of the logits seen and the sum l of exp(s - m). A new maximum rescales what was summed
// before by exp(m_old - m_new). An empty row keeps m = -inf, l = 0; its output is 0 and its lse -inf. No finite number
// stands for minus infinity: logits of -1e30 are ordinary logits.
#pragma once
#include <cmath>

#include "core/host_device.h"

namespace tilewise {

template <class Real>
struct OnlineSoftmax {
  Real max = -static_cast<Real>(INFINITY);
  Real sum = 0;

  // Factor for everything accumulated so far, when logits up to new_max arrive. Never inf - inf.
  TW_HOST_DEVICE static Real rescale(Real old_max, Real new_max) {
    return old_max == new_max ? Real(1) : std::exp(old_max - new_max);
  }

  // Weight of a logit against the current maximum: 0 for a masked one, whatever the maximum.
  TW_HOST_DEVICE static Real weight(Real logit, Real max) {
    return logit == -static_cast<Real>(INFINITY) ? Real(0) : std::exp(logit - max);
  }

  // Takes one logit; returns the factor by which the weighted sum of values shrinks.
  TW_HOST_DEVICE Real push(Real logit) {
    const Real new_max = logit > max ? logit : max;
    const Real factor = rescale(max, new_max);
    sum = sum * factor + weight(logit, new_max);
    max = new_max;
    return factor;
  }

  TW_HOST_DEVICE void merge(const OnlineSoftmax& other) {
    const Real new_max = other.max > max ? other.max : max;
    sum = sum * rescale(max, new_max) + other.sum * rescale(other.max, new_max);
    max = new_max;
  }

  TW_HOST_DEVICE Real lse() const { return sum == 0 ? -static_cast<Real>(INFINITY) : max + std::log(sum); }
};

// Weights of two partial results with log-sum-exps a and b, and the log-sum-exp of both together.
template <class Real>
struct MergeWeights {
  Real weight_a, weight_b, lse;
};

template <class Real>
TW_HOST_DEVICE MergeWeights<Real> merge_weights(Real lse_a, Real lse_b) {
  const Real max = lse_a > lse_b ? lse_a : lse_b;
  if (max == -static_cast<Real>(INFINITY)) return {0, 0, max};  // both empty: o = 0, lse = -inf
  const Real a = std::exp(lse_a - max), b = std::exp(lse_b - max), sum = a + b;
  return {a / sum, b / sum, max + std::log(sum)};
}

}  // namespace tilewise
