// GPTQ: int4 quantization that corrects each column's rounding error in the columns after it
// (GPTQ.py; Frantar et al. 2022, https://arxiv.org/abs/2210.17323).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "gptfast/quantize.h"

namespace gptfast {

struct GptqOptions {
  int64_t groupsize = 32;
  int64_t blocksize = 128;  ///< columns corrected one by one before the rest of the weight is; a
                            ///< multiple or divisor of groupsize
  double percdamp = 0.01;   ///< added to the Hessian's diagonal, as a share of its mean; raised
                            ///< where that is too little
  bool act_order = false;  ///< columns in order of decreasing diag(H) instead of from left to right
};

/// One layer after GPTQ.
struct GptqWeight {
  Tensor codes;         ///< [N, K] uint8 in 0..15
  GroupParams params;   ///< [N, ceil(K / g)]; the last group may be short
  Tensor dequantized;   ///< [N, K] float32 holding bfloat16 values, what the following layers are
                        ///< calibrated with
  double percdamp = 0;  ///< share that made the Hessian positive definite
  double error = 0;     ///< trace((W - Q) H (W - Q)^T): squared error of the layer's outputs
  bool calibrated = true;  ///< false: the layer saw no input (H = 0) and was rounded to nearest
};

/// Quantizes w [N, K] (floating) given the Hessian of its inputs, H = 2 / samples * sum x x^T [K,
/// K] float32 or float64. Runs on w's device. The scales of a group come from the weight as it
/// stood at the start of the column block, as in the original; with act_order from the weight as
/// given, so that the columns of a group still lie side by side. Columns that saw no input (H[k, k]
/// = 0) become 0. Throws when H holds NaN or infinite values, or is not positive definite even when
/// fully damped.
GptqWeight gptq_quantize(const Tensor& w, const Tensor& hessian, const GptqOptions& options);

/// Throws unless `options` make sense.
void check_gptq_options(const GptqOptions& options);

}  // namespace gptfast
