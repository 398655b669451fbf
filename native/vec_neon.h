// Sixteen lanes in four Arm registers; see vec_portable.h for what each operation means. Needs the dot product
// instructions (Armv8.2 with FEAT_DotProd).
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "half.h"

namespace outrider {
namespace {

struct V {
  // Of 32 registers: a row of integer sums takes four, of floats 16, a head of values 4 x value_chunk, a query of scores 8.
  static constexpr int tile = 4, dense_tile = 1, value_chunk = 1, value_heads = 4, queries = 3;
  static constexpr bool signed_bytes = true;  // the dot product takes s8 x s8
  struct F {
    float32x4_t v[4];
  };
  struct I {
    int32x4_t v[4];
  };
  struct W {
    int8x16_t v[4];
  };

  template <class Fn>
  static F each(Fn fn) {
    return {{fn(0), fn(1), fn(2), fn(3)}};
  }

  static F set(float x) {
    const float32x4_t r = vdupq_n_f32(x);
    return {{r, r, r, r}};
  }
  static F load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void store(float* p, F a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
  }
  static F load_half(const uint8_t* p) {
    const float16x8_t a = vreinterpretq_f16_u8(vld1q_u8(p)), b = vreinterpretq_f16_u8(vld1q_u8(p + 16));
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
  }
  static void store_half(uint16_t* p, const F& a) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
  }
  static F load_bf16(const uint16_t* p) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)); });
  }
  static F load_int8(const int8_t* p) {
    const int8x16_t q = vld1q_s8(p);
    const int16x8_t a = vmovl_s8(vget_low_s8(q)), b = vmovl_high_s8(q);
    return to_f({{vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a), vmovl_s16(vget_low_s16(b)), vmovl_high_s16(b)}});
  }
  static F add(F a, F b) {
    return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
  }
  static F sub(F a, F b) {
    return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
  }
  static F mul(F a, F b) {
    return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
  }
  static F div(F a, F b) {
    return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
  }
  static F fma(F a, F b, F c) {
    return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }
  // Not vmaxq_f32 and vminq_f32, which keep NaN and know +0 from -0.
  static F max(F a, F b) {
    return each([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
  }
  static F min(F a, F b) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
  }
  static F zero_below(F a, F b, F c) {
    return each([&](int i) {
      return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(c.v[i]), vcltq_f32(a.v[i], b.v[i])));
    });
  }
  static F pow2(F whole) {
    return each([&](int i) {
      const uint32x4_t shifted = vshlq_n_u32(vreinterpretq_u32_f32(whole.v[i]), 23);
      return vreinterpretq_f32_u32(vaddq_u32(shifted, vdupq_n_u32(0x3f800000)));
    });
  }
  static F to_bf16(F a) {
    return each([&](int i) {
      const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
      return vbslq_f32(vceqq_f32(a.v[i], a.v[i]), vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(0xffff0000u))), a.v[i]);
    });
  }
  // The first two steps of sum(): what is left are the sums of four lanes each.
  static float32x4_t quarter(F a) { return vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3])); }
  static F set2(const float* p) {
    const float32x2_t two = vld1_f32(p);
    const float32x4_t r = vcombine_f32(two, two);
    return {{r, r, r, r}};
  }
  static F add_pairs(F a, F b) {
    return each([&](int i) { return vpaddq_f32(a.v[i], b.v[i]); });
  }
  // The halves of two registers, first with first, and second with second.
  static void zip(uint32x4_t a, uint32x4_t b, void* first, void* second) {
    const uint64x2_t x = vreinterpretq_u64_u32(a), y = vreinterpretq_u64_u32(b);
    vst1q_u8(static_cast<uint8_t*>(first), vreinterpretq_u8_u64(vtrn1q_u64(x, y)));
    vst1q_u8(static_cast<uint8_t*>(second), vreinterpretq_u8_u64(vtrn2q_u64(x, y)));
  }
  template <class T>
  static void pairs(const T* const* keys, int64_t d, T* to) {
    const auto load = [&](int i) { return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(keys[i] + d))); };
    for (int k : {0, 8, 2, 10}) {
      if constexpr (sizeof(T) == sizeof(float)) {
        zip(load(k), load(k + 1), to, to + 32);
        zip(load(k + 4), load(k + 5), to + 4, to + 36);
      } else {
        const uint32x4_t a = load(k), b = load(k + 1), e = load(k + 4), f = load(k + 5);
        zip(vzip1q_u32(a, b), vzip1q_u32(e, f), to, to + 32);
        zip(vzip2q_u32(a, b), vzip2q_u32(e, f), to + 64, to + 96);
      }
      to += 8;
    }
  }
  static float sum(F a) {
    const float32x4_t q = quarter(a);
    return vpadds_f32(vadd_f32(vget_low_f32(q), vget_high_f32(q)));
  }
  static float largest(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }
  static float magnitude32(const float* x) {
    uint32x4_t m = vdupq_n_u32(0);
    for (int i = 0; i < 32; i += 4) m = vmaxq_u32(m, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    return from_bits(vmaxvq_u32(m));
  }
  static int32_t round32(const float* x, float inv, int8_t* q) {
    const auto four = [&](const float* p) {
      const float32x4_t y = vmulq_n_f32(vld1q_f32(p), inv);
      return vqmovn_s32(vbslq_s32(vceqq_f32(y, y), vcvtnq_s32_f32(y), vdupq_n_s32(-128)));  // NaN: -128
    };
    int32_t total = 0;
    for (int i = 0; i < 32; i += 8) {
      const int8x8_t codes = vqmovn_s16(vcombine_s16(four(x + i), four(x + i + 4)));
      vst1_s8(q + i, codes);
      total += vaddlv_s8(codes);
    }
    return total;
  }

  static I set_i(int32_t x) {
    const int32x4_t r = vdupq_n_s32(x);
    return {{r, r, r, r}};
  }
  static F to_f(I a) {
    return each([&](int i) { return vcvtq_f32_s32(a.v[i]); });
  }
  static W bytes(const uint8_t* p) {
    const auto load = [&](int i) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128))); };
    return {{load(0), load(1), load(2), load(3)}};
  }
  static void nibbles(const uint8_t* p, W& low, W& high) {
    for (int i = 0; i < 4; i++) {
      const uint8x16_t b = vld1q_u8(p + 16 * i);
      low.v[i] = vreinterpretq_s8_u8(vandq_u8(b, vdupq_n_u8(15)));
      high.v[i] = vreinterpretq_s8_u8(vshrq_n_u8(b, 4));
    }
  }
  static I dot(I acc, const W& w, const int8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(bits));
    for (int i = 0; i < 4; i++) acc.v[i] = vdotq_s32(acc.v[i], w.v[i], four);
    return acc;
  }
};

}  // namespace
}  // namespace outrider
