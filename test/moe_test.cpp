// Mixtures of experts: routing, the experts that a token reads, their weight formats, and what a
// mixture owes a dense model.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "gptfast/gptq.h"
#include "gptfast/model.h"
#include "gptfast/quantize.h"
#include "gptfast/tp.h"
#include "int4_layout.h"
#include "load_model.h"
#include "sha256.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPrompt = 24;
const std::string kCondFfn = "layers.0.block_sparse_moe.cond_ffn.";

Tensor ints(const std::vector<int32_t>& values) {
  return at::tensor(values, at::kInt);
}

/// Logits [S, V] of tokens ids [S] at positions 0.. through step().
Tensor step_all(Transformer& model, const Tensor& ids, int64_t start = 0,
                int64_t slice = kMaxStepRows) {
  const SamplingParams params =
      make_sampling_params({.temperature = 0, .top_k = 0, .seed = 0}, 1, at::kCPU);
  std::vector<Tensor> logits;
  for (int64_t i = 0; i < ids.numel(); i += slice) {
    const int64_t n = std::min(slice, ids.numel() - i);
    model->step(ids.narrow(0, i, n).to(at::kInt).view({1, n}),
                ints({static_cast<int32_t>(start + i)}), ints({0}), params);
    logits.push_back(model->step_logits(n).clone());
  }
  return at::cat(logits);
}

Tensor forward_all(Transformer& model, const Tensor& ids, int64_t start = 0) {
  return model->forward(ids.view({1, -1}), at::arange(start, start + ids.numel(), at::kLong))
      .squeeze(0);
}

Transformer load(const fs::path& file, const std::string& config = "") {
  Transformer model = load_model(file, {.config = config, .precision = at::kFloat});
  model->setup_caches(1, 64);
  return model;
}

/// The tiny mixture of the golden data as a folder that can be written to.
class ModelDir : public TempDir {
 public:
  explicit ModelDir(const std::string& name = "tiny-moe") {
    fs::copy(golden(name) / "config.json", *this / "config.json");
    fs::copy(golden(name) / "model.fp32.pth", *this / "model.pth");
  }
  fs::path model() const { return *this / "model.pth"; }
};

class Moe : public ::testing::Test {
 protected:
  c10::InferenceMode guard_;
};

/// The mixture of layer 0 on one row [D] through the ops: its output [D], and what was chosen.
struct LayerOps {
  explicit LayerOps(Transformer& model)
      : moe(*model->layers[0]->block_sparse_moe),
        buffers(ops::make_step_buffers(model->config, 8, at::kCPU)) {}

  Tensor run(const Tensor& row) {
    // A norm that gives the row back.
    const Tensor norm = row.square().mean().sqrt().expand({row.size(0)}).contiguous();
    StepBuffers& b = buffers;
    b.x[0].copy_(row);
    ops::moe_gate_up_silu(1, b.x, norm, /*eps=*/0, *moe.gate, *moe.cond_ffn, b.experts, b.h);
    ops::moe_down_proj_residual(1, b.h, *moe.cond_ffn, b.experts, b.x);
    return b.x[0] - row;
  }

  MOEFeedForwardImpl& moe;
  StepBuffers buffers;
};

// ---- Against the original

TEST_F(Moe, NamesAreTheCheckpointsKeys) {
  Transformer model = tiny_model("tiny-moe");
  std::set<std::string> ours, files;
  for (const auto& p : model->named_parameters()) ours.insert(p.key());
  for (const auto& [name, tensor] : load_checkpoint(golden("tiny-moe/model.fp32.pth")))
    files.insert(name);
  EXPECT_EQ(ours, files);
}

TEST_F(Moe, RouterAndExpertsOfALayerEqualTheOriginals) {
  Transformer model = tiny_model("tiny-moe");
  const StateDict g = load_checkpoint(golden("tiny-moe/golden.fp32.pth"));
  const Tensor& in = g.at("moe0_in");
  LayerOps layer(model);
  EXPECT_LT(relative_difference(layer.moe.gate->forward(in), g.at("moe0_gate_scores")), 1e-6);
  EXPECT_LT(relative_difference(layer.moe.forward(in.unsqueeze(0))[0], g.at("moe0_out")), 1e-6);

  for (int64_t row = 0; row < kPrompt; ++row) {
    EXPECT_LT(relative_difference(layer.run(in[row]), g.at("moe0_out")[row]), 1e-5);
    EXPECT_TRUE(at::equal(layer.buffers.experts.index[0].to(at::kLong), g.at("moe0_experts")[row]));
    EXPECT_LT(relative_difference(layer.buffers.experts.weight[0], g.at("moe0_weights")[row]),
              1e-5);
  }
}

