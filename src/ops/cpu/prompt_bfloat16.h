// Prompts in bfloat16 on CPUs with AVX512_BF16: products of many activation rows with a weight in
// any format.
//
// The instruction multiplies pairs of adjacent columns. A panel is 32 rows of the right-hand
// matrix as [pair of columns][32 rows], made once and then met by all activation rows, which are
// packed in blocks of 12 as [pair of columns][12 rows].
#pragma once

#include "ops/cpu/simd.h"

namespace gptfast::cpu::GPTFAST_ISA {

#if defined(__AVX512F__)

// This file's functions alone may use the instructions: CPUs without them share the other kernels.
#define GPTFAST_BF16 __attribute__((target("avx512bf16")))

constexpr int64_t kPairRows = kMaxPanelRows;
constexpr int kRowsAtOnce = kPackedRows;  // 24 accumulators of 32 registers
static_assert(kPairRows == 2 * kLanes && kPanelPairs * 2 % 256 == 0, "whole groups in a block");

/// r[j] lane i = what r[i] lane j was.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: columns c, 4 + c, 8 + c, 12 + c of 4 rows
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  constexpr int kEven = 0x88;  // quarters 0 and 2 of each operand
  constexpr int kOdd = 0xdd;
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], kEven);
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], kOdd);
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], kEven);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], kOdd);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], kEven);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], kOdd);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], kEven);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], kOdd);
  }
}

/// Calls put(pair, 16 rows of it) for the pairs of `columns` (a multiple of 32) columns, in order;
/// get(row, column): 32 values of a row. Rows from `rows` on are zero.
template <class Get, class Put>
inline void transpose_pairs(int64_t rows, int64_t columns, const Get& get, const Put& put) {
  for (int64_t c = 0; c < columns; c += kBlock) {
    __m512i tile[16];
    for (int64_t r = 0; r < 16; ++r) tile[r] = r < rows ? get(r, c) : _mm512_setzero_si512();
    transpose(tile);
    for (int64_t j = 0; j < 16; ++j) put(c / 2 + j, tile[j]);
  }
}

/// Packs x [rows, k], rows `stride` apart, k a multiple of 32; `row(m)` is where row m starts. The
/// 16 lanes of a store reach behind its 12 rows, into what the next one writes.
template <class Row>
inline void pack_blocks(int64_t rows, int64_t k, const Row& row, uint32_t* out) {
  for (int64_t m = 0; m < rows; m += kRowsAtOnce, out += kRowsAtOnce * k / 2) {
    const int64_t count = rows - m < kRowsAtOnce ? rows - m : kRowsAtOnce;
    transpose_pairs(
        count, k, [&](int64_t r, int64_t c) { return load_as<__m512i>(row(m + r) + c); },
        [&](int64_t pair, __m512i lanes) { store_as(out + pair * kRowsAtOnce, lanes); });
  }
}

inline void pack_rows(const uint16_t* x, int64_t rows, int64_t k, uint32_t* out) {
  pack_blocks(
      rows, k, [&](int64_t m) { return x + m * k; }, out);
}

/// Rows get(row, column) as a panel.
template <class Get>
inline void fill_pairs(int64_t rows, int64_t columns, uint32_t* panel, const Get& get) {
  for (int64_t first = 0; first < kPairRows; first += 16) {
    transpose_pairs(
        rows - first, columns, [&](int64_t r, int64_t c) { return get(first + r, c); },
        [&](int64_t pair, __m512i lanes) { store_as(panel + pair * kPairRows + first, lanes); });
  }
}

/// Numbers of 16-bit lanes: dword i is first + step i (low half) and second + step i.
inline __m512i pair_order(int first, int second, int step = 1) {
  constexpr Int kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (__m512i)((kLane * step + first) | (kLane * step + second) << 16);
}

