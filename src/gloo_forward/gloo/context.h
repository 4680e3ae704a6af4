// Declarations of Gloo that LibTorch's ProcessGroupGloo.hpp needs to be read. LibTorch holds Gloo
// inside libtorch_cpu.so but installs none of its headers; the process group keeps Gloo's objects
// behind pointers, so these names are all that a user of it must know.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

}  // namespace gloo
