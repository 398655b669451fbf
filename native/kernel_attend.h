// Attention over paged KV in fp32. Per (row, head): scores of the seen slots in the order of its list, a softmax over
// them, then the weighted sum of the values in the same order. Nothing depends on where a slot lies, on hidden slots
// in between, or on the other rows of the task; rows of a task only share what is in the cache.
#pragma once

#include <cstring>

#include "common.h"

namespace outrider {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

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

// K or V of up to kKeyTile slots as pointers to padded fp32 vectors: in place where they are that already.
struct SlotReader {
  const AttendTask& t;
  float* copy;
  bool in_place;

  SlotReader(const AttendTask& t, float* copy) : t(t), copy(copy), in_place(t.kv.format == KVFormat::f32 && t.padded == t.kv.dim) {}

  // `ahead` slots behind these are asked for from memory: in a pool the vectors of one head are scattered.
  void read(const KVHalf& half, const int32_t* slots, int64_t n, int64_t ahead, const float** to) const {
    for (int64_t i = n; i < n + ahead; i++) {
      const int64_t at = slots[i] * t.kv.heads + t.kv_head;
      const auto* p = static_cast<const char*>(t.kv.vector(half, at));
      for (int64_t b = 0; b < t.kv.bytes(); b += 64) __builtin_prefetch(p + b);
      if (half.scale) __builtin_prefetch(t.kv.scale(half, at));
    }
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = slots[i] * t.kv.heads + t.kv_head;
      const void* from = t.kv.vector(half, at);
      if (in_place) {
        to[i] = static_cast<const float*>(from);
        continue;
      }
      float* wide = copy + i * t.padded;
      switch (t.kv.format) {
        case KVFormat::f32: std::memcpy(wide, from, static_cast<size_t>(t.kv.dim) * sizeof(float)); break;
        case KVFormat::bf16: widen_bf16(static_cast<const uint16_t*>(from), t.kv.dim, wide); break;
        case KVFormat::i8: widen_int8(static_cast<const int8_t*>(from), t.kv.scale(half, at), t.kv.dim, wide); break;
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

// Turns n scores into unnormalized weights, in place; returns one over their sum. Room for 15 more floats is needed.
float softmax(float* s, int64_t n) {
  for (int64_t i = n; i < round_up(n, kLanes); i++) s[i] = -1e30f;  // weight 0
  V::F most = V::load(s);
  for (int64_t i = kLanes; i < n; i += kLanes) most = V::max(V::load(s + i), most);
  const V::F top = V::set(V::largest(most));
  V::F sum = V::set(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const V::F e = exp_lanes(V::sub(V::load(s + i), top));
    V::store(s + i, e);
    sum = V::add(sum, e);
  }
  return 1.0f / V::sum(sum);
}

// Adds the values of n slots, weighted, to C vectors of H heads. `o` and `p` hold the heads `pad` and `stride` apart.
template <int H, int C>
void mix(float* o, int64_t pad, const float* p, int64_t stride, const float* const* values, int64_t from, int64_t n) {
  V::F acc[H][C];
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) acc[h][c] = V::load(o + h * pad + c * kLanes);
  for (int64_t i = 0; i < n; i++) {
    const float* v = values[i] + from;
    for (int c = 0; c < C; c++) {
      const V::F value = V::load(v + c * kLanes);
      for (int h = 0; h < H; h++) acc[h][c] = V::fma(V::set(p[h * stride + i]), value, acc[h][c]);
    }
  }
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) V::store(o + h * pad + c * kLanes, acc[h][c]);
}

template <int H>
void mix_heads(float* o, int64_t pad, const float* p, int64_t stride, const float* const* values, int64_t n) {
  constexpr int wide = V::value_chunk;
  int64_t from = 0;
  for (; from + wide * kLanes <= pad; from += wide * kLanes) mix<H, wide>(o + from, pad, p, stride, values, from, n);
  for (; from < pad; from += kLanes) mix<H, 1>(o + from, pad, p, stride, values, from, n);
}

void attend(const AttendTask& t) {
  int64_t begin = t.rows[0].begin, end = t.rows[0].end;
  for (int64_t r = 1; r < t.n_rows; r++) {
    begin = t.rows[r].begin < begin ? t.rows[r].begin : begin;
    end = t.rows[r].end > end ? t.rows[r].end : end;
  }
  const int64_t stride = round_up(end - begin, kLanes) + 2 * kLanes, heads = t.n_heads, pad = t.padded;
  float* const scores = t.scratch;                        // [rows * heads][stride]
  float* const mixed = scores + t.n_rows * heads * stride;  // [rows * heads][pad]
  const SlotReader reader(t, mixed + t.n_rows * heads * pad);
  const float* at[kKeyTile];
  const int32_t* list = t.rows[0].list;
  const ScoreFn score = score_kernel(pad / kLanes);

  for (int64_t s = begin; s < end; s += kLanes) {
    const int64_t n = end - s < kLanes ? end - s : kLanes;
    reader.read(t.kv.k, list + s, n, smaller(end - s - n, kLanes), at);
    for (int64_t i = n; i < kLanes; i++) at[i] = at[0];  // computed, never looked at
    for (int64_t r = 0; r < t.n_rows; r++) {
      if (s >= t.rows[r].end || s + kLanes <= t.rows[r].begin) continue;
      for (int64_t h = 0; h < heads; h++)
        V::store(scores + (r * heads + h) * stride + (s - begin), score(t.q + r * t.q_stride + h * pad, at, pad / kLanes));
    }
  }

  for (int64_t i = 0; i < t.n_rows * heads * pad; i++) mixed[i] = 0.0f;
  for (int64_t r = 0; r < t.n_rows; r++) {
    const SeenRow& row = t.rows[r];
    for (int64_t h = 0; h < heads; h++) {
      float* s = scores + (r * heads + h) * stride + (row.begin - begin);
      const float by = softmax(s, row.end - row.begin);
      // Scaling the weights and not the sum costs no more and needs no room to keep the factor.
      for (int64_t i = 0; i < row.end - row.begin; i += kLanes) V::store(s + i, V::mul(V::load(s + i), V::set(by)));
    }
  }

  for (int64_t s = begin; s < end; s += kKeyTile) {
    const int64_t n = end - s < kKeyTile ? end - s : kKeyTile;
    reader.read(t.kv.v, list + s, n, smaller(end - s - n, kKeyTile), at);
    for (int64_t r = 0; r < t.n_rows; r++) {
      const SeenRow& row = t.rows[r];
      const int64_t first = row.begin > s ? row.begin - s : 0, last = row.end - s < n ? row.end - s : n;
      if (first >= last) continue;
      for (int64_t h = 0; h < heads;) {
        float* o = mixed + (r * heads + h) * pad;
        const float* p = scores + (r * heads + h) * stride + (s - begin) + first;
        switch (heads - h) {
          case 1: mix_heads<1>(o, pad, p, stride, at + first, last - first), h += 1; break;
          case 2: mix_heads<2>(o, pad, p, stride, at + first, last - first), h += 2; break;
          case 3: mix_heads<3>(o, pad, p, stride, at + first, last - first), h += 3; break;
          default: mix_heads<4>(o, pad, p, stride, at + first, last - first), h += 4; break;
        }
      }
    }
  }

  for (int64_t r = 0; r < t.n_rows; r++)
    for (int64_t h = 0; h < heads; h++)
      std::memcpy(t.out + r * t.out_stride + h * t.kv.dim, mixed + (r * heads + h) * pad, static_cast<size_t>(t.kv.dim) * sizeof(float));
}

}  // namespace
}  // namespace outrider
