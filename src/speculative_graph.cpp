#include "gptfast/speculative_graph.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "gptfast/decode_graph.h"
#include "gptfast/speculative.h"
#include "ops/cuda/captured_graph.h"
#include "ops/cuda/speculate.h"
#include "ops/cuda/step_ops.h"

namespace gptfast {

using cuda::RoundState;

namespace {

/// Slots and length: caches that are made anew are larger.
std::pair<int64_t, int64_t> caches_of(const TransformerImpl* draft) {
  return draft == nullptr ? std::pair<int64_t, int64_t>()
                          : std::pair(draft->max_batch_size, draft->max_seq_length);
}

}  // namespace

struct SpeculativeGraph::State {
  State(TransformerImpl& model, const std::shared_ptr<TransformerImpl>& draft, int64_t k)
      : model(model),
        draft(draft.get()),
        draft_owner(draft),
        draft_caches(caches_of(draft.get())),
        k(k),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, model.device().index())) {
    const auto ints = at::TensorOptions(model.device()).dtype(at::kInt);
    const auto floats = ints.dtype(at::kFloat);
    const auto pinned = at::TensorOptions().dtype(at::kInt).pinned_memory(true);
    const int64_t V = model.config.vocab_size, steps = k / kMaxStepRows + 1;
    state = at::zeros({sizeof(RoundState)}, ints.dtype(at::kByte));
    text = at::zeros({model.max_seq_length}, ints);
    tokens = at::zeros({1, k + 1}, ints);
    positions = at::zeros({steps}, ints);
    first_tokens = at::zeros({1, 2}, ints);
    draft_token = at::zeros({1, 1}, ints);
    draft_pos = at::zeros({1}, ints);
    slot = at::zeros({1}, ints);
    forced = at::zeros({0}, ints);
    stats = at::empty({(2 * k + 1) * static_cast<int64_t>(sizeof(cuda::RowStats))},
                      ints.dtype(at::kByte));
    if (draft != nullptr) draft_logits = at::empty({k, V}, floats);
    if (steps > 1) logits = at::empty({k + 1, V}, floats);
    greedy = make_sampling_params({.temperature = 0}, /*batch_size=*/1, model.device());
    sampling = {.temperature = field(offsetof(RoundState, temperature), at::kFloat),
                .top_k = field(offsetof(RoundState, top_k), at::kInt),
                .seed = field(offsetof(RoundState, seed), at::kLong)};
    history = at::zeros({kMaxAhead, k + 2}, pinned);
    host_text = at::zeros({model.max_seq_length}, pinned);
    host_state = at::zeros({sizeof(RoundState)}, pinned.dtype(at::kByte));
  }

  ~State() { cudaStreamSynchronize(stream.stream()); }  // a round may still run

  /// A member of the device's RoundState as a tensor of one element.
  Tensor field(size_t offset, at::ScalarType type) {
    return state
        .narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(c10::elementSize(type)))
        .view(type);
  }

  cuda::Launch how() const {
    return {.stream = stream.stream(),
            .pdl = ops::cuda::overlap_kernels(model.device()),
            .clusters = at::cuda::getDeviceProperties(model.device().index())->major >= 9};
  }

  cuda::RoundArgs round_args() {
    return {.state = reinterpret_cast<RoundState*>(state.mutable_data_ptr()),
            .text = text.mutable_data_ptr<int32_t>(),
            .k = static_cast<int>(k),
            .tokens = tokens.mutable_data_ptr<int32_t>(),
            .positions = positions.mutable_data_ptr<int32_t>(),
            .rows_of_step = static_cast<int>(kMaxStepRows),
            .first_tokens = first_tokens.mutable_data_ptr<int32_t>(),
            .draft_token = draft_token.mutable_data_ptr<int32_t>(),
            .draft_pos = draft_pos.mutable_data_ptr<int32_t>()};
  }

  /// k steps of the draft. The first feeds the text's last two tokens: of the one before last the
  /// draft's cache knows nothing after a fully accepted draft, else it is written the same again.
  void run_draft(const cuda::RoundArgs& round) {
    for (int64_t i = 0; i < k; ++i) {
      const Tensor& fed = i == 0 ? first_tokens : draft_token;
      const Tensor next = draft->step(fed, draft_pos, slot, sampling);
      const Tensor row = draft->step_logits(fed.numel()).select(0, -1);
      C10_CUDA_CHECK(cuda::keep_draft(how(), round, static_cast<int>(i),
                                      next.const_data_ptr<int32_t>(), row.const_data_ptr<float>(),
                                      draft_logits[i].mutable_data_ptr<float>(),
                                      static_cast<int>(row.numel())));
    }
  }

  /// The model over the text's last token and the draft. Returns the logits [k + 1, V].
  Tensor run_verification() {
    for (int64_t begin = 0; begin <= k; begin += kMaxStepRows) {
      const int64_t rows = std::min(kMaxStepRows, k + 1 - begin);
      model.step(tokens.narrow(1, begin, rows), positions.narrow(0, begin / kMaxStepRows, 1), slot,
                 greedy);
      if (!logits.defined()) return model.step_logits(rows);
      logits.narrow(0, begin, rows).copy_(model.step_logits(rows), /*non_blocking=*/true);
    }
    return logits;
  }

  /// One round on the current stream.
  void run_round() {
    const cuda::RoundArgs round = round_args();
    C10_CUDA_CHECK(cuda::begin_round(how(), round, /*lookup=*/draft == nullptr,
                                     static_cast<int>(kLookupNgram)));
    if (draft != nullptr) run_draft(round);
    const Tensor verified = run_verification();
    cuda::Launch launch = how();
    if (logits.defined()) launch.pdl = false;  // only kernels overlap, and a copy goes before
    C10_CUDA_CHECK(
        cuda::accept_round(launch,
                           {.round = round,
                            .logits = verified.const_data_ptr<float>(),
                            .draft_logits = draft_logits.defined()
                                                ? draft_logits.const_data_ptr<float>()
                                                : nullptr,
                            .vocab = static_cast<int>(verified.size(1)),
                            .stats = reinterpret_cast<cuda::RowStats*>(stats.mutable_data_ptr()),
                            .forced = forced.const_data_ptr<int32_t>(),
                            .forced_rounds = static_cast<int>(forced.numel()),
                            .history = history.mutable_data_ptr<int32_t>(),
                            .history_rounds = static_cast<int>(kMaxAhead)}));
  }

  TransformerImpl& model;
  TransformerImpl* draft;
  std::weak_ptr<TransformerImpl> draft_owner;
  std::pair<int64_t, int64_t> draft_caches;
  int64_t k;
  c10::cuda::CUDAStream stream;
  Tensor state, text, tokens, positions, first_tokens, draft_token, draft_pos, slot;
  Tensor stats, draft_logits, logits, forced;  // `logits` where a verification takes several steps
  SamplingParams sampling, greedy;
  Tensor history, host_text, host_state;
  cuda::CapturedGraph graph;
  int64_t launched = 0, done = 0;
  std::array<at::cuda::CUDAEvent, kMaxAhead> events;
};

