// Definition of the sm_90a backward launcher, for backward_sm90_*.cu.
#pragma once
#define TW_BACKWARD_SM90_DEFINES_ROWS
#include "cuda/backward_sm90.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch_backward_sm90.h"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim>
int launch_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream) {
  constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim);
  const auto start = [&]<DqSums kSums>() {
    return launch<backward_sm90_kernel<kElement, kHeadDim, kSums>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                   static_cast<cudaStream_t>(stream), Start::kEarly);
  };
  if (params.backward.deterministic) return start.template operator()<DqSums::kOrdered>();
  if (params.backward.first_stores) return start.template operator()<DqSums::kFirst>();
  return start.template operator()<DqSums::kAny>();
}

}  // namespace tilewise::cuda
