// Definition of the sm_90a launchers, for forward_sm90_*.cu.
#pragma once
#define TW_FORWARD_SM90_DEFINES_ROWS
#include "cuda/forward_sm90.cuh"
#include "cuda/launch_early.cuh"
#include "cuda/launch_sm90.h"

namespace tilewise::cuda {

template <Element kElement, Sm90Shape kShape, RowSum kRowSum>
int launch_forward_sm90(const ForwardSm90Params& params, int num_blocks, void* stream) {
  constexpr ForwardSm90Config C = forward_sm90_config(kElement, kShape, kRowSum);
  return launch_early<forward_sm90_kernel<kElement, kShape, kRowSum>>(params, num_blocks, C.num_threads(),
                                                                      C.shared_bytes(), static_cast<cudaStream_t>(stream));
}

}  // namespace tilewise::cuda