TEST_F(Moe, Int8IsTheOriginalsFileAndGivesItsLogits) {
  const ModelDir dir;
  const auto layers = quantize(dir.model(), dir / "model_int8.pth", {});
  EXPECT_EQ(layers.size(), 2U * (2 + 3) + 1);
  std::ifstream in(golden("tiny-moe/int8.sha256.json"));
  const auto expected = nlohmann::json::parse(in);
  const StateDict written = load_checkpoint(dir / "model_int8.pth");
  EXPECT_EQ(written.size(), expected.size());
  for (const auto& [name, tensor] : written) {
    Sha256 hash;
    hash.update({static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()});
    EXPECT_EQ(hash.hex_digest(), expected.at(name)) << name;
  }

  Transformer model = load(dir / "model_int8.pth");
  const StateDict g = load_checkpoint(golden("tiny-moe/int8.golden.fp32.pth"));
  const Tensor &prompt = g.at("prompt_ids"), &tokens = g.at("decode_tokens");
  EXPECT_LT(relative_difference(forward_all(model, prompt), g.at("prefill_logits")), 1e-5);
  // The CPU kernels of quantized weights round activations to 15 bits.
  Tensor last = step_all(model, prompt)[-1];
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    ASSERT_EQ(last.argmax().item<int64_t>(), tokens[i].item<int64_t>()) << "token " << i;
    last = step_all(model, tokens[i].view({1}), kPrompt + i)[0];
    EXPECT_LT(relative_difference(last, g.at("decode_logits")[i]), 1e-3) << "token " << i;
  }
}

// ---- int4 experts

TEST_F(Moe, Int4ExpertsAreStackedLinearLayers) {
  const ModelDir dir;
  quantize(dir.model(), dir / "model_int4.g32.pth",
           {.format = WeightFormat::kInt4, .groupsize = 32});
  const StateDict whole = load_checkpoint(dir.model());
  const StateDict written = load_checkpoint(dir / "model_int4.g32.pth");
  EXPECT_EQ(written.at("layers.0.block_sparse_moe.gate.weight").scalar_type(), at::kBFloat16);
  EXPECT_EQ(written.at(kCondFfn + "w2").sizes(), at::IntArrayRef({8, 8, 1, 32, 4}));
  EXPECT_EQ(written.at(kCondFfn + "w1").sizes(), at::IntArrayRef({8, 16, 8, 32, 4}));  // K padded
  EXPECT_EQ(written.at(kCondFfn + "scales_and_zeros2").sizes(), at::IntArrayRef({8, 4, 64, 2}));

  Transformer model = load(dir / "model_int4.g32.pth");
  for (const auto& [name, linear] : named_linears(*model)) {
    if (!name.starts_with(kCondFfn + "w")) continue;
    const int64_t expert = name[name.size() - 2] - '0';
    const Tensor w = whole.at(name.substr(0, name.size() - 3))[expert].to(at::kBFloat16);
    const Tensor padded = at::constant_pad_nd(w, {0, linear->in_features % 128 == 0 ? 0 : 960});
    const GroupParams params = int4_group_params(padded, 32);
    const Int4Weight alone{.q = pack_nibbles(quantize_int4(padded, params, 32)),
                           .scales = params.scales,
                           .zeros = params.zeros,
                           .in_features = padded.size(1),
                           .groupsize = 32};
    EXPECT_TRUE(
        at::equal(linear->dequantize(), alone.dequantize().narrow(1, 0, linear->in_features)))
        << name;
  }
  const Tensor prompt = load_checkpoint(golden("tiny-moe/golden.fp32.pth")).at("prompt_ids");
  EXPECT_LT(relative_difference(step_all(model, prompt), forward_all(model, prompt)), 3e-4);
}

