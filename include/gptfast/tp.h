// Tensor parallelism: one model on several ranks, each with a share of every large matrix (tp.py).
//
// Every rank runs the same program on the same prompt. wqkv, w1, w3 and the head are cut by rows
// (column-wise parallel, whole heads), wo and w2 by columns (row-wise parallel): their products are
// partial sums, which one all-reduce of the residual stream adds up. Rank 0 samples and tells the
// others the token, so ranks cannot drift apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gptfast/config.h"
#include "gptfast/ops.h"

namespace gptfast {

using at::Tensor;
class StateDict;
enum class Int4Layout;

/// This process's place among the ranks, as torchrun tells it.
struct RankInfo {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< among the ranks of this host
  int local_world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  bool agent_store = false;      ///< the launcher, not rank 0, serves the rendezvous
  std::string run = "0";         ///< tells restarts that share a launcher's rendezvous apart
  std::optional<int> listen_fd;  ///< rank 0: a socket that already listens on master_port
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. nullopt when
/// WORLD_SIZE is unset or 1. Throws naming the variable that is missing or makes no sense.
std::optional<RankInfo> rank_from_environment();

/// The device of a rank: `requested`, with a GPU chosen by the rank's place on its host. Throws
/// with both numbers when the host has more ranks than visible GPUs.
at::Device device_of_rank(const RankInfo& info, at::Device requested);

/// Starts `world_size` ranks of this very program (/proc/self/exe with `argv`) on this host, in the
/// process group of the caller, and waits for them. Rank 0 has the caller's stdin, stdout and
/// stderr; what other ranks print is shown only when they fail. SIGINT, SIGTERM and SIGHUP are
/// passed on. The first rank that fails ends all. Returns the exit status for main(): 0, that of
/// the rank that failed first, or 128 + signal. Call it before any thread exists.
int launch_local_ranks(int world_size, char** argv);

/// Exit status of a rank that ended only because another was lost: launch_local_ranks looks
/// elsewhere for the reason.
constexpr int kPeerLostStatus = 75;  // EX_TEMPFAIL

/// The communication of one rank. Every member function is a collective: all ranks must call it, in
/// the same order. On CPU ranks it runs over Gloo, on GPUs over NCCL, on the current stream and so
/// also inside a captured graph.
class TensorParallel {
 public:
  /// Called (once, from a thread of this object) when another rank ended early or has gone silent
  /// for 6 s: only the end of the process frees a rank that waits for it. The message is one line.
  using PeerLostHandler = std::function<void(const std::string& message)>;

  /// Meets the other ranks; waits up to 300 s for them. Throws when the port is taken or a rank
  /// does not come.
  static std::shared_ptr<TensorParallel> connect(const RankInfo& info, at::Device device,
                                                 PeerLostHandler on_peer_lost);
  /// Without finish() before, the other ranks take this one for lost.
  ~TensorParallel();
  TensorParallel(const TensorParallel&) = delete;
  TensorParallel& operator=(const TensorParallel&) = delete;

  int rank() const;              ///< this rank, 0 .. world_size() - 1
  int world_size() const;        ///< all ranks
  int local_world_size() const;  ///< ranks on this host
  at::Device device() const;     ///< where this rank computes
  /// How sum_into() adds up: "gloo", "nccl" or "one-shot" (GPUs of one host that can write to one
  /// another's memory). ENABLE_INTRA_NODE_COMM=0 in the environment forces NCCL, 1 one-shot.
  const char* all_reduce_path() const;

  /// Throws the same message on every rank, naming the first fact on which one of them disagrees
  /// with rank 0 and both values.
  using Facts = std::vector<std::pair<std::string, std::string>>;
  void check_agreement(const Facts& facts);
  /// Ends in order: waits until all ranks have come here. Captured graphs must be gone by then, and
  /// no other member may be called after it.
  void finish();

  /// Adds up `x` of all ranks, in place. Contiguous, floating.
  void all_reduce(Tensor x);
  /// x += the sum over all ranks of what `add_partial` adds to the tensor that it is given: this
  /// rank's part of a row-wise product. `x` is the same on every rank, before and after.
  void sum_into(Tensor x, const std::function<void(Tensor&)>& add_partial);
  /// x [>= rows, N] += the sum over all ranks of in w^T: sum_into() of a row-wise product, which
  /// GPUs that can write to one another's memory send while they compute it.
  void add_product(int64_t rows, const Tensor& in, const LinearImpl& w, Tensor& x);
  /// Rank 0's `x` on every rank, in place. Contiguous.
  void broadcast(Tensor x);
  /// Rank 0's list on every rank.
  std::vector<int32_t> broadcast(const std::vector<int32_t>& values);

  /// Rows of the head on each rank: ceil(V / world_size). Those past V are padding.
  int64_t head_rows(int64_t vocab_size) const;
  /// Logits [..., vocab_size] of shards [..., head_rows].
  Tensor gather_logits(const Tensor& shard, int64_t vocab_size);
  /// The sampling of a step: next[b] on every rank from the ranks' `shard` [kMaxStepRows,
  /// head_rows]. On the CPU only the candidates that top_k and temperature leave cross the network;
  /// on GPUs, which cannot choose how much to send without asking the host, it is all logits.
  /// `gathered` [world_size, kMaxStepRows, head_rows] and `logits` [kMaxStepRows, V] are scratch.
  void sample(const StepRows& rows, const Tensor& shard, const SamplingParams& params,
              Tensor& gathered, Tensor& logits, Tensor& next);

 private:
  struct Impl;
  void choose_all_reduce(std::optional<bool> one_shot);
  /// logits [M, V] on rank 0 of all ranks' shards [M, head_rows].
  void gather_rows(const Tensor& shard, Tensor& gathered, Tensor& logits);
  /// The same with only the `count` largest logits of each rank and batch entry; others -inf.
  void gather_candidates(const StepRows& rows, const Tensor& shard, int64_t count, Tensor& logits);
  explicit TensorParallel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// The configuration of one rank's share: n_head, n_local_heads and intermediate_size divided.
/// Fewer key/value heads than ranks are replicated. Throws with the numbers when something does not
/// divide.
ModelArgs shard_config(const ModelArgs& config, int world_size);

/// One rank's share of a checkpoint of the whole model (`config`), made from views where a share is
/// contiguous, so that nothing else of the file is read. Names stay; formats stay, but an int4
/// weight whose tiles (in `int4_layout`) the cut would divide becomes canonical_int4. Throws with
/// the numbers when the group size of an int4 weight does not divide the share's columns.
StateDict shard_state_dict(const StateDict& tensors, const ModelArgs& config, int rank,
                           int world_size, Int4Layout int4_layout);

/// A short text that differs between different checkpoint files: size and a hash of both ends,
/// where the zip directory with its checksums lies.
std::string checkpoint_fingerprint(const std::filesystem::path& file);

}  // namespace gptfast
