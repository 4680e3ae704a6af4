#include "tp_socket.h"

#include <c10/util/Exception.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace gptfast {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int type) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TORCH_CHECK(error == 0, "cannot resolve the host '", host, "' (", gai_strerror(error),
              "); set MASTER_ADDR to an address that every rank can reach");
  return {found, freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> text{};
  TORCH_CHECK(getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0,
              "cannot print a network address");
  return text.data();
}

std::string interface_address(const std::string& name) {
  ifaddrs* list = nullptr;
  TORCH_CHECK(getifaddrs(&list) == 0, "cannot list the network interfaces: ", strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || name != at->ifa_name) continue;
    if (at->ifa_addr->sa_family == AF_INET) return numeric(at->ifa_addr, sizeof(sockaddr_in));
    if (at->ifa_addr->sa_family == AF_INET6) return numeric(at->ifa_addr, sizeof(sockaddr_in6));
  }
  TORCH_CHECK(false, "GLOO_SOCKET_IFNAME names '", name,
              "', which is no network interface with an address on this host");
}

/// Binds to every address of one family; -1 with errno when that fails.
int try_listen(int family, int port) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in6 six{};
  sockaddr_in four{};
  const sockaddr* address = reinterpret_cast<const sockaddr*>(&four);
  socklen_t size = sizeof(four);
  if (family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<uint16_t>(port));
    address = reinterpret_cast<const sockaddr*>(&six);
    size = sizeof(six);
  } else {
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<uint16_t>(port));
  }
  if (bind(fd.get(), address, size) != 0 || listen(fd.get(), SOMAXCONN) != 0) return -1;
  return fd.release();
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Fd listen_on(int port) {
  int fd = try_listen(AF_INET6, port);
  if (fd < 0 && errno != EADDRINUSE) fd = try_listen(AF_INET, port);
  TORCH_CHECK(fd >= 0, "rank 0 cannot listen on port ", port, ": ", strerror(errno),
              "; set MASTER_PORT to a free port");
  return Fd(fd);
}

int port_of(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  TORCH_CHECK(getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0,
              "getsockname failed: ", strerror(errno));
  const bool six = address.ss_family == AF_INET6;
  return ntohs(six ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Fd connect_to(const std::string& host, int port, std::chrono::steady_clock::time_point deadline) {
  constexpr auto kRetry = std::chrono::milliseconds(100);
  constexpr int kAttemptMilliseconds = 5000;  // a host that drops packets answers nothing at all
  int error = 0;
  do {
    const AddressList list = resolve(host, port, SOCK_STREAM);
    for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
      Fd fd(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (fd.get() < 0) continue;
      if (connect(fd.get(), at->ai_addr, at->ai_addrlen) == 0) return fd;
      error = errno;
      if (error != EINPROGRESS) continue;
      pollfd ready{.fd = fd.get(), .events = POLLOUT, .revents = 0};
      error = ETIMEDOUT;
      socklen_t size = sizeof(error);
      if (poll(&ready, 1, kAttemptMilliseconds) == 1)
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error == 0) return fd;
    }
    std::this_thread::sleep_for(kRetry);
  } while (std::chrono::steady_clock::now() < deadline);
  TORCH_CHECK(false, "cannot reach rank 0 at ", host, ":", port, " (", strerror(error),
              "); check MASTER_ADDR and MASTER_PORT, and that rank 0 runs");
}

std::string local_address(const std::string& host) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && *interface != '\0') return interface_address(interface);
  // Connecting a datagram socket sends nothing: it only asks the routing table.
  const AddressList list = resolve(host, /*port=*/9, SOCK_DGRAM);
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    const Fd fd(socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd.get() < 0 || connect(fd.get(), at->ai_addr, at->ai_addrlen) != 0) continue;
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0)
      return numeric(reinterpret_cast<sockaddr*>(&address), size);
  }
  TORCH_CHECK(false, "no network interface leads to '", host,
              "'; set MASTER_ADDR to an address of rank 0 that this host can reach");
}

}  // namespace gptfast
