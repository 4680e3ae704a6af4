#include "server_engine.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>

#include "gptfast/ops.h"

namespace gptfast::server {
namespace {

/// Tokens of a prompt between two steps: enough rows for the matrix products to run well, few
/// enough for the running answers not to stall. A fixed number, so that a prompt's sums are the
/// same whatever runs beside it.
constexpr int64_t kPrefillPiece = 256;

/// Log-probabilities of one row of `log_softmax` [V].
TokenLogprob token_logprob(const Tensor& log_softmax, int32_t token, int64_t top) {
  TokenLogprob result{.logprob = log_softmax[token].item<float>(), .top = {}};
  if (top == 0) return result;
  const auto [values, ids] = log_softmax.topk(std::min(top, log_softmax.size(0)));
  for (int64_t i = 0; i < values.size(0); ++i)
    result.top.emplace_back(ids[i].item<int32_t>(), values[i].item<float>());
  return result;
}

Tensor log_softmax_on_host(const Tensor& logits) {
  return at::log_softmax(logits.to(at::kFloat), /*dim=*/-1).to(at::kCPU);
}

/// Runs `body`; what it throws becomes the message.
template <typename Body>
std::optional<std::string> error_message(Body body) {
  try {
    body();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
  return std::nullopt;
}

}  // namespace

// ---- Channel

void Channel::push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  filled_.notify_one();
}

std::optional<Event> Channel::pop(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (!filled_.wait_for(lock, timeout, [&] { return !events_.empty(); })) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

// ---- Engine: what other threads call

Engine::Engine(Transformer model, int64_t parallel, int64_t ctx_size, int64_t max_queue)
    : model_(std::move(model)),
      ctx_size_(ctx_size == 0 ? model_->config.block_size : ctx_size),
      max_queue_(max_queue),
      vocab_size_(model_->config.vocab_size) {
  TORCH_CHECK(parallel >= 1 && parallel <= kMaxStepRows, "parallel must be 1 to ", kMaxStepRows,
              ", got ", parallel);
  TORCH_CHECK(ctx_size_ >= 1 && ctx_size_ <= model_->config.block_size, "ctx_size is ", ctx_size,
              ", expected 1 to the model's context of ", model_->config.block_size);
  TORCH_CHECK(max_queue >= 1, "max_queue must be at least 1, got ", max_queue);
  slots_.resize(static_cast<size_t>(parallel));
  const c10::InferenceMode guard;
  model_->setup_caches(parallel, ctx_size_ + 1);
#ifdef GPTFAST_CUDA
  replays_ = !model_->reference() && DecodeGraph::supported(*model_);
#endif
  thread_ = std::thread([this] { work(); });
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_one();
  thread_.join();
}

bool Engine::submit(const std::vector<std::shared_ptr<Sequence>>& sequences) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(waiting_, [](const auto& sequence) { return sequence->cancelled.load(); });
    if (static_cast<int64_t>(waiting_.size() + sequences.size()) > max_queue_) return false;
    waiting_.insert(waiting_.end(), sequences.begin(), sequences.end());
  }
  arrived_.notify_one();
  return true;
}

// ---- The engine's thread

void Engine::work() {
  const c10::InferenceMode guard;
  while (admit()) {
    if (const auto error = error_message([&] { decode(); })) {
      for (Slot& slot : slots_) {
        if (slot.sequence && slot.next >= 0) fail(slot, *error);
      }
      error_message([&] { settle(); });
    }
    if (Slot* slot = next_prefill()) {
      const auto error = error_message([&] {
        settle();
        prefill_piece(*slot);
      });
      if (error && slot->sequence) fail(*slot, *error);
    }
  }
  error_message([&] { settle(); });
}

/// Waits for the captured steps under way and forgets whose they are.
void Engine::settle() {
#ifdef GPTFAST_CUDA
  if (std::exchange(unread_, 0) > 0) graph().drop();
  captured_.clear();
#endif
}

bool Engine::admit() {
  for (Slot& slot : slots_) {
    if (slot.sequence && slot.sequence->cancelled) slot = {};
  }
  const auto busy = [](const Slot& slot) { return slot.sequence != nullptr; };
  std::unique_lock lock(mutex_);
  if (std::none_of(slots_.begin(), slots_.end(), busy))
    arrived_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
  for (Slot& slot : slots_) {
    while (!slot.sequence && !waiting_.empty()) {
      if (!waiting_.front()->cancelled)
        slot = {.sequence = std::move(waiting_.front()), .order = arrivals_++};
      waiting_.pop_front();
    }
  }
  return !stopping_;
}

Engine::Slot* Engine::next_prefill() {
  Slot* first = nullptr;
  for (Slot& slot : slots_) {
    if (slot.sequence && slot.next < 0 && (first == nullptr || slot.order < first->order))
      first = &slot;
  }
  return first;
}

