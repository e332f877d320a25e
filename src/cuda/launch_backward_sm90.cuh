// Definition of the sm_90a backward launcher, for backward_sm90_*.cu.
#pragma once
#define TW_BACKWARD_SM90_DEFINES_ROWS
#include "cuda/backward_sm90.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch_backward_sm90.h"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim>
int launch_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream) {
  const auto start = [&]<DqSums kSums, BackwardKind kKind>() {
    constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim, kKind);
    return launch<backward_sm90_kernel<kElement, kHeadDim, kSums, kKind>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                          static_cast<cudaStream_t>(stream), Start::kEarly);
  };
  if (params.kind == BackwardKind::kDropout) {
    if (params.backward.deterministic) return start.template operator()<DqSums::kOrdered, BackwardKind::kDropout>();
    return start.template operator()<DqSums::kAny, BackwardKind::kDropout>();
  }
  if (params.kind == BackwardKind::kGeneral) {
    if (params.backward.deterministic) return start.template operator()<DqSums::kOrdered, BackwardKind::kGeneral>();
    return start.template operator()<DqSums::kAny, BackwardKind::kGeneral>();
  }
  if (params.backward.deterministic) return start.template operator()<DqSums::kOrdered, BackwardKind::kPlain>();
  if (params.backward.first_stores) return start.template operator()<DqSums::kFirst, BackwardKind::kPlain>();
  return start.template operator()<DqSums::kAny, BackwardKind::kPlain>();
}

}  // namespace tilewise::cuda
