// The linear stages of a decode step: y = f(x) w^T with what comes before and after fused in. One
// kernel per (weight format, stage); the formats differ in formats.cuh only.
//
// A block owns one SM's share of the 16-row tiles. Its warps split the columns of a tile; each warp
// streams its own units through a private ring in shared memory by asynchronous copies, so the
// stream needs no barrier: a lane reads back what it copied. Blocks are small enough that those of
// the next stages are resident while this one runs: they fill their rings before they wait for
// their predecessor (PDL), which keeps the memory busy across the dependency.
#pragma once

#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/stage_input.cuh"
#include "ops/cuda/stage_layout.cuh"

namespace gptfast::cuda {

/// The units of a tile that a warp multiplies: first, first + kWarps, ... The first one moves from
/// tile to tile, so that all warps get as many.
__device__ inline int first_unit(int warp, int tile, int units) {
  return (warp + tile * (kWarps - units % kWarps)) % kWarps;
}

/// The tiles of a block: first, first + step, ... below last. Neighbouring tiles share pages of
/// memory, which large stages need; otherwise blocks take turns, which spreads the end of the
/// stream better.
struct TileRange {
  int first, last, step;

  /// Divisions cost a stage's critical path 1 to 2 % of a step: 32 bits, and once a kernel.
  __device__ explicit TileRange(const StageArgs& a) {
    const unsigned block = blockIdx.x;
    const unsigned blocks = gridDim.x;
    const auto tiles = static_cast<unsigned>(a.tiles);
    first = static_cast<int>(a.neighbours ? tiles * block / blocks : block);
    last = static_cast<int>(a.neighbours ? tiles * (block + 1) / blocks : tiles);
    step = a.neighbours ? 1 : static_cast<int>(blocks);
  }
};

template <class W>
__device__ inline int row_bytes(const StageArgs& a) {
  return a.w.k * (kUnitXBytes / W::kUnitColumns);
}

/// One warp's requests for weights, in the order in which it multiplies them.
template <class W, Stage S>
struct Stream {
  static constexpr bool kGated = S == Stage::kGateUp;

  const StageArgs& a;
  const uint64_t policy;
  const int warp, lane;
  const TileRange tiles;
  int tile;
  int left = 0;                     // units of the tile that are to be requested
  uint32_t offset = 0;              // of this lane's next 16 bytes from each of
  const uint8_t* half0 = nullptr;   // rows 0-7 of the tile
  const uint8_t* half1 = nullptr;   // rows 8-15
  const uint8_t* groups = nullptr;  // int4: this lane's piece of the groups of one of them
  int groups_slot = 0;              // and where it goes
  int next0 = 0;                    // row-major: from a lane's row to its other one, 4 further
  int next1 = 0;

  __device__ Stream(const StageArgs& args, int warp_index, int lane_index)
      : a(args),
        policy(evict_first_policy()),
        warp(warp_index),
        lane(lane_index),
        tiles(args),
        tile(tiles.first) {
    open_tile();
  }

  /// Finds the next tile from `tile` on with units for this warp. A gated pair's tile has 8 rows of
  /// each weight; rows past the end repeat the last one and their results are dropped.
  __device__ void open_tile() {
    int unit = 0;
    for (; tile < tiles.last; tile += tiles.step) {
      unit = first_unit(warp, tile, a.units);
      if (unit < a.units) break;
    }
    if (tile >= tiles.last) return;  // `left` is zero
    left = (a.units - unit + kWarps - 1) / kWarps;
    const uint8_t* data0 = static_cast<const uint8_t*>(a.w.data);
    const uint8_t* data1 = kGated ? static_cast<const uint8_t*>(a.w.data2) : data0;
    if constexpr (W::kGroup > 0) {
      const int64_t bytes = a.units * W::kHalfBytes;
      offset = unit * W::kUnitStep + lane * 16;
      half0 = data0 + bytes * (kGated ? tile : 2 * tile);
      half1 = data1 + bytes * (kGated ? tile : 2 * tile + 1);
      // Two halves have fewer pieces than there are lanes. Lanes that copy what others copy cost
      // nothing; leaving them out costs Llama-2-70B 4 % on an H200.
      const int piece = lane % (2 * W::kGroupLanes);
      const bool second = piece >= W::kGroupLanes;
      const int shift = 512 + (piece - lane) * 16;
      groups = (second ? half1 - W::kGroupLanes * 16 : half0) + shift;
      groups_slot = (second ? W::kHalfBytes - W::kGroupLanes * 16 : 0) + shift;
    } else {
      const int pitch = row_bytes<W>(a);
      const int last = a.w.n - 1;
      const int row0 = min(tile * (kGated ? 8 : 16) + (lane >> 3), last);
      const int row1 = kGated ? row0 : min(row0 + 8, last);
      offset = unit * W::kUnitStep + (lane & 7) * 16;
      half0 = data0 + static_cast<int64_t>(row0) * pitch;
      half1 = data1 + static_cast<int64_t>(row1) * pitch;
      next0 = min(4, last - row0) * pitch;
      next1 = min(4, last - row1) * pitch;
    }
  }

