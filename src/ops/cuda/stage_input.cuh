// The input rows of a linear stage: from global memory into the form that the products read
// (formats.cuh).
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/stage_layout.cuh"

namespace gptfast::cuda {

constexpr int kBatch = 4;            // chunks that a warp converts at a time, so that they overlap
constexpr float kLeastTop = 1e-30F;  // its reciprocal is finite

/// The largest |x| of a chunk, v being four columns a lane. As an integer NaN is above infinity, so
/// it is kept.
__device__ inline float greatest_of(float4 v) {
  const float most =
      max_or_nan(max_or_nan(fabsf(v.x), fabsf(v.y)), max_or_nan(fabsf(v.z), fabsf(v.w)));
  return __uint_as_float(
      max(__reduce_max_sync(0xffffffffU, __float_as_uint(most)), __float_as_uint(kLeastTop)));
}

/// Four columns as integers: the bytes hi and lo of round(256 x / scale).
struct HiLo {
  uint32_t hi, lo;
  __device__ HiLo(float4 v, float inverse) {
    // Adding kMagic rounds; the low half is the integer, and 128 more round its high byte.
    const auto half = [&](float x) {
      return __float_as_uint(__fmaf_rn(x, inverse, kMagic + 128.0F));
    };
    const uint32_t xy = __byte_perm(half(v.x), half(v.y), 0x5140);
    const uint32_t zw = __byte_perm(half(v.z), half(v.w), 0x5140);
    hi = __byte_perm(xy, zw, 0x7632);
    lo = __byte_perm(xy, zw, 0x5410) ^ 0x80808080U;
  }
};

/// v[lane % kBatch].
__device__ inline float own_of(const float (&v)[kBatch], int lane) {
  const float low = (lane & 1) != 0 ? v[1] : v[0];
  const float high = (lane & 1) != 0 ? v[3] : v[2];
  return (lane & 2) != 0 ? high : low;
}

/// The sum of v[lane % kBatch] over groups of Lanes lanes.
template <int Lanes>
__device__ inline float sum_own(const float (&v)[kBatch], int lane) {
  const bool odd = (lane & 1) != 0;
  const bool upper = (lane & 2) != 0;
  const float low = (odd ? v[1] : v[0]) + __shfl_xor_sync(0xffffffffU, odd ? v[0] : v[1], 1);
  const float high = (odd ? v[3] : v[2]) + __shfl_xor_sync(0xffffffffU, odd ? v[2] : v[3], 1);
  float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffffU, upper ? low : high, 2);
#pragma unroll
  for (int offset = 4; offset < Lanes; offset *= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, offset);
  }
  return sum;
}

