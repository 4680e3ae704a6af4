#include "ops/cuda/stage_dispatch.cuh"

namespace gptfast::cuda {

template cudaError_t run_stage<Int8Weights>(const Launch&, Stage, const StageArgs&);

}  // namespace gptfast::cuda
