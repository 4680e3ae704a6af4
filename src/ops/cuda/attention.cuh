// What the kernels of attention.cu are made of: the items of a step, reads of keys and values,
// scores, sums, and the merge of a row's chunks.
#pragma once

#include "ops/cuda/device.cuh"

namespace gptfast::cuda {

constexpr int kSplit = 256;  // positions of a chunk: ops.h's kAttentionSplit
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// Query heads that share a read of keys and values. More would need registers that the linear
// stages beside it use; the heads' blocks run side by side, so the second read comes from L2.
constexpr int kMaxHeads = 2;
constexpr int kMaxRegisters =
    96;  // a block fits an SM beside two blocks of linear stages (stage.cuh)
// For caches that give every block several chunks of several heads: batches of this many reads a
// lane go through a ring in shared memory, two ahead of the one in use, from chunk to chunk. On an
// SM two blocks fit beside one of a linear stage. The results are the same bits.
constexpr int kStreamReads = 4;
constexpr int kStreamSlots = 3;
constexpr int kVector = 8;  // elements of 16 bytes
constexpr int kBatch = 8;   // 16-byte reads in flight a lane

struct AttentionArgs {
  const float* q;
  Cache cache;
  RowMap map;
  int rows;
  int head_blocks;  // per key head
  int block_heads;  // of a block, at most
  int max_chunks;
  float* partials;  // [rows, H, max_chunks + 1, Dh + 2]: output, max, sum; the last entry holds a
                    // counter
  float* y;
};

struct Item {
  int row, local_head, first_head, heads, chunk, chunks, position;
  int64_t base;  // element of the cache where this head's position 0 lies
};

template <int Heads>
struct SharedState {
  float scores[Heads][kSplit];
  float max[Heads];
  float sum[Heads];
  float stats[kWarps * Heads * 2];  // merge_chunks: each warp's maxima and sums
  int last;
};

template <typename T>
__device__ inline void unpack(uint4 v, float (&out)[kVector]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
    } else {
      const float2 f = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      out[2 * i] = f.x;
      out[2 * i + 1] = f.y;
    }
  }
}

__device__ inline bool find_item(const AttentionArgs& a, int index, Item& item) {
  const int groups = a.cache.local_heads * a.head_blocks;
  item.row = index % a.rows;
  const int group = index / a.rows % groups;
  item.chunk = index / a.rows / groups;
  item.local_head = group / a.head_blocks;
  const int repeat = a.cache.heads / a.cache.local_heads;
  const int first = group % a.head_blocks * a.block_heads;
  item.first_head = item.local_head * repeat + first;
  item.heads = min(a.block_heads, repeat - first);
  const int b = item.row / a.map.seq_len;
  item.position = min(a.map.pos[b] + item.row % a.map.seq_len, a.cache.max_seq - 1);
  item.chunks = item.position / kSplit + 1;
  item.base = (static_cast<int64_t>(a.map.slot[b]) * a.cache.local_heads + item.local_head) *
              a.cache.max_seq * a.cache.head_dim;
  return item.chunk < item.chunks;
}

/// Items of a step: what the longest row needs, for every row.
__device__ inline int count_items(const AttentionArgs& a) {
  int chunks = 0;
  for (int row = 0; row < a.rows; ++row) {
    const int position =
        min(a.map.pos[row / a.map.seq_len] + row % a.map.seq_len, a.cache.max_seq - 1);
    chunks = max(chunks, position / kSplit + 1);
  }
  return chunks * a.cache.local_heads * a.head_blocks * a.rows;
}

/// How a block reads a chunk: 16 bytes a lane, `Lanes` lanes a position, the warps side by side.
template <int Lanes>
struct Layout {
  static constexpr int kPositions = kWarp / Lanes * kWarps;  // a block reads at a time
  static constexpr int kSteps = kSplit / kPositions;
  static constexpr int kReads = kSteps < kBatch ? kSteps : kBatch;  // of a batch
  static constexpr int kStreamBatches = kSteps / kStreamReads;

  __device__ static int position(int step) {  // in the chunk
    return step * kPositions + static_cast<int>(threadIdx.x) / Lanes;
  }
  __device__ static int dim() { return static_cast<int>(threadIdx.x) % Lanes * kVector; }
};

/// Reads this lane's part of the positions [begin, end) that the batch from `step` on covers;
/// leaves the others alone.
template <typename T, int Lanes>
__device__ inline void read_rows(const AttentionArgs& a, const Item& item, const void* cache,
                                 int step, int begin, int end,
                                 uint4 (&raw)[Layout<Lanes>::kReads]) {
  using L = Layout<Lanes>;
  const T* from = static_cast<const T*>(cache) + item.base + L::dim();
  if (L::dim() >= a.cache.head_dim) return;
#pragma unroll
  for (int i = 0; i < L::kReads; ++i) {
    const int position = item.chunk * kSplit + L::position(step + i);
    if (position >= begin && position < end) {
      raw[i] = __ldcg(reinterpret_cast<const uint4*>(from + position * a.cache.head_dim));
    }
  }
}

