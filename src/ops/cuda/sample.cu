// Sampling on the device: the rules of gptfast::sample_row (sampling.cpp) and its noise (philox.h).
#include <cmath>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/row_select.cuh"
#include "philox.h"

namespace gptfast::cuda {
namespace {

constexpr double kMinTemperature = 1e-5;  // as sampling.cpp

/// The draw among the logits that reach the pivot: the largest of logit / temperature + noise.
__device__ Best draw(const SampleArgs& a, const float* logits, int b, float largest, float pivot,
                     bool from_candidates, SelectState& s) {
  const float inverse =
      static_cast<float>(1.0 / fmax(static_cast<double>(a.temperature[b]), kMinTemperature));
  const auto seed = static_cast<uint64_t>(a.seed[b]);
  const auto position = static_cast<uint32_t>(a.pos[b] + a.seq_len - 1);
  const int count = from_candidates ? s.count : a.vocab;
  Best drawn = {-INFINITY, a.vocab};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
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

template <int Blocks>
__global__ void __launch_bounds__(kSelectThreads)
    sample_kernel(const __grid_constant__ SampleArgs a) {
  __shared__ SelectState s;
  launch_dependents();
  wait_for_predecessor();
  const int b = static_cast<int>(blockIdx.x) / Blocks;
  const int64_t row = static_cast<int64_t>(b) * a.seq_len + a.seq_len - 1;
  const float* logits = a.logits + row * a.vocab;
  const Part part = part_of_row<Blocks>(a.vocab);
  const int top_k = a.top_k[b];
  search_row<Blocks>(logits, part, top_k, a.temperature[b] != 0 && selects(a.vocab, top_k), s);
  if (part.rank != 0) return;

  const Best largest = find_largest<Blocks>(s);
  int32_t token = largest.id;
  if (token >= 0 && a.temperature[b] != 0 && top_k != 1) {
    const bool all = top_k <= 0 || top_k >= a.vocab;
    const float pivot = all ? -INFINITY : find_pivot(logits, a.vocab, top_k, s);
    const Best drawn = draw(a, logits, b, largest.key, pivot, !all && s.count <= kCandidates, s);
    if (drawn.id < a.vocab) token = drawn.id;
  }
  if (threadIdx.x == 0) a.next[b] = token;
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
    return launch_kernel(launch, sample_kernel<1>, dim3(batch_size), kSelectThreads,
                         /*shared_bytes=*/0, args);
  }
  return launch_cluster(launch, kClusterBlocks, sample_kernel<kClusterBlocks>,
                        dim3(batch_size * kClusterBlocks), kSelectThreads,
                        /*shared_bytes=*/0, args);
}

cudaError_t advance(const Launch& launch, const AdvanceArgs& args) {
  return launch_kernel(launch, advance_kernel, dim3(1), kWarp, /*shared_bytes=*/0, args);
}

}  // namespace gptfast::cuda
