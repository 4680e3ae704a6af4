// Imports of GPTQ and AWQ checkpoints. The fixtures are made here: a tiny model is rounded to
// codes, written once as packed weights and once as the float32 values that the codes stand for;
// both must give the same model.
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "gptfast/convert.h"
#include "gptfast/quantize.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kDim = 256;
constexpr int64_t kIntermediate = 384;
constexpr int64_t kVocab = 64;

void write_safetensors(const fs::path& file, const StateDict& tensors) {
  const std::map<at::ScalarType, const char*> names = {{at::kHalf, "F16"},
                                                       {at::kFloat, "F32"},
                                                       {at::kInt, "I32"}};
  json header = json::object();
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", names.at(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  const std::string text = header.dump();
  const uint64_t size = text.size();
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&size), sizeof size);
  out << text;
  for (const auto& [name, tensor] : tensors) {
    const Tensor bytes = tensor.contiguous();
    out.write(static_cast<const char*>(bytes.const_data_ptr()),
              static_cast<std::streamsize>(bytes.nbytes()));
  }
}

/// A weight in the terms of GPTQ: w[n, k] = scales[g_idx[k], n] * (codes[n, k] - zeros[g_idx[k],
/// n]).
struct Layer {
  Tensor codes;   // [N, K] int64
  Tensor scales;  // [G, N] float16
  Tensor zeros;   // [G, N] int64
  Tensor g_idx;   // [K] int64

  Tensor dequantize() const {
    const Tensor per_column = scales.to(at::kFloat).index_select(0, g_idx).t();
    return per_column * (codes - zeros.index_select(0, g_idx).t()).to(at::kFloat);
  }
};

struct Source {
  int64_t bits = 4;
  int64_t groupsize = 64;  // -1: whole rows
  bool awq = false;
  int64_t zero_offset = 1;
  bool shuffled = false;  // act-order
  bool one_order_for_qkv = true;
  json description = {};
};

Layer random_layer(int64_t n, int64_t k, const Source& source, const Tensor& order) {
  const int64_t g = source.groupsize == -1 ? k : source.groupsize;
  const int64_t groups = (k + g - 1) / g;
  const int64_t codes = int64_t{1} << source.bits;
  const Tensor g_idx = at::arange(k).floor_divide(g);
  return {.codes = at::randint(1, codes - 1, {n, k}),  // no group reaches both ends
          .scales = (at::rand({groups, n}) * 0.02 + 0.001).to(at::kHalf),
          .zeros = at::randint(0, codes, {groups, n}),
          .g_idx = source.shuffled ? g_idx.index_select(0, order) : g_idx};
}

/// fields [rows, columns] of `bits` -> int32 words along dimension 1; field `order[i]` of each
/// word's columns lies at position i.
Tensor pack(const Tensor& fields, int64_t bits, const std::vector<int64_t>& order = {}) {
  const int64_t per_word = 32 / bits;
  Tensor words = at::zeros({fields.size(0), fields.size(1) / per_word}, at::kInt);
  for (int64_t r = 0; r < words.size(0); ++r) {
    for (int64_t w = 0; w < words.size(1); ++w) {
      uint32_t word = 0;
      for (int64_t i = 0; i < per_word; ++i) {
        const int64_t column = w * per_word + (order.empty() ? i : order[i]);
        word |= static_cast<uint32_t>(fields.const_data_ptr<int64_t>()[r * fields.size(1) + column])
                << (bits * i);
      }
      words.mutable_data_ptr<int32_t>()[r * words.size(1) + w] = static_cast<int32_t>(word);
    }
  }
  return words;
}

void add_packed(StateDict& tensors, const std::string& name, const Layer& layer,
                const Source& source) {
  const std::vector<int64_t> awq_order = {0, 2, 4, 6, 1, 3, 5, 7};
  tensors.set(name + ".scales", layer.scales);
  if (source.awq) {
    tensors.set(name + ".qweight", pack(layer.codes.t().contiguous(), 4, awq_order));
    tensors.set(name + ".qzeros", pack(layer.zeros, 4, awq_order));
    return;
  }
  const int64_t mask = (int64_t{1} << source.bits) - 1;
  const Tensor zeros = (layer.zeros - source.zero_offset).bitwise_and(mask).contiguous();
  tensors.set(name + ".qweight", pack(layer.codes, source.bits).t().contiguous());
  tensors.set(name + ".qzeros", pack(zeros, source.bits));
  tensors.set(name + ".g_idx", layer.g_idx.to(at::kInt));
}

