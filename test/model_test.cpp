// The model against the Python original: tiny models with golden logits (forward and step), and
// what the two ways owe each other.
#include "gptfast/model.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "test_util.h"

namespace gptfast {
namespace {

const SamplingOptions kGreedy{.temperature = 0, .top_k = 0, .seed = 0};

Tensor ints(const std::vector<int32_t>& values) {
  return at::tensor(values, at::kInt);
}

/// Logits [S, V] of tokens ids [S] at positions start.. through step(), in slices of kMaxStepRows.
Tensor step_all(Transformer& model, const Tensor& ids, int64_t start,
                int64_t slice = kMaxStepRows) {
  const SamplingParams params = make_sampling_params(kGreedy, 1, at::kCPU);
  std::vector<Tensor> logits;
  for (int64_t i = 0; i < ids.numel(); i += slice) {
    const int64_t n = std::min(slice, ids.numel() - i);
    model->step(ids.narrow(0, i, n).to(at::kInt).view({1, n}),
                ints({static_cast<int32_t>(start + i)}), ints({0}), params);
    logits.push_back(model->step_logits().narrow(0, 0, n).clone());
  }
  return at::cat(logits);
}

Tensor forward_all(Transformer& model, const Tensor& ids, int64_t start) {
  return model->forward(ids.view({1, -1}), at::arange(start, start + ids.numel(), at::kLong))
      .squeeze(0);
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  c10::InferenceMode guard_;
};

INSTANTIATE_TEST_SUITE_P(Tiny, Golden,
                         ::testing::Values("tiny-mha", "tiny-gqa", "tiny-draft", "tiny-moe"));

using LogitsOf = Tensor (*)(Transformer&, const Tensor&, int64_t);
Tensor through_step(Transformer& model, const Tensor& ids, int64_t start) {
  return step_all(model, ids, start);
}

/// Prompt logits, logits of each decoded token and the greedy tokens of the original.
void expect_original_fp32(const std::string& name, LogitsOf logits_of) {
  Transformer model = tiny_model(name);
  model->setup_caches(1, 64);
  const StateDict g = load_checkpoint(golden(name) / "golden.fp32.pth");
  const Tensor &prompt = g.at("prompt_ids"), &tokens = g.at("decode_tokens");
  const Tensor prompt_logits = logits_of(model, prompt, 0);
  EXPECT_LT(relative_difference(prompt_logits, g.at("prefill_logits")), 1e-5);
  Tensor last = prompt_logits[-1];
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    ASSERT_EQ(last.argmax().item<int64_t>(), tokens[i].item<int64_t>()) << "token " << i;
    last = logits_of(model, tokens[i].view({1}), prompt.numel() + i)[0];
    EXPECT_LT(relative_difference(last, g.at("decode_logits")[i]), 1e-5) << "token " << i;
  }
}

TEST_P(Golden, ForwardEqualsTheOriginalInFp32) {
  expect_original_fp32(GetParam(), forward_all);
}
TEST_P(Golden, StepEqualsTheOriginalInFp32) {
  expect_original_fp32(GetParam(), through_step);
}

TEST_P(Golden, Bf16StaysWithinTheOriginalsOwnError) {
  Transformer model = tiny_model(GetParam(), at::kBFloat16);
  model->setup_caches(1, 64);
  const StateDict bf16 = load_checkpoint(golden(GetParam()) / "golden.bf16.pth");
  const StateDict fp32 = load_checkpoint(golden(GetParam()) / "golden.fp32.pth");
  const Tensor& exact = fp32.at("prefill_logits");
  const double own_error =
      (bf16.at("prefill_logits").to(at::kFloat) - exact).abs().max().item<double>();
  for (const LogitsOf logits_of : {LogitsOf(forward_all), LogitsOf(through_step)}) {
    const Tensor ours = logits_of(model, fp32.at("prompt_ids"), 0).to(at::kFloat);
    EXPECT_LT((ours - exact).abs().max().item<double>(), 1.25 * own_error);
    EXPECT_LT((ours - exact).abs().mean().item<double>(),
              1.05 *
                  (bf16.at("prefill_logits").to(at::kFloat) - exact).abs().mean().item<double>());
  }
}

TEST_P(Golden, Fp16IsCloserThanBf16) {
  Transformer model = tiny_model(GetParam(), at::kHalf);
  model->setup_caches(1, 64);
  const StateDict g = load_checkpoint(golden(GetParam()) / "golden.fp32.pth");
  EXPECT_LT(relative_difference(forward_all(model, g.at("prompt_ids"), 0), g.at("prefill_logits")),
            2e-3);
  EXPECT_LT(relative_difference(step_all(model, g.at("prompt_ids"), 0), g.at("prefill_logits")),
            2e-3);
}

TEST_P(Golden, LongPromptsAndBatches) {
  Transformer model = tiny_model(GetParam());
  model->setup_caches(2, 304);
  const StateDict g = load_checkpoint(golden(GetParam()) / "golden_long_batch.fp32.pth");
  const Tensor& long_ids = g.at("long_prompt_ids");
  EXPECT_LT(relative_difference(forward_all(model, long_ids, 0).narrow(0, 296, 4),
                                g.at("long_last4_logits")),
            1e-5);
  EXPECT_LT(relative_difference(step_all(model, long_ids, 0).narrow(0, 296, 4),
                                g.at("long_last4_logits")),
            1e-5);
  const Tensor& batch = g.at("batch_prompt_ids");
  EXPECT_LT(relative_difference(model->forward(batch, at::arange(batch.size(1))),
                                g.at("batch_logits")),
            1e-5);
}

TEST_P(Golden, PromptInPiecesAndLastLogitsEqualTheWhole) {
  Transformer model = tiny_model(GetParam());
  model->setup_caches(1, 64);
  const StateDict g = load_checkpoint(golden(GetParam()) / "golden.fp32.pth");
  const Tensor& ids = g.at("prompt_ids");
  forward_all(model, ids.narrow(0, 0, 10),
              0);  // the second piece needs rows of the causal mask past position 0
  const Tensor second = forward_all(model, ids.narrow(0, 10, ids.numel() - 10), 10);
  EXPECT_LT(relative_difference(second, g.at("prefill_logits").narrow(0, 10, ids.numel() - 10)),
            1e-5);
  const Tensor last = model->last_logits(ids.view({1, -1}), at::arange(ids.numel()));
  EXPECT_LT(relative_difference(last[0], g.at("prefill_logits")[-1]), 1e-5);
}

TEST(Transformer, NamesAreTheCheckpointsKeys) {
  Transformer model = tiny_model("tiny-gqa");
  std::set<std::string> ours, files;
  for (const auto& p : model->named_parameters()) ours.insert(p.key());
  for (const auto& [name, tensor] : load_checkpoint(golden("tiny-gqa/model.fp32.pth")))
    files.insert(name);
  EXPECT_EQ(ours, files);
}

TEST(Transformer, SizesAreTheOriginals) {
  Transformer model = tiny_model("tiny-gqa", at::kBFloat16);
  int64_t params = 0;
  for (const auto& [name, tensor] : load_checkpoint(golden("tiny-gqa/model.fp32.pth"))) {
    if (name != "tok_embeddings.weight") params += tensor.numel();
  }
  EXPECT_EQ(model_params(*model), params);
  EXPECT_EQ(model_bytes(*model), 2 * params);
}

/// Of texts that share a beginning, in one pass and one by one.
TEST_P(Golden, TreesEqualTheirTexts) {
  Transformer model = tiny_model(GetParam());
  const auto some = [](int64_t n, int32_t first) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>((first + 7 * i) % 250));
    return tokens;
  };
  // More tokens than one pass takes, in the last tree alone; an empty branch; no trunk.
  const std::vector<TokenTree> trees = {{.trunk = some(9, 1)},
                                        {.trunk = some(20, 2),
                                         .branches = {some(3, 3), {}, some(50, 4)}},
                                        {.trunk = {}, .branches = {some(2, 5), some(1, 6)}},
                                        {.trunk = some(4100, 7),
                                         .branches = {some(5, 8), some(6, 9)}}};
  model->setup_caches(std::ssize(trees), 4200);
  const Tensor x = model->hidden(trees);
  int64_t at = 0;
  for (const TokenTree& tree : trees) {
    const Tensor all = model->head(x.narrow(0, at, tree.size()));
    at += tree.size();
    const auto trunk = std::ssize(tree.trunk);
    int64_t begin = trunk;
    for (const auto& branch :
         tree.branches.empty() ? std::vector<std::vector<int32_t>>{{}} : tree.branches) {
      std::vector<int32_t> text = tree.trunk;
      text.insert(text.end(), branch.begin(), branch.end());
      const auto own = std::ssize(branch);
      const Tensor expected = forward_all(model, ints(text), 0);
      EXPECT_LT(relative_difference(at::cat({all.narrow(0, 0, trunk), all.narrow(0, begin, own)}),
                                    expected),
                1e-5);
      begin += own;
    }
  }
  EXPECT_EQ(at, x.size(0));
  EXPECT_THROW(model->hidden({{.trunk = some(4201, 1)}}), c10::Error);
}

