// Scoring: text -> requests in token ids -> batches through the model -> log-likelihoods (eval.py).
#include "gptfast/eval.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "eval_text.h"
#include "gptfast/threads.h"
#include "gptfast/tokenizer.h"

namespace gptfast {

namespace {

/// Tokens that the caches hold at once (slots x longest request): 4 GiB for Llama-2-7B in bfloat16.
constexpr int64_t kMaxCacheTokens = 8192;
/// Logits that one forward pass may make: 256 MiB in float32.
constexpr int64_t kMaxLogits = 64LL << 20;
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
  size_t item = 0;
  size_t choice = 0;
  std::vector<int32_t> input;
  std::vector<int32_t> targets;  // the last targets.size() positions of `input` predict them

  int64_t length() const { return std::ssize(input); }
  int64_t first_scored() const { return std::ssize(input) - std::ssize(targets); }
};

Row make_row(TokenRequest request, size_t item, size_t choice, int64_t max_length,
             int64_t vocab_size) {
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
  Row row{.item = item,
          .choice = choice,
          .input = {},
          .targets = {tokens.end() - scored, tokens.end()}};
  const int64_t kept = std::min(std::ssize(tokens), max_length + 1);
  row.input.assign(tokens.end() - kept, tokens.end() - 1);
  return row;
}

/// What the rows of an item share and no row needs logits of.
int64_t shared_prefix(std::span<const Row> rows) {
  int64_t shared = rows.front().first_scored();
  for (const Row& row : rows) {
    const auto& first = rows.front().input;
    const auto differ =
        std::mismatch(first.begin(), first.end(), row.input.begin(), row.input.end());
    shared = std::min({shared, row.first_scored(), differ.first - first.begin()});
  }
  return shared;
}

/// The rows of one item, in the order of its requests.
struct Group {
  std::vector<Row> rows;
  int64_t prefix = 0;  // shared_prefix

  int64_t longest() const {
    int64_t length = 0;
    for (const Row& row : rows) {
      length = std::max(length, row.length());
    }
    return length;
  }
};

/// Runs groups through the model: first what the items' rows share, a slot an item; then the rest
/// of every row, in work slots that start as copies of their item's slot.
class Scorer {
 public:
  Scorer(Transformer& model, int64_t batch_size, int64_t longest)
      : model_(model), batch_rows_(std::clamp<int64_t>(kMaxCacheTokens / longest, 1, batch_size)) {}

  /// Rows of the groups that one run() may take; a single group may have more. Batches of rows of
  /// about the same length are chosen among these.
  int64_t max_rows() const { return 4 * batch_rows_; }

  void run(std::span<const Group*> groups, std::vector<std::vector<Score>>& scores) {
    int64_t prefix = 0;
    int64_t longest = 1;
    for (const Group* group : groups) {
      prefix = std::max(prefix, group->prefix);
      longest = std::max(longest, group->longest());
    }
    const int64_t items = prefix > 0 ? std::ssize(groups) : 0;
    model_->setup_caches(batch_rows_ + items, longest);
    if (prefix > 0) {
      run_prefixes(groups, prefix);
    }
    std::vector<WorkRow> rows;
    for (size_t slot = 0; slot < groups.size(); ++slot) {
      for (const Row& row : groups[slot]->rows) {
        rows.push_back({&row, static_cast<int64_t>(slot), groups[slot]->prefix});
      }
    }
    std::stable_sort(rows.begin(), rows.end(), [](const WorkRow& a, const WorkRow& b) {
      return a.row->length() > b.row->length();
    });
    for (size_t begin = 0; begin < rows.size(); begin += batch_rows_) {
      const size_t size = std::min<size_t>(batch_rows_, rows.size() - begin);
      run_rows(std::span(rows).subspan(begin, size), items, scores);
    }
  }

 private:
  struct WorkRow {
    const Row* row;
    int64_t slot;    // of its item
    int64_t prefix;  // positions of that slot that are the row's
  };

  Tensor positions(int64_t begin, int64_t end) const {
    return at::arange(begin, end, at::dtype(at::kLong).device(model_->device()));
  }

  /// Tokens [begin, end) of each row; rows that end earlier are padded with token 0, which nothing
  /// later sees.
  Tensor tokens(const std::vector<const Row*>& rows, int64_t begin, int64_t end) const {
    Tensor idx = at::zeros({std::ssize(rows), end - begin}, at::kLong);
    for (int64_t r = 0; r < std::ssize(rows); ++r) {
      const auto& input = rows[r]->input;
      std::copy(input.begin() + std::min(begin, std::ssize(input)),
                input.begin() + std::min(end, std::ssize(input)), idx[r].data_ptr<int64_t>());
    }
    return idx.to(model_->device());
  }

  /// Positions [0, prefix) of every group, of which its own prefix counts.
  void run_prefixes(std::span<const Group*> groups, int64_t prefix) {
    std::vector<const Row*> rows;
    for (const Group* group : groups) {
      rows.push_back(&group->rows.front());
    }
    model_->last_logits(tokens(rows, 0, prefix), positions(0, prefix));
  }

  void copy_prefixes(std::span<const WorkRow> rows, int64_t prefix, int64_t first_slot) {
    std::vector<int64_t> slots;
    for (const WorkRow& work : rows) {
      slots.push_back(work.slot);
    }
    const Tensor from = at::tensor(slots).to(model_->device());
    for (auto& layer : model_->layers) {
      for (Tensor& cache : {std::ref(layer->attention->kv_cache.k_cache),
                            std::ref(layer->attention->kv_cache.v_cache)}) {
        const Tensor used = cache.narrow(/*dim=*/2, 0, prefix);
        used.narrow(/*dim=*/0, first_slot, std::ssize(rows))
            .copy_(used.index_select(/*dim=*/0, from));
      }
    }
  }

