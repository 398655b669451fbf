#include "vec_avx512.h"
//
#include "kernel_amx.h"
#include "kernel_attend_amx.h"

namespace outrider {
namespace {

void linear_amx(const WeightView& w, const Acts& a, int64_t b0, int64_t b1, float* y, int64_t ldy, const float* bias, bool add) {
  // Few rows are no faster this way. They are one tile, whether that has room for V::tile or kTileRows: the same Acts.
  if (a.rows <= V::tile || is_dense(w.format)) return kernels_avx512_vnni()->linear(w, a, b0, b1, y, ldy, bias, add);
  const Output out = {y, ldy, 0, bias, add};
  switch (w.format) {
    case Format::q8: return linear_by_tiles<Format::q8>(w, a, b0, b1, out);
    case Format::q4: return linear_by_tiles<Format::q4>(w, a, b0, b1, out);
    case Format::q4m: return linear_by_tiles<Format::q4m>(w, a, b0, b1, out);
    default: return linear_by_tiles<Format::i8>(w, a, b0, b1, out);
  }
}

constexpr int64_t kFewQueries = 4;  // which wait for memory either way

void attend_amx(const AttendTask& t) {
  const bool tiles = t.kv.format == KVFormat::bf16 && t.kv.dim % kChunk == 0 && t.n_rows * t.n_heads > kFewQueries;
  if (!tiles || !attend_by_tiles(t)) kernels_avx512_vnni()->attend(t);
}

}  // namespace

// As avx512_vnni, but for products of many rows with integer weights and attention over KV in bf16.
const Kernels* kernels_avx512_amx() {
  static const Kernels table = [] {
    Kernels k = *kernels_avx512_vnni();
    k.name = "avx512_amx";
    k.tile = kTileRows;
    k.linear = linear_amx;
    k.begin_attend = begin_attend;
    k.end_attend = end_attend;
    k.attend = attend_amx;
    return k;
  }();
  return &table;
}

}  // namespace outrider
