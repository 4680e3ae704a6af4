// What the kernel of attention.cu is made of: the items of a step, a warp's stream of keys and
// values, its products, and the merge of a row's splits.
#pragma once

#include "ops/cuda/device.cuh"

namespace gptfast::cuda {

constexpr int kMinSplit = 256;   // positions: ops.h's kAttentionSplit
constexpr int kMaxSplits = 128;  // of a row
constexpr int kUnit = 32;        // splits begin at multiples of this
// Query heads of a block. Each takes two columns of a product: float32 queries and weights are the
// sums of two 16-bit values.
constexpr int kHeads = 4;
constexpr int kVector = 8;  // elements of 16 bytes
// Batches of keys and values of a warp in flight, and what goes with that. A stage's blocks must
// find the same room on all SMs (two on one take twice the time), so every SM gets the same blocks
// of this kernel, with work or without, and they leave room for one block of a linear stage
// (stage_layout.cuh): one block of 129 KB, or two of 66 KB. Measured on an H200 with Llama-2-7B,
// the one is faster by 3 % of a step with a row, the two with six or eight rows, by 1 to 2 % at
// position 200 and by 8 to 14 % from 1,000 on.
constexpr int kDeep = 2;
constexpr int kShallow = 1;
constexpr int block_registers(int depth) {
  return (depth == kDeep ? 120 : 88) * 256;
}

struct AttentionArgs {
  const float* q;
  Cache cache;
  RowMap map;
  int rows;
  int head_blocks;     // per key head
  int block_heads;     // of a block, at most
  int max_splits;      // of a row
  int partial_splits;  // partials' size
  float* partials;  // [rows, H, partial_splits, Dh + 2]: output, max, sum; the last entry holds a
                    // counter
  float* y;
};

/// What a block computes at a time: the query heads of a key head over positions [begin, end).
struct Item {
  int row, local_head, first_head, heads, split, splits, begin, end;
  int64_t base;  // element of the cache where this head's position 0 lies
};

__device__ inline int row_position(const AttentionArgs& a, int row) {
  return min(a.map.pos[row / a.map.seq_len] + row % a.map.seq_len, a.cache.max_seq - 1);
}

/// A row's splits: as many as its position, the heads and the GPU make useful, whatever the other
/// rows are.
__device__ inline int count_splits(const AttentionArgs& a, int position) {
  return min(position / kMinSplit + 1, a.max_splits);
}

__device__ inline bool find_item(const AttentionArgs& a, int index, Item& item) {
  const int groups = a.cache.local_heads * a.head_blocks;
  item.row = index % a.rows;
  const int group = index / a.rows % groups;
  item.split = index / a.rows / groups;
  item.local_head = group / a.head_blocks;
  const int repeat = a.cache.heads / a.cache.local_heads;
  const int first = group % a.head_blocks * a.block_heads;
  item.first_head = item.local_head * repeat + first;
  item.heads = min(a.block_heads, repeat - first);
  const int position = row_position(a, item.row);
  item.splits = count_splits(a, position);
  const int units = position / kUnit + 1;
  item.begin = units * item.split / item.splits * kUnit;
  item.end = min(units * (item.split + 1) / item.splits * kUnit, position + 1);
  const int slot = a.map.slot[item.row / a.map.seq_len];
  item.base = (static_cast<int64_t>(slot) * a.cache.local_heads + item.local_head) *
              a.cache.max_seq * a.cache.head_dim;
  return item.split < item.splits;
}

/// Items of a step: what the longest row needs, for every row.
__device__ inline int count_items(const AttentionArgs& a) {
  int splits = 0;
  for (int row = 0; row < a.rows; ++row) {
    splits = max(splits, count_splits(a, row_position(a, row)));
  }
  return splits * a.cache.local_heads * a.head_blocks * a.rows;
}

/// Sizes for heads of up to `Dims` dimensions, a power of two.
template <int Dims>
struct Layout {
  static constexpr int kWarps = Dims <= 128 ? 8 : 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kTiles = Dims <= 64 ? 2 : 1;  // of 16 positions, in a batch
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kStride = kWarps * kRows;  // positions from a warp's batch to its next
  static constexpr int kPitch = Dims * 2;         // bytes of a row
  static constexpr int kSlotBytes = kRows * kPitch;
  static constexpr int kBatchBytes = 2 * kSlotBytes;  // keys, then values
  static constexpr int kSteps = Dims / 16;            // products a tile
  static constexpr int kQueryBytes = kSteps * kWarp * 8;
  // Where the ring was: a head's sums, or a head's merged sum and the splits' factors.
  static constexpr int kOutPitch = Dims + 8;
  static_assert(kHeads * kOutPitch * 4 <= kBatchBytes);
  static_assert(Dims * 4 + kMaxSplits * 8 <= kBatchBytes);

