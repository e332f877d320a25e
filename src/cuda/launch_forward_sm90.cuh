// Definition of the sm_90a forward launcher, for the generated translation units.
#pragma once
#include "cuda/forward_sm90.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {

// If the configuration is this one: launches it.
template <Element kElement, Sm90Shape kShape, RowSum kRowSum, ScoreKind kScore>
bool launch_if(const ForwardSm90Config& wanted, const ForwardSm90Params& params, int num_blocks, cudaStream_t stream,
               cudaError_t* error) {
  constexpr ForwardSm90Config C = forward_sm90_config(kElement, kShape, kRowSum, kScore);
  if constexpr (C.exists()) {
    if (wanted.shape != kShape || wanted.row_sum != kRowSum || wanted.score != kScore) return false;
    *error = launch<forward_sm90_kernel<kElement, kShape, kRowSum, kScore>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                            stream, Start::kEarly);
    return true;
  }
  return false;
}

template <Element kElement, int kHeadDim>
int launch_forward_sm90(const ForwardSm90Config& wanted, const ForwardSm90Params& params, int num_blocks, void* stream) {
  cudaError_t error = cudaErrorInvalidDeviceFunction;
  const auto shape = [&]<Sm90Shape kShape>() {
    if constexpr (forward_sm90_config(kElement, kShape, RowSum::kFloat32, ScoreKind::kPlain).head_dim == kHeadDim) {
      const auto s = static_cast<cudaStream_t>(stream);
      launch_if<kElement, kShape, RowSum::kFloat32, ScoreKind::kPlain>(wanted, params, num_blocks, s, &error) ||
          launch_if<kElement, kShape, RowSum::kOnesColumn, ScoreKind::kPlain>(wanted, params, num_blocks, s, &error) ||
          launch_if<kElement, kShape, RowSum::kFloat32, ScoreKind::kWhole>(wanted, params, num_blocks, s, &error) ||
          launch_if<kElement, kShape, RowSum::kOnesColumn, ScoreKind::kWhole>(wanted, params, num_blocks, s, &error) ||
          launch_if<kElement, kShape, RowSum::kFloat32, ScoreKind::kGeneral>(wanted, params, num_blocks, s, &error);
    }
  };
  shape.template operator()<Sm90Shape::kD64>();
  shape.template operator()<Sm90Shape::kD64Short>();
  shape.template operator()<Sm90Shape::kD64Causal>();
  shape.template operator()<Sm90Shape::kD64General>();
  shape.template operator()<Sm90Shape::kD128>();
  shape.template operator()<Sm90Shape::kD128Short>();
  shape.template operator()<Sm90Shape::kD256>();
  return error;
}

template <Element kElement, int kHeadDim>
int launch_forward_sm90_bias(const ForwardSm90Config& wanted, const ForwardSm90Params& params, int num_blocks, void* stream) {
  constexpr Sm90Shape kShape = kHeadDim == 64 ? Sm90Shape::kD64General : kHeadDim == 128 ? Sm90Shape::kD128Short : Sm90Shape::kD256;
  cudaError_t error = cudaErrorInvalidDeviceFunction;
  launch_if<kElement, kShape, RowSum::kFloat32, ScoreKind::kBias>(wanted, params, num_blocks, static_cast<cudaStream_t>(stream), &error);
  return error;
}

}  // namespace tilewise::cuda
