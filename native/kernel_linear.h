// Matrix products on packed weights, written once over V, the sixteen lanes of an instruction set.
#pragma once

#include "common.h"

namespace outrider {
namespace {

// Writes one block's outputs of one row: plus bias, plus what is there, cut at the weight's true width.
inline void emit(V::F sum, float* y, int64_t width, const float* bias, bool add) {
  if (bias) sum = V::add(sum, V::load(bias));
  if (width >= kLanes) {
    V::store(y, add ? V::add(V::load(y), sum) : sum);
    return;
  }
  float lanes[kLanes];
  V::store(lanes, sum);
  for (int64_t i = 0; i < width; i++) y[i] = add ? y[i] + lanes[i] : lanes[i];
}

constexpr int64_t kAhead = 6144;  // bytes; past the end of a weight it does no harm

struct Output {
  float* y;  // first row, first output of the block
  int64_t ldy, width;
  const float* bias;
  bool add;
};

// What one group of weights adds to the sum of a row: one or two fused multiply-adds with the exact integer sum.
template <Format T>
struct GroupScales {
  V::F d{}, m{};

  explicit GroupScales(const uint8_t* w) {
    if constexpr (T != Format::i8) d = V::load_half(w + (T == Format::q8 ? 512 : 256));
    if constexpr (T == Format::q4m) m = V::load_half(w + 288);
  }
  V::F add(V::F sum, V::F product, float scale, float shift) const {
    if constexpr (T == Format::i8) return V::fma(product, V::set(scale), sum);
    sum = V::fma(product, V::mul(d, V::set(scale)), sum);
    if constexpr (T == Format::q4m) sum = V::fma(m, V::set(shift), sum);
    return sum;
  }
};

// R rows times one block of integer weights.
// `at` is the tile's first group (see Acts).
template <int R, Format T>
void integer_tile(const uint8_t* w, int64_t groups, const Acts& a, int64_t at, const Output& out) {
  constexpr int64_t stride = unit_bytes(T);
  const int8_t* q = a.q + at * kGroup;
  const float* scale = a.scale + at;
  const float* shift = a.shift + at;
  const int32_t* start = (T == Format::q4 ? a.start8 : a.start128) + at;
  // Nothing to undo where nibbles stand for themselves, or where bytes() has taken the codes' offset away.
  constexpr bool from_zero = T == Format::q4m || (T != Format::q4 && V::signed_bytes);
  V::F sum[R];
  for (int r = 0; r < R; r++) sum[r] = V::set(0.0f);
  for (int64_t g = 0; g < groups; g++, w += stride, q += R * kGroup, scale += R, shift += R, start += R) {
    // The processor's own look-ahead ends with each 4 KiB; a weight that comes from memory needs a longer one.
    for (int64_t i = 0; i < stride; i += 64) __builtin_prefetch(w + kAhead + i);
    V::I acc[R];
    for (int r = 0; r < R; r++) acc[r] = V::set_i(from_zero ? 0 : start[r]);
    if constexpr (T == Format::q4m || T == Format::q4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        V::W low, high;
        V::nibbles(w + 64 * j, low, high);
        for (int r = 0; r < R; r++) acc[r] = V::dot(acc[r], low, q + r * kGroup + 8 * j);
        for (int r = 0; r < R; r++) acc[r] = V::dot(acc[r], high, q + r * kGroup + 8 * j + 4);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const V::W b = V::bytes(w + 64 * j);
        for (int r = 0; r < R; r++) acc[r] = V::dot(acc[r], b, q + r * kGroup + 4 * j);
      }
    }
    const GroupScales<T> scales(w);
    for (int r = 0; r < R; r++) sum[r] = scales.add(sum[r], V::to_f(acc[r]), scale[r], shift[r]);
  }
  for (int r = 0; r < R; r++) {
    if constexpr (T == Format::i8) sum[r] = V::mul(sum[r], V::load(reinterpret_cast<const float*>(w)));
    emit(sum[r], out.y + r * out.ldy, out.width, out.bias, out.add);
  }
}

template <Format T>
inline V::F dense_load(const uint8_t* w) {
  if constexpr (T == Format::f32) return V::load(reinterpret_cast<const float*>(w));
  return V::load_bf16(reinterpret_cast<const uint16_t*>(w));
}

// R rows times one block of 16- or 32-bit floats. Four sums, each over every fourth input, hide the latency of the
// multiply-add.
template <int R, Format T>
void dense_tile(const uint8_t* w, int64_t k, const float* x, int64_t ldx, const Output& out) {
  constexpr int64_t stride = unit_bytes(T);
  V::F sum[4][R];
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < R; r++) sum[j][r] = V::set(0.0f);
  int64_t i = 0;
  for (; i + 4 <= k; i += 4, w += 4 * stride)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const V::F b = dense_load<T>(w + j * stride);
      for (int r = 0; r < R; r++) sum[j][r] = V::fma(V::set(x[r * ldx + i + j]), b, sum[j][r]);
    }
  for (; i < k; i++, w += stride) {
    const V::F b = dense_load<T>(w);
    for (int r = 0; r < R; r++) sum[0][r] = V::fma(V::set(x[r * ldx + i]), b, sum[0][r]);
  }
  for (int r = 0; r < R; r++)
    emit(V::add(V::add(sum[0][r], sum[1][r]), V::add(sum[2][r], sum[3][r])), out.y + r * out.ldy, out.width, out.bias, out.add);
}

