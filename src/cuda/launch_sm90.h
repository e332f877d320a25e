// Host side of the sm_90a forward kernels: a launcher per row of forward_sm90_*.cu. The ints returned are cudaError_t.
#pragma once
#include "cuda/config_sm90.h"
#include "cuda/params_sm90.h"

namespace tilewise::cuda {

template <Element kElement, Sm90Shape kShape, RowSum kRowSum>
int launch_forward_sm90(const ForwardSm90Params& params, int num_blocks, void* stream);

// Computes the marked rows again; num_blocks: as many as there are multiprocessors.
template <Element kElement, int kHeadDim>
int launch_forward_sm90_redo(const ForwardSm90Params& params, int num_blocks, void* stream);

// The instantiations, one line each: element, shape, row sum.
#define TW_FORWARD_SM90_ROWS(ROW)             \
  ROW(kBfloat16, kD64, kFloat32)              \
  ROW(kBfloat16, kD64, kOnesColumn)           \
  ROW(kBfloat16, kD64Short, kFloat32)         \
  ROW(kBfloat16, kD64Causal, kFloat32)        \
  ROW(kBfloat16, kD64Short, kOnesColumn)      \
  ROW(kBfloat16, kD64Causal, kOnesColumn)     \
  ROW(kBfloat16, kD128, kFloat32)             \
  ROW(kBfloat16, kD128, kOnesColumn)          \
  ROW(kBfloat16, kD128Short, kFloat32)        \
  ROW(kBfloat16, kD128Short, kOnesColumn)     \
  ROW(kBfloat16, kD256, kFloat32)             \
  ROW(kFloat16, kD64, kFloat32)               \
  ROW(kFloat16, kD64Short, kFloat32)          \
  ROW(kFloat16, kD64Causal, kFloat32)         \
  ROW(kFloat16, kD128, kFloat32)              \
  ROW(kFloat16, kD128Short, kFloat32)         \
  ROW(kFloat16, kD256, kFloat32)

#define TW_DECLARE_ROW(element, shape, row_sum)                                                            \
  extern template int launch_forward_sm90<Element::element, Sm90Shape::shape, RowSum::row_sum>(            \
      const ForwardSm90Params&, int, void*);
#ifndef TW_FORWARD_SM90_DEFINES_ROWS
TW_FORWARD_SM90_ROWS(TW_DECLARE_ROW)
extern template int launch_forward_sm90_redo<Element::kBfloat16, 64>(const ForwardSm90Params&, int, void*);
extern template int launch_forward_sm90_redo<Element::kBfloat16, 128>(const ForwardSm90Params&, int, void*);
extern template int launch_forward_sm90_redo<Element::kBfloat16, 256>(const ForwardSm90Params&, int, void*);
extern template int launch_forward_sm90_redo<Element::kFloat16, 64>(const ForwardSm90Params&, int, void*);
extern template int launch_forward_sm90_redo<Element::kFloat16, 128>(const ForwardSm90Params&, int, void*);
extern template int launch_forward_sm90_redo<Element::kFloat16, 256>(const ForwardSm90Params&, int, void*);
#endif
#undef TW_DECLARE_ROW

}  // namespace tilewise::cuda
