#include "gptfast/generate.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "gptfast/speculative.h"
#include "gptfast/tp.h"
#ifdef GPTFAST_CUDA
#include "gptfast/decode_graph.h"
#include "gptfast/speculative_graph.h"
#endif

namespace gptfast {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Prompts longer than a step go through forward() in pieces of this many tokens, which bounds the
/// attention mask to kPrefillChunk * T; large enough for matrix products to run at full speed.
constexpr int64_t kPrefillChunk = 2048;

void check_prompt(const TransformerImpl& model, const std::vector<int32_t>& prompt,
                  const GenerateOptions& options) {
  const ModelArgs& config = model.config;
  TORCH_CHECK(!prompt.empty() || options.max_new_tokens == 0,
              "the prompt is empty: give at least one token (a BOS token, or text)");
  for (const int32_t id : prompt) {
    TORCH_CHECK(id >= 0 && id < config.vocab_size, "prompt token id ", id,
                " is outside the model's vocabulary of ", config.vocab_size,
                " tokens; is this the model's tokenizer?");
  }
  const auto end = options.start_pos + static_cast<int64_t>(prompt.size()) +
                   (options.max_new_tokens > 0 ? 1 : 0);
  TORCH_CHECK(end <= config.block_size, "the prompt of ", prompt.size(), " tokens",
              options.start_pos > 0
                  ? " after " + std::to_string(options.start_pos) + " earlier ones"
                  : "",
              " does not fit the model's context of ", config.block_size, " tokens; shorten it");
  TORCH_CHECK(options.batch_size >= 1 && options.batch_size <= kMaxStepRows,
              "batch_size must be 1 to ", kMaxStepRows, ", got ", options.batch_size);
}

bool is_speculative(const GenerateOptions& options) {
  return options.draft_model != nullptr || options.lookup;
}

void check_speculation(const TransformerImpl& model, int64_t text_length,
                       const GenerateOptions& options) {
  if (!is_speculative(options)) return;
  TORCH_CHECK(options.batch_size == 1, "speculative decoding works on one row; got batch_size ",
              options.batch_size);
  TORCH_CHECK(options.start_pos == 0, "speculative decoding starts at the beginning of a text");
  TORCH_CHECK(options.speculate_k >= 1 && options.speculate_k <= kMaxSpeculateK,
              "speculate_k must be 1 to ", kMaxSpeculateK, ", got ", options.speculate_k);
  if (options.draft_model != nullptr) check_draft_model(**options.draft_model, model, text_length);
}

/// One step of decoding: feeds `token` [B] of every row at position `pos`, returns the next tokens.
/// With --reference the plain forward() of the model takes the place of the fused step.
class Decoder {
 public:
  Decoder(Transformer& model, int64_t batch_size, const SamplingParams& params)
      : model_(model),
        params_(params),
        tokens_(at::empty({batch_size, 1}, int_options(model))),
        pos_(at::empty({batch_size}, int_options(model))),
        slot_(at::arange(batch_size, int_options(model))),
        next_(at::empty({batch_size}, int_options(model))) {}

  /// Next tokens [B] on the host, sampled from `logits` [B, V] of position `pos`.
  std::vector<int32_t> sample(const Tensor& logits, int64_t pos) {
    pos_.fill_(pos);
    ops::sample({.tokens = tokens_, .pos = pos_, .slot = slot_}, logits, params_, next_);
    if (model_->tp() != nullptr) model_->tp()->broadcast(next_);  // the ranks cannot drift apart
    return to_host(next_);
  }

  std::vector<int32_t> decode_one_token(const std::vector<int32_t>& token, int64_t pos) {
    set_input(token, pos);
    if (!model_->reference()) return to_host(model_->step(tokens_, pos_, slot_, params_));
    logits_ = model_->last_logits(tokens_, pos_.narrow(0, 0, 1).to(at::kLong))
                  .to(at::kFloat)
                  .contiguous();
    return sample(logits_, pos);
  }

  /// [B, V] of the last decode_one_token, valid until the next one.
  Tensor logits() const {
    return model_->reference() ? logits_ : model_->step_logits(slot_.numel());
  }

 private:
  static at::TensorOptions int_options(const Transformer& model) {
    return at::TensorOptions(model->device()).dtype(at::kInt);
  }

