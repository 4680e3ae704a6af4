// Products of many activation rows with a weight in any format, for prompts and evaluation: panels
// of weight rows are turned into float32 once and meet all activation rows in registers.
#pragma once

#include "ops/cpu/quantize_activation.h"

namespace gptfast::cpu::GPTFAST_ISA {

constexpr int kPanelVectors = 2;
constexpr int64_t kPanelRows = kPanelVectors * kLanes;  // weight rows of a panel
#if defined(__AVX512F__)
constexpr int kPanelActivations = 12;  // 24 accumulators of 32 registers
#else
constexpr int kPanelActivations = 6;  // 12 of 16
#endif
static_assert(kPanelRows <= kMaxPanelRows && kPanelColumns % 256 == 0,
              "a block holds whole groups");

/// panel[c][r] = weight[first_row + r][first_column + c], zero behind the last row; `get` loads
/// kLanes weights of a row.
template <class T, class Get>
inline void fill_from_rows(const Weight& weight, int64_t first_row, int64_t first_column,
                           int64_t columns, float* panel, const Get& get) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t count = columns - c < kLanes ? columns - c : kLanes;
    float tile[kPanelRows][kLanes];
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const bool real = first_row + r < weight.n;
      const T* from =
          static_cast<const T*>(weight.data) + (first_row + r) * weight.k + first_column + c;
      if (real && count == kLanes) {
        store(tile[r], get(from, r));
      } else {
        T tail[kLanes] = {};
        if (real) memcpy(tail, from, count * sizeof(T));
        store(tile[r], get(tail, real ? r : 0));
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < kPanelRows; ++r) panel[(c + i) * kPanelRows + r] = tile[r][i];
    }
  }
}

/// The same from int4 tiles, in which a register of 4-byte lanes is 4 columns of kLanes rows.
template <class T>
inline void fill_from_tiles(const Weight& weight, int64_t first_row, int64_t first_column,
                            int64_t columns, float* panel) {
  const Int4Shape shape(weight.k, weight.groupsize, sizeof(T));
  for (int v = 0; v < kPanelVectors; ++v) {
    const int64_t row = first_row + v * kLanes;
    float* out = panel + v * kLanes;
    if (row >= weight.n) {  // no tile there
      for (int64_t c = 0; c < columns; ++c) store(out + c * kPanelRows, Float{});
      continue;
    }
    const uint8_t* tile = static_cast<const uint8_t*>(weight.data) + kInt4HeaderBytes +
                          row / kRowTile * shape.tile_bytes;
    const int64_t lane = row % kRowTile;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t column = first_column + c;
      const int64_t group = column / weight.groupsize;
      const int64_t block = column / kBlock;
      const auto* scales = reinterpret_cast<const T*>(
          tile + group * shape.group_bytes + group * weight.groupsize / kBlock * kInt4BlockBytes);
      const uint8_t* codes = tile + (group + 1) * shape.group_bytes + block * kInt4BlockBytes +
                             column % kBlock / 8 * 64 + 4 * lane;
      const auto shift = static_cast<uint32_t>(column % 4 * 8 + column % 8 / 4 * 4);
      const Float code =
          __builtin_convertvector((Int)(load_as<Uint>(codes) >> shift & 15u), Float) - 8;
      store(out + c * kPanelRows,
            multiply_add(code, load(scales + lane), load(scales + kRowTile + lane)));
    }
  }
}

inline void fill_panel(const Weight& weight, int64_t row, int64_t column, int64_t columns,
                       float* panel) {
  const auto plain = [](const auto* p, int64_t /*row*/) { return load(p); };
  switch (weight.format) {
    case Format::kFloat32:
      return fill_from_rows<float>(weight, row, column, columns, panel, plain);
    case Format::kBFloat16:
      return fill_from_rows<BFloat16>(weight, row, column, columns, panel, plain);
    case Format::kFloat16:
      return fill_from_rows<Float16>(weight, row, column, columns, panel, plain);
    case Format::kInt8:
      return fill_from_rows<int8_t>(weight, row, column, columns, panel,
                                    [&](const int8_t* p, int64_t r) {
                                      return __builtin_convertvector(load_as<Byte>(p), Float) *
                                             weight.scales[row + r];
                                    });
    case Format::kInt4:
      if (static_cast<const Int4Header*>(weight.data)->float32_scales != 0) {
        return fill_from_tiles<float>(weight, row, column, columns, panel);
      }
      return fill_from_tiles<BFloat16>(weight, row, column, columns, panel);
  }
}

/// out[m][r] (+)= sum over columns of x[m][c] panel[c][r], for `rows` <= kPanelRows weight rows.
template <int kRows>
inline void multiply_panel(const float* x, int64_t x_stride, const float* panel, int64_t columns,
                           int64_t rows, bool add, float* out, int64_t out_stride) {
  Float sums[kRows][kPanelVectors] = {};
  for (int64_t c = 0; c < columns; ++c) {
    Float weights[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) weights[v] = load(panel + c * kPanelRows + v * kLanes);
    for (int m = 0; m < kRows; ++m) {
      const Float activation = splat(x[m * x_stride + c]);
      for (int v = 0; v < kPanelVectors; ++v)
        sums[m][v] = multiply_add(activation, weights[v], sums[m][v]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t lanes = rows - v * kLanes < kLanes ? rows - v * kLanes : kLanes;
      if (lanes <= 0) continue;
      float* y = out + m * out_stride + v * kLanes;
      const Float before = !add ? Float{} : lanes == kLanes ? load(y) : load_first(y, lanes);
      if (lanes == kLanes) {
        store(y, before + sums[m][v]);
      } else {
        store_first(y, before + sums[m][v], lanes);
      }
    }
  }
}

/// out[m][n] = dot(weight row n, x row m) for n in [begin, end); `panel` holds kPanelColumns *
/// kMaxPanelRows floats.
inline void matmul(const Weight& weight, int64_t begin, int64_t end, const float* x, int64_t rows,
                   float* out, int64_t out_stride, float* panel) {
  for (int64_t n = begin; n < end; n += kPanelRows) {
    const int64_t panel_rows = end - n < kPanelRows ? end - n : kPanelRows;
    for (int64_t k = 0; k < weight.k; k += kPanelColumns) {
      const int64_t columns = weight.k - k < kPanelColumns ? weight.k - k : kPanelColumns;
      fill_panel(weight, n, k, columns, panel);
      int64_t m = 0;
      for (; m + kPanelActivations <= rows; m += kPanelActivations) {
        multiply_panel<kPanelActivations>(x + m * weight.k + k, weight.k, panel, columns,
                                          panel_rows, k > 0, out + m * out_stride + n, out_stride);
      }
      for (; m < rows; ++m) {
        multiply_panel<1>(x + m * weight.k + k, weight.k, panel, columns, panel_rows, k > 0,
                          out + m * out_stride + n, out_stride);
      }
    }
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