TEST_F(Moe, RanksHoldPartsOfEveryInt4Expert) {
  const ModelDir dir;
  quantize(dir.model(), dir / "model_int4.g32.pth",
           {.format = WeightFormat::kInt4, .groupsize = 32});
  const StateDict whole = load_checkpoint(dir / "model_int4.g32.pth");
  ModelArgs args = ModelArgs::from_json_file(dir / "config.json");
  args.finalize();
  const auto values = [](const StateDict& tensors, const std::string& w, int64_t columns) {
    const StateDict expert = expert_tensors(tensors, kCondFfn + w, 3, "expert");
    return unpack_int4(expert.at("expert.weight"), expert.at("expert.scales_and_zeros"), columns)
        .dequantize();
  };
  StateDict experts;  // alone: attention cannot be cut as often
  for (const auto& [name, tensor] : whole) {
    if (name.starts_with(kCondFfn)) experts.set(name, tensor);
  }
  for (const int64_t ranks : {2, 4}) {
    const StateDict& source = ranks == 2 ? whole : experts;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const StateDict share = shard_state_dict(source, args, static_cast<int>(rank),
                                               static_cast<int>(ranks), Int4Layout::kCuda);
      EXPECT_EQ(share.size(), source.size());
      EXPECT_TRUE(
          at::equal(values(share, "w1", 64), values(whole, "w1", 64).chunk(ranks, 0)[rank]));
      EXPECT_TRUE(at::equal(values(share, "w2", 128 / ranks),
                            values(whole, "w2", 128).chunk(ranks, 1)[rank]));
    }
  }
  const std::string error =
      error_of([&] { shard_state_dict(experts, args, 0, 8, Int4Layout::kCuda); });
  EXPECT_NE(error.find("w2' has 128 columns, 16 on each of 8 ranks"), std::string::npos) << error;
}

// ---- A mixture and a dense model

/// A dense checkpoint with its MLP copied to every expert behind a random router.
StateDict upcycle(const StateDict& dense, int64_t experts, int64_t dim) {
  StateDict mixture;
  for (const auto& [name, tensor] : dense) {
    const size_t at = name.find("feed_forward.");
    if (at == std::string::npos) {
      mixture.set(name, tensor);
      continue;
    }
    const std::string moe = name.substr(0, at) + "block_sparse_moe.";
    mixture.set(moe + "cond_ffn." + name.substr(at + 13, 2),
                at::stack(std::vector<Tensor>(static_cast<size_t>(experts), tensor)));
    mixture.set(moe + "gate.weight", at::randn({experts, dim}));
  }
  return mixture;
}

void expect_equal_to_dense(int64_t activated, WeightFormat format, double tolerance) {
  const ModelDir dense_dir("tiny-mha"), dir("tiny-mha");
  auto config = nlohmann::json::parse(std::ifstream(dir / "config.json"));
  config["num_experts"] = 5;
  config["num_activated_experts"] = activated;
  std::ofstream(dir / "config.json") << config;
  save_checkpoint(dir.model(), upcycle(load_checkpoint(dense_dir.model()), 5, config["dim"]));
  fs::path dense_file = dense_dir.model(), file = dir.model();
  if (format != WeightFormat::kFloat32) {
    for (fs::path* f : {&dense_file, &file}) {
      const fs::path out = f->parent_path() / "quantized.pth";
      quantize(*f, out, {.format = format});
      *f = out;
    }
  }
  Transformer dense = load(dense_file), mixture = load(file);
  const Tensor ids = load_checkpoint(golden("tiny-mha/golden.fp32.pth")).at("prompt_ids");
  EXPECT_LT(relative_difference(forward_all(mixture, ids), forward_all(dense, ids)), tolerance);
  EXPECT_LT(relative_difference(step_all(mixture, ids), step_all(dense, ids)), tolerance);
}

TEST_F(Moe, EqualExpertsEqualTheDenseModel) {
  at::manual_seed(11);
  for (const int64_t activated : {1, 2, 3})
    expect_equal_to_dense(activated, WeightFormat::kFloat32, 1e-5);
  expect_equal_to_dense(2, WeightFormat::kInt4, 2e-4);
  // A dense layer's int8 scales are bfloat16, an expert's float32.
  expect_equal_to_dense(2, WeightFormat::kInt8, 1e-2);
}

TEST_F(Moe, AWrongExpertChangesTheRowsThatChoseItAndNoOther) {
  Transformer model = tiny_model("tiny-moe");
  const StateDict g = load_checkpoint(golden("tiny-moe/golden.fp32.pth"));
  const Tensor in = g.at("moe0_in").unsqueeze(0);
  const Tensor& experts = g.at("moe0_experts");
  MOEFeedForwardImpl& moe = *model->layers[0]->block_sparse_moe;
  const Tensor before = moe.forward(in)[0];
  const int64_t perturbed = experts[0][1].item<int64_t>();
  for (ExpertWeights& w : moe.cond_ffn->weights) {
    const Tensor kept = w.weight.clone();
    w.weight[perturbed].mul_(1.01);
    const Tensor changed = (moe.forward(in)[0] != before).any(-1);
    EXPECT_TRUE(at::equal(changed, experts.eq(perturbed).any(-1)));
    w.weight.copy_(kept);
  }
  EXPECT_TRUE(at::equal(moe.forward(in)[0], before));
}

