// A real model against the Python original: SmolLM2-135M-Instruct in float32, converted from its
// GGUF file. GPTFAST_SMOLLM2 names the folder (scripts/test.sh makes it); without it these tests
// are skipped.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "gptfast/generate.h"
#include "gptfast/tokenizer.h"
#include "sha256.h"
#include "test_util.h"

namespace gptfast {
namespace {

std::vector<int32_t> to_vector(const Tensor& ids) {
  const Tensor i32 = ids.to(at::kInt).contiguous();
  return {i32.const_data_ptr<int32_t>(), i32.const_data_ptr<int32_t>() + i32.numel()};
}

class SmolLM2 : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("GPTFAST_SMOLLM2");
    if (folder == nullptr) GTEST_SKIP() << "GPTFAST_SMOLLM2 is not set";
    directory = folder;
    model = load_model(directory / "model.pth", {.config = "",
                                                 .precision = at::kFloat,
                                                 .device = at::kCPU,
                                                 .reference = false,
                                                 .progress = {}});
    original = load_checkpoint(golden("smollm2/golden.fp32.pth"));
  }

  /// Perplexity of the reference text with the original's protocol: one window of 2048 tokens, no
  /// BOS.
  double perplexity() {
    const c10::InferenceMode guard;
    const Tensor ids = original.at("ppl.token_ids").to(at::kLong).flatten();
    const int64_t n = ids.numel();
    model->setup_caches(1, n);
    const Tensor logits = model->forward(ids.view({1, n}), at::arange(n))[0];
    const Tensor nll = at::cross_entropy_loss(logits.narrow(0, 0, n - 1), ids.narrow(0, 1, n - 1));
    return std::exp(nll.item<double>());
  }

  std::filesystem::path directory;
  Transformer model{nullptr};
  StateDict original;
};

TEST_F(SmolLM2, TensorsAreTheOriginals) {
  std::ifstream file(golden("smollm2/sha256.fp32.json"));
  const auto expected = nlohmann::json::parse(file).get<std::map<std::string, std::string>>();
  const StateDict tensors = load_checkpoint(directory / "model.pth");
  EXPECT_EQ(tensors.size(), expected.size());
  for (const auto& [name, tensor] : tensors) {
    Sha256 hash;
    hash.update({static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()});
    EXPECT_EQ(hash.hex_digest(), expected.at(name)) << name;
  }
}

TEST_F(SmolLM2, LogitsAndGreedyTokensAreTheOriginals) {
  for (const std::string prompt : {"story", "chat", "code"}) {
    GenerateOptions options;
    options.max_new_tokens = 64;
    options.sampling.temperature = 0;
    options.return_logits = true;
    const auto ids = to_vector(original.at(prompt + ".prompt_ids"));
    const GenerateResult result = generate(model, ids, options);
    EXPECT_EQ(result.rows[0].tokens, to_vector(original.at(prompt + ".tokens"))) << prompt;
    const Tensor last = result.logits[static_cast<int64_t>(ids.size()) - 1];
    EXPECT_LT(relative_difference(last, original.at(prompt + ".last_prompt_logits")), 1e-4)
        << prompt;
  }
}

TEST_F(SmolLM2, PerplexityIsTheOriginals) {
  const double expected = std::exp(original.at("ppl.nll").to(at::kDouble).mean().item<double>());
  EXPECT_NEAR(expected, 3.7743, 5e-5);
  EXPECT_NEAR(perplexity(), expected, 5e-5);
  model->set_reference(true);
  EXPECT_NEAR(perplexity(), expected, 5e-5);
}

TEST_F(SmolLM2, TheTokenizerGivesTheOriginalsPromptIds) {
  const auto tokenizer = Tokenizer::load(Tokenizer::find(directory));
  EXPECT_EQ(tokenizer->encode("Once upon a time, in a small village by the sea, there lived"),
            to_vector(original.at("story.prompt_ids")));
  EXPECT_FALSE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->chat_template(), "chatml");
}

}  // namespace
}  // namespace gptfast
