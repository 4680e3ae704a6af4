// One HTTP request for text while it is answered.
#pragma once

#include <chrono>
#include <ctime>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server_answer.h"
#include "server_engine.h"
#include "server_request.h"

namespace gptfast::server {

/// Reads the engine's events and writes the answer in the form of the request's API, whole or as
/// server-sent events.
class Exchange {
 public:
  /// `sequences`: n for each prompt, numbered in this order, with one channel.
  Exchange(const Tokenizer& tokenizer, const CompletionRequest& request,
           std::vector<std::shared_ptr<Sequence>> sequences, std::string model_name);

  const std::vector<std::shared_ptr<Sequence>>& sequences() const { return sequences_; }

  /// Waits a moment for the engine and writes what there is. To be called until `done` was called;
  /// false: the answer broke off, because the client is gone or the engine failed.
  bool provide(const std::function<bool(const std::string&)>& write,
               const std::function<bool()>& is_writable, const std::function<void()>& done);
  /// The rest is not wanted.
  void cancel();

 private:
  using Clock = std::chrono::steady_clock;

  bool take(const Event& event, std::string& out);
  std::string first_chunks();
  std::string chunk(Choice& choice);
  std::string last_chunks();
  std::string whole();
  nlohmann::ordered_json envelope(const char* object) const;
  nlohmann::ordered_json openai_choice(Choice& choice, bool chunk);
  nlohmann::ordered_json llama_cpp_answer(Choice& choice, bool final);
  nlohmann::ordered_json usage() const;
  bool client_is_there(const std::function<bool()>& is_writable);

  const CompletionRequest request_;
  const std::vector<std::shared_ptr<Sequence>> sequences_;
  const std::string model_name_;
  const std::string id_;
  const int64_t created_ = std::time(nullptr);
  std::vector<Choice> choices_;
  bool started_ = false;
  Clock::time_point last_check_ = Clock::now();
};

}  // namespace gptfast::server
