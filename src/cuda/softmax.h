// softmax and merge_states for CUDA tensors: core/row_tensors.h has checked them, nothing here waits or allocates.
#pragma once
#include "core/status.h"

namespace tilewise::cuda {

Status softmax(const tw_tensor& x, const tw_tensor& y, const tw_tensor* lse, void* stream);
Status merge_states(const tw_tensor& o, const tw_tensor& lse, const tw_tensor& o_other, const tw_tensor& lse_other, void* stream);

}  // namespace tilewise::cuda
