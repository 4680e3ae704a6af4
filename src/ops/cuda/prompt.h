// The CUDA kernels of a prompt's forward pass: what lies between its matrix products. Types are
// bfloat16 or float16, pointers 16-byte aligned, row lengths multiples of 8; see kernels.h.
#pragma once

#include "ops/cuda/kernels.h"

namespace gptfast::cuda {

/// out [rows, dim] = x / sqrt(mean(x^2) + eps), rounded, times weight [dim].
cudaError_t rms_norm(cudaStream_t stream, const void* x, Scalar type, int64_t rows, int dim,
                     const void* weight, float eps, void* out);
/// out [count] = silu(gate), rounded, times up.
cudaError_t silu_mul(cudaStream_t stream, const void* gate, const void* up, Scalar type,
                     int64_t count, void* out);
/// out [count] = values; count is a multiple of 16.
cudaError_t widen_int8(cudaStream_t stream, const int8_t* values, int64_t count, Scalar type,
                       void* out);
/// Tokens begin .. begin + length of each of `batch` texts of seq_len tokens.
struct PromptRows {
  int batch = 1;    ///< B
  int seq_len = 0;  ///< S
  int begin = 0;
  int length = 0;
  const int64_t* cache_pos = nullptr;  ///< [length]
  int first_slot = 0;                  ///< text b goes to slot first_slot + b
};
/// qkv [B, S, (H + 2 Hkv) Dh]: rotated queries go to q [B, S, H, Dh], rotated keys and the values
/// to the cache, all of the cache's type. freqs_cis [S, Dh/2, 2].
cudaError_t rope_append(cudaStream_t stream, const void* qkv, const PromptRows& rows,
                        const Cache& cache, const float* freqs_cis, void* q);

}  // namespace gptfast::cuda
