// Activations of the int8 and int4 kernels: 15 bits with a scale per 32 columns.
//
// A code q = round(x / s), |q| <= 16256, enters 8-bit dot products as q = 128 hi + lo with hi in
// [-127, 127] and lo in
// [-64, 63]. This rounds 2^7 times finer than bfloat16 does, and one large column spoils only its
// own block.
#pragma once

#include "ops/cpu/simd.h"

namespace gptfast::cpu::GPTFAST_ISA {

constexpr float kLargestCode = 16256;  // 128 * 127
constexpr int64_t kColumnMultiple =
    64;  // activations are padded with zeros to it: no kernel takes more in one step
constexpr int kBlockVectors = kBlock / kLanes;

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// One activation row as the kernels read it. Each instruction set fills what its kernels use.
struct QuantizedRow {
  int16_t* code;  // [columns]
  int8_t* hi;     // [columns]
  int8_t* lo;     // [columns]
  float* scale;   // [blocks]
  int32_t*
      sum;  // [blocks] -8 times the sum of the codes: int4 codes are stored with an offset of 8
  float* group_sum;   // [groups] sum of the activations that meet an int4 zero point
  float* lane_scale;  // [columns / 4] the block's scale, for each 4 columns of an AVX-512 lane
  int32_t* lane_sum;  // [columns / 4] minus the sum of the lane's 4 codes

  /// Points into `memory` (64-byte aligned); returns the end.
  char* place(void* memory, int64_t k, int64_t groups) {
    const int64_t columns = round_up(k, kColumnMultiple);
    char* next = static_cast<char*>(memory);
    const auto take = [&](int64_t bytes) {
      char* start = next;
      next += round_up(bytes, 64);
      return start;
    };
    code = reinterpret_cast<int16_t*>(take(columns * 2));
    hi = reinterpret_cast<int8_t*>(take(columns));
    lo = reinterpret_cast<int8_t*>(take(columns));
    scale = reinterpret_cast<float*>(take(columns / kBlock * 4));
    sum = reinterpret_cast<int32_t*>(take(columns / kBlock * 4));
    group_sum = reinterpret_cast<float*>(take(groups * 4));
    lane_scale = reinterpret_cast<float*>(take(columns));
    lane_sum = reinterpret_cast<int32_t*>(take(columns));
    return next;
  }
};

inline int64_t groups_of(Format format, int64_t k, int64_t groupsize) {
  return format == Format::kInt4 ? (k + groupsize - 1) / groupsize : 0;
}

/// Quantizes the 32 columns of block `b`; returns the sum of the unquantized ones.
inline float quantize_block(const float* x, int64_t b, const QuantizedRow& row) {
  Float v[kBlockVectors];
  Float largest{};
  Float total{};
  for (int i = 0; i < kBlockVectors; ++i) {
    v[i] = load(x + b * kBlock + i * kLanes);
    largest = max(abs(v[i]), largest);
    total += v[i];
  }
  const float block_sum = gptfast::cpu::GPTFAST_ISA::sum(total);
  const float most = max_lane(largest);
  const float inverse = most > 0 ? kLargestCode / most : 0;
  row.scale[b] = most * (1 / kLargestCode) +
                 0 * block_sum;  // NaN if any column is infinite or NaN, which integers cannot say
  Int sums{};
  for (int i = 0; i < kBlockVectors; ++i) {
    const Int code = __builtin_convertvector(round(v[i] * inverse), Int);
    const int64_t at = b * kBlock + i * kLanes;
    sums += code;
#if defined(__AVX2__)
    const Int hi = (code + 64) >> 7;
    store_as(row.hi + at, __builtin_convertvector(hi, Byte));
    store_as(row.lo + at, __builtin_convertvector(code - (hi << 7), Byte));
#endif
#if !defined(__AVX512F__)
    store_as(row.code + at, __builtin_convertvector(code, Half));
#endif
  }
#if defined(__AVX512F__)
  const __m256i ones = _mm256_set1_epi8(1);
  const __m256i hi =
      _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, load_as<__m256i>(row.hi + b * kBlock));
  const __m256i lo =
      _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, load_as<__m256i>(row.lo + b * kBlock));
  const __m256i quads = _mm256_add_epi32(_mm256_slli_epi32(hi, 7), lo);
  store_as(row.lane_sum + b * kBlock / 4, _mm256_sub_epi32(_mm256_setzero_si256(), quads));
  store_as(row.lane_scale + b * kBlock / 4, _mm256_set1_ps(row.scale[b]));
  row.sum[b] = -8 * _mm512_reduce_add_epi32((__m512i)sums);
#else
  int32_t block = 0;
  for (int i = 0; i < kLanes; ++i) block += sums[i];
  row.sum[b] = -8 * block;
#endif
  return block_sum;
}

/// Quantizes x [round_up(k, kColumnMultiple), zero behind k].
inline void quantize_activation(Format format, const float* x, int64_t k, int64_t groupsize,
                                const QuantizedRow& row) {
  const int64_t blocks = round_up(k, kColumnMultiple) / kBlock;
  for (int64_t g = 0; g < groups_of(format, k, groupsize); ++g) row.group_sum[g] = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const float block_sum = quantize_block(x, b, row);
    if (format == Format::kInt4 && b * kBlock < k)
      row.group_sum[b * kBlock / groupsize] += block_sum;
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
