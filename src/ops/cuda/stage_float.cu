#include "ops/cuda/stage_dispatch.cuh"

namespace gptfast::cuda {

template cudaError_t run_stage<Float16Weights<__nv_bfloat16>>(const Launch&, Stage,
                                                              const StageArgs&);
template cudaError_t run_stage<Float16Weights<__half>>(const Launch&, Stage, const StageArgs&);

}  // namespace gptfast::cuda
