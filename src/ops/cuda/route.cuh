// The router of a mixture of experts. Every block of the stage that follows it chooses for itself:
// cheaper than a kernel that all blocks would wait for.
#pragma once

#include "ops/cuda/stage_layout.cuh"

namespace gptfast::cuda {

constexpr int kRouterBatch = 8;  // experts whose products a thread adds up at a time

/// The choice, scores and sums of each warp, behind the other shared memory of a stage.
inline int router_bytes(const Router& router) {
  return static_cast<int>(sizeof(Chosen)) +
         (1 + kWarps) * (router.experts + 1) * static_cast<int>(sizeof(float));
}

/// Requests into shared memory as many experts of the gate as `room` bytes hold; their number.
__device__ inline int request_gate(const StageArgs& a, uint8_t* shared, int room) {
  const int expert_bytes = a.w.k * 2;
  const int experts = min(a.router.experts, room / expert_bytes);
  const auto* gate = static_cast<const uint8_t*>(a.router.gate);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 16; i < experts * expert_bytes; i += kThreads * 16) {
    copy_async16(shared_address(shared) + i, gate + i);
  }
  commit_copies();
  return experts;
}

/// Four numbers of either 16-bit type, without a branch.
__device__ inline float4 unpack4(uint2 v, bool bfloat16) {
  const float2 lo = __half22float2(reinterpret_cast<const __half2&>(v.x));
  const float2 hi = __half22float2(reinterpret_cast<const __half2&>(v.y));
  return {bfloat16 ? __uint_as_float(v.x << 16) : lo.x,
          bfloat16 ? __uint_as_float(v.x & 0xffff0000U) : lo.y,
          bfloat16 ? __uint_as_float(v.y << 16) : hi.x,
          bfloat16 ? __uint_as_float(v.y & 0xffff0000U) : hi.y};
}

// Loops below have as many rounds for every lane: a warp whose lanes have parted would stay so.

/// This thread's part of the products of experts first .. first + kRouterBatch with the row times
/// the norm's weight, and of the row's sum of squares. The first `near` experts of the gate lie in
/// shared memory.
__device__ inline void multiply_gate(const StageArgs& a, const uint8_t* shared, int near,
                                     const uint8_t* norm, int first, float (&sum)[kRouterBatch],
                                     float& squares) {
#pragma unroll 1
  for (int base = 0; base < a.w.k; base += kThreads * 4) {
    const int k = base + static_cast<int>(threadIdx.x) * 4;
    if (k < a.w.k) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(a.in.x + k));
      const float4 n = load_scalar4(norm, k, a.in.norm_type);
      const float4 v = {x.x * n.x, x.y * n.y, x.z * n.z, x.w * n.w};
      squares = __fmaf_rn(x.x, x.x, squares);
      squares = __fmaf_rn(x.y, x.y, squares);
      squares = __fmaf_rn(x.z, x.z, squares);
      squares = __fmaf_rn(x.w, x.w, squares);
#pragma unroll
      for (int i = 0; i < kRouterBatch; ++i) {
        const int e = min(first + i, a.router.experts - 1);  // beyond the last: dropped
        const auto* gate = e < near ? shared : static_cast<const uint8_t*>(a.router.gate);
        const float4 w = unpack4(*reinterpret_cast<const uint2*>(
                                     gate + (static_cast<int64_t>(e) * a.w.k + k) * 2),
                                 a.router.type == Scalar::kBFloat16);
        sum[i] = __fmaf_rn(v.x, w.x, sum[i]);
        sum[i] = __fmaf_rn(v.y, w.y, sum[i]);
        sum[i] = __fmaf_rn(v.z, w.z, sum[i]);
        sum[i] = __fmaf_rn(v.w, w.w, sum[i]);
      }
    }
  }
}

__device__ inline float warp_max(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffU, v, offset));
  }
  return v;
}

