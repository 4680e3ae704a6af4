// int4 weights in tiles of 16 rows (see Int4Header): w = (q - 8) * scale + zero, a scale and a zero
// for each group of columns.
#pragma once

#include "ops/cpu/quantize_activation.h"

namespace gptfast::cpu::GPTFAST_ISA {

constexpr int kTileVectors = kRowTile / kLanes;  // vectors of 16 rows
constexpr int64_t kBlockBytes = kRowTile * kBlock / 2;
#if defined(__AVX512F__)
constexpr int kInt4MaxRows = 4;
#elif defined(__AVX2__)
constexpr int kInt4MaxRows = 2;
#else
constexpr int kInt4MaxRows = 1;
#endif

#if defined(__AVX512F__)

/// The codes 0..15 of 16 rows and 32 columns, 4 columns a lane.
struct Int4Block {
  __m512i quad[8];
};
inline Int4Block load_int4(const uint8_t* w, int /*vector*/) {
  const __m512i mask = _mm512_set1_epi8(15);
  Int4Block block;
  for (int j = 0; j < 4; ++j) {
    const __m512i pair = load_as<__m512i>(w + 64 * j);
    block.quad[2 * j] = _mm512_and_si512(pair, mask);
    block.quad[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), mask);
  }
  return block;
}

inline __m512i four_columns(const int8_t* x) {
  return _mm512_set1_epi32(load_as<int32_t>(x));
}

/// Dot products with the codes of one activation block, exactly.
inline Int int4_dot(const Int4Block& w, const QuantizedRow& x, int64_t b) {
  const int8_t* hi = x.hi + b * kBlock;
  const int8_t* lo = x.lo + b * kBlock;
  __m512i hi0 = _mm512_setzero_si512();
  __m512i hi1 = _mm512_setzero_si512();
  __m512i lo0 = _mm512_set1_epi32(x.sum[b]);
  __m512i lo1 = _mm512_setzero_si512();
  for (int j = 0; j < 8; j += 2) {
    hi0 = _mm512_dpbusd_epi32(hi0, w.quad[j], four_columns(hi + 4 * j));
    hi1 = _mm512_dpbusd_epi32(hi1, w.quad[j + 1], four_columns(hi + 4 * j + 4));
    lo0 = _mm512_dpbusd_epi32(lo0, w.quad[j], four_columns(lo + 4 * j));
    lo1 = _mm512_dpbusd_epi32(lo1, w.quad[j + 1], four_columns(lo + 4 * j + 4));
  }
  return (Int)_mm512_add_epi32(_mm512_slli_epi32(_mm512_add_epi32(hi0, hi1), 7),
                               _mm512_add_epi32(lo0, lo1));
}

#elif defined(__AVX2__)

struct Int4Block {
  __m256i quad[8];
};
inline Int4Block load_int4(const uint8_t* w, int vector) {
  const __m256i mask = _mm256_set1_epi8(15);
  Int4Block block;
  for (int j = 0; j < 4; ++j) {
    const __m256i pair = load_as<__m256i>(w + 64 * j + 32 * vector);
    block.quad[2 * j] = _mm256_and_si256(pair, mask);
    block.quad[2 * j + 1] = _mm256_and_si256(_mm256_srli_epi16(pair, 4), mask);
  }
  return block;
}

