// What every way of attention shares: KV as stored, what a row sees of a stretch of positions, and the weights of scores.
#pragma once

#include <cstring>
#include <type_traits>

#include "common.h"
#include "half.h"

namespace outrider {
namespace {

constexpr int64_t kChunk = 32;  // dims of a score, or positions of a sum of values, that are added up on their own

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline void widen_half(const uint16_t* from, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) V::store(to + d, V::load_half(reinterpret_cast<const uint8_t*>(from + d)));
  for (; d < dim; d++) to[d] = from_half(from[d]);
}

inline void widen_bf16(const uint16_t* from, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) V::store(to + d, V::load_bf16(from + d));
  for (; d < dim; d++) to[d] = from_bf16(from[d]);
}

inline void widen_int8(const int8_t* from, const float* scale, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) V::store(to + d, V::mul(V::load_int8(from + d), V::set(scale[d / kGroup])));
  for (; d < dim; d++) to[d] = static_cast<float>(from[d]) * scale[d / kGroup];
}

// The empty asm is for GCC: it takes a function that only prefetches for one that does nothing, and leaves out its calls.
inline void prefetch(const void* p) {
  __builtin_prefetch(p);
  asm volatile("");
}

// Asks for `n` vectors of a head from memory; those of a block are neighbours.
void prefetch_kv(const KVView& kv, const KVHalf& half, int64_t head, const int32_t* slots, int64_t n) {
  for (int64_t i = 0, from; i < n;) {
    for (from = i++; i < n && slots[i] == slots[i - 1] + 1;) i++;
    const int64_t at = head * kv.slots + slots[from];
    const auto *p = static_cast<const char*>(kv.vector(half, at)), *const end = p + (i - from) * kv.bytes();
    for (; p < end; p += 64) prefetch(p);
    if (!half.scale) continue;
    const float *s = kv.scale(half, at), *const last = s + (i - from) * kv.groups();
    for (; s < last; s += 16) prefetch(s);
  }
}

// What is stored in 16 bits, as a type.
struct Half {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

inline V::F wide(const float* p) { return V::load(p); }
inline V::F wide(const Half* p) { return V::load_half(reinterpret_cast<const uint8_t*>(p)); }
inline V::F wide(const Bf16* p) { return V::load_bf16(&p->bits); }

// K or V of up to kStretch slots as pointers to padded vectors of T: in place where they are that already, else fp32.
template <class T>
struct SlotReader {
  const AttendTask& t;
  const KVHalf& half;
  float* copy;

  void read(const int32_t* slots, int64_t n, const T** to) const {
    const int64_t head = t.kv_head * t.kv.slots, bytes = t.kv.bytes();
    if (t.padded * static_cast<int64_t>(sizeof(T)) == bytes) {
      const char* const data = static_cast<const char*>(t.kv.vector(half, head));
      for (int64_t i = 0; i < n; i++) to[i] = reinterpret_cast<const T*>(data + slots[i] * bytes);
    } else if constexpr (sizeof(T) == sizeof(float)) {
      for (int64_t i = 0; i < n; i++) {
        float* y = copy + i * t.padded;
        widen(head + slots[i], y);
        for (int64_t d = t.kv.dim; d < t.padded; d++) y[d] = 0.0f;
        to[i] = y;
      }
    }
  }

  void widen(int64_t i, float* y) const {
    const void* from = t.kv.vector(half, i);
    switch (t.kv.format) {
      case KVFormat::f32: std::memcpy(y, from, static_cast<size_t>(t.kv.dim) * sizeof(float)); break;
      case KVFormat::f16: widen_half(static_cast<const uint16_t*>(from), t.kv.dim, y); break;
      case KVFormat::bf16: widen_bf16(static_cast<const uint16_t*>(from), t.kv.dim, y); break;
      case KVFormat::i8: widen_int8(static_cast<const int8_t*>(from), t.kv.scale(half, i), t.kv.dim, y); break;
    }
  }
};

// Places of a stretch: those that a row sees.
struct Seen {
  int64_t first, last;
  bool operator==(const Seen& other) const { return first == other.first && last == other.last; }
};

inline Seen seen_of(const SeenRow& row, int64_t base) {
  return {row.begin > base ? row.begin - base : 0, smaller(row.end - base, kStretch)};
}

// 2^x for x <= 0, within 2e-7; 0 below -125, and NaN stays NaN. The polynomial is the best of degree 5 on -0.5 .. 0.5
// that is 1 at 0.
inline V::F weight_lanes(V::F x) {
  const V::F least = V::set(-125.0f), magic = V::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const V::F y = V::max(least, x), whole = V::add(y, magic);
  const V::F r = V::sub(y, V::sub(whole, magic));
  V::F p = V::set(1.326472731e-3f);
  constexpr float rest[] = {9.671512991e-3f, 5.550733581e-2f, 0.2402224243f, 0.6931470037f, 1.0f};
  for (float c : rest) p = V::fma(p, r, V::set(c));
  return V::zero_below(x, least, V::mul(p, V::pow2(whole)));
}

// Turns the scores of a stretch into weights, in place, for `n` queries that see the same, and notes the greatest score and
// the weights' sum of each. In two steps, because one query's greatest score is slow to find but does not keep the others.
template <class T>
void weigh(float* s, int64_t n, Seen seen, float* top_and_sum, int64_t step) {
  const int64_t first = seen.first, last = seen.last;
  const int64_t from = first / kLanes * kLanes, to = round_up(last, kLanes);
  for (int64_t j = 0; j < n; j++) {
    float* mine = s + j * kStretch;
    for (int64_t i = from; i < first; i++) mine[i] = -1e30f;  // weight 0
    for (int64_t i = last; i < to; i++) mine[i] = -1e30f;
    V::F most = V::load(mine + from);
    for (int64_t i = from + kLanes; i < to; i += kLanes) most = V::max(V::load(mine + i), most);
    top_and_sum[j * step] = V::largest(most);
  }
  for (int64_t j = 0; j < n; j++) {
    float *mine = s + j * kStretch, *const noted = top_and_sum + j * step;
    const V::F top = V::set(noted[0]);
    V::F sum = V::set(0.0f);
    for (int64_t i = from; i < to; i += kLanes) {
      V::F e = weight_lanes(V::sub(V::load(mine + i), top));
      if constexpr (std::is_same_v<T, Bf16>) e = V::to_bf16(e);
      V::store(mine + i, e);
      sum = V::add(sum, e);
    }
    noted[1] = V::sum(sum);
  }
}

}  // namespace
}  // namespace outrider
