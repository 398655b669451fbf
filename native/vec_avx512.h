// Sixteen lanes in one AVX-512 register; see vec_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace outrider {
namespace {

struct V {
  static constexpr int tile = 12, dense_tile = 4, value_chunk = 4, value_heads = 6, queries = 6;
  static constexpr bool signed_bytes = false;
  using F = __m512;
  using I = __m512i;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void store_half(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  static F load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F zero_below(F a, F b, F c) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), c); }
  static F pow2(F whole) {
    const I shifted = _mm512_slli_epi32(_mm512_castps_si512(whole), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f800000)));
  }
#ifdef __AVX512BF16__
  static F to_bf16(F a) {
    const __m256i halves = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
#else
  static F to_bf16(F a) {
    const I bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const F near = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(-0x10000)));
    return _mm512_mask_mov_ps(near, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }
#endif
  static F set2(const float* p) {
    double two;
    std::memcpy(&two, p, 8);
    return _mm512_castpd_ps(_mm512_set1_pd(two));
  }
  static F add_pairs(F a, F b) { return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }
  // 128 bits of four vectors.
  template <class T>
  static I load4(const T* const* v, int64_t at, int a, int b, int c, int d) {
    const auto load = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(v[i] + at)); };
    const I low = _mm512_inserti32x4(_mm512_castsi128_si512(load(a)), load(b), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(low, load(c), 2), load(d), 3);
  }
  template <class T>
  static void pairs(const T* const* keys, int64_t d, T* to) {
    if constexpr (sizeof(T) == sizeof(float)) {
      for (int k = 0; k < 4; k += 2) {
        const I a = load4(keys, d, k, k + 4, k + 8, k + 12), b = load4(keys, d, k + 1, k + 5, k + 9, k + 13);
        _mm512_storeu_si512(to + 8 * k, _mm512_unpacklo_epi64(a, b));
        _mm512_storeu_si512(to + 8 * k + 32, _mm512_unpackhi_epi64(a, b));
      }
    } else {
      const I a = load4(keys, d, 0, 8, 2, 10), b = load4(keys, d, 1, 9, 3, 11);
      const I e = load4(keys, d, 4, 12, 6, 14), f = load4(keys, d, 5, 13, 7, 15);
      const I low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
      const I low4 = _mm512_unpacklo_epi32(e, f), high4 = _mm512_unpackhi_epi32(e, f);
      _mm512_storeu_si512(to, _mm512_unpacklo_epi64(low, low4));
      _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi64(low, low4));
      _mm512_storeu_si512(to + 64, _mm512_unpacklo_epi64(high, high4));
      _mm512_storeu_si512(to + 96, _mm512_unpackhi_epi64(high, high4));
    }
  }
  static float sum(F a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static float largest(F a) { return _mm512_reduce_max_ps(a); }
  static float magnitude32(const float* x) {
    const I mask = _mm512_set1_epi32(0x7fffffff);
    const I a = _mm512_and_si512(_mm512_loadu_si512(x), mask), b = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
    return from_bits(static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b))));
  }
  static int32_t round32(const float* x, float inv, int8_t* q) {
    const I a = _mm512_cvtps_epi32(mul(load(x), set(inv))), b = _mm512_cvtps_epi32(mul(load(x + 16), set(inv)));
    const __m128i qa = _mm512_cvtsepi32_epi8(a), qb = _mm512_cvtsepi32_epi8(b);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), qa);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), qb);
    return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_cvtepi8_epi32(qa), _mm512_cvtepi8_epi32(qb)));
  }

  static I set_i(int32_t x) { return _mm512_set1_epi32(x); }
  static F to_f(I a) { return _mm512_cvtepi32_ps(a); }
  static I broadcast(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }

#ifdef __AVX512VNNI__
  using W = __m512i;
  static W widen(I raw) { return raw; }
  static I dot(I acc, W w, const int8_t* x) { return _mm512_dpbusd_epi32(acc, w, broadcast(x)); }
#else
  // Without the dot product instruction: even and odd bytes apart, as 16-bit numbers, so that nothing saturates.
  struct W {
    I even, odd;
  };
  static W widen(I raw) { return {_mm512_and_si512(raw, _mm512_set1_epi16(255)), _mm512_srli_epi16(raw, 8)}; }
  static I dot(I acc, const W& w, const int8_t* x) {
    const I four = broadcast(x);
    const I even = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), odd = _mm512_srai_epi16(four, 8);
    const I part = _mm512_add_epi32(_mm512_madd_epi16(w.even, even), _mm512_madd_epi16(w.odd, odd));
    return _mm512_add_epi32(acc, part);
  }
#endif
  static W bytes(const uint8_t* p) { return widen(_mm512_loadu_si512(p)); }
  static void nibbles(const uint8_t* p, W& low, W& high) {
    const I raw = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    low = widen(_mm512_and_si512(raw, mask));
    high = widen(_mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
  }
};

}  // namespace
}  // namespace outrider
