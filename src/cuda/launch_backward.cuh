// Definition of the backward launcher, for the generated translation units.
#pragma once
#include "cuda/backward_sm80.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {

template <Element kElement, BackwardKind kKind, int kHeadDim, bool kSmall>
int launch_backward(const BackwardParams& params, int64_t num_blocks, void* stream) {
  constexpr BackwardConfig C = backward_config(kElement, kKind, kHeadDim, kSmall);
  static_assert(C.shared_bytes() <= (kSmall ? kSharedLimit : kSharedLimitLarge));
  if constexpr (kKind == BackwardKind::kOrdered && !C.knows_order())
    return launch_backward<kElement, BackwardKind::kPlain, kHeadDim, kSmall>(params, num_blocks, stream);  // asks at run time
  else if constexpr (kSmall && !has_small(backward_config(kElement, kKind, kHeadDim, false), C))
    return launch_backward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);  // the same shape
  else
    return launch<backward_sm80_kernel<kElement, kKind, kHeadDim, kSmall>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                  static_cast<cudaStream_t>(stream));
}

template <Element kElement, BackwardKind kKind, int kHeadDim>
int launch_backward_roomy(const BackwardParams& params, int64_t num_blocks, void* stream) {
  constexpr BackwardConfig C = roomy_config(kElement, kKind, kHeadDim);
  static_assert(C.shared_bytes() <= kSharedLimitRoomy);
  if constexpr (kKind == BackwardKind::kOrdered && !C.knows_order())
    return launch_backward_roomy<kElement, BackwardKind::kPlain, kHeadDim>(params, num_blocks, stream);
  else if constexpr (C.shared_bytes() <= kSharedLimitLarge)
    return launch_backward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);  // the same shape
  else
    return launch<backward_sm80_roomy_kernel<kElement, kKind, kHeadDim>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                         static_cast<cudaStream_t>(stream));
}

template <Element kElement, int kHeadDim>
int launch_backward_again(const BackwardParams& params, int64_t num_blocks, void* stream) {
  constexpr BackwardConfig C = conditional_config(kElement, kHeadDim);
  if constexpr (kElement == Element::kFloat32 || (kHeadDim != 64 && kHeadDim != 128 && kHeadDim != 256))
    return cudaErrorNotSupported;  // no row of sm_90 has it
  else
    return launch<backward_sm80_again_kernel<kElement, kHeadDim>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                               static_cast<cudaStream_t>(stream), Start::kEarly);
}

}  // namespace tilewise::cuda
