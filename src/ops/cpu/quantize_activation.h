// Activations of the int8 and int4 kernels: 15 bits with a scale per 32 columns.
//
// A code q = round(x / s), |q| <= 16256, enters 8-bit dot products as q = 128 hi + lo with hi in
// [-127, 127] and lo in [-64, 63]. This rounds 2^7 times finer than bfloat16 does, and one large
// column spoils only its own block.
#pragma once

#include "ops/cpu/simd.h"

namespace gptfast::cpu::GPTFAST_ISA {

constexpr float kLargestCode = 16256;    // 128 * 127
constexpr int64_t kColumnMultiple = 64;  // activations are padded with zeros to it
constexpr int kBlockVectors = kBlock / kLanes;

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// The codes of 32 columns, either way.
union BlockCodes {
  struct {
    int8_t hi[kBlock];
    int8_t lo[kBlock];
  };
  int16_t whole[kBlock];
};

struct BlockMeta {
  float scale;
  int32_t sum;  // -8 times the sum of the codes: int4 codes are stored with an offset of 8
};

/// 64 columns as the AVX-512 int8 kernel reads them, whose lanes are 4 columns.
struct Int8Chunk {
  int8_t hi[64];
  int8_t lo[64];
  int32_t lane_sum[16];  // minus the sum of the lane's codes
  float lane_scale[16];
};

/// Where the parts of a quantized row lie, in bytes from its start: codes (BlockCodes, or Int8Chunk
/// for AVX-512 int8), a BlockMeta a block, and for int4 the sum of each group's activations, which
/// meets the zero point.
struct QuantizedLayout {
  QuantizedLayout(Format format, int64_t k, int64_t groupsize) {
    const int64_t blocks = round_up(k, kColumnMultiple) / kBlock;
    groups = format == Format::kInt4 ? (k + groupsize - 1) / groupsize : 0;
    meta =
        blocks * static_cast<int64_t>(chunked(format) ? sizeof(Int8Chunk) / 2 : sizeof(BlockCodes));
    group_sums = meta + round_up(blocks * static_cast<int64_t>(sizeof(BlockMeta)), 64);
    bytes = group_sums + round_up(groups * 4, 64);
  }
#if defined(__AVX512F__)
  static bool chunked(Format format) {
    return format == Format::kInt8;
  }
#else
  static bool chunked(Format /*format*/) {
    return false;
  }
#endif
  int64_t groups, meta, group_sums, bytes;
};

/// The rows of quantized activations, `stride` bytes apart.
struct QuantizedRows {
  const char* data;
  int64_t stride;
  QuantizedLayout layout;
  const char* row(int m) const { return data + m * stride; }
};

/// Quantizes 32 columns. `total`: sum of the columns themselves.
inline void quantize_block(const float* x, Int* codes, BlockMeta& meta, float& total) {
  Float v[kBlockVectors];
  Float largest{};
  Float totals{};
  for (int i = 0; i < kBlockVectors; ++i) {
    v[i] = load(x + i * kLanes);
    largest = max(abs(v[i]), largest);
    totals += v[i];
  }
  total = sum(totals);
  const float most = max_lane(largest);
  const float inverse = most > 0 ? kLargestCode / most : 0;
  // NaN if any column is infinite or NaN, which integers cannot say: then they are zero.
  meta.scale = most * (1 / kLargestCode) + 0 * total;
  const bool finite = meta.scale == meta.scale;
  Int sums{};
  for (int i = 0; i < kBlockVectors; ++i) {
    codes[i] = finite ? __builtin_convertvector(round(v[i] * inverse), Int) : Int{};
    sums += codes[i];
  }
  meta.sum = -8 * sum(sums);
}

inline void store_split(const Int* codes, int8_t* hi, int8_t* lo) {
  for (int i = 0; i < kBlockVectors; ++i) {
    const Int high = (codes[i] + 64) >> 7;
    store_as(hi + i * kLanes, narrow_to_bytes(high));
    store_as(lo + i * kLanes, narrow_to_bytes(codes[i] - (high << 7)));
  }
}

inline void store_whole(const Int* codes, int16_t* whole) {
  for (int i = 0; i < kBlockVectors; ++i) store_as(whole + i * kLanes, narrow_to_shorts(codes[i]));
}

#if defined(__AVX512F__)
inline void store_chunk(const Int* codes, const BlockMeta& meta, int half, Int8Chunk& chunk) {
  int8_t* hi = chunk.hi + half * kBlock;
  int8_t* lo = chunk.lo + half * kBlock;
  store_split(codes, hi, lo);
  const __m256i ones = _mm256_set1_epi8(1);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i high = _mm256_dpbusd_epi32(zero, ones, load_as<__m256i>(hi));
  const __m256i low = _mm256_dpbusd_epi32(zero, ones, load_as<__m256i>(lo));
  const __m256i quads = _mm256_add_epi32(_mm256_slli_epi32(high, 7), low);
  store_as(chunk.lane_sum + half * 8, _mm256_sub_epi32(zero, quads));
  store_as(chunk.lane_scale + half * 8, _mm256_set1_ps(meta.scale));
}
#endif

inline void store_codes(Format format, const Int* codes, const BlockMeta& meta, int64_t b,
                        char* row) {
#if defined(__AVX512F__)
  if (format == Format::kInt8)
    return store_chunk(codes, meta, b % 2, reinterpret_cast<Int8Chunk*>(row)[b / 2]);
#endif
  BlockCodes& out = reinterpret_cast<BlockCodes*>(row)[b];
#if defined(__AVX2__)
  if (format == Format::kInt4) return store_split(codes, out.hi, out.lo);
#else
  (void)format;
#endif
  (void)meta;
  store_whole(codes, out.whole);
}

/// Quantizes x [round_up(k, kColumnMultiple), zero behind k] into `row`.
inline void quantize_activation(Format format, const float* x, int64_t k, int64_t groupsize,
                                char* row) {
  const QuantizedLayout layout(format, k, groupsize);
  auto* metas = reinterpret_cast<BlockMeta*>(row + layout.meta);
  auto* group_sums = reinterpret_cast<float*>(row + layout.group_sums);
  for (int64_t g = 0; g < layout.groups; ++g) group_sums[g] = 0;
  const int64_t blocks = round_up(k, kColumnMultiple) / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    Int codes[kBlockVectors];
    float total;
    quantize_block(x + b * kBlock, codes, metas[b], total);
    store_codes(format, codes, metas[b], b, row);
    if (format == Format::kInt4 && b * kBlock < k) group_sums[b * kBlock / groupsize] += total;
  }
}

}  // namespace gptfast::cpu::GPTFAST_ISA
