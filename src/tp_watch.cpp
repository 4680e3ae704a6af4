#include "tp_watch.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace gptfast {
namespace {

using std::chrono::milliseconds;

constexpr char kAlive = '.', kGoodbye = 'b';
constexpr auto kBeat = milliseconds(1000);
constexpr auto kTick = milliseconds(50);
/// An own error of this process should show before the loss that it may have caused elsewhere.
constexpr auto kGrace = milliseconds(300);
/// A thread that slept longer was stopped with its whole host, peers perhaps with it.
constexpr auto kSuspended = milliseconds(3000);
constexpr const char* kStarKey = "watch";

/// What a rank sends first: a number that only the store knows, and its rank.
struct Hello {
  uint64_t star = 0;
  int32_t rank = 0;
};

/// Reads exactly sizeof(Hello) within a second.
bool read_hello(const Fd& socket, Hello& hello) {
  auto* bytes = reinterpret_cast<char*>(&hello);
  for (size_t done = 0; done < sizeof(hello);) {
    pollfd ready{.fd = socket.get(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, /*timeout=*/1000) != 1) return false;
    const ssize_t n = recv(socket.get(), bytes + done, sizeof(hello) - done, 0);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

std::string to_string(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

PeerWatch::PeerWatch(c10d::Store& store, int rank, int world_size, const std::string& local_address,
                     Clock::time_point deadline, Handler on_loss)
    : on_loss_(std::move(on_loss)) {
  if (rank == 0) {
    accept_peers(store, world_size, local_address, deadline);
  } else {
    join_star(store, rank, deadline);
  }
  for (Peer& peer : peers_) {
    fcntl(peer.socket.get(), F_SETFL, O_NONBLOCK);
    peer.heard = Clock::now();
  }
  thread_ = std::thread([this] { run(); });
}

PeerWatch::~PeerWatch() {
  stop_ = true;
  thread_.join();
}

void PeerWatch::accept_peers(c10d::Store& store, int world_size, const std::string& local_address,
                             Clock::time_point deadline) {
  const Fd server = listen_on(/*port=*/0);
  const uint64_t star = std::random_device()() | uint64_t{std::random_device()()} << 32;
  const std::string where =
      std::to_string(star) + ' ' + std::to_string(port_of(server)) + ' ' + local_address;
  store.set(kStarKey, std::vector<uint8_t>(where.begin(), where.end()));
  std::vector<bool> here(static_cast<size_t>(world_size));
  here[0] = true;
  while (true) {
    const auto missing = std::find(here.begin(), here.end(), false) - here.begin();
    if (missing == world_size) return;
    TORCH_CHECK(Clock::now() < deadline, "rank ", missing, " of ", world_size,
                " did not come; are all ranks started with the same WORLD_SIZE?");
    pollfd ready{.fd = server.get(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, static_cast<int>(kTick.count())) < 1) continue;
    Fd socket(accept4(server.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello;
    if (socket.get() < 0 || !read_hello(socket, hello) || hello.star != star) continue;
    if (hello.rank < 1 || hello.rank >= world_size) continue;
    here[static_cast<size_t>(hello.rank)] = true;
    peers_.push_back({hello.rank, std::move(socket), Clock::now()});
  }
}

void PeerWatch::join_star(c10d::Store& store, int rank, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  store.wait({kStarKey}, std::max(left, milliseconds(1)));
  const std::string where = to_string(store.get(kStarKey));
  const size_t first = where.find(' '), second = where.find(' ', first + 1);
  const Hello hello{.star = std::stoull(where), .rank = rank};
  Fd socket = connect_to(where.substr(second + 1), std::stoi(where.substr(first + 1)), deadline);
  send(socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL);
  peers_.push_back({0, std::move(socket), Clock::now()});
}

void PeerWatch::run() {
  auto beat = Clock::now(), last = beat;
  bool said_goodbye = false;
  std::vector<pollfd> ready(peers_.size());
  while (!stop_) {
    for (size_t i = 0; i < peers_.size(); ++i) {
      const int fd = peers_[i].done ? -1 : peers_[i].socket.get();  // poll passes over -1
      ready[i] = {.fd = fd, .events = POLLIN, .revents = 0};
    }
    poll(ready.data(), ready.size(), static_cast<int>(kTick.count()));
    const auto now = Clock::now();
    if (now - last > kSuspended) {
      for (Peer& peer : peers_) peer.heard = now;
    }
    last = now;
    if (leaving_ && !std::exchange(said_goodbye, true)) send_to_all(kGoodbye);
    if (now >= beat && !said_goodbye) {
      send_to_all(kAlive);
      beat = now + kBeat;
    }
    for (size_t i = 0; i < peers_.size(); ++i) {
      const std::string loss = check(peers_[i], ready[i].revents != 0, now);
      if (loss.empty()) continue;
      if (leaving_) {  // nothing more is expected of it
        peers_[i].done = true;
        continue;
      }
      std::this_thread::sleep_for(kGrace);
      if (stop_) return;
      on_loss_(loss);
      const std::lock_guard lock(mutex_);
      lost_ = true;
      changed_.notify_all();
      return;
    }
    if (said_goodbye && all_done()) break;
  }
  const std::lock_guard lock(mutex_);
  gone_ = true;
  changed_.notify_all();
}

std::string PeerWatch::check(Peer& peer, bool readable, Clock::time_point now) {
  if (peer.done) return "";
  const std::string name = "rank " + std::to_string(peer.rank);
  if (readable) {
    std::array<char, 64> bytes{};
    const ssize_t n = recv(peer.socket.get(), bytes.data(), bytes.size(), 0);
    if (n > 0) {
      peer.heard = now;
      peer.done = std::memchr(bytes.data(), kGoodbye, static_cast<size_t>(n)) != nullptr;
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      return name + " ended before its work was done";
    }
  }
  if (now - peer.heard < kSilence) return "";
  return name + " has not been heard of for " + std::to_string(kSilence.count()) +
         " s: its host, its process or the network between has stopped";
}

void PeerWatch::send_to_all(char byte) {
  for (const Peer& peer : peers_) send(peer.socket.get(), &byte, 1, MSG_NOSIGNAL);
}

bool PeerWatch::all_done() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.done; });
}

void PeerWatch::finish() {
  leaving_ = true;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kSilence, [this] { return gone_ || lost_; });
}

void PeerWatch::wait_for_loss() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kSilence + 2 * kBeat, [this] { return lost_; });
}

}  // namespace gptfast
