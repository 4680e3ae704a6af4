#include "ops/cuda/all_reduce.h"

#include "ops/cuda/device.cuh"
#include "ops/cuda/launch.cuh"

namespace gptfast::cuda {
namespace {

/// 16 blocks of 256 threads take 8,192 floats at once, two a thread: a row of the largest models.
/// Few enough to be resident beside the stages before and after.
constexpr int kThreads = 256;

struct Word2 {
  uint64_t a, b;
};

__device__ inline uint64_t pack(uint32_t data, uint32_t round) {
  return static_cast<uint64_t>(round) << 32 | data;
}

__device__ inline void send(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/// Two words; each arrives whole.
__device__ inline void send2(uint64_t* to, const Word2& words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(words.a), "l"(words.b)
               : "memory");
}

__device__ inline uint64_t poll(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

__device__ inline Word2 poll2(const uint64_t* from) {
  Word2 words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.a), "=l"(words.b)
               : "l"(from)
               : "memory");
  return words;
}

__device__ inline uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

/// A round as one thread sees it.
struct Round {
  const Peers& peers;
  const uint32_t number;
  uint64_t begun = 0;

  /// The number is one more than that of the block's last round, which end() stores.
  __device__ explicit Round(const Peers& p) : peers(p), number(__ldcg(p.rounds + blockIdx.x) + 1) {}

  __device__ uint64_t* mailbox(int owner, int source) const {
    const int64_t half = number & 1U;
    return peers.mailbox[owner] + (half * peers.world_size + source) * peers.capacity;
  }

  /// True while it is worth asking again whether words have come.
  __device__ bool wait_on() {
    if (peers.limit_ns == 0) return true;
    const uint64_t now = now_ns();
    if (begun == 0) begun = now;
    if (now - begun < peers.limit_ns) return true;
    *peers.failed = 1;
    return false;
  }

  __device__ uint32_t receive(const uint64_t* from) {
    uint64_t word = poll(from);
    while (static_cast<uint32_t>(word >> 32) != number && wait_on()) word = poll(from);
    return static_cast<uint32_t>(word);
  }

  __device__ float2 receive2(const uint64_t* from) {
    Word2 words = poll2(from);
    while ((static_cast<uint32_t>(words.a >> 32) != number ||
            static_cast<uint32_t>(words.b >> 32) != number) &&
           wait_on()) {
      words = poll2(from);
    }
    return {__uint_as_float(static_cast<uint32_t>(words.a)),
            __uint_as_float(static_cast<uint32_t>(words.b))};
  }

  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) peers.rounds[blockIdx.x] = number;
  }
};

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
    const Word2 words = {pack(__float_as_uint(own.x), round.number),
                         pack(__float_as_uint(own.y), round.number)};
    for (int r = 1; r < peers.world_size; ++r) {  // each rank begins with another peer
      const int peer = (peers.rank + r) % peers.world_size;
      send2(round.mailbox(peer, peers.rank) + 2 * i, words);
    }
  }
  for (int i = first_index(); i < pairs; i += kStride) {
    const float2 own = __ldcg(reinterpret_cast<const float2*>(partial) + i);
    float2 out = __ldcg(reinterpret_cast<const float2*>(x) + i);
    float2 sum = {0.0F, 0.0F};
    for (int r = 0; r < peers.world_size; ++r) {
      const float2 part =
          r == peers.rank ? own : round.receive2(round.mailbox(peers.rank, r) + 2 * i);
      sum.x += part.x;
      sum.y += part.y;
    }
    out.x += sum.x;
    out.y += sum.y;
    reinterpret_cast<float2*>(x)[i] = out;
    reinterpret_cast<float2*>(partial)[i] = {0.0F, 0.0F};
  }
  round.end();
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
  round.end();
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
  round.end();
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
