// The asynchronous tensor-core product of a warpgroup (sm_90a): ordering, and descriptors of operands in shared memory.
#pragma once
#include "cuda/ptx/wgmma_shapes.cuh"

namespace tilewise::ptx {

// Before the first wgmma that reads or writes registers which other instructions have touched.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the latest committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a product owns while it is under way must not be moved or computed across its issue or its wait: an
// empty statement that claims to change them keeps the compiler from doing so.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+f"(d[n])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+r"(d[n])::"memory");
}

// Lower half of a descriptor: the operand's address and the distance between panels of 64 columns, which only N-major
// operands use. All in units of 16 bytes, so a step inside an operand is an addition: bytes >> 4.
__device__ __forceinline__ uint32_t descriptor(uint32_t shared_address, uint32_t panel_bytes = 16) {
  return ((shared_address & 0x3ffff) >> 4) | ((panel_bytes >> 4) << 16);
}

}  // namespace tilewise::ptx
