// Sampling on the device: the rules of gptfast::sample_row (sampling.cpp) and its noise (philox.h).
//
// A row's logits are divided among the blocks of a cluster (one block before sm_90) and cut into
// kThreads groups. The k-th largest of the groups' maxima is a bound that at least k logits reach;
// the few that reach it are ranked by counting, which gives the top_k-th largest logit exactly.
// Where that does not work (k above the number of groups, or very many equal logits) the pivot is
// built bit by bit from counts.
#include <cooperative_groups.h>

#include <cmath>

#include "ops/cuda/device.cuh"
#include "ops/cuda/launch.cuh"
#include "philox.h"

namespace gptfast::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kClusterBlocks = 8;         // the largest portable cluster
constexpr int kCandidates = 4096;         // 16 KB; top_k 200 gives about 250
constexpr double kMinTemperature = 1e-5;  // as sampling.cpp

struct Best {
  float key;
  int id;
};

struct SharedState {
  alignas(16) float maxima[kThreads];
  alignas(16) float candidates[kCandidates];
  int ids[kCandidates];
  Best best[kThreads / kWarp];
  Best parts[kClusterBlocks];  // each block's largest logit; id -1: it has a NaN
  int count;
  float bound;
};

/// Shared memory of the cluster's first block, which gathers what the others find.
template <int Blocks>
__device__ inline SharedState& leader(SharedState& s) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) return *cooperative_groups::this_cluster().map_shared_rank(&s, 0);
#endif
  return s;
}

template <int Blocks>
__device__ inline void sync_blocks() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) {
    cooperative_groups::this_cluster().sync();
    return;
  }
#endif
  __syncthreads();
}

__device__ inline bool better(const Best& a, const Best& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}

/// The best of all threads' a, ties to the lowest id; the same for every thread.
__device__ Best block_best(Best a, SharedState& s) {
  const auto join = [&a](int offset) {
    const Best other = {__shfl_xor_sync(0xffffffffU, a.key, offset),
                        __shfl_xor_sync(0xffffffffU, a.id, offset)};
    if (better(other, a)) a = other;
  };
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) join(offset);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) s.best[threadIdx.x / kWarp] = a;
  __syncthreads();
  a = s.best[threadIdx.x % kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) join(offset);
  return a;
}

/// The k-th largest of n values, 1 <= k <= n: the smallest that fewer than k exceed. n is a
/// multiple of 4.
__device__ float kth_by_rank(const float* values, int n, int k, SharedState& s) {
  float smallest = INFINITY;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const float own = values[i];
    int above = 0;
#pragma unroll 8
    for (int j = 0; j < n; j += 4) {
      const float4 v = *reinterpret_cast<const float4*>(values + j);
      above += static_cast<int>(v.x > own) + static_cast<int>(v.y > own) +
               static_cast<int>(v.z > own) + static_cast<int>(v.w > own);
    }
    if (above < k) smallest = fminf(smallest, values[i]);
  }
  return -block_best({-smallest, 0}, s).key;
}

/// Maps floats to integers of the same order, and back.
__device__ inline uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ inline float unordered(uint32_t bits) {
  return __uint_as_float((bits & 0x80000000U) != 0 ? bits & 0x7fffffffU : ~bits);
}

/// The k-th largest of all logits, 1 <= k <= vocab, in 32 passes.
__device__ float kth_by_bits(const float* logits, int vocab, int k, SharedState& s) {
  uint32_t pivot = 0;
  for (uint32_t bit = 0x80000000U; bit != 0; bit >>= 1) {
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    int count = 0;
    for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kThreads) {
      count += static_cast<int>(ordered(logits[i]) >= (pivot | bit));
    }
    atomicAdd(&s.count, count);
    __syncthreads();
    if (s.count >= k) pivot |= bit;
  }
  return unordered(pivot);
}

/// True if candidates are gathered: they are many fewer than all logits.
__device__ inline bool selects(const SampleArgs& a, int b) {
  const int k = a.top_k[b];
  return a.temperature[b] != 0 && k > 1 && k <= kThreads && k < a.vocab;
}

/// The top_k-th largest logit, by the cluster's first block. s.count candidates (values and ids)
/// hold all logits down to it, or s.count is above kCandidates.
__device__ float find_pivot(const SampleArgs& a, const float* logits, int b, SharedState& s) {
  if (selects(a, b)) {
    const int count = s.count;
    if (count <= kCandidates) {
      const int padded = (count + 3) / 4 * 4;
      if (threadIdx.x < padded - count) s.candidates[count + threadIdx.x] = -INFINITY;
      __syncthreads();
      return kth_by_rank(s.candidates, padded, a.top_k[b], s);
    }
  }
  const float pivot = kth_by_bits(logits, a.vocab, a.top_k[b], s);
  __syncthreads();
  if (threadIdx.x == 0) s.count = kCandidates + 1;
  __syncthreads();
  return pivot;
}

