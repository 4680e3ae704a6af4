// The weight formats of a linear stage (stage.cuh). A format says how a 16-row tile of weights
// comes in, how an input row is laid out beside it, and how the two are multiplied. Everything else
// is the same for all formats.
//
// The unit of work is a tile of 16 rows by 128 bytes of an input row: 64 columns for the 16-bit
// formats, 128 for int8 and int4. Products run on the tensor cores with the weights as the 16-row
// operand and the input rows as the 8 columns, so 1 to 8 rows cost the same and a row's result does
// not depend on the others.
//
// int8 and int4 multiply integers. An input row is cut into chunks of 128 columns; in each, x = (hi
// + lo / 256) * scale with int8 hi and lo and scale = max|x| / 127: 15 bits. hi and lo are two
// columns of the product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ops/cuda/device.cuh"

namespace gptfast::cuda {

constexpr int kTileRows = 16;
constexpr int kChunk = 128;       // columns that share a scale of x; what a warp converts at a time
constexpr int kUnitXBytes = 128;  // bytes of an input row that a unit covers
constexpr float kInputTop = 127.0F;  // what hi makes of max|x|
constexpr float kLoUnit = 1.0F / 256.0F;

/// An int32 accumulator that starts here reads, as a float, kMagic + sum while |sum| < 2^22: no
/// conversion instruction.
constexpr int kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0F;

/// The columns of a tile's products. An input row of W has W::kParts parts: hi and, of integers,
/// lo. hi of row m is column m. lo of the first rows follows there; that of the others is a second
/// product, for up to 6 rows in its even columns, so that half of its results need no arithmetic.
template <class W, int Rows>
struct Columns {
  static constexpr int kProducts = W::kParts == 2 && Rows > 4 ? 2 : 1;
  static constexpr int kHi = W::kParts == 1 || Rows > 6 ? 8 : (Rows > 4 ? 6 : 4);  // of the first
  static constexpr bool kHalf = kProducts == 2 && kHi < 8;  // of the second product is used

  __device__ static int part(int product, int column) {
    return product == 1 || column >= kHi ? 1 : 0;
  }
  __device__ static int row(int product, int column) {
    if (product == 0) return column < kHi ? column : column - kHi;
    return kHalf ? 8 - kHi + column / 2 : column;
  }

  /// Accumulators that hold a result: with one row columns 0 (hi) and 4 (lo), d[0] and d[2].
  __device__ static constexpr bool used(int product, int i) {
    return (i & 1) == 0 || (Rows > 1 && !(kHalf && product == 1));
  }

  /// lo where this lane has hi in first[i].
  __device__ static float lo(const float (&first)[4], const float (&last)[4], int i, int lane) {
    if constexpr (kProducts == 1) return __shfl_down_sync(0xffffffffU, first[i], 2);
    if constexpr (!kHalf) return last[i];
    // Rows 0 and 1 in columns 6 and 7, row m >= 2 in column 2 m - 4 of the second product.
    const int t = lane & 3;
    const float near = __shfl_sync(0xffffffffU, first[i], lane | 3);
    const float far = __shfl_sync(0xffffffffU, last[i & 2], (lane - t) + 2 * t - 2 + (i & 1));
    return t == 0 ? near : far;
  }
};

/// What a lane reads of the input: the row behind its column of a product. Rows lie at a pitch of
/// 64 mod 128 bytes, so that the 16-byte reads of a warp use every bank once.
struct InputColumn {
  uint32_t values;  // shared address
  uint32_t sums;    // int4: sums over groups, 8 bfloat16 a unit
  uint32_t scales;  // of the columns of this lane's results, 8 float a unit
};

/// The scales of a lane's results in a unit.
template <class C>
__device__ inline float2 load_scales(const InputColumn (&x)[C::kProducts], int product, int unit) {
  const uint32_t address = x[product].scales + unit * 32;
  if (C::kHalf && product == 1) return {__uint_as_float(load_shared4(address)), 0.0F};
  return load_shared_float2(address);
}

/// Row-major formats: a unit is 16 rows of 128 bytes. Odd rows have their halves exchanged, so that
/// the reads of two rows by 8 lanes use every bank once.
__device__ inline int row_major_write_offset(int lane) {
  const int row = lane >> 3;
  return row * kUnitXBytes + ((lane & 7) ^ ((row & 1) << 2)) * 16;
}
__device__ inline int row_major_read_offset(int lane) {
  const int row = lane >> 2;
  return row * kUnitXBytes + (lane & 3) * 16 + (row & 1) * 64;
}

template <typename T>
struct Float16Weights {
  static constexpr int kUnitColumns = 64;
  static constexpr int kUnitStep = kUnitXBytes;  // bytes from one unit of a row to the next
  static constexpr int kSlotBytes = 2048;
  static constexpr int kParts = 1;  // columns of the product that an input row needs
  static constexpr bool kInteger = false;
  static constexpr int kGroup = 0;