  void set_input(const std::vector<int32_t>& token, int64_t pos) {
    if (tokens_.is_cpu()) {  // a token of a small model takes as long as a few dozen ATen calls
      std::copy(token.begin(), token.end(), tokens_.data_ptr<int32_t>());
      std::fill_n(pos_.data_ptr<int32_t>(), pos_.numel(), static_cast<int32_t>(pos));
    } else {
      tokens_.copy_(at::tensor(token, at::kInt).unsqueeze(1));
      pos_.fill_(pos);
    }
  }

  std::vector<int32_t> to_host(const Tensor& tokens) const {
    const Tensor host = tokens.to(at::kCPU);
    const int32_t* data = host.const_data_ptr<int32_t>();
    return {data, data + tokens_.size(0)};
  }

  Transformer& model_;
  const SamplingParams& params_;
  Tensor tokens_, pos_, slot_, next_, logits_;
};

/// Copies the `used` first positions of slot 0 to the other rows: one prefill serves a batch of the
/// same prompt.
void copy_prompt_to_rows(Transformer& model, int64_t batch_size, int64_t used) {
  for (auto& layer : model->layers) {
    KVCache& cache = layer->attention->kv_cache;
    for (Tensor* half : {&cache.k_cache, &cache.v_cache}) {
      half->narrow(0, 1, batch_size - 1)
          .narrow(2, 0, used)
          .copy_(half->narrow(0, 0, 1).narrow(2, 0, used));
    }
  }
}

/// Takes the sampled tokens of all rows, ends rows that stop, and says whether any row goes on.
class RowCollector {
 public:
  RowCollector(const GenerateOptions& options, std::vector<GeneratedRow>& rows)
      : options_(options), rows_(rows), done_(rows.size()) {}

  bool push(const std::vector<int32_t>& next, int64_t pos) {
    for (size_t b = 0; b < rows_.size(); ++b) {
      if (done_[b]) continue;
      TORCH_CHECK(next[b] >= 0, "the model's logits are NaN at position ", pos,
                  "; the checkpoint is damaged or the precision too small");
      rows_[b].tokens.push_back(next[b]);
      const auto& stop = options_.stop_tokens;
      const bool stopped = std::find(stop.begin(), stop.end(), next[b]) != stop.end();
      const bool wanted = !options_.callback || options_.callback(static_cast<int64_t>(b), next[b]);
      if (stopped || !wanted) {
        rows_[b].finish_reason = FinishReason::kStop;
        done_[b] = true;
      }
    }
    return std::find(done_.begin(), done_.end(), false) != done_.end();
  }

  void finish(FinishReason reason) {
    for (size_t b = 0; b < rows_.size(); ++b) {
      if (!done_[b]) rows_[b].finish_reason = reason;
    }
  }

 private:
  const GenerateOptions& options_;
  std::vector<GeneratedRow>& rows_;
  std::vector<bool> done_;
};

/// Plain decoding: feeds `token` and what follows, up to `count` new tokens.
void decode_n_tokens(Decoder& decoder, std::vector<int32_t> token, int64_t pos, int64_t count,
                     const GenerateOptions& options, RowCollector& collector,
                     std::vector<Tensor>& fed_logits) {
  bool go_on = true;
  for (const int64_t end = pos + count; go_on && pos < end; ++pos) {
    token = decoder.decode_one_token(token, pos);
    if (options.return_logits) fed_logits.push_back(decoder.logits().narrow(0, 0, 1).clone());
    go_on = collector.push(token, pos);
  }
}

#ifdef GPTFAST_CUDA
/// The same as one captured step after another: the next one is on its way before the host sees a
/// token, unless the step's logits are to be kept first.
void decode_n_tokens(DecodeGraph& graph, const std::vector<int32_t>& token, int64_t pos,
                     int64_t count, const SamplingParams& params, const GenerateOptions& options,
                     RowCollector& collector, std::vector<Tensor>& fed_logits) {
  const std::vector<int32_t> positions(token.size(), static_cast<int32_t>(pos));
  std::vector<int32_t> slots(token.size());
  std::iota(slots.begin(), slots.end(), 0);
  graph.start(token, positions, slots, params);
  const int64_t ahead = options.return_logits ? 0 : 1;
  int64_t launched = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (; launched < std::min(i + 1 + ahead, count); ++launched) graph.launch();
    const std::vector<int32_t> next = graph.read();
    if (options.return_logits) fed_logits.push_back(graph.logits(/*rows=*/1));
    if (!collector.push(next, pos + i)) break;
  }
  graph.drop();
}

