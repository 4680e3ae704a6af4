// Imports of other formats into checkpoints/$MODEL_REPO/model.pth (scripts/convert_hf_checkpoint.py of the original).
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
  std::string config;                   ///< --config: table name or JSON file, when the source does not say
  std::function<void(int64_t done, int64_t total)> progress;  ///< bytes of the source
};

/// Converts a GGUF file of the llama architecture to `output` (model.pth) and writes config.json and the tokenizer beside it.
/// Tensor by tensor; nothing is left behind when it fails. Throws naming the file and the tensor or field.
void convert_gguf(const std::filesystem::path& input, const std::filesystem::path& output, const ConvertOptions& options);

/// Converts any supported input, told by its content.
void convert(const std::filesystem::path& input, const std::filesystem::path& output, const ConvertOptions& options);

}  // namespace gptfast
