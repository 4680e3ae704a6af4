// Attention of a decode step: split over the cache by a row's own position, so that its result
// depends on nothing else. A block computes (row, key head, split) items; the one that finishes a
// row's last split merges them in order. The number of items follows the used length, read on the
// device.
//
// It is bound by memory: each warp has its own positions, its own ring in shared memory that
// asynchronous copies fill ahead, and its own running softmax, so that nothing waits for another
// warp until an item ends. Tensor cores multiply what arrives: keys and values are operand a as
// they lie, queries and weights of up to four heads the 8 columns of operand b.
#include <algorithm>

#include "ops/cuda/attention.cuh"
#include "ops/cuda/launch.cuh"

namespace gptfast::cuda {
namespace {

/// Requests the first batches of an item from position `begin` on.
template <int Dims, int Depth>
__device__ void request_first(const AttentionArgs& a, const Item& item, const Stream<Dims>& stream,
                              int first, int begin, uint32_t slot) {
  using L = Layout<Dims>;
#pragma unroll
  for (int i = 0; i < Depth; ++i, first += L::kStride, slot += L::kBatchBytes) {
    stream.request(a.cache.k, item, first, begin, slot);
    stream.request(a.cache.v, item, first, begin, slot + L::kSlotBytes);
  }
}

/// Adds an item's batches to `acc`; the first ones have been requested.
template <typename T, int Dims, int Depth>
__device__ void attend(const AttentionArgs& a, const Item& item, const Stream<Dims>& stream,
                       uint32_t ring, const uint2* queries, Accumulator<T, Dims>& acc, int first,
                       int lane) {
  using L = Layout<Dims>;
  constexpr int kPending = 2 * Depth - 1;
  uint32_t slot = ring;
  for (; first < item.end; first += L::kStride) {
    const int ahead = first + Depth * L::kStride;
    uint32_t weights[L::kTiles][2];
    wait_copies<kPending>();
    __syncwarp();
    acc.weigh(slot, queries, first, item.end, lane, weights);
    __syncwarp();
    stream.request(a.cache.k, item, ahead, 0, slot);
    wait_copies<kPending>();
    __syncwarp();
    acc.add(slot + L::kSlotBytes, weights, lane);
    __syncwarp();
    stream.request(a.cache.v, item, ahead, 0, slot + L::kSlotBytes);
    if constexpr (Depth > 1) {
      slot += L::kBatchBytes;
      if (slot == ring + Depth * L::kBatchBytes) slot = ring;
    }
  }
}

template <typename T, int Dims, int Depth>
__global__ void __maxnreg__((block_registers(Depth) / Layout<Dims>::kThreads))
    attention_kernel(const __grid_constant__ AttentionArgs a) {
  using L = Layout<Dims>;
  constexpr int kRingBytes = Depth * L::kBatchBytes;  // of a warp
  extern __shared__ __align__(512) uint8_t shared[];  // rings, queries
  __shared__ SharedState<Dims> s;
  launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  auto* sums = reinterpret_cast<float*>(shared);  // in place of the rings
  auto* queries = reinterpret_cast<uint2*>(shared + L::kWarps * kRingBytes);
  const uint32_t ring = shared_address(shared) + warp * kRingBytes;
  const Stream<Dims> stream(a, lane);
  const int items = count_items(a);
  int index = static_cast<int>(blockIdx.x);
  Item item;
  bool active = index < items && find_item(a, index, item);
  int read = 0;  // positions below this were written by earlier steps, so they may be read at once
  if (active) {
    read = min(a.map.pos[item.row / a.map.seq_len], item.end);
    const int first = item.begin + warp * L::kRows;
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
      const uint32_t slot = ring + i * L::kBatchBytes;
      stream.request_past(a.cache.k, item, first + i * L::kStride, read, slot);
      stream.request_past(a.cache.v, item, first + i * L::kStride, read, slot + L::kSlotBytes);
    }
  }
  wait_for_predecessor();
  while (index < items) {
    if (active) {
      const int first = item.begin + warp * L::kRows;
      request_first<Dims, Depth>(a, item, stream, first, read, ring);
      store_queries<T, Dims>(a, item, queries);
      __syncthreads();
      Accumulator<T, Dims> acc;
      attend<T, Dims, Depth>(a, item, stream, ring, queries, acc, first, lane);
      acc.store(sums + warp * (kRingBytes / 4), s.stats[warp], lane);
      __syncthreads();
      store_split<Dims>(a, item, sums, kRingBytes / 4, s.stats);
      if (item.splits > 1 && is_last(a, item, s.last)) {
        merge_splits<Dims>(a, item, sums, kRingBytes / 4, s.stats);
      }
      __syncthreads();
    }
    index += static_cast<int>(gridDim.x);
    active = index < items && find_item(a, index, item);
    read = 0;
  }
}

template <typename T, int Dims>
cudaError_t launch_dims(const Launch& launch, const AttentionArgs& a, int sms) {
  using L = Layout<Dims>;
  int most_shared = 0;
  const cudaError_t error = shared_limit(most_shared);
  if (error != cudaSuccess) return error;
  if (a.rows == 1 && L::shared_bytes(kDeep) <= most_shared) {
    return launch_kernel(launch, attention_kernel<T, Dims, kDeep>, dim3(sms), L::kThreads,
                         L::shared_bytes(kDeep), a);
  }
  return launch_kernel(launch, attention_kernel<T, Dims, kShallow>, dim3(2 * sms), L::kThreads,
                       L::shared_bytes(kShallow), a);
}

template <typename T>
cudaError_t launch_type(const Launch& launch, const AttentionArgs& a, int sms) {
  const int dim = a.cache.head_dim;
  if (dim <= 32) return launch_dims<T, 32>(launch, a, sms);
  if (dim <= 64) return launch_dims<T, 64>(launch, a, sms);
  if (dim <= 128) return launch_dims<T, 128>(launch, a, sms);
  return launch_dims<T, 256>(launch, a, sms);
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
  a.partials = partials;
  a.y = y;
  const int repeat = cache.heads / cache.local_heads;
  a.block_heads = std::min(repeat, kHeads);
  a.head_blocks = (repeat + a.block_heads - 1) / a.block_heads;
  const int groups = cache.local_heads * a.head_blocks;
  a.max_splits = std::clamp(sms / groups, 1, kMaxSplits);
  a.partial_splits = (cache.max_seq + kMinSplit - 1) / kMinSplit + 1;
  return cache.type == Scalar::kBFloat16 ? launch_type<__nv_bfloat16>(launch, a, sms)
                                         : launch_type<__half>(launch, a, sms);
}

}  // namespace gptfast::cuda
