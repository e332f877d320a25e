// Definition of the forward launcher, for the generated translation units.
#pragma once
#include "cuda/forward_sm80.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {

// With a bias, its tiles lie behind the rest of shared memory if that leaves room for them: below `most` bytes and what the device has.
template <ForwardConfig C, auto kernel>
int start_forward(ForwardParams params, int64_t num_blocks, int most, void* stream) {
  int bytes = C.shared_bytes(), limit = 0;
  if constexpr (C.kind == ForwardKind::kGeneral || C.kind == ForwardKind::kFewRows) {
    limit = shared_bytes_of_device() < most ? shared_bytes_of_device() : most;
    const int tile = BiasTile<C.block_m, C.block_n>::bytes(bias_bytes(params.score.bias_dtype));
    params.bias_in_tiles = params.bias_in_tiles && bytes + tile <= limit;
    if (params.bias_in_tiles) bytes += tile;
  }
  return launch<kernel>(params, num_blocks, C.num_threads(), bytes, static_cast<cudaStream_t>(stream), Start::kInOrder, limit);
}

template <Element kElement, ForwardKind kKind, int kHeadDim, bool kSmall>
int launch_forward(const ForwardParams& params, int64_t num_blocks, void* stream) {
  constexpr ForwardConfig C = forward_config(kElement, kKind, kHeadDim, kSmall);
  static_assert(C.shared_bytes() <= (kSmall ? kSharedLimit : kSharedLimitLarge));
  if constexpr (kSmall && !has_small(forward_config(kElement, kKind, kHeadDim, false), C))
    return launch_forward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);  // the same shape
  else if constexpr (kSmall && kElement == Element::kFloat32 && (kKind == ForwardKind::kPlain || kKind == ForwardKind::kDropout))
    return launch_forward<kElement, ForwardKind::kGeneral, kHeadDim, true>(params, num_blocks, stream);  // one kernel to compile
  else
    return start_forward<C, forward_sm80_kernel<kElement, kKind, kHeadDim, kSmall>>(
        params, num_blocks, kSmall ? kSharedLimit : kSharedLimitLarge, stream);
}

template <Element kElement, ForwardKind kKind, int kHeadDim>
int launch_forward_roomy(const ForwardParams& params, int64_t num_blocks, void* stream) {
  constexpr ForwardConfig C = roomy_config(kElement, kKind, kHeadDim);
  static_assert(C.shared_bytes() <= kSharedLimitRoomy);
  if constexpr (C.shared_bytes() <= kSharedLimitLarge)
    return launch_forward<kElement, kKind, kHeadDim, false>(params, num_blocks, stream);
  else
    return start_forward<C, forward_sm80_roomy_kernel<kElement, kKind, kHeadDim>>(params, num_blocks, kSharedLimitRoomy, stream);
}

}  // namespace tilewise::cuda
