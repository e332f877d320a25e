// Where a thread is in the grid; and programmatic dependent launch (sm_90): a kernel that was started early waits for those
// before it, and lets the next one start.
#pragma once

namespace tilewise::ptx {

// Read again wherever they stand: what follows from them need not stay in registers over a long loop.
__device__ __forceinline__ unsigned block_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ unsigned thread_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Nothing on older GPUs, where kernels start in order: see Start in launch.cuh.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tilewise::ptx
