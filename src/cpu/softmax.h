// Softmax on its own, the streaming accumulator, and the merge of partial results, for CPU tensors.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/status.h"

namespace tilewise {

Status softmax(const tw_tensor& x, tw_tensor& y, tw_tensor* lse, int num_threads,
               const tw_executor* executor = nullptr);
Status merge_states(tw_tensor& o, tw_tensor& lse, const tw_tensor& o_other, const tw_tensor& lse_other);

// Per row: running maximum, running sum, running weighted sum of value vectors. Logits and weights are float32; the
// sums are float64, because a float32 sum stands still after 2^24 equal logits, and a stream may be longer.
class Accumulator {
 public:
  static Status create(int64_t num_rows, int64_t value_dim, std::unique_ptr<Accumulator>* out);
  Status push(const tw_tensor& scores, const tw_tensor* values);
  Status merge(const Accumulator& from);
  Status lse(tw_tensor& out) const;
  Status result(tw_tensor& out) const;
  Status probabilities(const tw_tensor& scores, tw_tensor& out) const;

 private:
  int64_t num_rows_ = 0;
  int64_t value_dim_ = 0;
  std::vector<float> max_;            // [num_rows]
  std::vector<double> sum_, values_;  // [num_rows], [num_rows, value_dim]
};

}  // namespace tilewise
