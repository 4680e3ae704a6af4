// Conversion of Hugging Face's, Meta's and llama2.c's checkpoints, against the original's
// converters where it has one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "convert_fixture.h"
#include "gptfast/checkpoint.h"
#include "gptfast/config.h"
#include "gptfast/convert.h"
#include "gptfast/tokenizer.h"
#include "safetensors.h"
#include "sha256.h"

namespace gptfast {
namespace {

using nlohmann::json;

const fs::path kGolden = fs::path(GPTFAST_GOLDEN) / "convert";

std::string sha256(const Tensor& tensor) {
  const Tensor data = tensor.contiguous();
  Sha256 hash;
  hash.update({static_cast<const uint8_t*>(data.const_data_ptr()), data.nbytes()});
  return hash.hex_digest();
}

json read_json(const fs::path& file) {
  return json::parse(std::ifstream(file));
}

class ImportTest : public ConvertFixture {
 protected:
  StateDict converted(const fs::path& input, const ConvertOptions& options = {}) {
    notes_.clear();
    ConvertOptions with_notes = options;
    with_notes.note = [&](const std::string& note) { notes_ += note + "\n"; };
    convert(input, directory_ / "out/model.pth", with_notes);
    return load_checkpoint(directory_ / "out/model.pth");
  }

  // The error of a conversion, which must leave nothing behind.
  std::string error(const fs::path& input, const ConvertOptions& options = {}) {
    fs::remove_all(directory_ / "out");
    const std::string message =
        error_of([&] { convert(input, directory_ / "out/model.pth", options); });
    EXPECT_TRUE(!fs::exists(directory_ / "out") || fs::is_empty(directory_ / "out")) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }

  // A changeable copy of golden files.
  fs::path copy(const std::string& name) {
    fs::remove_all(directory_ / name);
    fs::copy(kGolden / name, directory_ / name, fs::copy_options::recursive);
    return directory_ / name;
  }

  void expect_tensors(const StateDict& tensors, const json& expected) {
    EXPECT_EQ(tensors.size(), expected.size());
    for (const auto& [name, description] : expected.items()) {
      ASSERT_TRUE(tensors.contains(name)) << name;
      EXPECT_EQ(json(tensors.at(name).sizes().vec()), description["shape"]) << name;
      EXPECT_EQ(sha256(tensors.at(name)), description["sha256"]) << name;
    }
  }

