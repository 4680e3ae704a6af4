#include "ops/cuda/all_reduce.h"

#include "ops/cuda/device.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/peers.cuh"

namespace gptfast::cuda {
namespace {

/// 16 blocks of 256 threads take 8,192 floats at once, two a thread: a row of the largest models.
/// Few enough to be resident beside the stages before and after.
constexpr int kThreads = 256;

__device__ inline int first_index() {
  return static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
}

constexpr int kStride = kPeerBlocks * kThreads;

__global__ void __launch_bounds__(kThreads)
    all_reduce_kernel(const __grid_constant__ Peers peers, float* partial, int pairs, float* x) {
  launch_dependents();
  wait_for_predecessor();
  Round round(peers);
  for (int i = first_index(); i < pairs; i += kStride) {
    const float2 own = __ldcg(reinterpret_cast<const float2*>(partial) + i);
    round.send_pair(i, own);
  }
  for (int i = first_index(); i < pairs; i += kStride) {
    const float2 own = __ldcg(reinterpret_cast<const float2*>(partial) + i);
    float2 out = __ldcg(reinterpret_cast<const float2*>(x) + i);
    const float2 sum = round.add_pairs(i, own);
    out.x += sum.x;
    out.y += sum.y;
    reinterpret_cast<float2*>(x)[i] = out;
    reinterpret_cast<float2*>(partial)[i] = {0.0F, 0.0F};
  }
  Round::end(peers);
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Peers peers, const __grid_constant__ GatherArgs a) {
  launch_dependents();
  wait_for_predecessor();
  Round round(peers);
  const int words = a.batch * a.width;
  for (int i = first_index(); i < words; i += kStride) {
    const int64_t row = static_cast<int64_t>(i / a.width) * a.seq_len + a.seq_len - 1;
    const int column = i % a.width;
    if (peers.rank != 0) {
      const float value = __ldcg(a.shard + row * a.width + column);
      send(round.mailbox(0, peers.rank) + i, pack(__float_as_uint(value), round.number));
      continue;
    }
    for (int r = 0; r < peers.world_size; ++r) {
      const int id = r * a.width + column;
      if (id >= a.vocab) break;  // the head's padding
      a.logits[row * a.vocab + id] = r == 0
                                         ? __ldcg(a.shard + row * a.width + column)
                                         : __uint_as_float(round.receive(round.mailbox(0, r) + i));
    }
  }
  Round::end(peers);
}

__global__ void __launch_bounds__(kThreads)
    broadcast_kernel(const __grid_constant__ Peers peers, int32_t* tokens, int n) {
  launch_dependents();
  wait_for_predecessor();
  Round round(peers);
  const int i = static_cast<int>(blockIdx.x);
  if (i < n && peers.rank == 0 && threadIdx.x > 0 && threadIdx.x < peers.world_size) {
    const int peer = static_cast<int>(threadIdx.x);
    send(round.mailbox(peer, 0) + i, pack(static_cast<uint32_t>(tokens[i]), round.number));
  }
  if (i < n && peers.rank != 0 && threadIdx.x == 0) {
    tokens[i] = static_cast<int32_t>(round.receive(round.mailbox(peers.rank, 0) + i));
  }
  Round::end(peers);
}

}  // namespace

cudaError_t all_reduce(const Launch& launch, const Peers& peers, float* partial, int n, float* x) {
  if (n % 2 != 0 || n > peers.capacity) return cudaErrorInvalidValue;
  return launch_kernel(launch, all_reduce_kernel, dim3(kPeerBlocks), kThreads, /*shared_bytes=*/0,
                       peers, partial, n / 2, x);
}

cudaError_t gather_logits(const Launch& launch, const Peers& peers, const GatherArgs& args) {
  if (static_cast<int64_t>(args.batch) * args.width > peers.capacity) return cudaErrorInvalidValue;
  return launch_kernel(launch, gather_kernel, dim3(kPeerBlocks), kThreads, /*shared_bytes=*/0,
                       peers, args);
}

cudaError_t broadcast_tokens(const Launch& launch, const Peers& peers, int32_t* tokens, int n) {
  if (n > kPeerBlocks) return cudaErrorInvalidValue;
  return launch_kernel(launch, broadcast_kernel, dim3(kPeerBlocks), kThreads, /*shared_bytes=*/0,
                       peers, tokens, n);
}

}  // namespace gptfast::cuda
