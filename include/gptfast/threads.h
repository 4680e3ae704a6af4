// The CPU threads of the library: one pool for the whole process, the caller being its first
// thread.
#pragma once

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

}  // namespace gptfast