  std::string notes_;
};

void edit_json(const fs::path& file, const std::function<void(json&)>& change) {
  json object = read_json(file);
  change(object);
  std::ofstream(file) << object;
}

// safetensors bytes of float tensors.
std::string safetensors(const std::vector<std::pair<std::string, Tensor>>& tensors,
                        const std::string& dtype = "F32") {
  json header = json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data.append(static_cast<const char*>(tensor.contiguous().const_data_ptr()), tensor.nbytes());
    header[name] = {{"dtype", dtype},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
}

TEST_F(ImportTest, SafetensorsFiles) {
  const json manifest = read_json(kGolden / "safetensors/manifest.json");
  int loaded = 0;
  for (const auto& [name, entry] : manifest.items()) {
    if (name == "_about") continue;
    const fs::path file = kGolden / "safetensors" / name;
    if (entry["expected"] == "refuse") {
      const std::string message = error_of([&] { load_safetensors(file); });
      EXPECT_TRUE(contains(message, name)) << name << ": " << message;
      continue;
    }
    const StateDict tensors = load_safetensors(file);
    EXPECT_EQ(tensors.size(), entry["tensors"].size()) << name;
    for (const auto& [tensor, description] : entry["tensors"].items()) {
      EXPECT_EQ(json(tensors.at(tensor).sizes().vec()), description["shape"])
          << name << " " << tensor;
      EXPECT_EQ(sha256(tensors.at(tensor)), description["sha256"]) << name << " " << tensor;
    }
    ++loaded;
  }
  EXPECT_EQ(loaded, 3);
}

TEST_F(ImportTest, HuggingFaceAsTheOriginalConverts) {
  const json dense = read_json(kGolden / "dense.json");
  for (const std::string kind : {"safetensors", "bin"}) {
    expect_tensors(converted(kGolden / ("hf-llama-" + kind)), dense[kind]);
    const ModelArgs args = ModelArgs::from_json_file(directory_ / "out/config.json");
    EXPECT_EQ(args.n_local_heads, 2);
    EXPECT_TRUE(contains(notes_, "no tokenizer"));
  }
}

TEST_F(ImportTest, OneFileAndInPlace) {
  const fs::path sharded = copy("hf-llama-safetensors");
  std::vector<std::pair<std::string, Tensor>> all;
  for (const char* shard :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    for (const auto& [name, tensor] : load_safetensors(sharded / shard))
      all.emplace_back(name, tensor);
  }
  write("one/model.safetensors", safetensors(all));
  fs::copy(sharded / "config.json", directory_ / "one/config.json");
  const json expected = read_json(kGolden / "dense.json")["safetensors"];
  expect_tensors(converted(directory_ / "one"), expected);
  expect_tensors(converted(directory_ / "one/model.safetensors"), expected);
  EXPECT_EQ(read(directory_ / "out/config.json"), read(directory_ / "one/config.json"));
  EXPECT_EQ(shell(R"("$BIN/convert" --checkpoint_dir one --quiet 2>err)"), 0);
  EXPECT_EQ(read(directory_ / "err"), "");
  expect_tensors(load_checkpoint(directory_ / "one/model.pth"), expected);
}

TEST_F(ImportTest, RowsOfGroupedHeadsAreInterleaved) {
  // Row r of a head of 4 is frequency r % 2, half r / 2 in Hugging Face's order: 0 1 2 3 becomes 0
  // 2 1 3.
  const int64_t dim = 8;
  const auto rows = [&](int64_t n) {
    return at::arange(n, at::kFloat).view({n, 1}).expand({n, dim}).contiguous();
  };
  std::vector<std::pair<std::string, Tensor>> tensors = {{"model.embed_tokens.weight",
                                                          at::zeros({10, dim})},
                                                         {"model.norm.weight", at::ones({dim})}};
  const std::string layer = "model.layers.0.";
  tensors.insert(tensors.end(), {{layer + "self_attn.q_proj.weight", rows(16)},
                                 {layer + "self_attn.k_proj.weight", rows(8)},
                                 {layer + "self_attn.v_proj.weight", rows(8)},
                                 {layer + "self_attn.o_proj.weight", at::zeros({dim, 16})},
                                 {layer + "mlp.gate_proj.weight", at::zeros({6, dim})},
                                 {layer + "mlp.up_proj.weight", at::zeros({6, dim})},
                                 {layer + "mlp.down_proj.weight", at::zeros({dim, 6})},
                                 {layer + "input_layernorm.weight", at::ones({dim})},
                                 {layer + "post_attention_layernorm.weight", at::ones({dim})}});
  write("hf/model.safetensors", safetensors(tensors));
  write(
      "hf/config.json",
      R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 6, "max_position_embeddings": 16,
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10, "tie_word_embeddings": true})");
  const StateDict result = converted(directory_ / "hf");
  const Tensor order = result.at("layers.0.attention.wqkv.weight").select(1, 0);
  const auto expected = at::tensor({0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15,
                                    0, 2, 1, 3, 4, 6, 5, 7, 0, 1,  2, 3,  4,  5,  6,  7},
                                   at::kFloat);
  EXPECT_TRUE(at::equal(order, expected)) << order;
  EXPECT_EQ(result.at("output.weight").data_ptr(), result.at("tok_embeddings.weight").data_ptr());
  // Dtypes: as stored, or as asked.
  EXPECT_EQ(result.at("norm.weight").scalar_type(), at::kFloat);
  ConvertOptions options;
  options.dtype = at::kBFloat16;
  EXPECT_EQ(converted(directory_ / "hf", options).at("norm.weight").scalar_type(), at::kBFloat16);
}

TEST_F(ImportTest, MixtralAsTheOriginalConverts) {
  const json moe = read_json(kGolden / "moe.json");
  ConvertOptions options;
  options.config = write("tiny.json", moe["config"].dump()).string();
  expect_tensors(converted(kGolden / "mixtral-pt", options), moe["tensors"]);
}

// The same experts under Hugging Face's and Mistral's names.
TEST_F(ImportTest, MixtralByExpert) {
  const int64_t dim = 8, hidden = 6, experts = 3;
  at::manual_seed(1);
  std::vector<Tensor> w(9);
  for (int e = 0; e < 3; ++e) {
    w[e * 3] = at::randn({hidden, dim});
    w[e * 3 + 1] = at::randn({dim, hidden});
    w[e * 3 + 2] = at::randn({hidden, dim});
  }
  const auto build = [&](bool hf, int count) {
    const std::string layer = hf ? "model.layers.0." : "layers.0.";
    const auto name = [&](const char* a, const char* b) { return layer + (hf ? a : b); };
    std::vector<std::pair<std::string, Tensor>> t =
        {{hf ? "model.embed_tokens.weight" : "tok_embeddings.weight", at::ones({10, dim})},
         {hf ? "model.norm.weight" : "norm.weight", at::ones({dim})},
         {hf ? "lm_head.weight" : "output.weight", at::ones({10, dim})}};
    t.insert(t.end(),
             {{name("self_attn.q_proj.weight", "attention.wq.weight"), at::ones({dim, dim})},
              {name("self_attn.k_proj.weight", "attention.wk.weight"), at::ones({4, dim})},
              {name("self_attn.v_proj.weight", "attention.wv.weight"), at::ones({4, dim})},
              {name("self_attn.o_proj.weight", "attention.wo.weight"), at::ones({dim, dim})},
              {name("input_layernorm.weight", "attention_norm.weight"), at::ones({dim})},
              {name("post_attention_layernorm.weight", "ffn_norm.weight"), at::ones({dim})},
              {name("block_sparse_moe.gate.weight", "feed_forward.gate.weight"),
               at::ones({experts, dim})}});
    for (int e = 0; e < count; ++e) {
      for (int k = 0; k < 3; ++k) {
        const char* const experts_of = hf ? "block_sparse_moe.experts." : "feed_forward.experts.";
        t.emplace_back(c10::str(layer, experts_of, e, ".w", k + 1, ".weight"), w[e * 3 + k]);
      }
    }
    return safetensors(t);
  };
  const std::string config =
      R"({"architectures": ["MixtralForCausalLM"], "hidden_size": 8, "intermediate_size": 6, "max_position_embeddings": 16,
    "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 10, "num_local_experts": 3, "num_experts_per_tok": 2})";
  const std::string params =
      R"({"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 6, "vocab_size": 10, "norm_eps": 1e-5,
    "moe": {"num_experts": 3, "num_experts_per_tok": 2}})";
  write("hf/model.safetensors", build(true, 3));
  write("hf/config.json", config);
  write("meta/consolidated.safetensors", build(false, 3));
  write("meta/params.json", params);
  for (const char* kind : {"hf", "meta"}) {
    const StateDict tensors = converted(directory_ / kind);
    const std::string moe = "layers.0.block_sparse_moe.";
    EXPECT_TRUE(at::equal(tensors.at(moe + "cond_ffn.w1"), at::stack({w[0], w[3], w[6]}))) << kind;
    EXPECT_TRUE(at::equal(tensors.at(moe + "cond_ffn.w2"), at::stack({w[1], w[4], w[7]}))) << kind;
    EXPECT_TRUE(at::equal(tensors.at(moe + "cond_ffn.w3"), at::stack({w[2], w[5], w[8]}))) << kind;
    EXPECT_EQ(ModelArgs::from_json_file(directory_ / "out/config.json").num_experts, 3);
  }
  write("hf/model.safetensors", build(true, 2));
  EXPECT_TRUE(contains(error(directory_ / "hf"), "cond_ffn.w1 has the shape [2, 6, 8]"));
}

