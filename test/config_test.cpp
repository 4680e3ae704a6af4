#include "gptfast/config.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "gptfast/checkpoint.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;

// A directory of its own for each test, removed at the end.
class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    directory_ = fs::temp_directory_path() /
                 (std::string("gptfast_config_") + info->name() + std::to_string(getpid()));
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }

  fs::path write(const std::string& name, const std::string& text) {
    const fs::path file = directory_ / name;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
    return file;
  }

  fs::path directory_;
};

template <typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Tensors of the right shapes without memory behind them.
StateDict fake_tensors(const ModelArgs& c) {
  StateDict tensors;
  const auto empty = [](at::IntArrayRef sizes) {
    return at::empty(sizes, at::TensorOptions().device(at::kMeta).dtype(at::kBFloat16));
  };
  tensors.set("tok_embeddings.weight", empty({c.vocab_size, c.dim}));
  for (int64_t i = 0; i < c.n_layer; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    tensors.set(prefix + "attention.wqkv.weight", empty({c.qkv_dim(), c.dim}));
    tensors.set(prefix + "attention.wo.weight", empty({c.dim, c.n_head * c.head_dim}));
    if (c.num_experts > 0) {
      const std::string moe = prefix + "block_sparse_moe.";
      tensors.set(moe + "gate.weight", empty({c.num_experts, c.dim}));
      tensors.set(moe + "cond_ffn.w1", empty({c.num_experts, c.intermediate_size, c.dim}));
      tensors.set(moe + "cond_ffn.w2", empty({c.num_experts, c.dim, c.intermediate_size}));
      tensors.set(moe + "cond_ffn.w3", empty({c.num_experts, c.intermediate_size, c.dim}));
    } else {
      tensors.set(prefix + "feed_forward.w1.weight", empty({c.intermediate_size, c.dim}));
      tensors.set(prefix + "feed_forward.w3.weight", empty({c.intermediate_size, c.dim}));
      tensors.set(prefix + "feed_forward.w2.weight", empty({c.dim, c.intermediate_size}));
    }
    tensors.set(prefix + "attention_norm.weight", empty({c.dim}));
    tensors.set(prefix + "ffn_norm.weight", empty({c.dim}));
  }
  tensors.set("norm.weight", empty({c.dim}));
  if (!c.tie_word_embeddings) tensors.set("output.weight", empty({c.vocab_size, c.dim}));
  return tensors;
}

const ModelArgs kTiny = [] {
  ModelArgs args{.block_size = 64,
                 .vocab_size = 50,
                 .n_layer = 2,
                 .n_head = 4,
                 .dim = 32,
                 .n_local_heads = 2};
  args.finalize();
  return args;
}();

