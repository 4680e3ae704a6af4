// One round of speculative decoding - drafted tokens, verification, acceptance - as one CUDA graph:
// how many tokens were accepted, where the text stands and what comes next stay on the device, and
// the host reads tokens one round behind. Semantics and random numbers are those of speculative.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gptfast/model.h"
#include "gptfast/sampling.h"

namespace gptfast {

/// Captured for one model, one draft (a model or, without one, prompt lookup), their caches as they
/// are, and one k. Models must be supported() and outlive the graph. Functions throw c10::Error
/// with CUDA's message when it fails.
class SpeculativeGraph {
 public:
  /// True if a round of `model` with `draft` (nullptr: lookup) never needs the host.
  static bool supported(TransformerImpl& model, TransformerImpl* draft);

  /// For rounds that draft `k` tokens (1 to kMaxSpeculateK) and write to slot 0 of the caches; the
  /// first start() captures.
  SpeculativeGraph(TransformerImpl& model, const std::shared_ptr<TransformerImpl>& draft,
                   int64_t k);
  ~SpeculativeGraph();
  SpeculativeGraph(const SpeculativeGraph&) = delete;
  SpeculativeGraph& operator=(const SpeculativeGraph&) = delete;

  /// True if it was made for this draft, with the caches that the draft has now, and this k.
  bool is_for(const std::shared_ptr<TransformerImpl>& draft, int64_t k) const;

  /// The next launch continues `text` of at least 2 tokens, whose last token is in no cache yet
  /// (the draft's may lack the one before, too). Rounds add tokens until the text has `end`, at
  /// most the caches' length. Rounds launched before and not read are dropped.
  void start(std::span<const int32_t> text, int64_t end, const SamplingOptions& sampling);
  /// Enqueues one round after those launched before. At most kMaxAhead may be unread.
  void launch();
  /// Waits for the oldest round that was not read: the tokens it added, none after the text's end.
  /// A last token of -1: the model's logits are NaN.
  std::vector<int32_t> read();

  /// For benchmarks: round i accepts accepted[i % size] drafted tokens (0 to k) whatever they are;
  /// empty: as it should be.
  void force_acceptance(const std::vector<int32_t>& accepted);

  static constexpr int64_t kMaxAhead = 2;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gptfast