TEST_F(ImportTest, MetaModelParallelParts) {
  at::manual_seed(2);
  const int64_t dim = 16;
  StateDict whole;
  whole.set("tok_embeddings.weight", at::randn({20, dim}));
  whole.set("layers.0.attention.wq.weight", at::randn({dim, dim}));
  whole.set("layers.0.attention.wk.weight", at::randn({8, dim}));
  whole.set("layers.0.attention.wv.weight", at::randn({8, dim}));
  whole.set("layers.0.attention.wo.weight", at::randn({dim, dim}));
  whole.set("layers.0.feed_forward.w1.weight", at::randn({24, dim}));
  whole.set("layers.0.feed_forward.w2.weight", at::randn({dim, 24}));
  whole.set("layers.0.feed_forward.w3.weight", at::randn({24, dim}));
  whole.set("layers.0.attention_norm.weight", at::randn({dim}));
  whole.set("layers.0.ffn_norm.weight", at::randn({dim}));
  whole.set("norm.weight", at::randn({dim}));
  whole.set("output.weight", at::randn({20, dim}));
  for (const int64_t embedding_dim : {1, 0}) {  // Llama 2 and Llama 3
    for (int part = 0; part < 2; ++part) {
      StateDict shard;
      for (const auto& [name, tensor] : whole) {
        const bool columns = name.ends_with("wo.weight") || name.ends_with("w2.weight") ||
                             (name == "tok_embeddings.weight" && embedding_dim == 1);
        shard.set(name,
                  tensor.dim() == 1 ? tensor : tensor.chunk(2, columns ? 1 : 0)[part].contiguous());
      }
      shard.set("rope.freqs", at::ones({2}));
      fs::create_directories(directory_ / "meta");
      save_checkpoint(directory_ / "meta" / ("consolidated.0" + std::to_string(part) + ".pth"),
                      shard);
    }
    write(
        "meta/params.json",
        R"({"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim_multiplier": 0.57, "multiple_of": 8, "norm_eps": 1e-5, "vocab_size": -1})");
    const StateDict tensors = converted(directory_ / "meta");
    EXPECT_EQ(tensors.size(), 10);
    EXPECT_TRUE(at::equal(tensors.at("layers.0.attention.wqkv.weight"),
                          at::cat({whole.at("layers.0.attention.wq.weight"),
                                   whole.at("layers.0.attention.wk.weight"),
                                   whole.at("layers.0.attention.wv.weight")})));
    for (const char* name : {"tok_embeddings.weight", "output.weight", "norm.weight",
                             "layers.0.attention.wo.weight", "layers.0.feed_forward.w2.weight"}) {
      EXPECT_TRUE(at::equal(tensors.at(name), whole.at(name))) << name;
    }
    EXPECT_EQ(ModelArgs::from_json_file(directory_ / "out/config.json").vocab_size, 20);
  }
  fs::remove(directory_ / "meta/params.json");
  EXPECT_TRUE(contains(error(directory_ / "meta"), "--config"));
}

