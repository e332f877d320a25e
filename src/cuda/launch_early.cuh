// Launching a kernel that may start before the one in front of it has ended.
#pragma once
#include "cuda/launch.cuh"
#include "cuda/params_sm90.h"

namespace tilewise::cuda {

// Like launch(), and the kernel may start before the one in front of it has ended: it waits by itself.
template <auto kernel>
cudaError_t launch_early(const ForwardSm90Params& params, int num_blocks, int num_threads, int shared_bytes,
                         cudaStream_t stream) {
  if (shared_bytes > 48 * 1024) {
    static std::atomic<uint64_t> permitted{0};
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((permitted.load(std::memory_order_relaxed) & bit) == 0) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error != cudaSuccess) return cudaGetLastError(), error;
      permitted.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error != cudaSuccess) cudaGetLastError();  // reported here, not to whoever asks next
  return error;
}

}  // namespace tilewise::cuda
