// Weights that GPTQ (AutoGPTQ, GPTQ-for-LLaMa, GPTQModel) or AWQ quantized: their files' layouts ->
// canonical int4.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "weight_source.h"

namespace gptfast {

/// What a directory's quantize_config.json, quant_config.json or config.json says about its
/// weights.
struct PackedFormat {
  enum class Method { kGptq, kAwq };
  Method method = Method::kGptq;
  int64_t bits = 4;
  int64_t groupsize = 128;  ///< -1: a row is one group
  bool desc_act = false;    ///< columns may belong to groups in any order (g_idx)
  int64_t zero_offset =
      0;  ///< added to stored zeros: 1 for version 1 of the format, which stores them minus one
};

/// Whether a layer of `tensors` is stored by one of these programs.
bool has_packed_weights(const std::vector<SourceTensor>& tensors);

/// Reads the format from `directory`; `zeros` ("v1", "v2" or "") is --gptq_zeros. Throws naming the
/// file for other methods, bits or versions, and when the file does not say how zeros are stored.
PackedFormat read_packed_format(const std::filesystem::path& directory, const std::string& zeros);

/// Replaces qweight, qzeros, scales and g_idx of each layer by one "<layer>.weight" [N, K] whose
/// values are the source's exactly, with read_int4 for 4 bits. Biases that are all zero go away.
/// Throws naming the tensor that is missing or whose shape disagrees.
std::vector<SourceTensor> unpack_quantized(std::vector<SourceTensor> tensors,
                                           const PackedFormat& format);

}  // namespace gptfast