  struct Accumulator {
    float d[4] = {};
  };

  __device__ static int write_offset(int lane) { return row_major_write_offset(lane); }
  __device__ static int read_offset(int lane) { return row_major_read_offset(lane); }

  __device__ static uint32_t convert2(float a, float b) {
    if constexpr (sizeof(T) == 2 && __is_same(T, __nv_bfloat16)) {
      const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
      return reinterpret_cast<const uint32_t&>(v);
    } else {  // float16 ends at 65504: saturate instead of making an infinity of a large activation
      const __half2 v = __floats2half2_rn(fminf(fmaxf(a, -65504.0F), 65504.0F),
                                          fminf(fmaxf(b, -65504.0F), 65504.0F));
      return reinterpret_cast<const uint32_t&>(v);
    }
  }

  /// x += w * unit, all 8 columns.
  template <int Rows>
  __device__ static void multiply(Accumulator (&acc)[1], uint32_t slot, int /*lane*/, int unit,
                                  const InputColumn (&x)[1]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 a = load_shared16(slot ^ (j * 64));
      const uint4 b = load_shared16((slot ^ (j * 64)) + 1024);
      const uint4 v = load_shared16(x[0].values + unit * kUnitXBytes + j * 64);
      mma_k16<T>(acc[0].d, a.x, b.x, a.y, b.y, v.x, v.y);
      mma_k16<T>(acc[0].d, a.z, b.z, a.w, b.w, v.z, v.w);
    }
  }
};

struct Int8Weights {
  static constexpr int kUnitColumns = 128;
  static constexpr int kUnitStep = kUnitXBytes;
  static constexpr int kSlotBytes = 2048;
  static constexpr int kParts = 2;
  static constexpr bool kInteger = true;
  static constexpr int kGroup = 0;
  static constexpr float kInputScale = 1.0F;

  struct Accumulator {
    float d[4] = {};
  };

  __device__ static int write_offset(int lane) { return row_major_write_offset(lane); }
  __device__ static int read_offset(int lane) { return row_major_read_offset(lane); }

  /// Where columns 4i .. 4i + 3 of a chunk lie, in words.
  __device__ static int word_position(int i) { return i; }

  template <int Rows, int Products>
  __device__ static void multiply(Accumulator (&acc)[Products], uint32_t slot, int /*lane*/,
                                  int unit, const InputColumn (&x)[Products]) {
    using C = Columns<Int8Weights, Rows>;
    int sum[Products][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 a = load_shared16(slot ^ (j * 64));
      const uint4 b = load_shared16((slot ^ (j * 64)) + 1024);
#pragma unroll
      for (int n = 0; n < Products; ++n) {
        const uint4 v = load_shared16(x[n].values + unit * kUnitXBytes + j * 64);
        if (j == 0) {
          mma_k32_int8_from(sum[n], kMagicBits, a.x, b.x, a.y, b.y, v.x, v.y);
        } else {
          mma_k32_int8(sum[n], a.x, b.x, a.y, b.y, v.x, v.y);
        }
        mma_k32_int8(sum[n], a.z, b.z, a.w, b.w, v.z, v.w);
      }
    }
#pragma unroll
    for (int n = 0; n < Products; ++n) {
      const float2 scale = load_scales<C>(x, n, unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!C::used(n, i)) continue;
        acc[n].d[i] = __fmaf_rn(__fadd_rn(__int_as_float(sum[n][i]), -kMagic),
                                (i & 1) != 0 ? scale.y : scale.x, acc[n].d[i]);
      }
    }
  }
};

/// Packed by pack_int4 (pack.cu) in tiles of 8 rows; a unit of a tile is 512 bytes of nibbles, then
/// for each row the scales and the zeros of its groups as bfloat16. A nibble holds (q - 8) in two's
/// complement, so that masking it at the top of a byte gives 16 * (q - 8) as int8. Zeros act on the
/// sums of x over the groups, as one bf16 product a unit; a sum is hi + lo like x itself.
template <int G>
struct Int4Weights {
  static constexpr int kUnitColumns = 128;
  static constexpr int kGroups = kChunk / G;                // of a unit
  static constexpr int kHalfBytes = 512 + 8 * kGroups * 4;  // a unit of 8 rows
  static constexpr int kUnitStep = kHalfBytes;
  static constexpr int kSlotBytes = 2 * kHalfBytes;
  static constexpr int kGroupLanes = 2 * kGroups;  // that copy a half's groups
  static constexpr int kParts = 2;
  static constexpr bool kInteger = true;
  static constexpr int kGroup = G;
  static constexpr float kInputScale = 1.0F / 16.0F;

