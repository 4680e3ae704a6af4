// Model configuration: the fields of gpt-fast's ModelArgs, the table of known models, and the rules
// that choose one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gptfast {

class StateDict;

/// Llama-3.1 frequency scaling (`rope_scaling` of the original's table; "rope_type": "llama3" in a
/// config.json).
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 8192;

  bool operator==(const RopeScaling&) const = default;
};

/// The shape of a model. Field names and defaults are those of gpt-fast's ModelArgs (model.py,
/// mixtral-moe/model.py); the fields after `rope_scaling` are ours.
struct ModelArgs {
  int64_t block_size = 2048;  ///< longest context, in tokens
  int64_t vocab_size = 32000;
  int64_t n_layer = 32;
  int64_t n_head = 32;
  int64_t dim = 4096;
  int64_t intermediate_size =
      0;                       ///< 0: find_multiple(2/3 * 4 * dim, 256), as the original derives it
  int64_t n_local_heads = -1;  ///< key/value heads; -1: n_head
  int64_t head_dim = 0;        ///< 0: dim / n_head
  double rope_base = 10000;
  double norm_eps = 1e-5;
  std::optional<RopeScaling> rope_scaling = std::nullopt;
  bool tie_word_embeddings =
      false;  ///< the head is the embedding when the checkpoint has no `output.weight`
  int64_t sliding_window = 0;  ///< 0: none. A windowed model is limited to its window
  int64_t num_experts = 0;     ///< 0: dense
  int64_t num_activated_experts = 0;

  bool operator==(const ModelArgs&) const = default;

  /// Fills the derived fields, as the original's __post_init__, and checks all of them. Throws
  /// c10::Error naming a field that makes no sense. A vocab_size of -1 (Meta's params.json of Llama
  /// 1 and 2) stays: find_config takes it from the embedding.
  void finalize();
  /// Width of the fused projection: (n_head + 2 * n_local_heads) * head_dim.
  int64_t qkv_dim() const { return (n_head + 2 * n_local_heads) * head_dim; }
  /// Number of weights, embedding and (untied) head included.
  int64_t num_parameters() const;

  /// The row of the table with exactly this name (case ignored). Throws with the list of names if
  /// there is none.
  static ModelArgs from_name(std::string_view name);
  /// Reads a Hugging Face config.json (transformers 4 and 5 spellings), a Meta params.json, or an
  /// object with the fields of ModelArgs. Throws naming the file and the missing or unsupported
  /// field.
  static ModelArgs from_json_file(const std::filesystem::path& file);
  /// What --config means: from_json_file for a name that ends in .json or is a file, else
  /// from_name.
  static ModelArgs from_name_or_file(const std::string& name);
};

/// Smallest multiple of k that is >= n (find_multiple of model.py). n >= 0, k > 0.
int64_t find_multiple(int64_t n, int64_t k);

/// Names of the table's rows, in order.
std::vector<std::string> known_model_names();

/// The table's name that a directory name means: equal to it, or equal once words that say nothing
/// about the shape (hf, chat, instruct, meta, bf16, ...) are dropped from both; case and the
/// separators '-', '_' and ' ' are ignored. Any other word (a version, "Python", "32k", a
/// fine-tune's name) must be in the row's name too. nullopt when no row or more than one fits:
/// never a guess. The original's bare rows ("7B", "Mistral-7B") stand for several real models and
/// fit only their exact name.
std::optional<std::string> match_model_name(std::string_view directory_name);

/// A configuration and where it comes from.
struct ConfigChoice {
  ModelArgs args;
  std::string source;          ///< for messages
  std::filesystem::path file;  ///< the JSON file, empty for a table row
};

/// The choice that find_config makes, before it is checked and completed: vocab_size may be -1.
/// Throws as find_config does.
ConfigChoice choose_config(const std::filesystem::path& checkpoint_path,
                           const std::string& override_config);

/// Configuration of a checkpoint: `override_config` (a table name or a JSON file) if not empty,
/// else a config.json or params.json beside the checkpoint, else the name of its directory or of
/// the file itself; checked against the tensors by check_config. A model with a sliding window is
/// limited to that window, said on stderr. Throws naming the candidates when none of these gives a
/// configuration.
ModelArgs find_config(const std::filesystem::path& checkpoint_path,
                      const std::string& override_config, const StateDict& tensors);

/// The text of a config.json in Hugging Face's spelling (transformers 4) that from_json_file reads
/// back to an equal ModelArgs.
std::string to_config_json(const ModelArgs& config);

/// Throws unless the tensors have the shapes that the configuration implies; the message has both
/// numbers. Also lists missing and unexpected tensors (each list cut at 10).
void check_config(const ModelArgs& config, const StateDict& tensors);

}  // namespace gptfast
