#include "gptfast/decode_graph.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>

#include "ops/cuda/captured_graph.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/step_ops.h"

namespace gptfast {

struct DecodeGraph::State {
  State(TransformerImpl& model, int64_t batch_size)
      : model(model),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, model.device().index())) {
    const auto ints = at::TensorOptions(model.device()).dtype(at::kInt);
    tokens = at::zeros({batch_size, 1}, ints);
    pos = at::zeros({batch_size}, ints);
    slot = at::zeros({batch_size}, ints);
    step = at::zeros({1}, ints);
    params = {.temperature = at::zeros({batch_size}, ints.dtype(at::kFloat)),
              .top_k = at::zeros({batch_size}, ints),
              .seed = at::zeros({batch_size}, ints.dtype(at::kLong))};
    history =
        at::empty({kMaxAhead, batch_size}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  }

  /// One step on the current stream.
  void run_step() {
    const Tensor next = model.step(tokens, pos, slot, params);
    const bool overlap = ops::cuda::overlap_kernels(model.device());
    C10_CUDA_CHECK(cuda::advance({.stream = stream.stream(), .pdl = overlap},
                                 {.next = next.const_data_ptr<int32_t>(),
                                  .rows = static_cast<int>(pos.numel()),
                                  .tokens = tokens.mutable_data_ptr<int32_t>(),
                                  .pos = pos.mutable_data_ptr<int32_t>(),
                                  .step = step.mutable_data_ptr<int32_t>(),
                                  .history = history.mutable_data_ptr<int32_t>(),
                                  .history_steps = static_cast<int>(kMaxAhead)}));
  }

  TransformerImpl& model;
  c10::cuda::CUDAStream stream;
  Tensor tokens, pos, slot, step, history;
  SamplingParams params;
  cuda::CapturedGraph graph;
  int64_t launched = 0, done = 0;
  std::array<at::cuda::CUDAEvent, kMaxAhead> events;
};

bool DecodeGraph::supported(TransformerImpl& model) {
  return ops::cuda::supports(model);
}

DecodeGraph::DecodeGraph(TransformerImpl& model, int64_t batch_size)
    : state_(std::make_unique<State>(model, batch_size)) {}

DecodeGraph::~DecodeGraph() = default;

DecodeGraph& TransformerImpl::decode_graph(int64_t batch_size) {
  if (!decode_graph_ || decode_graph_batch_ != batch_size) {
    decode_graph_ = std::make_shared<DecodeGraph>(*this, batch_size);
    decode_graph_batch_ = batch_size;
  }
  return *decode_graph_;
}

void DecodeGraph::start(const std::vector<int32_t>& tokens, const std::vector<int32_t>& pos,
                        const std::vector<int32_t>& slot, const SamplingParams& params) {
  State& s = *state_;
  const auto caller = c10::cuda::getCurrentCUDAStream(s.stream.device_index());
  const c10::cuda::CUDAStreamGuard guard(s.stream);
  at::cuda::CUDAEvent before;  // the prompt ran there
  before.record(caller);
  before.block(s.stream);
  s.params.temperature.copy_(params.temperature);
  s.params.top_k.copy_(params.top_k);
  s.params.seed.copy_(params.seed);
  const auto reset = [&] {
    s.tokens.copy_(at::tensor(tokens, at::kInt).unsqueeze(1));
    s.pos.copy_(at::tensor(pos, at::kInt));
    s.step.zero_();
  };
  s.slot.copy_(at::tensor(slot, at::kInt));
  reset();
  if (!s.graph.captured()) {
    s.run_step();  // the replay writes the same again
    s.graph.capture(s.stream, [&] { s.run_step(); });
    reset();
  }
  s.launched = s.done = 0;
}

void DecodeGraph::launch() {
  State& s = *state_;
  TORCH_CHECK(s.launched - s.done < kMaxAhead, "more than ", kMaxAhead, " unread decode steps");
  const c10::cuda::CUDAGuard guard(s.stream.device_index());
  s.graph.launch(s.stream);
  s.events[static_cast<size_t>(s.launched++ % kMaxAhead)].record(s.stream);
}

std::vector<int32_t> DecodeGraph::read() {
  State& s = *state_;
  TORCH_CHECK(s.done < s.launched, "read() without an unread decode step");
  const int64_t at = s.done++ % kMaxAhead;
  s.events[static_cast<size_t>(at)].synchronize();
  const int32_t* row = s.history.const_data_ptr<int32_t>() + at * s.history.size(1);
  return {row, row + s.history.size(1)};
}

Tensor DecodeGraph::logits(int64_t rows) {
  State& s = *state_;
  TORCH_CHECK(s.done == s.launched, "logits() with an unread decode step, which overwrites them");
  const c10::cuda::CUDAStreamGuard guard(s.stream);
  return s.model.step_logits(rows).clone();
}

void DecodeGraph::drop() {
  State& s = *state_;
  s.stream.synchronize();
  s.done = s.launched;
}

}  // namespace gptfast
