#include "server_exchange.h"

#include <algorithm>
#include <atomic>

namespace gptfast::server {

using nlohmann::ordered_json;

namespace {

/// How often it is looked whether a client still waits for an answer that is not yet written.
constexpr std::chrono::milliseconds kCheckInterval(100);

std::string make_id(Api api) {
  static std::atomic<uint64_t> count = 0;
  return (api == Api::kChat ? "chatcmpl-" : "cmpl-") + std::to_string(std::time(nullptr)) + "-" +
         std::to_string(++count);
}

std::string server_sent(const ordered_json& value) {
  return "data: " + dump(value) + "\n\n";
}

}  // namespace

Exchange::Exchange(const Tokenizer& tokenizer, const CompletionRequest& request,
                   std::vector<std::shared_ptr<Sequence>> sequences, std::string model_name)
    : request_(request),
      sequences_(std::move(sequences)),
      model_name_(std::move(model_name)),
      id_(make_id(request.api)) {
  choices_.reserve(sequences_.size());
  for (const auto& sequence : sequences_) choices_.emplace_back(tokenizer, request_, sequence);
}

void Exchange::cancel() {
  for (const auto& sequence : sequences_) sequence->cancelled = true;
}

bool Exchange::client_is_there(const std::function<bool()>& is_writable) {
  const auto now = Clock::now();
  if (now - last_check_ < kCheckInterval) return true;
  last_check_ = now;
  return is_writable();
}

bool Exchange::provide(const std::function<bool(const std::string&)>& write,
                       const std::function<bool()>& is_writable,
                       const std::function<void()>& done) {
  std::string out;
  if (request_.stream && !std::exchange(started_, true)) out += first_chunks();
  const auto event = sequences_[0]->channel->pop(kCheckInterval);
  if (!client_is_there(is_writable)) return false;
  if (event && !take(*event, out)) {
    if (request_.stream)
      write(out);  // the error as an event; without a stream the answer breaks off
    return false;
  }
  const bool complete = std::all_of(choices_.begin(), choices_.end(),
                                    [](const Choice& choice) { return choice.complete(); });
  if (complete) out += request_.stream ? last_chunks() : whole();
  if (!out.empty() && !write(out)) return false;
  if (complete) done();
  return true;
}

/// Adds what a stream shows of the event. False when it is a failure.
bool Exchange::take(const Event& event, std::string& out) {
  if (event.kind == Event::Kind::kFailed) {
    out += server_sent(error_json(500, event.message));
    return false;
  }
  Choice& choice = choices_[event.sequence];
  if (choice.complete()) return true;  // the engine had not yet seen that it is
  choice.take(event);
  if (request_.stream) out += chunk(choice);
  return true;
}

// ---- Streams

/// What comes before the first token: the role of a chat.
std::string Exchange::first_chunks() {
  if (request_.api != Api::kChat) return "";
  std::string out;
  for (size_t i = 0; i < choices_.size(); ++i) {
    ordered_json value = envelope("chat.completion.chunk");
    value["choices"] = ordered_json::array({{{"index", i},
                                             {"delta", {{"role", "assistant"}, {"content", ""}}},
                                             {"finish_reason", nullptr}}});
    out += server_sent(value);
  }
  return out;
}

std::string Exchange::chunk(Choice& choice) {
  if (request_.api == Api::kLlamaCpp) {
    ordered_json value = llama_cpp_answer(choice, choice.complete());
    const bool empty = value["content"].get_ref<const std::string&>().empty();
    return empty && !choice.complete() ? "" : server_sent(value);
  }
  ordered_json shown = openai_choice(choice, /*chunk=*/true);
  const bool chat = request_.api == Api::kChat;
  const auto& text = chat ? shown["delta"]["content"] : shown["text"];
  const bool empty =
      text.get_ref<const std::string&>().empty() && (chat || shown["logprobs"].is_null());
  if (empty && !choice.complete()) return "";
  ordered_json value = envelope(chat ? "chat.completion.chunk" : "text_completion");
  value["choices"] = ordered_json::array({std::move(shown)});
  return server_sent(value);
}

std::string Exchange::last_chunks() {
  if (request_.api == Api::kLlamaCpp) return "";
  std::string out;
  if (request_.include_usage) {
    ordered_json value =
        envelope(request_.api == Api::kChat ? "chat.completion.chunk" : "text_completion");
    value["choices"] = ordered_json::array();
    value["usage"] = usage();
    out += server_sent(value);
  }
  return out + "data: [DONE]\n\n";
}

// ---- Whole answers

std::string Exchange::whole() {
  if (request_.api == Api::kLlamaCpp) return dump(llama_cpp_answer(choices_[0], /*final=*/true));
  ordered_json value = envelope(request_.api == Api::kChat ? "chat.completion" : "text_completion");
  value["choices"] = ordered_json::array();
  for (Choice& choice : choices_) value["choices"].push_back(openai_choice(choice, false));
  value["usage"] = usage();
  return dump(value);
}

ordered_json Exchange::envelope(const char* object) const {
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_name_}};
}

ordered_json Exchange::openai_choice(Choice& choice, bool chunk) {
  ordered_json value = {{"index", choice.sequence().number}};
  if (request_.api == Api::kChat) {
    ordered_json message = {{"role", "assistant"}, {"content", choice.take_text()}};
    if (chunk) message.erase("role");
    value[chunk ? "delta" : "message"] = std::move(message);
  } else {
    value["text"] = choice.take_text();
    value["logprobs"] = choice.take_logprobs();
  }
  value["finish_reason"] = nullptr;
  if (choice.complete()) value["finish_reason"] = choice.finish_reason();
  return value;
}

ordered_json Exchange::llama_cpp_answer(Choice& choice, bool final) {
  ordered_json value = {{"index", 0}, {"content", choice.take_text()}, {"stop", final}};
  if (!final) return value;
  const bool word = !choice.stop_string().empty();
  const bool eos = !word && choice.reason() == FinishReason::kStop;
  value["model"] = model_name_;
  value["stop_type"] = word ? "word" : eos ? "eos" : "limit";
  value["stopping_word"] = choice.stop_string();
  value["tokens_predicted"] = choice.tokens();
  value["tokens_evaluated"] = choice.sequence().prompt.size();
  return value;
}

ordered_json Exchange::usage() const {
  int64_t prompt = 0, completion = 0;
  for (size_t i = 0; i < choices_.size(); ++i) {
    if (static_cast<int64_t>(i) % request_.n == 0)  // the answers to one prompt share it
      prompt += static_cast<int64_t>(sequences_[i]->prompt.size());
    completion += choices_[i].tokens();
  }
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion}};
}

}  // namespace gptfast::server
