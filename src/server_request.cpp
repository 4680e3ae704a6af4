#include "server_request.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <random>
#include <set>

namespace gptfast::server {
namespace {

using nlohmann::json;

constexpr int64_t kMaxLogprobs = 20;  // as much as OpenAI's chat API gives
constexpr size_t kMaxStops = 16;
constexpr int64_t kOpenAiMaxTokens = 16;  // OpenAI's default of /v1/completions

[[noreturn]] void bad(const std::string& message) {
  throw RequestError(400, message);
}

/// The fields of an object: typed getters, and an error for what nobody asked for.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) bad(where_ + " must be a JSON object, got " + object.type_name());
  }

  /// The value, or nullptr when it is absent or null.
  const json* find(const std::string& name) {
    known_.insert(name);
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  std::optional<int64_t> integer(const std::string& name, int64_t low, int64_t high) {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_integer() &&
                      (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
    if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high) {
      bad(path(name) + " must be an integer from " + std::to_string(low) + " to " +
          std::to_string(high) + ", got " + shown(*value));
    }
    return value->get<int64_t>();
  }

  std::optional<double> number(const std::string& name, int64_t low, int64_t high) {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || value->get<double>() < static_cast<double>(low) ||
        value->get<double>() > static_cast<double>(high)) {
      bad(path(name) + " must be a number from " + std::to_string(low) + " to " +
          std::to_string(high) + ", got " + shown(*value));
    }
    return value->get<double>();
  }

  bool boolean(const std::string& name, bool otherwise) {
    const json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) bad(path(name) + " must be true or false, got " + shown(*value));
    return value->get<bool>();
  }

  std::optional<std::string> text(const std::string& name) {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) bad(path(name) + " must be a string, got " + shown(*value));
    return value->get<std::string>();
  }

  /// Fields that may be sent as long as they ask for nothing.
  void only(const std::string& name, std::initializer_list<json> neutral) {
    const json* value = find(name);
    if (value == nullptr) return;
    for (const json& allowed : neutral) {
      if (*value == allowed) return;
    }
    bad(path(name) + " is not supported; leave it out (got " + shown(*value) + ")");
  }

  /// Fields that never change an answer.
  void ignore(std::initializer_list<const char*> names) {
    known_.insert(names.begin(), names.end());
  }

  void refuse_others() const {
    for (const auto& [name, value] : object_.items()) {
      if (!known_.contains(name)) bad("unknown field '" + name.substr(0, 100) + "' in " + where_);
    }
  }

 private:
  std::string path(const std::string& name) const { return "'" + name + "' of " + where_; }
  static std::string shown(const json& value) {
    if (value.is_object() || value.is_array()) return value.type_name();
    return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 100);
  }

  const json& object_;
  std::string where_;
  std::set<std::string> known_;
};

/// BOS in front where the tokenizer's rule puts one and the text has none.
std::vector<int32_t> encode_text(const Tokenizer& tokenizer, const std::string& text,
                                 bool add_special, bool parse_special) {
  std::vector<int32_t> ids = tokenizer.encode(text, parse_special);
  const int32_t bos = tokenizer.bos_id();
  if (add_special && tokenizer.add_bos() && (ids.empty() || ids[0] != bos))
    ids.insert(ids.begin(), bos);
  return ids;
}

std::vector<int32_t> token_ids(const json& list, const std::string& name, int64_t vocab_size) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const json& id : list) {
    const bool fits =
        id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab_size);
    if (!fits) {
      bad("'" + name + "' must hold token ids from 0 to " + std::to_string(vocab_size - 1) +
          ", got " +
          (id.is_structured()
               ? id.type_name()
               : id.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 100)));
    }
    ids.push_back(static_cast<int32_t>(id.get<uint64_t>()));
  }
  return ids;
}

