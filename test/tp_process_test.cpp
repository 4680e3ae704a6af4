// build/bin/generate on several ranks of this host, as a user runs it.
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "test_util.h"
#include "tp_socket.h"

namespace gptfast {
namespace {

using Clock = std::chrono::steady_clock;
using Environment = std::map<std::string, std::string>;

/// `generate` as a child process. Its output goes to files, which never block it.
class Generate {
 public:
  explicit Generate(std::vector<std::string> flags, const Environment& environment = {}) {
    flags.insert(flags.begin(), std::string(GPTFAST_BIN) + "/generate");
    std::vector<char*> argv;
    for (auto& flag : flags) argv.push_back(flag.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    const auto redirect = [](const std::string& path, int fd) {
      dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), fd);
    };
    redirect(dir_ / "out", STDOUT_FILENO);
    redirect(dir_ / "err", STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  ~Generate() {
    if (!ended_) {
      kill(pid_, SIGKILL);
      wait();
    }
  }
  Generate(const Generate&) = delete;
  Generate& operator=(const Generate&) = delete;

  pid_t pid() const { return pid_; }
  /// Exit status, 128 + signal; 124 and a killed process after `limit`.
  int wait(std::chrono::seconds limit = std::chrono::seconds(120)) {
    const auto deadline = Clock::now() + limit;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (Clock::now() > deadline) {
        kill(pid_, SIGKILL);
        waitpid(pid_, &status, 0);
        status = 124 << 8;
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ended_ = true;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  std::string out() const { return read("out"); }
  std::string err() const { return read("err"); }
  /// The children of the launcher, rank 0 first, once there are `count`.
  std::vector<pid_t> ranks(size_t count) const {
    const auto path = c10::str("/proc/", pid_, "/task/", pid_, "/children");
    for (int i = 0; i < 1000; ++i) {
      std::ifstream file(path);
      std::vector<pid_t> found{std::istream_iterator<pid_t>(file), {}};
      if (found.size() == count) return found;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ADD_FAILURE() << "the ranks were not started: " << err();
    return {};
  }
  void wait_for_output() const {
    for (int i = 0; i < 3000 && out().empty(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_NE(out(), "") << err();
  }

 private:
  std::string read(const std::string& name) const {
    std::ifstream file(dir_ / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  TempDir dir_;
  pid_t pid_ = -1;
  bool ended_ = false;
};

std::string join(const Tensor& ids) {
  std::string text;
  for (int64_t i = 0; i < ids.numel(); ++i)
    text += (i == 0 ? "" : ",") + std::to_string(ids[i].item<int64_t>());
  return text;
}

std::vector<std::string> flags_for(const std::string& checkpoint,
                                   const std::vector<std::string>& more) {
  std::vector<std::string> flags = {"--checkpoint_path", checkpoint, "--num_samples", "1",
                                    "--precision",       "float32",  "--device",      "cpu",
                                    "--num_threads",     "1",        "--json"};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

std::string tiny_mha() {
  return golden("tiny-mha/model.fp32.pth");
}

/// The new tokens of every row, from a run that must succeed silently.
nlohmann::json tokens_of(const std::string& checkpoint, const std::vector<std::string>& more) {
  Generate run(flags_for(checkpoint, more));
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.err(), "");
  nlohmann::json rows;
  std::istringstream lines(run.out());
  for (std::string line; std::getline(lines, line);)
    rows.push_back(nlohmann::json::parse(line)["token_ids"]);
  return rows;
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
  const auto [model, ranks] = GetParam();
  const StateDict expected = load_checkpoint(golden(c10::str("tp/", model, ".tp", ranks, ".pth")));
  TempDir dir;
  // The original read the bfloat16 file into float32.
  StateDict rounded;
  for (const auto& [name, tensor] : load_checkpoint(golden(model) / "model.fp32.pth"))
    rounded.set(name, tensor.to(at::kBFloat16));
  save_checkpoint(dir / "model.pth", rounded);
  const std::vector<std::string> more = {"--prompt_ids",     join(expected.at("prompt_ids")),
                                         "--config",         golden(model) / "config.json",
                                         "--max_new_tokens", "3",
                                         "--temperature",    "0"};
  const auto logits = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), more.begin(), more.end());
    const std::string file = dir / "logits.pth";
    flags.insert(flags.end(), {"--logits_out", file});
    tokens_of(dir / "model.pth", flags);
    return load_checkpoint(file).at("logits").clone();
  };
  const Tensor one = logits({}), several = logits({"--tensor_parallel", std::to_string(ranks)});
  const Tensor prompt = several.narrow(0, 0, expected.at("prompt_ids").numel());
  EXPECT_LT(relative_difference(prompt, expected.at("logits_tp")), 1e-5);
  EXPECT_EQ(several.size(0), prompt.size(0) + 2);
  EXPECT_LT(relative_difference(several, one), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Golden, Logits,
                         testing::Values(Case{"tiny-mha", 2}, Case{"tiny-mha", 4},
                                         Case{"tiny-gqa", 2}));

TEST(Text, IsThatOfOneRank) {
  const std::string mha = tiny_mha(), gqa = golden("tiny-gqa/model.fp32.pth");
  const std::string int8 = golden("quantize/tiny-mha.int8.pth"),
                    int4 = golden("quantize/tiny-gqa.int4.g32.pth");
  const std::string mha_config = golden("tiny-mha/config.json"),
                    gqa_config = golden("tiny-gqa/config.json");
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

/// The figure that rank 0 prints at its end, in MB.
double memory_used(const std::string& checkpoint, const std::string& config,
                   const std::string& ranks) {
  Generate run({"--checkpoint_path", checkpoint, "--config", config, "--device", "cpu",
                "--num_threads", "1", "--prompt_ids", "1,2", "--max_new_tokens", "2",
                "--num_samples", "1", "--quiet", "--tensor_parallel", ranks});
  EXPECT_EQ(run.wait(), 0) << run.err();
  const std::string out = run.out(), label = "Memory used: ";
  const size_t at = out.find(label);
  EXPECT_NE(at, std::string::npos) << out;
  return at == std::string::npos ? 0 : std::stod(out.substr(at + label.size())) * 1000;
}

TEST(Memory, ARankHoldsItsShareOnly) {
  constexpr int64_t kDim = 1024, kHidden = 8192, kLayers = 2, kVocab = 64, kRanks = 4;
  TempDir dir;
  std::ofstream(dir / "config.json")
      << R"({"dim": 1024, "n_head": 8, "n_layer": 2, "intermediate_size": 8192, "vocab_size": 64,)"
      << R"( "block_size": 64})";
  double megabytes = 0;
  {
    CheckpointWriter writer(dir / "model.pth");
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      const Tensor tensor = at::randn(shape).div_(32).to(at::kBFloat16);
      writer.add(name + ".weight", tensor);
      megabytes += static_cast<double>(tensor.nbytes()) / 1e6;
    };
    add("tok_embeddings", {kVocab, kDim});
    for (int64_t i = 0; i < kLayers; ++i) {
      const std::string layer = "layers." + std::to_string(i) + '.';
      add(layer + "attention.wqkv", {3 * kDim, kDim});
      add(layer + "attention.wo", {kDim, kDim});
      add(layer + "feed_forward.w1", {kHidden, kDim});
      add(layer + "feed_forward.w3", {kHidden, kDim});
      add(layer + "feed_forward.w2", {kDim, kHidden});  // each page holds columns of every rank
      add(layer + "ffn_norm", {kDim});
      add(layer + "attention_norm", {kDim});
    }
    add("norm", {kDim});
    add("output", {kVocab, kDim});
    writer.finish();
  }
  const double one = memory_used(dir / "model.pth", dir / "config.json", "1"),
               share = memory_used(dir / "model.pth", dir / "config.json", "4");
  // What a rank does not hold, less 20 MB: Gloo, its threads, and that the figure has two decimals.
  EXPECT_GT(one - share, megabytes * (kRanks - 1) / kRanks - 20) << one << " MB and " << share;
}

// ---- Ends

const std::vector<std::string> kEndless = {"--prompt_ids",
                                           "1,2,3",
                                           "--ignore_eos",
                                           "--max_new_tokens",
                                           "300",
                                           "--num_samples",
                                           "100000",
                                           "--tensor_parallel",
                                           "2"};

std::vector<std::string> endless() {
  return flags_for(tiny_mha(), kEndless);
}

bool is_running(pid_t pid) {
  return kill(pid, 0) == 0;
}

TEST(Launch, IsQuietAndSucceedsEveryTime) {
  for (int i = 0; i < 5; ++i)
    tokens_of(tiny_mha(), {"--prompt_ids", "1", "--max_new_tokens", "1", "--tensor_parallel", "2"});
}

TEST(Launch, AKilledRankEndsAll) {
  for (const size_t victim : {0, 1}) {
    Generate run(endless());
    const auto ranks = run.ranks(2);
    run.wait_for_output();
    kill(ranks.at(victim), SIGKILL);
    EXPECT_EQ(run.wait(std::chrono::seconds(10)), 128 + SIGKILL) << run.err();
    EXPECT_NE(run.err().find(c10::str("rank ", victim, " was ended by signal 9 (Killed)")),
              std::string::npos)
        << run.err();
    for (const pid_t rank : ranks) EXPECT_FALSE(is_running(rank));
  }
}

TEST(Launch, AStoppedRankEndsAll) {
  Generate run(endless());
  const auto ranks = run.ranks(2);
  run.wait_for_output();
  kill(ranks.at(1), SIGSTOP);
  EXPECT_EQ(run.wait(std::chrono::seconds(25)), 75) << run.err();
  EXPECT_NE(run.err().find("rank 1 has not been heard of for 8 s"), std::string::npos) << run.err();
  EXPECT_FALSE(is_running(ranks.at(1)));
}

TEST(Launch, SignalsArePassedOn) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Generate run(endless());
    const auto ranks = run.ranks(2);
    for (const pid_t rank : ranks) EXPECT_EQ(getpgid(rank), getpgid(run.pid()));
    run.wait_for_output();
    kill(run.pid(), signal);
    EXPECT_EQ(run.wait(std::chrono::seconds(10)), 128 + signal);
    EXPECT_EQ(run.err(), "");
    for (const pid_t rank : ranks) EXPECT_FALSE(is_running(rank));
  }
}

TEST(Launch, RanksDieWithTheLauncher) {
  Generate run(endless());
  const auto ranks = run.ranks(2);
  run.wait_for_output();
  kill(run.pid(), SIGKILL);
  run.wait();
  for (const pid_t rank : ranks) {
    for (int i = 0; i < 250 && is_running(rank); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(is_running(rank));
  }
}

// ---- Refusals: one line, status 1, nothing on stdout.

void expect_refusal(const std::vector<std::string>& more, const std::string& message) {
  Generate run(flags_for(tiny_mha(), more));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_EQ(run.out(), "");
  const std::string err = run.err();
  EXPECT_NE(err.find(message), std::string::npos) << err;
  EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
}

TEST(Refusal, RanksThatDoNotDivideTheModel) {
  expect_refusal({"--tensor_parallel", "3"},
                 "4 attention heads (n_head) cannot be divided among 3");
}

TEST(Refusal, NoCheckpoint) {
  expect_refusal({"--tensor_parallel", "2", "--checkpoint_path", "/nonexistent/model.pth"},
                 "/nonexistent/model.pth");
}

Environment rank_environment(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"MASTER_PORT", std::to_string(port)}};
}

TEST(Refusal, RanksThatDisagreeOnFlags) {
  const int port = port_of(listen_on(0));
  Generate first(flags_for(tiny_mha(), {"--top_k", "5"}), rank_environment(0, 2, port));
  Generate second(flags_for(tiny_mha(), {"--top_k", "6"}), rank_environment(1, 2, port));
  for (Generate* run : {&first, &second}) {
    EXPECT_EQ(run->wait(), 1);
    EXPECT_NE(run->err().find("the ranks disagree on --top_k: rank 0 has '5', rank 1 has '6'"),
              std::string::npos)
        << run->err();
  }
}

TEST(Refusal, RanksThatDisagreeOnTheCheckpoint) {
  const int port = port_of(listen_on(0));
  Generate first(flags_for(tiny_mha(), {}), rank_environment(0, 2, port));
  Generate second(flags_for(golden("tiny-draft/model.fp32.pth"), {}), rank_environment(1, 2, port));
  for (Generate* run : {&first, &second}) {
    EXPECT_EQ(run->wait(), 1);
    EXPECT_NE(run->err().find("the ranks disagree on the checkpoint: rank 0 has '685301 bytes, "),
              std::string::npos)
        << run->err();
  }
}

TEST(Refusal, PortInUse) {
  const Fd taken = listen_on(0);
  Generate run(flags_for(tiny_mha(), {}), rank_environment(0, 2, port_of(taken)));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_NE(run.err().find("Address already in use; set MASTER_PORT to a free port"),
            std::string::npos)
      << run.err();
}

TEST(Refusal, TwoNumbersOfRanks) {
  Generate run(flags_for(tiny_mha(), {"--tensor_parallel", "4"}), rank_environment(0, 2, 1));
  EXPECT_EQ(run.wait(), 2);
  EXPECT_NE(run.err().find("--tensor_parallel 4 but the launcher started 2 ranks"),
            std::string::npos)
      << run.err();
}

}  // namespace
}  // namespace gptfast
