// Attention of a decode step: split over the cache in chunks of kAttentionSplit absolute positions,
// so that a row's result depends on its own position only. A block computes (row, key head, chunk)
// items; the one that finishes a row's last chunk merges them in order. The number of items follows
// the used length, read on the device.
#include <algorithm>

#include "ops/cuda/attention.cuh"
#include "ops/cuda/launch.cuh"

namespace gptfast::cuda {
namespace {

/// One chunk of one row: scores, softmax, weighted values. `rows` holds the first batch of keys and
/// `slots` will hold that of values, complete up to position `read`.
template <typename T, int Lanes, int Heads>
__device__ void attend_chunk(const AttentionArgs& a, const Item& item, int read,
                             uint4 (&rows)[Layout<Lanes>::kReads], uint32_t slots,
                             SharedState<Heads>& s, float* out) {
  using L = Layout<Lanes>;
  const int end = item.position + 1;
  const int steps = min(L::kSteps, (item.position - item.chunk * kSplit) / L::kPositions + 1);
  float q[Heads][kVector];
  read_queries<Lanes, Heads>(a, item, q);
  copy_rows<T, Lanes, L::kReads>(a, item, a.cache.v, 0, read, end, slots);
  read_rows<T, Lanes>(a, item, a.cache.k, 0, read, end, rows);
  score_rows<T, Lanes>(item, 0, rows, q, s);
  for (int step = L::kReads; step < steps; step += L::kReads) {
    read_rows<T, Lanes>(a, item, a.cache.k, step, 0, end, rows);
    score_rows<T, Lanes>(item, step, rows, q, s);
  }
  __syncthreads();
  softmax_chunk(item, s);
  __syncthreads();
  float acc[Heads][kVector] = {};
  commit_copies();
  wait_copies<0>();
  load_slots<Lanes>(a, slots, rows);
  weigh_rows<T, Lanes>(item, 0, rows, s, acc);
  for (int step = L::kReads; step < steps; step += L::kReads) {
    read_rows<T, Lanes>(a, item, a.cache.v, step, 0, end, rows);
    weigh_rows<T, Lanes>(item, step, rows, s, acc);
  }
  __syncthreads();  // `out` takes the place of the values
  store_sums<Lanes, Heads>(a, acc, out);
  __syncthreads();
  store_chunk<Heads>(a, item, s, out);
}

template <typename T, int Lanes, int Heads>
__global__ void __maxnreg__(kMaxRegisters)
    attention_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(
      16) float out[];  // values [kReads][kThreads], then [kWarps][Heads][Dh]
  __shared__ SharedState<Heads> s;
  launch_dependents();
  const int items = count_items(a);
  int index = static_cast<int>(blockIdx.x);
  Item item;
  uint4 rows[Layout<Lanes>::kReads] = {};
  const uint32_t slots = shared_address(out) + threadIdx.x * 16;
  int read = 0;  // positions below this were written by earlier steps, so they may be read at once
  bool active = index < items && find_item(a, index, item);
  if (active) {
    read = min(a.map.pos[item.row / a.map.seq_len], item.position);
    prefetch_past<T>(a, item, read);
    read_rows<T, Lanes>(a, item, a.cache.k, 0, 0, read, rows);
    copy_rows<T, Lanes, Layout<Lanes>::kReads>(a, item, a.cache.v, 0, 0, read, slots);
  }
  wait_for_predecessor();
  while (index < items) {
    if (active) {
      attend_chunk<T, Lanes, Heads>(a, item, read, rows, slots, s, out);
      if (item.chunks > 1 && is_last(a, item, s)) merge_chunks<Heads>(a, item, out, s.stats);
      __syncthreads();
    }
    index += static_cast<int>(gridDim.x);
    active = index < items && find_item(a, index, item);
    read = 0;
  }
}

/// Requests batch `j` of an item - its keys', then its values' - or of the one after it.
template <typename T, int Lanes>
__device__ inline void request_batch(const AttentionArgs& a, const Item& item, int j, int begin,
                                     int end, uint32_t slot) {
  constexpr int kBatches = Layout<Lanes>::kStreamBatches;
  copy_rows<T, Lanes, kStreamReads>(a, item, j < kBatches ? a.cache.k : a.cache.v,
                                    j % kBatches * kStreamReads, begin, end, slot);
}

/// One chunk of one row whose first kStreamSlots batches are in flight, the oldest to `slot`.
/// Requests those of `next`, if it `goes_on`, behind them.
template <typename T, int Lanes, int Heads>
__device__ void attend_streamed(const AttentionArgs& a, const Item& item, const Item& next,
                                bool goes_on, uint32_t ring, uint32_t& slot, SharedState<Heads>& s,
                                float* out) {
  constexpr int kBatches = Layout<Lanes>::kStreamBatches;
  constexpr uint32_t kSlotBytes = kStreamReads * kThreads * 16;
  const auto request_behind = [&](int j) {
    j += kStreamSlots;
    if (j < 2 * kBatches) {
      request_batch<T, Lanes>(a, item, j, 0, item.position + 1, slot);
    } else if (goes_on) {
      request_batch<T, Lanes>(a, next, j - 2 * kBatches, 0, next.position + 1, slot);
    }
    commit_copies();
    slot = slot == ring + (kStreamSlots - 1) * kSlotBytes ? ring : slot + kSlotBytes;
  };
  float q[Heads][kVector];
  read_queries<Lanes, Heads>(a, item, q);
  uint4 rows[kStreamReads] = {};
#pragma unroll 1
  for (int j = 0; j < kBatches; ++j) {
    wait_copies<kStreamSlots - 1>();
    load_slots<Lanes>(a, slot, rows);
    score_rows<T, Lanes>(item, j * kStreamReads, rows, q, s);
    request_behind(j);
  }
  __syncthreads();
  softmax_chunk(item, s);
  __syncthreads();
  float acc[Heads][kVector] = {};
#pragma unroll 1
  for (int j = 0; j < kBatches; ++j) {
    wait_copies<kStreamSlots - 1>();
    load_slots<Lanes>(a, slot, rows);
    weigh_rows<T, Lanes>(item, j * kStreamReads, rows, s, acc);
    request_behind(kBatches + j);
  }
  store_sums<Lanes, Heads>(a, acc, out);
  __syncthreads();
  store_chunk<Heads>(a, item, s, out);
}

/// The block's first item from `index` on that exists.
__device__ inline bool next_item(const AttentionArgs& a, int items, int& index, Item& item) {
  for (; index < items; index += static_cast<int>(gridDim.x)) {
    if (find_item(a, index, item)) return true;
  }
  return false;
}

template <typename T, int Lanes, int Heads>
__global__ void __maxnreg__(kMaxRegisters)
    attention_stream_kernel(const __grid_constant__ AttentionArgs a) {
  static_assert(2 * Layout<Lanes>::kStreamBatches >= kStreamSlots);
  constexpr uint32_t kSlotBytes = kStreamReads * kThreads * 16;
  extern __shared__ __align__(16) float shared[];
  __shared__ SharedState<Heads> s;
  launch_dependents();
  const uint32_t ring = shared_address(shared) + threadIdx.x * 16;
  float* out = shared + kStreamSlots * kSlotBytes / 4;
  const int items = count_items(a);
  int index = static_cast<int>(blockIdx.x);
  Item item;
  bool active = next_item(a, items, index, item);
  int read = 0;
  if (active) {  // what earlier steps wrote may be read at once
    read = min(a.map.pos[item.row / a.map.seq_len], item.position);
    for (int j = 0; j < kStreamSlots; ++j) {
      request_batch<T, Lanes>(a, item, j, 0, read, ring + j * kSlotBytes);
    }
  }
  wait_for_predecessor();
  for (int j = 0; j < kStreamSlots; ++j) {
    if (active) {
      request_batch<T, Lanes>(a, item, j, read, item.position + 1, ring + j * kSlotBytes);
    }
    commit_copies();
  }
  uint32_t slot = ring;
  while (active) {
    Item next;
    index += static_cast<int>(gridDim.x);
    const bool goes_on = next_item(a, items, index, next);
    attend_streamed<T, Lanes, Heads>(a, item, next, goes_on, ring, slot, s, out);
    if (item.chunks > 1 && is_last(a, item, s)) merge_chunks<Heads>(a, item, out, s.stats);
    __syncthreads();
    item = next;
    active = goes_on;
  }
}

template <typename T, int Lanes, int Heads>
cudaError_t launch_attention(const Launch& launch, const AttentionArgs& a, int blocks) {
  const int bytes = std::max(kWarps * Heads * a.cache.head_dim * static_cast<int>(sizeof(float)),
                             Layout<Lanes>::kReads * kThreads * 16);
  return launch_kernel(launch, attention_kernel<T, Lanes, Heads>, dim3(blocks), kThreads, bytes, a);
}

template <typename T, int Lanes>
cudaError_t launch_stream(const Launch& launch, const AttentionArgs& a, int blocks) {
  const int bytes = kStreamSlots * kStreamReads * kThreads * 16 +
                    kWarps * kMaxHeads * a.cache.head_dim * static_cast<int>(sizeof(float));
  return launch_kernel(launch, attention_stream_kernel<T, Lanes, kMaxHeads>, dim3(blocks), kThreads,
                       bytes, a);
}

template <typename T, int Heads>
cudaError_t launch_heads(const Launch& launch, const AttentionArgs& a, int sms) {
  const int64_t items =
      static_cast<int64_t>(a.rows) * a.cache.local_heads * a.head_blocks * a.max_chunks;
  const int blocks = static_cast<int>(std::min<int64_t>(items, 2 * sms));
  // Chunks of several heads are worth it: Llama-3.1-8B at 4,090, 32,000 and 131,000 positions gains
  // 10, 13 and 26 % of a step. One head has too little to do a byte (7B at 32,000: 8 % lost).
  const bool stream = Heads > 1 && items > blocks;
  const int dim = a.cache.head_dim;
  if (dim <= 32) return launch_attention<T, 4, Heads>(launch, a, blocks);
  if (dim <= 64) {
    return stream ? launch_stream<T, 8>(launch, a, blocks)
                  : launch_attention<T, 8, Heads>(launch, a, blocks);
  }
  if (dim <= 128) {
    return stream ? launch_stream<T, 16>(launch, a, blocks)
                  : launch_attention<T, 16, Heads>(launch, a, blocks);
  }
  return launch_attention<T, 32, Heads>(launch, a, blocks);
}

template <typename T>
cudaError_t launch_type(const Launch& launch, const AttentionArgs& a, int sms) {
  return a.block_heads == 1 ? launch_heads<T, 1>(launch, a, sms)
                            : launch_heads<T, kMaxHeads>(launch, a, sms);
}

}  // namespace

cudaError_t attention(const Launch& launch, const float* q, const Cache& cache, const RowMap& map,
                      int rows, float* partials, float* y) {
  int sms = 0;
  const cudaError_t error = multiprocessors(sms);
  if (error != cudaSuccess) return error;
  AttentionArgs a{};
  a.q = q;
  a.cache = cache;
  a.map = map;
  a.rows = rows;
  a.max_chunks = (cache.max_seq + kSplit - 1) / kSplit;
  a.partials = partials;
  a.y = y;
  const int repeat = cache.heads / cache.local_heads;
  a.block_heads = std::min(repeat, kMaxHeads);
  a.head_blocks = (repeat + a.block_heads - 1) / a.block_heads;
  return cache.type == Scalar::kBFloat16 ? launch_type<__nv_bfloat16>(launch, a, sms)
                                         : launch_type<__half>(launch, a, sms);
}

}  // namespace gptfast::cuda
