// Attention of a few query heads that share one key/value head, over at most kSplit cache
// positions.
#pragma once

#include "ops/cpu/simd.h"

namespace gptfast::cpu::GPTFAST_ISA {

constexpr int kPositions = 4;  // positions scored together, so that one load of q serves four and
                               // their sums reduce together
#if defined(__AVX512F__)
constexpr int kHeadBlock = 4;  // 16 accumulators of 32 registers
#else
constexpr int kHeadBlock = 2;
#endif

template <class T>
inline Float load_up_to(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load_first(p, count);
}

/// scores[h][p] = q[h] . k[p] for kPositions positions (count of them real: the rest repeat the
/// last one).
template <int kHeads, class T>
inline void score_positions(const float* q, int64_t q_stride, const T* k, int64_t head_dim,
                            int64_t count, float* scores) {
  const T* rows[kPositions];
  for (int p = 0; p < kPositions; ++p) rows[p] = k + (p < count ? p : count - 1) * head_dim;
  Float sums[kHeads][kPositions] = {};
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Float keys[kPositions];
    for (int p = 0; p < kPositions; ++p) keys[p] = load_up_to(rows[p] + d, head_dim - d);
    for (int h = 0; h < kHeads; ++h) {
      const Float query = load(q + h * q_stride + d);
      for (int p = 0; p < kPositions; ++p) sums[h][p] = multiply_add(query, keys[p], sums[h][p]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int p = 0; p < kPositions; ++p) scores[h * kSplit + p] = sum(sums[h][p]);
  }
}

/// Turns scores [length, padded to a vector] into exp(score - max); returns max and sum.
inline void softmax_numerators(float* scores, int64_t length, float* max_out, float* sum_out) {
  float most = scores[0];
  for (int64_t p = 1; p < length; ++p) most = scores[p] > most ? scores[p] : most;
  Float total{};
  for (int64_t p = 0; p < length; p += kLanes) {
    Float e = exp(load(scores + p) - most);
    if (length - p < kLanes) {
      float tail[kLanes] = {};
      memcpy(tail, &e, (length - p) * sizeof(float));
      e = load(tail);
    }
    store(scores + p, e);
    total += e;
  }
  *max_out = most;
  *sum_out = sum(total);
}

/// out[h][d] = sum_p weights[h][p] * v[p][d], positions in order.
template <int kHeads, class T>
inline void weigh_values(const float* weights, const T* v, int64_t head_dim, int64_t length,
                         float* out, int64_t out_stride) {
  constexpr int kVectors = 4;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= head_dim; d += kVectors * kLanes) {
    Float sums[kHeads][kVectors] = {};
    for (int64_t p = 0; p < length; ++p) {
      for (int i = 0; i < kVectors; ++i) {
        const Float value = load(v + p * head_dim + d + i * kLanes);
        for (int h = 0; h < kHeads; ++h)
          sums[h][i] = multiply_add(splat(weights[h * kSplit + p]), value, sums[h][i]);
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kVectors; ++i) store(out + h * out_stride + d + i * kLanes, sums[h][i]);
    }
  }
  for (; d < head_dim; d += kLanes) {
    Float sums[kHeads] = {};
    for (int64_t p = 0; p < length; ++p) {
      const Float value = load_up_to(v + p * head_dim + d, head_dim - d);
      for (int h = 0; h < kHeads; ++h)
        sums[h] = multiply_add(splat(weights[h * kSplit + p]), value, sums[h]);
    }
    for (int h = 0; h < kHeads; ++h) {
      store_first(out + h * out_stride + d, sums[h], head_dim - d < kLanes ? head_dim - d : kLanes);
    }
  }
}

template <int kHeads, class T>
void attend_heads(const AttendArgs& args, int64_t first_head) {
  const int64_t head_dim = args.head_dim;
  const int64_t q_stride = (head_dim + kLanes - 1) / kLanes * kLanes;
  float* scores = args.scratch;               // [kHeads, kSplit]
  float* q = args.scratch + kHeads * kSplit;  // [kHeads, q_stride], scaled
  for (int h = 0; h < kHeads; ++h) {
    for (int64_t d = 0; d < q_stride; ++d) {
      q[h * q_stride + d] = d < head_dim ? args.q[(first_head + h) * head_dim + d] * args.scale : 0;
    }
  }
  const T* k = static_cast<const T*>(args.k);
  for (int64_t p = 0; p < args.length; p += kPositions) {
    score_positions<kHeads>(q, q_stride, k + p * head_dim, head_dim, args.length - p, scores + p);
  }
  float* partial = args.partial + first_head * args.partial_stride;
  for (int h = 0; h < kHeads; ++h) {
    float* max_and_sum = partial + h * args.partial_stride + head_dim;
    softmax_numerators(scores + h * kSplit, args.length, max_and_sum, max_and_sum + 1);
  }
  weigh_values<kHeads>(scores, static_cast<const T*>(args.v), head_dim, args.length, partial,
                       args.partial_stride);
}

template <class T>
void attend_as(const AttendArgs& args) {
  int64_t h = 0;
  for (; h + kHeadBlock <= args.heads; h += kHeadBlock) attend_heads<kHeadBlock, T>(args, h);
  if constexpr (kHeadBlock > 2) {
    for (; h + 2 <= args.heads; h += 2) attend_heads<2, T>(args, h);
  }
  for (; h < args.heads; ++h) attend_heads<1, T>(args, h);
}

inline void attend(const AttendArgs& args) {
  switch (args.dtype) {
    case Dtype::kFloat32:
      return attend_as<float>(args);
    case Dtype::kBFloat16:
      return attend_as<BFloat16>(args);
    case Dtype::kFloat16:
      return attend_as<Float16>(args);
  }
}

/// Splits merge in order, each weighted by exp(its maximum - the largest maximum).
inline void merge(const float* partials, int64_t splits, int64_t stride, int64_t head_dim,
                  float* y) {
  float most = partials[head_dim];
  for (int64_t s = 1; s < splits; ++s) {
    const float max = partials[s * stride + head_dim];
    most = max > most ? max : most;
  }
  float total = 0;
  for (int64_t d = 0; d < head_dim; ++d) y[d] = 0;
  for (int64_t s = 0; s < splits; ++s) {
    const float* partial = partials + s * stride;
    const float weight = exp(splat(partial[head_dim] - most))[0];
    total += weight * partial[head_dim + 1];
    for (int64_t d = 0; d < head_dim; ++d) y[d] += weight * partial[d];
  }
  for (int64_t d = 0; d < head_dim; ++d) y[d] /= total;
}

}  // namespace gptfast::cpu::GPTFAST_ISA