/// A string, a list of ids, or a list of either.
std::vector<std::vector<int32_t>> parse_prompts(const json& prompt, const Tokenizer& tokenizer,
                                                const Limits& limits) {
  const auto one = [&](const json& value) {
    if (value.is_string())
      return encode_text(tokenizer, value.get<std::string>(), /*add_special=*/true,
                         /*parse_special=*/true);
    if (value.is_array()) return token_ids(value, "prompt", limits.vocab_size);
    bad(std::string("'prompt' must be a string, a list of token ids or a list of these, got ") +
        value.type_name());
  };
  const bool several = prompt.is_array() && !prompt.empty() && !prompt[0].is_number();
  if (!several) return {one(prompt)};
  if (static_cast<int64_t>(prompt.size()) > limits.max_sequences)
    bad("'prompt' has " + std::to_string(prompt.size()) + " prompts; at most " +
        std::to_string(limits.max_sequences) + " are accepted at once");
  std::vector<std::vector<int32_t>> prompts;
  for (const json& value : prompt) prompts.push_back(one(value));
  return prompts;
}

/// The text of a message: a string, or a list of {"type": "text", "text": ...}.
std::string message_content(const json* content) {
  if (content == nullptr) bad("every message needs 'content'");
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) bad("'content' of a message must be a string or a list of text parts");
  std::string text;
  for (const json& part : *content) {
    Fields fields(part, "a part of 'content'");
    if (fields.text("type") != "text")
      bad("only parts of the type 'text' are supported in 'content'");
    text += fields.text("text").value_or("");
    fields.refuse_others();
  }
  return text;
}

std::vector<int32_t> parse_messages(const json* messages, const Tokenizer& tokenizer,
                                    ChatTemplate chat_template) {
  if (messages == nullptr || !messages->is_array() || messages->empty())
    bad("'messages' must be a list of at least one message");
  std::vector<ChatMessage> conversation;
  for (const json& message : *messages) {
    Fields fields(message, "a message");
    const std::string role = fields.text("role").value_or("");
    conversation.push_back({role, message_content(fields.find("content"))});
    fields.ignore({"name"});
    fields.refuse_others();
  }
  try {
    return encode_chat(tokenizer, chat_template, conversation);
  } catch (const c10::Error& e) {
    bad(e.what_without_backtrace());
  }
}

std::vector<std::string> parse_stops(const json* stop) {
  if (stop == nullptr) return {};
  if (!stop->is_string() && !stop->is_array()) bad("'stop' must be a string or a list of strings");
  std::vector<std::string> stops;
  for (const json& text : stop->is_string() ? json::array({*stop}) : *stop) {
    if (!text.is_string() || text.get_ref<const std::string&>().empty())
      bad("'stop' must be a string or a list of strings that are not empty");
    stops.push_back(text.get<std::string>());
  }
  if (stops.size() > kMaxStops)
    bad("'stop' holds more than " + std::to_string(kMaxStops) + " strings");
  return stops;
}

SamplingOptions parse_sampling(Fields& fields, Api api, std::optional<uint64_t> otherwise) {
  const bool llama = api == Api::kLlamaCpp;  // whose defaults are other ones
  SamplingOptions sampling;
  sampling.temperature = fields.number("temperature", 0, 100).value_or(llama ? 0.8 : 1.0);
  sampling.top_k =
      std::max<int64_t>(fields.integer("top_k", -1, INT32_MAX).value_or(llama ? 40 : 0), 0);
  const int64_t seed = fields.integer("seed", -1, INT64_MAX).value_or(-1);
  sampling.seed = seed >= 0   ? static_cast<uint64_t>(seed)
                  : otherwise ? *otherwise
                              : std::random_device{}();
  fields.only("top_p", {1});
  fields.only("min_p", {0});
  fields.only("presence_penalty", {0});
  fields.only("frequency_penalty", {0});
  fields.only("logit_bias", {json::object(), json::array()});
  return sampling;
}

void parse_openai(Fields& fields, CompletionRequest& request) {
  fields.ignore({"model", "user", "metadata", "store"});
  request.n = fields.integer("n", 1, 128).value_or(1);
  request.stream = fields.boolean("stream", false);
  if (const json* options = fields.find("stream_options")) {
    Fields inner(*options, "'stream_options'");
    request.include_usage = inner.boolean("include_usage", false);
    inner.refuse_others();
  }
}

}  // namespace

