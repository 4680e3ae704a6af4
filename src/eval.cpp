// Scoring: text -> requests in token ids -> batches through the model -> log-likelihoods (eval.py).
#include "gptfast/eval.h"

#include <ATen/Parallel.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <span>

#include "eval_text.h"
#include "gptfast/threads.h"
#include "gptfast/tokenizer.h"

namespace gptfast {

namespace {

/// Tokens that the caches hold at once (slots x longest request): 4 GiB for Llama-2-7B in bfloat16.
constexpr int64_t kMaxCacheTokens = 8192;
/// Logits that may exist at once: 256 MiB in float32.
constexpr int64_t kMaxLogits = 64LL << 20;
/// Rows that go through the head at once.
constexpr int64_t kHeadRows = 256;
/// The original's longest request, whatever the model's context.
constexpr int64_t kOriginalMaxLength = 2048;

/// BOS or -1.
int32_t leading_token(const Tokenizer& tokenizer, BosRule rule) {
  if (rule == BosRule::kOriginal) {
    TORCH_CHECK(tokenizer.bos_id() >= 0,
                "The tokenizer has no BOS token, which the original puts before every request; "
                "use --bos harness.");
    return tokenizer.bos_id();
  }
  return tokenizer.add_bos() ? tokenizer.bos_id() : -1;
}

std::vector<int32_t> encode_text(const Tokenizer& tokenizer, std::string_view text, BosRule rule) {
  std::vector<int32_t> ids = tokenizer.encode(text, /*parse_special=*/rule == BosRule::kHarness);
  const int32_t bos = leading_token(tokenizer, rule);
  const bool written = rule == BosRule::kHarness && !ids.empty() && ids.front() == bos;
  if (bos >= 0 && !written) {
    ids.insert(ids.begin(), bos);
  }
  return ids;
}

/// What stands in front of a text that has no context.
int32_t prefix_token(const Tokenizer& tokenizer, BosRule rule) {
  const bool bos = rule == BosRule::kHarness && tokenizer.bos_id() >= 0;
  const int32_t prefix = bos ? tokenizer.bos_id() : tokenizer.eos_id();
  TORCH_CHECK(prefix >= 0,
              "The tokenizer has neither a BOS nor an EOS token to put before a text without "
              "context.");
  return prefix;
}

/// A request without its last token, which is only predicted, cut on the left to the model's
/// context.
struct Row {
  std::vector<int32_t> input;
  std::vector<int32_t> targets;  // the last targets.size() positions of `input` predict them
  Score* score;
};

Row make_row(TokenRequest request, size_t item, size_t choice, int64_t max_length,
             int64_t vocab_size, std::vector<std::vector<Score>>& scores) {
  auto& tokens = request.tokens;
  const int64_t scored = std::ssize(tokens) - request.num_context;
  TORCH_CHECK(request.num_context >= 1 && scored >= 1, "Request ", choice, " of item ", item,
              " has ", request.num_context, " context tokens of ", tokens.size(),
              "; both the context and the continuation need at least one.");
  TORCH_CHECK(scored <= max_length, "The continuation of request ", choice, " of item ", item,
              " has ", scored, " tokens, more than the longest input of ", max_length,
              "; raise --max_seq_length if the model allows it.");
  for (const int32_t id : tokens) {
    TORCH_CHECK(id >= 0 && id < vocab_size, "Token ", id, " is outside the model's vocabulary of ",
                vocab_size,
                ": the tokenizer does not belong to this checkpoint; see --tokenizer_path.");
  }
  const int64_t kept = std::min(std::ssize(tokens), max_length + 1);
  return {.input = {tokens.end() - kept, tokens.end() - 1},
          .targets = {tokens.end() - scored, tokens.end()},
          .score = &scores[item][choice]};
}

/// A token to predict.
struct Target {
  int64_t place;  // of the token that predicts it
  int32_t token;
  Score* score;  // of its request
  float logprob = 0;
  bool is_first_choice = false;
};

/// Requests that are computed together; places of targets are those of the tree's tokens.
struct ScoredTree {
  TokenTree tree;
  std::vector<Target> targets;
  int64_t requests;
};

/// Rows as branches behind the tokens that all of them begin with.
ScoredTree make_tree(std::span<const Row> rows) {
  const auto& first = rows.front().input;
  int64_t trunk = std::ssize(first);
  for (const Row& row : rows) {
    const auto differ =
        std::mismatch(first.begin(), first.end(), row.input.begin(), row.input.end());
    trunk = std::min(trunk, differ.first - first.begin());
  }
  ScoredTree scored{.tree = {.trunk = {first.begin(), first.begin() + trunk}},
                    .targets = {},
                    .requests = std::ssize(rows)};
  int64_t size = trunk;
  for (const auto& [input, targets, score] : rows) {
    int64_t at = std::ssize(input) - std::ssize(targets);
    for (const int32_t token : targets) {
      scored.targets.push_back({at < trunk ? at : size + at - trunk, token, score});
      ++at;
    }
    scored.tree.branches.emplace_back(input.begin() + trunk, input.end());
    size += std::ssize(input) - trunk;
  }
  return scored;
}

/// One tree for an item's rows, or one for each where sharing does not pay.
void add_trees(std::span<const Row> rows, std::vector<ScoredTree>& trees) {
  // In a tree a token is compared with those of other branches too: nothing beside the products of
  // a small tree's layers, much where a trunk is short and branches are long.
  constexpr int64_t kSmallTree = 512;
  ScoredTree shared = make_tree(rows);
  const TokenTree& tree = shared.tree;
  const bool bushy = std::ranges::any_of(tree.branches, [&](const auto& branch) {
    return branch.size() > tree.trunk.size();
  });
  if (!bushy || tree.size() <= kSmallTree) {
    trees.push_back(std::move(shared));
    return;
  }
  for (const Row& row : rows) {
    trees.push_back(make_tree({&row, 1}));
  }
}

std::vector<ScoredTree> make_trees(std::vector<std::vector<TokenRequest>> items, int64_t max_length,
                                   int64_t vocab_size, std::vector<std::vector<Score>>& scores) {
  std::vector<ScoredTree> trees;
  for (size_t item = 0; item < items.size(); ++item) {
    std::vector<Row> rows;
    for (size_t choice = 0; choice < items[item].size(); ++choice) {
      rows.push_back(
          make_row(std::move(items[item][choice]), item, choice, max_length, vocab_size, scores));
    }
    if (!rows.empty()) {
      add_trees(rows, trees);
    }
  }
  return trees;
}

/// For the time of a scope LibTorch computes on the calling thread alone: after a short call its
/// own threads spin for milliseconds on the cores that ours need.
class OneLibraryThread {
 public:
  OneLibraryThread() { at::set_num_threads(1); }
  ~OneLibraryThread() { at::set_num_threads(before_); }
  OneLibraryThread(const OneLibraryThread&) = delete;
  OneLibraryThread& operator=(const OneLibraryThread&) = delete;

