// Ranks of build/bin/generate on two GPUs of this host: what they compute, how they end and what
// they refuse. Skipped where there are fewer.
#include <fstream>

#include "generate_process.h"
#include "gptfast/quantize.h"

namespace gptfast {
namespace {

const Environment kNccl = {{"ENABLE_INTRA_NODE_COMM", "0"}};
const Environment kOneShot = {{"ENABLE_INTRA_NODE_COMM", "1"}};

std::vector<std::string> on_gpus(const std::string& checkpoint,
                                 const std::vector<std::string>& more) {
  std::vector<std::string> flags =
      {"--checkpoint_path", checkpoint, "--num_samples", "1",     "--precision",
       "bfloat16",          "--device", "cuda",          "--json"};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

/// The new tokens of every row, from a run that must succeed silently.
nlohmann::json tokens_on_gpus(const std::string& checkpoint, const std::vector<std::string>& more,
                              const Environment& environment = {}) {
  Generate run(on_gpus(checkpoint, more), environment);
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.err(), "");
  nlohmann::json rows;
  std::istringstream lines(run.out());
  for (std::string line; std::getline(lines, line);)
    rows.push_back(nlohmann::json::parse(line)["token_ids"]);
  return rows;
}

class TwoGpus : public testing::Test {
 protected:
  void SetUp() override {
    // Not asked of CUDA: a process that has used it must not fork.
    if (!std::filesystem::exists("/dev/nvidia0") || !std::filesystem::exists("/dev/nvidia1"))
      GTEST_SKIP() << "fewer than two GPUs";
  }
};

struct TextCase {
  std::string checkpoint, config;
  std::vector<std::string> more;
};

TEST_F(TwoGpus, TextIsThatOfOneGpu) {
  const std::string mha = golden("tiny-mha/config.json"), gqa = golden("tiny-gqa/config.json");
  const std::vector<std::string> greedy = {"--temperature", "0"};
  const std::vector<std::string> batch = {"--temperature", "0", "--batch_size", "4"};
  const std::vector<std::string> drawn = {"--temperature", "0.8", "--top_k", "20"};
  const std::vector<TextCase> runs = {
      {tiny_mha(), mha, greedy},
      {tiny_mha(), mha, batch},
      {tiny_mha(), mha, drawn},
      {golden("tiny-gqa/model.fp32.pth"), gqa, greedy},
      {golden("quantize/tiny-mha.int8.pth"), mha, greedy},
      {golden("quantize/tiny-mha.int8.pth"), mha, batch},
      {golden("quantize/tiny-gqa.int4.g32.pth"), gqa, greedy},
      {golden("quantize/tiny-gqa.int4.g32.pth"), gqa, batch},
  };
  for (const TextCase& run : runs) {
    std::vector<std::string> flags = run.more;
    flags.insert(flags.end(), {"--config", run.config, "--prompt_ids", "7,50,31,2,99",
                               "--max_new_tokens", "16"});
    const auto expected = tokens_on_gpus(run.checkpoint, flags);
    flags.insert(flags.end(), {"--tensor_parallel", "2"});
    for (const Environment& environment : {kNccl, kOneShot}) {
      EXPECT_EQ(tokens_on_gpus(run.checkpoint, flags, environment), expected)
          << run.checkpoint << ", " << run.more.back()
          << ", ENABLE_INTRA_NODE_COMM=" << environment.begin()->second;
    }
  }
}

TEST_F(TwoGpus, LogitsDifferByRoundingOnly) {
  TempDir dir;
  const auto logits = [&](const std::vector<std::string>& more, const Environment& environment) {
    std::vector<std::string> flags = {"--config",         golden("tiny-gqa/config.json"),
                                      "--prompt_ids",     "7,50,31,2,99,3,4,8,9,10,11",
                                      "--max_new_tokens", "4",
                                      "--temperature",    "0",
                                      "--logits_out",     dir / "logits.pth"};
    flags.insert(flags.end(), more.begin(), more.end());
    tokens_on_gpus(golden("tiny-gqa/model.fp32.pth"), flags, environment);
    return load_checkpoint(dir / "logits.pth").at("logits").clone();
  };
  const Tensor one = logits({}, {});
  for (const Environment& environment : {kNccl, kOneShot}) {
    const Tensor two = logits({"--tensor_parallel", "2"}, environment);
    EXPECT_LT(relative_difference(two.narrow(0, 0, 11), one.narrow(0, 0, 11)), 2e-2);
    EXPECT_LT(relative_difference(two, one), 3e-2);
  }
}

TEST_F(TwoGpus, SpeculationGivesTheSameText) {
  const std::string model = golden("tiny-spec/model.fp32.pth"),
                    draft = golden("tiny-draft/model.fp32.pth");
  const auto with = [&](std::vector<std::string> more) {
    const std::vector<std::string> common = {"--config",         golden("tiny-spec/config.json"),
                                             "--prompt_ids",     "7,50,31,2,99,7,50",
                                             "--max_new_tokens", "40",
                                             "--temperature",    "0"};
    more.insert(more.end(), common.begin(), common.end());
    return tokens_on_gpus(model, more);
  };
  const auto plain = with({});
  EXPECT_EQ(with({"--tensor_parallel", "2", "--draft_checkpoint_path", draft}), plain);
  EXPECT_EQ(with({"--tensor_parallel", "2", "--draft", "lookup"}), plain);
}

TEST_F(TwoGpus, AnyOrderOfTheGpusWillDo) {
  const std::vector<std::string> flags = {"--config",         golden("tiny-mha/config.json"),
                                          "--prompt_ids",     "1,2",
                                          "--max_new_tokens", "8",
                                          "--temperature",    "0"};
  auto two = flags;
  two.insert(two.end(), {"--tensor_parallel", "2"});
  const auto expected = tokens_on_gpus(tiny_mha(), flags);
  EXPECT_EQ(tokens_on_gpus(tiny_mha(), two, {{"CUDA_VISIBLE_DEVICES", "1,0"}}), expected);
  Generate run(on_gpus(tiny_mha(), two), {{"CUDA_VISIBLE_DEVICES", "1"}});
  EXPECT_EQ(run.wait(), 1);
  EXPECT_NE(run.err().find("rank 1 is number 2 on its host, which shows 1 GPUs "
                           "(CUDA_VISIBLE_DEVICES=1)"),
            std::string::npos)
      << run.err();
}

TEST_F(TwoGpus, AKilledRankEndsAll) {
  for (const Environment& environment : {kNccl, kOneShot}) {
    Generate run(on_gpus(tiny_mha(), {"--config", golden("tiny-mha/config.json"), "--prompt_ids",
                                      "1,2,3", "--ignore_eos", "--max_new_tokens", "300",
                                      "--num_samples", "100000", "--tensor_parallel", "2"}),
                 environment);
    const auto ranks = run.ranks(2);
    run.wait_for_output();
    kill(ranks.at(1), SIGKILL);
    EXPECT_EQ(run.wait(std::chrono::seconds(30)), 128 + SIGKILL) << run.err();
    EXPECT_NE(run.err().find("rank 1 was ended by signal 9 (Killed)"), std::string::npos)
        << run.err();
  }
}

TEST_F(TwoGpus, EndsAreQuiet) {
  for (int i = 0; i < 3; ++i) {
    tokens_on_gpus(tiny_mha(), {"--config", golden("tiny-mha/config.json"), "--prompt_ids", "1",
                                "--max_new_tokens", "9", "--tensor_parallel", "2"});
  }
}

}  // namespace
}  // namespace gptfast
