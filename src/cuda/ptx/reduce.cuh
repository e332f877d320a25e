// Sums in global memory, and the order between blocks that makes them repeatable.
#pragma once
#include <cstdint>

namespace tilewise::ptx {

// address[0 .. 3] += x, each element atomically; address aligned to 16 bytes.
__device__ __forceinline__ void add_global(float* address, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
#else
  atomicAdd(address, x);
  atomicAdd(address + 1, y);
  atomicAdd(address + 2, z);
  atomicAdd(address + 3, w);
#endif
}

__device__ __forceinline__ int load_relaxed(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace tilewise::ptx