/// Two Hugging Face directories with the same weights: `packed` and `plain`.
struct Fixture {
  TempDir dir;
  StateDict packed, plain;

  explicit Fixture(const Source& source) {
    at::manual_seed(1);
    const Tensor order = at::randperm(kDim);
    const Tensor other_order = at::randperm(kDim);
    const Tensor hidden_order = at::randperm(kIntermediate);
    const auto both = [&](const std::string& name, const Tensor& tensor) {
      packed.set(name, tensor.to(at::kHalf));
      plain.set(name, tensor.to(at::kHalf).to(at::kFloat));
    };
    const auto linear = [&](const std::string& name, int64_t n, int64_t k, const Tensor& columns) {
      const Layer layer = random_layer(n, k, source, columns);
      add_packed(packed, "model.layers.0." + name, layer, source);
      plain.set("model.layers.0." + name + ".weight", layer.dequantize());
    };
    both("model.embed_tokens.weight", at::randn({kVocab, kDim}));
    linear("self_attn.q_proj", kDim, kDim, order);
    linear("self_attn.k_proj", kDim / 2, kDim, source.one_order_for_qkv ? order : other_order);
    linear("self_attn.v_proj", kDim / 2, kDim, order);
    linear("self_attn.o_proj", kDim, kDim, other_order);
    linear("mlp.gate_proj", kIntermediate, kDim, order);
    linear("mlp.up_proj", kIntermediate, kDim, order);
    linear("mlp.down_proj", kDim, kIntermediate, hidden_order);
    both("model.layers.0.input_layernorm.weight", at::ones({kDim}));
    both("model.layers.0.post_attention_layernorm.weight", at::ones({kDim}));
    both("model.norm.weight", at::ones({kDim}));
    both("lm_head.weight", at::randn({kVocab, kDim}));
    for (const std::string folder : {"packed", "plain"}) {
      fs::create_directory(dir / folder);
      std::ofstream(dir / folder / "config.json") << json{{"model_type", "llama"},
                                                          {"hidden_size", kDim},
                                                          {"intermediate_size", kIntermediate},
                                                          {"num_hidden_layers", 1},
                                                          {"num_attention_heads", 4},
                                                          {"num_key_value_heads", 2},
                                                          {"vocab_size", kVocab},
                                                          {"max_position_embeddings", 128},
                                                          {"rms_norm_eps", 1e-5},
                                                          {"rope_theta", 10000.0},
                                                          {"hidden_act", "silu"},
                                                          {"tie_word_embeddings", false}};
    }
    std::ofstream(dir / "packed" / "quantize_config.json") << source.description;
  }

  void write() {
    write_safetensors(dir / "packed" / "model.safetensors", packed);
    write_safetensors(dir / "plain" / "model.safetensors", plain);
  }

  /// Converts both and compares every layer, bit for bit.
  void expect_equal(const ConvertOptions& options = {}) {
    write();
    convert(dir / "packed", dir / "packed" / "model.pth", options);
    convert(dir / "plain", dir / "plain" / "model.pth", {.dtype = at::kFloat});
    const LoadOptions exact{.precision = at::kFloat};
    const Transformer actual = load_model(dir / "packed" / "model.pth", exact);
    const Transformer expected = load_model(dir / "plain" / "model.pth", exact);
    const auto modules = actual->named_modules();
    for (const auto& item : expected->named_modules()) {
      if (const auto* linear = item.value()->as<LinearImpl>()) {
        EXPECT_TRUE(
            at::equal(modules[item.key()]->as<LinearImpl>()->dequantize(), linear->dequantize()))
            << item.key();
      }
    }
  }

