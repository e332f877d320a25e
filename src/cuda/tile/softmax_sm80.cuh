// The online softmax of forward_sm80, of the rows that a warp holds in the accumulators of S = Q K^T: a reference that follows the
// row maximum lazily, the exponentials, and the sums.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

// The softmax state of the rows of one thread: row m, half: 16 m + lane / 4 + 8 half of its warp.
template <int kM>
struct RowState {
  float reference[kM][2];  // -inf until a key is visible; in the units of the logits
  float sum[kM][2];        // of this thread's columns
  float maximum[kM][2];    // true maximum, for max_logit
  int bound[kM][2];        // bits of reference + 8 / c, see exceeds()
  bool settled;            // exceeds() can tell for every row of the warp
  bool large;              // some |reference * c| of the warp is over 2^12, see exponentials()
};

// Does a logit exceed its row's reference by more than 2^8? Bits of floats, read as integers, are in the floats' order from 0 on,
// and below 0 where these are: enough for bounds that are not negative, and sm_90 takes the largest of three integers at once. With
// threads that look at their own logits alone this is 44 instructions for 64 logits, where update_reference() begins with 90.
template <int kM, int kN>
__device__ __forceinline__ bool exceeds(const RowState<kM>& row, const float (&s)[kM][kN][4]) {
  bool any = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int largest = __float_as_int(s[m][0][2 * half]);
      largest = max(largest, __float_as_int(s[m][0][2 * half + 1]));
#pragma unroll
      for (int n = 1; n < kN; ++n)
        largest = __vimax3_s32(largest, __float_as_int(s[m][n][2 * half]), __float_as_int(s[m][n][2 * half + 1]));
      any |= largest > row.bound[m][half];
    }
  return __any_sync(0xffffffffu, any);
}

// What exceeds() needs of the references. Not the large ones, whose logits lose too many bits to a bound.
template <int kM>
__device__ __forceinline__ void settle(RowState<kM>& row, float c) {
  bool open = row.large;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bound = row.reference[m][half] + 8.f / c;
      open |= !(bound >= 0.f);  // a row without a reference among them
      row.bound[m][half] = __float_as_int(bound);
    }
  row.settled = !__any_sync(0xffffffffu, open);
}

// Moves the references of a warp if a logit exceeds one by more than 2^8; rescales sums and output.
template <bool kTrackMaximum, int kM, int kN, int kD>
__device__ __forceinline__ void update_reference(RowState<kM>& row, const float (&s)[kM][kN][4], float (&o)[kM][kD][4],
                                                 float c) {
  float maximum[kM][2];
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      maximum[m][half] = ptx::quad_max(x);
      if constexpr (kTrackMaximum) row.maximum[m][half] = fmaxf(row.maximum[m][half], maximum[m][half]);
      exceeds |= (maximum[m][half] - row.reference[m][half]) * c > 8.f;  // false for -inf - -inf
    }
  if (!__any_sync(0xffffffffu, exceeds)) return;
  bool large = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = row.reference[m][half];
      const float now = fmaxf(old, maximum[m][half]);
      if (now == old) continue;
      const float old_log2 = old * c, now_log2 = now * c;
      large |= fabsf(now_log2) > 4096.f;
      // exponentials() subtracts the rounded product, so the factor must, too, unless it subtracts before it multiplies.
      const bool difference = fabsf(now_log2) > 4096.f || fabsf(old_log2) > 4096.f;
      const float factor = ptx::exp2_approx(difference ? (old - now) * c : old_log2 - now_log2);
      row.reference[m][half] = now;
      row.sum[m][half] *= factor;
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        o[m][n][2 * half] *= factor;
        o[m][n][2 * half + 1] *= factor;
      }
    }
  row.large = row.large || __any_sync(0xffffffffu, large);
}

// What exponentials() subtracts: the reference in base 2. One fused multiply-add per element has an exact product and a
// rounded addend: harmless up to 2^12, but at |reference| ~ 1e12 the rounding alone would overflow, so there the
// reference is subtracted from s beforehand.
template <int kM, int kN>
__device__ __forceinline__ void make_shift(float (&shift)[kM][2], const RowState<kM>& row, float (&s)[kM][kN][4], float c) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = row.reference[m][half] == kMinusInf ? 0.f : row.reference[m][half];
      shift[m][half] = reference * c;
      if (row.large) {
        shift[m][half] = 0.f;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          s[m][n][2 * half] -= reference;
          s[m][n][2 * half + 1] -= reference;
        }
      }
    }
}

// p = exp(s - reference) for columns [8 first, 8 last) of s.
template <int kM, int kN>
__device__ __forceinline__ void exponentials(RowState<kM>& row, const float (&shift)[kM][2], float (&s)[kM][kN][4], float c,
                                             int first, int last) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = first; n < last; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = ptx::exp2_approx(fmaf(s[m][n][e], c, -shift[m][e >> 1]));
        row.sum[m][e >> 1] += s[m][n][e];
      }
}

}  // namespace tilewise::cuda
