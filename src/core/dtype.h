// Element types: their sizes, names, and conversions to and from float with round-to-nearest-even.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "tilewise/tilewise.h"

namespace tilewise {

inline constexpr int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case TW_FLOAT32: case TW_INT32: return 4;
    case TW_FLOAT16: case TW_BFLOAT16: return 2;
    case TW_FLOAT64: case TW_INT64: return 8;
    case TW_BOOL: return 1;
    default: return 0;
  }
}

inline constexpr const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case TW_FLOAT32: return "f32";
    case TW_FLOAT16: return "f16";
    case TW_BFLOAT16: return "bf16";
    case TW_FLOAT64: return "f64";
    case TW_INT32: return "i32";
    case TW_INT64: return "i64";
    case TW_BOOL: return "bool";
    default: return "unknown";
  }
}

// -1 if the name is none.
inline constexpr int32_t dtype_from_name(std::string_view name) {
  for (int32_t dtype = TW_FLOAT32; dtype <= TW_BOOL; ++dtype)
    if (name == dtype_name(dtype)) return dtype;
  return -1;
}

inline constexpr bool is_float(int32_t dtype) { return dtype >= TW_FLOAT32 && dtype <= TW_FLOAT64; }

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ff) << 13));
  if (magnitude < 0x400)  // subnormal: units of 2^-24
    return std::copysign(static_cast<float>(magnitude) * 0x1p-24f, std::bit_cast<float>(sign | 0x3f800000u));
  return std::bit_cast<float>(sign | ((magnitude + 0x1c000) << 13));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);           // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);          // >= 65520 rounds to inf
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves round(value * 2^24) in the low mantissa bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Element `index` of `data`, as double; bool is 0 or 1.
inline double load_element(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case TW_FLOAT32: return static_cast<const float*>(data)[index];
    case TW_FLOAT64: return static_cast<const double*>(data)[index];
    case TW_FLOAT16: return f16_to_float(static_cast<const uint16_t*>(data)[index]);
    case TW_BFLOAT16: return bf16_to_float(static_cast<const uint16_t*>(data)[index]);
    case TW_INT32: return static_cast<const int32_t*>(data)[index];
    case TW_INT64: return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    case TW_BOOL: return static_cast<const uint8_t*>(data)[index] != 0;
    default: return 0;
  }
}

// Rounds once from double to float, then to the 16-bit types.
inline void store_element(void* data, int32_t dtype, int64_t index, double value) {
  switch (dtype) {
    case TW_FLOAT32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    case TW_FLOAT64: static_cast<double*>(data)[index] = value; break;
    case TW_FLOAT16: static_cast<uint16_t*>(data)[index] = float_to_f16(static_cast<float>(value)); break;
    case TW_BFLOAT16: static_cast<uint16_t*>(data)[index] = float_to_bf16(static_cast<float>(value)); break;
    case TW_INT32: static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value); break;
    case TW_INT64: static_cast<int64_t*>(data)[index] = static_cast<int64_t>(value); break;
    case TW_BOOL: static_cast<uint8_t*>(data)[index] = value != 0; break;
    default: break;
  }
}

}  // namespace tilewise
