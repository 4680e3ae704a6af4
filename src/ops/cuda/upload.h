// Tensors of a mapped file -> the GPU: several threads copy pieces into pinned buffers, from where
// the copy engine takes them. A plain copy from mapped pages runs at a small part of the bus's
// speed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace gptfast::cuda {

class Uploader {
 public:
  explicit Uploader(at::Device device);
  ~Uploader();  // drops what finish() did not wait for
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  /// A tensor on the device that will hold the values of `host`, a contiguous CPU tensor, once
  /// finish() has returned. `host` must live until then.
  at::Tensor upload(const at::Tensor& host);
  /// Waits for all uploads. Throws what a thread of the uploader threw.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gptfast::cuda