/// The draw among the logits that reach the pivot: the largest of logit / temperature + noise.
__device__ Best draw(const SampleArgs& a, const float* logits, int b, float largest, float pivot,
                     bool from_candidates, SharedState& s) {
  const float inverse =
      static_cast<float>(1.0 / fmax(static_cast<double>(a.temperature[b]), kMinTemperature));
  const auto seed = static_cast<uint64_t>(a.seed[b]);
  const auto position = static_cast<uint32_t>(a.pos[b] + a.seq_len - 1);
  const int count = from_candidates ? s.count : a.vocab;
  Best drawn = {-INFINITY, a.vocab};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int id = from_candidates ? s.ids[i] : i;
    const float value = from_candidates ? s.candidates[i] : logits[i];
    if (value < pivot) continue;
    const float noise =
        gumbel_noise(seed, position, static_cast<uint32_t>(id), NoiseStream::kSample);
    const float key = __fadd_rn(__fmul_rn(value - largest, inverse), noise);
    if (better({key, id}, drawn)) drawn = {key, id};
  }
  return block_best(drawn, s);
}

/// The largest logit of a block's part, and the largest of each of its groups, to the first block.
template <int Blocks>
__device__ void reduce_part(const float* logits, int begin, int end, int rank, SharedState& s) {
  Best largest = {-INFINITY, end};
  bool nan = false;
#pragma unroll 8
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const float value = logits[i];
    nan |= value != value;
    if (better({value, i}, largest)) largest = {value, i};
  }
  float group = largest.key;  // of Blocks neighbouring threads: kThreads groups in all blocks
#pragma unroll
  for (int offset = 1; offset < Blocks; offset *= 2) {
    group = fmaxf(group, __shfl_xor_sync(0xffffffffU, group, offset));
  }
  SharedState& first = leader<Blocks>(s);
  if (threadIdx.x % Blocks == 0) {
    first.maxima[rank * (kThreads / Blocks) + threadIdx.x / Blocks] = group;
  }
  largest = block_best(largest, s);
  nan = __syncthreads_or(static_cast<int>(nan)) != 0;
  if (threadIdx.x == 0) first.parts[rank] = {largest.key, nan ? -1 : largest.id};
}

/// Logits that reach the bound, to the first block.
template <int Blocks>
__device__ void gather_candidates(const float* logits, int begin, int end, SharedState& s) {
  SharedState& first = leader<Blocks>(s);
  const float bound = first.bound;
#pragma unroll 8
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const float value = logits[i];
    if (value >= bound) {
      const int at = atomicAdd(&first.count, 1);
      if (at < kCandidates) first.candidates[at] = value, first.ids[at] = i;
    }
  }
}

template <int Blocks>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleArgs a) {
  __shared__ SharedState s;
  launch_dependents();
  wait_for_predecessor();
  const int b = static_cast<int>(blockIdx.x) / Blocks;
  const int rank = static_cast<int>(blockIdx.x) % Blocks;
  const int64_t row = static_cast<int64_t>(b) * a.seq_len + a.seq_len - 1;
  const float* logits = a.logits + row * a.vocab;
  const int share = (a.vocab + Blocks - 1) / Blocks;
  const int begin = min(rank * share, a.vocab);
  const int end = min(begin + share, a.vocab);
  sync_blocks<Blocks>();  // all blocks have started: their shared memory may be written
  reduce_part<Blocks>(logits, begin, end, rank, s);
  sync_blocks<Blocks>();
  if (selects(a, b)) {
    if (rank == 0) {
      const float bound = kth_by_rank(s.maxima, kThreads, a.top_k[b], s);
      if (threadIdx.x == 0) s.bound = bound, s.count = 0;
    }
    sync_blocks<Blocks>();
    gather_candidates<Blocks>(logits, begin, end, s);
    sync_blocks<Blocks>();
  }
  if (rank != 0) return;

  Best largest = s.parts[0];
  bool nan = largest.id < 0;
  for (int i = 1; i < Blocks; ++i) {
    nan |= s.parts[i].id < 0;
    if (better(s.parts[i], largest)) largest = s.parts[i];
  }
  int32_t token = largest.id;
  if (!nan && a.temperature[b] != 0 && a.top_k[b] != 1) {
    const bool all = a.top_k[b] <= 0 || a.top_k[b] >= a.vocab;
    const float pivot = all ? -INFINITY : find_pivot(a, logits, b, s);
    const Best drawn = draw(a, logits, b, largest.key, pivot, !all && s.count <= kCandidates, s);
    if (drawn.id < a.vocab) token = drawn.id;
  }
  if (threadIdx.x == 0) a.next[b] = nan ? -1 : token;
}

__global__ void advance_kernel(const __grid_constant__ AdvanceArgs a) {
  wait_for_predecessor();
  const int b = static_cast<int>(threadIdx.x);
  const int step = *a.step;
  if (b < a.rows) {
    a.tokens[b] = a.next[b];
    a.pos[b] += 1;
    a.history[static_cast<int64_t>(step % a.history_steps) * a.rows + b] = a.next[b];
  }
  __syncthreads();
  if (b == 0) *a.step = step + 1;
}

}  // namespace

cudaError_t sample(const Launch& launch, const SampleArgs& args, int batch_size) {
  if (!launch.clusters) {
    return launch_kernel(launch, sample_kernel<1>, dim3(batch_size), kThreads, /*shared_bytes=*/0,
                         args);
  }
  return launch_kernel<kClusterBlocks>(launch, sample_kernel<kClusterBlocks>,
                                       dim3(batch_size * kClusterBlocks), kThreads,
                                       /*shared_bytes=*/0, args);
}

cudaError_t advance(const Launch& launch, const AdvanceArgs& args) {
  return launch_kernel(launch, advance_kernel, dim3(1), kWarp, /*shared_bytes=*/0, args);
}

}  // namespace gptfast::cuda
