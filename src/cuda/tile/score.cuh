// From q . k to the logit: scale, softcap, ALiBi, bias; and which logits do not exist.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/tile/sequence.cuh"
#include "tilewise/tilewise.h"

namespace tilewise::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMinusInf = -__builtin_huge_valf();

// tanh(x) = 1 - 2 / (e^2x + 1): absolute error 1e-7, where tanh.approx has 5e-4 of the value.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.f - 2.f * ptx::reciprocal_approx(ptx::exp2_approx(x * (2 * kLog2E)) + 1.f);
}

// Bias of (row, key): a float, or 0 / -inf from a boolean mask. Branches are uniform: one dtype per launch.
__device__ __forceinline__ float load_bias(const ScoreParams& p, int64_t offset) {
  switch (p.bias_dtype) {
    case TW_FLOAT32: return static_cast<const float*>(p.bias)[offset];
    case TW_FLOAT16: return ptx::to_float(static_cast<const ptx::float16*>(p.bias)[offset]);
    case TW_BFLOAT16: return ptx::to_float(static_cast<const ptx::bfloat16*>(p.bias)[offset]);
    default: return static_cast<const uint8_t*>(p.bias)[offset] != 0 ? 0.f : kMinusInf;
  }
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
  return !p.bias || load_bias(p, row.bias + j * p.bias_key) != kMinusInf;
}

// Logit before the mask, in natural units.
__device__ __forceinline__ float capped(const ScoreParams& p, float dot) {
  float x = dot * p.scale;
  if (p.softcap > 0) x = p.softcap * tanh_of(x / p.softcap);
  return x;
}

__device__ __forceinline__ float alibi(const ScoreParams&, const DeviceSequence& s, const ScoreRow& row, int j) {
  return -row.slope * fabsf(static_cast<float>(row.i + s.seqlen_k - s.seqlen_q - j));
}

// The call's dropout with the state that is read from device memory.
__device__ __forceinline__ Dropout resolve_dropout(const ScoreParams& p) {
  Dropout dropout = p.dropout;
  if (p.rng_state) {
    dropout.seed = static_cast<uint64_t>(p.rng_state[0]);
    dropout.offset = static_cast<uint64_t>(p.rng_state[p.rng_stride]);
  }
  return dropout;
}

// Is element e of a draw kept? Dropout::number in the upper half of a word by one byte permute: what lies below does not
// change the comparison with threshold << 16.
__device__ __forceinline__ bool keeps(const Philox4& draw, int e, uint32_t threshold_high) {
  const int next = (e + 1) & 15;
  const uint32_t high = __byte_perm(draw.word[e >> 2], draw.word[next >> 2], (e & 3) << 12 | (4 + (next & 3)) << 8);
  return high < threshold_high;
}

// The same for all 16 elements, bit e for element e.
__device__ __forceinline__ uint32_t keep_bits(const Philox4& draw, uint32_t threshold_high) {
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < 16; ++e) bits |= static_cast<uint32_t>(keeps(draw, e, threshold_high)) << e;
  return bits;
}

}  // namespace tilewise::cuda
