// Communication between the GPUs of one host through memory that they map into one another: what a
// step needs of it, as kernels that a graph can hold. No NVLink multicast.
//
// Every rank has a mailbox in its own memory, into which all ranks write 8-byte words: 4 bytes of
// data and the number of the round. A word arrives whole, so that the number tells the reader that
// the data is there: no fence, no flag, one trip over the link (the LL protocol of NCCL). Rounds
// use the two halves of a mailbox in turn. That is enough, because no rank ends a sum before all
// have begun it, and so have read what the round before brought.
#pragma once

#include <cstdint>

#include "ops/cuda/kernels.h"

namespace gptfast::cuda {

constexpr int kMaxPeers = 8;
constexpr int kPeerBlocks = 16;  ///< of the kernels below
/// A block of a round reads a counter of its own, so that none waits for another; every round moves
/// all counters on. At least as many as a grid has blocks (no more than the GPU multiprocessors),
/// at most as many as a block has threads.
constexpr int kPeerCounters = 256;

/// One rank's view of the mailboxes. All ranks run the same rounds in the same order.
struct Peers {
  int rank = 0;
  int world_size = 1;
  int64_t capacity = 0;               ///< words of one rank in one half; even
  uint64_t* mailbox[kMaxPeers] = {};  ///< of each rank: [2, world_size, capacity], zero at first
  uint32_t* rounds = nullptr;         ///< [kPeerCounters] in this rank's memory, zero at first
  uint32_t* failed = nullptr;         ///< set when `limit_ns` ran out; the results are then wrong
  uint64_t limit_ns = 0;              ///< how long a round may wait for the others; 0: forever
};

/// x [n] += the sum of all ranks' partial [n], added in the order of the ranks: the same bits
/// everywhere. Leaves partial zero. n is even, n <= capacity.
cudaError_t all_reduce(const Launch& launch, const Peers& peers, float* partial, int n, float* x);

/// x [rows, n] += the sum of all ranks' in w^T, with the same bits everywhere: residual_stage whose
/// blocks send what they find and wait for the same of the others. rows * n <= capacity, n is even.
/// All blocks of all ranks must be resident at once: one rank a GPU.
cudaError_t residual_stage(const Launch& launch, const StageInput& in, const Weight& w, float* x,
                           const Peers& peers);

/// Logits that rank 0 needs to sample: of each of `batch` entries the last of its `seq_len` rows.
struct GatherArgs {
  const float* shard = nullptr;  ///< [batch * seq_len, width], this rank's part of the vocabulary
  int width = 0;
  float* logits = nullptr;  ///< rank 0: [batch * seq_len, vocab]
  int vocab = 0;
  int batch = 0;
  int seq_len = 1;
};
/// batch * width <= capacity. A gather_logits must be followed by broadcast_tokens.
cudaError_t gather_logits(const Launch& launch, const Peers& peers, const GatherArgs& args);

/// tokens [n] of rank 0 to all, n <= kPeerBlocks.
cudaError_t broadcast_tokens(const Launch& launch, const Peers& peers, int32_t* tokens, int n);

}  // namespace gptfast::cuda