// Parameter counts that others published, none of them computed from the table. Where from:
// "hub": the parameters that the hub's page of the repository counts in its safetensors files;
// "loaded": what PyTorch counted in the loaded model, in a public log or report;
// "host": the catalogue of a service that hosts the model;
// "file": counted in the file by another program that reads it.
struct PublishedCount {
  std::vector<const char*> rows;
  int64_t parameters;
  const char* source;
};
// clang-format off
const std::vector<PublishedCount> kPublishedCounts = {
    // open_llama repeats the shapes of LLaMA 7B and 13B, CodeLlama-Python those of Llama 2 with its vocabulary.
    {{"7B", "llama-7b", "open_llama_7b", "open_llama_7b_v2"}, 6738415616, "LLaMA 7B, loaded"},
    {{"13B", "llama-13b", "open_llama_13b"}, 13015864320, "LLaMA 13B, loaded"},
    {{"30B", "llama-30b"}, 32528943616, "decapoda-research/llama-30b-hf, loaded"},
    {{"llama-65b"}, 65285660672, "decapoda-research/llama-65b-hf, loaded"},
    {{"Llama-2-7b", "CodeLlama-7b-Python-hf"}, 6738415616, "meta-llama/Llama-2-7b-hf, hub"},
    {{"Llama-2-13b", "CodeLlama-13b-Python"}, 13015864320, "meta-llama/Llama-2-13b-hf, loaded"},
    {{"70B", "Llama-2-70b"}, 68976648192, "togethercomputer/llama-2-70b, host"},
    {{"CodeLlama-7b"}, 6738546688, "CodeLlama-7b, file"},
    {{"CodeLlama-13b"}, 13016028160, "togethercomputer/CodeLlama-13b, host"},
    {{"34B", "CodeLlama-34b", "CodeLlama-34b-Python"}, 33743970304, "Phind/Phind-CodeLlama-34B-v2, host"},
    {{"Mistral-7B", "Mistral-7B-v0.1"}, 7241732096, "mistralai/Mistral-7B-v0.1, hub"},
    {{"Mistral-7B-v0.2"}, 7241732096, "mistralai/Mistral-7B-Instruct-v0.2, hub"},
    {{"Mistral-7B-v0.3"}, 7248023552, "mistralai/Mistral-7B-v0.3, hub"},
    {{"Mixtral-8x7B-v0.1"}, 46702792704, "mistralai/Mixtral-8x7B-v0.1, hub and loaded"},
    {{"Mixtral-8x22B-v0.1"}, 140620634112, "mistral-community/Mixtral-8x22B-v0.1, hub"},
    {{"Mixtral-8x22B-Instruct-v0.1"}, 140630071296, "mistralai/Mixtral-8x22B-Instruct-v0.1, hub"},
    {{"llama-3-8b", "llama-3.1-8b"}, 8030261248, "meta-llama/Llama-3.1-8B, hub"},
    {{"llama-3-70b", "llama-3.1-70b"}, 70553706496, "meta-llama/Llama-3.1-70B, hub"},
    {{"llama-3.1-405b"}, 405853388800, "meta-llama/Llama-3.1-405B, hub"},
    {{"llama-3.2-1b"}, 1235814400, "meta-llama/Llama-3.2-1B-Instruct, hub"},
    {{"llama-3.2-3b"}, 3212749824, "meta-llama/Llama-3.2-3B-Instruct, hub"},
    {{"llama-3.3-70b"}, 70553706496, "meta-llama/Llama-3.3-70B-Instruct, hub"},
    {{"SmolLM2-135M"}, 134515008, "HuggingFaceTB/SmolLM2-135M-Instruct, hub and loaded"},
    {{"SmolLM2-360M"}, 361821120, "HuggingFaceTB/SmolLM2-360M-Instruct, hub and loaded"},
    {{"SmolLM2-1.7B"}, 1711376384, "HuggingFaceTB/SmolLM2-1.7B-Instruct, hub and loaded"},
    {{"TinyLlama-1.1B", "TinyLlama-1.1B-Chat-v1.0"}, 1100048384, "TinyLlama/TinyLlama_v1.1, loaded"},
    {{"open_llama_3b", "open_llama_3b_v2"}, 3426473600, "openlm-research/open_llama_3b_v2, hub"},
    {{"stories260K"}, 260032, "karpathy/tinyllamas, file"},
    {{"stories15M"}, 15191712, "Xenova/llama2.c-stories15M, loaded"},
    {{"stories42M"}, 41689600, "karpathy/tinyllamas, file"},
    {{"stories110M"}, 109529856, "karpathy/tinyllamas, file"},
};
// clang-format on

TEST_F(ConfigTest, TableHasThePublishedParameterCounts) {
  std::set<std::string> checked;
  for (const auto& [rows, parameters, source] : kPublishedCounts) {
    for (const char* row : rows) {
      EXPECT_EQ(ModelArgs::from_name(row).num_parameters(), parameters) << row << ": " << source;
      EXPECT_TRUE(checked.insert(row).second) << row;
    }
  }
  for (const auto& name : known_model_names()) EXPECT_TRUE(checked.contains(name)) << name;
}

TEST_F(ConfigTest, TableRowsDeriveAndFitTheirOwnTensors) {
  for (const auto& name : known_model_names()) {
    const ModelArgs args = ModelArgs::from_name(name);
    EXPECT_EQ(args.head_dim * args.n_head, args.dim) << name;
    const StateDict tensors = fake_tensors(args);
    int64_t weights = 0;
    for (const auto& [key, tensor] : tensors) weights += tensor.numel();
    EXPECT_EQ(weights, args.num_parameters()) << name;
    EXPECT_NO_THROW(check_config(args, tensors)) << name;
  }
}

