// What happens between the steps of a speculative round: see speculate.h.
#include <cmath>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/row_select.cuh"
#include "ops/cuda/speculate.h"
#include "philox.h"

namespace gptfast::cuda {
namespace {

constexpr int kBeginThreads = 1024;  // look at as many places of the text at a time
constexpr int kKeepThreads = 256;
constexpr double kMinTemperature = 1e-5;  // as sampling.cpp

__device__ inline float inverse_temperature(const RoundState& state) {
  return static_cast<float>(1.0 / fmax(static_cast<double>(state.temperature), kMinTemperature));
}

/// Tokens before `end` that equal those before `size`, at most `most`.
__device__ inline int match_length(const int32_t* text, int end, int size, int most) {
  int length = 0;
  while (length < most && length < end && text[end - 1 - length] == text[size - 1 - length]) {
    ++length;
  }
  return length;
}

/// Where the text's longest repeated suffix, the latest of equal ones, was followed by something;
/// `size` if none repeats. For all threads.
__device__ int find_repetition(const int32_t* text, int size, int ngram) {
  __shared__ unsigned long long best;
  if (threadIdx.x == 0) best = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int end = 1 + static_cast<int>(threadIdx.x); end < size; end += kBeginThreads) {
    const int length = match_length(text, end, size, ngram);
    const unsigned long long key = static_cast<unsigned long long>(length) << 32 | end;
    if (length > 0 && key > own) own = key;
  }
  if (own != 0) atomicMax(&best, own);
  __syncthreads();
  return best == 0 ? size : static_cast<int>(best & 0xffffffffU);
}

__global__ void begin_kernel(const __grid_constant__ RoundArgs a, bool lookup, int ngram) {
  launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  const int pos = a.state->pos;
  const int size = pos + 1;
  int drafted = min(a.k, a.state->end - size - 1);
  int from = size;  // of the draft in the text
  if (lookup) {
    from = find_repetition(a.text, size, ngram);
    if (drafted > 0) drafted = min(drafted, size - from);
  }
  if (thread < a.k) a.tokens[1 + thread] = from + thread < size ? max(a.text[from + thread], 0) : 0;
  if (thread * a.rows_of_step <= a.k) a.positions[thread] = pos + thread * a.rows_of_step;
  if (thread == 0) {
    a.state->drafted = drafted;
    a.tokens[0] = a.text[pos];
    a.first_tokens[0] = a.text[pos - 1];
    a.first_tokens[1] = a.text[pos];
    *a.draft_pos = pos - 1;
  }
}

__global__ void keep_kernel(const __grid_constant__ RoundArgs a, int index, const int32_t* next,
                            const float* logits, float* kept, int vocab) {
  launch_dependents();
  wait_for_predecessor();
  const int i = static_cast<int>(blockIdx.x) * kKeepThreads + static_cast<int>(threadIdx.x);
  if (i < vocab && a.state->temperature != 0) kept[i] = logits[i];
  if (i > 0) return;
  const int32_t token = *next;
  if (token < 0) a.state->drafted = min(a.state->drafted, index);  // NaN: nothing more is proposed
  a.tokens[1 + index] = max(token, 0);
  *a.draft_token = token;
  *a.draft_pos = a.state->pos + 1 + index;
}

/// exp((logit - max) / temperature) of a row's distribution.
__device__ inline float weight_of(float logit, const RowStats& row, float inverse) {
  return logit >= row.pivot ? expf((logit - row.max) * inverse) : 0.0F;
}

__device__ inline float block_sum(float v, float* sums) {
  v = warp_sum(v);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = warp_sum(sums[threadIdx.x % kWarp]);
  __syncthreads();
  return v;
}

/// Statistics of the verification's rows that count and, above temperature 0, of the draft's. A
/// cluster a row.
template <int Blocks>
__global__ void __launch_bounds__(kSelectThreads)
    stats_kernel(const __grid_constant__ AcceptArgs a) {
  __shared__ SelectState s;
  __shared__ float sums[kSelectThreads / kWarp];
  __shared__ RowStats row;
  __shared__ float parts[kClusterBlocks];
  launch_dependents();
  wait_for_predecessor();
  const RoundState& state = *a.round.state;
  const int index = static_cast<int>(blockIdx.x) / Blocks;
  const bool of_draft = index > a.round.k;
  const int64_t i = of_draft ? index - a.round.k - 1 : index;
  const bool needed = of_draft ? i < state.drafted && state.temperature != 0 : i <= state.drafted;
  if (!needed) return;
  const float* logits = (of_draft ? a.draft_logits : a.logits) + i * a.vocab;
  const Part part = part_of_row<Blocks>(a.vocab);
  const bool certain = state.temperature == 0;
  search_row<Blocks>(logits, part, state.top_k, !certain && selects(a.vocab, state.top_k), s);
  if (part.rank == 0) {
    const Best largest = find_largest<Blocks>(s);
    const bool all = certain || state.top_k <= 0 || state.top_k >= a.vocab;
    float pivot = state.top_k == 1 ? largest.key : -INFINITY;
    if (!all && state.top_k > 1) pivot = find_pivot(logits, a.vocab, state.top_k, s);
    if (threadIdx.x == 0) row = {largest.key, pivot, 0, largest.id};
  }
  if (!certain) {
    sync_blocks<Blocks>();
    RowStats* first_row = &row;
    float* first_parts = parts;
#if __CUDA_ARCH__ >= 900
    if constexpr (Blocks > 1) {
      first_row = cooperative_groups::this_cluster().map_shared_rank(&row, 0);
      first_parts = cooperative_groups::this_cluster().map_shared_rank(parts, 0);
    }
#endif
    const RowStats known = *first_row;
    const float inverse = inverse_temperature(state);
    float sum = 0;
    for (int j = part.begin + static_cast<int>(threadIdx.x); j < part.end; j += kSelectThreads) {
      sum += weight_of(logits[j], known, inverse);
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) first_parts[part.rank] = sum;
    sync_blocks<Blocks>();
  }
  if (part.rank == 0 && threadIdx.x == 0) {
    if (!certain) {
      for (int j = 0; j < Blocks; ++j) row.sum += parts[j];
    }
    a.stats[index] = row;
  }
}

/// What a round accepts: `count` drafted tokens; then, if `nan`, everything is void.
struct Decision {
  int count;
  bool nan;
};

/// p / q of drafted token i; NaN where the verification's row holds NaN.
__device__ inline float chance_of(const AcceptArgs& a, int i, float inverse) {
  const int token = a.round.tokens[1 + i];
  const RowStats p = a.stats[i];
  if (p.argmax < 0) return NAN;
  const int64_t at = static_cast<int64_t>(i) * a.vocab + token;
  const float chance = weight_of(a.logits[at], p, inverse) / p.sum;
  if (a.draft_logits == nullptr) return chance;
  const RowStats q = a.stats[a.round.k + 1 + i];
  return chance / (weight_of(a.draft_logits[at], q, inverse) / q.sum);
}

/// The same in every block. One thread a drafted token.
__device__ Decision decide(const AcceptArgs& a, const RoundState& state) {
  __shared__ Decision decision;
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) decision = {state.drafted, false};
  __syncthreads();
  bool ok = true;
  bool nan = false;
  if (i < state.drafted) {
    if (a.forced_rounds > 0) {
      ok = i < a.forced[state.round % a.forced_rounds];
    } else if (state.temperature == 0) {
      ok = a.stats[i].argmax == a.round.tokens[1 + i];
    } else {
      const float chance = chance_of(a, i, inverse_temperature(state));
      nan = chance != chance;
      ok = uniform_noise(static_cast<uint64_t>(state.seed), static_cast<uint32_t>(state.pos + i), 0,
                         NoiseStream::kAccept) < chance;
    }
  }
  if (!ok) atomicMin(&decision.count, i);
  __syncthreads();
  if (i == decision.count) decision.nan = nan;
  __syncthreads();
  return decision;
}

