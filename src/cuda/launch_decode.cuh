// Definition of the decoding launcher, for the generated translation units.
#pragma once
#include "cuda/decode_sm80.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim>
int launch_decode(const ForwardParams& params, int64_t num_blocks, bool early, void* stream) {
  constexpr DecodeConfig C = decode_config(kElement, kHeadDim);
  return launch<decode_sm80_kernel<kElement, kHeadDim>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                        static_cast<cudaStream_t>(stream), early ? Start::kEarly : Start::kInOrder);
}

}  // namespace tilewise::cuda