/// The same into shared memory, asynchronously: slot i of this thread. A thread reads back only
/// what it copied.
template <typename T, int Lanes, int Reads>
__device__ inline void copy_rows(const AttentionArgs& a, const Item& item, const void* cache,
                                 int step, int begin, int end, uint32_t slots) {
  using L = Layout<Lanes>;
  const T* from = static_cast<const T*>(cache) + item.base + L::dim();
  if (L::dim() >= a.cache.head_dim) return;
#pragma unroll
  for (int i = 0; i < Reads; ++i) {
    const int position = item.chunk * kSplit + L::position(step + i);
    if (position >= begin && position < end) {
      copy_async16(slots + i * kThreads * 16, from + position * a.cache.head_dim, true,
                   evict_first_policy());
    }
  }
}

/// What this thread copied.
template <int Lanes, int Reads>
__device__ inline void load_slots(const AttentionArgs& a, uint32_t slots, uint4 (&rows)[Reads]) {
  if (Layout<Lanes>::dim() >= a.cache.head_dim) return;
#pragma unroll
  for (int i = 0; i < Reads; ++i) rows[i] = load_shared16(slots + i * kThreads * 16);
}

/// scores[h][i] = q_h . k_i / sqrt(Dh) for the positions of a batch; -inf past the row's own.
template <typename T, int Lanes, int Heads, int Reads>
__device__ inline void score_rows(const Item& item, int step, const uint4 (&raw)[Reads],
                                  const float (&q)[Heads][kVector], SharedState<Heads>& s) {
  using L = Layout<Lanes>;
#pragma unroll
  for (int i = 0; i < Reads; ++i) {
    float key[kVector];
    unpack<T>(raw[i], key);
    const int at = L::position(step + i);
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      float dot = 0;
#pragma unroll
      for (int j = 0; j < kVector; ++j) dot = __fmaf_rn(q[h][j], key[j], dot);
#pragma unroll
      for (int offset = Lanes / 2; offset > 0; offset /= 2) {
        dot += __shfl_xor_sync(0xffffffffU, dot, offset);
      }
      if (threadIdx.x % Lanes == 0) {
        s.scores[h][at] = item.chunk * kSplit + at <= item.position ? dot : -INFINITY;
      }
    }
  }
}

/// scores -> exp(scores - max); the maximum and the sum beside them. One warp a head.
template <int Heads>
__device__ void softmax_chunk(const Item& item, SharedState<Heads>& s) {
  const int h = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (h >= item.heads) return;
  const int used = item.position - item.chunk * kSplit;  // the last position that was scored
  float v[kSplit / kWarp];
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kSplit / kWarp; ++i) {
    v[i] = i * kWarp + lane <= used ? s.scores[h][i * kWarp + lane] : -INFINITY;
    max = fmaxf(max, v[i]);
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, offset));
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSplit / kWarp; ++i) {
    v[i] = __expf(v[i] - max);
    sum += v[i];
    s.scores[h][i * kWarp + lane] = v[i];
  }
  sum = warp_sum(sum);
  if (lane == 0) s.max[h] = max, s.sum[h] = sum;
}

/// acc[h] += p_i v_i for the positions of a batch.
template <typename T, int Lanes, int Heads, int Reads>
__device__ inline void weigh_rows(const Item& item, int step, const uint4 (&raw)[Reads],
                                  const SharedState<Heads>& s, float (&acc)[Heads][kVector]) {
  using L = Layout<Lanes>;
#pragma unroll
  for (int i = 0; i < Reads; ++i) {
    const int at = L::position(step + i);
    if (item.chunk * kSplit + at > item.position) continue;  // p is zero, the read may be rubbish
    float value[kVector];
    unpack<T>(raw[i], value);
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      const float p = s.scores[h][at];
#pragma unroll
      for (int j = 0; j < kVector; ++j) acc[h][j] = __fmaf_rn(p, value[j], acc[h][j]);
    }
  }
}

/// out[warp][h][d] = sums over the warp's positions.
template <int Lanes, int Heads>
__device__ inline void store_sums(const AttentionArgs& a, float (&acc)[Heads][kVector],
                                  float* out) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int d = Layout<Lanes>::dim();
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
#pragma unroll
      for (int offset = Lanes; offset < kWarp; offset *= 2) {
        acc[h][j] += __shfl_xor_sync(0xffffffffU, acc[h][j], offset);
      }
      if (threadIdx.x % kWarp < Lanes && d < a.cache.head_dim) {
        out[(warp * Heads + h) * a.cache.head_dim + d + j] = acc[h][j];
      }
    }
  }
}

/// Writes the chunk's result: the row's output when there is one chunk, else a partial one.
template <int Heads>
__device__ void store_chunk(const AttentionArgs& a, const Item& item, const SharedState<Heads>& s,
                            const float* out) {
  const int dh = a.cache.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < item.heads * dh; i += kThreads) {
    const int h = i / dh;
    const int d = i % dh;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += out[(w * Heads + h) * dh + d];
    const int64_t head = static_cast<int64_t>(item.row) * a.cache.heads + item.first_head + h;
    if (item.chunks == 1) {
      a.y[head * dh + d] = sum / s.sum[h];
    } else {
      float* partial = a.partials + (head * (a.max_chunks + 1) + item.chunk) * (dh + 2);
      partial[d] = sum;
      if (d == 0) partial[dh] = s.max[h], partial[dh + 1] = s.sum[h];
    }
  }
}

