// Blocks of a cluster, which see each other's shared memory (sm_90).
#pragma once

#include <cooperative_groups.h>

namespace gptfast::cuda {

__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_arrive();
#endif
}

__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_wait();
#endif
}

__device__ inline int rank_in_cluster() {
#if __CUDA_ARCH__ >= 900
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
#else
  return 0;
#endif
}

/// The shared memory at `p` of another block.
template <typename T>
__device__ inline T* in_cluster(T* p, int rank) {
#if __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(p, rank);
#else
  return p;
#endif
}

}  // namespace gptfast::cuda
