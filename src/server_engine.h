// The thread that computes for all requests of a server.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gptfast/generate.h"
#include "gptfast/model.h"
#include "gptfast/sampling.h"
#ifdef GPTFAST_CUDA
#include "gptfast/decode_graph.h"
#endif

namespace gptfast::server {

/// How likely a token was, from the softmax in float32 of the model's logits (before temperature).
struct TokenLogprob {
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  ///< the likeliest, best first
};

/// What the engine tells about one sequence.
struct Event {
  enum class Kind { kPrompt, kToken, kFinished, kFailed };
  Kind kind = Kind::kToken;
  size_t sequence = 0;                        ///< its number within the request
  int32_t token = -1;                         ///< kToken
  std::optional<TokenLogprob> logprob;        ///< kToken, where asked for
  std::vector<TokenLogprob> prompt;           ///< kPrompt: of the tokens 1 .. n - 1
  FinishReason reason = FinishReason::kStop;  ///< kFinished
  std::string message;                        ///< kFailed
};

/// Events of all sequences of one request, from the engine to the thread that answers.
class Channel {
 public:
  void push(Event event);
  /// The next event, or nullopt when none came within `timeout`.
  std::optional<Event> pop(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Event> events_;
};

/// One text to continue.
struct Sequence {
  std::vector<int32_t> prompt;  ///< at least one id, all inside the vocabulary
  int64_t max_tokens = 0;       ///< 0: only the prompt's log-probabilities
  FinishReason at_max_tokens = FinishReason::kLength;  ///< kContext where the context is the limit
  SamplingOptions sampling;
  std::vector<int32_t> stop_tokens;
  int64_t logprobs = -1;         ///< the likeliest tokens to tell with each token; -1: tell nothing
  bool prompt_logprobs = false;  ///< with logprobs >= 0: also of the prompt's tokens
  size_t number = 0;
  std::shared_ptr<Channel> channel;
  std::atomic<bool> cancelled = false;  ///< set by whoever no longer wants the rest
};

/// Owns the model. Slots of the cache hold the sequences at work; others wait in order of arrival.
/// Between two steps over all slots at most one piece of one prompt is computed, so sequences join
/// and leave while others run. What a sequence gets does not depend on the others.
class Engine {
 public:
  Engine(Transformer model, int64_t parallel, int64_t ctx_size, int64_t max_queue);
  /// Drops what is still there.
  ~Engine();

  /// Takes all sequences, or none (false) when more would wait than may.
  bool submit(const std::vector<std::shared_ptr<Sequence>>& sequences);

  /// Longest prompt: one more than the context, because the last token of a text to score need not
  /// be fed for its own score.
  int64_t max_prompt() const { return ctx_size_ + 1; }
  /// New tokens after a prompt of `length`: as many as fit the context, but at least one.
  int64_t room(int64_t length) const { return std::max<int64_t>(ctx_size_ - length, 1); }
  int64_t ctx_size() const { return ctx_size_; }
  int64_t max_queue() const { return max_queue_; }
  int64_t vocab_size() const { return vocab_size_; }

 private:
  struct Slot {
    std::shared_ptr<Sequence> sequence;  // null: free
    uint64_t order = 0;                  // of arrival
    int64_t fed = 0;                     // positions in the cache
    int64_t produced = 0;
    int32_t next = -1;  // the token to feed; -1: the prompt is not yet through
    std::vector<TokenLogprob> prompt_logprobs = {};
  };

  void work();
  bool admit();  // false: the engine is to end
  Slot* next_prefill();
  void prefill_piece(Slot& slot);
  void finish_prompt(Slot& slot, const Tensor& logits);
  void keep_prompt_logprobs(Slot& slot, const Tensor& logits);
  /// A sequence that a step computes; `slot` is its own until it ends.
  struct Row {
    std::shared_ptr<Sequence> sequence;
    Slot* slot;
    bool operator==(const Row&) const = default;
  };
  /// What a step of some rows is fed, on the host.
  struct Feed {
    std::vector<int32_t> tokens, pos, slot;
    SamplingParams params;
  };
  std::vector<Row> active();
  Feed feed_of(const std::vector<Row>& rows) const;
  void decode();
  Tensor decode_logits(const Feed& feed, Tensor& next);
  void deliver(const std::vector<Row>& rows, const std::vector<int32_t>& tokens,
               const Tensor& logits);
  void settle();
#ifdef GPTFAST_CUDA
  void replay();
  DecodeGraph& graph();
  void capture(const std::vector<Row>& rows);
  void launch();
  bool may_run_ahead(const std::vector<Row>& rows);
#endif
  void accept(Slot& slot, int32_t token, const Tensor& logits);
  void finish(Slot& slot, FinishReason reason);
  void fail(Slot& slot, const std::string& message);
  int64_t index(const Slot& slot) const {
    return &slot - slots_.data();
  }
  Tensor ints(const std::vector<int32_t>& values) const;

  Transformer model_;
  const int64_t ctx_size_;
  const int64_t max_queue_;
  const int64_t vocab_size_;
  std::vector<Slot> slots_;  // of the engine's thread alone
#ifdef GPTFAST_CUDA
  bool replays_ = false;                                           // all steps are captured ones
  std::array<std::unique_ptr<DecodeGraph>, kMaxStepRows> graphs_;  // [rows - 1], made when needed
  std::vector<Row> captured_;  // rows that the graph of so many is set up for; empty: none
  int64_t unread_ = 0;         // its steps under way
#endif

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::shared_ptr<Sequence>> waiting_;
  bool stopping_ = false;
  uint64_t arrivals_ = 0;
  std::thread thread_;
};

}  // namespace gptfast::server
