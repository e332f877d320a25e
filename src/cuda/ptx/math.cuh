// Arithmetic of one instruction each, and conversions between float32 and the 16-bit types.
#pragma once
#include <cstdint>

#include "cuda/ptx/mma.cuh"

namespace tilewise::ptx {

// 2^x; -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even; `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

template <>
__device__ __forceinline__ uint32_t pack<float16>(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ float16 from_float<float16>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }

// Low and high half of a packed pair as floats.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<float16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// A value that all lanes of the warp have, in uniform registers, as the reduction leaves it there.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(0xffffffffu, x); }

// Per half, as float16: is x below y, or with `flip` not below it (NaN is not)? 0xffff or 0; and as two conditions.
__device__ __forceinline__ uint32_t below_mask(uint32_t x, uint32_t y, bool flip) {
  uint32_t d;
  asm("{.reg .pred f; setp.ne.u32 f, %3, 0; set.lt.xor.u32.f16x2 %0, %1, %2, f;}" : "=r"(d) : "r"(x), "r"(y), "r"(static_cast<uint32_t>(flip)));
  return d;
}
__device__ __forceinline__ void below(uint32_t x, uint32_t y, bool flip, bool& low, bool& high) {
  uint32_t p, q;
  asm("{.reg .pred f, p, q; setp.ne.u32 f, %4, 0; setp.lt.xor.f16x2 p|q, %2, %3, f; selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q;}"
      : "=r"(p), "=r"(q)
      : "r"(x), "r"(y), "r"(static_cast<uint32_t>(flip)));
  low = p != 0, high = q != 0;
}

// Per half, all ones where its sign bit is set, else zeros.
__device__ __forceinline__ uint32_t spread_signs(uint32_t x) {
  uint32_t d;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(d) : "r"(x));  // __byte_perm knows no signs
  return d;
}

// 0 * x + sum of a pair of 16-bit floats, or of one float: as bits, not 0 as soon as an x was inf or NaN.
template <class T>
__device__ __forceinline__ uint32_t add_zero_times(uint32_t x, uint32_t sum) {
  if constexpr (sizeof(T) == 4) asm("fma.rn.f32 %0, %1, 0f00000000, %0;" : "+r"(sum) : "r"(x));
  else if constexpr (__is_same(T, bfloat16)) asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
  else asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
  return sum;
}

// True if the word, or one of its two halves, is inf or NaN: its exponent bits are all ones.
template <class T>
__device__ __forceinline__ bool has_nonfinite(uint32_t pair) {
  if constexpr (sizeof(T) == 4) return (pair & 0x7f800000u) == 0x7f800000u;
  constexpr uint32_t kExponent = sizeof(T) == 2 && __is_same(T, bfloat16) ? 0x7f80u : 0x7c00u;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// max that every thread of a quad (the four lanes that share a fragment row) learns; likewise sum.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Largest float by integer order: works for any mix of signs. NaN, as the largest integer, stays; -0, the least, becomes 0.
__device__ __forceinline__ void atomic_max(float* address, float value) {
  if (isnan(value))
    atomicMax(reinterpret_cast<int*>(address), 0x7fffffff);
  else if (value >= 0)
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value + 0.f));
  else
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
}

}  // namespace tilewise::ptx
