// Rows of forward_sm90: what computes bfloat16 rows again.
#define TW_FORWARD_SM90_DEFINES_ROWS
#include "cuda/forward_sm90_redo.cuh"
#include "cuda/launch_early.cuh"
#include "cuda/launch_sm90.h"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim>
int launch_forward_sm90_redo(const ForwardSm90Params& params, int num_blocks, void* stream) {
  constexpr ForwardConfig C = redo_config(kElement, kHeadDim);
  constexpr int kShared = 220 * 1024;
  // As much shared memory as the main kernel has: a multiprocessor that must divide its memory anew stands still first.
  static_assert(C.shared_bytes() <= kShared);
  return launch_early<forward_sm90_redo_kernel<kElement, kHeadDim>>(params, num_blocks, C.num_threads(), kShared,
                                                                    static_cast<cudaStream_t>(stream));
}

template int launch_forward_sm90_redo<Element::kBfloat16, 64>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90_redo<Element::kBfloat16, 128>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90_redo<Element::kBfloat16, 256>(const ForwardSm90Params&, int, void*);

}  // namespace tilewise::cuda
