// What the kernels of backward_sm90 begin with, and those of two passes end with.
#pragma once
#include "cuda/params_backward_sm90.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/tma.cuh"

namespace tilewise::cuda {

// The same number in all threads, and now the compiler knows. What a descriptor is made of must be such, or every product
// needs four moves to uniform registers.
__device__ __forceinline__ int uniform(int n) { return __shfl_sync(0xffffffffu, n, 0); }

// By one thread: the descriptions of the tensors, before the first copy needs them.
__device__ __forceinline__ void prefetch_maps(const BackwardSm90Params& p) {
  ptx::tma_prefetch(p.q);
  ptx::tma_prefetch(p.k);
  ptx::tma_prefetch(p.v);
  ptx::tma_prefetch(p.dout);
}

// Of two passes. The second starts when the blocks of the first are there, and those have waited for pre: its results are in the second-level
// cache, and no line of them in this multiprocessor's own, since nobody reads them through it. (post beside a main kernel stands on the same.)
__device__ __forceinline__ void start_pass(const BackwardSm90Params& p) {
  if (!p.second_pass) ptx::wait_for_previous_kernels();
  ptx::let_next_kernel_start();
}
// Whoever waits for the second pass waits for the first one, too.
__device__ __forceinline__ void end_pass(const BackwardSm90Params& p) {
  if (p.second_pass && blockIdx.x == gridDim.x - 1) ptx::wait_for_previous_kernels();
}

}  // namespace tilewise::cuda
