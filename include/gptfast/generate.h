// Text generation: prefill, then one token at a time (generate.py).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gptfast/model.h"
#include "gptfast/sampling.h"

namespace gptfast {

struct GenerateOptions {
  int64_t max_new_tokens = 200;
  int64_t batch_size = 1;  ///< rows of the same prompt; row b samples with seed + b
  SamplingOptions sampling;
  std::vector<int32_t> stop_tokens;    ///< empty: never stop early (--ignore_eos)
  bool return_logits = false;          ///< keep the logits of every token that was fed (row 0)
  Transformer* draft_model = nullptr;  ///< speculative decoding with this draft; batch_size 1 only
  bool lookup = false;                 ///< speculative decoding by prompt lookup
  int64_t speculate_k = 5;             ///< drafted tokens a round
  int64_t start_pos = 0;  ///< cache positions that already hold the conversation so far
  /// Called for each new token as soon as it is known; returning false ends that row ("stop").
  std::function<bool(int64_t row, int32_t token)> callback;
};

enum class FinishReason { kStop, kLength, kContext };
/// "stop", "length" or "context".
const char* to_string(FinishReason reason);

struct GeneratedRow {
  std::vector<int32_t> tokens;  ///< the new ones; a stop token is the last of them
  FinishReason finish_reason = FinishReason::kLength;
};

struct GenerateResult {
  std::vector<GeneratedRow> rows;      ///< [batch_size]
  double seconds = 0;                  ///< all of generate(), as the original times it
  double prefill_seconds = 0;          ///< up to and including the first new token
  std::vector<int64_t> accept_counts;  ///< speculation only: rounds that added i + 1 tokens
  Tensor logits;                       ///< [tokens fed, V] float32 when return_logits

  int64_t new_tokens() const;  ///< of all rows
  /// New tokens / seconds, prefill included (the original's figure).
  double tokens_per_sec() const;
  double decode_tokens_per_sec() const;  ///< without the prefill and its token
};

/// Continues `prompt` (ids, BOS included where wanted) by up to max_new_tokens. Throws before any
/// work when the prompt is empty, holds ids outside the vocabulary or does not fit the context; a
/// row that reaches the context's end finishes with kContext. NaN logits throw, naming the
/// position.
GenerateResult generate(Transformer& model, const std::vector<int32_t>& prompt,
                        const GenerateOptions& options);

/// Runs `prompt` at positions start_pos .. of cache slot 0 and returns the logits of its last
/// position, [1, V] float32 (prefill of generate.py without the sampling). `all_logits`, when
/// given, receives [S, V] float32.
Tensor prefill(Transformer& model, const std::vector<int32_t>& prompt, int64_t start_pos,
               Tensor* all_logits = nullptr);

}  // namespace gptfast
