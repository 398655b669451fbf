// Operations on single rows: norms, rounding to 8 bits, the gate of the MLP, rotary embedding, KV writes.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "common.h"

namespace outrider {
namespace {

// Sixteen floats from p, zeros behind the first n.
inline V::F load_part(const float* p, int64_t n) {
  if (n >= kLanes) return V::load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return V::load(lanes);
}

inline void store_part(float* p, int64_t n, V::F x) {
  if (n >= kLanes) return V::store(p, x);
  float lanes[kLanes];
  V::store(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}

// e^x to about one unit in the last place; 0 below -87, no overflow (x is cut at 88). Range reduction by ln 2 in two
// parts and a polynomial with the first Taylor coefficients.
inline V::F exp_lanes(V::F x) {
  const V::F least = V::set(-87.0f);
  const V::F y = V::min(V::set(88.0f), V::max(least, x));  // NaN passes
  const V::F magic = V::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const V::F whole = V::add(V::mul(y, V::set(1.44269504f)), magic), n = V::sub(whole, magic);
  V::F r = V::fma(n, V::set(-0.693359375f), y);
  r = V::fma(n, V::set(2.12194440e-4f), r);
  V::F p = V::set(1.0f / 5040);
  constexpr float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float c : taylor) p = V::fma(p, r, V::set(c));
  return V::zero_below(x, least, V::mul(p, V::pow2(whole)));
}

float square_mean(const float* x, int64_t k) {
  V::F acc = V::set(0.0f);
  for (int64_t i = 0; i < k; i += kLanes) {
    const V::F a = load_part(x + i, k - i);
    acc = V::fma(a, a, acc);
  }
  return V::sum(acc) / static_cast<float>(k);
}

int64_t greatest(const float* x, int64_t n, float* value) {
  constexpr int64_t stretch = 256;  // what is searched in the end
  float most = -std::numeric_limits<float>::infinity();
  V::F odd = V::set(0.0f);  // 0 as long as all are finite
  int64_t at = -1;
  for (int64_t from = 0; from < n; from += stretch) {
    const int64_t to = from + stretch < n ? from + stretch : n;
    V::F top = V::set(most);
    int64_t i = from;
    for (; i + kLanes <= to; i += kLanes) {
      const V::F a = V::load(x + i);
      top = V::max(a, top);
      odd = V::fma(a, V::set(0.0f), odd);
    }
    float here = V::largest(top);
    for (; i < to; i++) {
      here = x[i] > here ? x[i] : here;
      if (!std::isfinite(x[i])) return -1;
    }
    if (here > most) most = here, at = from;
  }
  if (!(V::sum(odd) == 0.0f)) return -1;
  while (at >= 0 && x[at] != most) at++;
  *value = most;
  return at;
}

void norm(const float* x, const float* weight, float eps, int64_t k, float* y) {
  const V::F by = V::set(1.0f / std::sqrt(square_mean(x, k) + eps));
  for (int64_t i = 0; i < k; i += kLanes)
    store_part(y + i, k - i, V::mul(load_part(weight + i, k - i), V::mul(load_part(x + i, k - i), by)));
}

struct RoundedGroup {
  float scale;
  int32_t sum;  // of the codes
};

// One group of 32 to codes: symmetric, absmax / 127. One that holds NaN or infinity gets a scale that is not finite.
inline RoundedGroup round_group(const float* x, int8_t* codes) {
  const float largest = V::magnitude32(x);
  const bool nothing = largest < 1e-30f;  // 127 / largest would overflow
  const int32_t sum = V::round32(x, nothing ? 0.0f : 127.0f / largest, codes);
  return {nothing ? 0.0f : largest / 127.0f, sum};
}

void quantize(const float* x, int64_t k, int64_t step, int64_t at, const Acts& to) {
  for (int64_t i = 0; i < k; i += kGroup, at += step) {
    const RoundedGroup group = round_group(x + i, to.q + at * kGroup);
    to.scale[at] = group.scale;
    to.shift[at] = group.scale * static_cast<float>(group.sum);
    to.start8[at] = -8 * group.sum;
    to.start128[at] = -128 * group.sum;
  }
}

void left_over(const float* x, int64_t k, int64_t step, int64_t at, const Acts& of, float* y) {
  for (int64_t i = 0; i < k; i += kGroup, at += step)
    for (int64_t j = 0; j < kGroup; j += kLanes)
      V::store(y + i + j, V::fma(V::set(-of.scale[at]), V::load_int8(of.q + at * kGroup + j), V::load(x + i + j)));
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const V::F g = load_part(gate + i, n - i), u = load_part(up + i, n - i);
    const V::F e = exp_lanes(V::sub(V::set(0.0f), g));
    store_part(y + i, n - i, V::mul(V::div(g, V::add(V::set(1.0f), e)), u));
  }
}

// The first half of the head against the second (the layout of Hugging Face and NeoX).
void rotate(const float* x, const float* weight, float eps, const float* cos, const float* sin, int64_t dim, float scale, float* y) {
  const int64_t half = dim / 2;
  const float by = weight ? 1.0f / std::sqrt(square_mean(x, dim) + eps) : 1.0f;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    V::F a = load_part(x + i, n), b = load_part(x + half + i, n);
    if (weight) {
      a = V::mul(load_part(weight + i, n), V::mul(a, V::set(by)));
      b = V::mul(load_part(weight + half + i, n), V::mul(b, V::set(by)));
    }
    const V::F c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(y + i, n, V::mul(V::sub(V::mul(a, c), V::mul(b, s)), V::set(scale)));
    store_part(y + half + i, n, V::mul(V::add(V::mul(b, c), V::mul(a, s)), V::set(scale)));
  }
}

void store_int8(const float* x, int64_t dim, int8_t* to, float* scale) {
  int64_t i = 0;
  for (; i + kGroup <= dim; i += kGroup) *scale++ = round_group(x + i, to + i).scale;
  if (i == dim) return;
  float last[kGroup] = {};
  int8_t codes[kGroup];
  std::memcpy(last, x + i, static_cast<size_t>(dim - i) * sizeof(float));
  *scale = round_group(last, codes).scale;
  std::memcpy(to + i, codes, static_cast<size_t>(dim - i));
}

// What is out of range becomes the greatest half; NaN stays.
void store_half(const float* x, int64_t dim, uint16_t* to) {
  const V::F most = V::set(65504.0f), least = V::set(-65504.0f);
  const auto within = [&](const float* p, int64_t n) { return V::min(most, V::max(least, load_part(p, n))); };
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) V::store_half(to + i, within(x + i, kLanes));
  if (i == dim) return;
  uint16_t last[kLanes];
  V::store_half(last, within(x + i, dim - i));
  std::memcpy(to + i, last, static_cast<size_t>(dim - i) * sizeof(uint16_t));
}

void store_kv(const float* x, const KVView& kv, const KVHalf& half, int64_t i) {
  void* to = kv.vector(half, i);
  switch (kv.format) {
    case KVFormat::f32: std::memcpy(to, x, static_cast<size_t>(kv.dim) * sizeof(float)); break;
    case KVFormat::f16: store_half(x, kv.dim, static_cast<uint16_t*>(to)); break;
    case KVFormat::bf16:
      for (int64_t d = 0; d < kv.dim; d++) static_cast<uint16_t*>(to)[d] = to_bf16(x[d]);
      break;
    case KVFormat::i8: store_int8(x, kv.dim, static_cast<int8_t*>(to), kv.scale(half, i)); break;
  }
}

}  // namespace
}  // namespace outrider
