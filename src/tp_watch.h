// Notices the loss of a rank, which the collectives alone do not: NCCL waits forever, Gloo too when
// a host or the network falls silent.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tp_socket.h"

namespace c10d {
class Store;
}

namespace gptfast {

/// A star of connections around rank 0 that carry one byte a second each way, served by one thread.
class PeerWatch {
 public:
  using Clock = std::chrono::steady_clock;
  using Handler = std::function<void(const std::string&)>;
  /// Silence that counts as loss.
  static constexpr auto kSilence = std::chrono::seconds(6);

  /// Meets the other ranks through `store`; throws when one does not come before `deadline`.
  PeerWatch(c10d::Store& store, int rank, int world_size, const std::string& local_address,
            Clock::time_point deadline, Handler on_loss);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// Says goodbye and waits for the others' (up to `kSilence`): from here on an end is no loss.
  void finish();
  /// Gives the watch time to call the handler for a loss that shows elsewhere first.
  void wait_for_loss();

 private:
  struct Peer {
    int rank = 0;
    Fd socket;
    Clock::time_point heard;
    bool done = false;
  };

  void accept_peers(c10d::Store& store, int world_size, const std::string& local_address,
                    Clock::time_point deadline);
  void join_star(c10d::Store& store, int rank, Clock::time_point deadline);
  void run();
  void send_to_all(char byte);
  bool all_done() const;
  /// What ended the connection of `peer`, or "" while it is well.
  std::string check(Peer& peer, bool readable, Clock::time_point now);

  Handler on_loss_;
  std::vector<Peer> peers_;  // touched by the thread alone once it runs
  std::mutex mutex_;
  std::condition_variable changed_;
  bool lost_ = false, gone_ = false;  // guarded by mutex_; gone_: all peers said goodbye
  std::atomic<bool> leaving_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace gptfast
