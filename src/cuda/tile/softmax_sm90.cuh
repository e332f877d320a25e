// The softmax of a warpgroup's rows, with a reference that follows the row maximum late.
//
// P = 2^(s c - reference), c = softmax_scale log2(e). Any reference gives the same O / sum as long as nothing overflows
// or vanishes: bfloat16 and float32 keep their relative precision over 2^+-126. So the reference is set once, from the
// first tile of a row, kHeadroom above its maximum (P starts at 2^-kHeadroom), and is raised only after a tile whose P
// grew large. That takes the row maximum, its shuffles and the rescaling of O off the path of every other tile.
//
// What this cannot do right, it notices: P overflows only if one logit lies over ~140 (log2 units) above everything its
// row saw before. Then sum is inf or NaN, and the rows are computed again (tile/exact_rows.cuh).
#pragma once
#include "cuda/config_sm90.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda {

// One thread's two rows: 16 warp + lane / 4, and 8 below it.
struct RowStatistics {
  float reference[2];
  float sum[2];      // RowSum::kFloat32: over this thread's columns. kOnesColumn: not used, O carries it
  float maximum[2];  // for max_logit: of this thread's columns
};

template <Element kElement>
struct SoftmaxRange;
template <>
struct SoftmaxRange<Element::kBfloat16> {
  static constexpr int kHeadroom = 16;
  static constexpr float kLarge = 0x1p30f;
};
// float16: P is subnormal under 2^-14 and infinite from 2^16 on. The largest weights start at 2^-4; what is subnormal
// then is over 2^10 times smaller, and its absolute error, 2^-25, no larger than 2^-21 of the largest.
template <>
struct SoftmaxRange<Element::kFloat16> {
  static constexpr int kHeadroom = 4;
  static constexpr float kLarge = 0x1p13f;
};

// Largest of this thread's values of a row.
template <int kCount>
__device__ __forceinline__ float row_max(const float (&s)[kCount], int half) {
  float a = fmaxf(s[2 * half], s[2 * half + 1]), b = fmaxf(s[4 + 2 * half], s[5 + 2 * half]);
#pragma unroll
  for (int n = 8; n < kCount; n += 8) {
    a = fmaxf(a, fmaxf(s[n + 2 * half], s[n + 2 * half + 1]));
    b = fmaxf(b, fmaxf(s[n + 4 + 2 * half], s[n + 5 + 2 * half]));
  }
  return fmaxf(a, b);
}

// The reference of rows that meet their first tile.
template <Element kElement, int kCount>
__device__ __forceinline__ void start_rows(RowStatistics& rows, const float (&s)[kCount], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float maximum = ptx::quad_max(row_max(s, half));
    // A row without visible keys has maximum -inf: any finite reference makes its P zero.
    rows.reference[half] = (maximum == kMinusInf ? 0.f : maximum * scale_log2) + SoftmaxRange<kElement>::kHeadroom;
    rows.sum[half] = 0.f;
    rows.maximum[half] = kMinusInf;
  }
}

// What a thread wants to know of its P besides P: with its rows' sums in the tensor cores, float16 still has to see in time
// that P grows towards 2^16. A maximum costs the tensor cores a sixth of an addition.
enum class Noted { kNothing, kSum, kMaximum };

// s becomes P; `noted` is of this thread's columns of a row.
template <Noted kNoted, int kCount>
__device__ __forceinline__ void exponentials(float (&s)[kCount], const float (&reference)[2], float scale_log2,
                                             float (&noted)[2]) {
  const auto note = [](float& total, float x) {
    if constexpr (kNoted == Noted::kSum) total += x;
    if constexpr (kNoted == Noted::kMaximum) total = fmaxf(total, x);
  };
  float even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < kCount; n += 4)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& x = s[n + 2 * half];
      float& y = s[n + 2 * half + 1];
      x = ptx::exp2_approx(fmaf(x, scale_log2, -reference[half]));
      y = ptx::exp2_approx(fmaf(y, scale_log2, -reference[half]));
      note(even[half], x);
      note(odd[half], y);
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    note(even[half], odd[half]);
    noted[half] = even[half];
  }
}

