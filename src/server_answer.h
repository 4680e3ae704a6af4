// From the engine's tokens to the text and the JSON that clients read.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gptfast/tokenizer.h"
#include "server_engine.h"
#include "server_request.h"

namespace gptfast::server {

/// Valid JSON whatever the text holds.
std::string dump(const nlohmann::ordered_json& value);
nlohmann::ordered_json error_json(int status, const std::string& message);
/// What one token adds to a running text; "" for ids that the tokenizer does not have.
std::string token_text(const Tokenizer& tokenizer, int32_t id);

/// Lets text through up to the first stop string; holds back what may become one.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  /// What can be shown now.
  std::string push(const std::string& text);
  /// What was held back, when no more text comes.
  std::string finish();
  /// A stop string was met; nothing comes after it.
  bool stopped() const { return !met_.empty(); }
  const std::string& met() const { return met_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string met_;
};

/// One choice of an answer: gathers tokens, text and log-probabilities.
class Choice {
 public:
  Choice(const Tokenizer& tokenizer, const CompletionRequest& request,
         std::shared_ptr<Sequence> sequence);

  /// Takes an event that is no failure. True when the choice is complete.
  bool take(const Event& event);
  /// Text since the last call.
  std::string take_text();
  /// OpenAI's logprobs object of the tokens since the last call.
  nlohmann::ordered_json take_logprobs();

  bool complete() const { return complete_; }
  const char* finish_reason() const;  ///< "stop" or "length"
  FinishReason reason() const { return reason_; }
  const std::string& stop_string() const { return filter_.met(); }
  int64_t tokens() const { return tokens_; }
  Sequence& sequence() { return *sequence_; }

 private:
  std::string decode(int32_t id);
  void append_prompt_logprobs(const Event& event);
  void append_logprob(int32_t token, const TokenLogprob& logprob);
  void append_token(int32_t token, nlohmann::ordered_json logprob, nlohmann::ordered_json top);

  const Tokenizer& tokenizer_;
  std::shared_ptr<Sequence> sequence_;
  StreamDecoder decoder_;
  StopFilter filter_;
  std::string text_;
  nlohmann::ordered_json logprobs_;
  int64_t offset_ = 0;  // characters of the tokens' texts so far
  int64_t tokens_ = 0;
  bool complete_ = false;
  FinishReason reason_ = FinishReason::kStop;
};

}  // namespace gptfast::server
