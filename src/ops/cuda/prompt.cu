// What lies between the matrix products of a prompt's forward pass, a kernel each. Threads take 16
// bytes of a 16-bit type at a time and round where the operators of plain ATen round.
#include "ops/cuda/prompt.h"

#include "ops/cuda/device.cuh"

namespace gptfast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements

template <typename T>
struct alignas(16) Vector {
  T at[kVector];
};

__device__ inline float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ inline float to_float(__half v) {
  return __half2float(v);
}

template <typename T>
__device__ T round_to(float v);
template <>
__device__ inline __nv_bfloat16 round_to(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ inline __half round_to(float v) {
  return __float2half_rn(v);
}

template <typename T>
__device__ Vector<T> load(const T* p) {
  return *reinterpret_cast<const Vector<T>*>(p);
}

template <typename T>
__device__ void store(T* p, const Vector<T>& v) {
  *reinterpret_cast<Vector<T>*>(p) = v;
}

__device__ float block_sum(float v) {
  __shared__ float of_warps[kThreads / kWarp];
  v = warp_sum(v);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = 0;
  for (const float part : of_warps) v += part;
  return v;
}

/// A block a row.
template <typename T>
__global__ void rms_norm_kernel(const T* x, const T* weight, int dim, float eps, T* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * dim;
  const int first = static_cast<int>(threadIdx.x) * kVector;
  float squares = 0;
  for (int i = first; i < dim; i += kThreads * kVector) {
    for (const T value : load(x + row + i).at) squares += to_float(value) * to_float(value);
  }
  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
  for (int i = first; i < dim; i += kThreads * kVector) {
    Vector<T> v = load(x + row + i);
    const Vector<T> w = load(weight + i);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const T normed = round_to<T>(to_float(v.at[j]) * scale);
      v.at[j] = round_to<T>(to_float(normed) * to_float(w.at[j]));
    }
    store(out + row + i, v);
  }
}

template <typename T>
__global__ void silu_mul_kernel(const T* gate, const T* up, int64_t count, T* out) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (i >= count) return;
  Vector<T> v = load(gate + i);
  const Vector<T> u = load(up + i);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float g = to_float(v.at[j]);
    const T silu = round_to<T>(g / (1 + expf(-g)));
    v.at[j] = round_to<T>(to_float(silu) * to_float(u.at[j]));
  }
  store(out + i, v);
}

template <typename T>
__global__ void widen_int8_kernel(const int8_t* values, int64_t count, T* out) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 2 * kVector;
  if (i >= count) return;
  const int4 bytes = *reinterpret_cast<const int4*>(values + i);
  const auto* value = reinterpret_cast<const int8_t*>(&bytes);
#pragma unroll
  for (int half = 0; half < 2 * kVector; half += kVector) {
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < kVector; ++j) v.at[j] = round_to<T>(static_cast<float>(value[half + j]));
    store(out + i + half, v);
  }
}

/// `v` is four pairs, each of which turns by its (cos, sin) of `cis`.
template <typename T>
__device__ Vector<T> rotate(const Vector<T>& v, const float* cis) {
  Vector<T> rotated;
#pragma unroll
  for (int j = 0; j < kVector; j += 2) {
    const float re = to_float(v.at[j]);
    const float im = to_float(v.at[j + 1]);
    const float cos = cis[j];
    const float sin = cis[j + 1];
    rotated.at[j] = round_to<T>(__fsub_rn(__fmul_rn(re, cos), __fmul_rn(im, sin)));
    rotated.at[j + 1] = round_to<T>(__fadd_rn(__fmul_rn(im, cos), __fmul_rn(re, sin)));
  }
  return rotated;
}

/// A block a token: its heads of queries, then of keys, then of values.
template <typename T>
__global__ void rope_append_kernel(const T* qkv, PromptRows rows, Cache cache,
                                   const float* freqs_cis, T* q) {
  const int token = rows.begin + static_cast<int>(blockIdx.x);
  const int batch = static_cast<int>(blockIdx.y);
  const int64_t row = static_cast<int64_t>(batch) * rows.seq_len + token;
  const int64_t slot = rows.first_slot + batch;
  const int64_t pos = rows.cache_pos[blockIdx.x];
  const int width = cache.head_dim;
  const int heads = cache.heads + 2 * cache.local_heads;
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < heads * width;
       i += kThreads * kVector) {
    const int head = i / width;
    const int at = i % width;
    Vector<T> v = load(qkv + row * heads * width + i);
    if (head < cache.heads + cache.local_heads) {
      v = rotate(v, freqs_cis + static_cast<int64_t>(token) * width + at);
    }
    if (head < cache.heads) {
      store(q + row * cache.heads * width + i, v);
      continue;
    }
    const int local = (head - cache.heads) % cache.local_heads;
    T* half = static_cast<T*>(head < cache.heads + cache.local_heads ? cache.k : cache.v);
    store(half + ((slot * cache.local_heads + local) * cache.max_seq + pos) * width + at, v);
  }
}

/// body(T{}) with the type that `type` names: bfloat16 or float16.
template <typename Body>
cudaError_t with_type(Scalar type, const Body& body) {
  if (type == Scalar::kBFloat16) {
    body(__nv_bfloat16{});
  } else {
    body(__half{});
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t rms_norm(cudaStream_t stream, const void* x, Scalar type, int64_t rows, int dim,
                     const void* weight, float eps, void* out) {
  return with_type(type, [&]<typename T>(T) {
    rms_norm_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(static_cast<const T*>(x),
                                                                          static_cast<const T*>(
                                                                              weight),
                                                                          dim, eps,
                                                                          static_cast<T*>(out));
  });
}

cudaError_t silu_mul(cudaStream_t stream, const void* gate, const void* up, Scalar type,
                     int64_t count, void* out) {
  const int64_t blocks = (count / kVector + kThreads - 1) / kThreads;
  return with_type(type, [&]<typename T>(T) {
    silu_mul_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(static_cast<const T*>(
                                                                                gate),
                                                                            static_cast<const T*>(
                                                                                up),
                                                                            count,
                                                                            static_cast<T*>(out));
  });
}

cudaError_t widen_int8(cudaStream_t stream, const int8_t* values, int64_t count, Scalar type,
                       void* out) {
  const int64_t blocks = (count / (2 * kVector) + kThreads - 1) / kThreads;
  return with_type(type, [&]<typename T>(T) {
    widen_int8_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(values, count,
                                                                              static_cast<T*>(out));
  });
}

cudaError_t rope_append(cudaStream_t stream, const void* qkv, const PromptRows& rows,
                        const Cache& cache, const float* freqs_cis, void* q) {
  return with_type(cache.type, [&]<typename T>(T) {
    rope_append_kernel<<<dim3(rows.length, rows.batch), kThreads, 0, stream>>>(static_cast<
                                                                                   const T*>(qkv),
                                                                               rows, cache,
                                                                               freqs_cis,
                                                                               static_cast<T*>(q));
  });
}

}  // namespace gptfast::cuda
