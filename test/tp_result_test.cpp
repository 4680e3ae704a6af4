// Ranks of build/bin/generate on this host compute what one rank computes, and hold their share
// alone.
#include <fstream>
#include <map>

#include "generate_process.h"
#include "gptfast/quantize.h"

namespace gptfast {
namespace {

std::string join(const Tensor& ids) {
  std::string text;
  for (int64_t i = 0; i < ids.numel(); ++i)
    text += (i == 0 ? "" : ",") + std::to_string(ids[i].item<int64_t>());
  return text;
}

// ---- Right results

struct Case {
  const char* model;
  int ranks;
};

class Logits : public testing::TestWithParam<Case> {};

// Prompt logits of the original on as many ranks (through forward()), then a decoded token
// (through step()).
TEST_P(Logits, EqualTheOriginals) {
  const char* const model = GetParam().model;
  const int ranks = GetParam().ranks;
  const StateDict expected = load_checkpoint(golden(c10::str("tp/", model, ".tp", ranks, ".pth")));
  TempDir dir;
  std::string file = golden(model) / "model.bf16.pth";
  if (!std::filesystem::exists(file)) {  // the original read the bfloat16 file into float32
    StateDict rounded;
    for (const auto& [name, tensor] : load_checkpoint(golden(model) / "model.fp32.pth"))
      rounded.set(name, tensor.to(at::kBFloat16));
    file = dir / "model.pth";
    save_checkpoint(file, rounded);
  }
  const std::string prompt_ids = join(expected.at("prompt_ids")), several = std::to_string(ranks);
  const auto logits = [&](const std::string& precision, const std::string& count) {
    const std::string out = dir / "logits.pth";
    tokens_of(file, {"--prompt_ids", prompt_ids, "--config", golden(model) / "config.json",
                     "--max_new_tokens", "3", "--temperature", "0", "--logits_out", out,
                     "--precision", precision, "--tensor_parallel", count});
    return load_checkpoint(out).at("logits").clone();
  };
  const Tensor one = logits("float32", "1"), all = logits("float32", several);
  const Tensor prompt = all.narrow(0, 0, expected.at("prompt_ids").numel());
  EXPECT_LT(relative_difference(prompt, expected.at("logits_tp")), 1e-5);
  EXPECT_EQ(all.size(0), prompt.size(0) + 2);
  EXPECT_LT(relative_difference(all, one), 1e-5);
  // In bfloat16 both are off, and tokens may part; the logits of the prompt stay comparable.
  const auto error = [&](const std::string& count) {
    return relative_difference(logits("bfloat16", count).narrow(0, 0, prompt.size(0)), prompt);
  };
  EXPECT_LT(error(several), 2 * error("1") + 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Golden, Logits,
                         testing::Values(Case{"tiny-mha", 2}, Case{"tiny-mha", 4},
                                         Case{"tiny-gqa", 2}, Case{"tiny-tp4", 4}));

TEST(Text, IsThatOfOneRank) {
  const std::string mha = tiny_mha(), gqa = golden("tiny-gqa/model.fp32.pth");
  const std::string int8 = golden("quantize/tiny-mha.int8.pth"),
                    int4 = golden("quantize/tiny-gqa.int4.g32.pth");
  const std::string mha_config = golden("tiny-mha/config.json"),
                    gqa_config = golden("tiny-gqa/config.json");
  const std::string moe = golden("tiny-moe/model.fp32.pth"),
                    moe_config = golden("tiny-moe/config.json");
  TempDir dir;
  const std::string moe_int8 = dir / "moe_int8.pth", moe_int4 = dir / "moe_int4.g32.pth";
  quantize(moe, moe_int8, {.config = moe_config});
  quantize(moe, moe_int4, {.format = WeightFormat::kInt4, .config = moe_config});
  struct Run {
    std::string checkpoint, config, ranks;
    std::vector<std::string> more;
  };
  const std::vector<std::string> greedy = {"--temperature", "0"};
  const std::vector<std::string> batch = {"--temperature", "1.2", "--top_k", "9",
                                          "--batch_size",  "4"};
  const std::vector<std::string> all = {"--temperature", "1", "--top_k", "0"};
  const std::vector<Run> runs = {
      {mha, mha_config, "4", greedy},
      {mha, mha_config, "2", batch},
      {mha, mha_config, "4", all},
      {gqa, gqa_config, "4", greedy},  // two key/value heads, each on two ranks
      {int8, mha_config, "4", greedy},
      {int8, mha_config, "2", batch},
      {int4, gqa_config, "2", greedy},
      {int4, gqa_config, "4", batch},
      {mha, mha_config, "2", {"--temperature", "0", "--reference"}},
      {moe, moe_config, "2", greedy},
      {moe, moe_config, "4", batch},  // two key/value heads, each on two ranks
      {moe_int8, moe_config, "2", greedy},
      {moe_int4, moe_config, "2", greedy},
  };
  for (const Run& run : runs) {
    std::vector<std::string> flags = run.more;
    flags.insert(flags.end(), {"--config", run.config, "--prompt_ids", "7,50,31,2,99",
                               "--max_new_tokens", "16"});
    const auto expected = tokens_of(run.checkpoint, flags);
    flags.insert(flags.end(), {"--tensor_parallel", run.ranks});
    EXPECT_EQ(tokens_of(run.checkpoint, flags), expected)
        << run.checkpoint << " on " << run.ranks << " ranks, " << run.more.back();
  }
}

// With ranks, drafting and accepting are decided by rank 0 for all.
TEST(Text, OfSpeculationIsThatOfOneRank) {
  const std::string model = golden("tiny-spec/model.fp32.pth"),
                    draft = golden("tiny-draft/model.fp32.pth");
  const std::vector<std::string> common = {"--config",         golden("tiny-spec/config.json"),
                                           "--prompt_ids",     "7,50,31,2,99,7,50,31,2",
                                           "--max_new_tokens", "40",
                                           "--temperature",    "0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    return tokens_of(model, more);
  };
  const auto plain = with({});
  for (const char* ranks : {"2", "4"}) {
    EXPECT_EQ(with({"--tensor_parallel", ranks, "--draft_checkpoint_path", draft}), plain);
    EXPECT_EQ(with({"--tensor_parallel", ranks, "--draft", "lookup"}), plain);
  }
  const std::vector<std::string> sampled = {"--temperature", "0.9", "--draft_checkpoint_path",
                                            draft};
  auto one = sampled, two = sampled;
  for (auto* flags : {&one, &two}) flags->insert(flags->end(), common.begin(), common.end() - 2);
  two.insert(two.end(), {"--tensor_parallel", "2"});
  EXPECT_EQ(tokens_of(model, two), tokens_of(model, one));
}

TEST(Text, OfAConversationIsThatOfOneRank) {
  TempDir dir;
  std::filesystem::copy(golden("tiny-gqa/model.fp32.pth"), dir / "model.pth");
  std::filesystem::copy(golden("tiny-gqa/config.json"), dir / "config.json");
  std::filesystem::copy(golden("eval/tokenizer.model"), dir / "tokenizer.model");
  std::ofstream(dir / "said") << "Who are you?\n\nAnd what do you do?\n";
  const auto answers = [&](const std::string& ranks) {
    Generate run({"--checkpoint_path", dir / "model.pth", "--precision", "float32", "--device",
                  "cpu", "--num_threads", "1", "--interactive", "--chat_template", "llama2",
                  "--temperature", "0", "--max_new_tokens", "12", "--quiet", "--tensor_parallel",
                  ranks},
                 {}, dir / "said");
    EXPECT_EQ(run.wait(), 0) << run.err();
    EXPECT_EQ(run.err(), "");
    return run.out();
  };
  const std::string one = answers("1");
  EXPECT_GE(std::count(one.begin(), one.end(), '\n'), 2) << one;
  EXPECT_EQ(answers("2"), one);
}

// ---- Memory

/// The figure that rank 0 prints at its end, in MB.
double memory_used(const std::string& checkpoint, const std::string& config,
                   const std::string& precision, int ranks) {
  Generate run({"--checkpoint_path", checkpoint, "--config", config, "--device", "cpu",
                "--num_threads", "1", "--prompt_ids", "1,2", "--max_new_tokens", "2",
                "--num_samples", "1", "--quiet", "--precision", precision, "--tensor_parallel",
                std::to_string(ranks)});
  EXPECT_EQ(run.wait(), 0) << run.err();
  const std::string out = run.out(), label = "Memory used: ";
  const size_t at = out.find(label);
  EXPECT_NE(at, std::string::npos) << out;
  return at == std::string::npos ? 0 : std::stod(out.substr(at + label.size())) * 1000;
}

/// A checkpoint with layers large enough to show in a process' memory.
void write_large(const std::filesystem::path& file, at::ScalarType dtype, bool fused) {
  constexpr int64_t kDim = 1024, kHidden = 8192, kVocab = 64, kLayers = 4;
  CheckpointWriter writer(file);
  const Tensor values = at::randn({kHidden, kDim}).div_(32).to(dtype);
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
    writer.add(name + ".weight",
               values.view(-1).narrow(0, 0, rows * columns).view({rows, columns}));
  };
  const auto add_norm = [&](const std::string& name) {
    writer.add(name + ".weight", at::ones({kDim}, dtype));
  };
  add("tok_embeddings", kVocab, kDim);
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string layer = "layers." + std::to_string(i) + '.', attention = layer + "attention.";
    if (fused) {
      add(attention + "wqkv", 3 * kDim, kDim);
    } else {
      for (const char* name : {"wq", "wk", "wv"}) add(attention + name, kDim, kDim);
    }
    add(attention + "wo", kDim, kDim);
    add(layer + "feed_forward.w1", kHidden, kDim);
    add(layer + "feed_forward.w3", kHidden, kDim);
    add(layer + "feed_forward.w2", kDim, kHidden);  // each page holds columns of every rank
    add_norm(layer + "ffn_norm");
    add_norm(layer + "attention_norm");
  }
  add_norm("norm");
  add("output", kVocab, kDim);
  writer.finish();
}

TEST(Memory, ARankHoldsItsShareOnly) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory";
#endif
  constexpr int kRanks = 4;
  constexpr double kParams = 4 * (4 * 1024 * 1024 + 3 * 8192 * 1024) / 1e6;  // millions, in layers
  TempDir dir;
  const std::string config = dir / "config.json", bf16 = dir / "model.pth", fp32 = dir / "fp32.pth",
                    int8 = dir / "model_int8.pth", int4 = dir / "model_int4.g32.pth";
  std::ofstream(config) << R"({"dim": 1024, "n_head": 8, "n_layer": 4, "intermediate_size": 8192,)"
                        << R"( "vocab_size": 64, "block_size": 64})";
  write_large(bf16, at::kBFloat16, /*fused=*/true);
  write_large(fp32, at::kFloat, /*fused=*/false);
  quantize(bf16, int8, {.config = config});
  quantize(bf16, int4, {.format = WeightFormat::kInt4, .config = config});
  const double nothing =
      memory_used(tiny_mha(), golden("tiny-mha/config.json"), "bfloat16", kRanks);
  // Beside the share a rank may hold the layer it is at, and the figure has two decimals.
  constexpr double kMargin = 30;
  const auto expect_share = [&](const std::string& file, const std::string& precision,
                                double bytes_per_weight) {
    const double used = memory_used(file, config, precision, kRanks) - nothing;
    EXPECT_LT(used, kParams * bytes_per_weight / kRanks + kMargin) << file << " as " << precision;
  };
  expect_share(bf16, "bfloat16", 2);
  expect_share(bf16, "float32", 4);
  expect_share(fp32, "bfloat16", 2);
  expect_share(int8, "bfloat16", 1);
  expect_share(int4, "bfloat16", 0.625);  // with 4 bytes of scale and zero for 32 weights
}

}  // namespace
}  // namespace gptfast
