// From tensors and plan to the params of the kernels.
#pragma once
#include "core/plan.h"
#include "cuda/config_sm80.h"
#include "cuda/params.h"

namespace tilewise::cuda {

SequenceParams sequence_params(const tw_problem& problem, const tw_tensors& tensors);
ScoreParams score_params(const tw_problem& problem, const tw_tensors& tensors);
int64_t broadcast_stride(const tw_tensor& tensor, int dim);  // 0 where the dimension is 1
RowTensor row_tensor(const tw_tensor& tensor);    // [b, s, h, d], [total, h, d], or [pages, page_size, h, d]
RowScalar row_scalar(const tw_tensor* tensor);    // [b, h, s], [h, total]; nullptr: absent
bool rows_aligned(const tw_tensor& tensor);       // rows of whole 16-byte chunks, at multiples of 16 bytes
bool bias_copies(const ScoreParams& score);        // is there a bias whose rows can be copied 16 bytes at a time?
Element element_of(int32_t dtype);                // f16, bf16 or f32

// With a mask to the right blocks differ in length, and what ends a launch is a tail of the blocks that started last. So heads take turns, the
// longest block of each first: in sections of one size, of `most` heads at most.
int32_t heads_together(int64_t heads, double most);

}  // namespace tilewise::cuda