/// 32 int8 weights; bfloat16 holds them exactly.
inline __m512i int8_as_bfloat16(const int8_t* w) {
  const auto halves = [&](int i) {
    return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(w + i)));
  };
  return _mm512_permutex2var_epi16(halves(0), pair_order(1, 3, /*step=*/4), halves(16));
}

/// Dwords of a bfloat16 of `first` (low half) and one of `second`.
GPTFAST_BF16 inline __m512i pair_up(Float first, Float second) {
  return _mm512_permutexvar_epi16(pair_order(0, 16), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/// `columns` columns of the int4 tile at `tile` from `first_column` on (a multiple of the
/// groupsize), as 16 of a panel's rows. Rounded to bfloat16, as the original's int4 kernels do.
template <class T>
GPTFAST_BF16 inline void fill_pairs_from_tile(const Weight& weight, const uint8_t* tile,
                                              int64_t first_column, int64_t columns,
                                              uint32_t* panel) {
  const int64_t group_bytes = 2 * kRowTile * static_cast<int64_t>(sizeof(T));
  const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  const uint8_t* w = tile + first_column / weight.groupsize * group_bytes +
                     first_column / kBlock * kInt4BlockBytes;
  Float scale{};
  Float zero{};
  for (int64_t c = 0; c < columns; c += kBlock) {
    if (c % weight.groupsize == 0) {
      scale = load(reinterpret_cast<const T*>(w));
      zero = load(reinterpret_cast<const T*>(w) + kRowTile);
      w += group_bytes;
    }
    for (int j = 0; j < 4; ++j, w += 64) {
      const __m512i codes = load_as<__m512i>(w);
      const auto column = [&](int shift) {  // the permutation looks at the 4 lowest bits alone
        const __m512i code = _mm512_srli_epi32(codes, shift);
        return multiply_add(_mm512_permutexvar_ps(code, values), scale, zero);
      };
      uint32_t* out = panel + (c / 2 + 4 * j) * kPairRows;
      store_as(out, pair_up(column(0), column(8)));
      store_as(out + kPairRows, pair_up(column(16), column(24)));
      store_as(out + 2 * kPairRows, pair_up(column(4), column(12)));
      store_as(out + 3 * kPairRows, pair_up(column(20), column(28)));
    }
  }
}

template <class T>
GPTFAST_BF16 inline void fill_pairs_from_tiles(const Weight& weight, int64_t row, int64_t column,
                                               int64_t columns, uint32_t* panel) {
  const Int4Shape shape(weight.k, weight.groupsize, sizeof(T));
  for (int64_t first = 0; first < kPairRows; first += kRowTile) {
    if (row + first >= weight.n) {
      for (int64_t p = 0; p < columns / 2; ++p)
        store_as(panel + p * kPairRows + first, _mm512_setzero_si512());
      continue;
    }
    const uint8_t* tile = static_cast<const uint8_t*>(weight.data) + kInt4HeaderBytes +
                          (row + first) / kRowTile * shape.tile_bytes;
    fill_pairs_from_tile<T>(weight, tile, column, columns, panel + first);
  }
}

/// Weights [row, row + 32) x [column, column + columns) as a panel, int8 without their scales.
GPTFAST_BF16 inline void fill_weight_pairs(const Weight& weight, int64_t row, int64_t column,
                                           int64_t columns, uint32_t* panel) {
  const int64_t rows = weight.n - row;
  const int64_t start = row * weight.k + column;
  if (weight.format == Format::kInt8) {
    const int8_t* w = static_cast<const int8_t*>(weight.data) + start;
    return fill_pairs(rows, columns, panel,
                      [&](int64_t r, int64_t c) { return int8_as_bfloat16(w + r * weight.k + c); });
  }
  if (weight.format == Format::kBFloat16) {
    const uint16_t* w = static_cast<const uint16_t*>(weight.data) + start;
    return fill_pairs(rows, columns, panel,
                      [&](int64_t r, int64_t c) { return load_as<__m512i>(w + r * weight.k + c); });
  }
  if (static_cast<const Int4Header*>(weight.data)->float32_scales != 0)
    return fill_pairs_from_tiles<float>(weight, row, column, columns, panel);
  fill_pairs_from_tiles<BFloat16>(weight, row, column, columns, panel);
}

/// One block of packed rows times a panel: begin(m, v) gives the sums' start, end(m, v, sum) takes
/// lanes 16 v ... 16 v + 15 of row m.
template <int kRows, class Begin, class End>
GPTFAST_BF16 inline void multiply_block(const uint32_t* x, const uint32_t* panel, int64_t pairs,
                                        const Begin& begin, const End& end) {
  __m512 sums[kRows][2];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < 2; ++v) sums[m][v] = begin(m, v);
  }
  for (int64_t p = 0; p < pairs; ++p, x += kRowsAtOnce, panel += kPairRows) {
    const auto low = load_as<__m512bh>(panel);
    const auto high = load_as<__m512bh>(panel + kLanes);
    for (int m = 0; m < kRows; ++m) {
      const auto activations = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x[m]));
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], activations, low);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], activations, high);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < 2; ++v) end(m, v, sums[m][v]);
  }
}