/// Converts chunks `first`, first + step, ... of row m of this block, four columns a lane, and
/// stores the first `count` of them. Without a branch, so that chunks overlap.
template <class W, int Rows>
__device__ inline void store_input(uint32_t shared, const SharedLayout& s, int rows, int m,
                                   int first, int step, int count, int lane,
                                   const float4 (&v)[kBatch]) {
  const uint32_t values = shared + s.values + m * s.pitch;
  if constexpr (!W::kInteger) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      store_shared8(values + ((first + i * step) * kChunk + lane * 4) * 2,
                    {W::convert2(v[i].x, v[i].y), W::convert2(v[i].z, v[i].w)}, i < count);
    }
  } else {
    float top[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) top[i] = greatest_of(v[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const HiLo x(v[i], kInputTop * 256.0F * reciprocal(top[i]));
      const uint32_t to = values + (first + i * step) * kChunk + W::word_position(lane) * 4;
      store_shared4(to, x.hi, i < count);
      store_shared4(to + rows * s.pitch, x.lo, i < count);
    }
    // A lane stores the scale and a sum of one chunk; the scale for hi and, where that is in the
    // same product, for lo.
    constexpr int kHi = Columns<W, Rows>::kHi;
    const int chunk = first + lane % kBatch * step;
    const bool in_row = lane % kBatch < count;
    store_shared4(shared + s.scales + (chunk * 8 + m + lane / kBatch * kHi) * 4,
                  __float_as_uint(own_of(top, lane) * (W::kInputScale / kInputTop)),
                  in_row && lane < (m + kHi < 8 ? 2 : 1) * kBatch);
    if constexpr (W::kGroup > 0) {
      constexpr int kLanes = W::kGroup / 4;
      float sums[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sums[i] = (v[i].x + v[i].y) + (v[i].z + v[i].w);
      const float sum = sum_own<kLanes>(sums, lane);
      const __nv_bfloat16 hi = __float2bfloat16_rn(sum);
      const __nv_bfloat16 lo = __float2bfloat16_rn(sum - __bfloat162float(hi));
      const uint32_t to =
          shared + s.sums + m * s.sums_pitch + chunk * 16 + W::sum_position(lane / kLanes) * 2;
      const bool stores = in_row && lane % kLanes < kBatch;
      store_shared2(to, __bfloat16_as_ushort(hi), stores);
      store_shared2(to + rows * s.sums_pitch, __bfloat16_as_ushort(lo), stores);
    }
  }
}

/// The columns of the zeros' products that no group fills.
template <class W, class B>
__device__ inline void clear_sums(uint8_t* shared, const SharedLayout& s, int rows) {
  if constexpr (W::kGroup > 0) {
    const int words = 2 * rows * s.sums_pitch / 4;
    for (int i = static_cast<int>(threadIdx.x); i < words; i += B::kThreads) {
      *reinterpret_cast<uint32_t*>(shared + s.sums + i * 4) = 0;
    }
    __syncthreads();
  }
}

/// Requests what a block needs of the norm's weight, which no kernel writes. One row: each lane
/// copies what it will read.
template <class W, class B>
__device__ inline void request_norm(const StageArgs& a, const Division<B>& division,
                                    uint8_t* shared, const SharedLayout& s, int warp, int lane) {
  const uint32_t base = shared_address(shared) + s.norm;
  const uint8_t* from = static_cast<const uint8_t*>(a.in.norm_weight);
  const int residues = division.residues();
#pragma unroll 1
  for (int c = warp; c < a.padded_k / kChunk; c += B::kWarps) {
    const int chunk = !B::kShares ? c
                                  : division.template chunk<W>(c & (residues - 1)) +
                                        (c >> division.residue_bits()) * kResidues;
    const int k = chunk * kChunk + lane * 4;
    const int at = c * kChunk + lane * 4;
    if (k >= a.w.k) continue;
    if (a.in.norm_type == Scalar::kFloat32) {
      copy_async16(base + at * 4, from + k * 4);
    } else {
      copy_async8(base + at * 2, from + k * 2);
    }
  }
  commit_copies();
}

/// x, times the norm's weight if there is one, into shared memory; the sums of squares over the
/// chunks of each residue beside it, in every block of the cluster. The norm's factor 1 / rms is
/// applied to the results, so nothing here waits for the whole row. A warp converts chunks of one
/// residue, kBatch at a time: those of the rows turn, turn + turns, ..., whose squares it adds up,
/// or without a norm every turns-th batch of all rows.
template <class W, bool Norm, class B>
__device__ inline void load_input(const StageArgs& a, const Division<B>& division,
                                  const float* x_rows, uint8_t* shared, const SharedLayout& s,
                                  int warp, int lane) {
  const int chunks = (a.w.k + kChunk - 1) / kChunk;
  const int batches = (chunks + kResidues * kBatch - 1) / (kResidues * kBatch);  // of a row
  const int own = !B::kShares ? warp : warp & (division.residues() - 1);
  const int first_chunk = division.template chunk<W>(own);
  const int turn = division.turn(warp);
  const int turns = division.turns();
  const auto to_next = [&](int& m, int& batch) {
    batch += Norm ? 1 : turns;
    for (; batch >= batches; batch -= batches) m += Norm ? turns : 1;
  };
  const auto chunk_of = [&](int batch, int i) {
    return first_chunk + (batch * kBatch + i) * kResidues;
  };
  const auto read = [&](int m, int batch, float4(&x)[kBatch]) {
    const int k = chunk_of(batch, 0) * kChunk + lane * 4;
    const auto* from = reinterpret_cast<const float4*>(x_rows + (m * a.w.k + k));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      constexpr int kStep = kResidues * kChunk;
      x[i] = k + i * kStep < a.w.k && m < a.in.rows ? __ldcg(from + i * kStep / 4)
                                                    : float4{0, 0, 0, 0};
    }
  };
  const auto multiply = [&](float4(&x)[kBatch], int batch, Scalar type) {  // by the norm's weight
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = own + (batch * kBatch + i) * division.residues();
      const float4 weight = chunk_of(batch, i) * kChunk + lane * 4 < a.w.k
                                ? load_scalar4(shared + s.norm, at * kChunk + lane * 4, type)
                                : float4{0, 0, 0, 0};
      x[i] = {x[i].x * weight.x, x[i].y * weight.y, x[i].z * weight.z, x[i].w * weight.w};
    }
  };
  int m = Norm ? turn : 0;
  int batch = Norm ? 0 : turn - turns;
  if constexpr (!Norm) to_next(m, batch);
  float4 x[kBatch];
  read(m, batch, x);
  float sum = 0;
  while (m < a.in.rows) {
    int next_m = m;
    int next_batch = batch;
    to_next(next_m, next_batch);
    float4 next[kBatch];
    read(next_m, next_batch, next);
    if constexpr (Norm) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum = __fmaf_rn(x[i].x, x[i].x, sum);
        sum = __fmaf_rn(x[i].y, x[i].y, sum);
        sum = __fmaf_rn(x[i].z, x[i].z, sum);
        sum = __fmaf_rn(x[i].w, x[i].w, sum);
      }
      switch (a.in.norm_type) {  // outside of the loop over chunks
        case Scalar::kBFloat16:
          multiply(x, batch, Scalar::kBFloat16);
          break;
        case Scalar::kFloat16:
          multiply(x, batch, Scalar::kFloat16);
          break;
        default:
          multiply(x, batch, Scalar::kFloat32);
      }
    }
    const int first = chunk_of(batch, 0);
    store_input<W, B::kRows>(shared_address(shared), s, a.in.rows, m,
                             own + batch * kBatch * division.residues(), division.residues(),
                             (chunks - first + kResidues - 1) / kResidues, lane, x);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) x[i] = next[i];
    if constexpr (Norm) {
      if (next_batch == 0) {  // the row's last
        sum = warp_sum(sum);
        float* squares = reinterpret_cast<float*>(shared + s.squares) + m * kResidues + first_chunk;
        if (division.bits == 0) {
          if (lane == 0) *squares = sum;
        } else if (lane < division.blocks()) {
          *in_cluster(squares, lane) = sum;
        }
        sum = 0;
      }
    }
    m = next_m;
    batch = next_batch;
  }
}

}  // namespace gptfast::cuda
