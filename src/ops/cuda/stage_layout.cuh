// Sizes, arguments and shared memory of a linear stage (stage.cuh).
#pragma once

#include "ops/cuda/all_reduce.h"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/formats.cuh"

namespace gptfast::cuda {

/// kResidualSum: kResidual, summed over ranks.
enum class Stage { kQkv, kResidual, kResidualSum, kGateUp, kHead, kExpertGateUp, kExpertDown };

/// Stages whose weights are those of the experts that the router chose for the launch's one row.
__host__ __device__ constexpr bool has_experts(Stage s) {
  return s == Stage::kExpertGateUp || s == Stage::kExpertDown;
}
__host__ __device__ constexpr bool is_gated(Stage s) {
  return s == Stage::kGateUp || s == Stage::kExpertGateUp;
}
__host__ __device__ constexpr bool has_residual(Stage s) {
  return s == Stage::kResidual || s == Stage::kResidualSum;
}
__host__ __device__ constexpr bool has_norm(Stage s) {
  return !has_residual(s) && s != Stage::kExpertDown;
}

// A sum over a row is that over the units of each residue, added up in order: the same for any
// number of rows and blocks.
constexpr int kResidueBits = 3;
constexpr int kResidues = 1 << kResidueBits;
constexpr int kWarps = kResidues;  // of a block with one row
constexpr int kThreads = kWarps * kWarp;

/// How a block is made. Ring: bytes for weights on their way.
template <int Rows, int Warps, int Ring>
struct BlockShape {
  static constexpr int kRows = Rows;  // at most
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = Warps * kWarp;
  static constexpr int kTilesAtATime = Warps / kResidues;
  static constexpr bool kShares = Rows > 1;  // columns, with another block (Division)
  static constexpr int kRegisterBlocks = Rows == 1 ? 3 : 16 / Warps;

  template <class W>
  static constexpr int kDepth = Ring / Warps / W::kSlotBytes;  // units of a warp's ring
};

// Measured on an H200.
//
// One row: two blocks of successive stages are resident on an SM, so a stage's ring is full when
// its input comes. With Llama-2-7B 8 warps and 72 KB beat 12 and 16 warps, 48 KB with three blocks
// and 80 KB. With one of attention (attention.cu) they fill an SM's registers: 80 a thread, which
// is what three blocks would have.
using OneRow = BlockShape<1, kWarps, 72 * 1024>;

// Several rows: one block is resident, and two share the columns. That takes 0.7 of the time of
// blocks that convert all columns and come two to an SM (Llama-2-7B int4, 4 and 5 rows). Products
// of integers are bound by instructions and gain 10 % from 16 warps, and those of 5 and 6 rows have
// a shape of their own (Columns).
template <class W, int Rows>
using SomeRows = BlockShape<Rows, W::kInteger ? 16 : 8, 96 * 1024>;

// Rows that leave no room for that: five of Llama-2-70B's 28,672 columns, or an SM of 100 KB.
template <class W, int Rows>
using TightRows = BlockShape<Rows, W::kInteger ? 16 : 8, 48 * 1024>;

// Where one row's blocks do not fit beside each other, those that came early would crowd on the SMs
// that their predecessor left first, two to an SM: they are made too large for that. Alone costs
// Llama-2-7B (4,096) and Llama-3.1-8B up to 2 %, and gains Llama-2-70B (8,192) 5 % (int8) and 13 %
// (int4), whose down projection has no room beside another block.
constexpr int kAloneWidth = 6144;  // of the model

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
  Peers peers;    // kResidualSum
  int first_row;  // of the step, where rows go in several launches
  int units;      // of a tile
  int tiles;
  int blocks;
  int batch;        // tiles that a block finishes at a time, one a warp
  int share_bits;   // log2 of the blocks that share the columns (Division)
  int padded_k;     // columns of a row that a block holds, multiple of kChunk
  bool neighbours;  // a block's tiles lie side by side
  int norm_bytes;   // in kExpertDown of what blocks find
  // Stages of experts only. kExpertGateUp has tiles = choices * expert_tiles.
  ExpertChoice chosen;
  int expert_tiles;
  Router router;
};

