// GPTQ: int4 quantization that corrects each column's rounding error in the columns after it
// (GPTQ.py; Frantar et al. 2022, https://arxiv.org/abs/2210.17323).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gptfast/quantize.h"

namespace gptfast {

class Tokenizer;

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
  double rounded_error = 0;  ///< the same for rounding to nearest
  bool calibrated = true;    ///< false: the layer saw no input (H = 0) and was rounded to nearest
};

/// Quantizes w [N, K] (floating) given the Hessian of its inputs, H = 2 / samples * sum x x^T [K,
/// K] float32 or float64. Runs on w's device. The scales of a group come from the weight as it
/// stood at the start of the column block, as in the original; with act_order from the weight as
/// given, so that the columns of a group still lie side by side. Columns that saw no input (H[k, k]
/// = 0) become 0. Throws naming `name` when H holds NaN or infinite values, or is not positive
/// definite even when fully damped.
GptqWeight gptq_quantize(const Tensor& w, const Tensor& hessian, const GptqOptions& options,
                         std::string_view name = "layer");

/// Throws unless `options` make sense.
void check_gptq_options(const GptqOptions& options);

/// What a model is calibrated on: sequences of one length.
struct CalibrationData {
  Tensor ids;      ///< [samples, L] int64
  Tensor lengths;  ///< [samples] int64; tokens after it are padding and do not count
};

/// Cuts each sequence to its first `seq_length` ids. Shorter ones are dropped, or padded when
/// `pad`. Throws when nothing is left.
CalibrationData calibration_data(const std::vector<std::vector<int32_t>>& sequences,
                                 int64_t seq_length, bool pad);

/// The text of `file` as sequences of `seq_length` ids, at most `limit` of them (the last may be
/// shorter), each with BOS in front where the tokenizer's rule puts one. Throws naming the file
/// when it is empty or not UTF-8.
std::vector<std::vector<int32_t>> calibration_text(const std::filesystem::path& file,
                                                   const Tokenizer& tokenizer, int64_t seq_length,
                                                   int64_t limit);

struct GptqRunOptions {
  GptqOptions gptq;
  std::string config = {};       ///< --config: table name or JSON file
  at::Device device = at::kCPU;  ///< where calibration and quantization run
  std::function<void(const QuantizedLayer&)> on_layer = {};
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< layers
};

/// Quantizes every linear layer of a checkpoint with GPTQ and writes the file that quantize() with
/// int4 writes, with a record of its layout. The blocks run in order on the calibration data in
/// float32, and each layer is quantized on the outputs of the quantized ones before it. Memory: the
/// mapped source, one block in float32, and the activations between two blocks.
std::vector<QuantizedLayer> quantize_gptq(const std::filesystem::path& checkpoint_path,
                                          const std::filesystem::path& output,
                                          const CalibrationData& data,
                                          const GptqRunOptions& options);

}  // namespace gptfast
