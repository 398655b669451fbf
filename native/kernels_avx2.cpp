#include "vec_avx2.h"
//
#include "kernel_table.h"

namespace outrider {

const Kernels* kernels_avx2() {
  static constexpr Kernels table = kernel_table("avx2");
  return &table;
}

}  // namespace outrider
