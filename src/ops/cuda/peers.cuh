// Words that GPUs of one host write into one another's memory (all_reduce.h).
#pragma once

#include "ops/cuda/all_reduce.h"

namespace gptfast::cuda {

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

  /// Pair i of this rank's data to all others, each rank beginning with another one.
  __device__ void send_pair(int i, float2 pair) const {
    const Word2 words = {pack(__float_as_uint(pair.x), number),
                         pack(__float_as_uint(pair.y), number)};
    for (int r = 1; r < peers.world_size; ++r) {
      const int peer = (peers.rank + r) % peers.world_size;
      send2(mailbox(peer, peers.rank) + 2 * i, words);
    }
  }

  /// Pair i of all ranks, added in their order: the same bits everywhere.
  __device__ float2 add_pairs(int i, float2 own) {
    float2 sum = {0.0F, 0.0F};
    for (int r = 0; r < peers.world_size; ++r) {
      const float2 part = r == peers.rank ? own : receive2(mailbox(peers.rank, r) + 2 * i);
      sum.x += part.x;
      sum.y += part.y;
    }
    return sum;
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

  /// Every thread of the grid calls it, when no thread of its block will look at the number again.
  __device__ static void end(const Peers& peers) {
    __syncthreads();
    const unsigned i = blockIdx.x + threadIdx.x * gridDim.x;
    if (i < kPeerCounters) peers.rounds[i] = __ldcg(peers.rounds + i) + 1;
  }
};

}  // namespace gptfast::cuda
