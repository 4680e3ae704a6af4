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
    if (Slot* slot = next_prefill()) {
      const auto error = error_message([&] { prefill_piece(*slot); });
      if (error && slot->sequence) fail(*slot, *error);
    }
    const auto error = error_message([&] { decode(); });
    if (!error) continue;
    for (Slot& slot : slots_) {
      if (slot.sequence && slot.next >= 0) fail(slot, *error);
    }
  }
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

void Engine::decode() {
  std::vector<Slot*> rows;
  for (Slot& slot : slots_) {
    if (slot.sequence && slot.next >= 0) rows.push_back(&slot);
  }
  if (rows.empty()) return;
  Tensor next;
  const Tensor logits = decode_logits(rows, next);
  const Tensor host = next.to(at::kCPU);
  for (size_t row = 0; row < rows.size(); ++row) {
    ++rows[row]->fed;
    accept(*rows[row], host.const_data_ptr<int32_t>()[row], logits[static_cast<int64_t>(row)]);
  }
}

/// Feeds one token of every row. Logits [rows, V] float32; `next` [rows] int32 is sampled from
/// them.
Tensor Engine::decode_logits(const std::vector<Slot*>& rows, Tensor& next) {
  std::vector<int32_t> tokens, pos, slot, top_k;
  std::vector<float> temperature;
  std::vector<int64_t> seed;
  for (const Slot* row : rows) {
    const SamplingOptions& sampling = row->sequence->sampling;
    tokens.push_back(row->next);
    pos.push_back(static_cast<int32_t>(row->fed));
    slot.push_back(static_cast<int32_t>(index(*row)));
    top_k.push_back(static_cast<int32_t>(sampling.top_k));
    temperature.push_back(static_cast<float>(sampling.temperature));
    seed.push_back(static_cast<int64_t>(sampling.seed));
  }
  const SamplingParams params{.temperature = at::tensor(temperature).to(model_->device()),
                              .top_k = ints(top_k),
                              .seed = at::tensor(seed).to(model_->device())};
  const StepRows step{.tokens = ints(tokens).unsqueeze(1), .pos = ints(pos), .slot = ints(slot)};
  const auto count = static_cast<int64_t>(rows.size());
  if (!model_->reference()) {
    next = model_->step(step.tokens, step.pos, step.slot, params);
    return model_->step_logits(count);
  }
  std::vector<Tensor> logits;
  for (int64_t row = 0; row < count; ++row) {
    logits.push_back(model_->last_logits(step.tokens.narrow(0, row, 1),
                                         step.pos.narrow(0, row, 1).to(at::kLong),
                                         index(*rows[static_cast<size_t>(row)])));
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
