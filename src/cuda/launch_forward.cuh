// Definition of the forward launcher, for the generated translation units.
#pragma once
#include "cuda/forward_sm80.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {

template <Element kElement, ForwardKind kKind, int kHeadDim, bool kSmall>
int launch_forward(const ForwardParams& params, int64_t num_blocks, void* stream) {
  constexpr ForwardConfig C = forward_config(kElement, kKind, kHeadDim, kSmall);
  static_assert(C.shared_bytes() <= (kSmall ? kSharedLimit : kSharedLimitLarge));
  if constexpr (kSmall && !has_small(forward_config(kElement, kKind, kHeadDim, false), C))
    return launch_forward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);  // the same shape
  else if constexpr (kSmall && kElement == Element::kFloat32 && (kKind == ForwardKind::kPlain || kKind == ForwardKind::kDropout))
    return launch_forward<kElement, ForwardKind::kGeneral, kHeadDim, true>(params, num_blocks, stream);  // one kernel to compile
  else
    return launch<forward_sm80_kernel<kElement, kKind, kHeadDim, kSmall>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                  static_cast<cudaStream_t>(stream));
}

template <Element kElement, ForwardKind kKind, int kHeadDim>
int launch_forward_roomy(const ForwardParams& params, int64_t num_blocks, void* stream) {
  constexpr ForwardConfig C = roomy_config(kElement, kKind, kHeadDim);
  static_assert(C.shared_bytes() <= kSharedLimitRoomy);
  if constexpr (C.shared_bytes() <= kSharedLimitLarge)
    return launch_forward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);
  else
    return launch<forward_sm80_roomy_kernel<kElement, kKind, kHeadDim>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                        static_cast<cudaStream_t>(stream));
}

}  // namespace tilewise::cuda
