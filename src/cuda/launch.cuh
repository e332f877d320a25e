// Launching: shared memory above 48 KiB needs the kernel's permission once per device; errors are returned, never kept.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"

namespace tilewise::cuda {

// Largest grid in x. Plans refuse more; every other grid dimension is 1, so 65,535 is no limit.
inline constexpr int64_t kMaxBlocks = 0x7fffffff;

enum class Start {
  kInOrder,  // when the kernels before it in the stream have ended
  kEarly,    // as soon as those let it; the kernel itself waits for them before it touches their data
};

// `kernel` is a template argument so that the flags are kept per kernel: one bit a device that permitted it.
// `most_shared_bytes`: of any launch of this kernel, where they differ.
template <auto kernel, class Params>
cudaError_t launch(const Params& params, int64_t num_blocks, int num_threads, int shared_bytes, cudaStream_t stream,
                   Start start = Start::kInOrder, int most_shared_bytes = 0) {
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  if (const int most = shared_bytes > most_shared_bytes ? shared_bytes : most_shared_bytes; most > 48 * 1024) {
    static uint64_t permitted = 0;
    if (const int error = permit_shared_bytes(reinterpret_cast<const void*>(kernel), most, &permitted); error != 0)
      return static_cast<cudaError_t>(error);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = start == Start::kEarly;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error != cudaSuccess) cudaGetLastError();  // reported here, not to whoever asks next
  return error;
}

}  // namespace tilewise::cuda
