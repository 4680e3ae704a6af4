// Compiled for the compiler's default instruction set.
#define GPTFAST_ISA portable
#include "ops/cpu/kernels_impl.h"

namespace gptfast::cpu {

const Kernels kPortableKernels = portable::make_kernels("portable");

}  // namespace gptfast::cpu
