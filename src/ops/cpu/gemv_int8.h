// int8 weights, row-major with one scale a row.
#pragma once

#include "ops/cpu/quantize_activation.h"

namespace gptfast::cpu::GPTFAST_ISA {

#if defined(__AVX512F__)

constexpr int64_t kInt8Step = 64;
constexpr int kInt8WeightRows = 4;

/// 64 weights, as unsigned numbers with an offset of 128: the dot-product instruction wants one
/// unsigned operand.
using Int8Weights = __m512i;
inline Int8Weights load_int8(const int8_t* w) {
  return _mm512_xor_si512(load_as<__m512i>(w), _mm512_set1_epi8(-128));
}

struct Int8Activations {
  __m512i hi, lo, lane_sum;
  Float scale;

  Int8Activations(const char* row, const BlockMeta* /*meta*/, int64_t at) {
    const auto* chunk =
        reinterpret_cast<const Int8Chunk*>(row + at * static_cast<int64_t>(sizeof(Int8Chunk) / 64));
    hi = load_as<__m512i>(chunk->hi);
    lo = load_as<__m512i>(chunk->lo);
    lane_sum = load_as<__m512i>(chunk->lane_sum);
    scale = load(chunk->lane_scale);
  }
  /// sum + scales * dot products of 4 columns a lane.
  Float add_dot(Int8Weights w, Float sum) const {
    // 128 (w' . hi - codes) + w' . lo = (w' - 128) . codes, exact integers below 2^24.
    __m512i dot = _mm512_slli_epi32(_mm512_dpbusd_epi32(lane_sum, w, hi), 7);
    dot = _mm512_dpbusd_epi32(dot, w, lo);
    return multiply_add(_mm512_cvtepi32_ps(dot), scale, sum);
  }
};

#elif defined(__AVX2__)

constexpr int64_t kInt8Step = 32;
constexpr int kInt8WeightRows = 2;

struct Int8Weights {
  __m256i low, high;  // 16 columns each
};
inline Int8Weights load_int8(const int8_t* w) {
  return {_mm256_cvtepi8_epi16(load_as<__m128i>(w)),
          _mm256_cvtepi8_epi16(load_as<__m128i>(w + 16))};
}

struct Int8Activations {
  __m256i low, high;
  Float scale;

  Int8Activations(const char* row, const BlockMeta* meta, int64_t at) {
    const auto& codes = reinterpret_cast<const BlockCodes*>(row)[at / kBlock];
    low = load_as<__m256i>(codes.whole);
    high = load_as<__m256i>(codes.whole + 16);
    scale = splat(meta[at / kBlock].scale);
  }
  Float add_dot(const Int8Weights& w, Float sum) const {
    const __m256i dot =
        _mm256_add_epi32(_mm256_madd_epi16(w.low, low), _mm256_madd_epi16(w.high, high));
    return multiply_add(_mm256_cvtepi32_ps(dot), scale, sum);
  }
};

#else

constexpr int64_t kInt8Step = 32;
constexpr int kInt8WeightRows = 1;

using Int8Weights = const int8_t*;
inline Int8Weights load_int8(const int8_t* w) {
  return w;
}

struct Int8Activations {
  const int16_t* codes;
  float scale;

  Int8Activations(const char* row, const BlockMeta* meta, int64_t at)
      : codes(reinterpret_cast<const BlockCodes*>(row)[at / kBlock].whole),
        scale(meta[at / kBlock].scale) {}
  Float add_dot(Int8Weights w, Float sum) const {
    int32_t dot = 0;
    for (int i = 0; i < kInt8Step; ++i) dot += static_cast<int32_t>(w[i]) * codes[i];
    sum[0] += static_cast<float>(dot) * scale;
    return sum;
  }
};

#endif

/// Dot products of `kWeights` adjacent weight rows with one activation row. Two accumulators a
/// weight row hide the latency of the multiply-adds.
template <int kWeights>
inline void int8_dots(const int8_t* w, int64_t k, const char* row, const BlockMeta* meta,
                      const float* scales, float* out) {
  Float even[kWeights] = {};
  Float odd[kWeights] = {};
  const auto step = [&](const int8_t* weights, int64_t weight_stride, int64_t at, Float* sums) {
    const Int8Activations x(row, meta, at);
    for (int n = 0; n < kWeights; ++n) {
      prefetch_ahead<kWeights>(weights + n * weight_stride, k);
      sums[n] = x.add_dot(load_int8(weights + n * weight_stride), sums[n]);
    }
  };
  const int64_t whole = k / kInt8Step * kInt8Step;
  int64_t at = 0;
  for (; at + kInt8Step < whole; at += 2 * kInt8Step) {
    step(w + at, k, at, even);
    step(w + at + kInt8Step, k, at + kInt8Step, odd);
  }
  if (at < whole) step(w + at, k, at, even);
  if (whole < k) {
    int8_t tail[kWeights][kInt8Step] = {};
    for (int n = 0; n < kWeights; ++n) memcpy(tail[n], w + n * k + whole, k - whole);
    step(tail[0], kInt8Step, whole, odd);
  }
  for (int n = 0; n < kWeights; ++n) out[n] = scales[n] * sum(even[n] + odd[n]);
}

inline void gemv_int8(const Weight& weight, int64_t begin, int64_t end, const QuantizedRows& x,
                      int rows, float* out, int64_t out_stride) {
  const int8_t* w = static_cast<const int8_t*>(weight.data) + begin * weight.k;
  const auto meta = [&](int m) {
    return reinterpret_cast<const BlockMeta*>(x.row(m) + x.layout.meta);
  };
  int64_t n = begin;
  if (rows > 1) {  // bound by arithmetic, not by the stream: use the activations in registers
                   // several times
    for (; n + kInt8WeightRows <= end; n += kInt8WeightRows, w += kInt8WeightRows * weight.k) {
      for (int m = 0; m < rows; ++m) {
        int8_dots<kInt8WeightRows>(w, weight.k, x.row(m), meta(m), weight.scales + n,
                                   out + m * out_stride + (n - begin));
      }
    }
  }
  for (; n < end; ++n, w += weight.k) {
    for (int m = 0; m < rows; ++m) {
      int8_dots<1>(w, weight.k, x.row(m), meta(m), weight.scales + n,
                   out + m * out_stride + (n - begin));
    }
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
