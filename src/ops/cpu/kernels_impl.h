// The table of kernels of one instruction set; included once by each kernels_*.cpp with GPTFAST_ISA
// naming its namespace.
#pragma once

#include "ops/cpu/attend.h"
#include "ops/cpu/attend_bfloat16.h"
#include "ops/cpu/gemv_float.h"
#include "ops/cpu/gemv_int4.h"
#include "ops/cpu/gemv_int8.h"
#include "ops/cpu/matmul.h"

namespace gptfast::cpu::GPTFAST_ISA {

inline bool quantized(Format format) {
  return format == Format::kInt8 || format == Format::kInt4;
}

/// Floats of a row that is padded for every format.
inline int64_t padded_columns(int64_t k) {
  return round_up(k, kColumnMultiple);
}

// A prepared row is [padded_columns] floats, in natural order while it is made, then what a
// quantized format adds. Rows an odd number of cache lines apart do not crowd the same cache sets.
inline size_t activation_bytes(Format format, int64_t k, int64_t groupsize) {
  const int64_t floats = padded_columns(k) * 4;
  return (quantized(format) ? floats + QuantizedLayout(format, k, groupsize).bytes : floats) | 64;
}

/// Calls f(index, lanes in use) for each vector of n values.
template <class F>
inline void for_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

template <class T>
inline Float load_lanes(const T* p, int64_t lanes) {
  return lanes == kLanes ? load(p) : load_first(p, lanes);
}
inline void store_lanes(float* p, Float v, int64_t lanes) {
  lanes == kLanes ? store(p, v) : store_first(p, v, lanes);
}

template <class T>
inline void rms_norm(const float* x, const T* weight, float eps, int64_t k, const int32_t* perm,
                     float* out) {
  Float squares{};
  for_vectors(k, [&](int64_t i, int64_t lanes) {
    const Float v = load_lanes(x + i, lanes);
    squares = multiply_add(v, v, squares);
  });
  const float scale = 1 / __builtin_sqrtf(sum(squares) / static_cast<float>(k) + eps);
  if (perm != nullptr) {
    for (int64_t i = 0; i < k; ++i)
      out[i] = x[perm[i]] * scale * load_first(weight + perm[i], 1)[0];
    return;
  }
  for_vectors(k, [&](int64_t i, int64_t lanes) {
    store_lanes(out + i, load_lanes(x + i, lanes) * scale * load_lanes(weight + i, lanes), lanes);
  });
}

inline void normalize(const PrepareArgs& args, float* out) {
  switch (args.norm_dtype) {
    case Dtype::kFloat32:
      return rms_norm(args.x, static_cast<const float*>(args.norm_weight), args.eps, args.k,
                      args.perm, out);
    case Dtype::kBFloat16:
      return rms_norm(args.x, static_cast<const BFloat16*>(args.norm_weight), args.eps, args.k,
                      args.perm, out);
    case Dtype::kFloat16:
      return rms_norm(args.x, static_cast<const Float16*>(args.norm_weight), args.eps, args.k,
                      args.perm, out);
  }
}

inline void prepare(Format format, const PrepareArgs& args, void* out) {
  auto* x = static_cast<float*>(out);
  if (args.norm_weight != nullptr) {
    normalize(args, x);
  } else if (args.perm != nullptr) {
    for (int64_t i = 0; i < args.k; ++i) x[i] = args.x[args.perm[i]];
  } else {
    memcpy(x, args.x, args.k * sizeof(float));
  }
  memset(x + args.k, 0, (padded_columns(args.k) - args.k) * sizeof(float));
  if (quantized(format)) {
    quantize_activation(format, x, args.k, args.groupsize,
                        static_cast<char*>(out) + padded_columns(args.k) * 4);
  } else {
    order_activation(format, x, padded_columns(args.k));
  }
}

inline void gemv(const Weight& weight, int64_t begin, int64_t end, const void* activations,
                 int rows, float* out, int64_t out_stride) {
  const size_t bytes = activation_bytes(weight.format, weight.k, weight.groupsize);
  if (!quantized(weight.format)) {
    const auto* x = static_cast<const float*>(activations);
    const auto stride = static_cast<int64_t>(bytes / sizeof(float));
    switch (weight.format) {
      case Format::kBFloat16:
        return gemv_float<BFloat16>(weight, begin, end, x, stride, rows, out, out_stride);
      case Format::kFloat16:
        return gemv_float<Float16>(weight, begin, end, x, stride, rows, out, out_stride);
      default:
        return gemv_float<float>(weight, begin, end, x, stride, rows, out, out_stride);
    }
  }
  const QuantizedRows x{.data =
                            static_cast<const char*>(activations) + padded_columns(weight.k) * 4,
                        .stride = static_cast<int64_t>(bytes),
                        .layout = QuantizedLayout(weight.format, weight.k, weight.groupsize)};
  if (weight.format == Format::kInt8)
    return gemv_int8(weight, begin, end, x, rows, out, out_stride);
  if (static_cast<const Int4Header*>(weight.data)->float32_scales != 0) {
    return gemv_int4<float>(weight, begin, end, x, rows, out, out_stride);
  }
  return gemv_int4<BFloat16>(weight, begin, end, x, rows, out, out_stride);
}

inline void silu_mul(const float* gate, const float* up, int64_t n, float* h) {
  for_vectors(n, [&](int64_t i, int64_t lanes) {
    const Float g = load_lanes(gate + i, lanes);
    store_lanes(h + i, g / (1 + exp(-g)) * load_lanes(up + i, lanes), lanes);
  });
}

template <class T>
inline void widen(const T* in, int64_t n, float* out) {
  for_vectors(n, [&](int64_t i, int64_t lanes) {
    store_lanes(out + i, load_lanes(in + i, lanes), lanes);
  });
}

inline void to_float(const void* in, Dtype dtype, int64_t n, float* out) {
  switch (dtype) {
    case Dtype::kFloat32:
      return widen(static_cast<const float*>(in), n, out);
    case Dtype::kBFloat16:
      return widen(static_cast<const BFloat16*>(in), n, out);
    case Dtype::kFloat16:
      return widen(static_cast<const Float16*>(in), n, out);
  }
}

inline void from_float(const float* in, int64_t n, Dtype dtype, void* out) {
  auto* bits = static_cast<uint16_t*>(out);
  switch (dtype) {
    case Dtype::kFloat32:
      memcpy(out, in, n * sizeof(float));
      return;
    case Dtype::kBFloat16:
      for (int64_t i = 0; i < n; ++i) bits[i] = float_to_bfloat16(in[i]);
      return;
    case Dtype::kFloat16:
      for (int64_t i = 0; i < n; ++i) bits[i] = float_to_half(in[i]);
      return;
  }
}

#if defined(__AVX512F__)
constexpr PromptKernels kPromptKernels = {pack_rows, matmul_bfloat16, attend_prompt_bytes,
                                          attend_prompt};
constexpr const PromptKernels* kPrompt = &kPromptKernels;
#else
constexpr const PromptKernels* kPrompt = nullptr;
#endif

constexpr Kernels make_kernels(const char* name) {
  return {name,  activation_bytes, prepare,    gemv,   matmul, attend, silu_mul,
          merge, to_float,         from_float, kPrompt};
}

}  // namespace gptfast::cpu::GPTFAST_ISA
