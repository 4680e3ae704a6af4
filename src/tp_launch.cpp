// generate --tensor_parallel N: the ranks of one host as child processes.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "gptfast/tp.h"
#include "tp_socket.h"

namespace gptfast {
namespace {

using Clock = std::chrono::steady_clock;

/// Time for other ranks to fail by themselves: rank 0 then prints what all of them would say, and a
/// rank that ended because of another gets the other's reason beside it.
constexpr auto kSameReasonTime = std::chrono::milliseconds(300);
constexpr auto kReasonTime = std::chrono::seconds(1);
/// Time for ranks that were asked to end; then they are killed. No rank has much to do at its end,
/// but one that is stopped does not even hear of it.
constexpr auto kEndTime = std::chrono::seconds(1);
constexpr size_t kKeptOutput = 8192;  // last bytes of what a silent rank prints

struct Rank {
  pid_t pid = -1;  ///< -1 once it has ended
  Fd output;       ///< its stderr; rank 0 has ours
  std::string text;
};

/// In the child: the environment of a torchrun rank, then the program from its start.
[[noreturn]] void become_rank(int rank, int world_size, const Fd& server, int output, pid_t parent,
                              const sigset_t& mask, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives us
  if (getppid() != parent) _exit(1);
  const auto set = [](const char* name, const std::string& value) {
    setenv(name, value.c_str(), /*overwrite=*/1);
  };
  set("RANK", std::to_string(rank));
  set("LOCAL_RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(world_size));
  set("LOCAL_WORLD_SIZE", std::to_string(world_size));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port_of(server)));
  if (rank == 0) {
    set("GPTFAST_LISTEN_FD", std::to_string(server.get()));
    fcntl(server.get(), F_SETFD, 0);  // survives exec
  } else {
    const int null = open("/dev/null", O_RDWR);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execv("/proc/self/exe", argv);
  std::cerr << "cannot start a rank: " << strerror(errno) << '\n';
  _exit(1);
}

class Launch {
 public:
  Launch(int world_size, char** argv) : ranks_(static_cast<size_t>(world_size)) {
    sigset_t watched;
    sigemptyset(&watched);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&watched, signal);
    sigprocmask(SIG_BLOCK, &watched, &mask_);
    signals_ = Fd(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    TORCH_CHECK(signals_.get() >= 0, "signalfd failed: ", strerror(errno));
    const Fd server = listen_on(/*port=*/0);
    for (size_t r = 0; r < ranks_.size(); ++r) start(r, server, argv);
  }
  ~Launch() {
    signal_all(SIGKILL);
    sigprocmask(SIG_SETMASK, &mask_, nullptr);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  int wait() {
    while (running() > 0) {
      wait_for_event();
      const auto now = Clock::now();
      if (failed() && !ending_ && now - failed_at_ > reason_time()) end(SIGTERM);
      if (ending_ && now - *ending_ > kEndTime) signal_all(SIGKILL);
    }
    return report();
  }

 private:
  void start(size_t r, const Fd& server, char** argv) {
    std::array<int, 2> pipe{-1, -1};
    if (r > 0) TORCH_CHECK(pipe2(pipe.data(), O_CLOEXEC) == 0, "pipe failed: ", strerror(errno));
    ranks_[r].output = Fd(pipe[0]);
    const Fd write_end(pipe[1]);
    const pid_t parent = getpid(), pid = fork();
    TORCH_CHECK(pid >= 0, "cannot start rank ", r, ": ", strerror(errno));
    if (pid == 0) {
      become_rank(static_cast<int>(r), static_cast<int>(ranks_.size()), server, write_end.get(),
                  parent, mask_, argv);
    }
    ranks_[r].pid = pid;
  }

  void wait_for_event() {
    std::vector<pollfd> ready = {{.fd = signals_.get(), .events = POLLIN, .revents = 0}};
    for (const Rank& rank : ranks_) {
      ready.push_back({.fd = rank.output.get(), .events = POLLIN, .revents = 0});
    }
    poll(ready.data(), ready.size(), /*timeout=*/200);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ready[r + 1].revents != 0) read_output(ranks_[r]);
    }
    signalfd_siginfo info{};
    while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo != SIGCHLD) pass_on(static_cast<int>(info.ssi_signo), info.ssi_code);
    }
    int status = 0;
    for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) note_end(pid, status);
  }

  static void read_output(Rank& rank) {
    std::array<char, 4096> bytes{};
    const ssize_t n = read(rank.output.get(), bytes.data(), bytes.size());
    if (n <= 0) {
      rank.output = Fd();
      return;
    }
    rank.text.append(bytes.data(), static_cast<size_t>(n));
    if (rank.text.size() > kKeptOutput) rank.text.erase(0, rank.text.size() - kKeptOutput);
  }

  void note_end(pid_t pid, int status) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].pid != pid) continue;
      ranks_[r].pid = -1;
      const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (code == 0 || ending_) continue;
      if (signal_ != 0 && code == 128 + signal_) {  // as the user wished
        end(SIGTERM);
        continue;
      }
      if (r == 0 && code != kPeerLostStatus && !WIFSIGNALED(status)) rank0_told_ = true;
      // Of failures, the first counts that is not the loss of another rank.
      if (!failed() || (code_ == kPeerLostStatus && code != kPeerLostStatus)) {
        if (!failed()) failed_at_ = Clock::now();
        code_ = code;
        failed_rank_ = r;
      }
    }
  }

  /// Ctrl-C on the terminal reaches the ranks by itself, and a conversation may go on after it; the
  /// other signals end the run.
  void pass_on(int signal, int code) {
    signal_ = signal;
    if (signal != SIGINT) return end(signal);
    if (code != SI_KERNEL) signal_all(signal);
  }

  void end(int signal) {
    if (!ending_) ending_ = Clock::now();
    signal_all(signal);
  }

  void signal_all(int signal) {
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0) kill(rank.pid, signal);
    }
  }

  /// Shows what went wrong, unless the user ended the run or rank 0 has said it already.
  int report() {
    if (!failed()) return signal_ == 0 || !ending_ ? 0 : 128 + signal_;
    Rank& rank = ranks_[failed_rank_];
    while (rank.output.get() >= 0) read_output(rank);
    if (code_ > 128) {
      std::cerr << "rank " << failed_rank_ << " was ended by signal " << code_ - 128 << " ("
                << strsignal(code_ - 128) << ")\n";
    }
    if (failed_rank_ != 0 && !rank0_told_ && !rank.text.empty()) {
      std::cerr << "rank " << failed_rank_ << ": " << rank.text;
    }
    return code_;
  }

  bool failed() const { return code_ != 0; }
  std::chrono::milliseconds reason_time() const {
    return code_ == kPeerLostStatus ? kReasonTime : kSameReasonTime;
  }
  size_t running() const {
    size_t count = 0;
    for (const Rank& rank : ranks_) count += rank.pid > 0 ? 1 : 0;
    return count;
  }

  std::vector<Rank> ranks_;
  sigset_t mask_{};
  Fd signals_;
  int code_ = 0, signal_ = 0;  // exit status of the first failure; the signal that ended the run
  size_t failed_rank_ = 0;
  bool rank0_told_ = false;
  Clock::time_point failed_at_;
  std::optional<Clock::time_point> ending_;
};

}  // namespace

int launch_local_ranks(int world_size, char** argv) {
  std::cout.flush();
  return Launch(world_size, argv).wait();
}

}  // namespace gptfast
