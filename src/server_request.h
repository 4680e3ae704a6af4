// What clients may ask for: JSON bodies checked and turned into prompts and settings.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gptfast/chat.h"
#include "gptfast/sampling.h"
#include "gptfast/tokenizer.h"

namespace gptfast::server {

/// A mistake of the client: becomes {"error": {"message", "type", "code"}} with this HTTP status.
struct RequestError : std::runtime_error {
  RequestError(int status, const std::string& message)
      : std::runtime_error(message), status(status) {}
  int status;
};

enum class Api { kCompletions, kChat, kLlamaCpp };

/// What the parser must know of the model.
struct Limits {
  int64_t vocab_size = 0;
  int64_t max_prompt = 0;             ///< tokens
  int64_t max_sequences = 0;          ///< prompts times n
  std::optional<uint64_t> seed = {};  ///< of requests that name none; else a random one
};

struct CompletionRequest {
  Api api = Api::kCompletions;
  std::vector<std::vector<int32_t>> prompts;
  int64_t n = 1;            ///< answers to each prompt
  int64_t max_tokens = -1;  ///< -1: what fits the context
  bool echo = false;
  int64_t logprobs = -1;    ///< -1: none
  bool ignore_eos = false;  ///< go on after the model's stop tokens
  bool stream = false;
  bool include_usage = false;  ///< stream_options.include_usage
  SamplingOptions sampling;    ///< answer i of a prompt draws with seed + i
  std::vector<std::string> stop;
};

/// Parses a body as a JSON object. Throws RequestError, as all functions here.
nlohmann::json parse_body(const std::string& body);

CompletionRequest parse_completion(const nlohmann::json& body, Api api, const Tokenizer& tokenizer,
                                   ChatTemplate chat_template, const Limits& limits);

/// /tokenize: {"prompt" or "content": text, "add_special_tokens" or "add_special": bool,
/// "parse_special": bool}.
std::vector<int32_t> parse_tokenize(const nlohmann::json& body, const Tokenizer& tokenizer);
/// /detokenize: {"tokens": [ids]}.
std::vector<int32_t> parse_detokenize(const nlohmann::json& body, const Tokenizer& tokenizer);

}  // namespace gptfast::server
