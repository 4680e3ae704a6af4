// The one thread system of the CPU path: the caller and num_threads() - 1 workers, which spin for a
// moment between two stages of a token and sleep otherwise. Nothing here allocates or locks while a
// token is computed, except on growth.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

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

  /// Calls body(thread index) once on every thread and returns when all have returned. Callers take
  /// turns. `body` must not throw and must not call run(). The claims of next() start anew.
  template <class Body>
  void run(const Body& body) {
    static_assert(std::is_nothrow_invocable_v<const Body&, int>,
                  "an exception cannot cross threads: mark the body noexcept");
    run_task([](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); },
             &body);
  }

  /// Inside a body: claims the next piece of [0, total), `piece` rows long (the last one shorter).
  /// False when none is left. Pieces are claimed in order, so that a thread held up by a neighbour
  /// does not hold up the others.
  bool next(int64_t total, int64_t piece, Range& range) {
    const int64_t begin = cursor_.fetch_add(piece, std::memory_order_relaxed);
    range = {begin, begin + piece < total ? begin + piece : total};
    return begin < total;
  }

  /// Memory of a thread that lives until the pool ends; 64-byte aligned, grown to `bytes`. Contents
  /// are not kept on growth.
  std::byte* scratch(int thread, size_t bytes);

 private:
  using Task = void (*)(const void* context, int thread);
  struct Scratch {
    std::unique_ptr<std::byte[]> memory;
    size_t size = 0;
  };

  void run_task(Task task, const void* context);
  void start(int num_threads);
  void stop();
  void work(int thread, uint32_t seen);
  void wait_for_start(uint32_t seen);
  void wait_for_workers();

  std::vector<std::thread> workers_;
  std::vector<Scratch> scratch_;
  std::mutex callers_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  bool stopping_ = false;
  int64_t spin_ns_ = 0;
  // On cache lines of their own: the caller writes the first, the workers the second, everybody the
  // third.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> sleepers_{0};
  alignas(64) std::atomic<uint32_t> running_{0};
  std::atomic<uint32_t> caller_sleeps_{0};
  alignas(64) std::atomic<int64_t> cursor_{0};
};

}  // namespace gptfast::cpu