  struct Accumulator {
    float d[4] = {};
    float zero[4] = {};
  };

  __device__ static int write_offset(int lane) { return lane * 16; }
  __device__ static int read_offset(int lane) { return lane * 16; }

  /// A product of 32 columns takes 8t .. 8t + 7 of a group per lane; the low nibbles of 64 columns
  /// are one product, the high the other. So a lane's 16 bytes are [low, 8 columns][high, 8
  /// columns].
  __device__ static int word_position(int i) {
    const int in64 = i & 15;
    return (i & 16) + ((in64 & 7) >> 1) * 4 + (in64 >> 3) * 2 + (in64 & 1);
  }

  template <int Rows, int Products>
  __device__ static void multiply(Accumulator (&acc)[Products], uint32_t slot, int lane, int unit,
                                  const InputColumn (&x)[Products]) {
    using C = Columns<Int4Weights, Rows>;
    const uint4 q0 = load_shared16(slot);
    const uint4 q1 = load_shared16(slot + kHalfBytes);
    const uint32_t groups = slot - lane * 16 + 512 + (lane >> 2) * kGroups * 4;
    const Groups groups0 = load_groups(groups, lane);
    const Groups groups1 = load_groups(groups + kHalfBytes, lane);
#pragma unroll
    for (int n = 0; n < Products; ++n) {
      mma_k8(acc[n].zero, groups0.zeros, groups1.zeros, load_shared4(x[n].sums + unit * 16));
    }
    float part[Products][4] = {};
    int sum[Products][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint4 v[Products];
#pragma unroll
      for (int n = 0; n < Products; ++n)
        v[n] = load_shared16(x[n].values + unit * kUnitXBytes + j * 64);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = j * 64 + half * 32;
        constexpr uint32_t kTop = 0xf0f0f0f0U;
        const int shift = half == 0 ? 4 : 0;
        const uint32_t a0 = ((j == 0 ? q0.x : q0.z) << shift) & kTop;
        const uint32_t a1 = ((j == 0 ? q1.x : q1.z) << shift) & kTop;
        const uint32_t a2 = ((j == 0 ? q0.y : q0.w) << shift) & kTop;
        const uint32_t a3 = ((j == 0 ? q1.y : q1.w) << shift) & kTop;
#pragma unroll
        for (int n = 0; n < Products; ++n) {
          const uint32_t b0 = half == 0 ? v[n].x : v[n].z;
          const uint32_t b1 = half == 0 ? v[n].y : v[n].w;
          if (column % G == 0) {
            mma_k32_int8_from(sum[n], kMagicBits, a0, a1, a2, a3, b0, b1);
          } else {
            mma_k32_int8(sum[n], a0, a1, a2, a3, b0, b1);
          }
          if ((column + 32) % G == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (!C::used(n, i)) continue;
              part[n][i] =
                  __fmaf_rn(__fadd_rn(__int_as_float(sum[n][i]), -kMagic),
                            i < 2 ? scale_of(groups0, column / G) : scale_of(groups1, column / G),
                            part[n][i]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Products; ++n) {
      const float2 scale = load_scales<C>(x, n, unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!C::used(n, i)) continue;
        acc[n].d[i] = __fmaf_rn(part[n][i], (i & 1) != 0 ? scale.y : scale.x, acc[n].d[i]);
      }
    }
  }

  /// What a lane needs of a row's groups in a unit. zeros is its operand of a k8 product: columns
  /// 2t, 2t + 1 are groups; where a unit has fewer, the sums are zero (sum_position).
  struct Groups {
    uint32_t scales[(kGroups + 1) / 2];  // bfloat16 pairs
    uint32_t zeros;
  };

  __device__ static Groups load_groups(uint32_t address, int lane) {
    Groups v;
    if constexpr (kGroups == 4) {
      const uint2 scales = load_shared8(address);
      v.scales[0] = scales.x, v.scales[1] = scales.y;
      v.zeros = load_shared4(address + 8 + (lane & 1) * 4);
    } else if constexpr (kGroups == 2) {
      const uint2 all = load_shared8(address);
      v.scales[0] = all.x, v.zeros = all.y;
    } else {  // a pair of scale and zero
      v.scales[0] = v.zeros = load_shared4(address);
    }
    return v;
  }

  __device__ static float scale_of(const Groups& v, int group) {
    const uint32_t pair = v.scales[group / 2];
    return __uint_as_float((group & 1) != 0 ? pair & 0xffff0000U : pair << 16);
  }

  /// Which of the 8 columns of the zeros' product group `i` of a unit is.
  __device__ static int sum_position(int i) {
    return kGroups == 1 ? 1 : i;
  }
};

}  // namespace gptfast::cuda
