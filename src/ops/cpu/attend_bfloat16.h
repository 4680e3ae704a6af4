// Prompts in bfloat16 on CPUs with AVX512_BF16: attention of many queries that share one key/value
// head, as products of panels of keys and values, with a softmax over kPromptSplit positions at a
// time.
#pragma once

#include "ops/cpu/prompt_bfloat16.h"

namespace gptfast::cpu::GPTFAST_ISA {

#if defined(__AVX512F__)

/// The buffers of attend_prompt, one after the other in its scratch memory.
struct PromptBuffers {
  explicit PromptBuffers(const PromptAttendArgs& args) {
    const int64_t rows = args.tokens * args.heads;
    const int64_t padded = (rows + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
    auto* const start = static_cast<char*>(args.scratch);  // null: only the sizes are asked for
    const auto take = [&](auto*& buffer, int64_t count) {
      constexpr int64_t kLine = 64;
      using Pointer = decltype(buffer + 0);
      buffer = start == nullptr ? nullptr : reinterpret_cast<Pointer>(start + bytes);
      // A vector behind the end is for the last store of pack_rows.
      bytes += (count * static_cast<int64_t>(sizeof(*buffer)) + 2 * kLine - 1) / kLine * kLine;
    };
    take(queries, padded * args.head_dim / 2);
    take(scores, padded * kPromptSplit);
    take(weights, rows * kPromptSplit);
    take(packed_weights, padded * kPromptSplit / 2);
    take(sums, padded * args.head_dim);
    take(most, rows);
    take(total, rows);
    const int64_t longest = args.head_dim > kPromptSplit ? args.head_dim : kPromptSplit;
    take(panel, longest / 2 * kPairRows);
  }
  uint32_t* queries;
  float* scores;      // [padded rows, kPromptSplit]
  uint16_t* weights;  // [rows, kPromptSplit] or fewer columns
  uint32_t* packed_weights;
  float* sums;  // [padded rows, head_dim], of weighted values
  float* most;  // [rows], the greatest score so far
  float* total;
  uint32_t* panel;
  int64_t bytes = 0;
};

inline size_t attend_prompt_bytes(const PromptAttendArgs& args) {
  return static_cast<size_t>(PromptBuffers(args).bytes);
}

/// weights [columns] = exp(scores - the greatest score so far) of the first `valid` positions, 0
/// behind; what row m had summed before is scaled to the new greatest one.
GPTFAST_BF16 inline void weigh_row(const PromptBuffers& buffers, int64_t m, int64_t valid,
                                   int64_t columns, int64_t head_dim, float scale) {
  float* scores = buffers.scores + m * kPromptSplit;
  uint16_t* weights = buffers.weights + m * columns;
  const auto real = [&](int64_t i) {
    const int64_t left = valid - i;
    return static_cast<__mmask16>(left >= kLanes ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
  };
  Float largest = splat(buffers.most[m]);
  for (int64_t i = 0; i < valid; i += kLanes) {
    const Float v = load(scores + i) * scale;
    store(scores + i, v);
    largest = _mm512_mask_max_ps(largest, real(i), largest, v);
  }
  const float most = max_lane(largest);
  const float keep = exp(splat(buffers.most[m] - most))[0];
  Float total{};
  for (int64_t i = 0; i < columns; i += kLanes) {
    const Float e = _mm512_maskz_mov_ps(real(i), exp(load(scores + i) - most));
    total += e;
    store_as(weights + i, _mm512_cvtneps_pbh(e));
  }
  buffers.total[m] = buffers.total[m] * keep + sum(total);
  buffers.most[m] = most;
  float* sums = buffers.sums + m * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) store(sums + d, load(sums + d) * keep);
}

/// Columns [0, 32) of `length` rows `stride` apart, whose pairs are of adjacent rows, as a panel;
/// rows from `length` up to `padded` are zero.
inline void fill_row_pairs(const uint16_t* rows, int64_t stride, int64_t length, int64_t padded,
                           uint32_t* panel) {
  const auto row = [&](int64_t p) {
    return p < length ? load_as<__m512i>(rows + p * stride) : _mm512_setzero_si512();
  };
  for (int64_t p = 0; p < padded; p += 2, panel += kPairRows) {
    store_as(panel, _mm512_permutex2var_epi16(row(p), pair_order(0, 32), row(p + 1)));
    store_as(panel + kLanes, _mm512_permutex2var_epi16(row(p), pair_order(16, 48), row(p + 1)));
  }
}

GPTFAST_BF16 inline void attend_prompt(const PromptAttendArgs& args) {
  constexpr float kLeast = -1e38f;  // finite, as exp wants differences
  const PromptBuffers buffers(args);
  const int64_t rows = args.tokens * args.heads;
  const int64_t head_dim = args.head_dim;
  int64_t used = 0;
  for (int64_t s = 0; s < args.tokens; ++s) used = args.pos[s] >= used ? args.pos[s] + 1 : used;
  for (int64_t m = 0; m < rows; ++m) buffers.most[m] = kLeast;
  memset(buffers.total, 0, rows * sizeof(float));
  memset(buffers.sums, 0, rows * head_dim * sizeof(float));
  const auto offset = [&](int64_t m, int64_t stride) {
    return m / args.heads * stride + m % args.heads * head_dim;
  };
  pack_blocks(
      rows, head_dim, [&](int64_t m) { return args.q + offset(m, args.token_stride); },
      buffers.queries);
  for (int64_t p = 0; p < used; p += kPromptSplit) {
    const int64_t length = used - p < kPromptSplit ? used - p : kPromptSplit;
    const int64_t columns = (length + kBlock - 1) / kBlock * kBlock;
    const uint16_t* keys = args.k + p * head_dim;
    for (int64_t c = 0; c < columns; c += kPairRows) {
      fill_pairs(length - c, head_dim, buffers.panel, [&](int64_t r, int64_t d) {
        return load_as<__m512i>(keys + (c + r) * head_dim + d);
      });
      multiply_rows(
          buffers.queries, rows, head_dim, /*first_pair=*/0, buffers.panel, head_dim / 2,
          [](int64_t /*m*/, int /*v*/) { return Float{}; },
          [&](int64_t m, int v, Float sum) {
            store(buffers.scores + m * kPromptSplit + c + v * kLanes, sum);
          });
    }
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t visible = args.pos[m / args.heads] + 1 - p;
      weigh_row(buffers, m, visible < length ? visible : length, columns, head_dim, args.scale);
    }
    pack_rows(buffers.weights, rows, columns, buffers.packed_weights);
    for (int64_t d = 0; d < head_dim; d += kPairRows) {
      fill_row_pairs(args.v + p * head_dim + d, head_dim, length, columns, buffers.panel);
      const auto at = [&](int64_t m, int v) {
        return buffers.sums + m * head_dim + d + v * kLanes;
      };
      multiply_rows(
          buffers.packed_weights, rows, columns, /*first_pair=*/0, buffers.panel, columns / 2,
          [&](int64_t m, int v) { return load(at(m, v)); },
          [&](int64_t m, int v, Float sum) { store(at(m, v), sum); });
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    uint16_t* out = args.out + offset(m, args.token_stride);
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store_as(out + d,
               round_to_bfloat16(load(buffers.sums + m * head_dim + d) / buffers.total[m]));
  }
}

#endif

}  // namespace gptfast::cpu::GPTFAST_ISA