  void run_rows(std::span<const WorkRow> rows, int64_t first_slot,
                std::vector<std::vector<Score>>& scores) {
    std::vector<const Row*> plain;
    int64_t prefix = rows.front().prefix;
    for (const WorkRow& work : rows) {
      plain.push_back(work.row);
      prefix = std::min(prefix, work.prefix);
    }
    if (prefix > 0) {
      copy_prefixes(rows, prefix, first_slot);
    }
    const int64_t longest = plain.front()->length();
    const int64_t step =
        std::max<int64_t>(1, kMaxLogits / (std::ssize(rows) * model_->config.vocab_size));
    for (int64_t begin = prefix; begin < longest; begin += step) {
      const int64_t end = std::min(longest, begin + step);
      add_scores(plain, begin, end, first_slot, scores);
    }
  }

  /// Runs positions [begin, end) of the rows and adds what their logits say about the targets.
  void add_scores(const std::vector<const Row*>& rows, int64_t begin, int64_t end,
                  int64_t first_slot, std::vector<std::vector<Score>>& scores) {
    std::vector<int64_t> where;
    std::vector<int64_t> targets;
    std::vector<Score*> owners;
    for (int64_t r = 0; r < std::ssize(rows); ++r) {
      const Row& row = *rows[r];
      for (int64_t at = std::max(begin, row.first_scored()); at < std::min(end, row.length());
           ++at) {
        where.push_back(r * (end - begin) + at - begin);
        targets.push_back(row.targets[at - row.first_scored()]);
        owners.push_back(&scores[row.item][row.choice]);
      }
    }
    const Tensor scored =
        model_->logits_at(tokens(rows, begin, end), positions(begin, end),
                          at::tensor(where, at::kLong).to(model_->device()), first_slot);  // [n, V]
    if (where.empty()) {
      return;
    }
    const Tensor expected = at::tensor(targets).to(scored.device());
    const int64_t count = scored.size(0);
    std::vector<Tensor> parts(scored.is_cpu() ? std::min<int64_t>(num_threads(), count)
                                              : 1);  // [2, n']: log p, greedy
    parallel_for(std::ssize(parts), [&](int64_t p) {
      const c10::InferenceMode inference;
      const int64_t begin = count * p / std::ssize(parts);
      const int64_t size = count * (p + 1) / std::ssize(parts) - begin;
      const Tensor rows = scored.narrow(0, begin, size);
      const Tensor tokens = expected.narrow(0, begin, size);
      const Tensor logprobs =
          at::log_softmax(rows, /*dim=*/-1, at::kFloat).gather(1, tokens.unsqueeze(1)).squeeze(1);
      parts[p] = at::stack({logprobs, rows.argmax(/*dim=*/-1).eq(tokens).to(at::kFloat)});
    });
    const Tensor found = at::cat(parts, /*dim=*/1).cpu();
    const float* logprobs = found.const_data_ptr<float>();
    const float* greedy = logprobs + count;
    for (size_t i = 0; i < owners.size(); ++i) {
      const double logprob = logprobs[i];
      TORCH_CHECK(!std::isnan(logprob),
                  "The model's logits are not numbers (NaN or infinite): the checkpoint is "
                  "damaged, or "
                  "too coarse a --precision was used.");
      owners[i]->loglikelihood += logprob;
      owners[i]->is_greedy = owners[i]->is_greedy && greedy[i] != 0;
    }
  }

  Transformer& model_;
  int64_t batch_rows_;
};

std::vector<Group> make_groups(std::vector<std::vector<TokenRequest>> items, int64_t max_length,
                               int64_t vocab_size) {
  std::vector<Group> groups;
  for (size_t item = 0; item < items.size(); ++item) {
    Group group;
    for (size_t choice = 0; choice < items[item].size(); ++choice) {
      group.rows.push_back(
          make_row(std::move(items[item][choice]), item, choice, max_length, vocab_size));
    }
    if (!group.rows.empty()) {
      group.prefix = shared_prefix(group.rows);
      groups.push_back(std::move(group));
    }
  }
  return groups;
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
  const auto groups = make_groups(std::move(items), eval_max_length(model->config, options),
                                  model->config.vocab_size);
  std::vector<const Group*> order;
  int64_t longest = 1;
  int64_t total = 0;
  for (const Group& group : groups) {
    order.push_back(&group);
    longest = std::max(longest, group.longest());
    total += std::ssize(group.rows);
  }
  // Longest first: the time left is rather over- than underestimated, and what does not fit in
  // memory fails at once.
  std::stable_sort(order.begin(), order.end(), [](const Group* a, const Group* b) {
    return std::pair(a->prefix, a->longest()) > std::pair(b->prefix, b->longest());
  });
  Scorer scorer(model, options.batch_size, longest);
  int64_t done = 0;
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin;
    int64_t rows = 0;
    while (end < order.size() &&
           (end == begin || rows + std::ssize(order[end]->rows) <= scorer.max_rows())) {
      rows += std::ssize(order[end++]->rows);
    }
    scorer.run(std::span(order).subspan(begin, end - begin), scores);
    done += rows;
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
