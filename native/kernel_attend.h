// Attention over paged KV in fp32. Per (row, head) and stretch of positions: scores of the seen slots, their softmax
// weights relative to the stretch's greatest score, the weighted sum of the values in the order of positions; then the
// stretches are added up in their order (the online softmax of Milakov and Gimelshein, 2018). Nothing depends on where a
// slot lies, on hidden slots in between, or on the other rows of the task, which only share the work of making keys ready.
//
// A score adds up chunks of 32 dims. A chunk's part is the sum over its even dims plus the sum over its odd ones. With KV
// in bf16 and whole vectors of dims, weights are rounded to bf16, too, and values are added up like dims: by chunks of 32
// positions, even and odd ones apart. That is how the tiles of kernel_attend_amx.h do it.
#pragma once

#include "kernel_rows.h"
#include "kernel_stretch.h"

namespace outrider {
namespace {

// Dot products of Q queries with 16 keys, laid out by V::pairs: one vector holds two dims of eight keys, so that keys
// need no sum across lanes and a query's two dims are one broadcast.
template <class T, int Q>
void score(const float* const* q, const T* keys, int64_t dims, float* const* to) {
  for (int64_t from = 0; from < dims; from += kChunk) {
    const int64_t end = smaller(from + kChunk, dims);
    V::F acc[Q][2];
    for (int i = 0; i < Q; i++)
      for (int j = 0; j < 2; j++) acc[i][j] = V::set(0.0f);
    for (int64_t d = from; d < end; d += 2, keys += 2 * kLanes) {
      const V::F x = wide(keys), y = wide(keys + kLanes);
      for (int i = 0; i < Q; i++) {
        const V::F pair = V::set2(q[i] + d);
        acc[i][0] = V::fma(pair, x, acc[i][0]);
        acc[i][1] = V::fma(pair, y, acc[i][1]);
      }
    }
    for (int i = 0; i < Q; i++) {
      const V::F sum = V::add_pairs(acc[i][0], acc[i][1]);
      V::store(to[i], from ? V::add(V::load(to[i]), sum) : sum);
    }
  }
}

// As many queries at a time as V::queries says; the last ones in a call of their own.
template <class T, int Q = V::queries>
void score_all(const float* const* q, const T* keys, int64_t dims, float* const* to, int64_t n) {
  for (; n >= Q; n -= Q, q += Q, to += Q) score<T, Q>(q, keys, dims, to);
  if constexpr (Q > 1) {
    if (n) score_all<T, Q - 1>(q, keys, dims, to, n);
  }
}

// Every `step`-th of the seen slots' values, times its weight, C vectors of H heads. `p` holds the heads kStretch apart.
template <class T, int H, int C>
void mix(V::F (*acc)[C], const float* p, const T* const* values, int64_t from, Seen seen, int64_t step) {
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) acc[h][c] = V::set(0.0f);
  for (int64_t i = seen.first; i < seen.last; i += step) {
    const T* v = values[i] + from;
    for (int c = 0; c < C; c++) {
      const V::F value = wide(v + c * kLanes);
      for (int h = 0; h < H; h++) acc[h][c] = V::fma(V::set(p[h * kStretch + i]), value, acc[h][c]);
    }
  }
}

// The weighted sum of the seen slots' values. `o` holds the heads `pad` apart.
template <class T, int H, int C>
void mix_to(float* o, int64_t pad, const float* p, const T* const* values, int64_t from, Seen seen) {
  V::F acc[H][C];
  const auto put = [&](bool add) {
    for (int h = 0; h < H; h++)
      for (int c = 0; c < C; c++) {
        float* to = o + h * pad + c * kLanes;
        V::store(to, add ? V::add(V::load(to), acc[h][c]) : acc[h][c]);
      }
  };
  if constexpr (std::is_same_v<T, Bf16>) {
    bool more = false;
    for (int64_t chunk = seen.first / kChunk * kChunk; chunk < seen.last; chunk += kChunk, more = true) {
      const int64_t first = chunk < seen.first ? seen.first : chunk, last = smaller(chunk + kChunk, seen.last), odd = first & 1;
      V::F other[H][C];
      mix<T, H, C>(other, p, values, from, {first + odd, last}, 2);
      mix<T, H, C>(acc, p, values, from, {first + 1 - odd, last}, 2);
      for (int h = 0; h < H; h++)
        for (int c = 0; c < C; c++) acc[h][c] = V::add(other[h][c], acc[h][c]);
      put(more);
    }
  } else {
    mix<T, H, C>(acc, p, values, from, seen, 1);
    put(false);
  }
}

template <class T, int H>
void mix_heads(float* o, int64_t padded, const float* p, const T* const* values, Seen seen) {
  constexpr int wide = V::value_chunk;
  const int64_t pad = state_floats(padded);
  int64_t from = 0;
  for (; from + wide * kLanes <= padded; from += wide * kLanes) mix_to<T, H, wide>(o + from, pad, p, values, from, seen);
  for (; from < padded; from += kLanes) mix_to<T, H, 1>(o + from, pad, p, values, from, seen);
}

template <class T, int H = V::value_heads>
void mix_all(float* o, int64_t padded, const float* p, const T* const* values, Seen seen, int64_t heads) {
  for (; heads >= H; heads -= H, o += H * state_floats(padded), p += H * kStretch) mix_heads<T, H>(o, padded, p, values, seen);
  if constexpr (H > 1) {
    if (heads) mix_all<T, H - 1>(o, padded, p, values, seen, heads);
  }
}

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
  for (int64_t r = 0, same; r < t.n_rows; r += same) {
    const Seen now = seen_of(t.rows[r], base);
    for (same = 1; r + same < t.n_rows && seen_of(t.rows[r + same], base) == now;) same++;
    if (now.first >= now.last) continue;
    // Rows that see the same go together: their heads, too, lie one after the other.
    float *const s = scores + r * heads * kStretch, *const o = t.states + r * heads * state;
    weigh<T>(s, same * heads, now, o + pad, state);
    mix_all<T>(o, pad, s, at, now, same * heads);
  }
}

void round_queries(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = from_bf16(to_bf16(x[i]));
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
  V::store(lanes, weight_lanes(V::set(rise > 0 ? -rise : rise)));
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