TEST_F(ConfigTest, FromNameIgnoresCaseAndListsKnownNames) {
  EXPECT_EQ(ModelArgs::from_name("LLAMA-3-8B"), ModelArgs::from_name("llama-3-8b"));
  EXPECT_EQ(ModelArgs::from_name("7b").block_size, 2048);
  const auto message = error_of([] { ModelArgs::from_name("gpt-5"); });
  EXPECT_TRUE(contains(message, "gpt-5") && contains(message, "Mixtral-8x7B-v0.1")) << message;
}

TEST_F(ConfigTest, DirectoryNames) {
  const std::map<std::string, std::string> expected = {
      {"stories15M", "stories15M"},
      {"7B", "7B"},
      {"Mistral-7B", "Mistral-7B"},
      {"Llama-2-7b-chat-hf", "Llama-2-7b"},
      {"Llama-2-70b-hf", "Llama-2-70b"},
      {"CodeLlama-7b-hf", "CodeLlama-7b"},
      {"CodeLlama-7b-Instruct-hf", "CodeLlama-7b"},
      {"CodeLlama-7b-Python-hf", "CodeLlama-7b-Python-hf"},
      {"CodeLlama-13b-Python-hf", "CodeLlama-13b-Python"},
      {"CodeLlama-34b-Python-hf", "CodeLlama-34b-Python"},
      {"Mistral-7B-v0.1", "Mistral-7B-v0.1"},
      {"Mistral-7B-Instruct-v0.2", "Mistral-7B-v0.2"},
      {"Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"},
      {"Mixtral-8x7B-v0.1", "Mixtral-8x7B-v0.1"},
      {"Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"},
      {"Mixtral-8x22B-Instruct-v0.1", "Mixtral-8x22B-Instruct-v0.1"},
      {"Meta-Llama-3-8B-Instruct", "llama-3-8b"},
      {"llama3-8b", "llama-3-8b"},
      {"Meta-Llama-3.1-405B-Instruct", "llama-3.1-405b"},
      {"Llama-3.2-1B", "llama-3.2-1b"},
      {"Llama-3.2-3B-Instruct", "llama-3.2-3b"},
      {"Llama-3.3-70B-Instruct", "llama-3.3-70b"},
      {"llama-7b", "llama-7b"},
      {"llama-7b-hf", "llama-7b"},
      {"TinyLlama-1.1B", "TinyLlama-1.1B"},
      {"TinyLlama-1.1B-Chat-v1.0", "TinyLlama-1.1B-Chat-v1.0"},
      {"SmolLM2-135M-Instruct", "SmolLM2-135M"},
      {"open_llama_7b_v2", "open_llama_7b_v2"},
  };
  for (const auto& [directory, row] : expected)
    EXPECT_EQ(match_model_name(directory).value_or("none"), row) << directory;
  for (const char* directory :
       {"vicuna-33b", "vicuna-7b-v1.5", "ft-13B-from-30B", "model", ".", "", "Mistral-7B-Instruct",
        "Llama-2-7B-32K", "Yarn-Llama-2-7b-64k", "zephyr-7b-beta", "CodeLlama-70b-hf", "Qwen2-7B",
        "Llama-3-8B-Instruct-Gradient-1048k", "8B", "my7B", "Mixtral-7B", "longchat-7b-16k"}) {
    EXPECT_EQ(match_model_name(directory).value_or("none"), "none") << directory;
  }
}

