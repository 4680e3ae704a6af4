// Mixtures of experts on CUDA: every op against plain ATen and against the dense ops on the same
// weights, over formats, numbers of experts and odd sizes; bit for bit over the number of rows; the
// captured step; the original's text. Skipped without a CUDA device.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "cuda_test.h"
#include "gptfast/generate.h"
#include "gptfast/quantize.h"
#include "test_util.h"
#ifdef GPTFAST_CUDA
#include "gptfast/decode_graph.h"
#include "ops/cuda/step_ops.h"
#endif

namespace gptfast {
namespace {

#ifdef GPTFAST_CUDA

constexpr double kEps = 1e-5;

using CudaMoe = CudaTest;

void write_config(const std::filesystem::path& file, const ModelArgs& c) {
  std::ofstream(file) << nlohmann::json{{"block_size", c.block_size},
                                        {"vocab_size", c.vocab_size},
                                        {"n_layer", c.n_layer},
                                        {"n_head", c.n_head},
                                        {"dim", c.dim},
                                        {"intermediate_size", c.intermediate_size},
                                        {"n_local_heads", c.n_local_heads},
                                        {"head_dim", c.head_dim},
                                        {"num_experts", c.num_experts},
                                        {"num_activated_experts", c.num_activated_experts}};
}

StateDict tensors_of(const Transformer& model) {
  StateDict tensors;
  for (const auto& p : model->named_parameters()) tensors.set(p.key(), p.value());
  for (const auto& b : model->named_buffers()) tensors.set(b.key(), b.value());
  return tensors;
}

/// On the GPU, through a checkpoint.
Transformer load_on_gpu(const StateDict& tensors, const ModelArgs& config,
                        at::ScalarType precision) {
  const TempDir dir;
  save_checkpoint(dir / "model.pth", tensors);
  write_config(dir / "config.json", config);
  Transformer model = load_model(dir / "model.pth", {.config = (dir / "config.json").string(),
                                                     .precision = precision,
                                                     .device = kGpu,
                                                     .int4_layout = "cuda"});
  model->setup_caches(/*max_batch_size=*/3, /*max_seq_length=*/600);
  for (auto& layer : model->layers) {
    layer->attention->kv_cache.k_cache.normal_();
    layer->attention->kv_cache.v_cache.normal_();
  }
  return model;
}

StateDict random_tensors(const ModelArgs& config, const FormatCase& format) {
  return tensors_of(random_model(config, format.scheme, format.precision, at::kCPU, /*seed=*/3));
}

Transformer random_on_gpu(const ModelArgs& config, const FormatCase& format) {
  return load_on_gpu(random_tensors(config, format), config, format.precision);
}

/// The mixture of layer 0 on 8 random rows.
struct LayerOps {
  explicit LayerOps(Transformer& model)
      : moe(*model->layers[0]->block_sparse_moe),
        norm(model->layers[0]->ffn_norm->weight),
        b(ops::make_step_buffers(model->config, 8, kGpu)),
        A(model->config.num_activated_experts) {
    norm.copy_(at::randn(norm.sizes()) * 0.2 + 1);
    b.x.copy_(at::randn(b.x.sizes()) * 3);
    x = b.x.clone();
  }

  void run(int64_t rows = 8) {
    ops::moe_gate_up_silu(rows, b.x, norm, kEps, *moe.gate, *moe.cond_ffn, b.experts, b.h);
    ops::moe_down_proj_residual(rows, b.h, *moe.cond_ffn, b.experts, b.x);
  }

  const FeedForwardImpl& expert(int64_t row, int64_t a) const {
    return *moe.cond_ffn->experts[b.experts.index[row][a].item<int32_t>()];
  }

