// Ranks of build/bin/generate on this host: how they end and what they refuse. tp_result_test.cpp
// is about what they compute.
#include <map>
#include <thread>

#include "generate_process.h"
#include "tp_socket.h"

namespace gptfast {
namespace {

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
  EXPECT_EQ(run.wait(std::chrono::seconds(60)), 75) << run.err();
  EXPECT_NE(run.err().find("rank 1 has not been heard of for 6 s"), std::string::npos) << run.err();
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

TEST(Refusal, OneShotSumsOnTheCpu) {
  Generate run(flags_for(tiny_mha(), {"--tensor_parallel", "2"}),
               {{"ENABLE_INTRA_NODE_COMM", "1"}});
  EXPECT_EQ(run.wait(), 1);
  EXPECT_NE(run.err().find(
                "ENABLE_INTRA_NODE_COMM=1 asks for the one-shot all-reduce, which is not "
                "possible here: it runs between GPUs only; unset it for Gloo"),
            std::string::npos)
      << run.err();
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

/// Two ranks, each with flags of its own, refuse to start with one another.
void expect_disagreement(const std::vector<std::string>& flags,
                         const std::vector<std::string>& others, const std::string& message) {
  const int port = port_of(listen_on(0));
  Generate first(flags, rank_environment(0, 2, port));
  Generate second(others, rank_environment(1, 2, port));
  for (Generate* run : {&first, &second}) {
    EXPECT_EQ(run->wait(), 1);
    EXPECT_NE(run->err().find("the ranks disagree on " + message), std::string::npos) << run->err();
  }
}

TEST(Refusal, RanksThatDisagreeOnFlags) {
  expect_disagreement(flags_for(tiny_mha(), {"--top_k", "5"}),
                      flags_for(tiny_mha(), {"--top_k", "6"}),
                      "--top_k: rank 0 has '5', rank 1 has '6' (hashes of all settings ");
}

TEST(Refusal, RanksThatDisagreeOnTheCheckpoint) {
  expect_disagreement(flags_for(tiny_mha(), {}), flags_for(golden("tiny-draft/model.fp32.pth"), {}),
                      "the file of --checkpoint_path: rank 0 has '685301 bytes, ");
}

TEST(Refusal, RanksThatDisagreeOnThePrompt) {
  const TempDir dir;
  std::ofstream(dir / "a") << "one";
  std::ofstream(dir / "b") << "another";
  expect_disagreement(flags_for(tiny_mha(), {"--prompt_file", dir / "a"}),
                      flags_for(tiny_mha(), {"--prompt_file", dir / "b"}),
                      "the file of --prompt_file: rank 0 has '3 bytes, ");
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
