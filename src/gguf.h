// GGUF, version 2 and 3: metadata and tensors of one file.
// Source: the format's description in ggml-org/ggml, docs/gguf.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "import.h"
#include "mapped_file.h"
#include "weight_source.h"

namespace gptfast {

class GgufFile {
 public:
  /// Integers and booleans, floating numbers, a string, and arrays of the three.
  using Value = std::variant<int64_t, double, std::string_view, std::vector<int64_t>,
                             std::vector<double>, std::vector<std::string_view>>;

  /// Reads the header. Every count, length and offset is checked against the file. Throws naming
  /// the file and what is wrong.
  explicit GgufFile(const std::filesystem::path& file);

  const std::string& name() const { return name_; }  ///< for messages
  bool has(std::string_view key) const { return metadata_.contains(key); }
  /// Throw naming the key when it is missing or has another type.
  int64_t integer(std::string_view key) const { return get<int64_t>(key, "an integer"); }
  double number(std::string_view key) const;
  std::string_view text(std::string_view key) const {
    return get<std::string_view>(key, "a string");
  }
  const std::vector<std::string_view>& texts(std::string_view key) const;
  const std::vector<int64_t>& integers(std::string_view key) const;
  const std::vector<double>& numbers(std::string_view key) const;
  int64_t integer_or(std::string_view key, int64_t otherwise) const {
    return has(key) ? integer(key) : otherwise;
  }
  double number_or(std::string_view key, double otherwise) const {
    return has(key) ? number(key) : otherwise;
  }
  std::string_view text_or(std::string_view key, std::string_view otherwise) const {
    return has(key) ? text(key) : otherwise;
  }

  /// All tensors in file order, under the file's names; F32, F16, BF16, Q8_0, Q4_0 and Q4_1. Throws
  /// naming a tensor of another type. They keep the file mapped.
  std::vector<SourceTensor> tensors() const;

 private:
  struct TensorInfo {
    std::string_view name;
    std::vector<int64_t> shape = {};  // as torch's: the last dimension is contiguous
    uint32_t type = 0;
    uint64_t offset = 0;  // in the file
  };

  template <typename T>
  const T& get(std::string_view key, const char* expected) const;

  std::string name_;
  FileBytes file_;
  std::map<std::string_view, Value> metadata_;
  std::vector<TensorInfo> infos_;
};

/// The configuration of a file whose general.architecture is "llama". Throws naming the file and
/// the field that is missing or not supported. tie_word_embeddings is set when there is no
/// output.weight.
ModelArgs gguf_config(const GgufFile& gguf, const std::vector<SourceTensor>& tensors);

/// The tokenizer in the metadata as files: "gpt2" becomes tokenizer.json, "llama" a SentencePiece
/// tokenizer.model, both with tokenizer_config.json and generation_config.json. Throws naming what
/// is missing or unknown.
std::vector<SideFile> gguf_tokenizer(const GgufFile& gguf);

}  // namespace gptfast
