// Finding the largest and the top_k-th largest of a row's logits, as the sampling kernels do it.
//
// A row's logits are divided among the blocks of a cluster (one block before sm_90) and cut into
// kSelectThreads groups. The k-th largest of the groups' maxima is a bound that at least k logits
// reach; the few that reach it are ranked by counting, which gives the top_k-th largest logit
// exactly. Where that does not work (k above the number of groups, or very many equal logits) the
// pivot is built bit by bit from counts.
#pragma once

#include <cooperative_groups.h>

#include "ops/cuda/device.cuh"

namespace gptfast::cuda {

constexpr int kSelectThreads = 1024;
constexpr int kClusterBlocks = 8;  // the largest portable cluster
constexpr int kCandidates = 4096;  // 16 KB; top_k 200 gives about 250

struct Best {
  float key;
  int id;
};

struct SelectState {
  alignas(16) float maxima[kSelectThreads];
  alignas(16) float candidates[kCandidates];
  int ids[kCandidates];
  Best best[kSelectThreads / kWarp];
  Best parts[kClusterBlocks];  // each block's largest logit; id -1: it has a NaN
  int count;
  float bound;
};

/// Shared memory of the cluster's first block, which gathers what the others find.
template <int Blocks>
__device__ inline SelectState& leader(SelectState& s) {
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
__device__ inline Best block_best(Best a, SelectState& s) {
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
__device__ inline float kth_by_rank(const float* values, int n, int k, SelectState& s) {
  float smallest = INFINITY;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kSelectThreads) {
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
__device__ inline float kth_by_bits(const float* logits, int vocab, int k, SelectState& s) {
  uint32_t pivot = 0;
  for (uint32_t bit = 0x80000000U; bit != 0; bit >>= 1) {
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    int count = 0;
    for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kSelectThreads) {
      count += static_cast<int>(ordered(logits[i]) >= (pivot | bit));
    }
    atomicAdd(&s.count, count);
    __syncthreads();
    if (s.count >= k) pivot |= bit;
  }
  return unordered(pivot);
}

/// True if candidates are gathered: they are many fewer than all logits.
__device__ inline bool selects(int vocab, int top_k) {
  return top_k > 1 && top_k <= kSelectThreads && top_k < vocab;
}

/// The top_k-th largest logit, 1 <= top_k <= vocab, by the cluster's first block. s.count
/// candidates (values and ids) hold all logits down to it, or s.count is above kCandidates.
__device__ inline float find_pivot(const float* logits, int vocab, int top_k, SelectState& s) {
  if (selects(vocab, top_k)) {
    const int count = s.count;
    if (count <= kCandidates) {
      const int padded = (count + 3) / 4 * 4;
      if (threadIdx.x < padded - count) s.candidates[count + threadIdx.x] = -INFINITY;
      __syncthreads();
      return kth_by_rank(s.candidates, padded, top_k, s);
    }
  }
  const float pivot = kth_by_bits(logits, vocab, top_k, s);
  __syncthreads();
  if (threadIdx.x == 0) s.count = kCandidates + 1;
  __syncthreads();
  return pivot;
}

/// A block's share of a row.
struct Part {
  int rank, begin, end;
};

template <int Blocks>
__device__ inline Part part_of_row(int vocab) {
  const int rank = static_cast<int>(blockIdx.x) % Blocks;
  const int share = (vocab + Blocks - 1) / Blocks;
  const int begin = min(rank * share, vocab);
  return {rank, begin, min(begin + share, vocab)};
}

/// The largest logit of a block's part, and the largest of each of its groups, to the first block.
template <int Blocks>
__device__ inline void reduce_part(const float* logits, const Part& part, SelectState& s) {
  const auto [rank, begin, end] = part;
  Best largest = {-INFINITY, end};
  bool nan = false;
#pragma unroll 8
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kSelectThreads) {
    const float value = logits[i];
    nan |= value != value;
    if (better({value, i}, largest)) largest = {value, i};
  }
  float group = largest.key;  // of Blocks neighbouring threads: kSelectThreads groups in all blocks
#pragma unroll
  for (int offset = 1; offset < Blocks; offset *= 2) {
    group = fmaxf(group, __shfl_xor_sync(0xffffffffU, group, offset));
  }
  SelectState& first = leader<Blocks>(s);
  if (threadIdx.x % Blocks == 0) {
    first.maxima[rank * (kSelectThreads / Blocks) + threadIdx.x / Blocks] = group;
  }
  largest = block_best(largest, s);
  nan = __syncthreads_or(static_cast<int>(nan)) != 0;
  if (threadIdx.x == 0) first.parts[rank] = {largest.key, nan ? -1 : largest.id};
}

/// Logits that reach the bound, to the first block.
template <int Blocks>
__device__ inline void gather_candidates(const float* logits, const Part& part, SelectState& s) {
  SelectState& first = leader<Blocks>(s);
  const float bound = first.bound;
#pragma unroll 8
  for (int i = part.begin + static_cast<int>(threadIdx.x); i < part.end; i += kSelectThreads) {
    const float value = logits[i];
    if (value >= bound) {
      const int at = atomicAdd(&first.count, 1);
      if (at < kCandidates) first.candidates[at] = value, first.ids[at] = i;
    }
  }
}

/// What find_largest and find_pivot need, from all blocks to the first. Every block calls this;
/// `candidates` is the same for all.
template <int Blocks>
__device__ inline void search_row(const float* logits, const Part& part, int top_k, bool candidates,
                                  SelectState& s) {
  sync_blocks<Blocks>();  // all blocks have started: their shared memory may be written
  reduce_part<Blocks>(logits, part, s);
  sync_blocks<Blocks>();
  if (!candidates) return;
  if (part.rank == 0) {
    const float bound = kth_by_rank(s.maxima, kSelectThreads, top_k, s);
    if (threadIdx.x == 0) s.bound = bound, s.count = 0;
  }
  sync_blocks<Blocks>();
  gather_candidates<Blocks>(logits, part, s);
  sync_blocks<Blocks>();
}

/// The largest logit, ties to the lowest id, by the cluster's first block; id -1: there is a NaN.
template <int Blocks>
__device__ inline Best find_largest(const SelectState& s) {
  Best largest = s.parts[0];
  bool nan = largest.id < 0;
  for (int i = 1; i < Blocks; ++i) {
    nan |= s.parts[i].id < 0;
    if (better(s.parts[i], largest)) largest = s.parts[i];
  }
  if (nan) largest.id = -1;
  return largest;
}

}  // namespace gptfast::cuda
