// Compiled with -mavx2 -mfma -mf16c.
#define GPTFAST_ISA avx2
#include "ops/cpu/kernels_impl.h"

namespace gptfast::cpu {

const Kernels kAvx2Kernels = avx2::make_kernels("avx2");

}  // namespace gptfast::cpu
