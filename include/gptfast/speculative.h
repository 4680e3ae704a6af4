// Speculative decoding: a cheap guess at the next k tokens, verified by one pass of the model over
// all of them (generate.py, speculative_decode; Leviathan et al., "Fast inference from transformers
// via speculative decoding", 2023; Chen et al., "Accelerating large language model decoding with
// speculative sampling", 2023). Exact: tokens follow the model's own distribution, and at
// temperature 0 they are those of plain decoding.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gptfast/model.h"
#include "gptfast/sampling.h"

namespace gptfast {

constexpr int64_t kMaxSpeculateK = 64;

/// Guessed tokens and the distributions they were drawn from.
struct Draft {
  std::vector<int32_t> tokens;
  Tensor probs;  ///< [tokens, V] float32; undefined when every token was certain (greedy, lookup)
};

/// Throws unless `draft` can draft for `target` over texts of max_seq_length tokens: the same
/// vocabulary, a long enough context.
void check_draft_model(const TransformerImpl& draft, const TransformerImpl& target,
                       int64_t max_seq_length);

/// Drafts by a smaller model. Keeps the draft's cache in step with the text: what the draft has not
/// seen yet is fed in the next call.
class DraftModel {
 public:
  /// Fills the draft's cache with the prompt at positions 0 ..
  DraftModel(Transformer& draft, std::span<const int32_t> prompt, int64_t max_seq_length);

  /// Up to k tokens after `text` (all tokens so far; the last is not in any cache yet), drawn with
  /// the target's settings.
  Draft draft(std::span<const int32_t> text, int64_t k, const SamplingOptions& sampling);
  /// Tokens of `text` from position `used` on were rejected or are new: their cache entries do not
  /// count.
  void keep(int64_t used) { cached_ = std::min(cached_, used); }

 private:
  Transformer& draft_;
  int64_t cached_;  // positions of the draft's cache that hold the text
};

/// Prompt lookup: the k tokens that followed the latest earlier occurrence of the text's longest
/// suffix of up to kLookupNgram tokens; none when no suffix occurs twice.
std::vector<int32_t> lookup_draft(std::span<const int32_t> text, int64_t k);
constexpr int64_t kLookupNgram = 3;

/// Runs `tokens` (the last token of the text and the drafted ones) through the model at positions
/// pos.. of slot 0, in steps of at most kMaxStepRows rows. Returns logits [tokens, V] float32; each
/// row equals, bit for bit, what plain decoding would see.
Tensor verify(Transformer& model, std::span<const int32_t> tokens, int64_t pos);

/// The tokens that a round adds: accepted drafts and one more, from the residual distribution after
/// a rejection, else from the model's row behind the last draft. logits [draft + 1, V], row i for
/// position pos + i. A NaN row gives -1.
std::vector<int32_t> accept(const Draft& draft, const Tensor& logits,
                            const SamplingOptions& sampling, int64_t pos);

}  // namespace gptfast