template <int R, Format T>
void one_tile(const WeightView& w, const uint8_t* block, const Acts& a, int64_t row, const Output& out) {
  if constexpr (is_dense(T)) {
    dense_tile<R, T>(block, w.k, a.x + row * a.k, a.k, out);
  } else {
    integer_tile<R, T>(block, w.k / kGroup, a, row * (w.k / kGroup), out);
  }
}

using TileFn = void (*)(const WeightView&, const uint8_t*, const Acts&, int64_t, const Output&);

// The kernel for a tile of `rows` rows, 1 .. R.
template <Format T, int R>
TileFn tile_kernel(int64_t rows) {
  if constexpr (R == 1) {
    return one_tile<1, T>;
  } else {
    return rows == R ? one_tile<R, T> : tile_kernel<T, R - 1>(rows);
  }
}

template <Format T>
void linear_as(const WeightView& w, const Acts& a, int64_t b0, int64_t b1, const Output& out) {
  constexpr int most = is_dense(T) ? V::dense_tile : V::tile;
  const Tiles tiles(a.rows, most);
  if (!tiles.count) return;
  // At most two sizes of tile: the first `wide` tiles have one row more.
  const int64_t size = a.rows / tiles.count, wide = a.rows % tiles.count;
  const TileFn narrow_fn = tile_kernel<T, most>(size), wide_fn = tile_kernel<T, most>(size + (wide > 0));
  const int64_t bytes = block_bytes(T, w.k);
  for (int64_t b = b0; b < b1; b++) {
    const int64_t left = w.n - b * kLanes;
    Output o = {nullptr, out.ldy, left < kLanes ? left : kLanes, out.bias ? out.bias + b * kLanes : nullptr, out.add};
    for (int64_t t = 0; t < tiles.count; t++) {
      const int64_t row = tiles.start(t);
      o.y = out.y + row * out.ldy + b * kLanes;
      (t < wide ? wide_fn : narrow_fn)(w, w.data + b * bytes, a, row, o);
    }
  }
}

[[maybe_unused]] void linear(const WeightView& w, const Acts& a, int64_t b0, int64_t b1, float* y, int64_t ldy, const float* bias, bool add) {
  const Output out = {y, ldy, 0, bias, add};
  switch (w.format) {
    case Format::f32: return linear_as<Format::f32>(w, a, b0, b1, out);
    case Format::bf16: return linear_as<Format::bf16>(w, a, b0, b1, out);
    case Format::i8: return linear_as<Format::i8>(w, a, b0, b1, out);
    case Format::q8: return linear_as<Format::q8>(w, a, b0, b1, out);
    case Format::q4: return linear_as<Format::q4>(w, a, b0, b1, out);
    case Format::q4m: return linear_as<Format::q4m>(w, a, b0, b1, out);
  }
}

}  // namespace
}  // namespace outrider
