#include "gptfast/sampling.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <vector>

#include "philox.h"

namespace gptfast {
namespace {

constexpr double kMinTemperature = 1e-5;  // as the original; also keeps logits / temperature finite

// The vocabulary is looked at in blocks: their maxima, found at the speed of the memory, tell which
// few blocks the most likely tokens lie in (SmolLM2, 49,152 tokens, top_k 200: 20 us a row instead
// of 110).
constexpr int64_t kBlock = 64;
constexpr int64_t kLanes = 16;

/// The largest logit of each block, in order; NaNs count as smaller than anything. Returns whether
/// there are any.
bool block_maxima(const float* logits, int64_t n, std::vector<float>& maxima) {
  maxima.resize((n + kBlock - 1) / kBlock);
  std::array<int32_t, kLanes> nan{};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    std::array<float, kLanes> largest;
    largest.fill(-std::numeric_limits<float>::infinity());
    const int64_t end = std::min(begin + kBlock, n);
    const auto look = [&](int64_t i, int64_t lane) {
      nan[lane] |= static_cast<int32_t>(logits[i] != logits[i]);
      largest[lane] = logits[i] > largest[lane] ? logits[i] : largest[lane];
    };
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) look(i + lane, lane);
    }
    for (; i < end; ++i) look(i, /*lane=*/0);
    maxima[begin / kBlock] = *std::max_element(largest.begin(), largest.end());
  }
  return std::any_of(nan.begin(), nan.end(), [](int32_t any) { return any != 0; });
}

float kth_largest(std::vector<float>& values, int64_t k) {
  const auto kth = values.begin() + (k - 1);
  std::nth_element(values.begin(), kth, values.end(), std::greater<>());
  return *kth;
}

/// Calls visit(index) for each logit >= pivot, in order.
template <class Visit>
void for_each_from(float pivot, const float* logits, int64_t n, const std::vector<float>& maxima,
                   const Visit& visit) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    if (maxima[begin / kBlock] < pivot) continue;
    for (int64_t i = begin; i < std::min(begin + kBlock, n); ++i) {
      if (logits[i] >= pivot) visit(i);
    }
  }
}

/// The k-th largest logit, 1 <= k <= n.
float top_k_pivot(const float* logits, int64_t n, const std::vector<float>& maxima, int64_t k) {
  std::vector<float> values;
  if (k <= std::ssize(maxima)) {  // at least k logits reach the k-th largest maximum
    values = maxima;
    const float bound = kth_largest(values, k);
    values.clear();
    for_each_from(bound, logits, n, maxima, [&](int64_t i) { values.push_back(logits[i]); });
  } else {
    values.assign(logits, logits + n);
  }
  return kth_largest(values, k);
}

}  // namespace

SamplingParams make_sampling_params(const SamplingOptions& options, int64_t batch_size,
                                    at::Device device) {
  const auto seeds = at::arange(batch_size, at::kLong) + static_cast<int64_t>(options.seed);
  return {.temperature = at::full({batch_size}, options.temperature, at::kFloat).to(device),
          .top_k = at::full({batch_size}, options.top_k, at::kInt).to(device),
          .seed = seeds.to(device)};
}

Tensor logits_to_probs(const Tensor& logits, double temperature, int64_t top_k) {
  Tensor scaled = logits / std::max(temperature, kMinTemperature);
  if (top_k > 0) {
    const auto values = std::get<0>(at::topk(scaled, std::min(top_k, scaled.size(-1))));
    const Tensor pivot = values.select(-1, -1).unsqueeze(-1);
    scaled = at::where(scaled < pivot, -std::numeric_limits<float>::infinity(), scaled);
  }
  return at::softmax(scaled, -1);
}

int32_t sample_row(const float* logits, int64_t vocab_size, double temperature, int64_t top_k,
                   uint64_t seed, int64_t pos) {
  std::vector<float> maxima;
  if (block_maxima(logits, vocab_size, maxima)) return -1;
  const auto block = std::max_element(maxima.begin(), maxima.end());  // the first of equal ones
  const float largest = *block;
  const float* in_block = logits + (block - maxima.begin()) * kBlock;
  int64_t best = std::find(in_block, logits + vocab_size, largest) - logits;
  if (temperature == 0 || top_k == 1) return static_cast<int32_t>(best);
  const bool all = top_k <= 0 || top_k >= vocab_size;
  const float pivot = all ? -std::numeric_limits<float>::infinity()
                          : top_k_pivot(logits, vocab_size, maxima, top_k);
  const auto inverse = static_cast<float>(1.0 / std::max(temperature, kMinTemperature));
  const auto scaled = [&](int64_t i) { return (logits[i] - largest) * inverse; };
  const auto noise = [&](int64_t i) {
    return gumbel_noise(seed, static_cast<uint32_t>(pos), static_cast<uint32_t>(i),
                        NoiseStream::kSample);
  };
  // Whom the most likely token beats whatever their noise needs none.
  const float bound = noise(best) - kLargestGumbelNoise;
  float best_key = -std::numeric_limits<float>::infinity();
  for_each_from(pivot, logits, vocab_size, maxima, [&](int64_t i) {
    if (scaled(i) < bound) return;
    const float key = scaled(i) + noise(i);
    if (key > best_key) {
      best_key = key;
      best = i;
    }
  });
  return static_cast<int32_t>(best);
}

}  // namespace gptfast
