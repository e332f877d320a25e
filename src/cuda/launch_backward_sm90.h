// Host side of the sm_90a backward kernels: `num_blocks` stay on their multiprocessors and take key blocks, or query blocks. The int returned
// is a cudaError_t.
#pragma once
#include "cuda/config_backward_sm90.h"
#include "cuda/params_backward_sm90.h"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim>
int launch_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream);
// Of the kind that params.kind says. In a unit of its own, where it does not change what the compiler makes of the plain kernels.
template <Element kElement, int kHeadDim>
int launch_backward_sm90_options(const BackwardSm90Params& params, int num_blocks, void* stream);

#ifndef TW_BACKWARD_SM90_DEFINES_ROWS
#define TW_BACKWARD_SM90(element, head_dim) \
  extern template int launch_backward_sm90<Element::element, head_dim>(const BackwardSm90Params&, int, void*); \
  extern template int launch_backward_sm90_options<Element::element, head_dim>(const BackwardSm90Params&, int, void*);
#include "cuda/kernels.def"
#endif

}  // namespace tilewise::cuda
