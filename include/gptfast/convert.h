// Imports of other formats into checkpoints/$MODEL_REPO/model.pth (scripts/convert_hf_checkpoint.py
// of the original).
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace gptfast {

struct ConvertOptions {
  std::optional<at::ScalarType> dtype;  ///< default: the source's; bfloat16 for a quantized source
  std::string config;  ///< --config: table name or JSON file, when the source does not say
  std::function<void(int64_t done, int64_t total)> progress;  ///< bytes of the source
  std::function<void(const std::string&)>
      note;                     ///< one line that the user should read, such as a missing tokenizer
  std::string gptq_zeros = {};  ///< --gptq_zeros "v1" or "v2", for GPTQ files that do not say
  /// Of imported int4 weights. float32 keeps their values exactly; bfloat16 is what the Python
  /// original loads.
  at::ScalarType scales = at::kFloat;
};

/// Converts `input` to `output` (a model.pth) and puts config.json and the tokenizer beside it.
/// What `input` is its content tells:
///   - a directory of Hugging Face: safetensors or pytorch_model*.bin, one file or shards with
///   their index; Llama, Mistral, Mixtral
///   - a directory of Meta: consolidated.NN.pth or .pt, with params.json
///   - one .safetensors, .bin, .pth or .pt file with the names of either; llama2.c's .pt and .bin
///   - a GGUF file of the llama architecture
/// Rows of wq and wk go to the order of the original's rotary embedding; wq, wk and wv are fused.
/// Tensor by tensor: beside the page cache about one tensor is in memory. A tied head becomes a
/// second name of the embedding. Files that the source's folder already has are kept. Nothing is
/// left behind when it fails. Throws c10::Error naming the file and the tensor or field.
void convert(const std::filesystem::path& input, const std::filesystem::path& output,
             const ConvertOptions& options);

}  // namespace gptfast