TEST_F(Moe, ARowDependsOnItselfAlone) {
  const Tensor prompt = load_checkpoint(golden("tiny-moe/golden.fp32.pth")).at("prompt_ids");
  for (const at::ScalarType precision : {at::kFloat, at::kBFloat16}) {
    Transformer model = tiny_model("tiny-moe", precision);
    model->setup_caches(1, 64);
    const Tensor one = step_all(model, prompt, /*start=*/0, /*slice=*/1);
    for (int64_t rows = 2; rows <= kMaxStepRows; ++rows)
      EXPECT_TRUE(at::equal(step_all(model, prompt, /*start=*/0, rows), one))
          << rows << " rows in " << precision;
  }
}

// ---- What a token reads

TEST_F(Moe, OnlyChosenExpertsAreRead) {
  Transformer model = tiny_model("tiny-moe");
  const StateDict g = load_checkpoint(golden("tiny-moe/golden.fp32.pth"));
  LayerOps layer(model);
  const Tensor chosen = g.at("moe0_experts")[5];
  for (ExpertWeights& w : layer.moe.cond_ffn->weights) {
    const Tensor kept = w.weight.index_select(0, chosen);
    w.weight.fill_(std::numeric_limits<float>::quiet_NaN());
    w.weight.index_copy_(0, chosen, kept);
  }
  const Tensor row = g.at("moe0_in")[5];
  EXPECT_LT(relative_difference(layer.run(row), g.at("moe0_out")[5]), 1e-5);
  EXPECT_LT(relative_difference(layer.moe.forward(row.view({1, 1, -1}))[0], g.at("moe0_out")[5]),
            1e-5);
}

TEST_F(Moe, ARouterOfNaNChoosesDifferentExperts) {
  Transformer model = tiny_model("tiny-moe");
  LayerOps layer(model);
  layer.moe.gate->weight.fill_(std::numeric_limits<float>::quiet_NaN());
  layer.run(at::ones({64}));
  const Tensor& index = layer.buffers.experts.index[0];
  EXPECT_NE(index[0].item<int32_t>(), index[1].item<int32_t>());
  EXPECT_TRUE(index.ge(0).logical_and(index.lt(8)).all().item<bool>());
}

TEST_F(Moe, SizesCountTheExpertsOfAToken) {
  Transformer model = tiny_model("tiny-moe", at::kBFloat16);
  int64_t params = 0;
  for (const auto& [name, tensor] : load_checkpoint(golden("tiny-moe/model.fp32.pth"))) {
    if (name == "tok_embeddings.weight") continue;
    params += is_expert_weight(name) ? tensor.numel() / 8 * 2 : tensor.numel();
  }
  EXPECT_EQ(model_params(*model), params);
  EXPECT_EQ(model_bytes(*model), 2 * params);
}

// ---- What is refused

TEST_F(Moe, GptqRefusesInOneLine) {
  const ModelDir dir;
  const CalibrationData data =
      calibration_data({std::vector<int32_t>(8, 1)}, /*seq_length=*/8, /*pad=*/false);
  const std::string error =
      error_of([&] { quantize_gptq(dir.model(), dir / "out.pth", data, {}); });
  EXPECT_NE(error.find("is a mixture of experts"), std::string::npos) << error;
  EXPECT_FALSE(fs::exists(dir / "out.pth"));
}

TEST_F(Moe, ExpertsOfDifferentNumberAreRefused) {
  const ModelDir dir;
  quantize(dir.model(), dir / "model_int8.pth", {});
  StateDict tensors = load_checkpoint(dir / "model_int8.pth");
  tensors.set(kCondFfn + "scales1", tensors.at(kCondFfn + "scales1").narrow(0, 0, 7));
  save_checkpoint(dir / "cut_int8.pth", tensors);
  const std::string error = error_of([&] { load(dir / "cut_int8.pth"); });
  EXPECT_NE(error.find("'" + kCondFfn + "scales1' has shape [7, 128], expected 8 experts"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace gptfast
