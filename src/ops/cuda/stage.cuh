// The linear stages of a decode step: y = f(x) w^T with what comes before and after fused in. One
// kernel per (weight format, stage); the formats differ in formats.cuh only.
//
// A block owns one SM's share of the 16-row tiles. Its warps split the columns of a tile; each warp
// streams its own units through a private ring in shared memory by asynchronous copies, so the
// stream needs no barrier: a lane reads back what it copied. Blocks are small enough that those of
// the next stages are resident while this one runs: they fill their rings before they wait for
// their predecessor (PDL), which keeps the memory busy across the dependency.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/route.cuh"
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
template <class W, Stage S>
struct Stream {
  static constexpr bool kGated = is_gated(S);

  const StageArgs& a;
  const uint64_t policy;
  const int warp, lane;
  const TileRange tiles;
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

  __device__ Stream(const StageArgs& args, int warp_index, int lane_index, const Chosen* choices)
      : a(args),
        policy(evict_first_policy()),
        warp(warp_index),
        lane(lane_index),
        tiles(args, sharers<S>(args)),
        tile(tiles.first),
        chosen(choices) {
    open_tile();
  }

  /// Finds the next tile from `tile` on with units for this warp. A gated pair's tile has 8 rows of
  /// each weight; rows past the end repeat the last one and their results are dropped.
  __device__ void open_tile() {
    int unit = 0;
    int own_tile = tile;  // of its expert
    int choice = 0;
    for (; tile < tiles.last; tile += tiles.step) {
      own_tile = tile;
      choice = split_tile<S>(a, own_tile);
      unit = first_unit(warp, own_tile, a.units);
      if (unit < a.units) break;
    }
    if (tile >= tiles.last) return;  // `left` is zero
    left = (a.units - unit + kWarps - 1) / kWarps;
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
      const int last = a.w.n - 1;
      const int row0 = min(own_tile * (kGated ? 8 : 16) + (lane >> 3), last);
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
  int choice = 0;    // stages of experts

  template <class W>
  /// item: pair + 8 * row.
  __device__ void prefetch(const StageArgs& a, const Chosen* chosen, int tile, int item) {
    const int p = item & 7;
    m = item >> 3;
    choice = split_tile<S>(a, tile);
    n0 = is_gated(S) ? tile * 8 + p : tile * 16 + 2 * p;
    n1 = is_gated(S) ? n0 : n0 + 1;
    scale = {1.0F, 1.0F};
    extra = {0.0F, 0.0F};
    if (n0 >= a.w.n) return;
    if constexpr (W::kInteger && W::kGroup == 0) {
      int64_t skip = 0;
      if constexpr (has_experts(S)) skip = static_cast<int64_t>(chosen->expert[choice]) * a.w.n;
      const float* scales = a.w.scales + skip;
      scale.x = scales[n0];
      scale.y = is_gated(S) ? a.w.scales2[skip + n0] : (n1 < a.w.n ? scales[n1] : 0.0F);
    }
    if constexpr (S == Stage::kExpertDown) {
      const float share = chosen->share[choice];
      scale.x *= share;
      scale.y *= share;
      if (choice == 0) {
        extra.x = __ldcg(a.out + n0);
        extra.y = n1 < a.w.n ? __ldcg(a.out + n1) : 0.0F;
      }
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
    store(a, v0 * scale.x, v1 * scale.y);
  }

  __device__ void store(const StageArgs& a, float v0, float v1) const {
    if (n0 >= a.w.n) return;
    const int64_t row = static_cast<int64_t>(S == Stage::kExpertGateUp ? choice : m) * a.w.n;
    if constexpr (is_gated(S)) {
      a.out[row + n0] = v0 / (1.0F + __expf(-v0)) * v1;
    } else if constexpr (S != Stage::kQkv) {
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

/// The sums of an item over all warps.
template <class W, Stage S>
__device__ inline float2 add_warps(const StageArgs& a, const SharedLayout& s, const uint8_t* shared,
                                   const float* partials, const Epilogue<S>& epilogue, int item) {
  const int p = item & 7;
  const int r0 = is_gated(S) ? p : 2 * p;
  const int r1 = is_gated(S) ? p + 8 : 2 * p + 1;
  const float* sums = partials + epilogue.m * kWarps * kTileRows;
  float v0 = 0;
  float v1 = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    v0 += sums[w * kTileRows + r0];
    v1 += sums[w * kTileRows + r1];
  }
  if constexpr (has_norm(S)) {
    const float* squares = reinterpret_cast<const float*>(shared + s.squares) + epilogue.m * kWarps;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += squares[w];
    const float factor = rsqrtf(sum / static_cast<float>(a.w.k) + a.in.eps);
    v0 *= factor;
    v1 *= factor;
  }
  return {v0, v1};
}

template <class W, Stage S>
__device__ inline void finish_item(const StageArgs& a, const SharedLayout& s, const uint8_t* shared,
                                   const float* partials, const Epilogue<S>& epilogue, int item) {
  const float2 v = add_warps<W>(a, s, shared, partials, epilogue, item);
  epilogue.finish(a, v.x, v.y);
}

// kExpertDown: the blocks of a cluster multiply a tile of an expert each. The first block adds up
// what they find, in the order of the choices.

__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_arrive();
#endif
}

__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_wait();
#endif
}

/// Writes the tile that this warp finishes, if it has one; every thread of the cluster calls.
/// found: shared memory for two batches by turns, [choice][warp][item] each.
template <class W>
__device__ inline void finish_over_experts(const StageArgs& a, const SharedLayout& s,
                                           const uint8_t* shared, const float* partials,
                                           const Epilogue<Stage::kExpertDown>& epilogue,
                                           bool has_item, float2* found, int warp, int lane) {
#if __CUDA_ARCH__ >= 900
  constexpr int kChoiceItems = kWarps * 8;
  found += warp * 8 + lane;
  float2 v = {0.0F, 0.0F};
  if (has_item) {
    v = add_warps<W>(a, s, shared, partials, epilogue, lane);
    v = {v.x * epilogue.scale.x, v.y * epilogue.scale.y};
    const auto cluster = cooperative_groups::this_cluster();
    if (epilogue.choice > 0) {
      *cluster.map_shared_rank(found + epilogue.choice * kChoiceItems, /*rank=*/0) = v;
    }
  }
  arrive_at_cluster();
  wait_for_cluster();
  if (!has_item || epilogue.choice > 0) return;
  for (int c = 1; c < a.chosen.choices; ++c) {
    v.x += found[c * kChoiceItems].x;
    v.y += found[c * kChoiceItems].y;
  }
  epilogue.store(a, v.x, v.y);
#endif
}

/// Blocks: products per tile of weights; 2 when hi and lo of more than 4 rows do not fit 8 columns.
template <class W, Stage S, int Rows>
__global__ void __launch_bounds__(kThreads, kRegisterBlocks)
    stage_kernel(const __grid_constant__ StageArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr bool kNorm = has_norm(S);
  constexpr int Blocks = W::kParts == 2 && Rows > 4 ? 2 : 1;
  constexpr int kDepth = ring_depth<W>();
  constexpr bool kRoutes = S == Stage::kExpertGateUp;
  if constexpr (!kRoutes) launch_dependents();
  if constexpr (S == Stage::kExpertDown) arrive_at_cluster();
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
  Chosen* chosen = nullptr;
  if constexpr (kRoutes) {
    chosen = reinterpret_cast<Chosen*>(shared + s.total);
    const int near = request_gate(a, shared, s.values);
    wait_for_predecessor();
    wait_copies<0>();
    __syncthreads();
    route(a, shared, s, near, *chosen, warp, lane);
  }
  if constexpr (S == Stage::kExpertDown) {
    chosen = reinterpret_cast<Chosen*>(shared + s.norm + kFoundBytes);
    if (threadIdx.x < a.chosen.choices) {
      chosen->expert[threadIdx.x] = __ldcg(a.chosen.index + threadIdx.x);
      chosen->share[threadIdx.x] = __ldcg(a.chosen.share + threadIdx.x);
    }
    __syncthreads();
  }
  Stream<W, S> stream(a, warp, lane, chosen);
#pragma unroll 1
  for (uint32_t slot = first; slot != end; slot += W::kSlotBytes) stream.request(slot + shift);
  if constexpr (kRoutes) {
    if (threadIdx.x == 0) publish(a, *chosen);
  } else {
    wait_for_predecessor();
  }
  if constexpr (kNorm) wait_copies<kDepth>();
  const float* input = a.in.x;
  if constexpr (S == Stage::kExpertDown) {
    input += static_cast<int64_t>(blockIdx.x % sharers<S>(a)) * a.w.k;
  }
  load_input<W, kNorm>(a, input, shared, s, warp, lane);
  __syncthreads();
  if constexpr (S == Stage::kExpertDown) wait_for_cluster();  // all of it has started

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
  bool second = false;  // kExpertDown: batches take turns in shared memory
  while (tile < tiles.last) {
    Epilogue<S> epilogue[2];  // of the tile that this warp finishes: its items lane and lane + 32
    int mine = -1;
    for (int i = 0; i < a.batch && tile < tiles.last; ++i, tile += tiles.step) {
      int own_tile = tile;
      split_tile<S>(a, own_tile);
      if (i == warp) {
        mine = i;
        if (lane < rows * 8) epilogue[0].template prefetch<W>(a, chosen, tile, lane);
        if (Rows > 4 && lane + kWarp < rows * 8)
          epilogue[1].template prefetch<W>(a, chosen, tile, lane + kWarp);
      }
      typename W::Accumulator acc[Blocks];
      for (int unit = first_unit(warp, own_tile, a.units); unit < a.units; unit += kWarps) {
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
    if constexpr (S == Stage::kExpertDown) {
      float2* found = reinterpret_cast<float2*>(shared + s.norm) + (second ? kFoundItems : 0);
      second = !second;
      finish_over_experts<W>(a, s, shared, partials + warp * kWarps * kTileRows, epilogue[0],
                             mine >= 0 && lane < 8, found, warp, lane);
      continue;
    }
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

/// Fills in what follows from the weight's size.
template <class W, Stage S>
inline void size_stage(StageArgs& args) {
  args.padded_k = (args.w.k + kChunk - 1) / kChunk * kChunk;
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

template <class W, Stage S>
inline cudaError_t launch_stage(const Launch& launch, StageArgs args) {
  int sms = 0;
  int most_shared = 0;  // of a block; rows that need more go in several launches
  cudaError_t error = multiprocessors(sms);
  if (error != cudaSuccess) return error;
  error = shared_limit(most_shared);
  if (error != cudaSuccess) return error;

  size_stage<W, S>(args);
  args.neighbours = tile_bytes<W>(args) * args.tiles >= kNeighbourBytes;
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
