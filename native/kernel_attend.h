// Attention over paged KV in fp32. Per (row, head) and stretch of positions: scores of the seen slots, their softmax
// weights relative to the stretch's greatest score, the weighted sum of the values in the order of positions; then the
// stretches are added up in their order (the online softmax of Milakov and Gimelshein, 2018). Nothing depends on where
// a slot lies, on hidden slots in between, or on the other rows of the task, which only share what is in the cache.
#pragma once

#include <cstring>

#include "common.h"

namespace outrider {
namespace {

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

// Asks for `n` vectors of a head from memory; those of a block are neighbours.
void prefetch_kv(const KVView& kv, const KVHalf& half, int64_t head, const int32_t* slots, int64_t n) {
  for (int64_t i = 0, from; i < n;) {
    for (from = i++; i < n && slots[i] == slots[i - 1] + 1;) i++;
    const int64_t at = head * kv.slots + slots[from];
    const auto *p = static_cast<const char*>(kv.vector(half, at)), *const end = p + (i - from) * kv.bytes();
    for (; p < end; p += 64) __builtin_prefetch(p);
    if (!half.scale) continue;
    const float *s = kv.scale(half, at), *const last = s + (i - from) * kv.groups();
    for (; s < last; s += 16) __builtin_prefetch(s);
  }
}

// K or V of up to kStretch slots as pointers to padded fp32 vectors: in place where they are that already.
struct SlotReader {
  const AttendTask& t;
  const KVHalf& half;
  float* copy;
  bool in_place;

  SlotReader(const AttendTask& t, const KVHalf& half, float* copy)
      : t(t), half(half), copy(copy), in_place(t.kv.format == KVFormat::f32 && t.padded == t.kv.dim) {}

  int64_t vector(int32_t slot) const { return t.kv_head * t.kv.slots + slot; }

  void read(const int32_t* slots, int64_t n, const float** to) const {
    for (int64_t i = 0; i < n; i++) {
      const void* from = t.kv.vector(half, vector(slots[i]));
      if (in_place) {
        to[i] = static_cast<const float*>(from);
        continue;
      }
      float* wide = copy + i * t.padded;
      switch (t.kv.format) {
        case KVFormat::f32: std::memcpy(wide, from, static_cast<size_t>(t.kv.dim) * sizeof(float)); break;
        case KVFormat::f16: widen_half(static_cast<const uint16_t*>(from), t.kv.dim, wide); break;
        case KVFormat::bf16: widen_bf16(static_cast<const uint16_t*>(from), t.kv.dim, wide); break;
        case KVFormat::i8: widen_int8(static_cast<const int8_t*>(from), t.kv.scale(half, vector(slots[i])), t.kv.dim, wide); break;
      }
      for (int64_t d = t.kv.dim; d < t.padded; d++) wide[d] = 0.0f;
      to[i] = wide;
    }
  }
};

// Dot products of one query with 16 keys. C vectors of 16 in a head; 0: as many as `count` says.
template <int C>
V::F score16(const float* q, const float* const* keys, int64_t count) {
  V::F acc[kLanes];
  for (int i = 0; i < kLanes; i++) {
    acc[i] = V::set(0.0f);
    for (int64_t c = 0; c < (C ? C : count); c++)
      acc[i] = V::fma(V::load(q + c * kLanes), V::load(keys[i] + c * kLanes), acc[i]);
  }
  return V::reduce16(acc);
}

using ScoreFn = V::F (*)(const float*, const float* const*, int64_t);

inline ScoreFn score_kernel(int64_t vectors) {
  switch (vectors) {
    case 1: return score16<1>;
    case 2: return score16<2>;
    case 4: return score16<4>;
    case 5: return score16<5>;
    case 6: return score16<6>;
    case 8: return score16<8>;
    default: return score16<0>;
  }
}

// The weighted sum of n slots' values, C vectors of H heads. `o` and `p` hold the heads `pad` and kStretch apart.
template <int H, int C>
void mix(float* o, int64_t pad, const float* p, const float* const* values, int64_t from, int64_t n) {
  V::F acc[H][C];
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) acc[h][c] = V::set(0.0f);
  for (int64_t i = 0; i < n; i++) {
    const float* v = values[i] + from;
    for (int c = 0; c < C; c++) {
      const V::F value = V::load(v + c * kLanes);
      for (int h = 0; h < H; h++) acc[h][c] = V::fma(V::set(p[h * kStretch + i]), value, acc[h][c]);
    }
  }
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) V::store(o + h * pad + c * kLanes, acc[h][c]);
}

template <int H>
void mix_heads(float* o, int64_t padded, const float* p, const float* const* values, int64_t n) {
  constexpr int wide = V::value_chunk;
  const int64_t pad = state_floats(padded);
  int64_t from = 0;
  for (; from + wide * kLanes <= padded; from += wide * kLanes) mix<H, wide>(o + from, pad, p, values, from, n);
  for (; from < padded; from += kLanes) mix<H, 1>(o + from, pad, p, values, from, n);
}

