// The input rows of a linear stage: from global memory into the form that the products read
// (formats.cuh).
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/stage_layout.cuh"

namespace gptfast::cuda {

__device__ inline uint32_t low_bytes(const uint32_t (&v)[4]) {
  return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
}

/// Converts four columns of an input row and stores them if `in`. c: chunk, m: row.
template <class W>
__device__ inline void store_input(uint8_t* shared, const SharedLayout& s, int rows, int m, int c,
                                   int lane, bool in_row, float4 v) {
  if constexpr (!W::kInteger) {
    const uint2 packed = {W::convert2(v.x, v.y), W::convert2(v.z, v.w)};
    if (in_row) {
      *reinterpret_cast<uint2*>(shared + s.values + m * s.pitch + (c * kChunk + lane * 4) * 2) =
          packed;
    }
  } else {
    const float in[4] = {v.x, v.y, v.z, v.w};
    uint32_t bits = 0;  // of the largest |x|; as integers NaN is above infinity, so it is kept
#pragma unroll
    for (int i = 0; i < 4; ++i) bits = max(bits, __float_as_uint(in[i]) & 0x7fffffffU);
    const float top = __uint_as_float(__reduce_max_sync(0xffffffffU, bits));
    const float inverse = top > 1e-30F ? __fdividef(127.0F, top) : 0.0F;
    uint32_t hi_bits[4];
    uint32_t lo_bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // adding kMagic rounds; the low byte is the integer
      const float hi = __fmaf_rn(in[i], inverse, kMagic);
      const float rest = __fmaf_rn(in[i], inverse, kMagic - hi);
      hi_bits[i] = __float_as_uint(hi);
      lo_bits[i] = __float_as_uint(__fmaf_rn(rest, 254.0F, kMagic));
    }
    const uint32_t hi = low_bytes(hi_bits);
    const uint32_t lo = low_bytes(lo_bits);
    const int position = c * kChunk + W::word_position(lane) * 4;
    float* scales = reinterpret_cast<float*>(shared + s.scales) + c * 8;
    if (in_row) {
      *reinterpret_cast<uint32_t*>(shared + s.values + m * s.pitch + position) = hi;
      *reinterpret_cast<uint32_t*>(shared + s.values + (rows + m) * s.pitch + position) = lo;
      if (lane == 0) scales[m] = top * (W::kInputScale / 127.0F);
      if (lane == 1 && rows <= 4) scales[m + 4] = top * (W::kInputScale / 127.0F);
    }
  }
  if constexpr (W::kGroup > 0) {
    float sum = (v.x + v.y) + (v.z + v.w);
#pragma unroll
    for (int offset = 1; offset < W::kGroup / 4; offset *= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    }
    if (in_row && lane % (W::kGroup / 4) == 0) {
      const int position = c * 16 + W::sum_position(lane / (W::kGroup / 4)) * 2;
      const __nv_bfloat16 hi = __float2bfloat16_rn(sum);
      const __nv_bfloat16 lo = __float2bfloat16_rn(sum - __bfloat162float(hi));
      *reinterpret_cast<__nv_bfloat16*>(shared + s.sums + m * s.sums_pitch + position) = hi;
      *reinterpret_cast<__nv_bfloat16*>(shared + s.sums + (rows + m) * s.sums_pitch + position) =
          lo;
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
    const int chunk =
        !B::kShares ? c : division.template chunk<W>(c & (residues - 1)) + c / residues * kResidues;
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
/// applied to the results, so nothing here waits for the whole row. A warp converts the chunks of
/// one residue of the rows turn, turn + turns, ...
template <class W, bool Norm, class B>
__device__ inline void load_input(const StageArgs& a, const Division<B>& division,
                                  const float* x_rows, uint8_t* shared, const SharedLayout& s,
                                  int warp, int lane) {
  constexpr int kBatch = 4;  // independent loads and conversions in flight
  const int chunks = (a.w.k + kChunk - 1) / kChunk;
  const int rounds = (chunks + kResidues * kBatch - 1) / (kResidues * kBatch);  // of a row
  const int residues = division.residues();
  const int own = !B::kShares ? warp : warp & (residues - 1);
  const int chunk = division.template chunk<W>(own);
  const int turn = division.turn(warp);
  const int turns = division.turns();
  const int items = (a.in.rows - turn + turns - 1) / turns * rounds;
  const auto read = [&](int item, float4(&x)[kBatch]) {
    const int m = turn + item / rounds * turns;
    const int first = chunk + item % rounds * (kResidues * kBatch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int k = (first + i * kResidues) * kChunk + lane * 4;
      const float* row = x_rows + static_cast<int64_t>(m) * a.w.k;
      x[i] = k < a.w.k && item < items ? __ldcg(reinterpret_cast<const float4*>(row + k))
                                       : float4{0, 0, 0, 0};
    }
  };
  float4 x[kBatch];
  read(0, x);
  float sum = 0;
  for (int item = 0; item < items; ++item) {
    float4 next[kBatch];
    read(item + 1, next);
    const int m = turn + item / rounds * turns;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int round = item % rounds * kBatch + i;
      const int c = chunk + round * kResidues;  // of the row
      const int at = own + round * residues;    // of those in this block
      float4 v = x[i];
      if constexpr (Norm) {
        sum = __fmaf_rn(v.x, v.x, sum);
        sum = __fmaf_rn(v.y, v.y, sum);
        sum = __fmaf_rn(v.z, v.z, sum);
        sum = __fmaf_rn(v.w, v.w, sum);
        const float4 weight =
            c * kChunk + lane * 4 < a.w.k
                ? load_scalar4(shared + s.norm, at * kChunk + lane * 4, a.in.norm_type)
                : float4{0, 0, 0, 0};
        v = {v.x * weight.x, v.y * weight.y, v.z * weight.z, v.w * weight.w};
      }
      store_input<W>(shared, s, a.in.rows, m, at, lane, c < chunks, v);
      x[i] = next[i];
    }
    if constexpr (Norm) {
      if ((item + 1) % rounds == 0) {
        sum = warp_sum(sum);
        float* squares = reinterpret_cast<float*>(shared + s.squares) + m * kResidues + chunk;
        if (division.bits == 0) {
          if (lane == 0) *squares = sum;
        } else if (lane < division.blocks()) {
          *in_cluster(squares, lane) = sum;
        }
        sum = 0;
      }
    }
  }
}

}  // namespace gptfast::cuda
