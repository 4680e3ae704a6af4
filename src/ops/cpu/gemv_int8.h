// int8 weights, row-major with one scale a row.
#pragma once

#include "ops/cpu/quantize_activation.h"

namespace gptfast::cpu::GPTFAST_ISA {

#if defined(__AVX512F__)

constexpr int64_t kInt8Step = 64;
constexpr int kInt8MaxRows = 4;

/// 64 weights, as unsigned numbers with an offset of 128: the dot-product instruction wants one
/// unsigned operand.
using Int8Weights = __m512i;
inline Int8Weights load_int8(const int8_t* w) {
  return _mm512_xor_si512(load_as<__m512i>(w), _mm512_set1_epi8(-128));
}

/// sum + scales * dot products of 4 columns a lane.
inline Float int8_step(Int8Weights w, const QuantizedRow& x, int64_t at, Float sum) {
  // 128 (w' . hi - codes) + w' . lo = (w' - 128) . codes, exactly: below 2^24 until the float
  // conversion.
  __m512i dot =
      _mm512_dpbusd_epi32(load_as<__m512i>(x.lane_sum + at / 4), w, load_as<__m512i>(x.hi + at));
  dot = _mm512_dpbusd_epi32(_mm512_slli_epi32(dot, 7), w, load_as<__m512i>(x.lo + at));
  return multiply_add(_mm512_cvtepi32_ps(dot), load(x.lane_scale + at / 4), sum);
}

#elif defined(__AVX2__)

constexpr int64_t kInt8Step = 32;
constexpr int kInt8MaxRows = 4;

struct Int8Weights {
  __m256i low, high;  // 16 columns each
};
inline Int8Weights load_int8(const int8_t* w) {
  return {_mm256_cvtepi8_epi16(load_as<__m128i>(w)),
          _mm256_cvtepi8_epi16(load_as<__m128i>(w + 16))};
}

inline Float int8_step(const Int8Weights& w, const QuantizedRow& x, int64_t at, Float sum) {
  const __m256i low = _mm256_madd_epi16(w.low, load_as<__m256i>(x.code + at));
  const __m256i high = _mm256_madd_epi16(w.high, load_as<__m256i>(x.code + at + 16));
  return multiply_add(_mm256_cvtepi32_ps(_mm256_add_epi32(low, high)), splat(x.scale[at / kBlock]),
                      sum);
}

#else

constexpr int64_t kInt8Step = 32;
constexpr int kInt8MaxRows = 1;

using Int8Weights = const int8_t*;
inline Int8Weights load_int8(const int8_t* w) {
  return w;
}

inline Float int8_step(Int8Weights w, const QuantizedRow& x, int64_t at, Float sum) {
  int32_t dot = 0;
  for (int i = 0; i < kInt8Step; ++i) dot += static_cast<int32_t>(w[i]) * x.code[at + i];
  sum[0] += static_cast<float>(dot) * x.scale[at / kBlock];
  return sum;
}

#endif

/// Dot products of one weight row with `kRows` activation rows, without the weight row's scale. Two
/// accumulators a row hide the latency of the multiply-adds.
template <int kRows>
inline void int8_dots(const int8_t* w, int64_t k, const QuantizedRow* x, float scale, float* out,
                      int64_t out_stride) {
  Float even[kRows] = {};
  Float odd[kRows] = {};
  const int64_t whole = k / kInt8Step * kInt8Step;
  int64_t at = 0;
  for (; at + kInt8Step < whole; at += 2 * kInt8Step) {
    const Int8Weights first = load_int8(w + at);
    const Int8Weights second = load_int8(w + at + kInt8Step);
    for (int m = 0; m < kRows; ++m) {
      even[m] = int8_step(first, x[m], at, even[m]);
      odd[m] = int8_step(second, x[m], at + kInt8Step, odd[m]);
    }
  }
  if (at < whole) {
    const Int8Weights last = load_int8(w + at);
    for (int m = 0; m < kRows; ++m) even[m] = int8_step(last, x[m], at, even[m]);
  }
  if (whole < k) {
    int8_t tail[kInt8Step] = {};
    memcpy(tail, w + whole, k - whole);
    const Int8Weights last = load_int8(tail);
    for (int m = 0; m < kRows; ++m) odd[m] = int8_step(last, x[m], whole, odd[m]);
  }
  for (int m = 0; m < kRows; ++m) out[m * out_stride] = scale * sum(even[m] + odd[m]);
}

inline void gemv_int8(const Weight& weight, int64_t begin, int64_t end, const QuantizedRow* x,
                      int rows, float* out, int64_t out_stride) {
  for (int64_t n = begin; n < end; ++n) {
    const int8_t* w = static_cast<const int8_t*>(weight.data) + n * weight.k;
    float* y = out + (n - begin);
    const float scale = weight.scales[n];
    int m = 0;
    if constexpr (kInt8MaxRows >= 4) {
      for (; m + 4 <= rows; m += 4)
        int8_dots<4>(w, weight.k, x + m, scale, y + m * out_stride, out_stride);
      for (; m + 2 <= rows; m += 2)
        int8_dots<2>(w, weight.k, x + m, scale, y + m * out_stride, out_stride);
    }
    for (; m < rows; ++m) int8_dots<1>(w, weight.k, x + m, scale, y + m * out_stride, out_stride);
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
