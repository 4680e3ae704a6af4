#include "gptfast/sampling.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <vector>

#include "philox.h"

namespace gptfast {
namespace {

constexpr double kMinTemperature = 1e-5;  // as the original; also keeps logits / temperature finite

/// Maps floats to integers of the same order.
uint32_t ordered_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// The k-th largest of n logits. A histogram of the leading bits leaves a few candidates to order,
/// which beats ordering all of them by far when k is a few hundred of 32,000 to 128,000.
float kth_largest(const float* logits, int64_t n, int64_t k, std::vector<float>& scratch) {
  constexpr int kBinBits = 12;  // sign, exponent and three bits of the mantissa
  std::array<int32_t, 1 << kBinBits> histogram{};
  for (int64_t i = 0; i < n; ++i) ++histogram[ordered_bits(logits[i]) >> (32 - kBinBits)];
  int64_t above = 0;  // how many lie in higher bins
  uint32_t bin = (1U << kBinBits) - 1;
  while (above + histogram[bin] < k) above += histogram[bin--];
  scratch.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (ordered_bits(logits[i]) >> (32 - kBinBits) == bin) scratch.push_back(logits[i]);
  }
  const auto kth = scratch.begin() + (k - above - 1);
  std::nth_element(scratch.begin(), kth, scratch.end(), std::greater<>());
  return *kth;
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
  bool nan = false;
  int64_t best = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    nan |= logits[i] != logits[i];
    if (logits[i] > logits[best]) best = i;
  }
  if (nan) return -1;
  if (temperature == 0 || top_k == 1) return static_cast<int32_t>(best);

  std::vector<float> scratch;
  const bool all = top_k <= 0 || top_k >= vocab_size;
  const float pivot = all ? -std::numeric_limits<float>::infinity()
                          : kth_largest(logits, vocab_size, top_k, scratch);
  const float largest = logits[best];
  const auto inverse = static_cast<float>(1.0 / std::max(temperature, kMinTemperature));
  float best_key = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (logits[i] < pivot) continue;
    const float key = (logits[i] - largest) * inverse +
                      gumbel_noise(seed, static_cast<uint32_t>(pos), static_cast<uint32_t>(i),
                                   NoiseStream::kSample);
    if (key > best_key) {
      best_key = key;
      best = i;
    }
  }
  return static_cast<int32_t>(best);
}

}  // namespace gptfast
