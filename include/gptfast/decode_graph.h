// One decode step - embedding to sampled token - as one CUDA graph, replayed without the host:
// token, position and settings live on the device, and the host reads tokens one step behind.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gptfast/model.h"
#include "gptfast/sampling.h"

namespace gptfast {

/// Captured for one model, its caches as they are, and one batch size. The model must be
/// supported() and outlive the graph.
class DecodeGraph {
 public:
  /// True if every op of a step of `model` is a kernel on its device.
  static bool supported(TransformerImpl& model);

  /// For steps of `batch_size` rows (1 to kMaxStepRows); the first start() captures. These
  /// functions throw c10::Error with CUDA's message when it fails.
  DecodeGraph(TransformerImpl& model, int64_t batch_size);
  ~DecodeGraph();
  DecodeGraph(const DecodeGraph&) = delete;
  DecodeGraph& operator=(const DecodeGraph&) = delete;

  /// The next launch feeds `tokens` [B] at positions `pos` [B] of the caches' slots `slot` [B],
  /// after what the caller's stream does. `params` may be on the host. No step may be unread.
  void start(const std::vector<int32_t>& tokens, const std::vector<int32_t>& pos,
             const std::vector<int32_t>& slot, const SamplingParams& params);
  /// Enqueues one step; each feeds the tokens that the one before sampled. At most kMaxAhead steps
  /// may be unread.
  void launch();
  /// Waits for the oldest step that was not read: its sampled tokens [B].
  std::vector<int32_t> read();
  /// A copy of the first `rows` logits [rows, V] float32 of the step that was read last. No step
  /// may be unread.
  Tensor logits(int64_t rows);
  /// Waits for all launched steps, which write to the model's buffers, and forgets those not read.
  void drop();

  static constexpr int64_t kMaxAhead = 4;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gptfast
