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

// Logit before ALiBi, bias and mask, in natural units.
__device__ __forceinline__ float capped(const ScoreParams& p, float dot) {
  const float x = dot * p.scale;
  return p.softcap > 0 ? p.softcap * tanh_of(x / p.softcap) : x;
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

// Is element e of a draw kept: 1 or 0, to multiply with. The 16-bit number of Dropout::number becomes the float 2^23 + number
// by a byte permute (two, where its bytes lie in two words), and the saturated difference to the threshold is the answer.
// Comparing and selecting would be twice the work of the integer pipe, which dropout keeps busier than any other.
__device__ __forceinline__ float keep_factor(const Philox4& draw, int e, float limit) {
  constexpr uint32_t kTwo23 = 0x4b000000u;
  const uint32_t word = draw.word[e >> 2];
  const uint32_t number = (e & 3) < 3 ? __byte_perm(word, kTwo23, 0x7400 | (e & 3) << 4 | ((e & 3) + 1))
                                      : __byte_perm(__byte_perm(word, draw.word[(e + 1 & 15) >> 2], 0x0034), kTwo23, 0x7410);
  return __saturatef(limit - __uint_as_float(number));
}

// The same as a comparison with threshold << 16; what lies below the number in the word does not change it.
__device__ __forceinline__ bool keeps(const Philox4& draw, int e, uint32_t threshold_high) {
  const int next = (e + 1) & 15;
  const uint32_t high = __byte_perm(draw.word[e >> 2], draw.word[next >> 2], (e & 3) << 12 | (4 + (next & 3)) << 8);
  return high < threshold_high;
}

__device__ __forceinline__ float keep_limit(const Dropout& dropout) { return 8388608.f + static_cast<float>(dropout.threshold); }

}  // namespace tilewise::cuda
