#include "vec_neon.h"
//
#include "kernel_table.h"

namespace outrider {

const Kernels* kernels_neon() {
  static constexpr Kernels table = kernel_table("neon");
  return &table;
}

}  // namespace outrider
