// int4 weights in tiles of 16 rows (see Int4Header): w = (q - 8) * scale + zero, a scale and a zero
// for each group of columns.
#pragma once

#include "ops/cpu/quantize_activation.h"

namespace gptfast::cpu::GPTFAST_ISA {

constexpr int kTileVectors = kRowTile / kLanes;  // vectors of 16 rows

#if defined(__AVX512F__)

/// 16 rows of 8 columns: the codes 0..15 of the first four and of the last four, a row a lane.
struct Int4Codes {
  __m512i first, last;

  Int4Codes(const uint8_t* w, int /*vector*/) {
    const __m512i pair = load_as<__m512i>(w);
    first = _mm512_and_si512(pair, _mm512_set1_epi8(15));
    last = _mm512_and_si512(_mm512_srli_epi16(pair, 4), _mm512_set1_epi8(15));
  }
};

/// Dot products of one block with one activation row, exact. Four sums hide the instruction's
/// latency.
class Int4Dot {
 public:
  explicit Int4Dot(int32_t start = 0) : lo_first_(_mm512_set1_epi32(start)) {}
  void add(const Int4Codes& w, const BlockCodes& x, int j) {
    hi_first_ = _mm512_dpbusd_epi32(hi_first_, w.first, four_columns(x.hi + 8 * j));
    hi_last_ = _mm512_dpbusd_epi32(hi_last_, w.last, four_columns(x.hi + 8 * j + 4));
    lo_first_ = _mm512_dpbusd_epi32(lo_first_, w.first, four_columns(x.lo + 8 * j));
    lo_last_ = _mm512_dpbusd_epi32(lo_last_, w.last, four_columns(x.lo + 8 * j + 4));
  }
  Float total() const {
    const __m512i hi = _mm512_slli_epi32(_mm512_add_epi32(hi_first_, hi_last_), 7);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(hi, _mm512_add_epi32(lo_first_, lo_last_)));
  }

 private:
  static __m512i four_columns(const int8_t* x) { return _mm512_set1_epi32(load_as<int32_t>(x)); }
  __m512i hi_first_ = _mm512_setzero_si512();
  __m512i hi_last_ = _mm512_setzero_si512();
  __m512i lo_first_;
  __m512i lo_last_ = _mm512_setzero_si512();
};

#elif defined(__AVX2__)

struct Int4Codes {
  __m256i first, last;

  Int4Codes(const uint8_t* w, int vector) {
    const __m256i pair = load_as<__m256i>(w + 32 * vector);
    first = _mm256_and_si256(pair, _mm256_set1_epi8(15));
    last = _mm256_and_si256(_mm256_srli_epi16(pair, 4), _mm256_set1_epi8(15));
  }
};

/// Sums of two columns stay in 16 bits for a whole block: 8 * 2 * 15 * 127 = 30480.
class Int4Dot {
 public:
  explicit Int4Dot(int32_t start = 0) : start_(start) {}
  void add(const Int4Codes& w, const BlockCodes& x, int j) {
    hi_ = add_quads(hi_, w, x.hi + 8 * j);
    lo_ = add_quads(lo_, w, x.lo + 8 * j);
  }
  Float total() const {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i hi = _mm256_slli_epi32(_mm256_madd_epi16(hi_, ones), 7);
    const __m256i lo = _mm256_add_epi32(_mm256_madd_epi16(lo_, ones), _mm256_set1_epi32(start_));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(hi, lo));
  }

 private:
  static __m256i add_quads(__m256i sum, const Int4Codes& w, const int8_t* x) {
    const __m256i first = _mm256_maddubs_epi16(w.first, _mm256_set1_epi32(load_as<int32_t>(x)));
    const __m256i last = _mm256_maddubs_epi16(w.last, _mm256_set1_epi32(load_as<int32_t>(x + 4)));
    return _mm256_add_epi16(sum, _mm256_add_epi16(first, last));
  }
  int32_t start_;
  __m256i hi_ = _mm256_setzero_si256();
  __m256i lo_ = _mm256_setzero_si256();
};

#else

struct Int4Codes {
  Int first[4];  // by column, a row a lane
  Int last[4];

  Int4Codes(const uint8_t* w, int vector) {
    const Uint rows = load_as<Uint>(w + 4 * kLanes * vector);
    for (int i = 0; i < 4; ++i) {
      first[i] = (Int)(rows >> (8 * i) & 15u);
      last[i] = (Int)(rows >> (8 * i + 4) & 15u);
    }
  }
};

