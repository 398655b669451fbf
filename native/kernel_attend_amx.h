// Attention over KV in bf16 by AMX, with the same bits as that of kernel_attend.h (but for numbers below 1.2e-38, which
// tiles take for 0). A tile register holds 16 keys x 32 dims just as they lie, and is multiplied with 16 queries; then 16
// queries' weights x 32 positions with the values of those positions. Queries of all rows and heads share the tiles, so
// that a further row costs little more than its weights.
#pragma once

#include <immintrin.h>

#include "kernel_stretch.h"

namespace outrider {
namespace {

constexpr int kSide = 16;  // rows of a tile register, and its fp32 numbers in a row

// All registers alike: 16 rows of 64 bytes. Not _tile_loadconfig: GCC 12 does not see that it reads the whole of this.
struct alignas(64) SquareTiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

void begin_attend() { SquareTiles().load(); }
void end_attend() { _tile_release(); }

// Nor does GCC 12 see what tiles are loaded from.
inline void written() { asm volatile("" ::: "memory"); }

// Four rows of four numbers each, in every 128 bits: turned around.
inline void turn4(__m512i (&r)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
  r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
}

// The working memory of one task, for up to 16 queries at a time.
struct TileScratch {
  union {
    float products[4 * kSide][kSide];  // of keys and queries
    float sums[kSide][4 * kSide];
  };
  float scores[kSide][kStretch];
  uint16_t weights[kSide][kStretch];  // bf16
  uint16_t *queries, *copies, *values;  // [16][padded], [kStretch][padded] twice

  // In the scratch memory of a task, which has room for it.
  static TileScratch& in(float* memory, int64_t padded) {
    auto& s = *reinterpret_cast<TileScratch*>(memory);
    s.queries = reinterpret_cast<uint16_t*>(&s + 1);
    s.copies = s.queries + kSide * padded;
    s.values = s.copies + kStretch * padded;
    return s;
  }
};

static_assert(sizeof(TileScratch) + 64 <= kTileFloats * sizeof(float));

// Queries to tiles of 16 pairs of dims x 16 queries. Columns behind the last query's four hold anything.
inline void lay_queries(const float* const* q, int64_t n, int64_t dims, uint16_t* to) {
  for (int64_t i = 0; i < n; i += 4)
    for (int64_t d = 0; d < dims; d += kChunk) {
      __m512i r[4];
      for (int j = 0; j < 4; j++) {
        const float* x = q[i + j < n ? i + j : i] + d;
        r[j] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + kLanes), _mm512_loadu_ps(x)));
      }
      turn4(r);
      uint16_t* tile = to + d * kSide + 2 * i;
      for (int j = 0; j < 4; j++) {
        const auto put = [&](int pair, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(tile + pair * 2 * kSide), x); };
        put(j, _mm512_castsi512_si128(r[j]));
        put(j + 4, _mm512_extracti32x4_epi32(r[j], 1));
        put(j + 8, _mm512_extracti32x4_epi32(r[j], 2));
        put(j + 12, _mm512_extracti32x4_epi32(r[j], 3));
      }
    }
}

// Products of 16 keys with queries, [keys][queries], to scores [queries][keys].
inline void turn_products(const float (*products)[kSide], int64_t queries, float* scores) {
  for (int64_t q = 0; q < queries; q += 4) {
    __m512i r[4];
    for (int k = 0; k < 4; k++) {
      const auto four = [&](int key) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(products[key] + q)); };
      r[k] = _mm512_castsi128_si512(four(k));
      r[k] = _mm512_mask_broadcast_i32x4(r[k], 0x00f0, four(k + 4));
      r[k] = _mm512_mask_broadcast_i32x4(r[k], 0x0f00, four(k + 8));
      r[k] = _mm512_mask_broadcast_i32x4(r[k], 0xf000, four(k + 12));
    }
    turn4(r);
    for (int j = 0; j < 4; j++) _mm512_storeu_si512(scores + (q + j) * kStretch, r[j]);
  }
}

// Where a tile of 16 keys lies.
struct Lines {
  const uint16_t* at;
  int64_t step;  // bytes
};

// The keys of a stretch, 16 at a time: in place where they are neighbours, else copied.
inline void find_keys(const AttendTask& t, const int32_t* list, int64_t count, const Bf16* const* keys, uint16_t* copies, Lines* to) {
  for (int64_t s = 0; s < count; s += kSide) {
    bool neighbours = s + kSide <= count;
    for (int64_t i = 1; neighbours && i < kSide; i++) neighbours = list[s + i] == list[s] + i;
    *to = {&keys[s]->bits, t.padded * 2};
    if (!neighbours) {
      to->at = copies + s * t.padded;
      for (int64_t i = s; i < s + kSide; i++)  // those behind the last are computed and never looked at
        std::memcpy(copies + i * t.padded, keys[i < count ? i : s], static_cast<size_t>(to->step));
    }
    to++;
  }
}