  static constexpr int shared_bytes(int depth) {
    return kWarps * depth * kBatchBytes + kQueryBytes;
  }

  /// The 16-byte pieces of row r lie at piece ^ swizzle(r), so that 8 rows' pieces with one number
  /// lie in different banks. Of sums of different powers of two it is the xor.
  __device__ static constexpr int swizzle(int row) { return Dims >= 64 ? row & 7 : row >> 1 & 3; }
};

template <int Dims>
struct SharedState {
  float2 stats[Layout<Dims>::kWarps][kHeads];  // max, sum
  int last;
};

/// One warp's copies of an item's keys and values: batches of kRows positions, the warps' side by
/// side. A lane copies one piece of every kStep-th row.
template <int Dims>
struct Stream {
  using L = Layout<Dims>;
  static constexpr int kPieces = Dims / kVector;
  static constexpr int kStep = kWarp / kPieces;  // rows that the warp copies at a time
  static constexpr int kCopies = L::kRows / kStep;

  const AttentionArgs& a;
  int row, dim;
  uint32_t offset;  // of this lane's piece in a slot

  __device__ Stream(const AttentionArgs& args, int lane)
      : a(args), row(lane / kPieces), dim(lane % kPieces * kVector) {
    offset = row * L::kPitch + (lane % kPieces ^ L::swizzle(row)) * 16;
  }

  __device__ static uint32_t copy_offset(uint32_t offset, int i) {
    return (offset ^ L::swizzle(i * kStep) * 16) + i * kStep * L::kPitch;
  }

  /// Requests the positions of the batch at `first` that are below `end`.
  __device__ void request_past(const void* cache, const Item& item, int first, int end,
                               uint32_t slot) const {
    const auto* from = static_cast<const uint16_t*>(cache) + item.base + dim;
    if (dim >= a.cache.head_dim) return;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int position = first + i * kStep + row;
      if (position < end) {
        copy_async16(slot + copy_offset(offset, i), from + position * a.cache.head_dim);
      }
    }
  }

  /// Requests those from `begin` on, zeros where the item or the head ends: rubbish times zero may
  /// not be zero.
  __device__ void request(const void* cache, const Item& item, int first, int begin,
                          uint32_t slot) const {
    if (first < item.end) {
      const auto* from = static_cast<const uint16_t*>(cache) + item.base;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int position = first + i * kStep + row;
        const bool valid = position < item.end && dim < a.cache.head_dim;
        const int at = valid ? position * a.cache.head_dim + dim : 0;
        if (position >= begin || !valid) {
          copy_async16(slot + copy_offset(offset, i), from + at, valid);
        }
      }
    }
    commit_copies();
  }
};

template <typename T>
__device__ inline T round_to(float v) {
  if constexpr (__is_same(T, __nv_bfloat16)) {
    return __float2bfloat16_rn(v);
  } else {
    return __float2half_rn(v);
  }
}
__device__ inline float widen(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ inline float widen(__half v) {
  return __half2float(v);
}
/// a in the low half.
__device__ inline uint32_t pack(__nv_bfloat16 a, __nv_bfloat16 b) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(b)) << 16 | __bfloat16_as_ushort(a);
}
__device__ inline uint32_t pack(__half a, __half b) {
  return static_cast<uint32_t>(__half_as_ushort(b)) << 16 | __half_as_ushort(a);
}

/// v as the sum of two values of type T.
template <typename T>
struct Parts {
  T hi, lo;
  __device__ explicit Parts(float v) : hi(round_to<T>(v)), lo(round_to<T>(v - widen(hi))) {}
};