Tensor Engine::ints(const std::vector<int32_t>& values) const {
  return at::tensor(values, at::kInt).to(model_->device());
}

void Engine::prefill_piece(Slot& slot) {
  const Sequence& sequence = *slot.sequence;
  const auto length = static_cast<int64_t>(sequence.prompt.size());
  const int64_t size = std::min(kPrefillPiece, length - slot.fed);
  const bool all = sequence.prompt_logprobs;
  const auto begin = sequence.prompt.begin() + slot.fed;
  const Tensor tokens = ints({begin, begin + size}).unsqueeze(0);  // [1, size]
  Tensor logits;                                                   // [size or 1, V]
  if (length <= kMaxStepRows && !model_->reference()) {            // as prefill() does
    const auto greedy = make_sampling_params({.temperature = 0}, 1, model_->device());
    model_->step(tokens, ints({0}), ints({static_cast<int32_t>(index(slot))}), greedy);
    logits = model_->step_logits(size);
  } else {
    const Tensor pos = at::arange(slot.fed, slot.fed + size, tokens.options().dtype(at::kLong));
    logits = all ? model_->forward(tokens, pos, index(slot)).squeeze(0)
                 : model_->last_logits(tokens, pos, index(slot));
  }
  if (all) keep_prompt_logprobs(slot, logits);
  slot.fed += size;
  if (slot.fed == length)
    finish_prompt(slot, logits.narrow(0, logits.size(0) - 1, 1).to(at::kFloat).contiguous());
}

void Engine::keep_prompt_logprobs(Slot& slot, const Tensor& logits) {
  const std::vector<int32_t>& prompt = slot.sequence->prompt;
  const Tensor logprobs = log_softmax_on_host(logits);
  for (int64_t row = 0; row < logprobs.size(0); ++row) {
    const auto next = static_cast<size_t>(slot.fed + row + 1);
    if (next < prompt.size())
      slot.prompt_logprobs.push_back(
          token_logprob(logprobs[row], prompt[next], slot.sequence->logprobs));
  }
}

/// `logits` [1, V] float32 of the prompt's last position.
void Engine::finish_prompt(Slot& slot, const Tensor& logits) {
  Sequence& sequence = *slot.sequence;
  if (sequence.prompt_logprobs) {
    sequence.channel->push({.kind = Event::Kind::kPrompt,
                            .sequence = sequence.number,
                            .prompt = std::move(slot.prompt_logprobs)});
  }
  if (sequence.max_tokens == 0) return finish(slot, sequence.at_max_tokens);
  const StepRows rows{.tokens = ints({sequence.prompt.back()}).unsqueeze(0),
                      .pos = ints({static_cast<int32_t>(slot.fed - 1)}),
                      .slot = ints({static_cast<int32_t>(index(slot))})};
  Tensor next = at::empty_like(rows.pos);
  ops::sample(rows, logits, make_sampling_params(sequence.sampling, 1, model_->device()), next);
  accept(slot, next.item<int32_t>(), logits[0]);
}

std::vector<Engine::Row> Engine::active() {
  std::vector<Row> rows;
  for (Slot& slot : slots_) {
    if (slot.sequence && slot.next >= 0) rows.push_back({slot.sequence, &slot});
  }
  return rows;
}

void Engine::decode() {
#ifdef GPTFAST_CUDA
  if (replays_) return replay();
#endif
  const std::vector<Row> rows = active();
  if (rows.empty()) return;
  Tensor next;
  const Tensor logits = decode_logits(feed_of(rows), next);
  const Tensor host = next.to(at::kCPU);
  const auto* tokens = host.const_data_ptr<int32_t>();
  deliver(rows, {tokens, tokens + rows.size()}, logits);
}

#ifdef GPTFAST_CUDA
/// The same by the captured step. The next one is on its way before its tokens are known here
/// unless it is clear that the rows will be others.
void Engine::replay() {
  const std::vector<Row> rows = active();
  if (unread_ == 0) {
    if (rows.empty()) return captured_.clear();
    if (rows != captured_) capture(rows);
    launch();
  }
  if (rows == captured_ && may_run_ahead(rows)) launch();
  const std::vector<int32_t> tokens = graph().read();
  --unread_;
  deliver(captured_, tokens, model_->step_logits(std::ssize(captured_)));
}

DecodeGraph& Engine::graph() {
  return *graphs_[captured_.size() - 1];
}

/// Makes `rows` those of the next launch.
void Engine::capture(const std::vector<Row>& rows) {
  captured_ = rows;
  auto& graph = graphs_[rows.size() - 1];
  if (!graph) graph = std::make_unique<DecodeGraph>(*model_, std::ssize(rows));
  const Feed feed = feed_of(rows);
  graph->start(feed.tokens, feed.pos, feed.slot, feed.params);
}

