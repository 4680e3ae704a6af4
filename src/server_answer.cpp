#include "server_answer.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace gptfast::server {

using nlohmann::ordered_json;

namespace {

int64_t count_characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
}

}  // namespace

std::string dump(const ordered_json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
}

ordered_json error_json(int status, const std::string& message) {
  const char* type = status >= 500   ? "server_error"
                     : status == 401 ? "authentication_error"
                                     : "invalid_request_error";
  return {{"error", {{"message", message}, {"type", type}, {"code", status}}}};
}

std::string token_text(const Tokenizer& tokenizer, int32_t id) {
  try {
    // In the middle of a text: at its start SentencePiece would drop a space.
    const std::vector<int32_t> before = tokenizer.encode("a");
    std::vector<int32_t> both = before;
    both.push_back(id);
    const std::string prefix = tokenizer.decode(before);
    return to_valid_utf8(tokenizer.decode(both).substr(prefix.size()));
  } catch (const c10::Error&) {
    return "";
  }
}

// ---- StopFilter

std::string StopFilter::push(const std::string& text) {
  if (stopped()) return "";
  held_ += text;
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at >= first) continue;
    first = at;
    met_ = stop;
  }
  if (stopped()) return held_.substr(0, first);
  size_t keep = 0;  // longest end of the text that begins a stop string
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (held_.ends_with(std::string_view(stop).substr(0, n))) keep = n;
    }
  }
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopFilter::finish() {
  return stopped() ? "" : std::exchange(held_, "");
}

// ---- Choice

Choice::Choice(const Tokenizer& tokenizer, const CompletionRequest& request,
               std::shared_ptr<Sequence> sequence)
    : tokenizer_(tokenizer),
      sequence_(std::move(sequence)),
      decoder_(tokenizer),
      filter_(request.stop) {
  // The decoder has seen the prompt, so that the seam is right; an answer in a chat is a text of
  // its own.
  if (request.api == Api::kChat) return;
  std::string echo;
  for (const int32_t id : sequence_->prompt) echo += decode(id);
  if (request.echo) text_ = echo;
}

std::string Choice::decode(int32_t id) {
  try {
    return decoder_.push(id);
  } catch (const c10::Error&) {
    return "";  // a model may have more ids than its tokenizer
  }
}

bool Choice::take(const Event& event) {
  if (complete_) return true;
  if (event.kind == Event::Kind::kPrompt) {
    append_prompt_logprobs(event);
  } else if (event.kind == Event::Kind::kToken) {
    ++tokens_;
    if (event.logprob) append_logprob(event.token, *event.logprob);
    const auto& stop = sequence_->stop_tokens;
    if (std::find(stop.begin(), stop.end(), event.token) == stop.end())
      text_ += filter_.push(decode(event.token));
    if (filter_.stopped()) {
      sequence_->cancelled = true;
      complete_ = true;
    }
  } else {
    reason_ = event.reason;
    complete_ = true;
    text_ += filter_.push(decoder_.finish());
    text_ += filter_.finish();
  }
  return complete_;
}

void Choice::append_prompt_logprobs(const Event& event) {
  append_token(sequence_->prompt[0], nullptr, nullptr);
  for (size_t i = 0; i < event.prompt.size(); ++i)
    append_logprob(sequence_->prompt[i + 1], event.prompt[i]);
}

void Choice::append_logprob(int32_t token, const TokenLogprob& logprob) {
  ordered_json top = ordered_json::object();
  // The best comes first and stays when another token has the same text.
  for (const auto& [id, value] : logprob.top) top.emplace(token_text(tokenizer_, id), value);
  top.emplace(token_text(tokenizer_, token), logprob.logprob);
  append_token(token, logprob.logprob, std::move(top));
}

void Choice::append_token(int32_t token, ordered_json logprob, ordered_json top) {
  const std::string text = token_text(tokenizer_, token);
  logprobs_["tokens"].push_back(text);
  logprobs_["token_logprobs"].push_back(std::move(logprob));
  logprobs_["top_logprobs"].push_back(std::move(top));
  logprobs_["text_offset"].push_back(offset_);
  offset_ += count_characters(text);
}

std::string Choice::take_text() {
  return std::exchange(text_, "");
}

ordered_json Choice::take_logprobs() {
  return sequence_->logprobs < 0 ? ordered_json() : std::exchange(logprobs_, ordered_json());
}

const char* Choice::finish_reason() const {
  return reason_ == FinishReason::kStop ? "stop" : "length";
}

}  // namespace gptfast::server