  std::string convert_error(const ConvertOptions& options = {}) {
    write();
    std::string error =
        error_of([&] { convert(dir / "packed", dir / "packed" / "model.pth", options); });
    EXPECT_FALSE(fs::exists(dir / "packed" / "model.pth"));
    return error;
  }
};

json gptq_description(int64_t bits, int64_t groupsize, bool desc_act = false) {
  return {{"bits", bits}, {"group_size", groupsize}, {"desc_act", desc_act},
          {"sym", false}, {"quant_method", "gptq"},  {"checkpoint_format", "gptq"}};
}

TEST(ImportGptq, Version1) {
  Fixture fixture({.description = gptq_description(4, 64)});
  fixture.expect_equal();
  const StateDict written = load_checkpoint(fixture.dir / "packed" / "model.pth");
  EXPECT_EQ(written.at("layers.0.attention.wqkv.weight").scalar_type(), at::kInt);
  EXPECT_EQ(written.at("layers.0.attention.wqkv.scales_and_zeros").scalar_type(), at::kFloat);
  EXPECT_FALSE(written.contains("layers.0.attention.wqkv.perm"));
}

TEST(ImportGptq, Version2) {
  json description = gptq_description(4, 128);
  description["checkpoint_format"] = "gptq_v2";
  Fixture({.groupsize = 128, .zero_offset = 0, .description = description}).expect_equal();
}

TEST(ImportGptq, TheUserNamesTheVersionWhereTheFileDoesNot) {
  json description = gptq_description(4, 64);
  description.erase("checkpoint_format");
  Fixture fixture({.description = description});
  EXPECT_NE(fixture.convert_error().find("--gptq_zeros"), std::string::npos);
  fixture.expect_equal({.gptq_zeros = "v1"});
}

TEST(ImportGptq, WholeRowsAndLargeGroups) {
  Fixture({.groupsize = -1, .description = gptq_description(4, -1)}).expect_equal();
  Fixture({.groupsize = 96, .description = gptq_description(4, 96)}).expect_equal();
}

TEST(ImportGptq, ActOrder) {
  Fixture fixture({.shuffled = true, .description = gptq_description(4, 64, /*desc_act=*/true)});
  fixture.expect_equal();
  const Tensor perm =
      load_checkpoint(fixture.dir / "packed" / "model.pth").at("layers.0.attention.wqkv.perm");
  EXPECT_EQ(perm.scalar_type(), at::kInt);
  EXPECT_EQ(perm.size(0), kDim);
  // The fused ops run such a layer, too.
  Transformer model = load_model(fixture.dir / "packed" / "model.pth", {.precision = at::kFloat});
  model->setup_caches(1, 16);
  const Tensor ids = at::arange(4, at::kInt).view({1, 4});
  const Tensor expected = model->forward(ids.to(at::kLong), at::arange(4))[0];
  model->step(ids, at::zeros({1}, at::kInt), at::zeros({1}, at::kInt),
              make_sampling_params({}, 1, at::kCPU));
  EXPECT_LT(relative_difference(model->step_logits().narrow(0, 0, 4), expected), 1e-3);
  const LinearImpl& wqkv = *model->layers[0]->attention->wqkv;
  EXPECT_EQ(wqkv.view().format, WeightFormat::kInt4);
  const Tensor x = at::randn({9, kDim});  // the matrix kernels, for prompts
  EXPECT_LT(relative_difference(model->layers[0]->attention->wqkv->forward(x),
                                at::linear(x, wqkv.dequantize())),
            1e-5);
  EXPECT_LT(relative_difference(model->layers[0]->attention->wqkv->forward(x.to(at::kBFloat16)),
                                at::linear(x, wqkv.dequantize())),
            0.02);
}

