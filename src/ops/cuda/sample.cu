// Sampling on the device: the rules of gptfast::sample_row (sampling.cpp) and its noise (philox.h).
// One block a row.
//
// The top_k-th largest logit is found exactly: the k-th largest of the threads' maxima is a bound
// that at least k logits reach; the few that reach it are ranked by counting. Where that does not
// work (k above the number of threads, or very many equal logits) the pivot is built bit by bit
// from counts.
#include <cmath>

#include "ops/cuda/device.cuh"
#include "ops/cuda/launch.cuh"
#include "philox.h"

namespace gptfast::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kCandidates = 4096;         // 16 KB; top_k 200 gives about 250
constexpr double kMinTemperature = 1e-5;  // as sampling.cpp

struct Best {
  float key;
  int id;
};

struct SharedState {
  float maxima[kThreads];
  float candidates[kCandidates];
  Best best[kThreads / kWarp];
  int count;
  float pivot;
};

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

/// The k-th largest of n values, 1 <= k <= n: the smallest that fewer than k exceed.
__device__ float kth_by_rank(const float* values, int n, int k, SharedState& s) {
  float smallest = INFINITY;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    int above = 0;
    for (int j = 0; j < n; ++j) above += static_cast<int>(values[j] > values[i]);
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

/// The top_k-th largest logit; `own` is the largest of this thread's.
__device__ float find_pivot(const float* logits, int vocab, int k, float own, SharedState& s) {
  if (k > kThreads || vocab < kThreads) return kth_by_bits(logits, vocab, k, s);
  s.maxima[threadIdx.x] = own;
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  const float bound = kth_by_rank(s.maxima, kThreads, k, s);
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kThreads) {
    const float value = logits[i];
    if (value >= bound) {
      const int at = atomicAdd(&s.count, 1);
      if (at < kCandidates) s.candidates[at] = value;
    }
  }
  __syncthreads();
  const int count = s.count;
  if (count > kCandidates) return kth_by_bits(logits, vocab, k, s);
  return kth_by_rank(s.candidates, count, k, s);
}

__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleArgs a) {
  __shared__ SharedState s;
  launch_dependents();
  wait_for_predecessor();
  const int b = static_cast<int>(blockIdx.x);
  const int64_t row = static_cast<int64_t>(b) * a.seq_len + a.seq_len - 1;
  const float* logits = a.logits + row * a.vocab;
  Best largest = {-INFINITY, a.vocab};
  bool nan = false;
  for (int i = static_cast<int>(threadIdx.x); i < a.vocab; i += kThreads) {
    const float value = logits[i];
    nan |= value != value;
    if (better({value, i}, largest)) largest = {value, i};
  }
  const float own = largest.key;
  largest = block_best(largest, s);
  nan = __syncthreads_or(static_cast<int>(nan)) != 0;
  const float temperature = a.temperature[b];
  const int top_k = a.top_k[b];
  int32_t token = largest.id;
  if (!nan && temperature != 0 && top_k != 1) {
    const bool all = top_k <= 0 || top_k >= a.vocab;
    const float pivot = all ? -INFINITY : find_pivot(logits, a.vocab, top_k, own, s);
    const float inverse =
        static_cast<float>(1.0 / fmax(static_cast<double>(temperature), kMinTemperature));
    const auto seed = static_cast<uint64_t>(a.seed[b]);
    const auto position = static_cast<uint32_t>(a.pos[b] + a.seq_len - 1);
    Best drawn = {-INFINITY, a.vocab};
    for (int i = static_cast<int>(threadIdx.x); i < a.vocab; i += kThreads) {
      const float value = logits[i];
      if (value < pivot) continue;
      const float noise =
          gumbel_noise(seed, position, static_cast<uint32_t>(i), NoiseStream::kSample);
      const float key = __fadd_rn(__fmul_rn(value - largest.key, inverse), noise);
      if (better({key, i}, drawn)) drawn = {key, i};
    }
    drawn = block_best(drawn, s);
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
  return launch_kernel(launch, sample_kernel, dim3(batch_size), kThreads, /*shared_bytes=*/0, args);
}

cudaError_t advance(const Launch& launch, const AdvanceArgs& args) {
  return launch_kernel(launch, advance_kernel, dim3(1), kWarp, /*shared_bytes=*/0, args);
}

}  // namespace gptfast::cuda
