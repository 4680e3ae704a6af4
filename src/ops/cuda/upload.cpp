#include "ops/cuda/upload.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace gptfast::cuda {
namespace {

constexpr int kThreads = 6;                    // a core copies about 10 GB/s out of the page cache
constexpr int64_t kPiece = int64_t{16} << 20;  // bytes of a pinned buffer
constexpr size_t kBuffers = 2;                 // of a thread: one is filled while the other is sent

struct Piece {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

/// A thread's pinned buffers and stream.
class Lane {
 public:
  explicit Lane(at::Device device) : guard_(device) {
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (size_t i = 0; i < kBuffers; ++i) {
      C10_CUDA_CHECK(cudaMallocHost(&buffers_[i], kPiece));
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&sent_[i], cudaEventDisableTiming));
    }
  }
  ~Lane() {
    cudaStreamSynchronize(stream_);
    for (size_t i = 0; i < kBuffers; ++i) {
      cudaFreeHost(buffers_[i]);
      cudaEventDestroy(sent_[i]);
    }
    cudaStreamDestroy(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void send(const Piece& piece) {
    const size_t i = next_++ % kBuffers;
    C10_CUDA_CHECK(cudaEventSynchronize(sent_[i]));
    std::memcpy(buffers_[i], piece.from, static_cast<size_t>(piece.bytes));
    C10_CUDA_CHECK(cudaMemcpyAsync(piece.to, buffers_[i], static_cast<size_t>(piece.bytes),
                                   cudaMemcpyHostToDevice, stream_));
    C10_CUDA_CHECK(cudaEventRecord(sent_[i], stream_));
  }
  void wait() { C10_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_ = nullptr;
  std::array<void*, kBuffers> buffers_{};
  std::array<cudaEvent_t, kBuffers> sent_{};
  size_t next_ = 0;
};

}  // namespace

struct Uploader::State {
  explicit State(at::Device device) : device(device) {
    for (int i = 0; i < kThreads; ++i) threads.emplace_back([this] { work(); });
  }
  ~State() { close(/*drop=*/true); }

  void work() noexcept {
    try {
      Lane lane(device);
      while (true) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return closed || !pieces.empty(); });
        if (pieces.empty()) break;
        const Piece piece = pieces.front();
        pieces.pop_front();
        lock.unlock();
        lane.send(piece);
      }
      lane.wait();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      pieces.clear();
    }
  }

  void close(bool drop) {
    {
      const std::lock_guard lock(mutex);
      closed = true;
      if (drop) pieces.clear();
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  at::Device device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Piece> pieces;
  bool closed = false;
  std::exception_ptr error;
  std::vector<std::thread> threads;
};

Uploader::Uploader(at::Device device) : state_(std::make_unique<State>(device)) {}

Uploader::~Uploader() = default;

at::Tensor Uploader::upload(const at::Tensor& host) {
  at::Tensor out = at::empty(host.sizes(), host.options().device(state_->device));
  const auto* from = static_cast<const std::byte*>(host.const_data_ptr());
  auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
  const auto total = static_cast<int64_t>(host.nbytes());
  {
    const std::lock_guard lock(state_->mutex);
    for (int64_t at = 0; at < total; at += kPiece) {
      state_->pieces.push_back({from + at, to + at, std::min(kPiece, total - at)});
    }
  }
  state_->changed.notify_all();
  return out;
}

void Uploader::finish() {
  state_->close(/*drop=*/false);
  if (state_->error) std::rethrow_exception(state_->error);
}

}  // namespace gptfast::cuda