void Engine::launch() {
  graph().launch();
  ++unread_;
}

/// True if the step after the one under way will have the same rows, as far as can be known, and
/// nobody asks for logits, which it would overwrite.
bool Engine::may_run_ahead(const std::vector<Row>& rows) {
  return next_prefill() == nullptr && std::all_of(rows.begin(), rows.end(), [](const Row& row) {
           return row.sequence->logprobs < 0 && row.slot->produced + 1 < row.sequence->max_tokens;
         });
}
#endif

/// To those of `rows` that are still there. logits [rows, V].
void Engine::deliver(const std::vector<Row>& rows, const std::vector<int32_t>& tokens,
                     const Tensor& logits) {
  for (size_t row = 0; row < rows.size(); ++row) {
    Slot& slot = *rows[row].slot;
    if (slot.sequence != rows[row].sequence) continue;
    ++slot.fed;
    accept(slot, tokens[row], logits[static_cast<int64_t>(row)]);
  }
}

Engine::Feed Engine::feed_of(const std::vector<Row>& rows) const {
  Feed feed;
  std::vector<int32_t> top_k;
  std::vector<float> temperature;
  std::vector<int64_t> seed;
  for (const Row& row : rows) {
    const SamplingOptions& sampling = row.sequence->sampling;
    feed.tokens.push_back(row.slot->next);
    feed.pos.push_back(static_cast<int32_t>(row.slot->fed));
    feed.slot.push_back(static_cast<int32_t>(index(*row.slot)));
    top_k.push_back(static_cast<int32_t>(sampling.top_k));
    temperature.push_back(static_cast<float>(sampling.temperature));
    seed.push_back(static_cast<int64_t>(sampling.seed));
  }
  feed.params = {.temperature = at::tensor(temperature),
                 .top_k = at::tensor(top_k, at::kInt),
                 .seed = at::tensor(seed, at::kLong)};
  return feed;
}

/// Logits [rows, V] float32 after one token of every row; `next` [rows] int32 is sampled from them.
Tensor Engine::decode_logits(const Feed& feed, Tensor& next) {
  const SamplingParams params{.temperature = feed.params.temperature.to(model_->device()),
                              .top_k = feed.params.top_k.to(model_->device()),
                              .seed = feed.params.seed.to(model_->device())};
  const StepRows step{.tokens = ints(feed.tokens).unsqueeze(1),
                      .pos = ints(feed.pos),
                      .slot = ints(feed.slot)};
  const int64_t count = std::ssize(feed.tokens);
  if (!model_->reference()) {
    next = model_->step(step.tokens, step.pos, step.slot, params);
    return model_->step_logits(count);
  }
  std::vector<Tensor> logits;
  for (int64_t row = 0; row < count; ++row) {
    logits.push_back(model_->last_logits(step.tokens.narrow(0, row, 1),
                                         step.pos.narrow(0, row, 1).to(at::kLong),
                                         feed.slot[static_cast<size_t>(row)]));
  }
  const Tensor all = at::cat(logits).to(at::kFloat).contiguous();
  next = at::empty_like(step.pos);
  ops::sample(step, all, params, next);
  return all;
}

/// A new token of a sequence, sampled from `logits` [V].
void Engine::accept(Slot& slot, int32_t token, const Tensor& logits) {
  Sequence& sequence = *slot.sequence;
  if (token < 0) {
    return fail(slot, "the model's logits are NaN at position " + std::to_string(slot.fed - 1) +
                          "; the checkpoint is damaged or the precision too small");
  }
  Event event{.kind = Event::Kind::kToken, .sequence = sequence.number, .token = token};
  if (sequence.logprobs >= 0)
    event.logprob = token_logprob(log_softmax_on_host(logits), token, sequence.logprobs);
  sequence.channel->push(std::move(event));
  slot.next = token;
  ++slot.produced;
  const auto& stop = sequence.stop_tokens;
  if (std::find(stop.begin(), stop.end(), token) != stop.end())
    return finish(slot, FinishReason::kStop);
  if (slot.produced == sequence.max_tokens) finish(slot, sequence.at_max_tokens);
}

void Engine::finish(Slot& slot, FinishReason reason) {
  const std::shared_ptr<Sequence> sequence = std::move(slot.sequence);
  slot = {};
  sequence->channel->push(
      {.kind = Event::Kind::kFinished, .sequence = sequence->number, .reason = reason});
}

void Engine::fail(Slot& slot, const std::string& message) {
  std::fprintf(stderr, "a request failed: %s\n", message.c_str());
  const std::shared_ptr<Sequence> sequence = std::move(slot.sequence);
  slot = {};
  sequence->channel->push(
      {.kind = Event::Kind::kFailed, .sequence = sequence->number, .message = message});
}

}  // namespace gptfast::server
