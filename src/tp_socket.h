// The few plain sockets that tensor parallelism needs besides c10d's.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace gptfast {

/// A file descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  ~Fd();
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// A socket that listens on `port` (0: any free one) of all addresses, IPv4 and IPv6. Throws naming
/// the port when it is taken.
Fd listen_on(int port);
/// The port that a socket is bound to.
int port_of(const Fd& socket);
/// Connects to host:port, trying again until `deadline`. Throws naming both when that fails.
Fd connect_to(const std::string& host, int port, std::chrono::steady_clock::time_point deadline);
/// This host's numeric address on the way to `host`, or that of the interface named by
/// GLOO_SOCKET_IFNAME.
std::string local_address(const std::string& host);

}  // namespace gptfast
