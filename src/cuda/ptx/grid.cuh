// Programmatic dependent launch (sm_90): a kernel that was started early waits for those before it, and lets the next one start.
#pragma once

namespace tilewise::ptx {

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