// With more parts than key/value heads, neighbours repeat one (Llama 3.1 405B in 16 parts).
TEST_F(ImportTest, MetaPartsThatRepeatHeads) {
  at::manual_seed(3);
  const int64_t dim = 16, parts = 4;  // 4 query heads, 2 key/value heads of 4
  const Tensor q = at::randn({16, dim}), k = at::randn({8, dim}), v = at::randn({8, dim});
  const auto save = [&](int64_t part, const Tensor& wk) {
    StateDict shard;
    shard.set("tok_embeddings.weight", at::ones({5, dim}));
    shard.set("layers.0.attention.wq.weight", q.chunk(parts)[part].contiguous());
    shard.set("layers.0.attention.wk.weight", wk);
    shard.set("layers.0.attention.wv.weight", v.chunk(2)[part / 2].contiguous());
    shard.set("layers.0.attention.wo.weight", at::ones({dim, 4}));
    shard.set("layers.0.feed_forward.w1.weight", at::ones({6, dim}));
    shard.set("layers.0.feed_forward.w2.weight", at::ones({dim, 6}));
    shard.set("layers.0.feed_forward.w3.weight", at::ones({6, dim}));
    for (const char* norm :
         {"layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight"})
      shard.set(norm, at::ones({dim}));
    shard.set("output.weight", at::ones({5, dim}));
    save_checkpoint(directory_ / "meta" / ("consolidated.0" + std::to_string(part) + ".pth"),
                    shard);
  };
  write("meta/params.json",
        R"({"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24,
        "norm_eps": 1e-5, "vocab_size": 20})");
  for (int64_t part = 0; part < parts; ++part) save(part, k.chunk(2)[part / 2].contiguous());
  EXPECT_TRUE(at::equal(converted(directory_ / "meta").at("layers.0.attention.wqkv.weight"),
                        at::cat({q, k, v})));
  save(1, at::ones({4, dim}));
  EXPECT_TRUE(contains(error(directory_ / "meta"), "layers.0.attention.wk.weight: parts"));
}

/// A figure of /proc/self/status in bytes.
int64_t process_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == field + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

