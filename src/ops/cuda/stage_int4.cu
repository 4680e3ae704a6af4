#include "ops/cuda/stage_dispatch.cuh"

namespace gptfast::cuda {

template cudaError_t run_stage<Int4Weights<32>>(const Launch&, Stage, const StageArgs&);
template cudaError_t run_stage<Int4Weights<64>>(const Launch&, Stage, const StageArgs&);
template cudaError_t run_stage<Int4Weights<128>>(const Launch&, Stage, const StageArgs&);

}  // namespace gptfast::cuda