// The directory-name traps: right values, or an error that says why.
TEST_F(ConfigTest, TrapsGiveTrueValues) {
  const auto found = [&](const std::string& directory, const ModelArgs& shapes) {
    return find_config(directory_ / directory / "model.pth", "", fake_tensors(shapes));
  };
  const auto row = [](const char* name) { return ModelArgs::from_name(name); };
  EXPECT_EQ(found("Llama-2-7b-chat-hf", row("7B")).block_size, 4096);
  EXPECT_EQ(found("CodeLlama-7b-Instruct-hf", row("CodeLlama-7b")).rope_base, 1e6);
  EXPECT_EQ(found("CodeLlama-13b-Python-hf", row("13B")).rope_base, 1e6);
  EXPECT_EQ(found("Mistral-7B-Instruct-v0.2", row("Mistral-7B")).rope_base, 1e6);
  EXPECT_EQ(found("Mistral-7B-v0.3", row("Mistral-7B-v0.3")).vocab_size, 32768);
  EXPECT_EQ(found("llama-7b", row("7B")).norm_eps, 1e-6);
  EXPECT_EQ(found("Llama-3.2-1B", row("llama-3.2-1b")).rope_scaling->factor, 32);
  EXPECT_EQ(found("Mixtral-8x7B-Instruct-v0.1", row("Mixtral-8x7B-v0.1")).num_experts, 8);
  for (const char* directory : {"vicuna-33b", "ft-13B-from-30B", "model"}) {
    const auto message = error_of([&] { found(directory, row("13B")); });
    EXPECT_TRUE(contains(message, directory) && contains(message, "--config") &&
                contains(message, "Llama-2-13b"))
        << message;
  }
  const auto message = error_of([&] { found("Mistral-7B-v0.1", row("Mistral-7B-v0.3")); });
  EXPECT_TRUE(contains(message, "32768") && contains(message, "32000") &&
              contains(message, "Mistral-7B-v0.1"))
      << message;
}

TEST_F(ConfigTest, NameOfFileAndOfLinkTarget) {
  const ModelArgs stories = ModelArgs::from_name("stories15M");
  EXPECT_EQ(find_config(directory_ / "stories15M.pt", "", fake_tensors(stories)), stories);
  const auto file = write("stories15M/model.pth", "");
  fs::create_directory_symlink(file.parent_path(), directory_ / "current");
  EXPECT_EQ(find_config(directory_ / "current" / "model.pth", "", fake_tensors(stories)), stories);
}

TEST_F(ConfigTest, SlidingWindowLimitsTheContext) {
  testing::internal::CaptureStderr();
  const auto args = find_config(directory_ / "Mistral-7B-v0.1" / "model.pth", "",
                                fake_tensors(ModelArgs::from_name("Mistral-7B")));
  EXPECT_EQ(args.block_size, 4096);
  const std::string message = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(message, "4096") && contains(message, "32768")) << message;
}

TEST_F(ConfigTest, OrderOfSources) {
  const StateDict tensors = fake_tensors(kTiny);
  write("stories15M/config.json", to_config_json(kTiny));
  const auto checkpoint = directory_ / "stories15M" / "model.pth";
  EXPECT_EQ(find_config(checkpoint, "", tensors), kTiny);  // the file wins over the name
  ModelArgs longer = kTiny;
  longer.block_size = 128;
  const auto other = write("other.json", to_config_json(longer));
  EXPECT_EQ(find_config(checkpoint, other.string(), tensors).block_size,
            128);  // --config wins over the file
  const auto message = error_of([&] { find_config(checkpoint, "stories110M", tensors); });
  EXPECT_TRUE(contains(message, "--config stories110M") && contains(message, "50") &&
              contains(message, "32000"))
      << message;
  write("stories15M/config.json", "{ not json");  // a broken file is an error, never skipped
  EXPECT_TRUE(contains(error_of([&] { find_config(checkpoint, "", tensors); }), "not valid JSON"));
}

constexpr const char* kHf =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 112,
  "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
  "head_dim": null, "vocab_size": 200, "tie_word_embeddings": true, EXTRA})";

std::string hf(const std::string& extra) {
  std::string text = kHf;
  return text.replace(text.find("EXTRA"), 5, extra);
}

TEST_F(ConfigTest, HuggingFaceSpellings) {
  const std::string scaling =
      R"("factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64)";
  const auto v4 =
      write("v4.json", hf(R"("rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", )" +
                          scaling + "}"));
  const auto v5 =
      write("v5.json", hf(R"("rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", )" +
                          scaling + "}"));
  const ModelArgs args = ModelArgs::from_json_file(v4);
  EXPECT_EQ(args, ModelArgs::from_json_file(v5));
  EXPECT_EQ(args.rope_base, 500000);
  EXPECT_EQ(args.rope_scaling, (RopeScaling{.factor = 8,
                                            .low_freq_factor = 1,
                                            .high_freq_factor = 4,
                                            .original_max_position_embeddings = 64}));
  EXPECT_EQ(args.head_dim, 32);
  EXPECT_EQ(args.block_size, 512);
  EXPECT_EQ(args.qkv_dim(), 256);
  EXPECT_TRUE(args.tie_word_embeddings);
}

