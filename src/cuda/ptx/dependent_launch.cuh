// Programmatic dependent launch (sm_90 and newer; elsewhere kernels start in order and there is nothing to do).
#pragma once

namespace tilewise::ptx {

// Until the kernels before this one have ended and what they wrote is visible. Every block does it before it ends, or the
// kernel after this one could start before those have ended.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start its prologue once every block of this one has come here, or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tilewise::ptx