  MOEFeedForwardImpl& moe;
  Tensor norm;
  StepBuffers b;
  Tensor x;  // before the ops
  int64_t A;
};

Tensor rms_norm(const Tensor& x, const Tensor& weight) {
  return x * at::rsqrt(at::mean(x * x, /*dim=*/-1, /*keepdim=*/true) + kEps) *
         weight.to(at::kFloat);
}

void expect_routes(const LayerOps& layer) {
  const Tensor scores =
      at::softmax(at::linear(rms_norm(layer.x, layer.norm), layer.moe.gate->weight.to(at::kFloat)),
                  -1);
  const auto [sorted, order] = scores.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const Tensor index = order.narrow(1, 0, layer.A), largest = sorted.narrow(1, 0, layer.A);
  EXPECT_TRUE(at::equal(layer.b.experts.index.to(at::kLong), index))
      << layer.b.experts.index << "\nexpected\n"
      << index << "\nof\n"
      << scores;
  EXPECT_LT(relative_difference(layer.b.experts.weight, largest / largest.sum(-1, true)), 1e-5);
}

/// h and x against float32 products with the chosen experts' values.
void expect_products(const LayerOps& layer, double tolerance) {
  const Tensor n = rms_norm(layer.x, layer.norm);
  std::map<const LinearImpl*, Tensor> values;
  Tensor x = layer.x.clone();
  for (int64_t r = 0; r < 8; ++r) {
    for (int64_t a = 0; a < layer.A; ++a) {
      const FeedForwardImpl& e = layer.expert(r, a);
      const auto product = [&](const Tensor& in, const Linear& w) {
        Tensor& value = values[w.get()];
        if (!value.defined()) value = w->dequantize().to(kGpu);
        return at::linear(in, value);
      };
      const Tensor h = at::silu(product(n[r], e.w1)) * product(n[r], e.w3);
      EXPECT_LT(relative_difference(layer.b.h[r * layer.A + a], h), tolerance)
          << "row " << r << ", choice " << a;
      x[r] += layer.b.experts.weight[r][a] * product(layer.b.h[r * layer.A + a], e.w2);
    }
  }
  EXPECT_LT(relative_difference(layer.b.x - layer.x, x - layer.x), tolerance);
}

/// The same kernels run a dense layer: its results are those of an expert, bit for bit.
void expect_dense_ops_agree(const LayerOps& layer) {
  for (int64_t r = 0; r < 8; ++r) {
    Tensor sum = at::zeros_like(layer.x[r]);
    for (int64_t a = 0; a < layer.A; ++a) {
      const FeedForwardImpl& e = layer.expert(r, a);
      const Tensor h = layer.b.h.narrow(0, r * layer.A + a, 1);
      Tensor out = at::zeros_like(h), down = at::zeros_like(layer.x.narrow(0, r, 1));
      ops::rms_gate_up_silu(1, layer.x.narrow(0, r, 1), layer.norm, kEps, *e.w1, *e.w3, out);
      EXPECT_TRUE(at::equal(h, out))
          << "row " << r << ", choice " << a << ": " << relative_difference(h, out) << " at "
          << h.ne(out).nonzero().narrow(0, 0, 1);
      ops::down_proj_residual(1, h, *e.w2, down);
      sum += layer.b.experts.weight[r][a] * down[0];
    }
    EXPECT_LT(relative_difference(layer.b.x[r] - layer.x[r], sum), 1e-5) << "row " << r;
  }
}

class CudaMoeFormats : public CudaMoe, public testing::WithParamInterface<FormatCase> {};

TEST_P(CudaMoeFormats, EveryOpMatchesPlainATen) {
  for (const auto& [experts, activated] :
       {std::pair<int64_t, int64_t>{4, 1}, {8, 2}, {16, 4}, {40, 3}, {1, 1}}) {
    SCOPED_TRACE(std::to_string(experts) + " experts, " + std::to_string(activated) + " active");
    Transformer model = random_on_gpu(odd_config(experts, activated), GetParam());
    ASSERT_TRUE(ops::cuda::supports(*model));
    LayerOps layer(model);
    layer.run();
    expect_routes(layer);
    expect_products(layer, GetParam().tolerance);
    expect_dense_ops_agree(layer);
  }
}

/// On a GPU of 132 multiprocessors: 3 tiles a block on the way up, 9 on the way down, which are two
/// batches.
TEST_P(CudaMoeFormats, LargeLayersGiveEachBlockSeveralTiles) {
  ModelArgs config = odd_config(4, 4);
  config.n_layer = 1;
  config.dim = 4272;
  config.intermediate_size = 592;
  Transformer model = random_on_gpu(config, GetParam());
  LayerOps layer(model);
  layer.run();
  expect_routes(layer);
  expect_products(layer, GetParam().tolerance);
  expect_dense_ops_agree(layer);
}

/// Logits [8, V] of 8 tokens, `rows` at a time.
Tensor logits_in_steps(Transformer& model, int64_t start, int64_t rows) {
  const SamplingParams greedy = make_sampling_params({.temperature = 0}, 1, kGpu);
  std::vector<Tensor> pieces;
  for (int64_t first = 0; first < 8; first += rows) {
    const int64_t count = std::min(rows, 8 - first);
    const Tensor tokens = (at::arange(first, first + count, ints()) * 37 % 300).unsqueeze(0);
    model->step(tokens, at::full({1}, start + first, ints()), at::zeros({1}, ints()), greedy);
    pieces.push_back(model->step_logits().narrow(0, 0, count).clone());
  }
  return at::cat(pieces);
}

TEST_P(CudaMoeFormats, ARowDependsOnItselfAlone) {
  for (const auto& [experts, activated] : {std::pair<int64_t, int64_t>{8, 2}, {4, 4}, {16, 1}}) {
    Transformer model = random_on_gpu(odd_config(experts, activated), GetParam());
    const Tensor one = logits_in_steps(model, 252, 1);
    ASSERT_TRUE(at::isfinite(one).all().item<bool>());
    for (int64_t rows = 2; rows <= 8; ++rows)
      EXPECT_TRUE(at::equal(logits_in_steps(model, 252, rows), one)) << rows << " rows";
    setenv("GPTFAST_PDL", "0", /*overwrite=*/1);
    EXPECT_TRUE(at::equal(logits_in_steps(model, 252, 1), one)) << "without overlap";
    EXPECT_TRUE(at::equal(logits_in_steps(model, 252, 5), one)) << "5 rows without overlap";
    unsetenv("GPTFAST_PDL");
  }
}

TEST_P(CudaMoeFormats, StepAgreesWithForward) {
  Transformer model = random_on_gpu(odd_config(8, 2), GetParam());
  const Tensor tokens = (at::arange(8, ints()) * 37 % 300).unsqueeze(0);
  const Tensor expected = model->forward(tokens, at::arange(8, ints().dtype(at::kLong)))[0];
  const Tensor difference =
      (logits_in_steps(model, 0, 8) - expected).abs().amax(1) / expected.abs().amax();
  // Rounded activations may choose another expert of nearly the same score for single tokens.
  EXPECT_LT(difference.median().item<double>(), 5e-2) << difference;
}

TEST_P(CudaMoeFormats, TheCapturedStepGivesTheTokensOfSingleSteps) {
  Transformer model = random_on_gpu(odd_config(8, 2), GetParam());
  ASSERT_TRUE(DecodeGraph::supported(*model));
  EXPECT_STREQ(ops::path(kGpu, model->dtype()), "cuda");
  GenerateOptions options;
  options.max_new_tokens = 40;
  options.sampling = {.temperature = 0.8, .top_k = 50, .seed = 5};
  const auto captured = generate(model, {1, 2, 3}, options).rows[0].tokens;
  EXPECT_EQ(SingleSteps(model, {1, 2, 3}, options).tokens, captured);
  options.batch_size = 3;
  EXPECT_EQ(generate(model, {1, 2, 3}, options).rows[0].tokens, captured);
}

TEST_P(CudaMoeFormats, AWrongExpertChangesTheRowsThatChoseItAndNoOther) {
  const ModelArgs config = odd_config(8, 2);
  const StateDict tensors = random_tensors(config, GetParam());
  Transformer model = load_on_gpu(tensors, config, GetParam().precision);
  at::manual_seed(5);
  LayerOps right(model);
  right.run();
  const Tensor index = right.b.experts.index;
  for (const char* w : {"w1", "w2", "w3"}) {
    const std::string name = std::string("layers.0.block_sparse_moe.cond_ffn.") + w;
    const int64_t expert = index[0][1].item<int32_t>();
    StateDict changed = tensors;
    Tensor weight = tensors.at(name).clone();
    weight[expert].copy_(weight[expert].flip(0));
    changed.set(name, weight);
    Transformer other = load_on_gpu(changed, config, GetParam().precision);
    at::manual_seed(5);
    LayerOps wrong(other);
    wrong.run();
    EXPECT_TRUE(at::equal(wrong.b.experts.index, index));
    const Tensor differs = wrong.b.x.ne(right.b.x).any(-1);
    EXPECT_TRUE(at::equal(differs, index.eq(expert).any(-1))) << w << ": " << differs << index;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaMoeFormats, testing::ValuesIn(kFormats), [](const auto& info) {
  return std::string(to_string(info.param.scheme.format)) + "_" +
         std::to_string(info.param.scheme.groupsize) + "_" + toString(info.param.precision);
});

TEST_F(CudaMoe, StagesOf128MegabytesLieSideBySide) {
  ModelArgs config = odd_config(4, 4);
  config.n_layer = 1;
  config.dim = 4256;
  config.intermediate_size = 4112;
  Transformer model =
      random_model(config, {WeightFormat::kBFloat16}, at::kBFloat16, kGpu, /*seed=*/3);
  LayerOps layer(model);
  layer.run();
  expect_products(layer, kRounded);
  expect_dense_ops_agree(layer);
}

TEST_F(CudaMoe, RandomExpertsOfAGpuLieInOneBlock) {
  for (const FormatCase& format : kFormats) {
    Transformer model =
        random_model(odd_config(8, 2), format.scheme, format.precision, kGpu, /*seed=*/3);
    LayerOps layer(model);
    layer.run();
    expect_products(layer, format.tolerance);
  }
}

TEST_F(CudaMoe, EqualScoresChooseTheLowerIndex) {
  Transformer model = random_on_gpu(odd_config(40, 4), kFormats[0]);
  LayerOps layer(model);
  Tensor& gate = layer.moe.gate->weight;
  for (const int64_t e : {37, 3, 20}) gate[e].copy_(layer.x[0]);  // the first row's choice
  layer.run();
  const Tensor index = layer.b.experts.index[0].narrow(0, 0, 3).cpu();
  EXPECT_TRUE(at::equal(index, at::tensor({3, 20, 37}, at::kInt))) << index;
  expect_routes(layer);
  gate.copy_(gate[0].expand_as(gate).clone());
  layer.b.x.copy_(layer.x);
  layer.run();
  EXPECT_TRUE(at::equal(layer.b.experts.index, at::arange(4, ints()).expand({8, 4})));
  EXPECT_TRUE(layer.b.experts.weight.eq(0.25).all().item<bool>());
}

TEST_F(CudaMoe, ARouterOfNaNChoosesDifferentExperts) {
  Transformer model = random_on_gpu(odd_config(8, 4), kFormats[0]);
  LayerOps layer(model);
  layer.moe.gate->weight.fill_(std::numeric_limits<float>::quiet_NaN());
  layer.run();
  EXPECT_TRUE(at::equal(layer.b.experts.index, at::arange(4, ints()).expand({8, 4})));
  EXPECT_TRUE(layer.b.x.isnan().all().item<bool>());
}

TEST_F(CudaMoe, OnlyChosenExpertsAreRead) {
  Transformer model = random_on_gpu(odd_config(16, 2), kFormats[0]);
  LayerOps layer(model);
  layer.run(2);
  const Tensor expected = layer.b.x.clone();
  const Tensor chosen = layer.b.experts.index.narrow(0, 0, 2).flatten().to(at::kLong);
  for (ExpertWeights& w : layer.moe.cond_ffn->weights) {
    const Tensor kept = w.weight.index_select(0, chosen);
    w.weight.fill_(std::numeric_limits<float>::quiet_NaN());
    w.weight.index_copy_(0, chosen, kept);
  }
  layer.b.x.copy_(layer.x);
  layer.run(2);
  EXPECT_TRUE(at::equal(layer.b.x.narrow(0, 0, 2), expected.narrow(0, 0, 2)));
}

/// A dense model with its MLP copied to every expert behind a random router.
TEST_F(CudaMoe, EqualExpertsEqualTheDenseModel) {
  ModelArgs dense_config = odd_config();
  Transformer dense = random_on_gpu(dense_config, kFormats[0]);
  StateDict mixture;
  for (const auto& [name, tensor] : tensors_of(dense)) {
    const size_t at = name.find("feed_forward.");
    if (at == std::string::npos) {
      mixture.set(name, tensor);
      continue;
    }
    const std::string moe = name.substr(0, at) + "block_sparse_moe.";
    mixture.set(moe + "cond_ffn." + name.substr(at + 13, 2),
                at::stack(std::vector<Tensor>(5, tensor)));
    mixture.set(moe + "gate.weight", at::randn({5, dense_config.dim}));
  }
  for (const int64_t activated : {1, 2, 4}) {
    Transformer model = load_on_gpu(mixture, odd_config(5, activated), at::kBFloat16);
    for (size_t i = 0; i < model->layers.size(); ++i) {
      model->layers[i]->attention->kv_cache.k_cache.copy_(
          dense->layers[i]->attention->kv_cache.k_cache);
      model->layers[i]->attention->kv_cache.v_cache.copy_(
          dense->layers[i]->attention->kv_cache.v_cache);
    }
    EXPECT_LT(relative_difference(logits_in_steps(model, 100, 8), logits_in_steps(dense, 100, 8)),
              1e-2)
        << activated;
  }
}

/// The original's greedy text, which ours may leave at a near-tie only.
void expect_text(const std::filesystem::path& file, const std::string& golden_file) {
  const StateDict original = load_checkpoint(golden("tiny-moe/" + golden_file));
  const Tensor prompt = original.at("prompt_ids").to(at::kInt);
  const Tensor expected = original.at("decode_tokens").to(at::kInt);
  Transformer model =
      load_model(file, {.config = golden("tiny-moe/config.json").string(), .device = kGpu});
  GenerateOptions options;
  options.max_new_tokens = 32;
  options.sampling.temperature = 0;
  const std::vector<int32_t> ids(prompt.const_data_ptr<int32_t>(),
                                 prompt.const_data_ptr<int32_t>() + prompt.numel());
  const std::vector<int32_t> captured = generate(model, ids, options).rows[0].tokens;
  options.return_logits = true;
  const GenerateResult result = generate(model, ids, options);
  EXPECT_EQ(captured, result.rows[0].tokens);
  const double distance = relative_difference(result.logits.narrow(0, 0, prompt.numel()),
                                              original.at("prefill_logits"));
  std::cout << golden_file << ": prompt's logits differ by " << distance << std::endl;
  EXPECT_LT(distance, 5e-2);
  for (int64_t i = 0; i < 32; ++i) {
    if (captured[i] == expected[i].item<int32_t>()) continue;
    const Tensor top = std::get<0>(result.logits[prompt.numel() + i - 1].topk(2));
    const double margin = (top[0] - top[1]).item<double>() / top[0].abs().item<double>();
    std::cout << golden_file << ": texts part at token " << i << ", margin " << margin << std::endl;
    EXPECT_LT(margin, 3e-2);
    break;
  }
}

TEST_F(CudaMoe, TextIsTheOriginals) {
  expect_text(golden("tiny-moe/model.fp32.pth"), "golden.bf16.pth");
  const TempDir dir;
  std::filesystem::copy(golden("tiny-moe/config.json"), dir / "config.json");
  std::filesystem::copy(golden("tiny-moe/model.fp32.pth"), dir / "model.pth");
  quantize(dir / "model.pth", dir / "model_int8.pth", {});
  expect_text(dir / "model_int8.pth", "int8.golden.fp32.pth");
}

#else

TEST(CudaMoe, Skipped) {
  GTEST_SKIP() << "built without CUDA";
}

#endif

}  // namespace
}  // namespace gptfast