/// Sums of 4 columns a lane. 16 bits hold the sum of 8 quads' pairs: 8 * 2 * 15 * 127 = 30480.
inline __m256i int4_quads(const Int4Block& w, const int8_t* x) {
  __m256i sum = _mm256_maddubs_epi16(w.quad[0], _mm256_set1_epi32(load_as<int32_t>(x)));
  for (int j = 1; j < 8; ++j) {
    sum =
        _mm256_add_epi16(sum, _mm256_maddubs_epi16(w.quad[j],
                                                   _mm256_set1_epi32(load_as<int32_t>(x + 4 * j))));
  }
  return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

inline Int int4_dot(const Int4Block& w, const QuantizedRow& x, int64_t b) {
  const __m256i hi = _mm256_slli_epi32(int4_quads(w, x.hi + b * kBlock), 7);
  const __m256i lo = int4_quads(w, x.lo + b * kBlock);
  return (Int)_mm256_add_epi32(_mm256_add_epi32(hi, lo), _mm256_set1_epi32(x.sum[b]));
}

#else

struct Int4Block {
  const uint8_t* rows;  // of this vector
};
inline Int4Block load_int4(const uint8_t* w, int vector) {
  return {w + 4 * kLanes * vector};
}

inline Int int4_dot(const Int4Block& w, const QuantizedRow& x, int64_t b) {
  Int dots = x.sum[b] - Int{};
  for (int r = 0; r < kLanes; ++r) {
    int32_t dot = 0;
    for (int j = 0; j < 4; ++j) {
      const uint8_t* pair = w.rows + 64 * j + 4 * r;
      const int16_t* code = x.code + b * kBlock + 8 * j;
      for (int i = 0; i < 4; ++i) dot += (pair[i] & 15) * code[i] + (pair[i] >> 4) * code[4 + i];
    }
    dots[r] += dot;
  }
  return dots;
}

#endif

/// One tile times `kRows` activation rows. T: how scales and zeros are stored.
template <int kRows, class T>
inline void int4_tile(const Weight& weight, const uint8_t* w, const QuantizedRow* x, float* out,
                      int64_t out_stride) {
  Float sums[kRows][kTileVectors] = {};
  const int64_t blocks = (weight.k + kBlock - 1) / kBlock;
  const int64_t group_blocks = weight.groupsize / kBlock;
  for (int64_t b = 0, g = 0; b < blocks; ++g) {
    const T* scales = reinterpret_cast<const T*>(w);
    w += 2 * kRowTile * sizeof(T);
    Float group[kRows][kTileVectors] = {};
    const int64_t end = b + group_blocks < blocks ? b + group_blocks : blocks;
    for (; b < end; ++b, w += kBlockBytes) {
      for (int v = 0; v < kTileVectors; ++v) {
        const Int4Block block = load_int4(w, v);
        for (int m = 0; m < kRows; ++m) {
          const Float dots = __builtin_convertvector(int4_dot(block, x[m], b), Float);
          group[m][v] = multiply_add(dots, splat(x[m].scale[b]), group[m][v]);
        }
      }
    }
    for (int v = 0; v < kTileVectors; ++v) {
      const Float scale = load(scales + v * kLanes);
      const Float zero = load(scales + kRowTile + v * kLanes);
      for (int m = 0; m < kRows; ++m) {
        sums[m][v] = multiply_add(scale, group[m][v], sums[m][v]);
        sums[m][v] = multiply_add(zero, splat(x[m].group_sum[g]), sums[m][v]);
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kTileVectors; ++v) store(out + m * out_stride + v * kLanes, sums[m][v]);
  }
}

template <class T>
void gemv_int4(const Weight& weight, int64_t begin, int64_t end, const QuantizedRow* x, int rows,
               float* out, int64_t out_stride) {
  const int64_t groups = groups_of(Format::kInt4, weight.k, weight.groupsize);
  const int64_t blocks = (weight.k + kBlock - 1) / kBlock;
  const int64_t tile_bytes =
      groups * 2 * kRowTile * static_cast<int64_t>(sizeof(T)) + blocks * kBlockBytes;
  const uint8_t* w =
      static_cast<const uint8_t*>(weight.data) + kInt4HeaderBytes + begin / kRowTile * tile_bytes;
  for (int64_t n = begin; n < end; n += kRowTile, w += tile_bytes) {
    float* y = out + (n - begin);
    int m = 0;
    if constexpr (kInt4MaxRows >= 4) {
      for (; m + 4 <= rows; m += 4)
        int4_tile<4, T>(weight, w, x + m, y + m * out_stride, out_stride);
    }
    if constexpr (kInt4MaxRows >= 2) {
      for (; m + 2 <= rows; m += 2)
        int4_tile<2, T>(weight, w, x + m, y + m * out_stride, out_stride);
    }
    for (; m < rows; ++m) int4_tile<1, T>(weight, w, x + m, y + m * out_stride, out_stride);
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