// Values to tiles of 16 pairs of positions x 16 dims: in a tile's columns are every other four of 32 dims. Returns whether
// all are finite.
inline bool lay_values(const Bf16* const* values, Seen seen, int64_t dims, uint16_t* to) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i greatest = _mm512_setzero_si512();
  const auto load = [&](int64_t i, int64_t d) {
    if (i < seen.first || i >= seen.last) return _mm512_setzero_si512();
    const __m512i x = _mm512_loadu_si512(values[i] + d);
    greatest = _mm512_max_epu16(greatest, _mm512_and_si512(x, magnitude));
    return x;
  };
  for (int64_t i = 0; i < round_up(seen.last, kChunk); i += 2)
    for (int64_t d = 0; d < dims; d += kChunk) {
      const __m512i a = load(i, d), b = load(i + 1, d);
      uint16_t* tile = to + i / kChunk * kChunk * dims + d * kChunk + i % kChunk * kSide;
      _mm512_storeu_si512(tile, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(tile + kSide * kChunk, _mm512_unpackhi_epi16(a, b));
    }
  return !_mm512_cmpge_epu16_mask(greatest, _mm512_set1_epi16(0x7f80));
}

#define OUTRIDER_FOUR(DO, n) \
  DO(0) if (n > 1) DO(1) if (n > 2) DO(2) if (n > 3) DO(3)

// Products of up to 64 keys with 16 queries. Registers 0-3 hold them, 4 and 5 keys, 6 queries.
inline void multiply_keys(const Lines* keys, int64_t tiles, const uint16_t* queries, int64_t dims, float (*to)[kSide]) {
#define OUTRIDER_NONE(R) _tile_zero(R);
#define OUTRIDER_KEYS(R)                                            \
  {                                                                 \
    _tile_loadd(5, keys[R].at + d, keys[R].step);                   \
    _tile_dpbf16ps(R, 5, 6);                                        \
  }
#define OUTRIDER_STORE(R) _tile_stored(R, to[R * kSide], sizeof(*to));
  OUTRIDER_FOUR(OUTRIDER_NONE, tiles)
  for (int64_t d = 0; d < dims; d += kChunk) {
    _tile_loadd(6, queries + d * kSide, 64);
    OUTRIDER_FOUR(OUTRIDER_KEYS, tiles)
  }
  OUTRIDER_FOUR(OUTRIDER_STORE, tiles)
#undef OUTRIDER_STORE
#undef OUTRIDER_KEYS
#undef OUTRIDER_NONE
}

// 16 queries' weighted sums of up to 64 dims of the values. Registers 0-3 hold them, 4 weights, 5 values.
inline void multiply_values(const uint16_t* weights, const uint16_t* values, int64_t chunks, int64_t dims, int64_t tiles, float (*to)[4 * kSide]) {
#define OUTRIDER_NONE(R) _tile_zero(R);
#define OUTRIDER_VALUES(R)                                          \
  {                                                                 \
    _tile_loadd(5, values + R * kSide * kChunk, 64);                \
    _tile_dpbf16ps(R, 4, 5);                                        \
  }
#define OUTRIDER_STORE(R) _tile_stored(R, to[0] + R * kSide, sizeof(*to));
  OUTRIDER_FOUR(OUTRIDER_NONE, tiles)
  for (int64_t c = 0; c < chunks; c++, weights += kChunk, values += kChunk * dims) {
    _tile_loadd(4, weights, sizeof(uint16_t[kStretch]));
    OUTRIDER_FOUR(OUTRIDER_VALUES, tiles)
  }
  OUTRIDER_FOUR(OUTRIDER_STORE, tiles)
#undef OUTRIDER_STORE
#undef OUTRIDER_VALUES
#undef OUTRIDER_NONE
}
#undef OUTRIDER_FOUR

// Some rows and heads of a task whose queries, row by row, fill a tile.
struct Share {
  int64_t row, rows, head, heads;
  int64_t queries() const { return rows * heads; }
};

