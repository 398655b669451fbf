#include "vec_avx2.h"
//
#include "kernel_table.h"

namespace outrider {

const Kernels* kernels_avx2_vnni() {
  static constexpr Kernels table = kernel_table("avx2_vnni");
  return &table;
}

}  // namespace outrider