/// scores[e] = the softmax of scores[e] * factor, by one warp.
__device__ inline void softmax(float* scores, float factor, int experts, int lane) {
  float greatest = scores[0] * factor;
  for (int base = 0; base < experts; base += kWarp) {
    greatest = fmaxf(greatest, scores[min(base + lane, experts - 1)] * factor);
  }
  greatest = warp_max(greatest);
  float total = 0;
  for (int base = 0; base < experts; base += kWarp) {
    const int e = base + lane;
    const float power = e < experts ? expf(scores[e] * factor - greatest) : 0.0F;
    if (e < experts) scores[e] = power;
    total += power;
  }
  total = warp_sum(total);
  for (int base = 0; base < experts; base += kWarp) {
    const int e = base + lane;
    if (e < experts) scores[e] = scores[e] / total;
  }
  __syncwarp();
}

/// The expert of the largest score, of equal ones the lowest; NaN counts as kNaN. By one warp.
constexpr float kNaN = -1;  // probabilities are above
constexpr float kTaken = -2;
__device__ inline int largest(const float* scores, int experts, int lane) {
  float best = kTaken;
  int at = experts;
  for (int base = 0; base < experts; base += kWarp) {
    const int e = base + lane;
    const float raw = scores[min(e, experts - 1)];
    const float score = isnan(raw) ? kNaN : raw;
    const bool better = e < experts && score > best;
    best = better ? score : best;
    at = better ? e : at;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffU, best, offset);
    const int other_at = __shfl_xor_sync(0xffffffffU, at, offset);
    const bool better = other > best || (other == best && other_at < at);
    best = better ? other : best;
    at = better ? other_at : at;
  }
  return at;
}

/// Fills `chosen` and spoils the scores. By one warp.
__device__ inline void choose(float* scores, int experts, int choices, int lane, Chosen& chosen) {
  float sum = 0;
#pragma unroll 1
  for (int c = 0; c < choices; ++c) {
    const int at = largest(scores, experts, lane);
    const float score = scores[at];
    sum += score;
    __syncwarp();
    if (lane == 0) {
      chosen.expert[c] = at;
      chosen.share[c] = score;
      scores[at] = kTaken;
    }
    __syncwarp();
  }
  if (lane < choices) chosen.share[lane] = chosen.share[lane] / sum;
}

/// Chooses for the row. Every thread calls; the gate's and the norm's copies have arrived. When it
/// returns, `chosen` can be read and the gate in shared memory be overwritten.
__device__ inline void route(const StageArgs& a, uint8_t* shared, const SharedLayout& s, int near,
                             Chosen& chosen, int warp, int lane) {
  const int experts = a.router.experts;
  const int pitch = experts + 1;
  float* scores = reinterpret_cast<float*>(&chosen + 1);  // products, then the sum of squares
  float* sums = scores + pitch;                           // of each warp, [kWarps][pitch]
#pragma unroll 1
  for (int first = 0; first < experts; first += kRouterBatch) {
    float sum[kRouterBatch] = {};
    float squares = 0;
    multiply_gate(a, shared, near, shared + s.norm, first, sum, squares);
#pragma unroll
    for (int i = 0; i < kRouterBatch; ++i) {
      sum[i] = warp_sum(sum[i]);
      if (lane == 0 && first + i < experts) sums[warp * pitch + first + i] = sum[i];
    }
    squares = warp_sum(squares);
    if (lane == 0) sums[warp * pitch + experts] = squares;
  }
  __syncthreads();
  if (__shfl_sync(0xffffffffU, warp, 0) == 0) {
    for (int base = 0; base < pitch; base += kWarp) {
      const int e = min(base + lane, experts);
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += sums[w * pitch + e];
      scores[e] = sum;
    }
    __syncwarp();
    const float factor = rsqrtf(scores[experts] / static_cast<float>(a.w.k) + a.in.eps);
    softmax(scores, factor, experts, lane);
    choose(scores, experts, a.chosen.choices, lane, chosen);
  }
  __syncthreads();
}

/// Writes the choice down for the next kernel and lets it start. That one, kExpertDown, reads it
/// before it waits for this kernel, so it must not start earlier: one thread of a block calls (a
/// block's first call counts), in the first block after its writes have become visible.
__device__ inline void publish(const StageArgs& a, const Chosen& chosen) {
  if (blockIdx.x == 0) {
    for (int c = 0; c < a.chosen.choices; ++c) {
      a.chosen.index[c] = chosen.expert[c];
      a.chosen.share[c] = chosen.share[c];
    }
    __threadfence();
  }
  launch_dependents();
}

}  // namespace gptfast::cuda
