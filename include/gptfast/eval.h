// Evaluation: log-likelihoods, perplexity and the tasks of lm-evaluation-harness 0.4 (eval.py),
// without Python.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gptfast/model.h"

namespace gptfast {

class Tokenizer;

// ---- Tasks (src/tasks.cpp): JSON lines -> strings to score, zero-shot, formatted as the harness
// formats them.

/// One string to score: log p(continuation | context).
struct EvalRequest {
  std::string context;  ///< empty: the tokenizer's prefix token stands for it
  std::string continuation;
};

/// One item of a task.
struct EvalItem {
  std::vector<EvalRequest> requests = {};  ///< one a choice; one for the other kinds
  std::vector<int64_t> lengths = {};       ///< code points of each choice, the divisor of acc_norm
  int64_t gold = 0;                        ///< index of the right choice
  int64_t words = 0;                       ///< of the page before it was detokenized; rolling only
  int64_t bytes = 0;
  std::string doc = {};  ///< the line of the data file
};

enum class TaskKind {
  kMultipleChoice,  ///< acc (and acc_norm): the likeliest choice is the right one
  kLastWord,        ///< perplexity and acc: the continuation, and whether it is the greedy one
  kRolling,         ///< word_perplexity, byte_perplexity, bits_per_byte of whole documents
};

struct EvalTask {
  std::string name;
  TaskKind kind = TaskKind::kMultipleChoice;
  bool acc_norm = false;  ///< report it, too
  int64_t version = 1;    ///< of the harness's task
  std::vector<EvalItem> items = {};
};

/// Names that load_task knows, sorted.
std::vector<std::string> eval_task_names();

/// Reads the first `limit` (negative: all) items of `data_dir`/NAME.jsonl: one JSON object a line
/// with the fields of the data set that the harness loads. Throws for an unknown name (with the
/// list), a missing file (with the fields and how to get it), a malformed line (file, line number
/// and what is wrong) and a file without items.
EvalTask load_task(const std::string& name, const std::filesystem::path& data_dir,
                   int64_t limit = -1);

// ---- Scoring (src/eval.cpp).

enum class BosRule {
  kHarness,   ///< BOS where the tokenizer's own rule puts one; special tokens written in a text
              ///< count as such
  kOriginal,  ///< as the original's eval.py: BOS before every request, EOS before a whole document
};

/// Token ids to score: those after the first `num_context` (at least 1), each given all before it.
struct TokenRequest {
  std::vector<int32_t> tokens;
  int64_t num_context = 1;
};

/// log p in nats, and whether every scored token is the model's first choice.
struct Score {
  double loglikelihood = 0;
  bool is_greedy = true;
};

/// Ids of a request: context and continuation are encoded together, white space at the context's
/// end belongs to the continuation, and an empty context is one prefix token (BOS if there is one,
/// else EOS; the original's rule: EOS).
TokenRequest encode_request(const Tokenizer& tokenizer, const EvalRequest& request, BosRule rule);

/// Splits a document into windows of at most `max_length` input tokens. The first predicts from
/// `prefix` on; the last is moved left to keep a full context.
std::vector<TokenRequest> rolling_windows(const std::vector<int32_t>& tokens, int32_t prefix,
                                          int64_t max_length);

/// Windows of `window` input tokens that advance by `stride`; each token but the first is scored
/// once, with more than window - stride tokens of context where the text has them.
std::vector<TokenRequest> strided_windows(const std::vector<int32_t>& tokens, int64_t window,
                                          int64_t stride);

struct EvalOptions {
  int64_t batch_size = 16;  ///< requests in one forward pass; fewer where they are long, more where
                            ///< a single item has more
  int64_t max_seq_length =
      0;  ///< longest input in tokens; 0: the model's context (original's rule: at most 2048 of it)
  BosRule bos = BosRule::kHarness;
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< requests
};

/// The longest input that `options` allow on this model. Throws when max_seq_length exceeds the
/// model's context.
int64_t eval_max_length(const ModelArgs& config, const EvalOptions& options);

/// Scores items of one or more requests. What the requests of an item share is computed once.
/// Requests longer than the context lose tokens on the left. Log-softmax is in float32. Throws when
/// the scored part alone exceeds the context, an id is outside the vocabulary or the logits are not
/// finite.
std::vector<std::vector<Score>> score_requests(Transformer& model,
                                               std::vector<std::vector<TokenRequest>> items,
                                               const EvalOptions& options);

/// One figure of a task.
struct EvalMetric {
  std::string name;
  double value = 0;
  std::optional<double> standard_error = {};
  bool higher_is_better = true;
};

struct EvalResult {
  std::vector<std::vector<Score>> scores;  ///< [items][requests]; a rolling item has one
  std::vector<double> acc;                 ///< [items]; empty when rolling
  std::vector<double> acc_norm;            ///< [items]; empty where the task does not report it
  std::vector<EvalMetric> metrics;
};

/// Runs one task.
EvalResult evaluate(Transformer& model, const Tokenizer& tokenizer, const EvalTask& task,
                    const EvalOptions& options);

/// The metrics of `task` from the scores of its items [items][requests].
EvalResult aggregate(const EvalTask& task, std::vector<std::vector<Score>> scores);

/// Standard error of exp(-mean(loglikelihoods)) by resampling, with the draws of the harness
/// (Python's generator, seeded 0, 1, ... for every 1000 replicates).
double bootstrap_perplexity_stderr(const std::vector<double>& loglikelihoods, int64_t iterations);

struct Perplexity {
  double perplexity = 0;
  double nll = 0;      ///< mean negative log-likelihood of a token, in nats
  int64_t tokens = 0;  ///< scored ones: all but the first
};

/// Perplexity of one text in strided windows. The text gets BOS where the tokenizer's own rule, or
/// the original's, puts one. Throws when it has fewer than two tokens or 1 <= stride <= window <=
/// context does not hold.
Perplexity text_perplexity(Transformer& model, const Tokenizer& tokenizer, std::string_view text,
                           int64_t window, int64_t stride, const EvalOptions& options);

// ---- Calibration inputs of GPTQ (InputRecorder of the original's GPTQ.py).

struct CalibrationOptions {
  std::vector<std::string> tasks = {"wikitext"};
  std::filesystem::path data_dir = "data";
  int64_t limit = 1000;      ///< items of each task
  int64_t seq_length = 100;  ///< tokens of each sample
};

/// The inputs of the tasks' requests under the original's rule (BOS before each where the tokenizer
/// has one, EOS before a whole document), cut to the last seq_length tokens. [samples][1 to
/// seq_length]: calibration_data (gptq.h) drops or pads the shorter ones.
std::vector<std::vector<int32_t>> calibration_inputs(const Tokenizer& tokenizer,
                                                     const CalibrationOptions& options);

}  // namespace gptfast