// Beside the mapped shards (page cache) about one tensor is in memory.
TEST_F(ImportTest, MemoryOfOneTensor) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory";
#endif
  const int64_t layers = 12, dim = 512, hidden = 1024;
  const auto bf16 = [](at::IntArrayRef shape) { return at::ones(shape, at::kBFloat16); };
  json index = {{"weight_map", json::object()}};
  int64_t mapped = 0;
  for (int64_t layer = -1; layer < layers; ++layer) {
    std::vector<std::pair<std::string, Tensor>> shard = {{"model.embed_tokens.weight",
                                                          bf16({1000, dim})},
                                                         {"model.norm.weight", bf16({dim})},
                                                         {"lm_head.weight", bf16({1000, dim})}};
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    if (layer >= 0) {
      shard = {{at + "input_layernorm.weight", bf16({dim})},
               {at + "post_attention_layernorm.weight", bf16({dim})},
               {at + "mlp.gate_proj.weight", bf16({hidden, dim})},
               {at + "mlp.up_proj.weight", bf16({hidden, dim})},
               {at + "mlp.down_proj.weight", bf16({dim, hidden})}};
      for (const char* name : {"q", "k", "v", "o"})
        shard.emplace_back(at + "self_attn." + name + "_proj.weight", bf16({dim, dim}));
    }
    const std::string file = "shard" + std::to_string(layer + 1) + ".safetensors";
    for (const auto& entry : shard) index["weight_map"][entry.first] = file;
    mapped += static_cast<int64_t>(fs::file_size(write("big/" + file, safetensors(shard, "BF16"))));
  }
  write("big/model.safetensors.index.json", index.dump());
  write("big/config.json",
        R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
        "max_position_embeddings": 16, "num_attention_heads": 8, "num_hidden_layers": 12,
        "vocab_size": 1000})");
  const int64_t before = process_bytes("VmRSS");
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts here
  ConvertOptions options;
  options.dtype = at::kFloat;
  convert(directory_ / "big", directory_ / "out/model.pth", options);
  const int64_t grown = process_bytes("VmHWM") - before;
  const int64_t largest = int64_t{3} * dim * dim * 4;  // wqkv
  const auto written = static_cast<int64_t>(fs::file_size(directory_ / "out/model.pth"));
  EXPECT_GT(written, 20 * largest);
  EXPECT_LT(grown, mapped + 4 * largest) << mapped << " mapped, " << written << " written";
}

TEST_F(ImportTest, Llama2c) {
  const StateDict from_pt = converted(kGolden / "llama2c/tiny.pt");
  ModelArgs expected{.block_size = 32,
                     .vocab_size = 262,
                     .n_layer = 2,
                     .n_head = 4,
                     .dim = 16,
                     .intermediate_size = 24,
                     .n_local_heads = 2,
                     .tie_word_embeddings = true};
  expected.finalize();
  EXPECT_EQ(ModelArgs::from_json_file(directory_ / "out/config.json"), expected);
  const auto tokenizer = Tokenizer::load(Tokenizer::find(directory_ / "out"));
  EXPECT_EQ(tokenizer->kind(), "sentencepiece");
  EXPECT_EQ(tokenizer->encode("a a"), (std::vector<int32_t>{259, 259}));
  EXPECT_EQ(tokenizer->decode({259, 259}), "a a");
  EXPECT_EQ(tokenizer->eos_id(), 2);
  for (const char* file : {"tiny.bin", "tiny_v1.bin", "tiny_head.bin"}) {
    const StateDict tensors = converted(kGolden / "llama2c" / file);
    EXPECT_EQ(tensors.size(), from_pt.size());
    for (const auto& [name, tensor] : tensors) {
      const bool own_head = std::string(file) == "tiny_head.bin" && name == "output.weight";
      const StateDict head = load_checkpoint(kGolden / "llama2c/head.pth");
      EXPECT_TRUE(at::equal(tensor, own_head ? head.at("head") : from_pt.at(name)))
          << file << " " << name;
    }
  }
  const std::string whole = read(kGolden / "llama2c/tiny_v1.bin");
  for (const size_t size : {whole.size() - 1, size_t{256}, size_t{100}, size_t{28}, size_t{5}}) {
    EXPECT_NE(error(write("cut/x.bin", whole.substr(0, size))), "") << size;
  }
  std::string quantized = whole;
  quantized[4] = 2;
  EXPECT_TRUE(contains(error(write("cut/x.bin", quantized)), "version 2"));
  write("cut/tokenizer.bin", read(kGolden / "llama2c/tokenizer.bin").substr(0, 1000));
  EXPECT_TRUE(contains(error(write("cut/x.bin", whole)), "tokenizer.bin"));
}