bool SpeculativeGraph::supported(TransformerImpl& model, TransformerImpl* draft) {
  const auto fits = [](TransformerImpl& m) {
    return DecodeGraph::supported(m) && m.tp() == nullptr && !m.reference();
  };
  return fits(model) && (draft == nullptr || (fits(*draft) && draft->device() == model.device()));
}

SpeculativeGraph::SpeculativeGraph(TransformerImpl& model,
                                   const std::shared_ptr<TransformerImpl>& draft, int64_t k)
    : state_(std::make_unique<State>(model, draft, k)) {}

SpeculativeGraph::~SpeculativeGraph() = default;

bool SpeculativeGraph::is_for(const std::shared_ptr<TransformerImpl>& draft, int64_t k) const {
  const State& s = *state_;
  return s.k == k && s.draft_owner.lock() == draft && s.draft_caches == caches_of(draft.get());
}

SpeculativeGraph& TransformerImpl::speculative_graph(const std::shared_ptr<TransformerImpl>& draft,
                                                     int64_t k) {
  if (!speculative_graph_ || !speculative_graph_->is_for(draft, k)) {
    speculative_graph_.reset();  // its memory first
    speculative_graph_ = std::make_shared<SpeculativeGraph>(*this, draft, k);
  }
  return *speculative_graph_;
}

