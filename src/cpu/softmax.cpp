#include "cpu/softmax.h"

#include <cmath>

#include "core/row_tensors.h"
#include "core/softmax.h"
#include "cpu/row_block.h"
#include "cpu/thread_pool.h"

namespace tilewise {
namespace {

using Online = OnlineSoftmax<double>;

const RowFunctions& row_functions() {
  static const RowFunctions functions = choose_row_functions();
  return functions;
}

Status check(const char* name, const tw_tensor& x, bool output, const int64_t* shape = nullptr, int ndim = 0,
             bool float32_only = false) {
  return check_row_tensor(name, x, {TW_CPU, 0, output, float32_only, shape, ndim});
}

// Element offset of row r, counted over all dimensions of `shape` (the strides may be those of another tensor).
int64_t row_offset(const int64_t* shape, const int64_t* stride, int ndim, int64_t r) {
  int64_t offset = 0;
  for (int n = ndim - 1; n >= 0; --n) {
    offset += r % shape[n] * stride[n];
    r /= shape[n];
  }
  return offset;
}

// One row: the first sweep keeps maximum and sum, rescaling the sum when a block brings a larger maximum. A row of one
// block is exponentiated once; of a longer one, each block is read again, for the most part from cache.
template <class Real>
float softmax_row(const tw_tensor& x, int64_t x_offset, const tw_tensor& y, int64_t y_offset) {
  constexpr int64_t kSize = RowBlock<Real>::kSize;
  const int64_t n = x.shape[x.ndim - 1], x_stride = x.stride[x.ndim - 1], y_stride = y.stride[y.ndim - 1];
  RowBlock<Real> block(row_functions());
  Real max = -static_cast<Real>(INFINITY);
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kSize) {
    block.load(x, x_offset + begin * x_stride, x_stride, std::min(kSize, n - begin));
    const Real new_max = std::max(max, block.max());
    sum = sum * Online::rescale(max, new_max) + block.exponentiate(new_max);
    max = new_max;
  }
  const Real factor = static_cast<Real>(sum == 0 ? 0 : 1 / sum);
  if (n <= kSize) {
    block.store(y, y_offset, y_stride, factor);
  } else {
    for (int64_t begin = 0; begin < n; begin += kSize) {
      block.load(x, x_offset + begin * x_stride, x_stride, std::min(kSize, n - begin));
      block.exponentiate(max);
      block.store(y, y_offset + begin * y_stride, y_stride, factor);
    }
  }
  return static_cast<float>(sum == 0 ? -INFINITY : static_cast<double>(max) + std::log(sum));
}

}  // namespace

Status softmax(const tw_tensor& x, tw_tensor& y, tw_tensor* lse, int num_threads, const tw_executor* executor) {
  TW_RETURN_IF_ERROR(check("x", x, false));
  TW_RETURN_IF_ERROR(check_softmax(x, y, lse));
  const int rows_ndim = x.ndim - 1;

  int64_t num_rows = 1;
  for (int n = 0; n < rows_ndim; ++n) num_rows *= x.shape[n];
  const int64_t rows_per_task = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, x.shape[rows_ndim]));  // about 20 us
  parallel_for(executor, num_threads, (num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task, int) {
    const int64_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (int64_t r = task * rows_per_task; r < end; ++r) {
      const int64_t x_offset = row_offset(x.shape, x.stride, rows_ndim, r),
                    y_offset = row_offset(x.shape, y.stride, rows_ndim, r);
      const float row_lse = x.dtype == TW_FLOAT64 ? softmax_row<double>(x, x_offset, y, y_offset)
                                                  : softmax_row<float>(x, x_offset, y, y_offset);
      if (lse) static_cast<float*>(lse->data)[row_offset(x.shape, lse->stride, rows_ndim, r)] = row_lse;
    }
  });
  return Status();
}

