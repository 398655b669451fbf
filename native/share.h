// How rows and weights are shared out among threads, and activations in 8 bits.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "layer.h"

namespace outrider {

// The share of `thread` in `total` pieces of work.
inline Range share(int64_t total, int thread, int threads) { return {total * thread / threads, total * (thread + 1) / threads}; }

// Activations in fp32 only.
inline Acts plain(int64_t rows) {
  Acts a{};
  a.rows = rows;
  return a;
}

// Activations of width k in `memory`, for weights in 8 bits or fewer.
inline Acts cut_acts(Cutter& memory, int64_t rows, int64_t k) {
  const int64_t groups = rows * (k / kGroup);
  Acts a = plain(rows);
  a.q = memory.take<int8_t>(groups * kGroup);
  a.scale = memory.take<float>(groups);
  a.shift = memory.take<float>(groups);
  a.start8 = memory.take<int32_t>(groups);
  a.start128 = memory.take<int32_t>(groups);
  return a;
}

inline Acts with(Acts a, const float* x, int64_t k) {
  a.x = x;
  a.k = k;
  return a;
}

// Where a row's groups lie: the first one's number, and how far apart they are.
struct RowPlace {
  int64_t at, step;
};

inline RowPlace row_place(const Kernels& kernels, const Acts& a, int64_t row) {
  const Tiles tiles(a.rows, kernels.tile);
  const int64_t size = a.rows / tiles.count, wide = a.rows % tiles.count, in_wide = wide * (size + 1);
  const int64_t t = row < in_wide ? row / (size + 1) : wide + (row - in_wide) / size;
  return {tiles.start(t) * (a.k / kGroup) + (row - tiles.start(t)), tiles.size(t)};
}

// Inputs from .. to of one row to 8 bits; both are multiples of the group.
inline void quantize_row(const Kernels& kernels, const Acts& a, int64_t row, int64_t from, int64_t to) {
  const RowPlace place = row_place(kernels, a, row);
  kernels.quantize(a.x + row * a.k + from, to - from, place.step, place.at + from / kGroup * place.step, a);
}

// Inputs `range` of every row to 8 bits. A thread takes some inputs of all rows, not all inputs of some: rows of a tile
// lie side by side, and two threads that write them would wait for each other's cache lines.
inline void quantize_rows(const Kernels& kernels, const Acts& a, Range range) {
  for (int64_t r = 0; r < a.rows && range.from < range.to; r++) quantize_row(kernels, a, r, range.from, range.to);
}

// What that rounding left over to 8 bits of its own: the two together are worth 16. `left` [rows, k] is room for it.
inline void quantize_rests(const Kernels& kernels, const Acts& a, const Acts& rest, float* left, Range range) {
  for (int64_t r = 0; r < a.rows && range.from < range.to; r++) {
    const RowPlace place = row_place(kernels, a, r);
    const int64_t at = place.at + range.from / kGroup * place.step, from = r * a.k + range.from;
    kernels.left_over(a.x + from, range.to - range.from, place.step, at, a, left + from);
    kernels.quantize(left + from, range.to - range.from, place.step, at, rest);
  }
}

inline bool any_integer(std::initializer_list<const Linear*> linears) {
  return std::any_of(linears.begin(), linears.end(), [](const Linear* l) { return !is_dense(l->weight->format()); });
}

}  // namespace outrider
