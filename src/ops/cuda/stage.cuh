// The linear stages of a decode step: y = f(x) w^T with what comes before and after fused in. One
// kernel per (weight format, stage); the formats differ in formats.cuh only.
//
// A block owns one SM's share of the 16-row tiles. Its warps split the columns of a tile; each warp
// streams its own units through a private ring in shared memory by asynchronous copies, so the
// stream needs no barrier between warps. A block starts while its predecessor runs, and fills its
// rings before it waits for it (PDL), which keeps the memory busy across the dependency. Several
// rows are shared by the blocks of a cluster (Division); results do not depend on that.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/peers.cuh"
#include "ops/cuda/route.cuh"
#include "ops/cuda/stage_input.cuh"
#include "ops/cuda/stage_layout.cuh"
#include "ops/cuda/stage_stream.cuh"

namespace gptfast::cuda {

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
    if constexpr (has_residual(S)) {
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
    if constexpr (S == Stage::kResidualSum) {
      Round round(a.peers);
      const int pair = (m * a.w.n + n0) / 2;
      round.send_pair(pair, {v0, v1});
      const float2 sum = round.add_pairs(pair, {v0, v1});
      v0 = sum.x;
      v1 = sum.y;
    }
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
template <class W, int Rows, int Products>
__device__ inline void store_partial(typename W::Accumulator (&acc)[Products], float* partial,
                                     int rows, int lane) {
  using C = Columns<W, Rows>;
  const int g = lane >> 2;
  const int t = lane & 3;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = acc[0].d[i];
    if constexpr (W::kInteger) {
      v[i] = __fmaf_rn(C::lo(acc[0].d, acc[Products - 1].d, i, lane), kLoUnit, v[i]);
    }
    if constexpr (W::kGroup > 0) {
      const float lo = C::lo(acc[0].zero, acc[Products - 1].zero, i, lane);
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
  const float* sums = partials + epilogue.m * kResidues * kTileRows;
  float v0 = 0;
  float v1 = 0;
#pragma unroll
  for (int w = 0; w < kResidues; ++w) {
    v0 += sums[w * kTileRows + r0];
    v1 += sums[w * kTileRows + r1];
  }
  if constexpr (has_norm(S)) {
    const float* squares =
        reinterpret_cast<const float*>(shared + s.squares) + epilogue.m * kResidues;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kResidues; ++w) sum += squares[w];
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

/// Writes the tile that this warp finishes, if it has one; every thread of the cluster calls.
/// found: shared memory for two batches by turns, [choice][warp][item] each.
template <class W>
__device__ inline void finish_over_experts(const StageArgs& a, const SharedLayout& s,
                                           const uint8_t* shared, const float* partials,
                                           const Epilogue<Stage::kExpertDown>& epilogue,
                                           bool has_item, float2* found, int warp, int lane) {
  constexpr int kChoiceItems = kWarps * 8;
  found += warp * 8 + lane;
  float2 v = {0.0F, 0.0F};
  if (has_item) {
    v = add_warps<W>(a, s, shared, partials, epilogue, lane);
    v = {v.x * epilogue.scale.x, v.y * epilogue.scale.y};
    if (epilogue.choice > 0) *in_cluster(found + epilogue.choice * kChoiceItems, /*rank=*/0) = v;
  }
  arrive_at_cluster();
  wait_for_cluster();
  if (!has_item || epilogue.choice > 0) return;
  for (int c = 1; c < a.chosen.choices; ++c) {
    v.x += found[c * kChoiceItems].x;
    v.y += found[c * kChoiceItems].y;
  }
  epilogue.store(a, v.x, v.y);
}

/// The row's experts, which the router chooses or has chosen.
template <Stage S>
__device__ inline Chosen* choose_experts(const StageArgs& a, uint8_t* shared, const SharedLayout& s,
                                         int warp, int lane) {
  Chosen* chosen = nullptr;
  if constexpr (S == Stage::kExpertGateUp) {
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
  return chosen;
}

/// The input rows behind this lane's column of each product. Columns without a row repeat one;
/// their results are dropped.
template <class W, int Rows, int Products>
__device__ inline void find_columns(InputColumn (&x)[Products], uint32_t shared,
                                    const SharedLayout& s, int rows, int lane) {
  using C = Columns<W, Rows>;
#pragma unroll
  for (int p = 0; p < Products; ++p) {
    const int row = C::part(p, lane >> 2) * rows + min(C::row(p, lane >> 2), rows - 1);
    x[p].values = shared + s.values + row * s.pitch + (lane & 3) * 16;
    x[p].sums = shared + s.sums + row * s.sums_pitch + (lane & 3) * 4;
    const int column = C::row(p, 2 * (lane & 3));
    x[p].scales = shared + s.scales + (p == 0 ? 2 * (lane & 3) : column) * 4;
  }
}

/// Synchronizes a block, or with bits the blocks of its cluster.
__device__ inline void synchronize(int bits) {
  if (bits == 0) {
    __syncthreads();
  } else {
    arrive_at_cluster();
    wait_for_cluster();
  }
}

template <class W, Stage S, class B>
__global__ void __launch_bounds__(B::kThreads, B::kRegisterBlocks)
    stage_kernel(const __grid_constant__ StageArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr bool kNorm = has_norm(S);
  constexpr int Rows = B::kRows;
  constexpr int kProducts = Columns<W, Rows>::kProducts;
  constexpr int kDepth = B::template kDepth<W>;
  constexpr bool kRoutes = S == Stage::kExpertGateUp;
  // With one row two blocks of successive stages are to be resident from start to end. With several
  // one is: the successor's must not come before all of the predecessor's have gone, or they would
  // crowd where those went first.
  if constexpr (!kRoutes && !B::kShares) launch_dependents();
  const Division<B> division(a);
  if (S == Stage::kExpertDown || division.bits > 0) arrive_at_cluster();
  // From one lane: what depends on it does not diverge, and instructions of a whole warp need no
  // check for that.
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, /*srcLane=*/0);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int rows = Rows == 1 ? 1 : a.in.rows;
  const SharedLayout s = shared_layout<W, B>(rows, a.padded_k, a.batch, a.norm_bytes);
  // This lane reads a slot from `first` on and writes it from `first + shift` on.
  const uint32_t first =
      shared_address(shared) + warp * kDepth * W::kSlotBytes + W::read_offset(lane);
  uint32_t end = first + kDepth * W::kSlotBytes;
  asm volatile("" : "+r"(end));  // kept in a register: five instructions of every unit otherwise
  const int shift = W::write_offset(lane) - W::read_offset(lane);

  if constexpr (kNorm) request_norm<W>(a, division, shared, s, warp, lane);
  Chosen* const chosen = choose_experts<S>(a, shared, s, warp, lane);
  const TileRange tiles(a, S == Stage::kExpertDown ? sharers<S>(a) : division.blocks());
  Stream<W, S, B> stream(a, division, tiles, warp, lane, chosen);
#pragma unroll 1
  for (uint32_t slot = first; slot != end; slot += W::kSlotBytes) stream.request(slot + shift);
  clear_sums<W, B>(shared, s, rows);
  if constexpr (kRoutes) {
    if (threadIdx.x == 0) publish(a, *chosen);
  } else {
    wait_for_predecessor();
    if constexpr (B::kShares) launch_dependents();
  }
  if constexpr (kNorm) {
    wait_copies<kDepth>();
    if constexpr (B::kShares) __syncthreads();  // warps read what others copied
  }
  const float* input = a.in.x;
  if constexpr (S == Stage::kExpertDown) {
    input += static_cast<int64_t>(blockIdx.x % sharers<S>(a)) * a.w.k;
  }
  if (division.bits > 0) wait_for_cluster();  // all of it has started
  load_input<W, kNorm>(a, division, input, shared, s, warp, lane);
  __syncthreads();
  if constexpr (S == Stage::kExpertDown) wait_for_cluster();  // all of it has started

  InputColumn x[kProducts];
  find_columns<W, Rows>(x, shared_address(shared), s, rows, lane);
  float* partials = reinterpret_cast<float*>(shared + s.partial);
  // The blocks take turns in finishing tiles.
  constexpr int kAtATime = B::kTilesAtATime;
  const int turn = division.turn(warp);
  float* sums_of_turn = partials + (turn >> division.bits) * rows * kResidues * kTileRows;
  if (division.bits > 0) {
    sums_of_turn = in_cluster(sums_of_turn, turn & (division.blocks() - 1));
  }
  uint32_t slot = first;
  const int step = tiles.step * division.turns();
  int tile = tiles.first;  // the first of those that are multiplied at a time
  bool second = false;     // kExpertDown: batches take turns in shared memory
  while (tile < tiles.last) {
    Epilogue<S> epilogue[2];  // of the tile that this warp finishes: its items lane and lane + 32
    bool finishes = false;
    for (int i = 0; i < a.batch && tile < tiles.last; i += kAtATime, tile += step) {
      const int nth = warp - i;  // of the tiles that this block finishes of those
      const int finished = tile + (nth * division.blocks() + division.rank) * tiles.step;
      if (nth >= 0 && nth < kAtATime && finished < tiles.last) {
        finishes = true;
        if (lane < rows * 8) epilogue[0].template prefetch<W>(a, chosen, finished, lane);
        if (Rows > 4 && lane + kWarp < rows * 8)
          epilogue[1].template prefetch<W>(a, chosen, finished, lane + kWarp);
      }
      int own_tile = tile + turn * tiles.step;
      if (own_tile >= tiles.last) continue;
      split_tile<S>(a, own_tile);
      typename W::Accumulator acc[kProducts];
      const int residue = division.residue(warp, own_tile, a.units);
      int local = division.local(residue);
      for (int unit = residue; unit < a.units; unit += kResidues, local += division.residues()) {
        wait_copies<kDepth - 1>();
        __syncwarp();  // lanes read what others copied
        W::template multiply<Rows>(acc, slot, lane, local, x);
        stream.request(slot + shift);
        slot += W::kSlotBytes;
        if (slot == end) slot = first;
      }
      const int place = !B::kShares ? warp : division.place(residue, own_tile, a.units);
      store_partial<W, Rows>(acc, sums_of_turn + (i * rows * kResidues + place) * kTileRows, rows,
                             lane);
    }
    synchronize(division.bits);
    if constexpr (S == Stage::kExpertDown) {
      float2* found = reinterpret_cast<float2*>(shared + s.norm) + (second ? kFoundItems : 0);
      second = !second;
      finish_over_experts<W>(a, s, shared, partials + warp * kResidues * kTileRows, epilogue[0],
                             finishes && lane < 8, found, warp, lane);
      continue;
    }
    if (finishes) {
      const float* sums = partials + warp * rows * kResidues * kTileRows;
      if (lane < rows * 8) finish_item<W, S>(a, s, shared, sums, epilogue[0], lane);
      if (Rows > 4 && lane + kWarp < rows * 8) {
        finish_item<W, S>(a, s, shared, sums, epilogue[1], lane + kWarp);
      }
    }
    if (tile < tiles.last) synchronize(division.bits);
  }
  if constexpr (S == Stage::kResidualSum) Round::end(a.peers);
}

}  // namespace gptfast::cuda
