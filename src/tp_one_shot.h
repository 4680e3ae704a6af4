// The all-reduce of a step between GPUs of one host, through one another's memory
// (ops/cuda/all_reduce.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "gptfast/ops.h"

namespace c10d {
class Store;
}

namespace gptfast {

/// What connects one rank with its peers' mailboxes. Enqueues on the current stream, also while it
/// is captured; never waits on the host.
class OneShot {
 public:
  /// Sums a float32 tensor over all ranks by other means, in place.
  using AllReduce = std::function<void(at::Tensor)>;

  /// Maps the peers' memory and compares a few sums with `all_reduce`. A collective with one
  /// outcome for all ranks: null where it does not work on one of them, and then `why_not` is the
  /// reason.
  static std::unique_ptr<OneShot> connect(c10d::Store& store, int rank, int world_size,
                                          at::Device device, const AllReduce& all_reduce,
                                          std::string& why_not);
  /// Without close() before, the memory stays: a peer may be writing to it.
  ~OneShot();
  OneShot(const OneShot&) = delete;
  OneShot& operator=(const OneShot&) = delete;

  /// x += the sum of all ranks' in w^T, sent as it is computed. The kernels support w, and takes()
  /// is true for the rows of x.
  void add_product(int64_t rows, const at::Tensor& in, const LinearImpl& w, at::Tensor& x);
  /// True for what add_partials() takes: float32, contiguous, on the device, not too large.
  bool takes(const at::Tensor& x) const;
  /// Zeros in the shape of x, for add_partials(); one tensor for all calls.
  at::Tensor partial_for(const at::Tensor& x);
  /// x += the sum of all ranks' partial, which is zero again afterwards.
  void add_partials(at::Tensor& partial, at::Tensor& x);

  /// True if sample() takes shards [.., head_rows].
  bool takes_shards(int64_t head_rows) const;
  /// As TensorParallel::sample.
  void sample(const StepRows& rows, const at::Tensor& shard, const SamplingParams& params,
              at::Tensor& logits, at::Tensor& next);

  /// Lets go of the memory; `meet` waits for all ranks. Nothing may be running any more.
  void close(const std::function<void(const std::string&)>& meet);

 private:
  struct Impl;
  explicit OneShot(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace gptfast
