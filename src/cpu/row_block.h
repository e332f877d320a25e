// A stretch of a row of any float dtype and stride, held in float32 or float64 on the stack, in whole vectors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "cpu/exp.h"
#include "cpu/isa.h"

namespace tilewise {

typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));
typedef double Double4 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));
typedef double Double16 __attribute__((vector_size(128)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef int32_t Int16 __attribute__((vector_size(64)));

// Maximum (NaN aside) of n floats, and exp(value - base) in place with the sum of it; n is a multiple of 16. One body,
// compiled for each vector length.
template <class Float, class Double, class Int>
struct VectorRow {
  static constexpr int kLanes = sizeof(Float) / sizeof(float);

  static TW_ALWAYS_INLINE float max(const float* values, int64_t n) {
    Float max = Float{} - INFINITY, x;
    for (int64_t k = 0; k < n; k += kLanes) {
      std::memcpy(&x, values + k, sizeof x);
      max = x > max ? x : max;
    }
    float result = max[0];
    for (int lane = 1; lane < kLanes; ++lane) result = max[lane] > result ? max[lane] : result;
    return result;
  }

  static TW_ALWAYS_INLINE double exponentiate(float* values, int64_t n, float base) {
    Double sum = {};
    for (int64_t begin = 0; begin < n; begin += 16 * kLanes) {  // a float32 sum has 16 terms: its error is small
      Float part = {}, x;
      for (int64_t k = begin; k < std::min(n, begin + 16 * kLanes); k += kLanes) {
        std::memcpy(&x, values + k, sizeof x);
        x = x - base;
        exp_in_place<Float, Int>(x);
        std::memcpy(values + k, &x, sizeof x);
        part += x;
      }
      sum += __builtin_convertvector(part, Double);
    }
    double total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    return total;
  }
};

struct RowFunctions {
  float (*max)(const float* values, int64_t n);
  double (*exponentiate)(float* values, int64_t n, float base);
};

using VectorRow4 = VectorRow<Float4, Double4, Int4>;
using VectorRow8 = VectorRow<Float8, Double8, Int8>;
using VectorRow16 = VectorRow<Float16, Double16, Int16>;

inline float row_max_4(const float* values, int64_t n) { return VectorRow4::max(values, n); }
inline double exponentiate_4(float* values, int64_t n, float base) { return VectorRow4::exponentiate(values, n, base); }

#if defined(__x86_64__)
#define TW_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TW_TARGET_AVX512 __attribute__((target("avx512f,avx512dq,fma")))
TW_TARGET_AVX2 inline float row_max_8(const float* values, int64_t n) { return VectorRow8::max(values, n); }
TW_TARGET_AVX2 inline double exponentiate_8(float* values, int64_t n, float base) {
  return VectorRow8::exponentiate(values, n, base);
}
TW_TARGET_AVX512 inline float row_max_16(const float* values, int64_t n) { return VectorRow16::max(values, n); }
TW_TARGET_AVX512 inline double exponentiate_16(float* values, int64_t n, float base) {
  return VectorRow16::exponentiate(values, n, base);
}
#endif

inline RowFunctions choose_row_functions() {  // for this machine
#if defined(__x86_64__)
  if (has_isa(Isa::kAvx512)) return {row_max_16, exponentiate_16};
  if (has_isa(Isa::kAvx2)) return {row_max_8, exponentiate_8};
#endif
  return {row_max_4, exponentiate_4};
}

inline float row_max(const RowFunctions& row, const float* values, int64_t n) { return row.max(values, n); }
inline double row_max(const RowFunctions&, const double* values, int64_t n) {
  double max = -INFINITY;
  for (int64_t k = 0; k < n; ++k) max = values[k] > max ? values[k] : max;
  return max;
}
inline double row_exponentiate(const RowFunctions& row, float* values, int64_t n, float base) {
  return row.exponentiate(values, n, base);
}
inline double row_exponentiate(const RowFunctions&, double* values, int64_t n, double base) {
  double sum = 0;
  for (int64_t k = 0; k < n; ++k) sum += values[k] = std::exp(values[k] - base);
  return sum;
}

template <class Real>
struct RowBlock {
  static constexpr int64_t kSize = 4096;  // 16 KiB of float32: stays in the first-level cache

  alignas(64) Real values[kSize];  // logits, or what has become of them
  int64_t size = 0;
  const RowFunctions& row;

  explicit RowBlock(const RowFunctions& functions) : row(functions) {}

  int64_t padded() const { return (size + 15) / 16 * 16; }

  // n elements from `offset` on; the last vector is filled up with -inf, whose weight is 0.
  void load(const tw_tensor& x, int64_t offset, int64_t stride, int64_t n) {
    size = n;
    const auto convert = [&](const auto* data, auto&& to_real) {
      data += offset;
      if (stride == 1)
        for (int64_t k = 0; k < n; ++k) values[k] = static_cast<Real>(to_real(data[k]));
      else
        for (int64_t k = 0; k < n; ++k) values[k] = static_cast<Real>(to_real(data[k * stride]));
    };
    switch (x.dtype) {
      case TW_FLOAT32: convert(static_cast<const float*>(x.data), [](float value) { return value; }); break;
      case TW_FLOAT64: convert(static_cast<const double*>(x.data), [](double value) { return value; }); break;
      case TW_FLOAT16: convert(static_cast<const uint16_t*>(x.data), f16_to_float); break;
      default: convert(static_cast<const uint16_t*>(x.data), bf16_to_float); break;
    }
    std::fill(values + n, values + padded(), -static_cast<Real>(INFINITY));
  }

  // values * factor, rounded to y's dtype.
  void store(const tw_tensor& y, int64_t offset, int64_t stride, Real factor) const {
    const auto convert = [&](auto* data, auto&& from_real) {
      data += offset;
      if (stride == 1)
        for (int64_t k = 0; k < size; ++k) data[k] = from_real(values[k] * factor);
      else
        for (int64_t k = 0; k < size; ++k) data[k * stride] = from_real(values[k] * factor);
    };
    const auto as_float = [](Real value) { return static_cast<float>(value); };
    switch (y.dtype) {
      case TW_FLOAT32: convert(static_cast<float*>(y.data), as_float); break;
      case TW_FLOAT64:
        convert(static_cast<double*>(y.data), [](Real value) { return static_cast<double>(value); });
        break;
      case TW_FLOAT16:
        convert(static_cast<uint16_t*>(y.data), [&](Real value) { return float_to_f16(as_float(value)); });
        break;
      default:
        convert(static_cast<uint16_t*>(y.data), [&](Real value) { return float_to_bf16(as_float(value)); });
        break;
    }
  }

  Real max() const { return row_max(row, values, padded()); }

  // Turns logits into weights exp(logit - max) and returns their sum. A maximum of -inf (all masked) counts as 0, so
  // that every weight is 0 and a NaN among them shows.
  double exponentiate(Real max) {
    return row_exponentiate(row, values, padded(), max == -static_cast<Real>(INFINITY) ? Real(0) : max);
  }
};

}  // namespace tilewise
