// tw_tensor_from_dlpack. The layout of DLTensor (DLPack 1.x, stable since 0.x) is declared here: no header is needed.
#include <cstdint>

#include "api/guard.h"

namespace tilewise {
namespace {

struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // may be NULL: compact, row-major
  uint64_t byte_offset;
};
enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

int32_t dtype_of(const DLDataType& type) {
  if (type.lanes != 1) return -1;
  if (type.code == kDLFloat) return type.bits == 32 ? TW_FLOAT32 : type.bits == 16 ? TW_FLOAT16 : type.bits == 64 ? TW_FLOAT64 : -1;
  if (type.code == kDLBfloat) return type.bits == 16 ? TW_BFLOAT16 : -1;
  if (type.code == kDLInt) return type.bits == 32 ? TW_INT32 : type.bits == 64 ? TW_INT64 : -1;
  if (type.code == kDLBool || type.code == kDLUInt) return type.bits == 8 ? TW_BOOL : -1;
  return -1;
}

Status from_dlpack(const DLTensor* in, tw_tensor* out) {
  if (in == nullptr) return invalid("dl_tensor: NULL, must be a DLTensor*");
  if (out == nullptr) return invalid("out: NULL, must point to a tw_tensor");
  tw_tensor tensor{};
  tensor.dtype = dtype_of(in->dtype);
  if (tensor.dtype < 0)
    return invalid("dl_tensor: dtype code ", int{in->dtype.code}, " bits ", int{in->dtype.bits}, " lanes ", in->dtype.lanes,
                   ": must be float16/32/64, bfloat16, int32/64 or bool");
  switch (in->device.device_type) {
    case kDLCPU: case kDLCUDAHost: tensor.device = TW_CPU; break;
    case kDLCUDA: case kDLCUDAManaged: tensor.device = TW_CUDA; tensor.device_index = in->device.device_id; break;
    default: return invalid("dl_tensor: device type ", in->device.device_type, ": must be CPU (1) or CUDA (2)");
  }
  if (in->ndim < 1 || in->ndim > TW_MAX_DIMS)
    return invalid("dl_tensor: ", in->ndim, " dimensions: must be 1 to ", TW_MAX_DIMS);
  tensor.ndim = in->ndim;
  tensor.data = static_cast<char*>(in->data) + in->byte_offset;
  int64_t stride = 1;
  for (int n = in->ndim - 1; n >= 0; --n) {
    tensor.shape[n] = in->shape[n];
    tensor.stride[n] = in->strides ? in->strides[n] : stride;
    stride *= in->shape[n];
  }
  *out = tensor;
  return Status();
}

}  // namespace
}  // namespace tilewise

extern "C" tw_status tw_tensor_from_dlpack(const void* dl_tensor, tw_tensor* out) {
  return tilewise::guarded([&] { return tilewise::from_dlpack(static_cast<const tilewise::DLTensor*>(dl_tensor), out); });
}
