// Sixteen lanes in plain C++: the definition that the other instruction sets must equal bit by bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace outrider {
namespace {

// Four keys go to two places, so that their sums end up as neighbours in 128 bits.
constexpr int kPairOrder[] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};

struct V {
  static constexpr int tile = 4, dense_tile = 2, value_chunk = 2, value_heads = 4, queries = 2;
  static constexpr bool signed_bytes = false;
  struct F {
    float v[16];
  };
  struct I {
    int32_t v[16];
  };
  struct W {
    uint8_t v[64];
  };

  template <class Fn>
  static F each(Fn fn) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = fn(i);
    return r;
  }

  static F set(float x) {
    return each([&](int) { return x; });
  }
  static F load(const float* p) {
    F r;
    std::memcpy(r.v, p, 64);
    return r;
  }
  static void store(float* p, const F& a) { std::memcpy(p, a.v, 64); }
  static F load_half(const uint8_t* p) {
    uint16_t h[16];
    std::memcpy(h, p, 32);
    return each([&](int i) { return from_half(h[i]); });
  }
  static void store_half(uint16_t* p, const F& a) {
    for (int i = 0; i < 16; i++) p[i] = to_half(a.v[i]);
  }
  static F load_bf16(const uint16_t* p) {
    return each([&](int i) { return from_bf16(p[i]); });
  }
  static F load_int8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static F add(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  static F max(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F min(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  // a < b ? 0 : c
  static F zero_below(const F& a, const F& b, const F& c) {
    return each([&](int i) { return a.v[i] < b.v[i] ? 0.0f : c.v[i]; });
  }
  // 2 to the power of n, in [-126, 127], where `whole` is n + 1.5 * 2^23: n is in its lowest bits.
  static F pow2(const F& whole) {
    return each([&](int i) { return from_bits((to_bits(whole.v[i]) << 23) + 0x3f800000u); });
  }
  // Rounded as bf16 is, still as fp32; NaN stays NaN.
  static F to_bf16(const F& a) {
    return each([&](int i) { return from_bf16(outrider::to_bf16(a.v[i])); });
  }
  // p[0] and p[1] by turns.
  static F set2(const float* p) {
    return each([&](int i) { return p[i & 1]; });
  }
  // The layout of 16 keys that attention reads: dims two by two, and of such a pair the keys in the order of kPairOrder,
  // each with its two numbers. Puts dims d .. d + 4 of fp32 vectors there, or d .. d + 8 of 16-bit ones.
  template <class T>
  static void pairs(const T* const* keys, int64_t d, T* to) {
    for (const int64_t end = d + 16 / static_cast<int64_t>(sizeof(T)); d < end; d += 2)
      for (int key : kPairOrder)
        for (int i = 0; i < 2; i++) *to++ = keys[key][d + i];
  }
  // From the sums of a pair's first eight keys and its last eight: even and odd dims together, the keys in their order.
  static F add_pairs(const F& a, const F& b) {
    F r;
    for (int i = 0; i < 16; i++) {
      const F& from = i < 8 ? a : b;
      r.v[kPairOrder[i]] = from.v[2 * i % 16] + from.v[2 * i % 16 + 1];
    }
    return r;
  }
  // The one order in which lanes are added: i with i + 8, then + 4, + 2, + 1.
  static float sum(F a) {
    for (int s = 8; s; s >>= 1)
      for (int i = 0; i < s; i++) a.v[i] += a.v[i + s];
    return a.v[0];
  }
  static float largest(const F& a) {
    float m = a.v[0];
    for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
  }
  // Largest magnitude of 32 floats, compared as integers so that NaN wins.
  static float magnitude32(const float* x) {
    uint32_t m = 0;
    for (int i = 0; i < 32; i++) {
      const uint32_t bits = to_bits(x[i]) & 0x7fffffffu;
      m = bits > m ? bits : m;
    }
    return from_bits(m);
  }
  // 32 floats times `inv`, rounded to nearest even, as bytes; returns their sum.
  static int32_t round32(const float* x, float inv, int8_t* q) {
    int32_t total = 0;
    for (int i = 0; i < 32; i++) {
      const float y = x[i] * inv;
      const int32_t n = y >= -128.0f && y <= 127.5f ? static_cast<int32_t>(std::lrintf(y)) : -128;
      q[i] = static_cast<int8_t>(n > 127 ? 127 : n);
      total += q[i];
    }
    return total;
  }

  static I set_i(int32_t x) {
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = x;
    return r;
  }
  static F to_f(const I& a) {
    return each([&](int i) { return static_cast<float>(a.v[i]); });
  }
  // 64 codes; less 128 each where V::signed_bytes says so
  static W bytes(const uint8_t* p) {
    W w;
    std::memcpy(w.v, p, 64);
    return w;
  }
  static void nibbles(const uint8_t* p, W& low, W& high) {
    for (int i = 0; i < 64; i++) low.v[i] = p[i] & 15, high.v[i] = p[i] >> 4;
  }
  // acc[i] + sum over j < 4 of w[4i + j] * x[j]
  static I dot(const I& acc, const W& w, const int8_t* x) {
    I r;
    for (int i = 0; i < 16; i++) {
      int32_t s = acc.v[i];
      for (int j = 0; j < 4; j++) s += static_cast<int32_t>(w.v[4 * i + j]) * x[j];
      r.v[i] = s;
    }
    return r;
  }
};

}  // namespace
}  // namespace outrider