TEST(Transformer, CachesGrowAndRefuseWhatDoesNotFit) {
  Transformer model = tiny_model("tiny-mha");
  EXPECT_NE(error_of([&] {
              model->forward(at::zeros({1, 1}, at::kLong), at::zeros({1}, at::kLong));
            }).find("setup_caches"),
            std::string::npos);
  model->setup_caches(1, 9);
  EXPECT_EQ(model->max_seq_length, 16);
  EXPECT_NE(error_of([&] {
              forward_all(model, at::zeros({17}, at::kLong), 0);
            }).find("does not fit"),
            std::string::npos);
}

/// Every format of one small model: random weights, so that dims can be odd.
struct Format {
  const char* name;
  WeightScheme scheme;
  at::ScalarType precision;
  int64_t num_experts = 0;
};

class Formats : public ::testing::TestWithParam<Format> {
 protected:
  Transformer model() const {
    ModelArgs config{.block_size = 512,
                     .vocab_size = 304,
                     .n_layer = 2,
                     .n_head = 6,
                     .dim = 96,
                     .intermediate_size = 160,
                     .n_local_heads = 2,
                     .num_experts = GetParam().num_experts,
                     .num_activated_experts = GetParam().num_experts > 0 ? 2 : 0};
    config.finalize();
    Transformer m =
        random_model(config, GetParam().scheme, GetParam().precision, at::kCPU, /*seed=*/5);
    m->setup_caches(8, 300);
    return m;
  }
  c10::InferenceMode guard_;
};

