// The configuration that a GGUF file of the llama architecture carries.
#include <c10/util/Exception.h>

#include <cmath>
#include <numbers>

#include "gguf.h"

namespace gptfast {

namespace {

// Llama 3.1 and later: the file holds, for each rotary frequency, the number it is divided by.
std::vector<double> frequency_divisors(const RopeScaling& scaling, double base, int64_t head_dim) {
  const auto context = static_cast<double>(scaling.original_max_position_embeddings);
  std::vector<double> divisors;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double wavelength =
        2 * std::numbers::pi *
        std::pow(base, static_cast<double>(2 * i) / static_cast<double>(head_dim));
    if (wavelength < context / scaling.high_freq_factor) {
      divisors.push_back(1);
    } else if (wavelength > context / scaling.low_freq_factor) {
      divisors.push_back(scaling.factor);
    } else {
      const double smooth = (context / wavelength - scaling.low_freq_factor) /
                            (scaling.high_freq_factor - scaling.low_freq_factor);
      divisors.push_back(1 / ((1 - smooth) / scaling.factor + smooth));
    }
  }
  return divisors;
}

// The released scaling that has these divisors.
RopeScaling scaling_of(const GgufFile& gguf, const Tensor& divisors, double base,
                       int64_t head_dim) {
  constexpr double kTolerance = 1e-3;  // the file holds float32
  const float* found = divisors.const_data_ptr<float>();
  for (const double factor : {8.0, 32.0}) {
    const RopeScaling scaling{.factor = factor};
    const auto expected = frequency_divisors(scaling, base, head_dim);
    bool equal = static_cast<int64_t>(expected.size()) == divisors.numel();
    for (size_t i = 0; equal && i < expected.size(); ++i)
      equal = std::abs(found[i] - expected[i]) <= kTolerance * expected[i];
    if (equal) return scaling;
  }
  TORCH_CHECK(false, gguf.name(),
              ": rope_freqs.weight holds a frequency scaling other than those of Llama 3.1 and "
              "3.2, which is not supported");
}

void refuse_variants(const GgufFile& gguf, const ModelArgs& args) {
  const auto refuse = [&](bool unsupported, const std::string& what) {
    TORCH_CHECK(!unsupported, gguf.name(), ": ", what, ", which is not supported");
  };
  const auto scaling = gguf.text_or("llama.rope.scaling.type", "none");
  refuse(scaling != "none",
         "has the RoPE scaling '" + std::string(scaling) + "' (llama.rope.scaling.type)");
  const int64_t rotated = gguf.integer_or("llama.rope.dimension_count", args.head_dim);
  refuse(rotated != args.head_dim, "rotates " + std::to_string(rotated) + " of " +
                                       std::to_string(args.head_dim) + " dimensions of a head");
  const int64_t value_length = gguf.integer_or("llama.attention.value_length", args.head_dim);
  refuse(value_length != args.head_dim,
         "has values of another length than keys (llama.attention.value_length)");
}

}  // namespace

ModelArgs gguf_config(const GgufFile& gguf, const std::vector<SourceTensor>& tensors) {
  const auto architecture = gguf.text("general.architecture");
  TORCH_CHECK(architecture == "llama", gguf.name(), ": the architecture '", architecture,
              "' is not supported (known: llama)");
  const auto find = [&](std::string_view name) -> const SourceTensor* {
    for (const auto& tensor : tensors) {
      if (tensor.name == name) return &tensor;
    }
    return nullptr;
  };
  const SourceTensor* embedding = find("token_embd.weight");
  TORCH_CHECK(embedding != nullptr && embedding->shape.size() == 2, gguf.name(),
              ": has no matrix token_embd.weight");
  ModelArgs args;
  args.vocab_size = embedding->shape[0];
  args.block_size = gguf.integer("llama.context_length");
  args.n_layer = gguf.integer("llama.block_count");
  args.dim = gguf.integer("llama.embedding_length");
  args.intermediate_size = gguf.integer("llama.feed_forward_length");
  args.n_head = gguf.integer("llama.attention.head_count");
  args.n_local_heads = gguf.integer_or("llama.attention.head_count_kv", args.n_head);
  args.head_dim = gguf.integer_or("llama.attention.key_length", 0);
  args.norm_eps = gguf.number("llama.attention.layer_norm_rms_epsilon");
  args.rope_base = gguf.number_or("llama.rope.freq_base", 10000);
  args.sliding_window = gguf.integer_or("llama.attention.sliding_window", 0);
  args.tie_word_embeddings = find("output.weight") == nullptr;
  args.num_experts = gguf.integer_or("llama.expert_count", 0);
  args.num_activated_experts = gguf.integer_or("llama.expert_used_count", 0);
  try {
    args.finalize();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, gguf.name(), ": ", error.what_without_backtrace());
  }
  refuse_variants(gguf, args);
  if (const SourceTensor* divisors = find("rope_freqs.weight")) {
    args.rope_scaling = scaling_of(gguf, divisors->read(at::kFloat), args.rope_base, args.head_dim);
  }
  return args;
}

}  // namespace gptfast
