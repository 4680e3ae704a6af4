// safetensors files. Source: the format's description in huggingface/safetensors, README.md.
#pragma once

#include <filesystem>

#include "gptfast/checkpoint.h"

namespace gptfast {

/// Maps `file` and returns its tensors in the order of their data, as views of the mapping. The
/// header is checked as strictly as the format's own reader does: data without holes and overlaps
/// up to the end of the file, no name twice. Throws naming the file.
StateDict load_safetensors(const std::filesystem::path& file);

}  // namespace gptfast
