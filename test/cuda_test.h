// What the tests of the CUDA kernels share: the device, a fixture that skips without one, sizes and
// formats.
#pragma once

#ifdef GPTFAST_CUDA

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <vector>

#include "gptfast/generate.h"
#include "gptfast/model.h"

namespace gptfast {

const at::Device kGpu(at::kCUDA, 0);

inline at::TensorOptions ints() {
  return at::TensorOptions(kGpu).dtype(at::kInt);
}
inline at::TensorOptions floats() {
  return at::TensorOptions(kGpu).dtype(at::kFloat);
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(11);
  }
  c10::InferenceMode guard;
};

/// Sizes that are no multiple of a tile (16 rows) or a unit (64 or 128 columns).
inline ModelArgs odd_config(int64_t experts = 0, int64_t activated = 0) {
  ModelArgs config;
  config.n_layer = 2;
  config.n_head = 6;
  config.n_local_heads = 2;
  config.head_dim = 24;
  config.dim = 144;
  config.intermediate_size = 336;
  config.vocab_size = 333;
  config.block_size = 1024;
  config.num_experts = experts;
  config.num_activated_experts = activated;
  config.finalize();
  return config;
}

struct FormatCase {
  WeightScheme scheme;
  at::ScalarType precision;
  double tolerance;  // relative to the largest value
};

constexpr double kRounded = 1e-2;     // 16-bit activations
constexpr double kFifteenBit = 1e-3;  // 15-bit activations
inline const std::vector<FormatCase> kFormats = {
    {{WeightFormat::kBFloat16}, at::kBFloat16, kRounded},
    {{WeightFormat::kFloat16}, at::kHalf, kRounded},
    {{WeightFormat::kInt8}, at::kBFloat16, kFifteenBit},
    {{WeightFormat::kInt8}, at::kHalf, kFifteenBit},
    {{WeightFormat::kInt4, 32}, at::kBFloat16, kFifteenBit},
    {{WeightFormat::kInt4, 64}, at::kBFloat16, kFifteenBit},
    {{WeightFormat::kInt4, 128}, at::kBFloat16, kFifteenBit},
    {{WeightFormat::kInt4, 256}, at::kBFloat16, kFifteenBit},
};

/// What generate() gives without a captured graph: `tokens` new tokens and the logits of all that
/// were fed, on the host.
struct SingleSteps {
  SingleSteps(Transformer& model, const std::vector<int32_t>& prompt,
              const GenerateOptions& options) {
    const SamplingParams params = make_sampling_params(options.sampling, /*batch_size=*/1, kGpu);
    std::vector<Tensor> rows;
    Tensor fed = at::tensor(prompt, at::kInt).to(kGpu).unsqueeze(0);
    for (int64_t pos = 0; std::ssize(tokens) < options.max_new_tokens; pos += rows.back().size(0)) {
      fed = model->step(fed, at::full({1}, pos, ints()), at::zeros({1}, ints()), params)
                .clone()
                .unsqueeze(1);
      rows.push_back(model->step_logits(tokens.empty() ? std::ssize(prompt) : 1).cpu());
      tokens.push_back(fed.item<int32_t>());
    }
    logits = at::cat(rows);
  }
  std::vector<int32_t> tokens;
  Tensor logits;
};

}  // namespace gptfast

#endif
