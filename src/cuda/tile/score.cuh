// From q . k to the logit: scale, softcap, ALiBi, bias; and which logits do not exist.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/tile/sequence.cuh"
#include "tilewise/tilewise.h"

namespace tilewise::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMinusInf = -__builtin_huge_valf();

// tanh(x) = 1 - 2 / (e^2x + 1): absolute error 4e-7, where tanh.approx has 5e-4 of the value. For float32, tanhf: 1e-7.
template <class T = ptx::float16>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return tanhf(x);
  return 1.f - 2.f * ptx::reciprocal_approx(ptx::exp2_approx(x * (2 * kLog2E)) + 1.f);
}

// An element of the bias: a float, or 0 / -inf of a boolean mask.
__device__ __forceinline__ float bias_of(float x) { return x; }
__device__ __forceinline__ float bias_of(ptx::float16 x) { return ptx::to_float(x); }
__device__ __forceinline__ float bias_of(ptx::bfloat16 x) { return ptx::to_float(x); }
__device__ __forceinline__ float bias_of(uint8_t x) { return x != 0 ? 0.f : kMinusInf; }

TW_HOST_DEVICE inline int bias_bytes(int32_t dtype) { return dtype == TW_FLOAT32 ? 4 : dtype == TW_BOOL ? 1 : 2; }  // an element

// Calls `use` with the pointer of the bias's type: one branch, uniform, for many loads, so that they can be under way together.
template <class Use>
__device__ __forceinline__ void with_bias(const ScoreParams& p, const Use& use) {
  switch (p.bias_dtype) {
    case TW_FLOAT32: return use(static_cast<const float*>(p.bias));
    case TW_FLOAT16: return use(static_cast<const ptx::float16*>(p.bias));
    case TW_BFLOAT16: return use(static_cast<const ptx::bfloat16*>(p.bias));
    default: return use(static_cast<const uint8_t*>(p.bias));
  }
}
__device__ __forceinline__ float load_bias(const ScoreParams& p, int64_t offset) {
  float value = 0.f;
  with_bias(p, [&](const auto* bias) { value = bias_of(bias[offset]); });
  return value;
}

// What is fixed for one row: its query, head and keys.
struct ScoreRow {
  int i;            // query in the sequence
  Range keys;       // visible by length and window
  int64_t bias;     // offset of (row, key 0)
  float slope;      // ALiBi
};

__device__ __forceinline__ ScoreRow score_row(const ScoreParams& p, const DeviceSequence& s, int b, int h, int i) {
  ScoreRow row{i, visible_keys(p, i, s.seqlen_q, s.seqlen_k), 0, 0.f};
  if (p.bias) row.bias = b * p.bias_batch + h * p.bias_head + i * p.bias_row;
  if (p.alibi) row.slope = p.alibi[b * p.alibi_batch + h * p.alibi_head];
  return row;
}

// Is the pair visible? For the rare path of non-finite keys.
__device__ __forceinline__ bool visible(const ScoreParams& p, const ScoreRow& row, int j) {
  if (j < row.keys.begin || j >= row.keys.end) return false;
  return p.bias_dtype != TW_BOOL || static_cast<const uint8_t*>(p.bias)[row.bias + j * p.bias_key] != 0;
}

// Logit before ALiBi, bias and mask, in natural units.
__device__ __forceinline__ float capped(const ScoreParams& p, float dot) {
  const float x = dot * p.scale;
  return p.softcap > 0 ? p.softcap * tanh_of(x / p.softcap) : x;
}

}  // namespace tilewise::cuda
