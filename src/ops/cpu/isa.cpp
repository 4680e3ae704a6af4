// Chooses the kernels that this CPU can run.
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string_view>

#include "ops/cpu/kernels.h"

namespace gptfast::cpu {
namespace {

enum class Isa { kPortable, kAvx2, kAvx512 };

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

/// The most that GPTFAST_CPU allows. "reference" is not ours: dispatch.cpp never asks for kernels
/// then.
Isa cap_from_environment() {
  const char* value = std::getenv("GPTFAST_CPU");
  if (value == nullptr || *value == '\0') return Isa::kAvx512;
  const std::string_view cap = value;
  if (cap == "avx512") return Isa::kAvx512;
  if (cap == "avx2") return Isa::kAvx2;
  TORCH_CHECK(cap == "portable" || cap == "reference", "GPTFAST_CPU is '", cap,
              "', expected portable, avx2, avx512 or reference");
  return Isa::kPortable;
}

const Kernels& choose() {
  const Isa best = best_isa();
  const Isa cap = cap_from_environment();
  const Isa isa = best < cap ? best : cap;
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const PromptKernels* prompt_kernels() {
#if defined(__x86_64__)
  static const bool has_bfloat16 = __builtin_cpu_supports("avx512bf16") != 0;
  if (has_bfloat16) return kernels().prompt;
#endif
  return nullptr;
}

}  // namespace gptfast::cpu
