// Canonical int4 weights -> the layout that Int4Weights reads. One thread writes one byte or one
// bfloat16.
#include "ops/cuda/device.cuh"
#include "ops/cuda/formats.cuh"

namespace gptfast::cuda {
namespace {

struct PackArgs {
  const uint8_t* q;
  const uint16_t* scales;
  const uint16_t* zeros;
  int n, k, groupsize;
  int group;  // packed groupsize
  int units;
  int half_bytes;  // of a unit of 8 rows
  int tile_bytes;  // of 8 rows
  uint8_t* out;
};

/// (q - 8) as a nibble in two's complement; 0 outside the matrix.
__device__ uint32_t nibble(const PackArgs& a, int row, int column) {
  if (row >= a.n || column >= a.k) return 0;
  const uint8_t byte = a.q[static_cast<int64_t>(row) * ((a.k + 1) / 2) + column / 2];
  return ((column & 1) != 0 ? byte >> 4 : byte & 15) ^ 8;
}

__device__ uint16_t group_value(const PackArgs& a, const uint16_t* values, int row, int group) {
  const int column = group * a.group;
  if (row >= a.n || column >= a.k) return 0;
  const int groups = (a.k + a.groupsize - 1) / a.groupsize;
  return values[static_cast<int64_t>(row) * groups + column / a.groupsize];
}

__global__ void pack_kernel(PackArgs a) {
  const int tile = static_cast<int>(blockIdx.x);
  uint8_t* out = a.out + static_cast<int64_t>(tile) * a.tile_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < a.units * 512;
       i += static_cast<int>(blockDim.x)) {
    const int unit = i / 512;
    const int lane = i % 512 / 16;
    const int word = i % 16 / 4;
    const int column = unit * kChunk + word / 2 * 64 + (lane & 3) * 8 + word % 2 * 4 + i % 4;
    const int row = tile * 8 + lane / 4;
    out[unit * a.half_bytes + i % 512] =
        static_cast<uint8_t>(nibble(a, row, column) | nibble(a, row, column + 32) << 4);
  }
  const int groups = kChunk / a.group;  // of a unit
  for (int i = static_cast<int>(threadIdx.x); i < a.units * 16 * groups;
       i += static_cast<int>(blockDim.x)) {
    const int unit = i / (16 * groups);
    const int in = i % (16 * groups);
    const bool zero = in / groups % 2 != 0;
    reinterpret_cast<uint16_t*>(out + unit * a.half_bytes + 512)[in] =
        group_value(a, zero ? a.zeros : a.scales, tile * 8 + in / (2 * groups),
                    unit * groups + in % groups);
  }
}

__device__ void store_value(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}
__device__ void store_value(__half& to, float value) {
  to = __float2half_rn(value);
}

/// 8 values of row `row` from `column` on: 16 bytes at once where rows are 16 bytes apart.
template <typename T>
__device__ void write_values(const PackArgs& a, int row, int column, const T (&values)[8], T* out) {
  T* to = out + static_cast<int64_t>(row) * a.k + column;
  if (a.k % 8 == 0) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
    return;
  }
  for (int i = 0; i < 8 && column + i < a.k; ++i) to[i] = values[i];
}

/// A thread takes the 16 bytes of a lane: 8 columns in each of 4 places of a unit (see
/// Int4Weights::word_position).
template <typename T>
__global__ void unpack_kernel(PackArgs a, T* out) {
  const int tile = static_cast<int>(blockIdx.x);
  const int groups = kChunk / a.group;
  for (int i = static_cast<int>(threadIdx.x); i < a.units * kWarp;
       i += static_cast<int>(blockDim.x)) {
    const int lane = i % kWarp;
    const uint8_t* unit =
        a.out + static_cast<int64_t>(tile) * a.tile_bytes + i / kWarp * a.half_bytes;
    const int row = tile * 8 + lane / 4;
    if (row >= a.n) continue;
    const uint4 codes = *reinterpret_cast<const uint4*>(unit + lane * 16);
    const auto* scales = reinterpret_cast<const __nv_bfloat16*>(unit + 512) + lane / 4 * 2 * groups;
#pragma unroll
    for (int place = 0; place < 4; ++place) {
      const int in_unit = place * 32 + lane % 4 * 8;
      const int column = i / kWarp * kChunk + in_unit;
      if (column >= a.k) break;
      const float scale = __bfloat162float(scales[in_unit / a.group]);
      const float zero = __bfloat162float(scales[groups + in_unit / a.group]);
      const uint32_t words[2] = {place < 2 ? codes.x : codes.z, place < 2 ? codes.y : codes.w};
      alignas(16) T values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t nibble = words[j / 4] >> (j % 4 * 8 + place % 2 * 4) & 15;
        const int q = static_cast<int>(nibble ^ 8) - 8;
        store_value(values[j], __fmaf_rn(static_cast<float>(q), scale, zero));
      }
      write_values(a, row, column, values, out);
    }
  }
}

/// Tiles of 8 rows, an even number: stages read them in pairs.
int padded_tiles(int n) {
  return (n + kTileRows - 1) / kTileRows * 2;
}

PackArgs pack_args(int n, int k, int groupsize) {
  PackArgs a{};
  a.n = n;
  a.k = k;
  a.groupsize = groupsize;
  a.group = packed_groupsize(groupsize);
  a.units = (k + kChunk - 1) / kChunk;
  a.half_bytes = 512 + 8 * (kChunk / a.group) * 4;
  a.tile_bytes = a.units * a.half_bytes;
  return a;
}

}  // namespace

int64_t packed_int4_bytes(int n, int k, int groupsize) {
  return static_cast<int64_t>(padded_tiles(n)) * pack_args(n, k, groupsize).tile_bytes;
}

cudaError_t pack_int4(cudaStream_t stream, const uint8_t* q, const void* scales, const void* zeros,
                      int n, int k, int groupsize, uint8_t* packed) {
  PackArgs a = pack_args(n, k, groupsize);
  a.q = q;
  a.scales = static_cast<const uint16_t*>(scales);
  a.zeros = static_cast<const uint16_t*>(zeros);
  a.out = packed;
  pack_kernel<<<padded_tiles(n), 256, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t unpack_int4(cudaStream_t stream, const uint8_t* packed, int n, int k, int groupsize,
                        Scalar type, void* out) {
  PackArgs a = pack_args(n, k, groupsize);
  a.out = const_cast<uint8_t*>(packed);
  const int tiles = (n + 7) / 8;
  if (type == Scalar::kBFloat16) {
    unpack_kernel<<<tiles, 256, 0, stream>>>(a, static_cast<__nv_bfloat16*>(out));
  } else {
    unpack_kernel<<<tiles, 256, 0, stream>>>(a, static_cast<__half*>(out));
  }
  return cudaGetLastError();
}

}  // namespace gptfast::cuda
