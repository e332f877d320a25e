// The dropout decisions of core/dropout.h, two at a time: a register holds the numbers of a pair of elements, and one instruction compares
// both with the limit.
#pragma once
#include "cuda/params.h"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda {

// The call's dropout with the state that is read from device memory.
__device__ __forceinline__ Dropout resolve_dropout(const ScoreParams& p) {
  Dropout dropout = p.dropout;
  if (p.rng_state) {
    dropout.seed = static_cast<uint64_t>(p.rng_state[0]);
    dropout.offset = static_cast<uint64_t>(p.rng_state[p.rng_stride]);
  }
  return dropout;
}

// The numbers of columns 2t, 2t + 1 in group n of 8, row g (half 0) or g + 8: Dropout::number of both.
__device__ __forceinline__ uint32_t numbers_of(const Draw& draw, int n, int half) {
  return half == 0 ? draw.word[n] : __byte_perm(draw.word[n], draw.word[n ^ 1], 0x2705);
}

// Which of two numbers are kept: 0xffff in the half, else 0; or as conditions.
__device__ __forceinline__ uint32_t keep_mask(uint32_t numbers, const Dropout& dropout) {
  return ptx::below_mask(numbers, dropout.limit, !dropout.keeps_below);
}
struct KeptPair {
  bool low, high;
};
__device__ __forceinline__ KeptPair kept_pair(uint32_t numbers, const Dropout& dropout) {
  KeptPair kept;
  ptx::below(numbers, dropout.limit, !dropout.keeps_below, kept.low, kept.high);
  return kept;
}

}  // namespace tilewise::cuda
