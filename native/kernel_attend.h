// Attention over paged KV in fp32. Per (row, head) and stretch of positions: scores of the seen slots, their softmax
// weights relative to the stretch's greatest score, the weighted sum of the values in the order of positions; then the
// stretches are added up in their order (the online softmax of Milakov and Gimelshein, 2018). A score is the sum over
// the even dims, in their order, plus that over the odd ones. Nothing depends on where a slot lies, on hidden slots in
// between, or on the other rows of the task, which only share the work of making keys ready.
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

// Dot products of Q queries with 16 keys, laid out by V::pairs: one vector holds two dims of eight keys, so that keys
// need no sum across lanes and a query's two dims are one broadcast.
template <class T, int Q>
void score(const float* const* q, const T* keys, int64_t dims, float* const* to) {
  V::F acc[Q][2];
  for (int i = 0; i < Q; i++)
    for (int j = 0; j < 2; j++) acc[i][j] = V::set(0.0f);
  for (int64_t d = 0; d < dims; d += 2, keys += 2 * kLanes) {
    const V::F x = wide(keys), y = wide(keys + kLanes);
    for (int i = 0; i < Q; i++) {
      const V::F pair = V::set2(q[i] + d);
      acc[i][0] = V::fma(pair, x, acc[i][0]);
      acc[i][1] = V::fma(pair, y, acc[i][1]);
    }
  }
  for (int i = 0; i < Q; i++) V::store(to[i], V::add_pairs(acc[i][0], acc[i][1]));
}

// As many queries at a time as V::queries says; the last ones in a call of their own.
template <class T, int Q = V::queries>
void score_all(const float* const* q, const T* keys, int64_t dims, float* const* to, int64_t n) {
  for (; n >= Q; n -= Q, q += Q, to += Q) score<T, Q>(q, keys, dims, to);
  if constexpr (Q > 1) {
    if (n) score_all<T, Q - 1>(q, keys, dims, to, n);
  }
}

// The weighted sum of n slots' values, C vectors of H heads. `o` and `p` hold the heads `pad` and kStretch apart.
template <class T, int H, int C>
void mix(float* o, int64_t pad, const float* p, const T* const* values, int64_t from, int64_t n) {
  V::F acc[H][C];
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) acc[h][c] = V::set(0.0f);
  for (int64_t i = 0; i < n; i++) {
    const T* v = values[i] + from;
    for (int c = 0; c < C; c++) {
      const V::F value = wide(v + c * kLanes);
      for (int h = 0; h < H; h++) acc[h][c] = V::fma(V::set(p[h * kStretch + i]), value, acc[h][c]);
    }
  }
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) V::store(o + h * pad + c * kLanes, acc[h][c]);
}

template <class T, int H>
void mix_heads(float* o, int64_t padded, const float* p, const T* const* values, int64_t n) {
  constexpr int wide = V::value_chunk;
  const int64_t pad = state_floats(padded);
  int64_t from = 0;
  for (; from + wide * kLanes <= padded; from += wide * kLanes) mix<T, H, wide>(o + from, pad, p, values, from, n);
  for (; from < padded; from += kLanes) mix<T, H, 1>(o + from, pad, p, values, from, n);
}

template <class T, int H = V::value_heads>
void mix_all(float* o, int64_t padded, const float* p, const T* const* values, int64_t n, int64_t heads) {
  for (; heads >= H; heads -= H, o += H * state_floats(padded), p += H * kStretch) mix_heads<T, H>(o, padded, p, values, n);
  if constexpr (H > 1) {
    if (heads) mix_all<T, H - 1>(o, padded, p, values, n, heads);
  }
}

// Turns the scores first .. last of a stretch into weights, in place, for `n` queries, and notes the greatest score and
// the weights' sum of each. In two steps, because one query's greatest score is slow to find but does not keep the others.
void weigh(float* s, int64_t n, int64_t first, int64_t last, float* top_and_sum, int64_t step) {
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
      const V::F e = exp_lanes(V::sub(V::load(mine + i), top));
      V::store(mine + i, e);
      sum = V::add(sum, e);
    }
    noted[1] = V::sum(sum);
  }
}

// The slots of a stretch that a row sees.
struct Seen {
  int64_t first, count;
  bool operator==(const Seen& other) const { return first == other.first && count == other.count; }
};

constexpr int64_t kMostQueries = 60;  // that are scored in a row

template <class T>
void attend_to(const AttendTask& t) {
  const int64_t base = t.stretch * kStretch, heads = t.n_heads, pad = t.padded, state = state_floats(pad);
  int64_t end = 0;
  for (int64_t r = 0; r < t.n_rows; r++) end = t.rows[r].end > end ? t.rows[r].end : end;
  const int64_t count = smaller(end - base, kStretch);
  const int32_t* list = t.rows[0].list + base;
  float* const scores = t.scratch;  // [rows * heads][kStretch]
  float* const pairs = scores + t.n_rows * heads * kStretch;  // 16 keys
  float* const copies = pairs + kLanes * pad;
  // Few queries: they wait for memory, and read 16-bit keys as they are. For more, fp32 is worth a copy.
  const bool few = t.n_rows * heads <= V::queries;
  constexpr bool narrow = sizeof(T) < sizeof(float);
  T* const turned = reinterpret_cast<T*>(narrow ? copies : pairs);
  const SlotReader<T> keys{t, t.kv.k, copies}, values{t, t.kv.v, copies};
  const T* at[kStretch];
  const float* q[kMostQueries];
  float* to[kMostQueries];

  for (int64_t s = 0; s < count; s += kLanes) {
    const int64_t n = smaller(count - s, kLanes);
    if (few) prefetch_kv(t.kv, t.kv.v, t.kv_head, list + s, n);
    if (few && s < t.n_ahead) prefetch_kv(t.kv, t.kv.k, t.ahead_head, t.ahead + s, smaller(t.n_ahead - s, kLanes));
    keys.read(list + s, n, at);
    for (int64_t i = n; i < kLanes; i++) at[i] = at[0];  // computed, never looked at
    for (int64_t d = 0; d < pad; d += 16 / sizeof(T)) V::pairs(at, d, turned + d * kLanes);
    if (narrow && !few) {
      for (int64_t i = 0; i < kLanes * pad; i += kLanes) V::store(pairs + i, wide(turned + i));
    }
    int64_t queries = 0;
    const auto flush = [&] {
      if (few)
        score_all(q, turned, pad, to, queries);
      else
        score_all(q, pairs, pad, to, queries);
      queries = 0;
    };
    for (int64_t r = 0; r < t.n_rows; r++) {
      if (base + s >= t.rows[r].end || base + s + kLanes <= t.rows[r].begin) continue;
      for (int64_t h = 0; h < heads; h++) {
        q[queries] = t.q + r * t.q_stride + h * pad;
        to[queries] = scores + (r * heads + h) * kStretch + s;
        if (++queries == kMostQueries) flush();
      }
    }
    flush();
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
    float *const s = scores + r * heads * kStretch, *const o = t.states + r * heads * state;
    weigh(s, same * heads, now.first, now.first + now.count, o + pad, state);
    const float* p = s + now.first;
    mix_all<T>(o, pad, p, at + now.first, now.count, same * heads);
  }
}

void attend(const AttendTask& t) {
  const bool whole = t.padded == t.kv.dim;
  if (whole && t.kv.format == KVFormat::f16)
    attend_to<Half>(t);
  else if (whole && t.kv.format == KVFormat::bf16)
    attend_to<Bf16>(t);
  else
    attend_to<float>(t);
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
