#include "chat_loop.h"

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include "gptfast/tp.h"

namespace gptfast::app {
namespace {

constexpr const char* kStartAgain = "Start again for a new conversation.\n";

volatile sig_atomic_t interrupted = 0;  // a signal handler can reach nothing else

void on_interrupt(int) {
  interrupted = 1;
}

/// Ctrl-C sets `interrupted` while this lives; reads are not restarted, so that it ends a
/// half-typed line too.
class InterruptGuard {
 public:
  InterruptGuard() {
    struct sigaction action {};
    action.sa_handler = on_interrupt;
    sigaction(SIGINT, &action, &previous_);
  }
  ~InterruptGuard() { sigaction(SIGINT, &previous_, nullptr); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  struct sigaction previous_ {};
};

/// The next line without its newline; nullopt at the end of the input.
std::optional<std::string> read_line(bool terminal) {
  char* line = nullptr;
  size_t capacity = 0;
  while (true) {
    if (terminal) std::cout << "> " << std::flush;
    interrupted = 0;
    const ssize_t length = getline(&line, &capacity, stdin);
    if (length < 0 && interrupted != 0) {
      clearerr(stdin);
      std::cout << "\n(Ctrl-D leaves)\n";
      continue;
    }
    const std::unique_ptr<char, decltype(&free)> owner(line, free);
    if (length < 0) return std::nullopt;
    std::string text(line, static_cast<size_t>(length));
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
    return text;
  }
}

/// The line that rank 0 reads, on every rank.
std::optional<std::string> next_line(TensorParallel* tp, bool terminal) {
  if (tp == nullptr) return read_line(terminal);
  std::vector<int32_t> shared = {0};  // whether there is a line, and its bytes
  if (tp->rank() == 0) {
    if (const auto line = read_line(terminal)) {
      shared.assign(line->begin(), line->end());
      shared.insert(shared.begin(), 1);
    }
  }
  shared = tp->broadcast(shared);
  if (shared[0] == 0) return std::nullopt;
  return std::string(shared.begin() + 1, shared.end());
}

bool is_blank(const std::string& line) {
  return line.find_first_not_of(" \t\r") == std::string::npos;
}

/// Ctrl-C may reach the ranks at different tokens: rank 0 decides.
bool is_interrupted(TensorParallel* tp) {
  return tp == nullptr ? interrupted != 0 : tp->broadcast({interrupted}) != std::vector<int32_t>{0};
}

}  // namespace

void chat_loop(Transformer& model, const Tokenizer& tokenizer, ChatTemplate chat_template,
               GenerateOptions options) {
  const InterruptGuard guard;
  const bool terminal = isatty(STDIN_FILENO) != 0;
  if (terminal) std::cout << "Type a message. Ctrl-C stops an answer, Ctrl-D leaves.\n";
  model->setup_caches(/*max_batch_size=*/1, model->config.block_size);
  int64_t used = 0;            // positions of the cache that hold the conversation
  std::vector<int32_t> unfed;  // the last token of an answer that no stop token closed: sampled,
                               // shown, not yet in the cache
  while (const auto line = next_line(model->tp(), terminal)) {
    if (is_blank(*line)) continue;
    std::vector<int32_t> turn = unfed;
    const std::vector<int32_t> encoded =
        encode_turn(tokenizer, chat_template, *line, /*first=*/used == 0);
    turn.insert(turn.end(), encoded.begin(), encoded.end());
    const int64_t context = model->config.block_size;
    const auto left = static_cast<size_t>(context - used);
    if (turn.size() >= left) {
      const auto shortest = encode_turn(tokenizer, chat_template, "", /*first=*/used == 0);
      const bool full = unfed.size() + shortest.size() >= left;
      std::cerr << "The message needs " << turn.size() << " tokens and one for the answer, but "
                << left << " of the context of " << context << " are left. "
                << (full ? kStartAgain : "Make it shorter.\n");
      if (full) return;
      continue;
    }
    StreamDecoder decoder(tokenizer);
    options.start_pos = used;
    options.callback = [&](int64_t, int32_t token) {
      const auto& stop = options.stop_tokens;
      if (std::find(stop.begin(), stop.end(), token) == stop.end())
        std::cout << decoder.push(token) << std::flush;
      return !is_interrupted(model->tp());
    };
    const GenerateResult result = generate(model, turn, options);
    std::cout << decoder.finish() << (interrupted != 0 ? " ..." : "") << std::endl;
    options.sampling.seed += 1;

    const auto& answer = result.rows[0].tokens;
    used += static_cast<int64_t>(turn.size() + answer.size()) - 1;
    const auto& stop = options.stop_tokens;
    const bool closed = std::find(stop.begin(), stop.end(), answer.back()) != stop.end();
    if (terminal && !closed && result.rows[0].finish_reason == FinishReason::kLength)
      std::cout << "(" << options.max_new_tokens << " tokens; --max_new_tokens allows more)\n";
    unfed = closed ? std::vector<int32_t>{} : std::vector<int32_t>{answer.back()};
    if (result.rows[0].finish_reason == FinishReason::kContext) {
      std::cerr << "The context of " << context << " tokens is full. " << kStartAgain;
      return;
    }
  }
  if (terminal) std::cout << "\n";
}

}  // namespace gptfast::app
