// From tensors and plan to the params of the kernels.
#pragma once
#include "core/plan.h"
#include "cuda/params.h"

namespace tilewise::cuda {

SequenceParams sequence_params(const tw_problem& problem, const tw_tensors& tensors);
ScoreParams score_params(const tw_problem& problem, const tw_tensors& tensors);
RowTensor row_tensor(const tw_tensor& tensor);    // [b, s, h, d], [total, h, d], or [pages, page_size, h, d]
RowScalar row_scalar(const tw_tensor* tensor);    // [b, h, s], [h, total]; nullptr: absent
bool rows_aligned(const tw_tensor& tensor);       // 16-byte aligned pointer, all strides multiples of 8 elements

}  // namespace tilewise::cuda