/// In floats, whose 24 bits hold the sum of a block exactly: the baseline has no 32-bit integer
/// multiplication.
class Int4Dot {
 public:
  explicit Int4Dot(int32_t start = 0) : sum_(splat(static_cast<float>(start))) {}
  void add(const Int4Codes& w, const BlockCodes& x, int j) {
    for (int i = 0; i < 4; ++i) {
      sum_ += __builtin_convertvector(w.first[i], Float) * static_cast<float>(x.whole[8 * j + i]);
      sum_ +=
          __builtin_convertvector(w.last[i], Float) * static_cast<float>(x.whole[8 * j + 4 + i]);
    }
  }
  Float total() const { return sum_; }

 private:
  Float sum_;
};

#endif

/// One tile times `kRows` activation rows from the first_row-th on. T: how scales and zeros are
/// stored.
template <int kRows, class T>
inline void int4_tile(const Weight& weight, const uint8_t* w, const QuantizedRows& x, int first_row,
                      float* out, int64_t out_stride) {
  const char* rows = x.row(first_row);
  const auto codes = [&](int m, int64_t b) -> const BlockCodes& {
    return reinterpret_cast<const BlockCodes*>(rows + m * x.stride)[b];
  };
  const auto meta = [&](int m, int64_t b) -> const BlockMeta& {
    return reinterpret_cast<const BlockMeta*>(rows + m * x.stride + x.layout.meta)[b];
  };
  const auto group_sum = [&](int m, int64_t g) {
    return reinterpret_cast<const float*>(rows + m * x.stride + x.layout.group_sums)[g];
  };
  Float sums[kRows][kTileVectors] = {};
  const int64_t blocks = (weight.k + kBlock - 1) / kBlock;
  const int64_t group_blocks = weight.groupsize / kBlock;
  for (int64_t b = 0, g = 0; b < blocks; ++g) {
    const T* scales = reinterpret_cast<const T*>(w);
    w += 2 * kRowTile * sizeof(T);
    Float group[kRows][kTileVectors] = {};
    const int64_t end = b + group_blocks < blocks ? b + group_blocks : blocks;
    for (; b < end; ++b, w += kInt4BlockBytes) {
      for (int64_t line = 0; line < kInt4BlockBytes; line += 64) prefetch_ahead<1>(w + line, 0);
#pragma GCC unroll 1  // unrolled, GCC keeps the activations of both vectors and spills them
      for (int v = 0; v < kTileVectors; ++v) {
        Int4Dot dots[kRows];
        for (int m = 0; m < kRows; ++m) dots[m] = Int4Dot(meta(m, b).sum);
        for (int j = 0; j < 4; ++j) {
          const Int4Codes weights(w + 64 * j, v);
          for (int m = 0; m < kRows; ++m) dots[m].add(weights, codes(m, b), j);
        }
        for (int m = 0; m < kRows; ++m) {
          group[m][v] = multiply_add(dots[m].total(), splat(meta(m, b).scale), group[m][v]);
        }
      }
    }
    for (int v = 0; v < kTileVectors; ++v) {
      const Float scale = load(scales + v * kLanes);
      const Float zero = load(scales + kRowTile + v * kLanes);
      for (int m = 0; m < kRows; ++m) {
        sums[m][v] = multiply_add(scale, group[m][v], sums[m][v]);
        sums[m][v] = multiply_add(zero, splat(group_sum(m, g)), sums[m][v]);
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kTileVectors; ++v) store(out + m * out_stride + v * kLanes, sums[m][v]);
  }
}

template <class T>
void gemv_int4(const Weight& weight, int64_t begin, int64_t end, const QuantizedRows& x, int rows,
               float* out, int64_t out_stride) {
  const int64_t tile_bytes = Int4Shape(weight.k, weight.groupsize, sizeof(T)).tile_bytes;
  const uint8_t* w =
      static_cast<const uint8_t*>(weight.data) + kInt4HeaderBytes + begin / kRowTile * tile_bytes;
  for (int64_t n = begin; n < end; n += kRowTile, w += tile_bytes) {
    float* y = out + (n - begin);
    int m = 0;
    for (; m + 2 <= rows; m += 2) {
      int4_tile<2, T>(weight, w, x, m, y + m * out_stride, out_stride);
    }
    if (m < rows) int4_tile<1, T>(weight, w, x, m, y + m * out_stride, out_stride);
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
