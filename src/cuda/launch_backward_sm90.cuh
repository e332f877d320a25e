// Definition of the sm_90a backward launcher, for backward_sm90_*.cu.
#pragma once
#define TW_BACKWARD_SM90_DEFINES_ROWS
#include "cuda/backward_sm90.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch_backward_sm90.h"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim, DqSums kSums, BackwardKind kKind>
int start_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream) {
  constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim, kKind);
  return launch<backward_sm90_kernel<kElement, kHeadDim, kSums, kKind>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                        static_cast<cudaStream_t>(stream), Start::kEarly);
}

template <Element kElement, int kHeadDim>
int launch_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream) {
  if (params.backward.deterministic)
    return start_backward_sm90<kElement, kHeadDim, DqSums::kOrdered, BackwardKind::kPlain>(params, num_blocks, stream);
  if (params.backward.first_stores)
    return start_backward_sm90<kElement, kHeadDim, DqSums::kFirst, BackwardKind::kPlain>(params, num_blocks, stream);
  return start_backward_sm90<kElement, kHeadDim, DqSums::kAny, BackwardKind::kPlain>(params, num_blocks, stream);
}

template <Element kElement, int kHeadDim>
int launch_backward_sm90_options(const BackwardSm90Params& params, int num_blocks, void* stream) {
  const auto start = [&]<BackwardKind kKind>() {
    if (params.backward.deterministic) return start_backward_sm90<kElement, kHeadDim, DqSums::kOrdered, kKind>(params, num_blocks, stream);
    return start_backward_sm90<kElement, kHeadDim, DqSums::kAny, kKind>(params, num_blocks, stream);
  };
  if (params.kind == BackwardKind::kDropout) return start.template operator()<BackwardKind::kDropout>();
  return start.template operator()<BackwardKind::kGeneral>();
}

}  // namespace tilewise::cuda
