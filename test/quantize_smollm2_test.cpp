// Quality of a quantized real model. GPTFAST_SMOLLM2 names the folder of a converted
// SmolLM2-135M-Instruct (float32), as scripts/test.sh makes it; without it the tests are skipped.
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gptfast/generate.h"
#include "gptfast/quantize.h"
#include "sha256.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class SmolLM2 : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("GPTFAST_SMOLLM2");
    if (folder == nullptr) GTEST_SKIP() << "GPTFAST_SMOLLM2 is not set";
    source_ = fs::path(folder) / "model.pth";
    std::ifstream in(golden("quantize/smollm2.json"));
    expected_ = json::parse(in);
    fs::copy(fs::path(folder) / "config.json", dir_ / "config.json");
  }

  /// The quantized model in float32.
  Transformer quantized(const QuantizeOptions& options) {
    quantize(source_, dir_ / "model.pth", options);
    return load_model(dir_ / "model.pth", {.precision = at::kFloat});
  }

  /// Perplexity of the first 2048 tokens of a text, all in one pass.
  double perplexity(Transformer& model) {
    const at::InferenceMode guard;
    const Tensor ids = at::tensor(expected_.at("ppl_ids").get<std::vector<int64_t>>(), at::kLong);
    const int64_t n = ids.size(0);
    model->setup_caches(1, n);
    const Tensor logits = model->forward(ids.view({1, n}), at::arange(n))[0].to(at::kFloat);
    const Tensor losses =
        at::cross_entropy_loss(logits.narrow(0, 0, n - 1), ids.narrow(0, 1, n - 1));
    return std::exp(losses.item<double>());
  }

  fs::path source_;
  json expected_;
  TempDir dir_;
};

TEST_F(SmolLM2, Int8) {
  Transformer model = quantized({.format = WeightFormat::kInt8});
  const StateDict written = load_checkpoint(dir_ / "model.pth");
  const json& hashes = expected_.at("int8_sha256");
  EXPECT_EQ(written.size(), hashes.size());
  for (const auto& [name, tensor] : written) {
    Sha256 hash;
    hash.update({static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()});
    EXPECT_EQ(hash.hex_digest(), hashes.at(name).get<std::string>()) << name;
  }
  EXPECT_NEAR(perplexity(model) / expected_.at("ppl").at("int8").get<double>(), 1, 1e-3);

  constexpr double kClearMargin =
      0.03;  // between the first and the second choice: the fused ops round activations
  for (const char* prompt : {"story", "chat"}) {
    const auto ids = expected_.at("prompt_ids").at(prompt).get<std::vector<int32_t>>();
    const auto result =
        generate(model, ids, {.max_new_tokens = 64, .sampling = {.temperature = 0}});
    const auto tokens = expected_.at("int8_tokens").at(prompt).get<std::vector<int32_t>>();
    const auto margins = expected_.at("int8_margins").at(prompt).get<std::vector<double>>();
    for (size_t i = 0; i < tokens.size() && margins[i] > kClearMargin; ++i)
      ASSERT_EQ(result.rows[0].tokens.at(i), tokens[i]) << prompt << " " << i;
  }
}

TEST_F(SmolLM2, Int4) {
  for (const int64_t g : {32, 64}) {
    Transformer model = quantized({.format = WeightFormat::kInt4, .groupsize = g});
    const double expected = expected_.at("ppl").at("int4.g" + std::to_string(g)).get<double>();
    EXPECT_NEAR(perplexity(model) / expected, 1, 1e-3) << g;
    // Smaller than the model in bfloat16, though the file pads K = 576 to 1024.
    EXPECT_LT(fs::file_size(dir_ / "model.pth"), fs::file_size(source_) / 2);
  }
}

}  // namespace
}  // namespace gptfast
