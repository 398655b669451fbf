// Products of many rows with integer weights by AMX, with the same bits as those of kernel_linear.h: the integer sums
// are exact, and the floating-point part is the same. A group of weights, unpacked to signed bytes, is one tile
// register of 8 x 64 bytes just as it lies; a group of a tile of rows is one of rows x 32.
#pragma once

#include <immintrin.h>

#include "kernel_linear.h"

namespace outrider {
namespace {

constexpr int kTileRows = 16;   // of a tile register
constexpr int64_t kStrip = 12;  // groups of a block at a time: their codes and products stay in the first cache
constexpr int64_t kBand = 8;    // tiles of rows that go through a strip one after the other

// What the processor reads. Registers 0-3 hold products, 4 activations, 5 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 64};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t tile) {
    for (int i = 0; i < 5; i++) rows[i] = static_cast<uint8_t>(tile);
    rows[5] = 8;
  }
  // Not _tile_loadconfig: GCC 12 does not see that it reads the whole of this.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

struct alignas(64) Product {
  int32_t lanes[kTileRows][kLanes];
};

struct alignas(64) Codes {
  int8_t bytes[8][64];  // [input / 4][output, input % 4]
};

// The codes of n groups, less their offset.
template <Format T>
void unpack(const uint8_t* w, int64_t n, Codes* to) {
  const __m512i low_half = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8), top_bit = _mm512_set1_epi8(-128);
  for (int64_t g = 0; g < n; g++, w += unit_bytes(T), to++) {
    if constexpr (T == Format::q4 || T == Format::q4m) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m512i raw = _mm512_loadu_si512(w + 64 * j);
        __m512i low = _mm512_and_si512(raw, low_half), high = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low_half);
        if constexpr (T == Format::q4) low = _mm512_sub_epi8(low, eight), high = _mm512_sub_epi8(high, eight);
        _mm512_store_si512(to->bytes[2 * j], low);
        _mm512_store_si512(to->bytes[2 * j + 1], high);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) _mm512_store_si512(to->bytes[j], _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), top_bit));
    }
  }
}

// Product g into register R, which a literal must name. What R held, product g - 4, is complete by now and is stored.
#define OUTRIDER_PRODUCT(R, g)                                                    \
  {                                                                               \
    if (g >= 4 && g - 4 < n) _tile_stored(R, to[g - 4].lanes, sizeof(float[16])); \
    if (g < n) {                                                                  \
      _tile_zero(R);                                                              \
      _tile_loadd(4, q + (g) * rows * kGroup, kGroup);                            \
      _tile_loadd(5, codes[g].bytes, sizeof(codes->bytes[0]));                    \
      _tile_dpbssd(R, 4, 5);                                                      \
    }                                                                             \
  }

// The integer sums of n groups for a tile of rows. Meanwhile asks for the weights at `ahead`, unless null.
template <Format T>
void products(const int8_t* q, int64_t rows, const Codes* codes, int64_t n, const uint8_t* ahead, Product* to) {
  for (int64_t g = 0; g < n + 4; g += 4) {
    for (int64_t i = 0; ahead && i < 4 * unit_bytes(T); i += 64) __builtin_prefetch(ahead + g * unit_bytes(T) + i, 0, 2);
    OUTRIDER_PRODUCT(0, g)
    OUTRIDER_PRODUCT(1, (g + 1))
    OUTRIDER_PRODUCT(2, (g + 2))
    OUTRIDER_PRODUCT(3, (g + 3))
  }
}
#undef OUTRIDER_PRODUCT

// Adds n groups to the sums [R][16] of a tile of R rows; `at` is the first of these groups (see Acts). On its own, not
// between the products: up to some 150 cycles after a tile instruction there is one port for float vectors, not two.
template <int R, Format T>
void add_groups(const uint8_t* w, const Product* product, int64_t n, const Acts& a, int64_t at, float* sums) {
  const float *scale = a.scale + at, *shift = a.shift + at;
  V::F sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) sum[r] = V::load(sums + r * kLanes);
  for (int64_t g = 0; g < n; g++, w += unit_bytes(T), product++, scale += R, shift += R) {
    const GroupScales<T> scales(w);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = scales.add(sum[r], V::to_f(_mm512_load_si512(product->lanes[r])), scale[r], shift[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) V::store(sums + r * kLanes, sum[r]);
}

using AddGroupsFn = void (*)(const uint8_t*, const Product*, int64_t, const Acts&, int64_t, float*);

// Of several tiles none has fewer rows than half of what it could have.
template <Format T, int R = kTileRows>
AddGroupsFn add_groups_of(int64_t rows) {
  if constexpr (R == kTileRows / 2) {
    return add_groups<R, T>;
  } else {
    return rows == R ? add_groups<R, T> : add_groups_of<T, R - 1>(rows);
  }
}

template <Format T>
void linear_by_tiles(const WeightView& w, const Acts& a, int64_t b0, int64_t b1, const Output& out) {
  Codes codes[kStrip];
  Product product[kStrip];
  alignas(64) float sums[kBand * kTileRows * kLanes];
  const int64_t groups = w.k / kGroup;
  const Tiles tiles(a.rows, kTileRows), strips(groups, kStrip);
  const int64_t most = tiles.size(0);  // the others have as many rows, or one less
  const AddGroupsFn wide_fn = add_groups_of<T>(most), narrow_fn = add_groups_of<T>(most - (a.rows % tiles.count > 0));
  // One setting for all tiles: a narrow one is multiplied with a row that is not its own, whose product is not used.
  // Behind the last of all rows lies the rest of Acts.
  TileConfig(most).load();
  for (int64_t b = b0; b < b1; b++) {
    const uint8_t* block = w.data + b * block_bytes(T, w.k);
    const float* bias = out.bias ? out.bias + b * kLanes : nullptr;
    for (int64_t band = 0; band < tiles.count; band += kBand) {
      const int64_t end = band + kBand < tiles.count ? band + kBand : tiles.count;
      for (int64_t i = 0; i < (end - band) * kTileRows * kLanes; i++) sums[i] = 0.0f;
      for (int64_t s = 0; s < strips.count; s++) {
        const int64_t g = strips.start(s), n = strips.size(s);
        const uint8_t* strip = block + g * unit_bytes(T);
        unpack<T>(strip, n, codes);
        for (int64_t t = band; t < end; t++) {
          const int64_t row = tiles.start(t), rows = tiles.size(t), at = row * groups + g * rows;
          float* sum = sums + (t - band) * kTileRows * kLanes;
          products<T>(a.q + at * kGroup, rows, codes, n, t ? nullptr : strip + 2 * kAhead, product);
          (rows == most ? wide_fn : narrow_fn)(strip, product, n, a, at, sum);
          if (s + 1 < strips.count) continue;
          for (int64_t r = row; r < row + rows; r++, sum += kLanes) {
            V::F whole = V::load(sum);
            if constexpr (T == Format::i8) whole = V::mul(whole, V::load(reinterpret_cast<const float*>(strip + n * unit_bytes(T))));
            emit(whole, out.y + r * out.ldy + b * kLanes, w.n - b * kLanes, bias, out.add);
          }
        }
      }
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace outrider