INSTANTIATE_TEST_SUITE_P(
    All, Formats,
    ::testing::Values(Format{"fp32", {WeightFormat::kFloat32}, at::kFloat},
                      Format{"bf16", {WeightFormat::kBFloat16}, at::kBFloat16},
                      Format{"fp16", {WeightFormat::kFloat16}, at::kHalf},
                      Format{"int8", {WeightFormat::kInt8}, at::kBFloat16},
                      Format{"int8_fp32", {WeightFormat::kInt8}, at::kFloat},
                      Format{"int4_g32", {WeightFormat::kInt4, 32}, at::kBFloat16},
                      Format{"int4_g64", {WeightFormat::kInt4, 64}, at::kFloat},
                      Format{"int4_g128", {WeightFormat::kInt4, 128}, at::kBFloat16},
                      Format{"int4_g256", {WeightFormat::kInt4, 256}, at::kFloat},
                      Format{"moe_fp32", {WeightFormat::kFloat32}, at::kFloat, 5},
                      Format{"moe_int8", {WeightFormat::kInt8}, at::kFloat, 5},
                      Format{"moe_int4", {WeightFormat::kInt4, 32}, at::kFloat, 5}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(Formats, StepEqualsForward) {
  Transformer m = model();
  m->set_reference(true);
  at::manual_seed(3);
  const Tensor ids = at::randint(0, 304, {280}, at::kLong);
  const Tensor expected = forward_all(m, ids, 0).to(at::kFloat);
  // The CPU kernels of quantized weights round activations to 15 bits.
  const bool quantized = GetParam().scheme.format >= WeightFormat::kInt8;
  const double tolerance = GetParam().precision == at::kFloat  ? (quantized ? 3e-4 : 1e-5)
                           : GetParam().precision == at::kHalf ? 5e-3
                                                               : 3e-2;
  const Tensor actual = step_all(m, ids, 0);
  for (const int64_t row : {0, 7, 8, 255, 256, 257, 279}) {
    EXPECT_LT(relative_difference(actual[row], expected[row]), tolerance) << "row " << row;
  }
}

TEST_P(Formats, ARowDependsOnItselfAlone) {
  Transformer m = model();
  at::manual_seed(4);
  const Tensor ids = at::randint(0, 304, {264}, at::kLong);
  const Tensor one_by_one = step_all(m, ids, 0, /*slice=*/1);
  for (int64_t slice = 2; slice <= kMaxStepRows; ++slice) {
    EXPECT_TRUE(at::equal(step_all(m, ids, 0, slice), one_by_one)) << slice << " rows";
  }
  // A batch of different sequences at different positions in any slots.
  const SamplingParams params = make_sampling_params(kGreedy, 3, at::kCPU);
  for (auto& layer : m->layers) {
    KVCache& cache = layer->attention->kv_cache;
    for (const int64_t slot : {5, 2}) {
      cache.k_cache[slot].copy_(cache.k_cache[0]);
      cache.v_cache[slot].copy_(cache.v_cache[0]);
    }
  }
  m->step(ids.index_select(0, at::tensor({17, 263, 100})).to(at::kInt).view({3, 1}),
          ints({17, 263, 100}), ints({5, 0, 2}), params);
  EXPECT_TRUE(at::equal(m->step_logits()[0], one_by_one[17]));
  EXPECT_TRUE(at::equal(m->step_logits()[1], one_by_one[263]));
  EXPECT_TRUE(at::equal(m->step_logits()[2], one_by_one[100]));
  // A longer allocation.
  m->setup_caches(8, 511);
  EXPECT_TRUE(at::equal(step_all(m, ids, 0), one_by_one));
}

}  // namespace
}  // namespace gptfast