Status merge_states(tw_tensor& o, tw_tensor& lse, const tw_tensor& o_other, const tw_tensor& lse_other) {
  TW_RETURN_IF_ERROR(check("o", o, true));
  TW_RETURN_IF_ERROR(check_merge_states(o, lse, o_other, lse_other));
  const bool packed = o.ndim == 3;
  const int64_t batch = packed ? 1 : o.shape[0], rows = o.shape[o.ndim - 3], heads = o.shape[o.ndim - 2];

  const auto offset = [&](const tw_tensor& x, int64_t b, int64_t i, int64_t h, bool is_lse) {
    const int64_t* stride = x.stride + !packed;
    return (packed ? 0 : b * x.stride[0]) + (is_lse ? h * stride[0] + i * stride[1] : i * stride[0] + h * stride[1]);
  };
  const int64_t dim = o.shape[o.ndim - 1], stride = o.stride[o.ndim - 1], stride_other = o_other.stride[o.ndim - 1];
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        float& row_lse = static_cast<float*>(lse.data)[offset(lse, b, i, h, true)];
        const float row_lse_other = static_cast<const float*>(lse_other.data)[offset(lse_other, b, i, h, true)];
        const int64_t at = offset(o, b, i, h, false), at_other = offset(o_other, b, i, h, false);
        const MergeWeights<float> merged = merge_weights(row_lse, row_lse_other);
        const bool empty = row_lse == -INFINITY, empty_other = row_lse_other == -INFINITY;
        row_lse = merged.lse;
        if (empty_other && !empty) continue;
        for (int64_t c = 0; c < dim; ++c) {  // an empty part takes no part at all: its o may hold anything
          const float mine = empty ? 0 : static_cast<float>(load_element(o.data, o.dtype, at + c * stride));
          const float other =
              empty_other ? 0
                          : static_cast<float>(load_element(o_other.data, o_other.dtype, at_other + c * stride_other));
          const float sum = empty ? other : merged.weight_a * mine + merged.weight_b * other;
          store_element(o.data, o.dtype, at + c * stride, sum);
        }
      }
  return Status();
}

Status Accumulator::create(int64_t num_rows, int64_t value_dim, std::unique_ptr<Accumulator>* out) {
  if (num_rows < 0) return invalid("num_rows: ", num_rows, ", must be >= 0");
  if (value_dim < 0) return invalid("value_dim: ", value_dim, ", must be >= 0");
  if (value_dim > 0 && num_rows > INT64_MAX / 8 / value_dim)
    return invalid("num_rows * value_dim: ", num_rows, " * ", value_dim, ", must fit into memory");
  auto accumulator = std::make_unique<Accumulator>();
  accumulator->num_rows_ = num_rows;
  accumulator->value_dim_ = value_dim;
  accumulator->max_.assign(static_cast<size_t>(num_rows), -INFINITY);
  accumulator->sum_.assign(static_cast<size_t>(num_rows), 0);
  accumulator->values_.assign(static_cast<size_t>(num_rows * value_dim), 0);
  *out = std::move(accumulator);
  return Status();
}