/// Captured rounds until the text has `end` tokens; `text` starts as all tokens so far. Returns how
/// many rounds added i + 1 tokens, for each i.
std::vector<int64_t> decode_speculatively(SpeculativeGraph& graph, const std::vector<int32_t>& text,
                                          int64_t end, const GenerateOptions& options,
                                          RowCollector& collector) {
  const int64_t most = options.speculate_k + 1;  // tokens of a round
  std::vector<int64_t> accept_counts(static_cast<size_t>(most));
  graph.start(text, end, options.sampling);
  auto size = static_cast<int64_t>(text.size());
  int64_t unread = 0;
  for (bool go_on = true; go_on && size < end; --unread) {
    // The next round is on its way before the host sees a token, unless this may be the last one.
    for (; unread == 0 || (unread == 1 && size + most < end); ++unread) graph.launch();
    const std::vector<int32_t> added = graph.read();
    ++accept_counts[added.size() - 1];
    for (const int32_t token : added) {
      if (!go_on) break;
      go_on = collector.push({token}, size++ - 1);
    }
  }
  return accept_counts;
}
#endif

/// Rounds of draft, verification and acceptance until max_new_tokens are there (`first`, sampled by
/// the prefill, counts). Returns how many rounds added i + 1 tokens, for each i.
std::vector<int64_t> decode_speculatively(Transformer& model, const std::vector<int32_t>& prompt,
                                          int32_t first, int64_t max_new_tokens,
                                          const GenerateOptions& options, RowCollector& collector,
                                          std::vector<Tensor>& fed_logits) {
  std::vector<int64_t> accept_counts(static_cast<size_t>(options.speculate_k) + 1);
  const auto T = static_cast<int64_t>(prompt.size());
  std::optional<DraftModel> draft_model;
  if (options.draft_model != nullptr)
    draft_model.emplace(*options.draft_model, prompt, T + max_new_tokens);

  std::vector<int32_t> text = prompt;  // all tokens so far; the last one is in no cache yet
  text.push_back(first);
#ifdef GPTFAST_CUDA
  const std::shared_ptr<TransformerImpl> drafting =
      options.draft_model != nullptr ? options.draft_model->ptr() : nullptr;
  if (max_new_tokens > 1 && !options.return_logits &&
      SpeculativeGraph::supported(*model, drafting.get())) {
    return decode_speculatively(model->speculative_graph(drafting, options.speculate_k), text,
                                T + max_new_tokens, options, collector);
  }
#endif
  const auto end = static_cast<size_t>(T + max_new_tokens);
  for (bool go_on = true; go_on && text.size() < end;) {
    const auto pos = static_cast<int64_t>(text.size()) - 1;
    const int64_t k = std::min(options.speculate_k, static_cast<int64_t>(end - text.size()) - 1);
    const Draft draft = draft_model ? draft_model->draft(text, k, options.sampling)
                                    : Draft{lookup_draft(text, k), {}};
    std::vector<int32_t> fed = {text.back()};
    fed.insert(fed.end(), draft.tokens.begin(), draft.tokens.end());
    const Tensor logits = verify(model, fed, pos);
    std::vector<int32_t> added = accept(draft, logits, options.sampling, pos);
    if (model->tp() != nullptr) added = model->tp()->broadcast(added);
    const auto count = static_cast<int64_t>(added.size());
    ++accept_counts[added.size() - 1];
    for (int64_t i = 0; go_on && i < count; ++i) {
      if (options.return_logits) fed_logits.push_back(logits.narrow(0, i, 1).clone());
      go_on = collector.push({added[static_cast<size_t>(i)]}, pos + i);
    }
    text.insert(text.end(), added.begin(), added.end());
    if (draft_model) draft_model->keep(pos + count);
  }
  return accept_counts;
}

}  // namespace

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kContext:
      return "context";
  }
  return "";
}

int64_t GenerateResult::new_tokens() const {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0},
                         [](int64_t sum, const GeneratedRow& row) {
                           return sum + static_cast<int64_t>(row.tokens.size());
                         });
}

double GenerateResult::tokens_per_sec() const {
  return static_cast<double>(new_tokens()) / seconds;
}

