// Barriers in shared memory that count arrivals and bytes (mbarrier), barriers of the multiprocessor (barrier), and the
// fences between ordinary accesses and those of the copy engine and the tensor cores.
#pragma once
#include <cstdint>

namespace tilewise::ptx {

// Built with TILEWISE_STRESS, warps wait and arrive at random times, as on a machine under load: what then goes wrong, or
// differs from run to run, lacks a barrier. By whole warps, which must not come apart in front of a named barrier.
__device__ __forceinline__ void stress() {
#if defined(TILEWISE_STRESS)
  const uint32_t draw = (static_cast<uint32_t>(clock()) + threadIdx.x / 32 * 7919u + blockIdx.x * 104729u) * 2654435761u;
  if (draw >> 30 == 0) __nanosleep(draw >> 20 & 1023);
#endif
}

// A fresh barrier is in phase 0, incomplete: waiting for parity 1 passes at once.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Its memory may serve for something else, be it a barrier.
__device__ __forceinline__ void mbarrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for `bytes` of copies as well.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Has the phase of this parity completed? Does not wait.
__device__ __forceinline__ bool mbarrier_done(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits until the phase of this parity has completed. try_wait sleeps in hardware for a while, so this is no hot spin. Built
// with TILEWISE_STRESS, a wait that would never end is given up: wrong results rather than a machine that hangs.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  stress();
#if __CUDA_ARCH__ >= 900
#define TW_MBARRIER_WAIT "try_wait"
#else
#define TW_MBARRIER_WAIT "test_wait"
#endif
  asm volatile(
#if defined(TILEWISE_STRESS)
      "{\n.reg .pred done;\n.reg .u32 tries;\nmov.u32 tries, 0;\nAGAIN:\nadd.u32 tries, tries, 1;\nsetp.gt.u32 done, tries, 200000;\n"
      "@done bra DONE;\nmbarrier." TW_MBARRIER_WAIT ".parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\nDONE:\n}"
#else
      "{\n.reg .pred done;\nAGAIN:\nmbarrier." TW_MBARRIER_WAIT ".parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
#endif
      ::"r"(barrier), "r"(parity)
      : "memory");
#undef TW_MBARRIER_WAIT
}

// Named barriers: `threads` arrive or wait, a multiple of 32. Number 0 is __syncthreads.
__device__ __forceinline__ void barrier_sync(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int number, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Ordinary writes to shared memory become visible to the copy engine and the tensor cores. By each writing thread,
// before the barrier that tells of them.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tilewise::ptx