TEST(ImportGptq, AGpuRunsActOrder) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  Fixture fixture({.shuffled = true, .description = gptq_description(4, 64, /*desc_act=*/true)});
  fixture.write();
  const fs::path file = fixture.dir / "packed" / "model.pth";
  convert(fixture.dir / "packed", file, {});
  Transformer on_cpu = load_model(file, {.precision = at::kFloat});
  const at::Device device(at::kCUDA, 0);
  Transformer model = load_model(file, {.precision = at::kBFloat16, .device = device});
  on_cpu->setup_caches(1, 16);
  model->setup_caches(1, 16);
  const Tensor ids = at::arange(4, at::kInt).view({1, 4});
  const Tensor expected = on_cpu->forward(ids.to(at::kLong), at::arange(4))[0];
  const Tensor first = at::zeros({1}, at::TensorOptions(device).dtype(at::kInt));
  model->step(ids.to(device), first, first, make_sampling_params({}, 1, device));
  EXPECT_LT(relative_difference(model->step_logits(4).cpu(), expected), 0.02);
  const Tensor forward = model->forward(ids.to(device, at::kLong), at::arange(4).to(device))[0];
  EXPECT_LT(relative_difference(forward.to(at::kFloat).cpu(), expected), 0.02);
}

TEST(ImportGptq, OrdersOfQueryKeyAndValueMustAgree) {
  Fixture fixture(
      {.shuffled = true, .one_order_for_qkv = false, .description = gptq_description(4, 64, true)});
  EXPECT_NE(fixture.convert_error().find("g_idx"), std::string::npos);
}

TEST(ImportGptq, EightBits) {
  Fixture({.bits = 8, .description = gptq_description(8, 64)}).expect_equal({.dtype = at::kFloat});
}

TEST(ImportGptq, BFloat16ScalesForTheOriginal) {
  Fixture fixture({.description = gptq_description(4, 64)});
  fixture.write();
  std::string notes;
  convert(fixture.dir / "packed", fixture.dir / "packed" / "model.pth",
          {.note = [&](const std::string& note) { notes += note; }, .scales = at::kBFloat16});
  EXPECT_NE(notes.find("largest change"), std::string::npos) << notes;
  const StateDict written = load_checkpoint(fixture.dir / "packed" / "model.pth");
  EXPECT_EQ(written.at("layers.0.feed_forward.w2.scales_and_zeros").scalar_type(), at::kBFloat16);
}

TEST(ImportAwq, Gemm) {
  Fixture({.groupsize = 128,
           .awq = true,
           .description =
               {{"w_bit", 4}, {"q_group_size", 128}, {"zero_point", true}, {"version", "GEMM"}}})
      .expect_equal();
}

TEST(ImportGptq, BadInput) {
  const auto error = [](const json& description,
                        const std::function<void(StateDict&)>& damage = {}) {
    Fixture fixture({.description = description});
    if (damage) damage(fixture.packed);
    return fixture.convert_error();
  };
  EXPECT_NE(error(gptq_description(3, 64)).find("weights of 3 bits are not supported"),
            std::string::npos);
  EXPECT_NE(error(gptq_description(4, 128)).find("bits in groups of 128"), std::string::npos);
  json marlin = gptq_description(4, 64);
  marlin["checkpoint_format"] = "marlin";
  EXPECT_NE(error(marlin).find("'marlin' is not supported"), std::string::npos);
  const std::string name = "model.layers.0.mlp.up_proj";
  for (const char* suffix : {".qweight", ".qzeros", ".scales"}) {
    EXPECT_NE(error(gptq_description(4, 64), [&](StateDict& t) { t.take(name + suffix); })
                  .find(name + suffix + " is missing"),
              std::string::npos)
        << suffix;
  }
  EXPECT_NE(error(gptq_description(4, 64, true), [&](StateDict& t) { t.take(name + ".g_idx"); })
                .find(".g_idx is missing"),
            std::string::npos);
  EXPECT_NE(error(gptq_description(4, 64),
                  [&](StateDict& t) {
                    t.set("model.layers.0.block_sparse_moe.experts.0.w1.qweight",
                          at::zeros({8, 8}, at::kInt));
                  })
                .find("packed experts are not supported"),
            std::string::npos);
  EXPECT_NE(error(gptq_description(4, 64),
                  [&](StateDict& t) { t.set(name + ".g_idx", at::zeros({kDim}, at::kInt)); })
                .find("does not give each of 4 groups its 64 columns"),
            std::string::npos);
}

}  // namespace
}  // namespace gptfast