/// Merges a row's chunks: each warp a run of them in order, then the warps in order.
template <int Heads>
__device__ void merge_chunks(const AttentionArgs& a, const Item& item, float* out, float* stats) {
  const int dh = a.cache.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int begin = item.chunks * warp / kWarps;
  const int end = item.chunks * (warp + 1) / kWarps;
  for (int h = 0; h < item.heads; ++h) {
    const int64_t head = static_cast<int64_t>(item.row) * a.cache.heads + item.first_head + h;
    const float* partial = a.partials + head * (a.max_chunks + 1) * (dh + 2);
    float max = -INFINITY;
    for (int c = begin + lane; c < end; c += kWarp) {
      max = fmaxf(max, __ldcg(partial + static_cast<int64_t>(c) * (dh + 2) + dh));
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, offset));
    }
    float sum = 0;
    float acc[kWarp / kVector * 2] = {};  // Dh <= 256: lane holds lane, lane + 32, ...
#pragma unroll 4
    for (int c = begin; c < end; ++c) {
      const float* p = partial + static_cast<int64_t>(c) * (dh + 2);
      const float factor = __expf(__ldcg(p + dh) - max);
      sum = __fmaf_rn(__ldcg(p + dh + 1), factor, sum);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (lane + i * kWarp < dh) acc[i] = __fmaf_rn(__ldcg(p + lane + i * kWarp), factor, acc[i]);
      }
    }
    for (int i = 0; i < 8; ++i) {
      if (lane + i * kWarp < dh) out[(warp * Heads + h) * dh + lane + i * kWarp] = acc[i];
    }
    if (lane == 0) stats[(warp * Heads + h) * 2] = max, stats[(warp * Heads + h) * 2 + 1] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < item.heads * dh; i += kThreads) {
    const int h = i / dh;
    float max = -INFINITY;
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, stats[(w * Heads + h) * 2]);
    float sum = 0;
    float value = 0;
    for (int w = 0; w < kWarps; ++w) {
      const float factor = __expf(stats[(w * Heads + h) * 2] - max);
      sum = __fmaf_rn(stats[(w * Heads + h) * 2 + 1], factor, sum);
      value = __fmaf_rn(out[(w * Heads + h) * dh + i % dh], factor, value);
    }
    const int64_t head = static_cast<int64_t>(item.row) * a.cache.heads + item.first_head + h;
    a.y[head * dh + i % dh] = value / sum;
  }
}

/// Requests into L2 the chunk's keys and values that earlier steps wrote.
template <typename T>
__device__ inline void prefetch_past(const AttentionArgs& a, const Item& item, int past) {
#if __CUDA_ARCH__ >= 900
  const int begin = item.chunk * kSplit;
  const int count = min(past - begin, kSplit);
  if (count <= 0 || threadIdx.x >= 2) return;
  const T* from = static_cast<const T*>(threadIdx.x == 0 ? a.cache.k : a.cache.v) + item.base +
                  static_cast<int64_t>(begin) * a.cache.head_dim;
  const uint32_t bytes = static_cast<uint32_t>(count * a.cache.head_dim * sizeof(T));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

/// This lane's dimensions of the queries, times 1 / sqrt(Dh).
template <int Lanes, int Heads>
__device__ inline void read_queries(const AttentionArgs& a, const Item& item,
                                    float (&q)[Heads][kVector]) {
  const int d = Layout<Lanes>::dim();
  const float scale = rsqrtf(static_cast<float>(a.cache.head_dim));
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
    const int64_t head = static_cast<int64_t>(item.row) * a.cache.heads + item.first_head + h;
    const bool in = h < item.heads && d < a.cache.head_dim;
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const float4 v =
          in ? __ldcg(reinterpret_cast<const float4*>(a.q + head * a.cache.head_dim + d + i))
             : float4{0, 0, 0, 0};
      q[h][i] = v.x * scale, q[h][i + 1] = v.y * scale, q[h][i + 2] = v.z * scale,
      q[h][i + 3] = v.w * scale;
    }
  }
}

/// True for all threads of the block that stored a row's last chunk.
template <int Heads>
__device__ inline bool is_last(const AttentionArgs& a, const Item& item, SharedState<Heads>& s) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t head = static_cast<int64_t>(item.row) * a.cache.heads + item.first_head;
    float* counter =
        a.partials + (head * (a.max_chunks + 1) + a.max_chunks) * (a.cache.head_dim + 2);
    const unsigned last = static_cast<unsigned>(item.chunks) - 1;
    s.last = static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(counter), last) == last);
  }
  __syncthreads();
  __threadfence();
  return s.last != 0;
}

}  // namespace gptfast::cuda