TEST_F(ImportTest, BadDirectories) {
  const auto changed = [&](const std::string& golden,
                           const std::function<void(const fs::path&)>& change) {
    const fs::path directory = copy(golden);
    change(directory);
    return error(directory);
  };
  const std::string st = "hf-llama-safetensors";
  const std::string bin = "hf-llama-bin";
  const auto config = [](const std::function<void(json&)>& change) {
    return [=](const fs::path& d) { edit_json(d / "config.json", change); };
  };
  EXPECT_TRUE(contains(changed(st,
                               [](const fs::path& d) {
                                 fs::remove(d / "model-00002-of-00002.safetensors");
                               }),
                       "model-00002-of-00002.safetensors: is missing"));
  EXPECT_TRUE(
      contains(changed(st,
                       [](const fs::path& d) { fs::remove(d / "model.safetensors.index.json"); }),
               "model.safetensors.index.json"));
  EXPECT_TRUE(
      contains(changed(bin,
                       [](const fs::path& d) { fs::remove(d / "pytorch_model.bin.index.json"); }),
               "pytorch_model.bin.index.json"));
  EXPECT_TRUE(contains(changed(bin,
                               [](const fs::path& d) {
                                 fs::resize_file(d / "pytorch_model-00001-of-00002.bin", 1000);
                               }),
                       "pytorch_model-00001-of-00002.bin"));
  EXPECT_TRUE(contains(changed(st,
                               [](const fs::path& d) {
                                 std::ofstream(d / "model.safetensors.index.json") << "{}";
                               }),
                       "weight_map"));
  EXPECT_TRUE(contains(changed(st,
                               [](const fs::path& d) {
                                 edit_json(d / "model.safetensors.index.json", [](json& j) {
                                   j["weight_map"]["lm_head.weight"] = "../../etc/passwd";
                                 });
                               }),
                       "not a name in this folder"));
  EXPECT_TRUE(contains(changed(st,
                               [](const fs::path& d) {
                                 edit_json(d / "model.safetensors.index.json", [](json& j) {
                                   j["weight_map"]["model.extra"] =
                                       "model-00001-of-00002.safetensors";
                                 });
                               }),
                       "has no tensor model.extra"));
  EXPECT_TRUE(
      contains(changed(st, [](const fs::path& d) { fs::remove(d / "config.json"); }), "--config"));
  EXPECT_TRUE(
      contains(changed(st, config([](json& j) { j["architectures"] = {"GPTBigCodeForCausalLM"}; })),
               "GPTBigCodeForCausalLM' is not supported (known: LlamaForCausalLM"));
  EXPECT_TRUE(contains(changed(st, config([](json& j) { j.erase("num_hidden_layers"); })),
                       "num_hidden_layers"));
  const std::string layers = changed(st, config([](json& j) { j["num_hidden_layers"] = 3; }));
  EXPECT_TRUE(contains(layers, "2 layers") && contains(layers, "3")) << layers;
  EXPECT_TRUE(contains(changed(st, config([](json& j) { j["num_key_value_heads"] = 4; })),
                       "layers.0.attention.wk.weight has the shape [32, 64]"));
  fs::create_directories(directory_ / "empty");
  EXPECT_TRUE(contains(error(directory_ / "empty"), "holds no weights"));
}

TEST_F(ImportTest, UnknownAndMissingTensorsBothListed) {
  const fs::path directory = copy("hf-llama-safetensors");
  const fs::path shard = directory / "model-00002-of-00002.safetensors";
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& [name, tensor] : load_safetensors(shard)) {
    if (name != "model.norm.weight") tensors.emplace_back(name, tensor.clone());
  }
  tensors.emplace_back("model.layers.0.self_attn.q_proj.bias", at::ones({64}));
  std::ofstream(shard, std::ios::binary) << safetensors(tensors);
  edit_json(directory / "model.safetensors.index.json",
            [](json& j) { j["weight_map"].erase("model.norm.weight"); });
  const std::string message = error(directory);
  EXPECT_TRUE(contains(message, "missing tensors: norm.weight")) << message;
  EXPECT_TRUE(contains(message, "unexpected tensors: model.layers.0.self_attn.q_proj.bias"))
      << message;
}

