// Sixteen lanes in two AVX2 registers; see vec_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "half.h"

namespace outrider {
namespace {

struct V {
  static constexpr int tile = 4, dense_tile = 2, value_chunk = 2, value_heads = 4, queries = 3;
  static constexpr bool signed_bytes = false;
  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };

  static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static F load_half(const uint8_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))}; }
  static void store_half(uint16_t* p, const F& a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bf16(const uint16_t* p) {
    const auto widen = [](__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); };
    return {widen(load128(p)), widen(load128(p + 8))};
  }
  static F load_int8(const int8_t* p) {
    const __m128i q = load128(p);
    const auto widen = [](__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)); };
    return {widen(q), widen(_mm_srli_si128(q, 8))};
  }
  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F zero_below(F x, F y, F z) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), z.a), _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ), z.b)};
  }
  static F pow2(F whole) {
    const auto one = [](__m256 x) {
      return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 23), _mm256_set1_epi32(0x3f800000)));
    };
    return {one(whole.a), one(whole.b)};
  }
  static F to_bf16(F x) {
    const auto one = [](__m256 a) {
      const __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
      const __m256 near = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(-0x10000)));
      return _mm256_blendv_ps(near, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    };
    return {one(x.a), one(x.b)};
  }
  static F set2(const float* p) {
    double two;
    std::memcpy(&two, p, 8);
    const __m256 r = _mm256_castpd_ps(_mm256_set1_pd(two));
    return {r, r};
  }
  static F add_pairs(F x, F y) {
    const auto one = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)); };
    return {one(x.a, y.a), one(x.b, y.b)};
  }
  // 16 bytes of two vectors.
  template <class T>
  static __m256i load2(const T* const* v, int64_t at, int a, int b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(v[a] + at)), load128(v[b] + at), 1);
  }
  static void store256(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  template <class T>
  static void pairs(const T* const* keys, int64_t d, T* to) {
    if constexpr (sizeof(T) == sizeof(float)) {
      for (int k : {0, 8, 2, 10}) {
        const __m256i a = load2(keys, d, k, k + 4), b = load2(keys, d, k + 1, k + 5);
        store256(to, _mm256_unpacklo_epi64(a, b));
        store256(to + 32, _mm256_unpackhi_epi64(a, b));
        to += 8;
      }
    } else {
      for (int k : {0, 2}) {
        const __m256i a = load2(keys, d, k, k + 8), b = load2(keys, d, k + 1, k + 9);
        const __m256i e = load2(keys, d, k + 4, k + 12), f = load2(keys, d, k + 5, k + 13);
        const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
        const __m256i low4 = _mm256_unpacklo_epi32(e, f), high4 = _mm256_unpackhi_epi32(e, f);
        store256(to, _mm256_unpacklo_epi64(low, low4));
        store256(to + 32, _mm256_unpackhi_epi64(low, low4));
        store256(to + 64, _mm256_unpacklo_epi64(high, high4));
        store256(to + 96, _mm256_unpackhi_epi64(high, high4));
        to += 16;
      }
    }
  }
  static float sum(F x) {
    const __m256 h = _mm256_add_ps(x.a, x.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static float largest(F x) {
    const __m256 h = _mm256_max_ps(x.a, x.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
  }
  static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static float magnitude32(const float* x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) m = _mm256_max_epi32(m, _mm256_and_si256(load256(x + i), mask));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
    return from_bits(static_cast<uint32_t>(_mm_cvtsi128_si32(h)));
  }
  static int32_t round32(const float* x, float inv, int8_t* q) {
    const __m256 by = _mm256_set1_ps(inv);
    int32_t total = 0;
    for (int i = 0; i < 32; i += 8) {
      const __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by));
      const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
      const __m128i b = _mm_packs_epi16(h, h);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(q + i), b);
    }
    for (int i = 0; i < 32; i++) total += q[i];
    return total;
  }

  static I set_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static F to_f(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static __m256i broadcast(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }

#ifdef __AVXVNNI__
  using W = I;
  static W widen(__m256i a, __m256i b) { return {a, b}; }
  static I dot(I acc, W w, const int8_t* x) {
    const __m256i four = broadcast(x);
    return {_mm256_dpbusd_avx_epi32(acc.a, w.a, four), _mm256_dpbusd_avx_epi32(acc.b, w.b, four)};
  }
#else
  // Without the dot product instruction: even and odd bytes apart, as 16-bit numbers, so that nothing saturates.
  struct W {
    __m256i even_a, odd_a, even_b, odd_b;
  };
  static W widen(__m256i a, __m256i b) {
    const __m256i low = _mm256_set1_epi16(255);
    return {_mm256_and_si256(a, low), _mm256_srli_epi16(a, 8), _mm256_and_si256(b, low), _mm256_srli_epi16(b, 8)};
  }
  static I dot(I acc, const W& w, const int8_t* x) {
    const __m256i four = broadcast(x);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
    const auto part = [&](__m256i e, __m256i o) { return _mm256_add_epi32(_mm256_madd_epi16(e, even), _mm256_madd_epi16(o, odd)); };
    return {_mm256_add_epi32(acc.a, part(w.even_a, w.odd_a)), _mm256_add_epi32(acc.b, part(w.even_b, w.odd_b))};
  }
#endif
  static W bytes(const uint8_t* p) { return widen(load256(p), load256(p + 32)); }
  static void nibbles(const uint8_t* p, W& low, W& high) {
    const __m256i a = load256(p), b = load256(p + 32), mask = _mm256_set1_epi8(15);
    low = widen(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
    high = widen(_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask));
  }
};

}  // namespace
}  // namespace outrider
