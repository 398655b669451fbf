#include "vec_avx512.h"
//
#include "kernel_table.h"
//
#include "kernel_amx.h"

namespace outrider {

const Kernels* kernels_avx512_amx() {
  static constexpr Kernels table = [] {
    Kernels k = kernel_table("avx512_amx");
    k.tile = kTileRows;
    k.linear = linear_amx;
    return k;
  }();
  return &table;
}

}  // namespace outrider