TEST_F(ImportTest, MixedDtypes) {
  const fs::path directory = copy("hf-llama-safetensors");
  const fs::path shard = directory / "model-00002-of-00002.safetensors";
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& [name, tensor] : load_safetensors(shard))
    tensors.emplace_back(name, tensor.to(at::kBFloat16));
  std::ofstream(shard, std::ios::binary) << safetensors(tensors, "BF16");
  const std::string message = error(directory);
  EXPECT_TRUE(contains(message, "mixed dtypes") && contains(message, "bfloat16") &&
              contains(message, "float32") && contains(message, "--dtype"))
      << message;
  ConvertOptions options;
  options.dtype = at::kBFloat16;
  for (const auto& [name, tensor] : converted(directory, options))
    EXPECT_EQ(tensor.scalar_type(), at::kBFloat16) << name;
  // Integers cannot be weights.
  for (auto& [name, tensor] : tensors) tensor = at::ones(tensor.sizes(), at::kChar);
  std::ofstream(shard, std::ios::binary) << safetensors(tensors, "I8");
  EXPECT_TRUE(contains(error(directory, options), "int8"));
}

// A SentencePiece model made of llama2.c's vocabulary: 262 tokens.
TEST_F(ImportTest, Tokenizers) {
  converted(kGolden / "llama2c/tiny.bin");
  const fs::path directory = copy("hf-llama-safetensors");
  fs::copy(directory_ / "out/tokenizer.model", directory / "tokenizer.model");
  const std::string message = error(directory);
  EXPECT_TRUE(contains(message, "262 tokens") && contains(message, "200")) << message;
  // Llama 3 keeps its tokenizer in original/, and that one wins over tokenizer.json.
  fs::remove(directory / "tokenizer.model");
  write("hf-llama-safetensors/original/tokenizer.model", "no tokenizer at all");
  write("hf-llama-safetensors/tokenizer.json", "{}");
  converted(directory);
  EXPECT_EQ(read(directory_ / "out/tokenizer.model"), "no tokenizer at all");
  EXPECT_TRUE(contains(notes_, "cannot be used")) << notes_;
  EXPECT_TRUE(fs::exists(directory_ / "out/tokenizer.json"));
}

// scripts/prepare.sh with a stand-in for the hub's client, in a tree of its own.
TEST_F(ImportTest, PrepareScript) {
  copy("hf-llama-safetensors");
  const fs::path script =
      fs::path(GPTFAST_GOLDEN).parent_path().parent_path() / "scripts/prepare.sh";
  fs::create_directories(directory_ / "tree/scripts");
  fs::copy(script, directory_ / "tree/scripts/prepare.sh");
  const auto client = [&](const std::string& body) {
    fs::permissions(write("client/hf", "#!/bin/sh\n" + body + "\n"), fs::perms::owner_all);
  };
  const std::string prepare =
      R"(PATH="$PWD/client:$PATH" GPTFAST_BIN="$BIN" tree/scripts/prepare.sh )";
  const fs::path made = directory_ / "tree/checkpoints/org/tiny";
  client("mkdir -p \"$4\"; exit 7");  // a download that breaks off
  EXPECT_EQ(shell(prepare + "org/tiny >out.txt 2>&1"), 7);
  EXPECT_FALSE(fs::exists(made));
  client("[ \"$1 $2 $3\" = 'download org/tiny --local-dir' ] && cp '" + directory_.string() +
         "/hf-llama-safetensors/'* \"$4\"");
  EXPECT_EQ(shell(prepare + "org/tiny >out.txt 2>&1"), 0) << read(directory_ / "out.txt");
  expect_tensors(load_checkpoint(made / "model.pth"),
                 read_json(kGolden / "dense.json")["safetensors"]);
  EXPECT_EQ(load_checkpoint(made / "model_int8.pth").at("output.weight").scalar_type(), at::kChar);
  client("exit 7");  // what is there is not downloaded again
  EXPECT_EQ(shell(prepare + "org/tiny >out.txt 2>&1"), 0);
  EXPECT_EQ(shell(prepare + "tiny 2>err"), 2);
  EXPECT_TRUE(contains(read(directory_ / "err"), "usage"));
}

TEST_F(ImportTest, ForeignFiles) {
  for (const auto& [content, expected] : std::vector<std::pair<std::string, std::string>>{
           {"<!DOCTYPE html><html></html>", "HTML"},
           {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS"},
           {std::string(1000, 'x'), "x.bin"},
           {"", "empty"},
       }) {
    const std::string message = error(write("x.bin", content));
    EXPECT_TRUE(contains(message, expected) && contains(message, "x.bin")) << message;
  }
}

}  // namespace
}  // namespace gptfast
