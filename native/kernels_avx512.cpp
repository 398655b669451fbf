#include "vec_avx512.h"
//
#include "kernel_table.h"

namespace outrider {

const Kernels* kernels_avx512() {
  static constexpr Kernels table = kernel_table("avx512");
  return &table;
}

}  // namespace outrider