 private:
  int before_ = at::get_num_threads();
};

/// Fills in what `logits` [n, V] say about `targets`, whose places are `first_place` plus rows of
/// it.
void judge(const Tensor& logits, int64_t first_place, std::span<Target> targets) {
  std::vector<int64_t> rows;
  std::vector<int64_t> tokens;
  for (const Target& target : targets) {
    rows.push_back(target.place - first_place);
    tokens.push_back(target.token);
  }
  const Tensor row = at::tensor(rows).to(logits.device());
  const Tensor token = at::tensor(tokens).to(logits.device());
  const auto of_targets = [&](const Tensor& t) { return t.index({row, token}); };
  const Tensor logprobs = of_targets(at::log_softmax(logits, /*dim=*/-1, at::kFloat));
  const Tensor largest = logits.amax(/*dim=*/-1).index({row});
  const Tensor found =
      at::stack({logprobs, of_targets(logits).eq(largest).to(at::kFloat)}).cpu();  // [2, targets]
  const float* logprob = found.const_data_ptr<float>();
  const float* none_is_larger = logprob + targets.size();
  // The first of equal logits is the choice. (On a CPU LibTorch's argmax takes 160 us for 49,152
  // logits in bfloat16, Zen 5; a GPU is asked once for all targets.)
  const Tensor choice =
      logits.is_cpu() ? Tensor() : logits.argmax(/*dim=*/-1).index({row}).eq(token).cpu();
  const auto is_first = [&](size_t i) {
    if (choice.defined()) return choice.const_data_ptr<bool>()[i];
    const Tensor before = logits[rows[i]].narrow(0, 0, tokens[i]);
    return before.lt(largest[static_cast<int64_t>(i)]).all().item<bool>();
  };
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i].logprob = logprob[i];
    targets[i].is_first_choice = none_is_larger[i] != 0 && is_first(i);
  }
}