/// What is drawn after the accepted tokens: from the residual of row `at` if `residual`, else from
/// the row.
struct Draw {
  int at;
  bool residual;
};

/// This thread's best of its block's part of the row; id -1: it has no token of any probability.
template <int Blocks>
__device__ Best draw_part(const AcceptArgs& a, const RoundState& state, const Draw& draw,
                          bool residual) {
  const float inverse = inverse_temperature(state);
  const RowStats p = a.stats[draw.at];
  const RowStats q =
      residual && a.draft_logits != nullptr ? a.stats[a.round.k + 1 + draw.at] : RowStats{};
  const int drafted = draw.residual ? a.round.tokens[1 + draw.at] : -1;
  const auto noise_of = [&](int id) {
    return gumbel_noise(static_cast<uint64_t>(state.seed),
                        static_cast<uint32_t>(state.pos + draw.at), static_cast<uint32_t>(id),
                        draw.residual ? NoiseStream::kResidual : NoiseStream::kSample);
  };
  const int64_t row = static_cast<int64_t>(draw.at) * a.vocab;
  const Part part = part_of_row<Blocks>(a.vocab);
  Best best = {-INFINITY, a.vocab};
  for (int id = part.begin + static_cast<int>(threadIdx.x); id < part.end; id += kSelectThreads) {
    const float logit = a.logits[row + id];
    if (logit < p.pivot) continue;
    float key = __fmul_rn(logit - p.max, inverse);
    if (draw.residual) {
      float rest = weight_of(logit, p, inverse) / p.sum;
      if (residual && a.draft_logits != nullptr) {
        rest -= weight_of(a.draft_logits[row + id], q, inverse) / q.sum;
      } else if (residual && id == drafted) {
        rest -= 1;
      }
      if (rest <= 0) continue;
      key = logf(rest);
    }
    key = __fadd_rn(key, noise_of(id));
    if (better({key, id}, best)) best = {key, id};
  }
  return best;
}

