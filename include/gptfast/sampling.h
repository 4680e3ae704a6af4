// Sampling: logits -> probabilities -> token, on the host tensors' device and without hidden state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gptfast {

using at::Tensor;

/// One row's sampling settings.
struct SamplingOptions {
  double temperature = 0.8;  ///< 0: argmax
  int64_t top_k = 200;       ///< 0: all tokens
  uint64_t seed = 1234;
};

/// Per-row settings on the device, so that a captured step can be replayed with others.
struct SamplingParams {
  Tensor temperature;  ///< [B] float32
  Tensor top_k;        ///< [B] int32, 0 = all
  Tensor seed;         ///< [B] int64
};

/// Settings for B rows on `device`. Row b draws with seed + b, so rows of one prompt differ.
SamplingParams make_sampling_params(const SamplingOptions& options, int64_t batch_size,
                                    at::Device device);

/// softmax(logits / max(temperature, 1e-5)) over the tokens whose logit is not below the top_k-th
/// (ties at the pivot stay), as the original's logits_to_probs (generate.py). logits [..., V]
/// floating, result in the same dtype. top_k <= 0: all.
Tensor logits_to_probs(const Tensor& logits, double temperature, int64_t top_k);

/// Next token from one row of V logits: argmax at temperature 0 (ties to the lowest id), else
/// argmax(p / e) with e ~ Exp(1), which draws from p (the original's
/// multinomial_sample_one_no_sync). The noise of token i is a pure function of (seed, pos, i), pos
/// being the position whose logits these are: the same seed gives the same tokens whatever runs
/// beside. -1 when the row holds NaN.
int32_t sample_row(const float* logits, int64_t vocab_size, double temperature, int64_t top_k,
                   uint64_t seed, int64_t pos);

}  // namespace gptfast