/// Runs the head on the rows of `x` [n, D]; places of `targets` are rows, in order.
void judge_all(Transformer& model, const Tensor& x, std::span<Target> targets) {
  const bool side_by_side = model->device().is_cpu() && !model->reference() && !model->tp();
  const int64_t threads = side_by_side ? num_threads() : 1;
  const int64_t rows = x.size(0);
  const int64_t most =
      threads * std::clamp<int64_t>(kMaxLogits / model->config.vocab_size, 1, kHeadRows);
  const int64_t pieces = threads * ((rows + most - 1) / most);
  const auto judge_piece = [&](int64_t i) {
    const c10::InferenceMode inference;
    const int64_t begin = rows * i / pieces;
    const int64_t end = rows * (i + 1) / pieces;
    const auto first = std::ranges::lower_bound(targets, begin, {}, &Target::place);
    const auto last = std::ranges::lower_bound(targets, end, {}, &Target::place);
    if (begin < end) {
      judge(model->head(x.slice(0, begin, end)), begin, {first, last});
    }
  };
  if (side_by_side) {
    parallel_for(pieces, judge_piece);
  } else {
    for (int64_t i = 0; i < pieces; ++i) {
      judge_piece(i);
    }
  }
}

/// Scores the requests of trees in one forward pass.
void score_batch(Transformer& model, std::span<ScoredTree> batch) {
  std::vector<TokenTree> trees;
  std::vector<Target> targets;
  int64_t tokens = 0;
  for (ScoredTree& scored : batch) {
    for (Target target : scored.targets) {
      target.place += tokens;
      targets.push_back(target);
    }
    tokens += scored.tree.size();
    trees.push_back(std::move(scored.tree));
  }
  std::ranges::stable_sort(targets, {}, &Target::place);
  std::vector<int64_t> places;  // that predict something
  for (Target& target : targets) {
    if (places.empty() || places.back() != target.place) {
      places.push_back(target.place);
    }
    target.place = std::ssize(places) - 1;
  }
  judge_all(model, model->hidden(trees).index_select(0, at::tensor(places).to(model->device())),
            targets);
  for (const Target& target : targets) {
    TORCH_CHECK(!std::isnan(target.logprob),
                "The model's logits are not numbers (NaN or infinite): the checkpoint is damaged, "
                "or too coarse a --precision was used.");
    target.score->loglikelihood += target.logprob;
    target.score->is_greedy = target.score->is_greedy && target.is_first_choice;
  }
}

/// Requests of the task's items. A rolling item has one a window.
std::vector<std::vector<TokenRequest>> encode_items(const Tokenizer& tokenizer,
                                                    const EvalTask& task, BosRule rule,
                                                    int64_t max_length) {
  std::vector<std::vector<TokenRequest>> items;
  for (const EvalItem& item : task.items) {
    if (task.kind == TaskKind::kRolling) {
      const auto tokens = encode_text(tokenizer, item.requests.front().continuation, rule);
      items.push_back(rolling_windows(tokens, prefix_token(tokenizer, rule), max_length));
      continue;
    }
    auto& requests = items.emplace_back();
    for (const EvalRequest& request : item.requests) {
      requests.push_back(encode_request(tokenizer, request, rule));
    }
  }
  return items;
}

