// Weights in float32, bfloat16 and float16, row-major: exact products with float32 activations.
#pragma once

#include "ops/cpu/simd.h"

namespace gptfast::cpu::GPTFAST_ISA {

// One weight row at a time keeps a thread on one sequential stream (four interleaved rows read at
// 75 % of it, Zen 4), and four accumulators per activation row hide the latency of the
// multiply-adds.
constexpr int kFloatVectors = 4;
#if defined(__AVX512F__)
constexpr int kWeightRows = 2;  // 2 x 2 rows are 16 accumulators of 32 registers
#else
constexpr int kWeightRows = 1;
#endif
constexpr int64_t kFloatStep = kFloatVectors * kLanes;

struct FloatStep {
  Float v[kFloatVectors];
};

/// kFloatStep weights as floats, in the order of float_activation.
inline FloatStep load_step(const float* w) {
  FloatStep step;
  for (int i = 0; i < kFloatVectors; ++i) step.v[i] = load(w + i * kLanes);
  return step;
}
inline FloatStep load_step(const Float16* w) {
  FloatStep step;
  for (int i = 0; i < kFloatVectors; ++i) step.v[i] = load(w + i * kLanes);
  return step;
}
inline FloatStep load_step(
    const BFloat16* w) {  // even columns, then odd ones: one operation each to widen
  FloatStep step;
  for (int i = 0; i < kFloatVectors; i += 2) {
    const Uint pair = load_as<Uint>(w + i * kLanes);
    step.v[i] = (Float)(pair << 16);
    step.v[i + 1] = (Float)(pair & 0xffff0000u);
  }
  return step;
}

/// Puts the floats x [columns] into the order of load_step.
inline void order_activation(Format format, float* x, int64_t columns) {
  if (format != Format::kBFloat16) return;
  for (int64_t i = 0; i < columns; i += 2 * kLanes) {
    Float even, odd;
    split_pairs(x + i, even, odd);
    store(x + i, even);
    store(x + i + kLanes, odd);
  }
}

/// Dot products of `kWeights` adjacent weight rows with `kRows` activation rows:
/// out[m * out_stride + n].
template <int kWeights, int kRows, class T>
inline void float_dots(const T* w, int64_t k, const float* x, int64_t x_stride, float* out,
                       int64_t out_stride) {
  Float sums[kWeights][kRows][kFloatVectors] = {};
  const auto accumulate = [&](const T* weights, int64_t weight_stride, int64_t at) {
    FloatStep steps[kWeights];
    for (int n = 0; n < kWeights; ++n) {
      steps[n] = load_step(weights + n * weight_stride);
      for (size_t line = 0; line < kFloatStep * sizeof(T); line += 64) {
        prefetch_ahead<kWeights>(reinterpret_cast<const char*>(weights + n * weight_stride) + line,
                                 k * static_cast<int64_t>(sizeof(T)));
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int i = 0; i < kFloatVectors; ++i) {
        const Float activation = load(x + m * x_stride + at + i * kLanes);
        for (int n = 0; n < kWeights; ++n) {
          sums[n][m][i] = multiply_add(steps[n].v[i], activation, sums[n][m][i]);
        }
      }
    }
  };
  const int64_t whole = k / kFloatStep * kFloatStep;
  for (int64_t at = 0; at < whole; at += kFloatStep) accumulate(w + at, k, at);
  if (whole < k) {
    T tail[kWeights][kFloatStep] = {};
    for (int n = 0; n < kWeights; ++n) memcpy(tail[n], w + n * k + whole, (k - whole) * sizeof(T));
    accumulate(tail[0], kFloatStep, whole);
  }
  for (int n = 0; n < kWeights; ++n) {
    for (int m = 0; m < kRows; ++m) {
      const Float* s = sums[n][m];
      out[m * out_stride + n] = sum((s[0] + s[1]) + (s[2] + s[3]));
    }
  }
}

/// kWeights weight rows times all activation rows, two at a time.
template <int kWeights, class T>
inline void float_rows(const T* w, int64_t k, const float* x, int64_t x_stride, int rows,
                       float* out, int64_t out_stride) {
  int m = 0;
  for (; m + 2 <= rows; m += 2) {
    float_dots<kWeights, 2>(w, k, x + m * x_stride, x_stride, out + m * out_stride, out_stride);
  }
  if (m < rows)
    float_dots<kWeights, 1>(w, k, x + m * x_stride, x_stride, out + m * out_stride, out_stride);
}

template <class T>
void gemv_float(const Weight& weight, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                int rows, float* out, int64_t out_stride) {
  const T* w = static_cast<const T*>(weight.data) + begin * weight.k;
  int64_t n = begin;
  if (rows > 1 &&
      kWeightRows == 2) {  // activations come from the second-level cache: use them twice
    for (; n + 2 <= end; n += 2, w += 2 * weight.k) {
      float_rows<kWeightRows>(w, weight.k, x, x_stride, rows, out + (n - begin), out_stride);
    }
  }
  for (; n < end; ++n, w += weight.k) {
    float_rows<1>(w, weight.k, x, x_stride, rows, out + (n - begin), out_stride);
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