json parse_body(const std::string& body) {
  json value = json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) bad("the body is not valid JSON");
  if (!value.is_object())
    bad(std::string("the body must be a JSON object, got ") + value.type_name());
  return value;
}

CompletionRequest parse_completion(const json& body, Api api, const Tokenizer& tokenizer,
                                   ChatTemplate chat_template, const Limits& limits) {
  Fields fields(body, "the request");
  CompletionRequest request;
  request.api = api;
  request.sampling = parse_sampling(fields, api, limits.seed);
  request.stop = parse_stops(fields.find("stop"));
  request.ignore_eos = fields.boolean("ignore_eos", false);
  if (api == Api::kLlamaCpp) {
    request.stream = fields.boolean("stream", false);
    request.max_tokens = fields.integer("n_predict", -1, INT32_MAX).value_or(-1);
    fields.ignore({"cache_prompt"});  // a matter of speed alone
  } else {
    parse_openai(fields, request);
  }
  if (api == Api::kCompletions) {
    request.max_tokens = fields.integer("max_tokens", 0, INT32_MAX).value_or(kOpenAiMaxTokens);
    request.echo = fields.boolean("echo", false);
    request.logprobs = fields.integer("logprobs", 0, kMaxLogprobs).value_or(-1);
    fields.only("best_of", {request.n});
    fields.only("suffix", {""});
  }
  if (api == Api::kChat) {
    const auto older = fields.integer("max_tokens", 1, INT32_MAX);
    request.max_tokens =
        fields.integer("max_completion_tokens", 1, INT32_MAX).value_or(older.value_or(-1));
    fields.only("logprobs", {false});
    fields.only("top_logprobs", {0});
    request.prompts = {parse_messages(fields.find("messages"), tokenizer, chat_template)};
  } else {
    const json* prompt = fields.find("prompt");
    if (prompt == nullptr) bad("'prompt' is missing");
    request.prompts = parse_prompts(*prompt, tokenizer, limits);
    if (api == Api::kLlamaCpp && request.prompts.size() > 1)
      bad("'prompt' must be one prompt here");
  }
  fields.refuse_others();
  if (static_cast<int64_t>(request.prompts.size()) * request.n > limits.max_sequences)
    bad("'n' times the number of prompts is more than " + std::to_string(limits.max_sequences));
  for (const auto& prompt : request.prompts) {
    if (prompt.empty()) bad("a prompt is empty: give at least one token");
    if (static_cast<int64_t>(prompt.size()) > limits.max_prompt)
      bad("a prompt has " + std::to_string(prompt.size()) + " tokens; the context holds " +
          std::to_string(limits.max_prompt - 1));
    for (const int32_t id : prompt) {
      if (id >= limits.vocab_size)
        bad("token id " + std::to_string(id) + " is outside the model's vocabulary of " +
            std::to_string(limits.vocab_size) + " tokens");
    }
  }
  return request;
}

std::vector<int32_t> parse_tokenize(const json& body, const Tokenizer& tokenizer) {
  Fields fields(body, "the request");
  fields.ignore({"model"});
  const auto prompt = fields.text("prompt"), content = fields.text("content");
  if (prompt.has_value() == content.has_value()) bad("give one of 'prompt' and 'content'");
  const bool special =
      fields.boolean("add_special_tokens", false) || fields.boolean("add_special", false);
  const bool parse = fields.boolean("parse_special", true);
  fields.refuse_others();
  return encode_text(tokenizer, prompt ? *prompt : *content, special, parse);
}

std::vector<int32_t> parse_detokenize(const json& body, const Tokenizer& tokenizer) {
  Fields fields(body, "the request");
  fields.ignore({"model"});
  const json* tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) bad("'tokens' must be a list of token ids");
  fields.refuse_others();
  return token_ids(*tokens, "tokens", tokenizer.vocab_size());
}

}  // namespace gptfast::server