/// What of the tiles a block multiplies. One row: all, its warps a residue of the units each.
/// Several rows take more room and more time to convert than their products need, so the blocks of
/// a cluster share them: each holds the columns of kResidues / blocks residues, and its warps
/// multiply several tiles at a time.
template <class B>
struct Division {
  int bits = 0;  // log2 of the blocks of the cluster
  int rank = 0;  // of this one

  __device__ explicit Division(const StageArgs& a) {
    if constexpr (B::kShares) {
      bits = a.share_bits;
      rank = rank_in_cluster();
    }
  }

  __device__ int blocks() const { return 1 << bits; }
  // Residues of this block; powers of two, so that nothing on a stage's critical path divides.
  __device__ int residue_bits() const { return kResidueBits - bits; }
  __device__ int residues() const { return 1 << residue_bits(); }

  /// Tiles that are multiplied, and rows that are converted, at a time.
  __device__ int turns() const { return B::kTilesAtATime << bits; }
  __device__ int turn(int warp) const { return !B::kShares ? 0 : warp >> residue_bits(); }

  /// The units of a tile that a warp multiplies: residue, residue + kResidues, ... It moves from
  /// tile to tile, so that all warps get as many.
  __device__ int residue(int warp, int tile, int units) const {
    const int moved = warp + tile * (kResidues - units % kResidues);
    return !B::kShares ? moved % kResidues : rank * residues() + (moved & (residues() - 1));
  }

  /// Where the sums over a residue stand among those of a tile.
  __device__ static int place(int residue, int tile, int units) {
    return (residue + tile * (units % kResidues)) % kResidues;
  }

  /// Where a unit lies among those that this block holds.
  __device__ int local(int unit) const {
    return !B::kShares ? unit : unit / kResidues * residues() + (unit & (residues() - 1));
  }

  /// The chunks of a row that lie at own, own + residues(), ... in this block: chunk, chunk +
  /// kResidues, ...
  template <class W>
  __device__ int chunk(int own) const {
    if constexpr (!B::kShares) return own;
    constexpr int kUnitsBits = W::kUnitColumns == kChunk ? 0 : 1;  // log2 of the units of a chunk
    const int side = residue_bits() - kUnitsBits;  // log2 of the chunks that lie side by side
    return (((own >> side << bits) + rank) << side) + (own & ((1 << side) - 1));
  }
};

/// Offsets in dynamic shared memory; the same on host and device.
struct SharedLayout {
  int values, pitch, scales, sums, sums_pitch, norm, partial, squares, total;
};

// kExpertDown: what the blocks of a cluster find in two batches of tiles.
constexpr int kFoundItems = kMaxChoices * kWarps * 8;  // pairs of sums
constexpr int kFoundBytes = 2 * kFoundItems * 2 * 4;

/// A row's choice in shared memory.
struct Chosen {
  int expert[kMaxChoices];
  float share[kMaxChoices];
};

constexpr int kPartialBytes = kResidues * kTileRows * 4;  // sums of a tile and an input row

template <class W, class B>
__host__ __device__ inline SharedLayout shared_layout(int rows, int padded_k, int batch,
                                                      int norm_bytes) {
  SharedLayout s{};
  s.values = B::kWarps * B::template kDepth<W> * W::kSlotBytes;
  s.pitch = padded_k / W::kUnitColumns * kUnitXBytes + 64;
  s.scales = s.values + W::kParts * rows * s.pitch;
  s.sums = s.scales + (W::kInteger ? padded_k / kChunk * 8 * 4 : 0);
  s.sums_pitch = padded_k / kChunk * 16 + 16;
  s.norm = s.sums + (W::kGroup > 0 ? 2 * rows * s.sums_pitch : 0);
  s.partial = s.norm + norm_bytes;
  s.squares = s.partial + batch * rows * kPartialBytes;
  s.total = s.squares + kResidues * rows * 4;
  return s;
}

}  // namespace gptfast::cuda
