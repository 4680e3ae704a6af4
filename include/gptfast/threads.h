// The CPU threads of the library: one pool for the whole process, the caller being its first
// thread.
#pragma once

#include <cstdint>
#include <functional>

namespace gptfast {

/// Physical cores that this process may use: the affinity mask, one of each set of hyperthreads,
/// and the cgroup's CPU quota (rounded up) are respected. At least 1.
int default_num_threads();

/// Sets how many threads compute, the calling one included; 0 means default_num_threads(). More
/// threads than cores work, but only slow things down. Throws c10::Error outside 0..kMaxThreads.
/// Not to be called while another thread computes.
void set_num_threads(int num_threads);

/// Threads that compute: what set_num_threads() chose, else default_num_threads().
int num_threads();

constexpr int kMaxThreads = 1024;

/// Calls body(0) ... body(n - 1), each once, on the threads that compute; LibTorch, called inside,
/// uses one thread. Rethrows one of the exceptions that bodies threw, after all have returned. Must
/// not be called inside itself.
void parallel_for(int64_t n, const std::function<void(int64_t)>& body);

}  // namespace gptfast
