#include "cuda/device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <vector>

#include "cuda/launch.h"

namespace tilewise::cuda {
namespace {

// A cap on the shared memory of a block, so that tests can run the shapes for GPUs with less on one with more.
int shared_cap() {
#ifdef TILEWISE_ALL_SHAPES
  const char* text = std::getenv("TILEWISE_CUDA_SHARED_BYTES");
  if (const int bytes = text ? std::atoi(text) : 0; bytes > 0) return bytes;
#endif
  return std::numeric_limits<int>::max();
}

std::vector<DeviceFacts> ask() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::vector<DeviceFacts> all(static_cast<size_t>(count));
  for (int n = 0; n < count; ++n) {
    DeviceFacts& facts = all[static_cast<size_t>(n)];
    const auto get = [&](cudaDeviceAttr attribute) {
      int value = 0;
      if (cudaDeviceGetAttribute(&value, attribute, n) != cudaSuccess) cudaGetLastError();
      return value;
    };
    facts.capability = 10 * get(cudaDevAttrComputeCapabilityMajor) + get(cudaDevAttrComputeCapabilityMinor);
    facts.multiprocessors = get(cudaDevAttrMultiProcessorCount);
    facts.shared_bytes_per_block = std::min(get(cudaDevAttrMaxSharedMemoryPerBlockOptin), shared_cap());
    facts.l2_bytes = get(cudaDevAttrL2CacheSize);
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, n) == cudaSuccess) facts.name = properties.name;
  }
  return all;
}

const std::vector<DeviceFacts>& devices() {
  static const std::vector<DeviceFacts> all = ask();
  return all;
}

}  // namespace

int device_count() { return static_cast<int>(devices().size()); }

const DeviceFacts& device_facts(int index) {
  static const DeviceFacts none;
  return index >= 0 && index < device_count() ? devices()[static_cast<size_t>(index)] : none;
}

bool any_device_from(int capability) {
  for (const DeviceFacts& facts : devices())
    if (facts.capability >= capability) return true;
  return false;
}

bool can_start_early([[maybe_unused]] int index) {
#if defined(TILEWISE_SM90)
  return device_facts(index).capability == 90;
#else
  return false;
#endif
}

int shared_bytes_of_device() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return cudaGetLastError(), 0;
  return device_facts(device).shared_bytes_per_block;
}

int permit_shared_bytes(const void* kernel, int bytes, uint64_t* permitted) {
  const std::atomic_ref<uint64_t> devices(*permitted);
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return cudaGetLastError(), error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((devices.load(std::memory_order_relaxed) & bit) != 0) return 0;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cudaGetLastError(), error;  // reported here, not to whoever asks next
  devices.fetch_or(bit, std::memory_order_relaxed);
  return 0;
}

Status device_error(const char* what, int error) {
  return Status(TW_DEVICE_ERROR, concat(what, ": ", cudaGetErrorName(static_cast<cudaError_t>(error)), " (",
                                        cudaGetErrorString(static_cast<cudaError_t>(error)), ")"));
}

DeviceGuard::DeviceGuard(int device) {
  int current = 0;
  if (const cudaError_t error = cudaGetDevice(&current); error != cudaSuccess) {
    cudaGetLastError();  // reported here, not to whoever asks next
    status_ = device_error("cudaGetDevice", error);
    return;
  }
  if (current == device) return;
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    cudaGetLastError();
    status_ = device_error("cudaSetDevice", error);
    return;
  }
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace tilewise::cuda
