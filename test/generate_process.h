// build/bin/generate on several ranks of this host, as a user runs it.
#pragma once

#include <fcntl.h>
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

namespace gptfast {

using Environment = std::map<std::string, std::string>;

/// `generate` as a child process. Its output goes to files, which never block it.
class Generate {
 public:
  explicit Generate(std::vector<std::string> flags, const Environment& environment = {},
                    const std::string& input = "/dev/null") {
    flags.insert(flags.begin(), std::string(GPTFAST_BIN) + "/generate");
    std::vector<char*> argv;
    argv.reserve(flags.size() + 1);
    for (auto& flag : flags) argv.push_back(flag.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    const auto redirect = [](const std::string& path, int fd) {
      dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), fd);
    };
    dup2(open(input.c_str(), O_RDONLY), STDIN_FILENO);
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
    const auto deadline = std::chrono::steady_clock::now() + limit;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
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

inline std::vector<std::string> flags_for(const std::string& checkpoint,
                                          const std::vector<std::string>& more) {
  std::vector<std::string> flags = {"--checkpoint_path", checkpoint, "--num_samples", "1",
                                    "--precision",       "float32",  "--device",      "cpu",
                                    "--num_threads",     "1",        "--json"};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

inline std::string tiny_mha() {
  return golden("tiny-mha/model.fp32.pth");
}

/// The new tokens of every row, from a run that must succeed silently.
inline nlohmann::json tokens_of(const std::string& checkpoint,
                                const std::vector<std::string>& more) {
  Generate run(flags_for(checkpoint, more));
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.err(), "");
  nlohmann::json rows;
  std::istringstream lines(run.out());
  for (std::string line; std::getline(lines, line);)
    rows.push_back(nlohmann::json::parse(line)["token_ids"]);
  return rows;
}

}  // namespace gptfast
