// Compiled with AVX-512 F, BW, DQ, VL and VNNI.
#define GPTFAST_ISA avx512
#include "ops/cpu/kernels_impl.h"

namespace gptfast::cpu {

const Kernels kAvx512Kernels = avx512::make_kernels("avx512");

}  // namespace gptfast::cpu
