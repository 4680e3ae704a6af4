// What the converter knows about a source before it writes anything.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "weight_source.h"

namespace gptfast {

/// A small file that goes beside model.pth.
struct SideFile {
  std::string name;
  std::string content;
};

struct Import {
  WeightSource weights = {};
  std::filesystem::path folder = {};  ///< of the source
  std::string config_json =
      {};  ///< the source's own config.json; empty: one is made from the configuration
  std::vector<SideFile> files = {};     ///< the tokenizer and what belongs to it
  std::vector<std::string> notes = {};  ///< what the user should know
};

/// Each reads one kind of source; `config` is --config, empty for what the source says. Nothing but
/// headers is read. Throws naming the file and what is wrong with it.
Import import_gguf(const std::filesystem::path& file, const std::string& config);
/// A Hugging Face directory, one of Meta's (consolidated.NN.pth or .pt with params.json), or one
/// such file alone: .safetensors, .bin, .pth or .pt, of llama2.c too.
/// Weights that GPTQ or AWQ packed stay int4; `gptq_zeros` says how GPTQ's zeros are stored where
/// the files do not.
Import import_directory(const std::filesystem::path& directory, const std::string& config,
                        const std::string& gptq_zeros);
Import import_tensor_file(const std::filesystem::path& file, const std::string& config);
/// llama2.c's own .bin, float32: without a version ("legacy") and version 1.
Import import_llama2c(const std::filesystem::path& file, const std::string& config);
/// Whether the file's header and size are those of a llama2.c .bin.
bool is_llama2c(const std::filesystem::path& file);

/// Takes tokenizer and generation files of `folder` along. Llama 3's
/// original/[mp16/]tokenizer.model becomes tokenizer.model. Throws when the tokenizer has more
/// tokens than the model's embedding.
void carry_tokenizer(Import& import);
/// llama2.c's tokenizer.bin beside the model as a SentencePiece tokenizer.model, where there is no
/// tokenizer.model.
void carry_llama2c_tokenizer(Import& import);

}  // namespace gptfast
