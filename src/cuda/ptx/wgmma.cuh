// The asynchronous tensor-core product of a warpgroup (sm_90a): D[64, N] = A[64, 16] B[16, N] (+ D if accumulate), 16-bit
// inputs, float32 accumulators; its ordering; and descriptors of operands in shared memory.
#pragma once
#include <cstdint>

#include "cuda/ptx/mma.cuh"

namespace tilewise::ptx {

// The upper half of every descriptor: groups of 8 rows 1024 bytes apart, 128-byte swizzle.
inline constexpr uint32_t kDescriptorHigh = (1u << 30) | (1024u >> 4);
// K-major, 16 columns, no swizzle: groups of 8 rows, 2 chunks of 8 x 16 bytes, one after the other. The distance between
// the two chunks takes the place of the distance between panels.
inline constexpr uint32_t kDescriptorHighPlain = 256u >> 4;

// Lower half of a descriptor: the operand's address and the distance between panels of 64 columns, which only operands
// whose rows are summed over use. All in units of 16 bytes, so a step inside an operand is an addition: bytes >> 4.
__device__ __forceinline__ uint32_t descriptor(uint32_t shared_address, uint32_t panel_bytes = 16) {
  return ((shared_address & 0x3ffff) >> 4) | ((panel_bytes >> 4) << 16);
}

// ss: A and B in shared memory, as lower halves of descriptors. rs: A in registers. A lies K-major (its columns are summed
// over) or, with kTransposeA, M-major; B likewise K-major or, with kTransposeB, N-major.
template <class T, int kN>
struct Wgmma;

// Inline assembly takes one operand per accumulator and knows them by number: lists that build on each other.
#define TW_R32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TW_R36 TW_R32 ", %32, %33, %34, %35"
#define TW_R48 TW_R36 ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TW_R64 TW_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TW_R68 TW_R64 ", %64, %65, %66, %67"
#define TW_R96 \
  TW_R68 ", " \
  "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TW_R128 \
  TW_R96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TW_D4(n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define TW_D32 TW_D4(0), TW_D4(4), TW_D4(8), TW_D4(12), TW_D4(16), TW_D4(20), TW_D4(24), TW_D4(28)
#define TW_D36 TW_D32, TW_D4(32)
#define TW_D48 TW_D36, TW_D4(36), TW_D4(40), TW_D4(44)
#define TW_D64 TW_D48, TW_D4(48), TW_D4(52), TW_D4(56), TW_D4(60)
#define TW_D68 TW_D64, TW_D4(64)
#define TW_D96 TW_D68, TW_D4(68), TW_D4(72), TW_D4(76), TW_D4(80), TW_D4(84), TW_D4(88), TW_D4(92)
#define TW_D128 TW_D96, TW_D4(96), TW_D4(100), TW_D4(104), TW_D4(108), TW_D4(112), TW_D4(116), TW_D4(120), TW_D4(124)

// N, its accumulators, and the numbers of the operands behind them.
#define TW_WGMMA_TYPE(T, type, n, count, i0, i1, i2, i3, i4, i5, i6, i7)                                                  \
  template <>                                                                                                             \
  struct Wgmma<T, n> {                                                                                                    \
    template <int kTransposeA = 0, int kTransposeB = 0>                                                                   \
    static __device__ __forceinline__ void ss(float (&d)[count], uint32_t a, uint32_t b, int accumulate) {                \
      asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%" #i0 ", %" #i3 "};\nmov.b64 b, {%" #i1 ", %" #i3 "};\n" \
                   "setp.ne.s32 p, %" #i2 ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TW_R##count "}, "                 \
                   "a, b, p, 1, 1, %" #i4 ", %" #i5 ";\n}"                                                                \
                   : TW_D##count                                                                                          \
                   : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh), "n"(kTransposeA), "n"(kTransposeB));          \
    }                                                                                                                     \
    template <int kTransposeB, uint32_t kHighB = kDescriptorHigh>                                                         \
    static __device__ __forceinline__ void rs(float (&d)[count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,      \
                                              uint32_t b, int accumulate) {                                               \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {%" #i4 ", %" #i6 "};\nsetp.ne.s32 p, %" #i5 ", 0;\n"      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TW_R##count "}, "                 \
                   "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, p, 1, 1, %" #i7 ";\n}"                                   \
                   : TW_D##count                                                                                          \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(accumulate), "n"(kHighB), "n"(kTransposeB));          \
    }                                                                                                                     \
  };
#define TW_WGMMA(...)                         \
  TW_WGMMA_TYPE(bfloat16, "bf16", __VA_ARGS__) \
  TW_WGMMA_TYPE(float16, "f16", __VA_ARGS__)
// Keys of a tile, head dims, and head dims with eight columns of ones behind them, whose product is a row sum.
TW_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
TW_WGMMA(72, 36, 36, 37, 38, 39, 40, 41, 42, 43)
TW_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54, 55)
TW_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
TW_WGMMA(136, 68, 68, 69, 70, 71, 72, 73, 74, 75)
TW_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102, 103)
TW_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134, 135)
#undef TW_WGMMA
#undef TW_WGMMA_TYPE
#undef TW_D4
#undef TW_R32
#undef TW_D32
#undef TW_R36
#undef TW_D36
#undef TW_R48
#undef TW_D48
#undef TW_R64
#undef TW_D64
#undef TW_R68
#undef TW_D68
#undef TW_R96
#undef TW_D96
#undef TW_R128
#undef TW_D128

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

}  // namespace tilewise::ptx
