// 16-bit floats, one at a time. In an unnamed namespace: each instruction set compiles its own copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {
namespace {

inline float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float from_bf16(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float f) {
  const uint32_t bits = to_bits(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float from_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = static_cast<float>(fraction) * 0x1p-24f;  // subnormal: exact
  return sign ? -tiny : tiny;
}

// Round to nearest even; `f` must be within +-65504, or no number at all.
inline uint16_t to_half(float f) {
  const uint32_t bits = to_bits(f), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude < 0x38800000u) {  // below the smallest normal half: a multiple of 2^-24
    const float scaled = from_bits(magnitude) * 0x1p24f + 8388608.0f;  // the sum rounds to a whole number
    return static_cast<uint16_t>(sign | (to_bits(scaled) & 0x7ffu));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
}

}  // namespace
}  // namespace outrider