TEST_F(ConfigTest, HuggingFaceRefusals) {
  const auto message = [&](const std::string& text) {
    return error_of([&] { ModelArgs::from_json_file(write("config.json", text)); });
  };
  EXPECT_TRUE(
      contains(message(hf(R"("architectures": ["FalconForCausalLM"])")), "FalconForCausalLM"));
  EXPECT_TRUE(
      contains(message(hf(R"("architectures": ["FalconForCausalLM"])")), "MixtralForCausalLM"));
  EXPECT_TRUE(
      contains(message(hf(R"("rope_scaling": {"type": "linear", "factor": 4.0})")), "linear"));
  EXPECT_TRUE(contains(message(hf(R"("rope_scaling": {"rope_type": "llama3", "factor": 4.0})")),
                       "low_freq_factor"));
  EXPECT_TRUE(contains(message(hf(R"("attention_bias": true)")), "attention_bias"));
  EXPECT_TRUE(contains(message(hf(R"("hidden_act": "gelu")")), "gelu"));
  EXPECT_TRUE(contains(message(hf(R"("hidden_size": null)")), "hidden_size"));
  EXPECT_TRUE(contains(message(hf(R"("hidden_size": "big")")), "big"));
  EXPECT_TRUE(contains(message(hf(R"("hidden_size": -4)")), "-4"));
  EXPECT_TRUE(contains(message(hf(R"("hidden_size": 1e300)")), "hidden_size"));
  EXPECT_TRUE(contains(message(hf(R"("hidden_size": 18446744073709551615)")), "out of range"));
  EXPECT_TRUE(contains(message(hf(R"("num_key_value_heads": 3)")), "multiple"));
  EXPECT_TRUE(contains(message(hf(R"("num_hidden_layers": 99999999)")), "99999999"));
  EXPECT_TRUE(contains(message("[1, 2]"), "array"));
  EXPECT_TRUE(contains(message("{}"), "no model configuration"));
  EXPECT_TRUE(
      contains(error_of([&] { ModelArgs::from_json_file(directory_); }), "not a regular file"));
  EXPECT_TRUE(contains(error_of([&] { ModelArgs::from_json_file(directory_ / "none.json"); }),
                       "no such file"));
}

TEST_F(ConfigTest, MetaParams) {
  const auto read = [&](const std::string& text) {
    return ModelArgs::from_json_file(write("params.json", text));
  };
  EXPECT_EQ(
      read(
          R"({"dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32,
    "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true, "vocab_size": 128256})"),
      ModelArgs::from_name("llama-3.1-8b"));
  EXPECT_EQ(
      read(
          R"({"dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "n_heads": 32, "n_kv_heads": 8, "n_layers": 16,
    "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true, "vocab_size": 128256})"),
      ModelArgs::from_name("llama-3.2-1b"));
  const ModelArgs llama2 = read(
      R"({"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1})");
  EXPECT_EQ(llama2.vocab_size, -1);
  EXPECT_EQ(llama2.block_size, 4096);
  // The vocabulary comes from the embedding.
  write(
      "dir/params.json",
      R"({"dim": 32, "multiple_of": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "norm_eps": 1e-05, "vocab_size": -1})");
  EXPECT_EQ(find_config(directory_ / "dir" / "model.pth", "", fake_tensors(kTiny)).vocab_size, 50);
  EXPECT_TRUE(
      contains(error_of([&] { read(R"({"n_layers": 2, "n_heads": 4})"); }), "'dim' is missing"));
  EXPECT_TRUE(contains(error_of([&] {
                         read(R"({"dim": 32, "multiple_of": 0, "n_heads": 4, "n_layers": 2})");
                       }),
                       "multiple_of"));
}

