// What softmax and merge_states ask of their tensors, on every backend.
#pragma once
#include <cstdint>

#include "core/status.h"

namespace tilewise {

// A float tensor on the device, of the wanted shape; 0 dimensions wanted: any shape.
struct RowTensorRule {
  int32_t device = TW_CPU, device_index = 0;
  bool output = false, float32_only = false;
  const int64_t* shape = nullptr;
  int ndim = 0;
};
Status check_row_tensor(const char* name, const tw_tensor& x, const RowTensorRule& rule);

Status check_softmax(const tw_tensor& x, const tw_tensor& y, const tw_tensor* lse);
Status check_merge_states(const tw_tensor& o, const tw_tensor& lse, const tw_tensor& o_other, const tw_tensor& lse_other);

}  // namespace tilewise