Score sum(const std::vector<Score>& windows) {
  Score total;
  for (const Score& window : windows) {
    total.loglikelihood += window.loglikelihood;
    total.is_greedy = total.is_greedy && window.is_greedy;
  }
  return total;
}

}  // namespace

TokenRequest encode_request(const Tokenizer& tokenizer, const EvalRequest& request, BosRule rule) {
  const std::string whole_text = request.context + request.continuation;
  const std::string_view context = rstrip(request.context);
  if (context.empty()) {
    const int32_t prefix = prefix_token(tokenizer, rule);
    auto ids = rule == BosRule::kHarness ? tokenizer.encode(whole_text, /*parse_special=*/true)
                                         : encode_text(tokenizer, whole_text, rule);
    if (ids.empty() || ids.front() != prefix) {
      ids.insert(ids.begin(), prefix);
    }
    return {.tokens = std::move(ids), .num_context = 1};
  }
  const auto whole = encode_text(tokenizer, whole_text, rule);
  auto ids = encode_text(tokenizer, context, rule);
  const auto num_context = std::ssize(ids);
  if (num_context < std::ssize(whole)) {
    ids.insert(ids.end(), whole.begin() + num_context, whole.end());
  }
  return {.tokens = std::move(ids), .num_context = num_context};
}

std::vector<TokenRequest> rolling_windows(const std::vector<int32_t>& tokens, int32_t prefix,
                                          int64_t max_length) {
  std::vector<TokenRequest> windows;
  const int64_t size = std::ssize(tokens);
  for (int64_t begin = 0; begin < size; begin += max_length) {
    const int64_t end = std::min(size, begin + max_length);
    const int64_t first = std::max<int64_t>(0, begin == 0 ? 0 : end - max_length - 1);
    TokenRequest window;
    if (begin == 0) {
      window.tokens.push_back(prefix);
    }
    window.tokens.insert(window.tokens.end(), tokens.begin() + first, tokens.begin() + end);
    window.num_context = std::ssize(window.tokens) - (end - begin);
    windows.push_back(std::move(window));
  }
  return windows;
}

std::vector<TokenRequest> strided_windows(const std::vector<int32_t>& tokens, int64_t window,
                                          int64_t stride) {
  std::vector<TokenRequest> windows;
  const int64_t size = std::ssize(tokens);
  int64_t done = 1;  // nothing predicts the first token
  for (int64_t begin = 0; done < size; begin += stride) {
    const int64_t end = std::min(size, begin + window + 1);
    windows.push_back(
        {.tokens = {tokens.begin() + begin, tokens.begin() + end}, .num_context = done - begin});
    done = end;
  }
  return windows;
}

int64_t eval_max_length(const ModelArgs& config, const EvalOptions& options) {
  TORCH_CHECK(options.max_seq_length >= 0 && options.max_seq_length <= config.block_size,
              "--max_seq_length ", options.max_seq_length,
              " must be from 1 to the model's context of ", config.block_size, " tokens.");
  if (options.max_seq_length > 0) {
    return options.max_seq_length;
  }
  return options.bos == BosRule::kOriginal ? std::min(config.block_size, kOriginalMaxLength)
                                           : config.block_size;
}