/// The best of the cluster, for every thread; a.vocab if there is none.
template <int Blocks>
__device__ int best_of_cluster(Best best, int rank, SelectState& s) {
  best = block_best(best, s);
  sync_blocks<Blocks>();  // the last search's answer has been read
  SelectState& first = leader<Blocks>(s);
  if (threadIdx.x == 0) first.parts[rank] = best;
  sync_blocks<Blocks>();
  best = first.parts[0];
  for (int i = 1; i < Blocks; ++i) {
    const Best other = first.parts[i];
    if (better(other, best)) best = other;
  }
  return best.id;
}

/// The token after the accepted ones; the same for every thread of the cluster.
template <int Blocks>
__device__ int32_t draw_token(const AcceptArgs& a, const RoundState& state, int accepted, int rank,
                              SelectState& s) {
  const int32_t argmax = a.stats[accepted].argmax;
  const Draw draw = {accepted, accepted < state.drafted};
  if (argmax < 0 || state.temperature == 0 || (!draw.residual && state.top_k == 1)) return argmax;
  int id = best_of_cluster<Blocks>(draw_part<Blocks>(a, state, draw, draw.residual), rank, s);
  if (id >= a.vocab && draw.residual) {  // p == q up to rounding: p itself is right
    id = best_of_cluster<Blocks>(draw_part<Blocks>(a, state, draw, /*residual=*/false), rank, s);
  }
  return id < a.vocab ? id : argmax;
}

template <int Blocks>
__global__ void __launch_bounds__(kSelectThreads)
    accept_kernel(const __grid_constant__ AcceptArgs a) {
  __shared__ SelectState s;
  launch_dependents();
  wait_for_predecessor();
  const RoundState state = *a.round.state;
  const int rank = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  int accepted = 0;
  int32_t last = -1;
  if (state.drafted >= 0) {
    sync_blocks<Blocks>();  // all blocks have started
    const Decision decision = decide(a, state);
    accepted = decision.nan ? 0 : decision.count;
    if (!decision.nan) last = draw_token<Blocks>(a, state, accepted, rank, s);
  }
  sync_blocks<Blocks>();  // all blocks have read the state
  if (rank != 0) return;
  const int count = state.drafted >= 0 ? accepted + 1 : 0;
  int32_t* row = a.history + static_cast<int64_t>(state.round % a.history_rounds) * (a.round.k + 2);
  if (thread < count) {
    const int32_t token = thread < accepted ? a.round.tokens[1 + thread] : last;
    a.round.text[state.pos + 1 + thread] = token;
    row[1 + thread] = token;
  }
  if (thread == 0) {
    row[0] = count;
    a.round.state->pos = state.pos + count;
    a.round.state->round = state.round + 1;
  }
}

}  // namespace

cudaError_t begin_round(const Launch& launch, const RoundArgs& args, bool lookup, int ngram) {
  // Like the first kernel of a step, it starts when everything before it is complete.
  return launch_kernel({.stream = launch.stream, .pdl = false}, begin_kernel, dim3(1),
                       kBeginThreads, /*shared_bytes=*/0, args, lookup, ngram);
}

cudaError_t keep_draft(const Launch& launch, const RoundArgs& args, int index, const int32_t* next,
                       const float* logits, float* kept, int vocab) {
  return launch_kernel(launch, keep_kernel, dim3((vocab + kKeepThreads - 1) / kKeepThreads),
                       kKeepThreads, /*shared_bytes=*/0, args, index, next, logits, kept, vocab);
}

cudaError_t accept_round(const Launch& launch, const AcceptArgs& args) {
  const int rows = args.round.k + 1 + (args.draft_logits != nullptr ? args.round.k : 0);
  const auto run = [&](auto stats, auto accept, auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    const cudaError_t error = launch_cluster(launch, kBlocks, stats, dim3(rows * kBlocks),
                                             kSelectThreads, /*shared_bytes=*/0, args);
    if (error != cudaSuccess) return error;
    return launch_cluster(launch, kBlocks, accept, dim3(kBlocks), kSelectThreads,
                          /*shared_bytes=*/0, args);
  };
  return launch.clusters ? run(stats_kernel<kClusterBlocks>, accept_kernel<kClusterBlocks>,
                               std::integral_constant<int, kClusterBlocks>())
                         : run(stats_kernel<1>, accept_kernel<1>, std::integral_constant<int, 1>());
}

}  // namespace gptfast::cuda
