#include "isa.h"

#ifdef OUTRIDER_X86
#include <cpuid.h>
#endif
#if defined(OUTRIDER_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif
#ifdef OUTRIDER_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {
namespace {

#ifdef OUTRIDER_AVX_VNNI
// GCC and clang do not agree on a name for this one.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#ifdef OUTRIDER_AMX
// Whether the processor has tiles of bytes and of bf16, the system keeps their state, and lets this process use it. It has to be
// asked for: a process without tiles is spared their 8 KiB at every switch.
bool may_use_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // XGETBV
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3 || !(d >> 22 & 1)) return false;  // AMX-TILE, -INT8, -BF16
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;  // AVX512-BF16
  unsigned enabled = 0, high = 0;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  constexpr int request_permission = 0x1023, tile_data = 18;
  return (enabled >> 17 & 3) == 3 && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

#ifdef OUTRIDER_NEON
bool has_dot_product() {
#ifdef __linux__
  constexpr unsigned long asimddp = 1ul << 20;  // HWCAP_ASIMDDP, which older headers lack
  return getauxval(AT_HWCAP) & asimddp;
#elif defined(__APPLE__)
  return true;  // from the M1 on
#else
  return false;
#endif
}
#endif

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found;
#ifdef OUTRIDER_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) {
#ifdef OUTRIDER_AMX
    if (may_use_amx()) found.push_back(kernels_avx512_amx());
#endif
    found.push_back(kernels_avx512_vnni());
  }
  if (avx512) found.push_back(kernels_avx512());
#ifdef OUTRIDER_AVX_VNNI
  if (avx2 && has_avx_vnni()) found.push_back(kernels_avx2_vnni());
#endif
  if (avx2) found.push_back(kernels_avx2());  // every machine with AVX2 has F16C
#endif
#ifdef OUTRIDER_NEON
  if (has_dot_product()) found.push_back(kernels_neon());
#endif
  found.push_back(kernels_portable());
  return found;
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
  static const std::vector<const Kernels*> found = detect();
  return found;
}

const Kernels* find_kernels(const std::string& name) {
  for (const Kernels* k : available_kernels())
    if (name == k->name) return k;
  return nullptr;
}

}  // namespace outrider
