#include "cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/dtype.h"
#include "cuda/device.h"
#include "cuda/fill_params.h"

namespace tilewise::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that the library does not link against the driver.
Status encode_function(Encode* encode) {
  static std::atomic<void*> found{nullptr};
  void* function = found.load(std::memory_order_relaxed);
  if (function == nullptr) {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || function == nullptr) {
      cudaGetLastError();
      return unsupported("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12.0");
    }
    found.store(function, std::memory_order_relaxed);
  }
  *encode = reinterpret_cast<Encode>(function);
  return Status();
}

struct Key {  // everything that enters a map; compared as bytes, so every member is set and there is no padding
  uint64_t data;
  uint64_t size[5];
  uint64_t stride[4];
  uint32_t box[4];  // columns, rows, and the next two dimensions
  uint32_t type, swizzle;
};

Key make_key(const TensorMapRequest& request) {
  const tw_tensor& x = *request.tensor;
  const bool dense = x.ndim == 4;
  const int row = dense ? 1 : 0, head = row + 1;
  Key key = {};
  key.data = reinterpret_cast<uint64_t>(x.data);
  const bool panels = request.box_panels > 1;  // else columns are counted through, as if all were one panel
  key.size[0] = static_cast<uint64_t>(panels ? 64 : request.head_dim);
  key.size[1] = static_cast<uint64_t>(x.shape[row]);
  key.size[2] = static_cast<uint64_t>(panels ? request.head_dim / 64 : 1);
  key.size[3] = static_cast<uint64_t>(x.shape[head]);
  key.size[4] = static_cast<uint64_t>(dense ? x.shape[0] : 1);
  // The stride of a dimension of size 1 is never used, and may be anything: give it a valid value.
  const auto bytes = [&](int dim) { return x.shape[dim] == 1 ? uint64_t{16} : static_cast<uint64_t>(x.stride[dim]) * 2; };
  key.stride[0] = bytes(row);
  key.stride[1] = 128;
  key.stride[2] = bytes(head);
  key.stride[3] = dense ? bytes(0) : 16;
  key.box[0] = 64;
  key.box[1] = static_cast<uint32_t>(request.box_rows);
  key.box[2] = static_cast<uint32_t>(request.box_panels);
  key.box[3] = 1;
  if (request.box_heads > 0) {
    std::swap(key.size[2], key.size[3]), std::swap(key.stride[1], key.stride[2]);
    key.box[3] = key.box[2], key.box[2] = static_cast<uint32_t>(request.box_heads);
  }
  key.type = x.dtype == TW_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  key.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  return key;
}

Key make_bias_key(const tw_problem& p, const BiasMapRequest& request) {
  const tw_tensor& bias = *request.bias;
  const int64_t bytes = dtype_size(bias.dtype), sizes[5] = {p.seqlen_k, p.seqlen_q, 1, p.num_heads_q, p.batch};
  Key key = {};
  key.data = reinterpret_cast<uint64_t>(bias.data);
  for (int n = 0; n < 5; ++n) key.size[n] = static_cast<uint64_t>(sizes[n]);
  key.stride[0] = static_cast<uint64_t>(broadcast_stride(bias, 2) * bytes);
  key.stride[1] = 16;
  key.stride[2] = static_cast<uint64_t>(broadcast_stride(bias, 1) * bytes);
  key.stride[3] = static_cast<uint64_t>(broadcast_stride(bias, 0) * bytes);
  key.box[0] = static_cast<uint32_t>(request.box_keys), key.box[1] = static_cast<uint32_t>(request.box_rows), key.box[2] = key.box[3] = 1;
  key.type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  switch (request.box_keys * bytes) {
    case 128: key.swizzle = CU_TENSOR_MAP_SWIZZLE_128B; break;
    case 64: key.swizzle = CU_TENSOR_MAP_SWIZZLE_64B; break;
    case 32: key.swizzle = CU_TENSOR_MAP_SWIZZLE_32B; break;
    default: key.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  }
  return key;
}

uint64_t hash(const Key& key) {
  uint64_t words[sizeof(Key) / 8], x = 0;
  std::memcpy(words, &key, sizeof key);
  for (uint64_t word : words) {
    x = (x ^ word) * 0x9E3779B97F4A7C15ull;
    x ^= x >> 32;
  }
  return x;
}

struct Entry {
  Key key;
  CUtensorMap map;
  bool used;
};

Status encode_once(const Key& key, CUtensorMap* map) {
  constexpr size_t kEntries = 64;
  static thread_local std::array<Entry, kEntries> entries{};
  Entry& entry = entries[hash(key) % kEntries];
  if (!entry.used || std::memcmp(&entry.key, &key, sizeof key) != 0) {
    Encode encode = nullptr;
    TW_RETURN_IF_ERROR(encode_function(&encode));
    const cuuint32_t box[5] = {key.box[0], key.box[1], key.box[2], key.box[3], 1}, steps[5] = {1, 1, 1, 1, 1};
    entry.used = false;
    // L2 promotion to 256 bytes costs a tenth of the bandwidth from device memory (4.2 of 4.7 TB/s); 128 costs nothing.
    const CUresult result =
        encode(&entry.map, static_cast<CUtensorMapDataType>(key.type), 5, reinterpret_cast<void*>(key.data), key.size, key.stride, box,
               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(key.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return unsupported("cuTensorMapEncodeTiled: error ", static_cast<int>(result));
    entry.key = key;
    entry.used = true;
  }
  *map = entry.map;
  return Status();
}

}  // namespace

bool tensor_map_possible(const tw_tensor& x) {
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0 || x.stride[x.ndim - 1] != 1) return false;
  for (int n = 0; n + 1 < x.ndim; ++n)
    if (x.shape[n] > 1 && (x.stride[n] % 8 != 0 || x.stride[n] < 0 || x.stride[n] >= int64_t{1} << 39)) return false;
  for (int n = 0; n < x.ndim; ++n)
    if (x.shape[n] < 1 || x.shape[n] > int64_t{1} << 31) return false;
  return true;
}

bool bias_map_possible(const tw_problem& p, const tw_tensor& x) {
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0 || x.shape[3] != p.seqlen_k || (x.shape[3] > 1 && x.stride[3] != 1)) return false;
  for (int n = 0; n < 3; ++n) {
    const int64_t bytes = broadcast_stride(x, n) * dtype_size(x.dtype);
    if (bytes % 16 != 0 || bytes < 0 || bytes >= int64_t{1} << 40) return false;
  }
  for (const int64_t size : {p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k})
    if (size < 1 || size > int64_t{1} << 31) return false;
  return true;
}

Status tensor_map(const TensorMapRequest& request, CUtensorMap* map) { return encode_once(make_key(request), map); }

Status bias_map(const tw_problem& p, const BiasMapRequest& request, CUtensorMap* map) { return encode_once(make_bias_key(p, request), map); }

}  // namespace tilewise::cuda
