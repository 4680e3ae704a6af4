#include "ops/cpu/thread_pool.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace gptfast::cpu {
namespace {

/// How often each row of [0, total) was claimed.
std::vector<int> claims(ThreadPool& pool, int64_t total, int64_t piece) {
  std::vector<std::atomic<int>> counts(total);
  pool.run([&](int thread) noexcept {
    for (Range range{}; pool.next(thread, total, piece, range);) {
      for (int64_t row = range.begin; row < range.end; ++row) ++counts[row];
    }
  });
  return {counts.begin(), counts.end()};
}

TEST(ThreadPool, EveryRowIsClaimedOnce) {
  for (const int threads : {1, 2, 3, 8, 33}) {  // more than there are cores, too
    ThreadPool pool(threads);
    for (const int64_t total : {0, 1, 2, 7, 64, 1000}) {
      for (const int64_t piece : {1, 3, 16, 2000}) {
        EXPECT_EQ(claims(pool, total, piece), std::vector<int>(total, 1))
            << threads << " threads, " << total << " rows in pieces of " << piece;
      }
    }
  }
}

TEST(ThreadPool, StagesFollowEachOther) {
  ThreadPool pool(4);
  constexpr int64_t kRows = 64;
  std::vector<int64_t> rows(kRows);
  constexpr int64_t kStages = 5000;
  for (int64_t stage = 0; stage < kStages; ++stage) {
    // Reads what another thread may have written a stage before.
    const std::vector<int64_t> before = rows;
    pool.run([&](int thread) noexcept {
      for (Range range{}; pool.next(thread, kRows, /*piece=*/1, range);)
        rows[range.begin] = before[(range.begin + 1) % kRows] + 1;
    });
  }
  EXPECT_EQ(rows, std::vector<int64_t>(kRows, kStages));
}

TEST(ThreadPool, CallersTakeTurns) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) wrong += claims(pool, 50, 2) != std::vector<int>(50, 1);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, ResizesBetweenStages) {
  ThreadPool pool(1);
  for (const int threads : {4, 2, 1, 6}) {
    pool.resize(threads);
    EXPECT_EQ(pool.size(), threads);
    EXPECT_EQ(claims(pool, 100, 1), std::vector<int>(100, 1));
  }
}

TEST(ThreadPool, ScratchIsAlignedAndEachThreadsOwn) {
  ThreadPool pool(2);
  std::byte* first = pool.scratch(0, 100);
  std::byte* second = pool.scratch(1, 100);
  EXPECT_NE(first, second);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0U);
  EXPECT_EQ(pool.scratch(0, 50), first);
}

TEST(ParallelFor, CallsEachOnceWithOneLibraryThread) {
  set_num_threads(3);
  const int before = at::get_num_threads();
  std::vector<std::atomic<int>> calls(20);
  std::atomic<int> most_threads = 0;
  const c10::InferenceMode guard;
  std::atomic<int> outside_inference = 0;
  parallel_for(std::ssize(calls), [&](int64_t i) {
    ++calls[i];
    most_threads = std::max<int>(most_threads, at::get_num_threads());
    outside_inference += c10::InferenceMode::is_enabled() ? 0 : 1;
  });
  EXPECT_EQ((std::vector<int>{calls.begin(), calls.end()}), std::vector<int>(20, 1));
  EXPECT_EQ(most_threads, 1);
  EXPECT_EQ(outside_inference, 0);
  EXPECT_EQ(at::get_num_threads(), before);
  set_num_threads(0);
}

TEST(ParallelFor, PassesExceptionsOn) {
  const auto fail = [](int64_t i) { TORCH_CHECK(i != 3, "number ", i); };
  EXPECT_THROW(parallel_for(8, fail), c10::Error);
  EXPECT_NO_THROW(parallel_for(3, fail));
}

}  // namespace
}  // namespace gptfast::cpu
