// Reading the small JSON files beside a checkpoint, with errors that name the file and the field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace gptfast {

/// The whole content of a regular file of at most `max_bytes`. Throws c10::Error naming the file
/// and what is wrong with it.
std::string read_small_file(const std::filesystem::path& file, uint64_t max_bytes);

/// Parses a JSON object from a file of at most 256 MiB (tokenizer.json is the largest that is
/// read). Throws naming the file.
nlohmann::json read_json_object(const std::filesystem::path& file);

struct ModelArgs;
/// ModelArgs::from_json_file for an object that is no file of its own; `source` is for messages.
ModelArgs model_args_from_json(const nlohmann::json& object, const std::string& source);

/// One JSON object with the name of where it came from; null counts as absent.
struct JsonFields {
  const nlohmann::json& object;
  std::string source;  ///< for messages: a path, or a path and the field that holds the object

  bool has(std::string_view key) const;
  /// The first of `keys` that is there; throws naming the first when none is.
  int64_t integer(std::initializer_list<std::string_view> keys) const;
  int64_t integer_or(std::string_view key, int64_t otherwise) const;
  double number(std::string_view key) const;
  double number_or(std::string_view key, double otherwise) const;
  bool boolean_or(std::string_view key, bool otherwise) const;
  std::string string_or(std::string_view key, std::string_view otherwise) const;
};

}  // namespace gptfast
