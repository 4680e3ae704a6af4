// Which tiles of a linear stage's weights a warp multiplies, and their way into its ring in shared
// memory.
#pragma once

#include "ops/cuda/stage_layout.cuh"

namespace gptfast::cuda {

/// The tiles of a block: first, first + step, ... below last. Neighbouring tiles share pages of
/// memory, which large stages need; otherwise blocks take turns, which spreads the end of the
/// stream better.
struct TileRange {
  int first, last, step;

  /// sharers: neighbouring blocks that have the same tiles. Divisions cost a stage's critical path
  /// 1 to 2 % of a step: 32 bits, and once a kernel.
  __device__ TileRange(const StageArgs& a, unsigned sharers) {
    const unsigned block = blockIdx.x / sharers;
    const unsigned blocks = gridDim.x / sharers;
    const auto tiles = static_cast<unsigned>(a.tiles);
    first = static_cast<int>(a.neighbours ? tiles * block / blocks : block);
    last = static_cast<int>(a.neighbours ? tiles * (block + 1) / blocks : tiles);
    step = a.neighbours ? 1 : static_cast<int>(blocks);
  }
};

/// Blocks with the same tiles: those of a cluster in kExpertDown, one for each expert.
template <Stage S>
__device__ inline unsigned sharers(const StageArgs& a) {
  return S == Stage::kExpertDown ? a.chosen.choices : 1;
}

/// Which of the row's experts a tile belongs to. kExpertGateUp: `tile` becomes that of the expert.
template <Stage S>
__device__ inline int split_tile(const StageArgs& a, int& tile) {
  if constexpr (S == Stage::kExpertDown) return static_cast<int>(blockIdx.x % sharers<S>(a));
  int choice = 0;
  if constexpr (S == Stage::kExpertGateUp) {
    for (; tile >= a.expert_tiles; tile -= a.expert_tiles) ++choice;  // quicker than to divide
  }
  return choice;
}

template <class W>
__device__ inline int row_bytes(const StageArgs& a) {
  return a.w.k * (kUnitXBytes / W::kUnitColumns);
}

/// One warp's requests for weights, in the order in which it multiplies them.
template <class W, Stage S, class B>
struct Stream {
  static constexpr bool kGated = is_gated(S);

  const StageArgs& a;
  const Division<B>& division;
  const uint64_t policy;
  const int warp, lane;
  const int last, step;  // tiles
  int tile;
  const Chosen* const chosen;       // stages of experts
  int left = 0;                     // units of the tile that are to be requested
  uint32_t offset = 0;              // of this lane's next 16 bytes from each of
  const uint8_t* half0 = nullptr;   // rows 0-7 of the tile
  const uint8_t* half1 = nullptr;   // rows 8-15
  const uint8_t* groups = nullptr;  // int4: this lane's piece of the groups of one of them
  int groups_slot = 0;              // and where it goes
  int next0 = 0;                    // row-major: from a lane's row to its other one, 4 further
  int next1 = 0;

  __device__ Stream(const StageArgs& args, const Division<B>& parts, const TileRange& tiles,
                    int warp_index, int lane_index, const Chosen* choices)
      : a(args),
        division(parts),
        policy(evict_first_policy()),
        warp(warp_index),
        lane(lane_index),
        last(tiles.last),
        step(tiles.step * parts.turns()),
        tile(tiles.first + parts.turn(warp_index) * tiles.step),
        chosen(choices) {
    open_tile();
  }

  /// Finds the next tile from `tile` on with units for this warp. A gated pair's tile has 8 rows of
  /// each weight; rows past the end repeat the last one and their results are dropped.
  __device__ void open_tile() {
    int unit = 0;
    int own_tile = tile;  // of its expert
    int choice = 0;
    for (; tile < last; tile += step) {
      own_tile = tile;
      choice = split_tile<S>(a, own_tile);
      unit = division.residue(warp, own_tile, a.units);
      if (unit < a.units) break;
    }
    if (tile >= last) return;  // `left` is zero
    left = (a.units - unit + kResidues - 1) / kResidues;
    const uint8_t* data0 = static_cast<const uint8_t*>(a.w.data);
    const uint8_t* data1 = kGated ? static_cast<const uint8_t*>(a.w.data2) : data0;
    if constexpr (has_experts(S)) {
      const int64_t skip = chosen->expert[choice] * a.w.expert_bytes;
      data0 += skip;
      data1 += skip;
    }
    if constexpr (W::kGroup > 0) {
      const int64_t bytes = a.units * W::kHalfBytes;
      offset = unit * W::kUnitStep + lane * 16;
      half0 = data0 + bytes * (kGated ? own_tile : 2 * own_tile);
      half1 = data1 + bytes * (kGated ? own_tile : 2 * own_tile + 1);
      // Two halves have fewer pieces than there are lanes. Lanes that copy what others copy cost
      // nothing; leaving them out costs Llama-2-70B 4 % on an H200.
      const int piece = lane % (2 * W::kGroupLanes);
      const bool second = piece >= W::kGroupLanes;
      const int shift = 512 + (piece - lane) * 16;
      groups = (second ? half1 - W::kGroupLanes * 16 : half0) + shift;
      groups_slot = (second ? W::kHalfBytes - W::kGroupLanes * 16 : 0) + shift;
    } else {
      const int pitch = row_bytes<W>(a);
      const int last_row = a.w.n - 1;
      const int row0 = min(own_tile * (kGated ? 8 : 16) + (lane >> 3), last_row);
      const int row1 = kGated ? row0 : min(row0 + 8, last_row);
      offset = unit * W::kUnitStep + (lane & 7) * 16;
      half0 = data0 + static_cast<int64_t>(row0) * pitch;
      half1 = data1 + static_cast<int64_t>(row1) * pitch;
      next0 = min(4, last_row - row0) * pitch;
      next1 = min(4, last_row - row1) * pitch;
    }
  }

  /// Requests the next unit into `slot`, where this lane's first piece goes. Always commits a
  /// group, so that the number in flight is known.
  __device__ void request(uint32_t slot) {
    if (left > 0) {
      copy(slot);
      offset += kResidues * W::kUnitStep;
      if (--left == 0) {
        tile += step;
        open_tile();
      }
    }
    commit_copies();
  }

  __device__ void copy(uint32_t slot) const {
    if constexpr (W::kGroup == 0) {  // 8 lanes a row: whole 128-byte lines
      const bool in = offset < static_cast<uint32_t>(row_bytes<W>(a));
      const uint32_t from = in ? offset : 0;
      copy_async16(slot, half0 + from, in, policy);
      copy_async16(slot + 512, half0 + next0 + from, in, policy);
      copy_async16(slot + 1024, half1 + from, in, policy);
      copy_async16(slot + 1536, half1 + next1 + from, in, policy);
    } else {
      copy_async16(slot, half0 + offset, policy);
      copy_async16(slot + W::kHalfBytes, half1 + offset, policy);
      copy_async16(slot + groups_slot, groups + offset, policy);
    }
  }
};

}  // namespace gptfast::cuda