TEST_F(ConfigTest, FieldsOfModelArgs) {
  const auto read = [&](const std::string& text) {
    return ModelArgs::from_json_file(write("tiny.json", text));
  };
  const ModelArgs args = read(
      R"({"block_size": 2048, "vocab_size": 512, "n_layer": 3, "n_head": 8, "dim": 256, "intermediate_size": 512,
    "n_local_heads": 2, "head_dim": 32, "rope_base": 500000, "norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})");
  EXPECT_EQ(args.rope_scaling, RopeScaling{});
  EXPECT_EQ(args.qkv_dim(), 384);
  EXPECT_EQ(read(R"({"n_layer": 1, "dim": 288, "n_head": 6})").intermediate_size, 768);
  EXPECT_EQ(read(R"({"n_layer": 1, "num_experts": 8, "num_activated_experts": 2})").num_experts, 8);
  EXPECT_TRUE(contains(error_of([&] { read(R"({"n_layer": 1, "n_heads": 6})"); }), "n_heads"));
  EXPECT_TRUE(contains(error_of([&] { read(R"({"n_layer": 1, "num_experts": 8})"); }),
                       "num_activated_experts"));
}

TEST_F(ConfigTest, ConfigJsonRoundTrip) {
  for (const auto& name : known_model_names()) {
    const ModelArgs args = ModelArgs::from_name(name);
    EXPECT_EQ(ModelArgs::from_json_file(write("config.json", to_config_json(args))), args) << name;
  }
}

TEST_F(ConfigTest, CheckNamesTheTensorAndBothShapes) {
  const auto message = [&](auto change) {
    StateDict tensors = fake_tensors(kTiny);
    change(tensors);
    return error_of([&] { check_config(kTiny, tensors); });
  };
  const auto meta = at::TensorOptions().device(at::kMeta);
  EXPECT_EQ(message([](StateDict&) {}), "");
  EXPECT_EQ(message([&](StateDict& t) { t.set("rope.freqs", at::empty({4}, meta)); }), "");
  auto text = message([&](StateDict& t) {
    t.set("layers.1.feed_forward.w2.weight", at::empty({32, 255}, meta));
  });
  EXPECT_TRUE(contains(text, "layers.1.feed_forward.w2.weight") && contains(text, "[32, 255]") &&
              contains(text, "[32, 256]"))
      << text;
  text = message([&](StateDict& t) { t.set("layers.2.ffn_norm.weight", at::empty({32}, meta)); });
  EXPECT_TRUE(contains(text, "3 layers") && contains(text, "2")) << text;
  text = message([&](StateDict& t) { t.set("tok_embeddings.weight", at::empty({50, 64}, meta)); });
  EXPECT_TRUE(contains(text, "64") && contains(text, "32")) << text;
  text = message([&](StateDict& t) {
    t.take("layers.0.attention.wo.weight");
    t.take("output.weight");
    for (int i = 0; i < 12; ++i) t.set("extra." + std::to_string(i), at::empty({1}, meta));
  });
  EXPECT_TRUE(contains(text, "missing tensors: layers.0.attention.wo.weight, output.weight"))
      << text;
  EXPECT_TRUE(contains(text, "unexpected tensors: extra.0") && contains(text, "and 2 more"))
      << text;
}

TEST_F(ConfigTest, CheckAcceptsEveryWeightFormat) {
  const auto meta = at::TensorOptions().device(at::kMeta);
  StateDict tensors = fake_tensors(kTiny);
  tensors.set("output.weight", at::empty({50, 32}, meta.dtype(at::kChar)));
  tensors.set("output.scales", at::empty({50}, meta));
  // int4, columns padded to 1024
  tensors.set("layers.0.feed_forward.w1.weight", at::empty({32, 8, 32, 4}, meta.dtype(at::kInt)));
  tensors.set("layers.0.feed_forward.w1.scales_and_zeros", at::empty({32, 256, 2}, meta));
  // separate projections
  tensors.take("layers.1.attention.wqkv.weight");
  tensors.set("layers.1.attention.wq.weight", at::empty({32, 32}, meta));
  tensors.set("layers.1.attention.wk.weight", at::empty({16, 32}, meta));
  tensors.set("layers.1.attention.wv.weight", at::empty({16, 32}, meta));
  EXPECT_EQ(error_of([&] { check_config(kTiny, tensors); }), "");
  tensors.set("layers.1.attention.wk.weight", at::empty({32, 32}, meta));
  EXPECT_TRUE(
      contains(error_of([&] { check_config(kTiny, tensors); }), "layers.1.attention.wk.weight"));
}

}  // namespace
}  // namespace gptfast