double GenerateResult::decode_tokens_per_sec() const {
  const auto decoded = new_tokens() - static_cast<int64_t>(rows.size());
  return decoded > 0 ? static_cast<double>(decoded) / (seconds - prefill_seconds) : 0;
}

Tensor prefill(Transformer& model, const std::vector<int32_t>& prompt, int64_t start_pos,
               Tensor* all_logits) {
  const auto T = static_cast<int64_t>(prompt.size());
  const Tensor tokens = at::tensor(prompt, at::kInt).to(model->device()).unsqueeze(0);  // [1, T]
  if (T <= kMaxStepRows && !model->reference()) {
    const auto options = tokens.options();
    const SamplingParams greedy =
        make_sampling_params({.temperature = 0}, /*batch_size=*/1, model->device());
    model->step(tokens, at::full({1}, start_pos, options), at::zeros({1}, options), greedy);
    const Tensor logits = model->step_logits(T);
    if (all_logits != nullptr) *all_logits = logits.clone();
    return logits.narrow(0, T - 1, 1).clone();
  }
  std::vector<Tensor> pieces;  // [size, V] of all_logits
  Tensor last;                 // [1, V]
  for (int64_t begin = 0; begin < T; begin += kPrefillChunk) {
    const int64_t size = std::min(kPrefillChunk, T - begin);
    const Tensor idx = tokens.narrow(1, begin, size);
    const Tensor input_pos =
        at::arange(start_pos + begin, start_pos + begin + size, tokens.options().dtype(at::kLong));
    if (all_logits != nullptr) {
      pieces.push_back(model->forward(idx, input_pos).squeeze(0).to(at::kFloat));
    } else {
      last = model->last_logits(idx, input_pos);
    }
  }
  if (all_logits == nullptr) return last.to(at::kFloat).contiguous();
  *all_logits = at::cat(pieces);
  return all_logits->narrow(0, T - 1, 1).clone();
}

GenerateResult generate(Transformer& model, const std::vector<int32_t>& prompt,
                        const GenerateOptions& options) {
  check_prompt(*model, prompt, options);
  const c10::InferenceMode guard;
  const auto start = Clock::now();
  const int64_t B = options.batch_size, T = options.start_pos + static_cast<int64_t>(prompt.size());
  const int64_t max_new_tokens = std::min(options.max_new_tokens, model->config.block_size - T);
  check_speculation(*model, T + max_new_tokens, options);
  GenerateResult result;
  result.rows.resize(static_cast<size_t>(B));
  std::vector<Tensor> fed_logits;  // of the prompt and of each token fed after it

  if (!prompt.empty() && (max_new_tokens > 0 || options.return_logits)) {
    model->setup_caches(B, T + max_new_tokens);
    const SamplingParams params = make_sampling_params(options.sampling, B, model->device());
    Decoder decoder(model, B, params);
    RowCollector collector(options, result.rows);

    Tensor prompt_logits;
    const Tensor last =
        prefill(model, prompt, options.start_pos, options.return_logits ? &prompt_logits : nullptr);
    if (options.return_logits) fed_logits.push_back(prompt_logits);
    if (max_new_tokens > 0) {
      if (B > 1) copy_prompt_to_rows(model, B, T);
      const std::vector<int32_t> next = decoder.sample(last.expand({B, -1}).contiguous(), T - 1);
      const bool go_on = collector.push(next, T - 1);
      result.prefill_seconds = seconds_since(start);
      if (go_on && is_speculative(options)) {
        result.accept_counts = decode_speculatively(model, prompt, next[0], max_new_tokens, options,
                                                    collector, fed_logits);
#ifdef GPTFAST_CUDA
      } else if (go_on && !model->reference() && DecodeGraph::supported(*model)) {
        decode_n_tokens(model->decode_graph(B), next, T, max_new_tokens - 1, params, options,
                        collector, fed_logits);
#endif
      } else if (go_on) {
        decode_n_tokens(decoder, next, T, max_new_tokens - 1, options, collector, fed_logits);
      }
    }
    collector.finish(max_new_tokens < options.max_new_tokens ? FinishReason::kContext
                                                             : FinishReason::kLength);
  }
  if (options.return_logits) {
    result.logits = fed_logits.empty() ? at::empty({0, model->config.vocab_size}, at::kFloat)
                                       : at::cat(fed_logits).to(at::kCPU);
  }
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace gptfast
