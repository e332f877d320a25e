// AVX-512 (F, DQ, BW, VL) and, with pairs, AVX512-BF16: vectors of 16 floats, 32 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace tilewise::simd_avx512 {

#define TW_INLINE inline __attribute__((always_inline))

template <bool pairs>
struct Simd {
  static constexpr bool kPairs = pairs;
  static constexpr int kLanes = 16;
  static constexpr int kPanelVectors = 4;
  static constexpr int kExp2Degree = pairs ? 4 : 5;  // bfloat16 probabilities hold 8 bits: 2.8e-6 is far below
  using V = __m512;

  static TW_INLINE V zero() { return _mm512_setzero_ps(); }
  static TW_INLINE V set1(float x) { return _mm512_set1_ps(x); }
  static TW_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
  static TW_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static TW_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
  static TW_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static TW_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static TW_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static TW_INLINE V dot(V a, V b, V c) {
#if defined(__AVX512BF16__)
    if constexpr (pairs) return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#endif
    return _mm512_fmadd_ps(a, b, c);
  }
  static TW_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }  // b if either is NaN
  static TW_INLINE V min(V a, V b) { return _mm512_min_ps(a, b); }
  static TW_INLINE bool any_greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
  static TW_INLINE float reduce_max(V v) { return _mm512_reduce_max_ps(v); }
  static TW_INLINE float reduce_add(V v) { return _mm512_reduce_add_ps(v); }
  static TW_INLINE V keep_range(V v, V other, int32_t begin, int32_t end) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 inside = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                             _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
    return _mm512_mask_blend_ps(inside, other, v);
  }
  static TW_INLINE V keep_bits(V v, uint32_t bits) { return _mm512_maskz_mov_ps((__mmask16)bits, v); }
  static TW_INLINE V select_equal(V x, V value, V a, V b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, value, _CMP_EQ_OQ), b, a);
  }
  static TW_INLINE V select_less(V x, V y, V a, V b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
  }
  static TW_INLINE V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static TW_INLINE V scale2(V p, V n) { return _mm512_scalef_ps(p, n); }  // underflows to 0 by itself
  static TW_INLINE V reciprocal(V x) { return _mm512_div_ps(_mm512_set1_ps(1), x); }
  static TW_INLINE V abs(V x) { return _mm512_abs_ps(x); }
  static TW_INLINE V copy_sign(V magnitude, V sign) {
    const __m512i bit = _mm512_set1_epi32((int)0x80000000);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xca));
  }
  static TW_INLINE __m512i widen(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
  static TW_INLINE V load_bf16(const void* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(widen(p), 16)); }
  static TW_INLINE V load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static TW_INLINE __m256i to_bf16(V v) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet));
#endif
  }
  // Rounds half to even through integers: the instruction would flush subnormals.
  static TW_INLINE void store_bf16(void* p, V v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __m512i out = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(out));
  }
  static TW_INLINE void store_f16(void* p, V v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // Pairs: 32 (or 16) consecutive columns as bfloat16, in order.
  static TW_INLINE void store_pairs(float* p, V low, V high) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#endif
  }
  static TW_INLINE void store_pairs(float* p, V v) { _mm256_storeu_si256((__m256i*)p, to_bf16(v)); }
  // Pairs of rows: lane c holds (even[c], odd[c]).
  static TW_INLINE void store_row_pairs(float* p, V even, V odd) {
    _mm512_storeu_si512(p, _mm512_or_si512(_mm512_cvtepu16_epi32(to_bf16(even)),
                                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(odd)), 16)));
  }

  // Pairs in a lane: the first is the low half. As floats, they are exact.
  static TW_INLINE V first_of_pairs(V lanes) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(lanes), 16)); }
  static TW_INLINE V second_of_pairs(V lanes) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(lanes), _mm512_set1_epi32((int)0xffff0000u)));
  }
  static TW_INLINE V pairs_of(V first, V second) {  // both already bfloat16 values
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second)));
  }
  static TW_INLINE V negate_pairs(V lanes) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(lanes), _mm512_set1_epi32((int)0x80008000u)));
  }

  static TW_INLINE void transpose(V* r) {
    V t[16], u[16];
    for (int n = 0; n < 8; ++n) {
      t[2 * n] = _mm512_unpacklo_ps(r[2 * n], r[2 * n + 1]);
      t[2 * n + 1] = _mm512_unpackhi_ps(r[2 * n], r[2 * n + 1]);
    }
    for (int n = 0; n < 4; ++n) {  // u[4 n + k]: column k of each 4 x 4 block, rows 4 n ..
      u[4 * n] = _mm512_shuffle_ps(t[4 * n], t[4 * n + 2], 0x44);
      u[4 * n + 1] = _mm512_shuffle_ps(t[4 * n], t[4 * n + 2], 0xee);
      u[4 * n + 2] = _mm512_shuffle_ps(t[4 * n + 1], t[4 * n + 3], 0x44);
      u[4 * n + 3] = _mm512_shuffle_ps(t[4 * n + 1], t[4 * n + 3], 0xee);
    }
    for (int n = 0; n < 4; ++n) {  // 128-bit blocks: a 4 x 4 transpose of blocks
      const V a = _mm512_shuffle_f32x4(u[n], u[n + 4], 0x88), b = _mm512_shuffle_f32x4(u[n], u[n + 4], 0xdd);
      const V c = _mm512_shuffle_f32x4(u[n + 8], u[n + 12], 0x88), d = _mm512_shuffle_f32x4(u[n + 8], u[n + 12], 0xdd);
      r[n] = _mm512_shuffle_f32x4(a, c, 0x88);
      r[n + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
      r[n + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
      r[n + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
};

}  // namespace tilewise::simd_avx512
