// Single instructions of sm_90 that belong to no larger family.
#pragma once
#include <cstdint>

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mma.cuh"

namespace tilewise::ptx {

// Moves registers between the warpgroups of a block. All warps of a warpgroup execute it.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8 x 8 matrices from a warp's fragment to shared memory: the inverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// 16 bytes, or nothing. A predicate and no branch: warps stay together.
__device__ __forceinline__ void store_global_if(bool wanted, void* global, const uint32_t (&x)[4]) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(global),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(static_cast<uint32_t>(wanted))
               : "memory");
}

// 16 bytes that another multiprocessor wrote: not from the L1 cache. volatile: a load that is moved up only costs registers.
__device__ __forceinline__ float4 load_from_l2(const float4* global) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(global) : "memory");
  return x;
}

__device__ __forceinline__ void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory"); }

// Larger magnitude of each pair, with some sign; NaN if one is NaN.
template <class T>
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t max_magnitude<bfloat16>(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <>
__device__ __forceinline__ uint32_t max_magnitude<float16>(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace tilewise::ptx
