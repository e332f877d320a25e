#include "core/row_tensors.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/validate.h"

namespace tilewise {
Status check_row_tensor(const char* name, const tw_tensor& x, const RowTensorRule& rule) {
  if (rule.device == TW_CPU && x.device != TW_CPU) return invalid(name, ": device ", x.device, ", must be on the CPU (0)");
  if (x.device != rule.device || x.device_index != rule.device_index)
    return invalid(name, ": device ", x.device, ":", x.device_index, ", must be that of the first tensor, ", rule.device, ":",
                   rule.device_index);
  if (rule.float32_only ? x.dtype != TW_FLOAT32 : !is_float(x.dtype))
    return invalid(name, ": dtype ", dtype_name(x.dtype), ", must be ", rule.float32_only ? "f32" : "f32, f16, bf16 or f64");
  if (x.ndim < 1 || x.ndim > TW_MAX_DIMS) return invalid(name, ": ndim ", x.ndim, ", must be 1 to ", TW_MAX_DIMS);
  bool any = true;  // elements
  for (int n = 0; n < x.ndim; ++n) {
    if (x.shape[n] < 0) return invalid(name, ": shape ", list_text(x.shape, x.ndim), ", must not be negative");
    any &= x.shape[n] != 0;
  }
  if (any && x.data == nullptr) return invalid(name, ": data is NULL, must point to ", list_text(x.shape, x.ndim));
  for (int n = 0; n < x.ndim; ++n)
    if (any && rule.output && x.shape[n] > 1 && x.stride[n] == 0)
      return invalid(name, ": stride 0 in dimension ", n, " of ", x.shape[n], " elements, must not be 0 in an output");
  if (rule.shape != nullptr && (x.ndim != rule.ndim || !std::equal(rule.shape, rule.shape + rule.ndim, x.shape)))
    return invalid(name, ": shape ", list_text(x.shape, x.ndim), ", must be ", list_text(rule.shape, rule.ndim));
  return Status();
}

Status check_softmax(const tw_tensor& x, const tw_tensor& y, const tw_tensor* lse) {
  TW_RETURN_IF_ERROR(check_row_tensor("x", x, {x.device, x.device_index}));
  TW_RETURN_IF_ERROR(check_row_tensor("y", y, {x.device, x.device_index, true, false, x.shape, x.ndim}));
  const int rows_ndim = x.ndim - 1;  // 0: one row, and lse has a single element
  const int64_t one = 1;
  if (lse)
    TW_RETURN_IF_ERROR(check_row_tensor(
        "lse", *lse, {x.device, x.device_index, true, true, rows_ndim ? x.shape : &one, rows_ndim ? rows_ndim : 1}));
  if (x.data == y.data && x.data != nullptr && (x.dtype != y.dtype || !std::equal(x.stride, x.stride + x.ndim, y.stride)))
    return invalid("y: the same memory as x with another dtype or other strides, must have x's dtype ", dtype_name(x.dtype),
                   " and strides to work in place");
  return Status();
}

Status check_merge_states(const tw_tensor& o, const tw_tensor& lse, const tw_tensor& o_other, const tw_tensor& lse_other) {
  TW_RETURN_IF_ERROR(check_row_tensor("o", o, {o.device, o.device_index, true}));
  if (o.ndim < 3) return invalid("o: ndim ", o.ndim, ", must be 4 [b, sq, hq, dv] or 3 [total, hq, dv]");
  TW_RETURN_IF_ERROR(check_row_tensor("o_other", o_other, {o.device, o.device_index, false, false, o.shape, o.ndim}));
  const bool packed = o.ndim == 3;
  const int64_t lse_shape[3] = {packed ? 1 : o.shape[0], o.shape[o.ndim - 2], o.shape[o.ndim - 3]};
  TW_RETURN_IF_ERROR(check_row_tensor("lse", lse, {o.device, o.device_index, true, true, lse_shape + packed, o.ndim - 1}));
  return check_row_tensor("lse_other", lse_other, {o.device, o.device_index, false, true, lse_shape + packed, o.ndim - 1});
}

}  // namespace tilewise