  /// Requests the next unit into `slot`, where this lane's first piece goes. Always commits a
  /// group, so that the number in flight is known.
  __device__ void request(uint32_t slot) {
    if (left > 0) {
      copy(slot);
      offset += kWarps * W::kUnitStep;
      if (--left == 0) {
        tile += tiles.step;
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

/// What an output pair needs besides the sums; requested before the tile's weights are multiplied.
template <Stage S>
struct Epilogue {
  int m;             // row
  int n0, n1;        // output rows of the pair
  float2 scale;      // int8
  float2 extra;      // residual: old x; qkv: cos, sin
  int position = 0;  // qkv

  template <class W>
  /// item: pair + 8 * row.
  __device__ void prefetch(const StageArgs& a, int tile, int item) {
    const int p = item & 7;
    m = item >> 3;
    n0 = S == Stage::kGateUp ? tile * 8 + p : tile * 16 + 2 * p;
    n1 = S == Stage::kGateUp ? n0 : n0 + 1;
    scale = {1.0F, 1.0F};
    extra = {0.0F, 0.0F};
    if (n0 >= a.w.n) return;
    if constexpr (W::kInteger && W::kGroup == 0) {
      scale.x = a.w.scales[n0];
      scale.y = S == Stage::kGateUp ? a.w.scales2[n0] : (n1 < a.w.n ? a.w.scales[n1] : 0.0F);
    }
    if constexpr (S == Stage::kResidual) {
      const float* x = a.out + static_cast<int64_t>(m) * a.w.n;
      extra.x = __ldcg(x + n0);
      extra.y = n1 < a.w.n ? __ldcg(x + n1) : 0.0F;
    }
    if constexpr (S == Stage::kQkv) {
      const int row = a.first_row + m;
      position = a.map.pos[row / a.map.seq_len] + row % a.map.seq_len;
      if (position < a.cache.max_seq) {
        const int pair = n0 % a.cache.head_dim / 2;
        extra = *reinterpret_cast<const float2*>(
            a.freqs_cis + (static_cast<int64_t>(position) * (a.cache.head_dim / 2) + pair) * 2);
      }
    }
  }

  __device__ void finish(const StageArgs& a, float v0, float v1) const {
    if (n0 >= a.w.n) return;
    v0 *= scale.x;
    v1 *= scale.y;
    const int64_t row = static_cast<int64_t>(m) * a.w.n;
    if constexpr (S == Stage::kGateUp) {
      a.out[row + n0] = v0 / (1.0F + __expf(-v0)) * v1;
    } else if constexpr (S == Stage::kResidual || S == Stage::kHead) {
      a.out[row + n0] = extra.x + v0;
      if (n1 < a.w.n) a.out[row + n1] = extra.y + v1;
    } else {
      finish_qkv(a, v0, v1);
    }
  }

  __device__ void finish_qkv(const StageArgs& a, float v0, float v1) const {
    const Cache& c = a.cache;
    const int queries = c.heads * c.head_dim;
    const int keys = c.local_heads * c.head_dim;
    const float r0 = __fmaf_rn(v0, extra.x, -__fmul_rn(v1, extra.y));
    const float r1 = __fmaf_rn(v1, extra.x, __fmul_rn(v0, extra.y));
    if (n0 < queries) {
      float* q = a.out + static_cast<int64_t>(m) * queries;
      q[n0] = r0;
      q[n1] = r1;
      return;
    }
    if (position >= c.max_seq) return;
    const bool is_key = n0 < queries + keys;
    const int in = n0 - queries - (is_key ? 0 : keys);
    const int64_t head =
        static_cast<int64_t>(a.map.slot[(a.first_row + m) / a.map.seq_len]) * c.local_heads +
        in / c.head_dim;
    const int64_t at = (head * c.max_seq + position) * c.head_dim + in % c.head_dim;
    store_scalar(is_key ? c.k : c.v, at, c.type, is_key ? r0 : v0);
    store_scalar(is_key ? c.k : c.v, at + 1, c.type, is_key ? r1 : v1);
  }
};

/// A warp's sums of a tile, hi and lo parts joined: partial[column][tile row].
template <class W, int Blocks>
__device__ inline void store_partial(typename W::Accumulator (&acc)[Blocks], float* partial,
                                     int rows, int lane) {
  const int g = lane >> 2;
  const int t = lane & 3;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = acc[0].d[i];
    if constexpr (W::kInteger) {
      float lo;
      if constexpr (Blocks == 1) {
        lo = __shfl_down_sync(0xffffffffU, v[i], 2);
      } else {
        lo = acc[1].d[i];
      }
      v[i] = __fmaf_rn(lo, kLoUnit, v[i]);
    }
    if constexpr (W::kGroup > 0) {
      float lo;
      if constexpr (Blocks == 1) {
        lo = __shfl_down_sync(0xffffffffU, acc[0].zero[i], 2);
      } else {
        lo = acc[1].zero[i];
      }
      v[i] = __fadd_rn(v[i], __fadd_rn(acc[0].zero[i], lo));
    }
  }
  if (2 * t < rows) {
    float* column = partial + 2 * t * kPartialBytes / 4;
    column[g] = v[0];
    column[g + 8] = v[2];
  }
  if (2 * t + 1 < rows) {
    float* column = partial + (2 * t + 1) * kPartialBytes / 4;
    column[g] = v[1];
    column[g + 8] = v[3];
  }
}

template <class W, Stage S>
__device__ inline void finish_item(const StageArgs& a, const SharedLayout& s, const uint8_t* shared,
                                   const float* partials, const Epilogue<S>& epilogue, int item) {
  const int p = item & 7;
  const int r0 = S == Stage::kGateUp ? p : 2 * p;
  const int r1 = S == Stage::kGateUp ? p + 8 : 2 * p + 1;
  const float* sums = partials + epilogue.m * kWarps * kTileRows;
  float v0 = 0;
  float v1 = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    v0 += sums[w * kTileRows + r0];
    v1 += sums[w * kTileRows + r1];
  }
  if constexpr (S != Stage::kResidual) {
    const float* squares = reinterpret_cast<const float*>(shared + s.squares) + epilogue.m * kWarps;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += squares[w];
    const float factor = rsqrtf(sum / static_cast<float>(a.w.k) + a.in.eps);
    v0 *= factor;
    v1 *= factor;
  }
  epilogue.finish(a, v0, v1);
}

/// Blocks: products per tile of weights; 2 when hi and lo of more than 4 rows do not fit 8 columns.
template <class W, Stage S, int Rows>
__global__ void __launch_bounds__(kThreads, kRegisterBlocks)
    stage_kernel(const __grid_constant__ StageArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr bool kNorm = S != Stage::kResidual;
  constexpr int Blocks = W::kParts == 2 && Rows > 4 ? 2 : 1;
  constexpr int kDepth = ring_depth<W>();
  launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int rows = Rows == 1 ? 1 : a.in.rows;
  const SharedLayout s = shared_layout<W>(rows, a.padded_k, a.batch, a.norm_bytes);
  // This lane reads a slot from `first` on and writes it from `first + shift` on.
  const uint32_t first =
      shared_address(shared) + warp * kDepth * W::kSlotBytes + W::read_offset(lane);
  uint32_t end = first + kDepth * W::kSlotBytes;
  asm volatile("" : "+r"(end));  // kept in a register: five instructions of every unit otherwise
  const int shift = W::write_offset(lane) - W::read_offset(lane);

  clear_sums<W>(shared, s, rows);
  if constexpr (kNorm) request_norm<W>(a, shared, s, warp, lane);
  Stream<W, S> stream(a, warp, lane);
#pragma unroll 1
  for (uint32_t slot = first; slot != end; slot += W::kSlotBytes) stream.request(slot + shift);
  wait_for_predecessor();
  if constexpr (kNorm) wait_copies<kDepth>();
  load_input<W, kNorm>(a, shared, s, warp, lane);
  __syncthreads();

  // The input row behind this lane's column of each product. Columns without a row repeat one;
  // their results are dropped.
  InputColumn x[Blocks];
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    const int column = lane >> 2;
    const int part = W::kParts == 1 ? 0 : (Blocks == 1 ? column >> 2 : b);
    const int m = min(W::kParts == 2 && Blocks == 1 ? column & 3 : column, rows - 1);
    x[b].values = shared_address(shared) + s.values + (part * rows + m) * s.pitch + (lane & 3) * 16;
    x[b].sums = shared_address(shared) + s.sums + (part * rows + m) * s.sums_pitch + (lane & 3) * 4;
  }
  const uint32_t scales = shared_address(shared) + s.scales + (lane & 3) * 8;
  float* partials = reinterpret_cast<float*>(shared + s.partial);
  uint32_t slot = first;
  const TileRange& tiles = stream.tiles;
  int tile = tiles.first;
  while (tile < tiles.last) {
    Epilogue<S> epilogue[2];  // of the tile that this warp finishes: its items lane and lane + 32
    int mine = -1;
    for (int i = 0; i < a.batch && tile < tiles.last; ++i, tile += tiles.step) {
      if (i == warp) {
        mine = i;
        if (lane < rows * 8) epilogue[0].template prefetch<W>(a, tile, lane);
        if (Rows > 4 && lane + kWarp < rows * 8)
          epilogue[1].template prefetch<W>(a, tile, lane + kWarp);
      }
      typename W::Accumulator acc[Blocks];
      for (int unit = first_unit(warp, tile, a.units); unit < a.units; unit += kWarps) {
        wait_copies<kDepth - 1>();
        __syncwarp();  // lanes read what others copied
        W::template multiply<Rows>(acc, slot, lane, unit, scales, x);
        stream.request(slot + shift);
        slot += W::kSlotBytes;
        if (slot == end) slot = first;
      }
      store_partial<W, Blocks>(acc, partials + (i * rows * kWarps + warp) * kTileRows, rows, lane);
    }
    __syncthreads();
    if (mine >= 0) {
      const float* sums = partials + mine * rows * kWarps * kTileRows;
      if (lane < rows * 8) finish_item<W, S>(a, s, shared, sums, epilogue[0], lane);
      if (Rows > 4 && lane + kWarp < rows * 8) {
        finish_item<W, S>(a, s, shared, sums, epilogue[1], lane + kWarp);
      }
    }
    if (tile < tiles.last) __syncthreads();
  }
}

constexpr int kMaxPartial = 16 * 1024;  // sums that wait for a reduction

template <class W, Stage S>
inline cudaError_t launch_stage(const Launch& launch, StageArgs args) {
  int sms = 0;
  int most_shared = 0;  // of a block; rows that need more go in several launches
  cudaError_t error = multiprocessors(sms);
  if (error != cudaSuccess) return error;
  error = shared_limit(most_shared);
  if (error != cudaSuccess) return error;

  args.padded_k = (args.w.k + kChunk - 1) / kChunk * kChunk;
  const int tile_outputs = S == Stage::kGateUp ? 8 : kTileRows;
  args.tiles = (args.w.n + tile_outputs - 1) / tile_outputs;
  args.units = (args.w.k + W::kUnitColumns - 1) / W::kUnitColumns;
  if (S != Stage::kResidual) {
    args.norm_bytes = args.padded_k * (args.in.norm_type == Scalar::kFloat32 ? 4 : 2);
  }
  const int64_t bytes_of_tile =
      static_cast<int64_t>(args.units) * (W::kGroup > 0 ? W::kSlotBytes : kTileRows * kUnitXBytes);
  args.neighbours = bytes_of_tile * args.tiles >= kNeighbourBytes;
  const int blocks = args.tiles < sms ? args.tiles : sms;
  const int rounds = args.tiles / blocks;
  const int total = args.in.rows;
  int pass = total;  // rows of a launch
  while (true) {
    const int most = kMaxPartial / (pass * kPartialBytes);
    const int per_block = rounds + 1;
    args.batch = std::min({per_block, most, kWarps});
    if (pass == 1 ||
        shared_layout<W>(pass, args.padded_k, args.batch, args.norm_bytes).total <= most_shared)
      break;
    --pass;
  }
  const int bytes = shared_layout<W>(pass, args.padded_k, args.batch, args.norm_bytes).total;
  if (bytes > most_shared) return cudaErrorInvalidValue;
  for (int first = 0; first < total; first += pass) {
    StageArgs part = args;
    part.first_row = first;
    part.in.rows = total - first < pass ? total - first : pass;
    part.in.x += static_cast<int64_t>(first) * args.w.k;
    const int out_width = S == Stage::kQkv ? args.cache.heads * args.cache.head_dim : args.w.n;
    part.out += static_cast<int64_t>(first) * out_width;
    if (W::kParts == 2 && part.in.rows == 1) {
      error = launch_kernel(launch, stage_kernel<W, S, 1>, dim3(blocks), kThreads, bytes, part);
    } else if (W::kParts == 2 && part.in.rows <= 4) {
      error = launch_kernel(launch, stage_kernel<W, S, 4>, dim3(blocks), kThreads, bytes, part);
    } else {
      error = launch_kernel(launch, stage_kernel<W, S, 8>, dim3(blocks), kThreads, bytes, part);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace gptfast::cuda
