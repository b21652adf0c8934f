// The processor's features, read by its own instruction or from the kernel: amp_patch/casts/cpu_half.py emulates
// products of a type that the processor has no arithmetic for.
#pragma once

#include <c10/core/ScalarType.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace amp_patch {

// Tells whether this CPU has arithmetic for `type`, on vectors or on tiles: for FP16 AVX512-FP16, AMX-FP16 or ARM's
// FEAT_FP16; for BF16 AVX512-BF16, AMX-BF16 or ARM's FEAT_BF16. A CPU that only converts the type (F16C) has none.
inline bool cpu_has(at::ScalarType type) {
  const bool fp16 = type == at::ScalarType::Half;
#if defined(__x86_64__) || defined(__i386__)
  unsigned a = 0, b = 0, c = 0, d = 0, most = 0;
  // The system must save the registers too: __builtin_cpu_supports checks this in XCR0.
  if (!__builtin_cpu_supports("avx512f") || !__get_cpuid_count(7, 0, &most, &b, &c, &d)) return false;
  const bool avx512_fp16 = d & (1u << 23), amx_bf16 = d & (1u << 22);
  a = 0;
  if (most >= 1) __get_cpuid_count(7, 1, &a, &b, &c, &d);
  const bool avx512_bf16 = a & (1u << 5), amx_fp16 = a & (1u << 21);
  return fp16 ? avx512_fp16 || amx_fp16 : avx512_bf16 || amx_bf16;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long asimdhp = 1ul << 10, bf16 = 1ul << 14;  // HWCAP_ASIMDHP, HWCAP2_BF16
  return fp16 ? getauxval(AT_HWCAP) & asimdhp : getauxval(AT_HWCAP2) & bf16;
#elif defined(__aarch64__) && defined(__APPLE__)
  return fp16;  // every Apple processor has it; torch uses no BF16 arithmetic there
#else
  return false;
#endif
}

}  // namespace amp_patch