/// Queries times log2(e) / sqrt(Dh) as operands b, [kSteps][kWarp] in shared memory: column 2h is
/// head h's high parts, 2h + 1 its low ones.
template <typename T, int Dims>
__device__ inline void store_queries(const AttentionArgs& a, const Item& item, uint2* queries) {
  using L = Layout<Dims>;
  constexpr float kLog2E = 1.4426950408889634F;
  const float scale = rsqrtf(static_cast<float>(a.cache.head_dim)) * kLog2E;
  for (int i = static_cast<int>(threadIdx.x); i < L::kSteps * kWarp; i += L::kThreads) {
    const int g = i % kWarp / 4;
    const int t = i % 4;
    const float* q =
        a.q + (static_cast<int64_t>(item.row) * a.cache.heads + item.first_head + g / 2) *
                  a.cache.head_dim;
    uint32_t b[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int dim = i / kWarp * 16 + half * 8 + 2 * t;
      float2 v = {0.0F, 0.0F};
      if (g / 2 < item.heads && dim < a.cache.head_dim) {
        v = __ldcg(reinterpret_cast<const float2*>(q + dim));
      }
      const Parts<T> x(v.x * scale);
      const Parts<T> y(v.y * scale);
      b[half] = g % 2 == 0 ? pack(x.hi, y.hi) : pack(x.lo, y.lo);
    }
    queries[i] = {b[0], b[1]};
  }
}

/// A warp's sums over the positions it has seen. Lane 4 * g + t has head t: of every 16 dimensions
/// numbers g and g + 8.
template <typename T, int Dims>
struct Accumulator {
  using L = Layout<Dims>;
  float max = -INFINITY;
  float sum = 0;                 // of this lane's positions only
  float out[L::kSteps][4] = {};  // dimension g by high and low weights, then g + 8

  /// Weights exp2(q k - max) of a batch of keys as operand b of the products with values.
  __device__ void weigh(uint32_t keys, const uint2* queries, int first, int end, int lane,
                        uint32_t (&weights)[L::kTiles][2]) {
    float score[L::kTiles][2];
    const int row = lane % 16;
    uint32_t from = keys + row * L::kPitch + (lane / 16 ^ L::swizzle(row)) * 16;
#pragma unroll
    for (int tile = 0; tile < L::kTiles; ++tile, from += 16 * L::kPitch) {
      float c[2][4] = {};
#pragma unroll
      for (int j = 0; j < L::kSteps; ++j) {
        const uint4 k = load_matrices(from ^ j * 32);
        const uint2 q = queries[j * kWarp + lane];
        mma_k16<T>(c[j % 2], k.x, k.y, k.z, k.w, q.x, q.y);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = first + tile * 16 + half * 8 + lane / 4;
        const float high = c[0][2 * half] + c[1][2 * half];
        const float low = c[0][2 * half + 1] + c[1][2 * half + 1];
        score[tile][half] = position < end ? high + low : -INFINITY;
      }
    }
    float most = max;
#pragma unroll
    for (int tile = 0; tile < L::kTiles; ++tile) {
      most = fmaxf(most, fmaxf(score[tile][0], score[tile][1]));
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, offset));
    }
    scale(exp2f(max - most));
    max = most;
#pragma unroll
    for (int tile = 0; tile < L::kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float weight = exp2f(score[tile][half] - max);
        sum += weight;
        const Parts<T> parts(weight);
        weights[tile][half] = transpose_matrix(pack(parts.hi, parts.lo));
      }
    }
  }

  __device__ void scale(float factor) {
    sum *= factor;
#pragma unroll
    for (int j = 0; j < L::kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= factor;
    }
  }

  __device__ void add(uint32_t values, const uint32_t (&weights)[L::kTiles][2], int lane) {
    const int row = lane / 16 * 8 + lane % 8;
    uint32_t from = values + row * L::kPitch + (lane / 8 % 2 ^ L::swizzle(row)) * 16;
#pragma unroll
    for (int tile = 0; tile < L::kTiles; ++tile, from += 16 * L::kPitch) {
#pragma unroll
      for (int j = 0; j < L::kSteps; ++j) {
        const uint4 v = load_matrices_transposed(from ^ j * 32);
        mma_k16<T>(out[j], v.x, v.y, v.z, v.w, weights[tile][0], weights[tile][1]);
      }
    }
  }

  /// sums [head][kOutPitch] and this head's entry of stats.
  __device__ void store(float* sums, float2* stats, int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    }
    if (g == 0) stats[t] = {max, sum};
#pragma unroll
    for (int j = 0; j < L::kSteps; ++j) {
      sums[t * L::kOutPitch + j * 16 + g] = out[j][0] + out[j][1];
      sums[t * L::kOutPitch + j * 16 + g + 8] = out[j][2] + out[j][3];
    }
  }
};

__device__ inline int64_t head_index(const AttentionArgs& a, const Item& item, int h) {
  return static_cast<int64_t>(item.row) * a.cache.heads + item.first_head + h;
}