Status Accumulator::push(const tw_tensor& scores, const tw_tensor* values) {
  const int64_t n = scores.ndim == 2 ? scores.shape[1] : 0;
  const int64_t scores_shape[2] = {num_rows_, n};
  TW_RETURN_IF_ERROR(check("scores", scores, false, scores_shape, 2));
  if ((values != nullptr) != (value_dim_ > 0))
    return invalid("values: ", values ? "given" : "NULL", ", must be ", value_dim_ > 0 ? "given" : "NULL",
                   " with value_dim ", value_dim_);
  const bool per_row = values && values->ndim == 3;
  if (values) {
    const int64_t values_shape[3] = {num_rows_, n, value_dim_};
    TW_RETURN_IF_ERROR(check("values", *values, false, values_shape + !per_row, per_row ? 3 : 2));
  }

  RowBlock<float> block(row_functions());
  for (int64_t r = 0; r < num_rows_; ++r) {
    double* const sums = values_.data() + r * value_dim_;
    for (int64_t begin = 0; begin < n; begin += block.kSize) {
      const int64_t scores_at = r * scores.stride[0] + begin * scores.stride[1];
      block.load(scores, scores_at, scores.stride[1], std::min(block.kSize, n - begin));
      const float new_max = std::max(max_[r], block.max());
      const double factor = Online::rescale(max_[r], new_max);
      sum_[r] = sum_[r] * factor + block.exponentiate(new_max);
      max_[r] = new_max;
      if (!values) continue;
      for (int64_t c = 0; c < value_dim_; ++c) sums[c] *= factor;
      for (int64_t k = 0; k < block.size; ++k) {
        // A logit of -inf is masked: its value takes no part, whatever it holds.
        if (load_element(scores.data, scores.dtype, scores_at + k * scores.stride[1]) == -INFINITY) continue;
        const int64_t* stride = values->stride + per_row;
        const int64_t at = (per_row ? r * values->stride[0] : 0) + (begin + k) * stride[0];
        for (int64_t c = 0; c < value_dim_; ++c)
          sums[c] +=
              static_cast<double>(block.values[k]) * load_element(values->data, values->dtype, at + c * stride[1]);
      }
    }
  }
  return Status();
}

Status Accumulator::merge(const Accumulator& from) {
  if (from.num_rows_ != num_rows_)
    return invalid("from: num_rows ", from.num_rows_, ", must be ", num_rows_, " as in into");
  if (from.value_dim_ != value_dim_)
    return invalid("from: value_dim ", from.value_dim_, ", must be ", value_dim_, " as in into");
  for (int64_t r = 0; r < num_rows_; ++r) {
    const float new_max = std::max(max_[r], from.max_[r]);
    const double factor = Online::rescale(max_[r], new_max), factor_from = Online::rescale(from.max_[r], new_max);
    for (int64_t c = r * value_dim_; c < (r + 1) * value_dim_; ++c)
      values_[c] = values_[c] * factor + from.values_[c] * factor_from;
    sum_[r] = sum_[r] * factor + from.sum_[r] * factor_from;
    max_[r] = new_max;
  }
  return Status();
}

Status Accumulator::lse(tw_tensor& out) const {
  TW_RETURN_IF_ERROR(check("lse", out, true, &num_rows_, 1, true));
  for (int64_t r = 0; r < num_rows_; ++r)
    store_element(out.data, out.dtype, r * out.stride[0], OnlineSoftmax<double>{max_[r], sum_[r]}.lse());
  return Status();
}

Status Accumulator::result(tw_tensor& out) const {
  const int64_t shape[2] = {num_rows_, value_dim_};
  TW_RETURN_IF_ERROR(check("result", out, true, shape, 2));
  for (int64_t r = 0; r < num_rows_; ++r)
    for (int64_t c = 0; c < value_dim_; ++c)
      store_element(out.data, out.dtype, r * out.stride[0] + c * out.stride[1],
                    sum_[r] == 0 ? 0 : values_[r * value_dim_ + c] / sum_[r]);
  return Status();
}

Status Accumulator::probabilities(const tw_tensor& scores, tw_tensor& out) const {
  const int64_t shape[2] = {num_rows_, scores.ndim == 2 ? scores.shape[1] : 0};
  TW_RETURN_IF_ERROR(check("scores", scores, false, shape, 2));
  TW_RETURN_IF_ERROR(check("probabilities", out, true, shape, 2));
  RowBlock<float> block(row_functions());
  for (int64_t r = 0; r < num_rows_; ++r)
    for (int64_t begin = 0; begin < shape[1]; begin += block.kSize) {
      block.load(scores, r * scores.stride[0] + begin * scores.stride[1], scores.stride[1],
                 std::min(block.kSize, shape[1] - begin));
      block.exponentiate(max_[r]);
      block.store(out, r * out.stride[0] + begin * out.stride[1], out.stride[1],
                  static_cast<float>(sum_[r] == 0 ? 0 : 1 / sum_[r]));
    }
  return Status();
}

}  // namespace tilewise