/// The same for `rows` packed rows, `k` columns of each of which are packed and `pairs` from
/// `first_pair` on used; begin and end also get rows behind the last one, up to a multiple of 4.
template <class Begin, class End>
GPTFAST_BF16 inline void multiply_rows(const uint32_t* x, int64_t rows, int64_t k,
                                       int64_t first_pair, const uint32_t* panel, int64_t pairs,
                                       const Begin& begin, const End& end) {
  x += first_pair * kRowsAtOnce;
  for (int64_t m = 0; m < rows; m += kRowsAtOnce, x += kRowsAtOnce * k / 2) {
    const auto from = [&](int64_t r, int v) { return begin(m + r, v); };
    const auto to = [&](int64_t r, int v, Float sum) { end(m + r, v, sum); };
    if (rows - m > 8) {
      multiply_block<kRowsAtOnce>(x, panel, pairs, from, to);
    } else if (rows - m > 4) {
      multiply_block<8>(x, panel, pairs, from, to);
    } else {
      multiply_block<4>(x, panel, pairs, from, to);
    }
  }
}

GPTFAST_BF16 inline void matmul_bfloat16(const Weight& weight, int64_t begin, int64_t end,
                                         const uint32_t* x, int64_t rows, uint16_t* out,
                                         float* sums, uint32_t* panel) {
  for (int64_t n = begin; n < end; n += kPairRows) {
    const int64_t count = end - n < kPairRows ? end - n : kPairRows;
    float scales[kPairRows];
    for (int64_t r = 0; r < kPairRows; ++r)
      scales[r] = weight.format == Format::kInt8 && r < count ? weight.scales[n + r] : 1;
    for (int64_t p = 0; p < weight.k / 2; p += kPanelPairs) {
      const int64_t left = weight.k / 2 - p;
      const bool last = left <= kPanelPairs;
      const int64_t pairs = last ? left : kPanelPairs;
      fill_weight_pairs(weight, n, 2 * p, 2 * pairs, panel);
      multiply_rows(
          x, rows, weight.k, p, panel, pairs,
          [&](int64_t m, int v) {
            return p > 0 ? load(sums + m * kPairRows + v * kLanes) : Float{};
          },
          [&](int64_t m, int v, Float sum) {
            if (!last) return store(sums + m * kPairRows + v * kLanes, sum);
            const int64_t lanes = count - v * kLanes < kLanes ? count - v * kLanes : kLanes;
            if (m >= rows || lanes <= 0) return;
            const Half rounded = round_to_bfloat16(sum * load(scales + v * kLanes));
            memcpy(out + m * weight.n + n + v * kLanes, &rounded, lanes * sizeof(uint16_t));
          });
    }
  }
}

#endif

}  // namespace gptfast::cpu::GPTFAST_ISA