/// A head's partial results, one a split.
__device__ inline float* partial_of(const AttentionArgs& a, const Item& item, int h, int split) {
  return a.partials + (head_index(a, item, h) * a.partial_splits + split) * (a.cache.head_dim + 2);
}

/// Adds up what the warps found: the row's output when there is one split, else a partial one.
/// sums: `pitch` floats a warp.
template <int Dims>
__device__ void store_split(const AttentionArgs& a, const Item& item, const float* sums, int pitch,
                            const float2 (&stats)[Layout<Dims>::kWarps][kHeads]) {
  using L = Layout<Dims>;
  const int dh = a.cache.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < item.heads * dh; i += L::kThreads) {
    const int h = i / dh;
    const int d = i % dh;
    float max = -INFINITY;
#pragma unroll
    for (int w = 0; w < L::kWarps; ++w) max = fmaxf(max, stats[w][h].x);
    float sum = 0;
    float value = 0;
#pragma unroll
    for (int w = 0; w < L::kWarps; ++w) {
      const float factor = exp2f(stats[w][h].x - max);
      sum = __fmaf_rn(stats[w][h].y, factor, sum);
      value = __fmaf_rn(sums[w * pitch + h * L::kOutPitch + d], factor, value);
    }
    if (item.splits == 1) {
      a.y[head_index(a, item, h) * dh + d] = value / sum;
    } else {
      float* partial = partial_of(a, item, h, item.split);
      partial[d] = value;
      if (d == 0) partial[dh] = max, partial[dh + 1] = sum;
    }
  }
}

/// True for all threads of the block that stored a row's last split.
__device__ inline bool is_last(const AttentionArgs& a, const Item& item, int& shared_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* counter = reinterpret_cast<unsigned*>(partial_of(a, item, 0, a.partial_splits - 1));
    const unsigned last = static_cast<unsigned>(item.splits) - 1;
    shared_last = static_cast<int>(count_arrival(counter, last) == last);
  }
  __syncthreads();
  return shared_last != 0;
}

/// Merges a row's splits: `parts` warps a head, each every parts-th split in order, then the parts
/// in order. shared: `pitch` floats a warp, for its sums and then its splits' factors.
template <int Dims>
__device__ void merge_splits(const AttentionArgs& a, const Item& item, float* shared, int pitch,
                             float2 (&stats)[Layout<Dims>::kWarps][kHeads]) {
  using L = Layout<Dims>;
  constexpr int kValues = Dims / kWarp;
  constexpr int kAhead = 4;  // splits that a warp requests at a time
  const int dh = a.cache.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int parts = L::kWarps / item.heads;
  float* const sums = shared + warp * pitch;
  auto* const factors = reinterpret_cast<float2*>(sums + Dims);
  if (warp < parts * item.heads) {
    const float* partials = partial_of(a, item, warp / parts, 0);
    float values[kAhead][kValues] = {};
    const auto load = [&](int c) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i, c += parts) {
#pragma unroll
        for (int j = 0; j < kValues; ++j) {
          const int d = lane + j * kWarp;
          if (c < item.splits && d < dh) values[i][j] = __ldcg(partials + c * (dh + 2) + d);
        }
      }
    };
    load(warp % parts);
    float max = -INFINITY;
    for (int c = lane; c < item.splits; c += kWarp) {
      factors[c] = __ldcg(reinterpret_cast<const float2*>(partials + c * (dh + 2) + dh));
      max = fmaxf(max, factors[c].x);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, offset));
    }
    float sum = 0;
    for (int c = lane; c < item.splits; c += kWarp) {
      factors[c].x = exp2f(factors[c].x - max);
      sum = __fmaf_rn(factors[c].y, factors[c].x, sum);
    }
    sum = warp_sum(sum);
    __syncwarp();
    if (lane == 0) stats[warp][0].y = sum;
    float acc[kValues] = {};
    for (int c = warp % parts; c < item.splits;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i, c += parts) {
        if (c >= item.splits) break;
#pragma unroll
        for (int j = 0; j < kValues; ++j) {
          acc[j] = __fmaf_rn(values[i][j], factors[c].x, acc[j]);
        }
      }
      load(c);
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) sums[lane + j * kWarp] = acc[j];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < item.heads * dh; i += L::kThreads) {
    const int h = i / dh;
    float value = 0;
    for (int p = 0; p < parts; ++p) value += shared[(h * parts + p) * pitch + i % dh];
    a.y[head_index(a, item, h) * dh + i % dh] = value / stats[h * parts][0].y;
  }
}

}  // namespace gptfast::cuda
