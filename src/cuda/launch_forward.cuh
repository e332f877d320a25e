// Definition of the forward launcher, for the generated translation units.
#pragma once
#include "cuda/forward_sm80.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {

template <Element kElement, ForwardKind kKind, int kHeadDim, bool kSmall>
int launch_forward(const ForwardParams& params, int64_t num_blocks, void* stream) {
  constexpr ForwardConfig C = forward_config(kElement, kKind, kHeadDim, kSmall);
  static_assert(C.shared_bytes() <= kSharedLimitLarge);
  if constexpr (kSmall && !has_small(forward_config(kElement, kKind, kHeadDim, false), C))
    return launch_forward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);  // the same shape
  else
    return launch<forward_sm80_kernel<kElement, kKind, kHeadDim, kSmall>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                  static_cast<cudaStream_t>(stream));
}

}  // namespace tilewise::cuda
