// The one thread system of the CPU path: the caller and num_threads() - 1 workers, which spin for a
// moment between two stages of a token and sleep otherwise. Nothing here allocates or locks while a
// token is computed, except on growth.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "gptfast/threads.h"

namespace gptfast::cpu {

/// A piece of a stage: rows [begin, end).
struct Range {
  int64_t begin;
  int64_t end;
};

class ThreadPool {
 public:
  /// The pool of the process; made on first use with default_num_threads() threads.
  static ThreadPool& get();

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }
  void resize(int num_threads);

  /// Calls body(thread index) on the caller and on every worker that gets a CPU before the caller's
  /// body has returned, each at most once, and returns when all of them have returned: a body takes
  /// its work from next(), and a worker that a neighbour keeps off its CPU is not waited for.
  /// Callers take turns. `body` must not throw and must not call run(). The claims of next() start
  /// anew.
  template <class Body>
  void run(const Body& body) {
    static_assert(std::is_nothrow_invocable_v<const Body&, int>,
                  "an exception cannot cross threads: mark the body noexcept");
    run_task([](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); },
             &body);
  }

  /// Inside a body: claims a piece of [0, total), `piece` rows long (the last one shorter). False
  /// when none is left. A thread gets the pieces of its own share in order, so that it reads one
  /// long stream of memory, and then what is left of the others' shares, so that a thread held up
  /// by a neighbour does not hold up the others.
  bool next(int thread, int64_t total, int64_t piece, Range& range) {
    const int64_t pieces = (total + piece - 1) / piece;
    if (claims_.fetch_add(1, std::memory_order_relaxed) >= pieces) return false;
    const int64_t threads = size();
    for (int64_t owner = thread;; owner = (owner + 1) % threads) {  // finds one: it was claimed
      const int64_t end = pieces * (owner + 1) / threads;
      const int64_t at =
          pieces * owner / threads + shares_[owner].claimed.fetch_add(1, std::memory_order_relaxed);
      if (at >= end) continue;
      range = {at * piece, std::min((at + 1) * piece, total)};
      return true;
    }
  }

  /// The index of the calling thread inside a body, else -1.
  static thread_local int current_thread;

  /// Memory of a thread that lives until the pool ends; 64-byte aligned, grown to `bytes`. Contents
  /// are not kept on growth.
  std::byte* scratch(int thread, size_t bytes);

 private:
  using Task = void (*)(const void* context, int thread);
  struct Scratch {
    std::unique_ptr<std::byte[]> memory;
    size_t size = 0;
  };
  struct alignas(64) Share {
    std::atomic<int64_t> claimed{0};
  };

  void run_task(Task task, const void* context);
  void start(int num_threads);
  void stop();
  void work(int thread, uint32_t seen);
  void wait_for_opening(uint32_t seen);
  void wait_for_workers();

  std::vector<std::thread> workers_;
  std::vector<Scratch> scratch_;
  std::vector<Share> shares_;
  std::mutex callers_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  bool stopping_ = false;
  int64_t spin_ns_ = 0;
  // The gate of a stage: how many workers are inside, and above these bits a phase that counts up:
  // odd when the gate is open, even when it is closed. One word, so that a worker enters and learns
  // whether the gate was open in one operation.
  static constexpr uint32_t kPhase = 2048;
  static_assert(kMaxThreads < kPhase);
  alignas(64) std::atomic<uint32_t> gate_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> caller_sleeps_{0};
  alignas(64) std::atomic<int64_t> claims_{0};
};

}  // namespace gptfast::cpu
