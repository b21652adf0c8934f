// What the processor can do, as it says itself: asked by amp_patch's emulation of FP16 on a CPU, which is off where the
// processor computes in FP16.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace amp_patch {

// FP16 arithmetic, on vectors or on tiles: AVX512-FP16, AMX-FP16, ARM's FEAT_FP16. Conversions (F16C) and AMX-BF16 are
// not it.
inline bool cpu_has_fp16() {
#if defined(__x86_64__) || defined(__i386__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  // The registers must be saved by the system too: __builtin_cpu_supports asks XCR0 for us.
  if (!__builtin_cpu_supports("avx512f") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool avx512_fp16 = d & (1u << 23);
  const bool amx_fp16 = a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 21));
  return avx512_fp16 || amx_fp16;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long asimdhp = 1ul << 10;  // HWCAP_ASIMDHP
  return getauxval(AT_HWCAP) & asimdhp;
#elif defined(__aarch64__) && defined(__APPLE__)
  return true;  // every Apple processor
#else
  return false;
#endif
}

}  // namespace amp_patch
