// Plain C++ for any machine: vectors of 4 floats that compilers map to SSE2 or NEON.
#pragma once
#include <cstdint>
#include <cstring>

namespace tilewise::simd_scalar {

#define TW_INLINE inline __attribute__((always_inline))

struct Simd {
  static constexpr bool kPairs = false;
  static constexpr int kLanes = 4;
  static constexpr int kPanelVectors = 2;
  static constexpr int kExp2Degree = 5;
  typedef float V __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));

  static TW_INLINE V zero() { return V{0, 0, 0, 0}; }
  static TW_INLINE V set1(float x) { return V{x, x, x, x}; }
  static TW_INLINE V load(const float* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
  static TW_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
  static TW_INLINE V add(V a, V b) { return a + b; }
  static TW_INLINE V sub(V a, V b) { return a - b; }
  static TW_INLINE V mul(V a, V b) { return a * b; }
  static TW_INLINE V fma(V a, V b, V c) { return a * b + c; }
  static TW_INLINE V dot(V a, V b, V c) { return a * b + c; }
  static TW_INLINE V select(I mask, V a, V b) { return (V)((mask & (I)a) | (~mask & (I)b)); }
  static TW_INLINE V max(V a, V b) { return select(a > b, a, b); }  // b if either is NaN, like the x86 instruction
  static TW_INLINE V min(V a, V b) { return select(a < b, a, b); }
  static TW_INLINE bool any_greater(V a, V b) {
    const I m = a > b;
    return (m[0] | m[1] | m[2] | m[3]) != 0;
  }
  static TW_INLINE float reduce_max(V v) {
    float m = v[0];
    for (int n = 1; n < 4; ++n) m = v[n] > m ? v[n] : m;
    return m;
  }
  static TW_INLINE float reduce_add(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }

  // Lanes in [begin, end) keep v, the others get `other`.
  static TW_INLINE V keep_range(V v, V other, int32_t begin, int32_t end) {
    const I lane{0, 1, 2, 3};
    return select((lane >= begin) & (lane < end), v, other);
  }
  static TW_INLINE V keep_bits(V v, uint32_t bits) {
    const I bit{1, 2, 4, 8};
    return (V)((I)v & (((I{} + (int32_t)bits) & bit) != 0));
  }
  static TW_INLINE V select_equal(V x, V value, V a, V b) { return select(x == value, a, b); }

  // 2^n * p for integral n <= 128, p in [0.7, 1.5]; n < -126 gives 0, NaN stays NaN through p.
  static TW_INLINE V round(V x) {  // nearest integer, |x| < 2^22; NaN gives garbage that p's NaN covers
    const V magic = set1(12582912.0f);
    return (x + magic) - magic;
  }
  static TW_INLINE V scale2(V p, V n) {
    const V clamped = max(set1(-126), min(set1(127), n));
    const I exponent = (I)(clamped + set1(12582912.0f)) << 23;
    const V scaled = (V)((I)p + exponent);
    return select(n < set1(-126), zero(), scaled);
  }
  static TW_INLINE V reciprocal(V x) { return set1(1) / x; }
  static TW_INLINE V abs(V x) { return (V)((I)x & 0x7fffffff); }
  static TW_INLINE V copy_sign(V magnitude, V sign) {
    return (V)(((I)magnitude & 0x7fffffff) | ((I)sign & (int32_t)0x80000000));
  }
  static TW_INLINE V select_less(V x, V y, V a, V b) { return select(x < y, a, b); }

  static TW_INLINE V load_bf16(const void* p) {
    uint16_t h[4];
    std::memcpy(h, p, sizeof h);
    const I bits{(int32_t)((uint32_t)h[0] << 16), (int32_t)((uint32_t)h[1] << 16), (int32_t)((uint32_t)h[2] << 16),
                 (int32_t)((uint32_t)h[3] << 16)};
    return (V)bits;
  }
  static TW_INLINE float f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    uint32_t out;
    if (magnitude >= 0x7c00) {
      out = sign | 0x7f800000u | (magnitude & 0x3ff) << 13;
    } else if (magnitude < 0x400) {
      const float value = (float)magnitude * 0x1p-24f;
      std::memcpy(&out, &value, 4);
      out |= sign;
    } else {
      out = sign | ((magnitude + 0x1c000) << 13);
    }
    float value;
    std::memcpy(&value, &out, 4);
    return value;
  }
  static TW_INLINE V load_f16(const void* p) {
    uint16_t h[4];
    std::memcpy(h, p, sizeof h);
    return V{f16(h[0]), f16(h[1]), f16(h[2]), f16(h[3])};
  }
  static TW_INLINE void store_bf16(void* p, V v) {
    uint16_t out[4];
    for (int n = 0; n < 4; ++n) {
      uint32_t bits;
      const float x = v[n];
      std::memcpy(&bits, &x, 4);
      out[n] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40
                                                             : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    std::memcpy(p, out, sizeof out);
  }
  static TW_INLINE void store_f16(void* p, V v) {
    uint16_t out[4];
    for (int n = 0; n < 4; ++n) {
      uint32_t bits;
      const float x = v[n];
      std::memcpy(&bits, &x, 4);
      const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
      const uint32_t magnitude = bits & 0x7fffffffu;
      if (magnitude > 0x7f800000u) {
        out[n] = sign | 0x7e00;
      } else if (magnitude >= 0x477ff000u) {
        out[n] = sign | 0x7c00;
      } else if (magnitude < 0x38800000u) {
        float small;
        std::memcpy(&small, &magnitude, 4);
        small += 0.5f;
        uint32_t shifted;
        std::memcpy(&shifted, &small, 4);
        out[n] = (uint16_t)(sign | (shifted - 0x3f000000u));
      } else {
        out[n] = (uint16_t)(sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000u) >> 13));
      }
    }
    std::memcpy(p, out, sizeof out);
  }

  static TW_INLINE void transpose(V* r) {
    for (int i = 0; i < 4; ++i)
      for (int j = i + 1; j < 4; ++j) {
        const float x = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = x;
      }
  }
};

}  // namespace tilewise::simd_scalar
