// Launching a linear stage: its sizes, and how its rows and columns are divided.
#pragma once

#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/stage.cuh"

namespace gptfast::cuda {

/// Fills in what follows from the weight's size.
template <class W, Stage S>
inline void size_stage(StageArgs& args) {
  args.padded_k = (args.w.k + kChunk - 1) / kChunk * kChunk;
  if (args.share_bits > 0) {
    constexpr int kRound = kResidues * kChunk;
    args.padded_k = ((args.w.k + kRound - 1) / kRound * kRound) >> args.share_bits;
  }
  const int tile_outputs = is_gated(S) ? 8 : kTileRows;
  args.tiles = (args.w.n + tile_outputs - 1) / tile_outputs;
  args.units = (args.w.k + W::kUnitColumns - 1) / W::kUnitColumns;
  if (has_norm(S)) {
    args.norm_bytes = args.padded_k * (args.in.norm_type == Scalar::kFloat32 ? 4 : 2);
  }
  if (S == Stage::kExpertDown) args.norm_bytes = kFoundBytes + static_cast<int>(sizeof(Chosen));
}

/// The bytes of a tile, padding included.
template <class W>
inline int64_t tile_bytes(const StageArgs& args) {
  return static_cast<int64_t>(args.units) *
         (W::kGroup > 0 ? W::kSlotBytes : kTileRows * kUnitXBytes);
}

/// Sizes a launch of `rows` rows whose columns 1 << bits blocks share; a block's shared memory. A
/// block finishes as many tiles at a time as find room in most_shared: each time all warps wait.
template <class W, Stage S, class B>
inline int size_blocks(StageArgs& args, int sms, int most_shared, int rows, int bits) {
  args.in.rows = rows;
  args.share_bits = bits;
  size_stage<W, S>(args);
  args.blocks = std::min(args.tiles, sms >> bits) << bits;
  const auto bytes = [&](int batch) {
    return shared_layout<W, B>(rows, args.padded_k, batch, args.norm_bytes).total;
  };
  constexpr int kAtATime = B::kTilesAtATime;
  const int most = std::min(args.tiles / args.blocks + 1, B::kWarps);
  const int fitting = (most_shared - bytes(0)) / (rows * kPartialBytes);
  args.batch =
      std::max(kAtATime, std::min((most + kAtATime - 1) / kAtATime, fitting / kAtATime) * kAtATime);
  return bytes(args.batch);
}

/// least_shared: bytes that a block takes though it may need fewer.
template <class W, Stage S, class B>
inline cudaError_t launch_blocks(const Launch& launch, const StageArgs& args, int least_shared) {
  const int bytes =
      shared_layout<W, B>(args.in.rows, args.padded_k, args.batch, args.norm_bytes).total;
  return launch_cluster(launch, 1 << args.share_bits, stage_kernel<W, S, B>, dim3(args.blocks),
                        B::kThreads, std::max(bytes, least_shared), args);
}

/// All rows in one launch, or where they do not fit in several.
template <class W, Stage S, class B>
inline cudaError_t launch_rows(const Launch& launch, StageArgs args, int sms, int most_shared) {
  const int bits = launch.clusters ? 1 : 0;
  const int total = args.in.rows;
  int rows = total;
  int launches = 1;
  while (size_blocks<W, S, B>(args, sms, most_shared, rows, bits) > most_shared) {
    if (rows == 1) return cudaErrorInvalidValue;
    ++launches;
    rows = (total + launches - 1) / launches;
  }
  for (int first = 0; first < total; first += rows) {
    StageArgs part = args;
    part.first_row = first;
    part.in.rows = std::min(total - first, rows);
    part.in.x += static_cast<int64_t>(first) * args.w.k;
    const int out_width = S == Stage::kQkv ? args.cache.heads * args.cache.head_dim : args.w.n;
    part.out += static_cast<int64_t>(first) * out_width;
    const cudaError_t error = launch_blocks<W, S, B>(launch, part, most_shared / 2 + 1);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class W, Stage S>
inline cudaError_t launch_stage(const Launch& launch, StageArgs args) {
  int sms = 0;
  int most_shared = 0;  // of a block, which is nearly all of an SM's
  cudaError_t error = multiprocessors(sms);
  if (error != cudaSuccess) return error;
  error = shared_limit(most_shared);
  if (error != cudaSuccess) return error;
  const int rows = args.in.rows;
  size_stage<W, S>(args);
  args.neighbours = tile_bytes<W>(args) * args.tiles >= kNeighbourBytes;
  if (rows == 1 &&
      size_blocks<W, S, OneRow>(args, sms, most_shared, rows, /*bits=*/0) <= most_shared) {
    const int width = has_norm(S) ? args.w.k : args.w.n;
    return launch_blocks<W, S, OneRow>(launch, args,
                                       most_shared / (width > kAloneWidth ? 2 : 3) + 1);
  }
  const int bits = launch.clusters ? 1 : 0;
  const bool roomy =
      size_blocks<W, S, SomeRows<W, 8>>(args, sms, most_shared, rows, bits) <= most_shared;
  args.in.rows = rows;
  if constexpr (W::kParts == 2) {
    if (roomy && rows <= 4)
      return launch_rows<W, S, SomeRows<W, 4>>(launch, args, sms, most_shared);
    if (roomy && rows <= 6)
      return launch_rows<W, S, SomeRows<W, 6>>(launch, args, sms, most_shared);
    if (rows <= 6) return launch_rows<W, S, TightRows<W, 6>>(launch, args, sms, most_shared);
  }
  if (roomy) return launch_rows<W, S, SomeRows<W, 8>>(launch, args, sms, most_shared);
  return launch_rows<W, S, TightRows<W, 8>>(launch, args, sms, most_shared);
}

}  // namespace gptfast::cuda
