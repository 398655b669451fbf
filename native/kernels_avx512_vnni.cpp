#include "vec_avx512.h"
//
#include "kernel_table.h"

namespace outrider {

const Kernels* kernels_avx512_vnni() {
  static constexpr Kernels table = kernel_table("avx512_vnni");
  return &table;
}

}  // namespace outrider
