#include "ops/cpu/thread_pool.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "gptfast/threads.h"

namespace gptfast::cpu {
namespace {

// A stage of a small model takes 10 to 100 us and the gap between two stages about 1 us, so workers
// rarely sleep within a token; a longer wait would steal time from other processes. DESIGN bound.
constexpr int64_t kSpinNs = 50'000;
constexpr size_t kAlignment = 64;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

/// Spins until done() or `spin_ns` have passed; returns done().
template <class Done>
bool spin_until(const Done& done, int64_t spin_ns) {
  if (done()) return true;
  const int64_t deadline = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      pause();
    }
  } while (now_ns() < deadline);
  return done();
}

cpu_set_t allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
  return set;
}

/// One of each set of hyperthreads among the allowed CPUs.
int physical_cores() {
  const cpu_set_t allowed = allowed_cpus();
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
    cores.insert(siblings);
  }
  return std::max<int>(1, static_cast<int>(cores.size()));
}

/// CPUs that a cgroup v2 file "quota period" grants; 0 if it sets no limit.
double quota_v2(const std::filesystem::path& file) {
  std::ifstream stream(file);
  double quota = 0;
  double period = 0;
  return stream >> quota >> period && period > 0 ? quota / period : 0;
}

double quota_v1(const std::filesystem::path& folder) {
  std::ifstream quota_file(folder / "cpu.cfs_quota_us");
  std::ifstream period_file(folder / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  return quota_file >> quota && period_file >> period && quota > 0 && period > 0 ? quota / period
                                                                                 : 0;
}

/// The tightest quota of this process' cgroup and its parents; 0 if none.
double cgroup_cpus() {
  std::ifstream file("/proc/self/cgroup");
  double least = 0;
  const auto take = [&](double cpus) {
    if (cpus > 0 && (least == 0 || cpus < least)) least = cpus;
  };
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::filesystem::path root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    std::filesystem::path relative = line.substr(second + 2);
    for (;; relative = relative.parent_path()) {
      take(v2 ? quota_v2(root / relative / "cpu.max") : quota_v1(root / relative));
      if (relative.empty()) break;
    }
  }
  return least;
}

}  // namespace

thread_local int ThreadPool::current_thread = -1;

ThreadPool& ThreadPool::get() {
  static ThreadPool pool(default_num_threads());
  return pool;
}

ThreadPool::ThreadPool(int num_threads) {
  start(num_threads);
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::resize(int num_threads) {
  const std::lock_guard lock(callers_);
  if (num_threads == size()) return;
  stop();
  start(num_threads);
}

void ThreadPool::start(int num_threads) {
  stopping_ = false;
  scratch_.resize(num_threads);
  shares_ = std::vector<Share>(num_threads);
  const cpu_set_t allowed = allowed_cpus();
  // With more threads than CPUs the one we would wait for may need our CPU: sleep at once.
  spin_ns_ = num_threads <= CPU_COUNT(&allowed) ? kSpinNs : 0;
  const uint32_t seen = gate_.load() / kPhase;
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread, seen] { work(thread, seen); });
  }
}

void ThreadPool::stop() {
  stopping_ = true;
  gate_.fetch_add(kPhase);
  futex_wake(gate_);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  gate_.store(0);
}

void ThreadPool::run_task(Task task, const void* context) {
  const std::lock_guard lock(callers_);
  claims_.store(0, std::memory_order_relaxed);
  for (Share& share : shares_) share.claimed.store(0, std::memory_order_relaxed);
  const auto run_first = [&] {
    current_thread = 0;
    task(context, 0);
    current_thread = -1;
  };
  if (workers_.empty()) return run_first();
  task_ = task;
  context_ = context;
  // Sequentially consistent, as the sleepers' side: one of the two sees the other.
  gate_.fetch_add(kPhase);
  if (sleepers_.load() > 0) futex_wake(gate_);
  run_first();
  gate_.fetch_add(kPhase);
  wait_for_workers();
}

void ThreadPool::wait_for_workers() {
  const auto done = [this] { return gate_.load(std::memory_order_acquire) % kPhase == 0; };
  while (!spin_until(done, spin_ns_)) {
    caller_sleeps_.store(1);
    const uint32_t gate = gate_.load();
    if (gate % kPhase != 0) futex_wait(gate_, gate);
    caller_sleeps_.store(0);
  }
}

/// Returns when the gate has opened after phase `seen`.
void ThreadPool::wait_for_opening(uint32_t seen) {
  const auto opened = [seen](uint32_t gate) {
    return gate / kPhase % 2 == 1 && gate / kPhase != seen;
  };
  if (spin_until([&] { return opened(gate_.load(std::memory_order_relaxed)); }, spin_ns_)) return;
  sleepers_.fetch_add(1);
  for (uint32_t gate = gate_.load(); !opened(gate); gate = gate_.load()) futex_wait(gate_, gate);
  sleepers_.fetch_sub(1);
}

void ThreadPool::work(int thread, uint32_t seen) {
  current_thread = thread;
  for (;;) {
    wait_for_opening(seen);
    seen = gate_.fetch_add(1) / kPhase;  // closed again, or that of a later stage, if we were slow
    if (seen % 2 == 1) {
      if (stopping_) return;
      task_(context_, thread);
    }
    if (gate_.fetch_sub(1) % kPhase == 1 && caller_sleeps_.load() != 0) futex_wake(gate_);
  }
}

std::byte* ThreadPool::scratch(int thread, size_t bytes) {
  Scratch& scratch = scratch_[thread];
  if (scratch.size < bytes) {
    scratch.memory = std::make_unique_for_overwrite<std::byte[]>(bytes + kAlignment);
    scratch.size = bytes;
  }
  void* pointer = scratch.memory.get();
  size_t space = bytes + kAlignment;
  return static_cast<std::byte*>(std::align(kAlignment, bytes, pointer, space));
}

}  // namespace gptfast::cpu

namespace gptfast {

int default_num_threads() {
  const double quota = cpu::cgroup_cpus();
  const int cores = cpu::physical_cores();
  return quota > 0 ? std::clamp(static_cast<int>(std::ceil(quota)), 1, cores) : cores;
}

void set_num_threads(int num_threads) {
  TORCH_CHECK(num_threads >= 0 && num_threads <= kMaxThreads, "num_threads is ", num_threads,
              ", expected 0 (all cores) to ", kMaxThreads);
  cpu::ThreadPool::get().resize(num_threads == 0 ? default_num_threads() : num_threads);
}

int num_threads() {
  return cpu::ThreadPool::get().size();
}

void parallel_for(int64_t n, const std::function<void(int64_t)>& body) {
  const int library_threads = at::get_num_threads();
  const at::ThreadLocalState state;  // inference mode, the profiler
  std::mutex mutex;
  std::exception_ptr failure;
  cpu::ThreadPool& pool = cpu::ThreadPool::get();
  pool.run([&](int thread) noexcept {
    const at::ThreadLocalStateGuard guard(state);
    at::set_num_threads(1);
    for (cpu::Range range{}; pool.next(thread, n, /*piece=*/1, range);) {
      try {
        body(range.begin);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    }
  });
  at::set_num_threads(library_threads);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace gptfast
