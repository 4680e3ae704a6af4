// Sizes, arguments and shared memory of a linear stage (stage.cuh).
#pragma once

#include "ops/cuda/device.cuh"
#include "ops/cuda/formats.cuh"

namespace gptfast::cuda {

enum class Stage { kQkv, kResidual, kGateUp, kHead, kExpertGateUp, kExpertDown };

/// Stages whose weights are those of the experts that the router chose for the launch's one row.
__host__ __device__ constexpr bool has_experts(Stage s) {
  return s == Stage::kExpertGateUp || s == Stage::kExpertDown;
}
__host__ __device__ constexpr bool is_gated(Stage s) {
  return s == Stage::kGateUp || s == Stage::kExpertGateUp;
}
__host__ __device__ constexpr bool has_norm(Stage s) {
  return s != Stage::kResidual && s != Stage::kExpertDown;
}

// Measured on an H200 with Llama-2-7B, M = 1: 8 warps, 72 KB, two resident blocks beat 12 and 16
// warps, 48 KB with three and 80 KB. Two blocks of successive stages and one of attention
// (attention.cu) fill an SM's registers: 80 a thread, which is what three blocks would have.
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRegisterBlocks = 3;
constexpr int kRingBytes = 72 * 1024;  // of a block
// Weights of a stage from which on a block's tiles lie side by side. On an H200 that gains 20 %
// with Llama-2-70B int8 (235 and 470 MB in the MLP's stages), changes nothing for Llama-2-7B bf16
// (90 and 180 MB) and costs 3 to 9 % below.
constexpr int64_t kNeighbourBytes = int64_t{128} << 20;

struct StageArgs {
  StageInput in;
  Weight w;
  RowMap map;
  Cache cache;
  const float* freqs_cis;
  float* out;
  int first_row;  // of the step, where rows go in several launches
  int units;      // of a tile
  int tiles;
  int batch;        // tiles of a block between two reductions, at most kWarps
  int padded_k;     // multiple of kChunk
  bool neighbours;  // a block's tiles lie side by side
  int norm_bytes;   // in kExpertDown of what blocks find
  // Stages of experts only. kExpertGateUp has tiles = choices * expert_tiles.
  ExpertChoice chosen;
  int expert_tiles;
  Router router;
};

/// Offsets in dynamic shared memory; the same on host and device.
struct SharedLayout {
  int values, pitch, scales, sums, sums_pitch, norm, partial, squares, total;
};

template <class W>
__host__ __device__ constexpr int ring_depth() {
  return kRingBytes / kWarps / W::kSlotBytes;
}

// kExpertDown: what the blocks of a cluster find in two batches of tiles.
constexpr int kFoundItems = kMaxChoices * kWarps * 8;  // pairs of sums
constexpr int kFoundBytes = 2 * kFoundItems * 2 * 4;

/// A row's choice in shared memory.
struct Chosen {
  int expert[kMaxChoices];
  float share[kMaxChoices];
};

constexpr int kPartialBytes = kWarps * kTileRows * 4;  // sums of a tile and an input row

template <class W>
__host__ __device__ inline SharedLayout shared_layout(int rows, int padded_k, int batch,
                                                      int norm_bytes) {
  SharedLayout s{};
  s.values = kWarps * ring_depth<W>() * W::kSlotBytes;
  s.pitch = padded_k / W::kUnitColumns * kUnitXBytes + 64;
  s.scales = s.values + W::kParts * rows * s.pitch;
  s.sums = s.scales + (W::kInteger ? padded_k / kChunk * 8 * 4 : 0);
  s.sums_pitch = padded_k / kChunk * 16 + 16;
  s.norm = s.sums + (W::kGroup > 0 ? 2 * rows * s.sums_pitch : 0);
  s.partial = s.norm + norm_bytes;
  s.squares = s.partial + batch * rows * kPartialBytes;
  s.total = s.squares + kWarps * rows * 4;
  return s;
}

}  // namespace gptfast::cuda
