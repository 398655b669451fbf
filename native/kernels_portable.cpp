#include "vec_portable.h"
//
#include "kernel_table.h"

namespace outrider {

const Kernels* kernels_portable() {
  static constexpr Kernels table = kernel_table("portable");
  return &table;
}

}  // namespace outrider
