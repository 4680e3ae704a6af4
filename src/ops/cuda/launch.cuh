// Launching a kernel of a step.
#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/kernels.h"

namespace gptfast::cuda {

/// cluster: blocks that share their memories (sm_90), or 1.
template <typename... Params, typename... Args>
inline cudaError_t launch_cluster(const Launch& launch, int cluster, void (*kernel)(Params...),
                                  dim3 grid, int threads, int shared_bytes, const Args&... args) {
  if (shared_bytes > 48 * 1024) {  // what a block may have without asking
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  // All kernels of a step ask for the same split of an SM's memory, or they could not be resident
  // together.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (launch.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... Params, typename... Args>
inline cudaError_t launch_kernel(const Launch& launch, void (*kernel)(Params...), dim3 grid,
                                 int threads, int shared_bytes, const Args&... args) {
  return launch_cluster(launch, /*cluster=*/1, kernel, grid, threads, shared_bytes, args...);
}

inline cudaError_t multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

inline cudaError_t shared_limit(int& bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace gptfast::cuda
