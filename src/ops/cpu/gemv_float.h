// Weights in float32, bfloat16 and float16, row-major: exact products with float32 activations.
#pragma once

#include "ops/cpu/simd.h"

namespace gptfast::cpu::GPTFAST_ISA {

// One weight row at a time keeps a thread on one sequential stream (four interleaved rows read at
// 75 % of it, Zen 4), and four accumulators per activation row hide the latency of the
// multiply-adds.
constexpr int kFloatVectors = 4;
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
    float pairs[2 * kLanes];
    memcpy(pairs, x + i, sizeof(pairs));
    for (int j = 0; j < kLanes; ++j) {
      x[i + j] = pairs[2 * j];
      x[i + kLanes + j] = pairs[2 * j + 1];
    }
  }
}

/// Dot products of one weight row with `kRows` activation rows.
template <int kRows, class T>
inline void float_dots(const T* w, int64_t k, const float* x, int64_t x_stride, float* out,
                       int64_t out_stride) {
  Float sums[kRows][kFloatVectors] = {};
  const auto accumulate = [&](const T* weights, int64_t at) {
    const FloatStep step = load_step(weights);
    for (int m = 0; m < kRows; ++m) {
      for (int i = 0; i < kFloatVectors; ++i) {
        sums[m][i] = multiply_add(step.v[i], load(x + m * x_stride + at + i * kLanes), sums[m][i]);
      }
    }
  };
  const int64_t whole = k / kFloatStep * kFloatStep;
  for (int64_t at = 0; at < whole; at += kFloatStep) accumulate(w + at, at);
  if (whole < k) {
    T tail[kFloatStep] = {};
    memcpy(tail, w + whole, (k - whole) * sizeof(T));
    accumulate(tail, whole);
  }
  for (int m = 0; m < kRows; ++m) {
    out[m * out_stride] = sum((sums[m][0] + sums[m][1]) + (sums[m][2] + sums[m][3]));
  }
}

template <class T>
void gemv_float(const Weight& weight, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                int rows, float* out, int64_t out_stride) {
  for (int64_t n = begin; n < end; ++n) {
    const T* w = static_cast<const T*>(weight.data) + n * weight.k;
    float* y = out + (n - begin);
    int m = 0;
#if defined(__AVX512F__)  // 32 registers: 16 accumulators
    for (; m + 4 <= rows; m += 4)
      float_dots<4>(w, weight.k, x + m * x_stride, x_stride, y + m * out_stride, out_stride);
#endif
    for (; m + 2 <= rows; m += 2)
      float_dots<2>(w, weight.k, x + m * x_stride, x_stride, y + m * out_stride, out_stride);
    for (; m < rows; ++m)
      float_dots<1>(w, weight.k, x + m * x_stride, x_stride, y + m * out_stride, out_stride);
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
