// Chooses the kernels that this CPU can run.
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "ops/cpu/kernels.h"

namespace gptfast::cpu {
namespace {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };
constexpr std::array kNames = {"portable", "avx2", "avx512", "avx512_bf16"};

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

/// The most that GPTFAST_CPU allows. "reference" is not ours: dispatch.cpp never asks for kernels
/// then.
Isa cap_from_environment() {
  const char* value = std::getenv("GPTFAST_CPU");
  if (value == nullptr || *value == '\0') return Isa::kAvx512Bf16;
  const std::string_view cap = value;
  const auto* const name = std::find(kNames.begin(), kNames.end(), cap);
  if (name != kNames.end()) return static_cast<Isa>(name - kNames.begin());
  TORCH_CHECK(cap == "reference", "GPTFAST_CPU is '", cap,
              "', expected portable, avx2, avx512, avx512_bf16 or reference");
  return Isa::kPortable;
}

Isa chosen_isa() {
  static const Isa chosen = std::min(best_isa(), cap_from_environment());
  return chosen;
}

}  // namespace

const Kernels& kernels() {
#if defined(__x86_64__)
  if (chosen_isa() >= Isa::kAvx512) return kAvx512Kernels;
  if (chosen_isa() == Isa::kAvx2) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

const PromptKernels* prompt_kernels() {
  return chosen_isa() == Isa::kAvx512Bf16 ? kernels().prompt : nullptr;
}

const char* path() {
  return kNames[static_cast<size_t>(chosen_isa())];
}

}  // namespace gptfast::cpu