void SpeculativeGraph::start(std::span<const int32_t> text, int64_t end,
                             const SamplingOptions& sampling) {
  State& s = *state_;
  const auto size = static_cast<int64_t>(text.size());
  TORCH_CHECK(size >= 2 && size <= end && end <= s.text.numel(), "a text of ", size,
              " tokens that may grow to ", end, " does not fit caches of ", s.text.numel());
  const c10::cuda::CUDAStreamGuard guard(s.stream);
  s.stream.synchronize();      // the buffers below may be on their way to the device
  at::cuda::CUDAEvent before;  // the prompt ran on the caller's stream
  before.record(c10::cuda::getDefaultCUDAStream(s.stream.device_index()));
  before.block(s.stream);
  const auto reset = [&] {
    std::copy(text.begin(), text.end(), s.host_text.mutable_data_ptr<int32_t>());
    *reinterpret_cast<RoundState*>(
        s.host_state.mutable_data_ptr()) = {.seed = static_cast<int64_t>(sampling.seed),
                                            .temperature = static_cast<float>(sampling.temperature),
                                            .top_k = static_cast<int32_t>(
                                                std::min<int64_t>(sampling.top_k, INT32_MAX)),
                                            .pos = static_cast<int32_t>(size - 1),
                                            .end = static_cast<int32_t>(end),
                                            .round = 0,
                                            .drafted = 0};
    s.text.narrow(0, 0, size).copy_(s.host_text.narrow(0, 0, size), /*non_blocking=*/true);
    s.state.copy_(s.host_state, /*non_blocking=*/true);
  };
  reset();
  if (!s.graph.captured()) {
    s.run_round();  // a replay writes the same again
    s.graph.capture(s.stream, [&] { s.run_round(); });
    s.stream.synchronize();
    reset();
  }
  s.launched = s.done = 0;
}

void SpeculativeGraph::launch() {
  State& s = *state_;
  TORCH_CHECK(s.launched - s.done < kMaxAhead, "more than ", kMaxAhead, " unread rounds");
  const c10::cuda::CUDAGuard guard(s.stream.device_index());
  s.graph.launch(s.stream);
  at::cuda::CUDAEvent& event = s.events[static_cast<size_t>(s.launched++ % kMaxAhead)];
  event.record(s.stream);
  // A round that nobody reads may still run when the caller goes on to another text.
  event.block(c10::cuda::getDefaultCUDAStream(s.stream.device_index()));
}

std::vector<int32_t> SpeculativeGraph::read() {
  State& s = *state_;
  TORCH_CHECK(s.done < s.launched, "read() without an unread round");
  const int64_t at = s.done++ % kMaxAhead;
  s.events[static_cast<size_t>(at)].synchronize();
  const int32_t* row = s.history.const_data_ptr<int32_t>() + at * s.history.size(1);
  return {row + 1, row + 1 + row[0]};
}

void SpeculativeGraph::force_acceptance(const std::vector<int32_t>& accepted) {
  State& s = *state_;
  TORCH_CHECK(!s.graph.captured(), "force_acceptance() after the first start()");
  s.forced = at::tensor(accepted, at::kInt).to(s.model.device());
}

}  // namespace gptfast