// From scores to weights in bf16; 0 for what a row does not see.
inline void weigh_share(const AttendTask& t, const Share& share, int64_t count, float* states, TileScratch& scratch) {
  const int64_t base = t.stretch * kStretch, state = state_floats(t.padded);
  for (int64_t r = 0, same; r < share.rows; r += same) {
    const Seen now = seen_of(t.rows[share.row + r], base);
    for (same = 1; r + same < share.rows && seen_of(t.rows[share.row + r + same], base) == now;) same++;
    const int64_t first = r * share.heads, n = same * share.heads;
    if (now.first < now.last) weigh<Bf16>(scratch.scores[first], n, now, states + first * state + t.padded, state);
    const auto part = [&](const float* p, int64_t s) { return s + kLanes > now.first && s < now.last ? V::load(p + s) : V::set(0.0f); };
    for (int64_t i = first; i < first + n; i++)
      for (int64_t s = 0; s < count; s += kChunk) {
        const float* p = scratch.scores[i];
        _mm512_storeu_si512(scratch.weights[i] + s, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(part(p, s + kLanes), part(p, s))));
      }
  }
}

// Sums of values to states; lay_values says in what order the dims are.
inline void put_sums(const AttendTask& t, const Share& share, const float (*sums)[4 * kSide], int64_t dims, float* to) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t i = 0; i < share.queries(); i++, sums++, to += state_floats(t.padded))
    for (int64_t d = 0; d < dims; d += kChunk) {
      const V::F a = V::load(*sums + d), b = V::load(*sums + d + kLanes);
      V::store(to + d, _mm512_permutex2var_ps(a, low, b));
      V::store(to + d + kLanes, _mm512_permutex2var_ps(a, high, b));
    }
}

// Returns whether it could: a weight of 0 would make NaN of a value that is not finite, also for rows that do not see it.
bool attend_by_tiles(const AttendTask& t) {
  const int64_t base = t.stretch * kStretch, pad = t.padded;
  Seen any = {kStretch, 0};
  for (int64_t r = 0; r < t.n_rows; r++) {
    const Seen row = seen_of(t.rows[r], base);
    any = {smaller(any.first, row.first), row.last > any.last ? row.last : any.last};
  }
  const int64_t count = any.last, chunks = round_up(count, kChunk) / kChunk;
  const int32_t* list = t.rows[0].list + base;
  TileScratch& scratch = TileScratch::in(t.scratch, pad);
  const Bf16* at[kStretch];
  Lines keys[kStretch / kSide];

  prefetch_kv(t.kv, t.kv.v, t.kv_head, list, count);
  if (t.n_ahead) prefetch_kv(t.kv, t.kv.k, t.ahead_head, t.ahead, t.n_ahead);
  SlotReader<Bf16>{t, t.kv.k, nullptr}.read(list, count, at);
  find_keys(t, list, count, at, scratch.copies, keys);
  SlotReader<Bf16>{t, t.kv.v, nullptr}.read(list, count, at);
  if (!lay_values(at, any, pad, scratch.values)) return false;

  const int64_t most_heads = smaller(t.n_heads, kSide), most_rows = kSide / most_heads;
  for (int64_t head = 0; head < t.n_heads; head += most_heads)
    for (int64_t row = 0; row < t.n_rows; row += most_rows) {
      const Share share = {row, smaller(most_rows, t.n_rows - row), head, smaller(most_heads, t.n_heads - head)};
      float* const states = t.states + (row * t.n_heads + head) * state_floats(pad);
      const float* q[kSide];
      for (int64_t r = 0, i = 0; r < share.rows; r++)
        for (int64_t h = 0; h < share.heads; h++) q[i++] = t.q + (row + r) * t.q_stride + (head + h) * pad;
      lay_queries(q, share.queries(), pad, scratch.queries);
      written();
      for (int64_t s = 0; s < count; s += 4 * kSide) {
        const int64_t n = smaller(count - s, 4 * kSide);
        multiply_keys(keys + s / kSide, (n + kSide - 1) / kSide, scratch.queries, pad, scratch.products);
        for (int64_t i = 0; i < n; i += kSide) turn_products(scratch.products + i, share.queries(), scratch.scores[0] + s + i);
      }
      weigh_share(t, share, count, states, scratch);
      written();
      for (int64_t from = 0; from < pad; from += 4 * kSide) {
        const int64_t dims = smaller(pad - from, 4 * kSide);
        multiply_values(scratch.weights[0], scratch.values + from * kChunk, chunks, pad, dims / kSide, scratch.sums);
        put_sums(t, share, scratch.sums, dims, states + from);
      }
    }
  return true;
}

}  // namespace
}  // namespace outrider
