// AVX2 + FMA + F16C: vectors of 8 floats, 16 registers. Compiled with -mavx2 -mfma -mf16c.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace tilewise::simd_avx2 {

#define TW_INLINE inline __attribute__((always_inline))

struct Simd {
  static constexpr bool kPairs = false;
  static constexpr int kLanes = 8;
  static constexpr int kPanelVectors = 2;  // 6 x 2 accumulators + 2 + 1 of 16 registers
  static constexpr int kExp2Degree = 5;
  using V = __m256;

  static TW_INLINE V zero() { return _mm256_setzero_ps(); }
  static TW_INLINE V set1(float x) { return _mm256_set1_ps(x); }
  static TW_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
  static TW_INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static TW_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
  static TW_INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static TW_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static TW_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static TW_INLINE V dot(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static TW_INLINE V max(V a, V b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static TW_INLINE V min(V a, V b) { return _mm256_min_ps(a, b); }
  static TW_INLINE bool any_greater(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
  static TW_INLINE float reduce_max(V v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static TW_INLINE float reduce_add(V v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static TW_INLINE V keep_range(V v, V other, int32_t begin, int32_t end) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
                                               _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(inside));
  }
  static TW_INLINE V keep_bits(V v, uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), bit), bit);
    return _mm256_and_ps(v, _mm256_castsi256_ps(kept));
  }
  static TW_INLINE V select_equal(V x, V value, V a, V b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, value, _CMP_EQ_OQ));
  }
  static TW_INLINE V select_less(V x, V y, V a, V b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
  static TW_INLINE V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static TW_INLINE V scale2(V p, V n) {  // n < -126 gives 0
    const V clamped = _mm256_max_ps(_mm256_set1_ps(-126), _mm256_min_ps(_mm256_set1_ps(127), n));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(clamped), 23);
    const V scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126), _CMP_LT_OQ), scaled);
  }
  static TW_INLINE V reciprocal(V x) { return _mm256_div_ps(_mm256_set1_ps(1), x); }
  static TW_INLINE V abs(V x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static TW_INLINE V copy_sign(V magnitude, V sign) {
    const V bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
  }
  static TW_INLINE V load_bf16(const void* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
  static TW_INLINE V load_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static TW_INLINE void store_bf16(void* p, V v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i out = _mm256_blendv_epi8(rounded, quiet, is_nan);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1)));
  }
  static TW_INLINE void store_f16(void* p, V v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static TW_INLINE void transpose(V* r) {
    V t[8], u[8];
    for (int n = 0; n < 4; ++n) {
      t[2 * n] = _mm256_unpacklo_ps(r[2 * n], r[2 * n + 1]);
      t[2 * n + 1] = _mm256_unpackhi_ps(r[2 * n], r[2 * n + 1]);
    }
    for (int n = 0; n < 2; ++n) {
      u[4 * n] = _mm256_shuffle_ps(t[4 * n], t[4 * n + 2], 0x44);
      u[4 * n + 1] = _mm256_shuffle_ps(t[4 * n], t[4 * n + 2], 0xee);
      u[4 * n + 2] = _mm256_shuffle_ps(t[4 * n + 1], t[4 * n + 3], 0x44);
      u[4 * n + 3] = _mm256_shuffle_ps(t[4 * n + 1], t[4 * n + 3], 0xee);
    }
    for (int n = 0; n < 4; ++n) {
      r[n] = _mm256_permute2f128_ps(u[n], u[n + 4], 0x20);
      r[n + 4] = _mm256_permute2f128_ps(u[n], u[n + 4], 0x31);
    }
  }
};

}  // namespace tilewise::simd_avx2