// After a tile whose P grew large: raises the references, and scales down what was computed against the old ones, by
// powers of two. `at_least`: values that must come down too (the sums, where O carries them).
template <Element kElement, int kCount, int kColumns>
__device__ __forceinline__ void raise_references(RowStatistics& rows, float (&s)[kCount], float (&o)[kColumns],
                                                 const float (&at_least)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float largest = ptx::quad_max(fmaxf(row_max(s, half), at_least[half]));
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    const int raise = largest > 1.f ? min(exponent + SoftmaxRange<kElement>::kHeadroom, 126) : 0;
    const float factor = __uint_as_float(static_cast<uint32_t>(127 - raise) << 23);
    rows.reference[half] += static_cast<float>(raise);
    rows.sum[half] *= factor;
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      s[n + 2 * half] *= factor;
      s[n + 2 * half + 1] *= factor;
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) {
      o[n + 2 * half] *= factor;
      o[n + 2 * half + 1] *= factor;
    }
  }
}

// With a bias, the first tiles of a row may be hidden, by -inf or by the most negative number of a type, and its first real logits be met
// late. As long as a row of the warp has met nothing above 2^kLateBelow, references are exact maxima, as in any online softmax: found,
// and O and the sums scaled, in every step. An empty row has reference +inf; its P is 0. A row of nothing but numbers below kFarBelow, whose
// exponents would be -inf, has its largest logit for a reference, without c: P = 2^((s - base) c - reference), base = 0 for all others.
inline constexpr float kLateBelow = -128.f;
inline constexpr float kFarBelow = -0x1p126f;

template <Element kElement>
struct LateReference {
  float base, reference;
  __device__ __forceinline__ explicit LateReference(float kept)
      : base(kept < kFarBelow ? kept : 0.f), reference(kept < kFarBelow ? SoftmaxRange<kElement>::kHeadroom : kept) {}
  // Of a row whose largest logit so far is `maximum`; NaN, computed again, in the one binade that would not be told apart.
  static __device__ __forceinline__ float of(float maximum, float scale_log2) {
    const float exponent = maximum * scale_log2;
    return exponent >= kFarBelow ? exponent + SoftmaxRange<kElement>::kHeadroom : maximum < kFarBelow ? maximum : __int_as_float(0x7fffffff);
  }
};

__device__ __forceinline__ void forget_rows(RowStatistics& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.reference[half] = -kMinusInf;
    rows.sum[half] = 0.f;
    rows.maximum[half] = kMinusInf;
  }
}

// s becomes P, `noted` its sums in this thread; factor: for what O holds. Must references go on following?
template <Element kElement, int kCount>
__device__ __forceinline__ bool follow_rows(RowStatistics& rows, float (&s)[kCount], float scale_log2, float (&noted)[2],
                                            float (&factor)[2]) {
  bool follow = false;
  float reference[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float maximum = ptx::quad_max(row_max(s, half));
    const LateReference<kElement> old(rows.reference[half]);
    factor[half] = 1.f;
    if (old.reference == -kMinusInf) {
      if (maximum != kMinusInf) rows.reference[half] = LateReference<kElement>::of(maximum, scale_log2);
    } else {  // by how much the largest logit grew
      const float growth = fmaf(maximum - old.base, scale_log2, SoftmaxRange<kElement>::kHeadroom - old.reference);
      if (growth > 0.f) {
        rows.reference[half] = LateReference<kElement>::of(maximum, scale_log2);
        factor[half] = ptx::exp2_approx(-growth);
        rows.sum[half] *= factor[half];
      }
    }
    const LateReference<kElement> now(rows.reference[half]);
    reference[half] = now.reference;
    follow |= now.base != 0.f || now.reference == -kMinusInf || now.reference < kLateBelow;
#pragma unroll
    for (int n = 0; n < kCount; n += 4) s[n + 2 * half] -= now.base, s[n + 2 * half + 1] -= now.base;
  }
  exponentials<Noted::kSum>(s, reference, scale_log2, noted);
  return __any_sync(0xffffffffu, follow);
}

template <int kColumns>
__device__ __forceinline__ void scale_rows(float (&o)[kColumns], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) o[n] *= factor[n >> 1 & 1];
}

}  // namespace tilewise::cuda
