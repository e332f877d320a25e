// From the configs' element type to the C++ type.
#pragma once
#include "cuda/config_sm80.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"

namespace tilewise::cuda {

template <Element E>
struct ElementType {
  using Type = ptx::bfloat16;
};
template <>
struct ElementType<Element::kFloat16> {
  using Type = ptx::float16;
};
template <>
struct ElementType<Element::kFloat32> {
  using Type = float;
};

// Two neighbouring columns to global memory; kinds of tensors that are written so: T's own, or float32 beside it.
// `pairs`: to is aligned to both; `both`: the second column exists.
template <class T>
__device__ __forceinline__ void store_columns(void* to, int64_t at, bool is_float, bool pairs, bool both, float x, float y) {
  if constexpr (sizeof(T) == 2) {
    if (!is_float) {
      T* out = static_cast<T*>(to) + at;
      if (pairs && both) {
        *reinterpret_cast<uint32_t*>(out) = ptx::pack<T>(x, y);
      } else {
        out[0] = ptx::from_float<T>(x);
        if (both) out[1] = ptx::from_float<T>(y);
      }
      return;
    }
  }
  float* out = static_cast<float*>(to) + at;
  out[0] = x;
  if (both) out[1] = y;
}

// Lane q of a quad gets x[q] of each lane: x[i] is then that of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int quad) {
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & mask) continue;
      const bool high = (quad & mask) != 0;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + mask], mask);
      (high ? x[i] : x[i + mask]) = other;
    }
}

}  // namespace tilewise::cuda
