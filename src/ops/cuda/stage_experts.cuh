// Launching the stages of a mixture's experts.
#pragma once

#include "ops/cuda/stage_launch.cuh"

namespace gptfast::cuda {

/// A stage of experts: one launch per row, whose experts differ from those of the others.
/// Cluster: blocks that share the tiles of kExpertDown, one for each choice.
template <class W, Stage S, int Cluster>
inline cudaError_t launch_expert_stage(const Launch& launch, StageArgs args) {
  int sms = 0;
  int most_shared = 0;
  cudaError_t error = multiprocessors(sms);
  if (error != cudaSuccess) return error;
  error = shared_limit(most_shared);
  if (error != cudaSuccess) return error;

  const int choices = args.chosen.choices;
  const int outputs = S == Stage::kExpertGateUp ? choices : 1;
  size_stage<W, S>(args);
  args.expert_tiles = args.tiles;
  args.tiles *= outputs;
  args.neighbours = tile_bytes<W>(args) * args.tiles * Cluster >= kNeighbourBytes;
  const int blocks = std::min(args.tiles, sms / Cluster);
  args.batch = std::min(args.tiles / blocks + 1, kWarps);
  int bytes =
      shared_layout<W, OneRow>(/*rows=*/1, args.padded_k, args.batch, args.norm_bytes).total;
  if (S == Stage::kExpertGateUp) bytes += router_bytes(args.router);
  if (bytes > most_shared) return cudaErrorInvalidValue;
  bytes = std::max(bytes, most_shared / 2 + 1);  // kAloneWidth says why; 2 % of Mixtral-8x7B int8
  const int rows = args.in.rows;
  args.in.rows = 1;
  for (int r = 0; r < rows; ++r) {
    error = launch_cluster(launch, Cluster, stage_kernel<W, S, OneRow>, dim3(blocks * Cluster),
                           kThreads, bytes, args);
    if (error != cudaSuccess) return error;
    args.in.x += static_cast<int64_t>(Cluster) * args.w.k;
    args.out += static_cast<int64_t>(outputs) * args.w.n;
    args.chosen.index += choices;
    args.chosen.share += choices;
  }
  return cudaSuccess;
}

template <class W>
inline cudaError_t launch_expert_down(const Launch& launch, const StageArgs& args) {
  switch (args.chosen.choices) {
    case 1:
      return launch_expert_stage<W, Stage::kExpertDown, 1>(launch, args);
    case 2:
      return launch_expert_stage<W, Stage::kExpertDown, 2>(launch, args);
    case 3:
      return launch_expert_stage<W, Stage::kExpertDown, 3>(launch, args);
    case 4:
      return launch_expert_stage<W, Stage::kExpertDown, 4>(launch, args);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace gptfast::cuda