std::vector<std::vector<Score>> score_requests(Transformer& model,
                                               std::vector<std::vector<TokenRequest>> items,
                                               const EvalOptions& options) {
  TORCH_CHECK(options.batch_size >= 1, "--batch_size ", options.batch_size, " must be at least 1.");
  const c10::InferenceMode inference;
  // Caches of another shape (few long slots, many short ones) would grow to the larger of both.
  model->max_batch_size = 0;
  model->max_seq_length = 0;
  std::vector<std::vector<Score>> scores;
  scores.reserve(items.size());
  for (const auto& item : items) {
    scores.emplace_back(item.size());
  }
  auto trees = make_trees(std::move(items), eval_max_length(model->config, options),
                          model->config.vocab_size, scores);
  // Longest first: the time left is rather over- than underestimated, and what does not fit in
  // memory fails at once.
  std::ranges::stable_sort(trees, std::greater(),
                           [](const ScoredTree& t) { return t.tree.size(); });
  int64_t total = 0;
  for (const ScoredTree& tree : trees) {
    total += tree.requests;
  }
  const int64_t longest = trees.empty() ? 1 : trees.front().tree.size();
  const int64_t slots = std::clamp<int64_t>(kMaxCacheTokens / longest, 1, options.batch_size);
  model->setup_caches(slots, longest);
  std::optional<OneLibraryThread> alone;
  if (!model->reference()) {
    alone.emplace();
  }
  int64_t done = 0;
  for (size_t begin = 0; begin < trees.size();) {
    size_t end = begin;
    int64_t requests = 0;
    while (end < trees.size() && static_cast<int64_t>(end - begin) < slots &&
           (end == begin || requests + trees[end].requests <= options.batch_size)) {
      requests += trees[end++].requests;
    }
    score_batch(model, std::span(trees).subspan(begin, end - begin));
    done += requests;
    begin = end;
    if (options.progress) {
      options.progress(done, total);
    }
  }
  return scores;
}

EvalResult evaluate(Transformer& model, const Tokenizer& tokenizer, const EvalTask& task,
                    const EvalOptions& options) {
  const int64_t max_length = eval_max_length(model->config, options);
  auto scores =
      score_requests(model, encode_items(tokenizer, task, options.bos, max_length), options);
  if (task.kind == TaskKind::kRolling) {
    for (auto& windows : scores) {
      windows = {sum(windows)};
    }
  }
  return aggregate(task, std::move(scores));
}

Perplexity text_perplexity(Transformer& model, const Tokenizer& tokenizer, std::string_view text,
                           int64_t window, int64_t stride, const EvalOptions& options) {
  const int64_t context = eval_max_length(model->config, options);
  TORCH_CHECK(1 <= stride && stride <= window && window <= context, "A window of ", window,
              " and a stride of ", stride, " tokens do not fit: 1 <= stride <= window <= ", context,
              " (the longest input) is needed.");
  const auto tokens = encode_text(tokenizer, text, options.bos);
  TORCH_CHECK(tokens.size() >= 2, "The text has ", tokens.size(),
              " tokens; a perplexity needs at least 2.");
  std::vector<std::vector<TokenRequest>> windows;
  for (auto& request : strided_windows(tokens, window, stride)) {
    windows.push_back({std::move(request)});
  }
  double loglikelihood = 0;
  for (const auto& scores : score_requests(model, std::move(windows), options)) {
    loglikelihood += sum(scores).loglikelihood;
  }
  const int64_t scored = std::ssize(tokens) - 1;
  const double nll = -loglikelihood / static_cast<double>(scored);
  return {.perplexity = std::exp(nll), .nll = nll, .tokens = scored};
}

std::vector<std::vector<int32_t>> calibration_inputs(const Tokenizer& tokenizer,
                                                     const CalibrationOptions& options) {
  const int64_t length = options.seq_length;
  TORCH_CHECK(length >= 1 && options.limit >= 1,
              "Calibration needs samples of at least 1 token, and at least 1 of them; got "
              "--calibration_seq_length ",
              length, " and --calibration_limit ", options.limit, ".");
  const BosRule rule = tokenizer.bos_id() >= 0 ? BosRule::kOriginal : BosRule::kHarness;
  std::vector<std::vector<int32_t>> inputs;
  for (const std::string& name : options.tasks) {
    const EvalTask task = load_task(name, options.data_dir, options.limit);
    for (const auto& requests : encode_items(tokenizer, task, rule, length)) {
      for (const auto& [tokens, num_context] : requests) {
        const int64_t kept = std::min(std::ssize(tokens) - 1, length);
        inputs.emplace_back(tokens.end() - 1 - kept, tokens.end() - 1);
      }
    }
  }
  return inputs;
}

}  // namespace gptfast