// Turns the scores first .. last of a stretch into weights, in place, and notes their greatest and their sum.
void weigh(float* s, int64_t first, int64_t last, float* top_and_sum) {
  const int64_t from = first / kLanes * kLanes, to = round_up(last, kLanes);
  for (int64_t i = from; i < first; i++) s[i] = -1e30f;  // weight 0
  for (int64_t i = last; i < to; i++) s[i] = -1e30f;
  V::F most = V::load(s + from);
  for (int64_t i = from + kLanes; i < to; i += kLanes) most = V::max(V::load(s + i), most);
  const float top = V::largest(most);
  V::F sum = V::set(0.0f);
  for (int64_t i = from; i < to; i += kLanes) {
    const V::F e = exp_lanes(V::sub(V::load(s + i), V::set(top)));
    V::store(s + i, e);
    sum = V::add(sum, e);
  }
  top_and_sum[0] = top;
  top_and_sum[1] = V::sum(sum);
}

// The slots of a stretch that a row sees.
struct Seen {
  int64_t first, count;
  bool operator==(const Seen& other) const { return first == other.first && count == other.count; }
};

void attend(const AttendTask& t) {
  const int64_t base = t.stretch * kStretch, heads = t.n_heads, pad = t.padded, state = state_floats(pad);
  int64_t end = 0;
  for (int64_t r = 0; r < t.n_rows; r++) end = t.rows[r].end > end ? t.rows[r].end : end;
  const int64_t count = smaller(end - base, kStretch);
  const int32_t* list = t.rows[0].list + base;
  float* const scores = t.scratch;  // [rows * heads][kStretch]
  float* const copies = scores + t.n_rows * heads * kStretch;
  const SlotReader keys(t, t.kv.k, copies), values(t, t.kv.v, copies + kStretch * pad);
  const float* at[kStretch];
  const ScoreFn score = score_kernel(pad / kLanes);

  for (int64_t s = 0; s < count; s += kLanes) {
    const int64_t n = smaller(count - s, kLanes);
    prefetch_kv(t.kv, t.kv.v, t.kv_head, list + s, n);
    if (s < t.n_ahead) prefetch_kv(t.kv, t.kv.k, t.ahead_head, t.ahead + s, smaller(t.n_ahead - s, kLanes));
    keys.read(list + s, n, at);
    for (int64_t i = n; i < kLanes; i++) at[i] = at[0];  // computed, never looked at
    for (int64_t r = 0; r < t.n_rows; r++) {
      if (base + s >= t.rows[r].end || base + s + kLanes <= t.rows[r].begin) continue;
      for (int64_t h = 0; h < heads; h++)
        V::store(scores + (r * heads + h) * kStretch + s, score(t.q + r * t.q_stride + h * pad, at, pad / kLanes));
    }
  }

  values.read(list, count, at);
  const auto seen = [&](int64_t r) {
    const int64_t first = t.rows[r].begin > base ? t.rows[r].begin - base : 0, last = smaller(t.rows[r].end - base, kStretch);
    return Seen{first, last > first ? last - first : 0};
  };
  for (int64_t r = 0, same; r < t.n_rows; r += same) {
    const Seen now = seen(r);
    for (same = 1; r + same < t.n_rows && seen(r + same) == now;) same++;
    if (!now.count) continue;
    // Rows that see the same go together: their heads, too, lie one after the other.
    const int64_t end = (r + same) * heads;
    for (int64_t i = r * heads; i < end; i++) weigh(scores + i * kStretch, now.first, now.first + now.count, t.states + i * state + pad);
    for (int64_t i = r * heads; i < end;) {
      float* o = t.states + i * state;
      const float* p = scores + i * kStretch + now.first;
      switch (end - i) {
        case 1: mix_heads<1>(o, pad, p, at + now.first, now.count), i += 1; break;
        case 2: mix_heads<2>(o, pad, p, at + now.first, now.count), i += 2; break;
        case 3: mix_heads<3>(o, pad, p, at + now.first, now.count), i += 3; break;
        default: mix_heads<4>(o, pad, p, at + now.first, now.count), i += 4; break;
      }
    }
  }
}

void merge(float* state, const float* later, int64_t padded) {
  float *mine = state + padded, lanes[kLanes];
  const float* other = later + padded;
  // The state with the greater score keeps its weights; those of the other one are measured by it.
  const float rise = other[0] - mine[0];
  V::store(lanes, exp_lanes(V::set(rise > 0 ? -rise : rise)));
  const float a = rise > 0 ? lanes[0] : 1.0f, b = rise > 0 ? 1.0f : lanes[0];
  for (int64_t i = 0; i < padded; i += kLanes)
    V::store(state + i, V::fma(V::load(state + i), V::set(a), V::mul(V::load(later + i), V::set(b))));
  if (rise > 0) mine[0] = other[0];
  mine[1] = mine[1] * a + other[1] * b;
}

void finish(const float* state, int64_t padded, int64_t dim, float* out) {
  const V::F by = V::set(1.0f / state[padded + 1]);
  for (int64_t i = 0; i < dim; i += kLanes) store_part(out + i, dim - i, V::mul(V::load(state + i), by));
}

}  // namespace
}  // namespace outrider
