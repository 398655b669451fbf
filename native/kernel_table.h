// Collects the kernels of one instruction set. Include after the header that defines V. Everything is in unnamed
// namespaces: the same templates are compiled for other instruction sets in other files, and must not be merged.
#pragma once

#include "kernel_linear.h"
#include "kernel_rows.h"
//
#include "kernel_attend.h"

namespace outrider {
namespace {

inline void nothing() {}

constexpr Kernels kernel_table(const char* name) {
  return {name, V::tile, linear, quantize, left_over, greatest, norm, silu_mul, rotate, store_kv, prefetch_kv, round_queries, nothing, nothing, attend, merge, finish};
}

}  // namespace
}  // namespace outrider
