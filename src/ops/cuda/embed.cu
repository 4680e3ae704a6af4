// The token table's rows.
#include <cmath>

#include "ops/cuda/device.cuh"
#include "ops/cuda/launch.cuh"

namespace gptfast::cuda {
namespace {

__global__ void embed_kernel(const int32_t* tokens, const void* table, Scalar type, int vocab,
                             int dim, float* x) {
  launch_dependents();
  wait_for_predecessor();
  const int row = static_cast<int>(blockIdx.y);
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= dim) return;
  const int32_t token = tokens[row];
  const bool valid = token >= 0 && token < vocab;
  x[static_cast<int64_t>(row) * dim + i] =
      valid ? load_scalar(table, static_cast<int64_t>(token) * dim + i, type) : NAN;
}

}  // namespace

cudaError_t embed(const Launch& launch, const int32_t* tokens, int rows, const void* table,
                  Scalar type, int vocab, int dim, float* x) {
  constexpr int kThreads = 256;
  // The first kernel of a step starts when everything before it is complete: later ones may then
  // read what the step before wrote without waiting.
  return launch_kernel({.stream = launch.stream, .pdl = false}, embed_kernel,
                       dim3((dim + kThreads - 1) / kThreads, rows), kThreads, /*shared=*/0, tokens,
                       table, type, vocab, dim, x);
}

}  // namespace gptfast::cuda
