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

// Waits until *address is at least `value`. One statement for the compiler: behind a loop that it sees, it would no longer
// believe a warp's values to be the same in all threads.
__device__ __forceinline__ void wait_acquire(const int* address, int value) {
  asm volatile(
      "{\n.reg .pred less;\n.reg .s32 found;\nAGAIN:\nld.acquire.gpu.global.s32 found, [%0];\n"
      "setp.lt.s32 less, found, %1;\n@less bra AGAIN;\n}" ::"l"(address),
      "r"(value)
      : "memory");
}

__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace tilewise::ptx
