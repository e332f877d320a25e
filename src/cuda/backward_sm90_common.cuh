// What the kernels of backward_sm90 begin with.
#pragma once
#include "cuda/params_backward_sm90.h"
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

}  // namespace tilewise::cuda
