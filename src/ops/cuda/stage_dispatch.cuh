// One function per weight format over all stages; each format is compiled in a file of its own.
#pragma once

#include "ops/cuda/stage_experts.cuh"

namespace gptfast::cuda {

template <class W>
cudaError_t run_stage(const Launch& launch, Stage stage, const StageArgs& args) {
  switch (stage) {
    case Stage::kQkv:
      return launch_stage<W, Stage::kQkv>(launch, args);
    case Stage::kResidual:
      return launch_stage<W, Stage::kResidual>(launch, args);
    case Stage::kResidualSum:
      return launch_stage<W, Stage::kResidualSum>(launch, args);
    case Stage::kGateUp:
      return launch_stage<W, Stage::kGateUp>(launch, args);
    case Stage::kExpertGateUp:
      return launch_expert_stage<W, Stage::kExpertGateUp, 1>(launch, args);
    case Stage::kExpertDown:
      return launch_expert_down<W>(launch, args);
    default:
      return launch_stage<W, Stage::kHead>(launch, args);
  }
}

}  // namespace gptfast::cuda
