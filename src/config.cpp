#include "gptfast/config.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <iostream>

#include "gptfast/checkpoint.h"

namespace gptfast {

namespace {

constexpr RopeScaling kLlama31Scaling{.factor = 8.0};
constexpr RopeScaling kLlama32Scaling{.factor = 32.0};

struct ModelRow {
  const char* name;
  ModelArgs args;
  bool exact_only = false;  // stands for several real models: only its exact name picks it
};

// clang-format off
const std::vector<ModelRow>& model_table() {
  static const std::vector<ModelRow> kTable = {
    // The original's rows, with the original's values. Those without a family's name have Llama 1's context and Llama 2's norm_eps.
    {"CodeLlama-7b-Python-hf", {.block_size = 16384, .rope_base = 1000000}},
    {"7B", {}, true},
    {"13B", {.n_layer = 40, .n_head = 40, .dim = 5120}, true},
    {"30B", {.n_layer = 60, .n_head = 52, .dim = 6656}, true},
    {"34B", {.n_layer = 48, .n_head = 64, .dim = 8192, .intermediate_size = 22016, .n_local_heads = 8, .rope_base = 1000000}, true},
    {"70B", {.n_layer = 80, .n_head = 64, .dim = 8192, .intermediate_size = 28672, .n_local_heads = 8}, true},
    {"Mistral-7B", {.intermediate_size = 14336, .n_local_heads = 8}, true},
    {"stories15M", {.n_layer = 6, .n_head = 6, .dim = 288, .tie_word_embeddings = true}},
    {"stories110M", {.n_layer = 12, .n_head = 12, .dim = 768, .tie_word_embeddings = true}},
    {"llama-3-8b", {.block_size = 8192, .vocab_size = 128256, .intermediate_size = 14336, .n_local_heads = 8, .rope_base = 500000}},
    {"llama-3-70b", {.block_size = 8192, .vocab_size = 128256, .n_layer = 80, .n_head = 64, .dim = 8192, .intermediate_size = 28672,
                     .n_local_heads = 8, .rope_base = 500000}},
    {"llama-3.1-8b", {.block_size = 131072, .vocab_size = 128256, .intermediate_size = 14336, .n_local_heads = 8,
                      .rope_base = 500000, .rope_scaling = kLlama31Scaling}},
    {"llama-3.1-70b", {.block_size = 131072, .vocab_size = 128256, .n_layer = 80, .n_head = 64, .dim = 8192,
                       .intermediate_size = 28672, .n_local_heads = 8, .rope_base = 500000, .rope_scaling = kLlama31Scaling}},
    {"llama-3.1-405b", {.block_size = 131072, .vocab_size = 128256, .n_layer = 126, .n_head = 128, .dim = 16384,
                        .intermediate_size = 53248, .n_local_heads = 8, .rope_base = 500000, .rope_scaling = kLlama31Scaling}},
    {"Mixtral-8x7B-v0.1", {.block_size = 32768, .intermediate_size = 14336, .n_local_heads = 8, .rope_base = 1000000,
                           .num_experts = 8, .num_activated_experts = 2}},
    // Ours, with the values of the models' own config.json or params.json.
    {"llama-7b", {.norm_eps = 1e-6}},
    {"llama-13b", {.n_layer = 40, .n_head = 40, .dim = 5120, .norm_eps = 1e-6}},
    {"llama-30b", {.n_layer = 60, .n_head = 52, .dim = 6656, .norm_eps = 1e-6}},
    {"llama-65b", {.n_layer = 80, .n_head = 64, .dim = 8192}},
    {"Llama-2-7b", {.block_size = 4096}},
    {"Llama-2-13b", {.block_size = 4096, .n_layer = 40, .n_head = 40, .dim = 5120}},
    {"Llama-2-70b", {.block_size = 4096, .n_layer = 80, .n_head = 64, .dim = 8192, .intermediate_size = 28672, .n_local_heads = 8}},
    {"CodeLlama-7b", {.block_size = 16384, .vocab_size = 32016, .rope_base = 1000000}},
    {"CodeLlama-13b", {.block_size = 16384, .vocab_size = 32016, .n_layer = 40, .n_head = 40, .dim = 5120, .rope_base = 1000000}},
    {"CodeLlama-13b-Python", {.block_size = 16384, .n_layer = 40, .n_head = 40, .dim = 5120, .rope_base = 1000000}},
    {"CodeLlama-34b", {.block_size = 16384, .n_layer = 48, .n_head = 64, .dim = 8192, .intermediate_size = 22016,
                       .n_local_heads = 8, .rope_base = 1000000}},
    {"CodeLlama-34b-Python", {.block_size = 16384, .n_layer = 48, .n_head = 64, .dim = 8192, .intermediate_size = 22016,
                              .n_local_heads = 8, .rope_base = 1000000}},
    {"Mistral-7B-v0.1", {.block_size = 32768, .intermediate_size = 14336, .n_local_heads = 8, .sliding_window = 4096}},
    {"Mistral-7B-v0.2", {.block_size = 32768, .intermediate_size = 14336, .n_local_heads = 8, .rope_base = 1000000}},
    {"Mistral-7B-v0.3", {.block_size = 32768, .vocab_size = 32768, .intermediate_size = 14336, .n_local_heads = 8,
                         .rope_base = 1000000}},
    {"llama-3.2-1b", {.block_size = 131072, .vocab_size = 128256, .n_layer = 16, .dim = 2048, .intermediate_size = 8192,
                      .n_local_heads = 8, .rope_base = 500000, .rope_scaling = kLlama32Scaling, .tie_word_embeddings = true}},
    {"llama-3.2-3b", {.block_size = 131072, .vocab_size = 128256, .n_layer = 28, .n_head = 24, .dim = 3072,
                      .intermediate_size = 8192, .n_local_heads = 8, .rope_base = 500000, .rope_scaling = kLlama32Scaling,
                      .tie_word_embeddings = true}},
    {"llama-3.3-70b", {.block_size = 131072, .vocab_size = 128256, .n_layer = 80, .n_head = 64, .dim = 8192,
                       .intermediate_size = 28672, .n_local_heads = 8, .rope_base = 500000, .rope_scaling = kLlama31Scaling}},
    {"Mixtral-8x22B-v0.1", {.block_size = 65536, .n_layer = 56, .n_head = 48, .dim = 6144, .intermediate_size = 16384,
                            .n_local_heads = 8, .rope_base = 1000000, .num_experts = 8, .num_activated_experts = 2}},
    {"Mixtral-8x22B-Instruct-v0.1", {.block_size = 65536, .vocab_size = 32768, .n_layer = 56, .n_head = 48, .dim = 6144,
                                     .intermediate_size = 16384, .n_local_heads = 8, .rope_base = 1000000, .num_experts = 8,
                                     .num_activated_experts = 2}, true},
    {"stories260K", {.block_size = 512, .vocab_size = 512, .n_layer = 5, .n_head = 8, .dim = 64, .intermediate_size = 172,
                     .n_local_heads = 4, .tie_word_embeddings = true}},
    {"stories42M", {.n_layer = 8, .n_head = 8, .dim = 512, .intermediate_size = 1376, .tie_word_embeddings = true}},
    {"SmolLM2-135M", {.block_size = 8192, .vocab_size = 49152, .n_layer = 30, .n_head = 9, .dim = 576, .intermediate_size = 1536,
                      .n_local_heads = 3, .rope_base = 100000, .tie_word_embeddings = true}},
    {"SmolLM2-360M", {.block_size = 8192, .vocab_size = 49152, .n_head = 15, .dim = 960, .intermediate_size = 2560,
                      .n_local_heads = 5, .rope_base = 100000, .tie_word_embeddings = true}},
    {"SmolLM2-1.7B", {.block_size = 8192, .vocab_size = 49152, .n_layer = 24, .dim = 2048, .intermediate_size = 8192,
                      .rope_base = 130000, .tie_word_embeddings = true}},
    {"TinyLlama-1.1B", {.n_layer = 22, .dim = 2048, .intermediate_size = 5632, .n_local_heads = 4}},
    {"TinyLlama-1.1B-Chat-v1.0", {.n_layer = 22, .dim = 2048, .intermediate_size = 5632, .n_local_heads = 4}},
    {"open_llama_3b", {.n_layer = 26, .dim = 3200, .intermediate_size = 8640, .norm_eps = 1e-6}},
    {"open_llama_3b_v2", {.n_layer = 26, .dim = 3200, .intermediate_size = 8640, .norm_eps = 1e-6}},
    {"open_llama_7b", {.norm_eps = 1e-6}},
    {"open_llama_7b_v2", {.norm_eps = 1e-6}},
    {"open_llama_13b", {.n_layer = 40, .n_head = 40, .dim = 5120, .norm_eps = 1e-6}},
  };
  return kTable;
}
// clang-format on

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// Words of a directory name that say nothing about the model's shape.
bool is_neutral_word(std::string_view word) {
  constexpr std::array<std::string_view, 20> kNeutral = {"hf",      "chat",     "instruct",
                                                         "base",    "meta",     "model",
                                                         "weights", "original", "converted",
                                                         "gptfast", "fp32",     "fp16",
                                                         "bf16",    "f32",      "float32",
                                                         "float16", "bfloat16", "gguf",
                                                         "copy",    "test"};
  return std::find(kNeutral.begin(), kNeutral.end(), word) != kNeutral.end();
}

// "Meta-Llama-3-8B-Instruct" and "llama3_8b" -> "llama-3-8b"
std::string model_key(std::string_view name) {
  std::string key;
  std::string word;
  const auto flush = [&] {
    if (!word.empty() && !is_neutral_word(word)) key += (key.empty() ? "" : "-") + word;
    word.clear();
  };
  for (const char c : lower(name)) {
    if (c == '-' || c == '_' || c == ' ') {
      flush();
    } else {
      if (word == "llama" && std::isdigit(static_cast<unsigned char>(c))) flush();
      word += c;
    }
  }
  flush();
  return key;
}

// The bounds keep every product of sizes far below 2^63.
void check_range(const char* field, int64_t value, int64_t low, int64_t high) {
  TORCH_CHECK(value >= low && value <= high, "configuration: ", field, " is ", value,
              ", it must be from ", low, " to ", high);
}

void check_rope_scaling(const RopeScaling& scaling) {
  const bool positive = scaling.factor > 0 && scaling.low_freq_factor > 0 &&
                        std::isfinite(scaling.factor) && std::isfinite(scaling.high_freq_factor) &&
                        scaling.original_max_position_embeddings > 0;
  TORCH_CHECK(positive, "configuration: rope_scaling has a factor that is not positive");
  TORCH_CHECK(scaling.high_freq_factor > scaling.low_freq_factor,
              "configuration: rope_scaling has high_freq_factor ", scaling.high_freq_factor,
              ", it must be above low_freq_factor ", scaling.low_freq_factor);
}

}  // namespace

int64_t find_multiple(int64_t n, int64_t k) {
  return n % k == 0 ? n : n + k - n % k;
}

void ModelArgs::finalize() {
  constexpr int64_t kMaxWidth = int64_t{1} << 20;
  if (vocab_size != -1) check_range("vocab_size", vocab_size, 1, INT32_MAX);
  check_range("block_size", block_size, 1, INT32_MAX);
  check_range("n_layer", n_layer, 1, 10000);
  check_range("n_head", n_head, 1, 65536);
  check_range("dim", dim, 1, kMaxWidth);
  if (n_local_heads == -1) n_local_heads = n_head;
  check_range("n_local_heads", n_local_heads, 1, n_head);
  TORCH_CHECK(n_head % n_local_heads == 0, "configuration: n_head ", n_head,
              " is not a multiple of n_local_heads ", n_local_heads);
  if (head_dim == 0) {
    TORCH_CHECK(dim % n_head == 0, "configuration: dim ", dim, " is not a multiple of n_head ",
                n_head);
    head_dim = dim / n_head;
  }
  check_range("head_dim", head_dim, 2, 65536);
  TORCH_CHECK(head_dim % 2 == 0, "configuration: head_dim ", head_dim,
              " is odd, rotary embeddings need pairs");
  if (intermediate_size == 0) intermediate_size = find_multiple(2 * 4 * dim / 3, 256);
  check_range("intermediate_size", intermediate_size, 1, 16 * kMaxWidth);
  TORCH_CHECK(rope_base > 0 && std::isfinite(rope_base), "configuration: rope_base is ", rope_base,
              ", it must be positive");
  TORCH_CHECK(norm_eps >= 0 && norm_eps < 1, "configuration: norm_eps is ", norm_eps,
              ", it must be from 0 to 1");
  if (rope_scaling) check_rope_scaling(*rope_scaling);
  check_range("sliding_window", sliding_window, 0, INT32_MAX);
  check_range("num_experts", num_experts, 0, 4096);
  check_range("num_activated_experts", num_activated_experts, num_experts > 0 ? 1 : 0, num_experts);
}

int64_t ModelArgs::num_parameters() const {
  const int64_t attention = dim * qkv_dim() + n_head * head_dim * dim;
  const int64_t expert = 3 * dim * intermediate_size;
  const int64_t feed_forward = num_experts > 0 ? num_experts * expert + num_experts * dim : expert;
  const int64_t embeddings = (tie_word_embeddings ? 1 : 2) * vocab_size * dim;
  return embeddings + n_layer * (attention + feed_forward + 2 * dim) + dim;
}

std::vector<std::string> known_model_names() {
  std::vector<std::string> names;
  for (const ModelRow& row : model_table()) names.emplace_back(row.name);
  return names;
}

ModelArgs ModelArgs::from_name(std::string_view name) {
  for (const ModelRow& row : model_table()) {
    if (lower(row.name) != lower(name)) continue;
    ModelArgs args = row.args;
    args.finalize();
    return args;
  }
  TORCH_CHECK(false, "unknown model '", name,
              "'; known names: ", c10::Join(", ", known_model_names()));
}

namespace {

bool names_file(const std::string& config) {
  return config.ends_with(".json") || std::filesystem::is_regular_file(config);
}

}  // namespace

ModelArgs ModelArgs::from_name_or_file(const std::string& name) {
  return names_file(name) ? from_json_file(name) : from_name(name);
}

std::optional<std::string> match_model_name(std::string_view directory_name) {
  for (const ModelRow& row : model_table()) {
    if (lower(row.name) == lower(directory_name)) return row.name;
  }
  std::optional<std::string> match;
  const std::string key = model_key(directory_name);
  for (const ModelRow& row : model_table()) {
    if (row.exact_only || model_key(row.name) != key) continue;
    if (match) return std::nullopt;
    match = row.name;
  }
  return match;
}

namespace {

// The table's name that the place of a checkpoint means: its directory as given, the directory
// behind a symbolic link, or the file's own name (stories15M.pt).
std::optional<std::string> name_from_path(const std::filesystem::path& checkpoint_path) {
  const auto absolute = std::filesystem::absolute(checkpoint_path).lexically_normal();
  if (auto name = match_model_name(absolute.parent_path().filename().string())) return name;
  std::error_code error;
  const auto real = std::filesystem::canonical(checkpoint_path, error);
  if (!error) {
    if (auto name = match_model_name(real.parent_path().filename().string())) return name;
  }
  return match_model_name(absolute.stem().string());
}

}  // namespace

ConfigChoice choose_config(const std::filesystem::path& checkpoint_path,
                           const std::string& override_config) {
  if (!override_config.empty()) {
    const bool is_file = names_file(override_config);
    return {ModelArgs::from_name_or_file(override_config), "--config " + override_config,
            is_file ? std::filesystem::path(override_config) : std::filesystem::path()};
  }
  for (const char* name : {"config.json", "params.json"}) {
    const auto file = checkpoint_path.parent_path() / name;
    if (std::filesystem::exists(file))
      return {ModelArgs::from_json_file(file), file.string(), file};
  }
  const auto directory = std::filesystem::absolute(checkpoint_path)
                             .lexically_normal()
                             .parent_path()
                             .filename()
                             .string();
  const auto name = name_from_path(checkpoint_path);
  TORCH_CHECK(name, checkpoint_path.string(),
              ": cannot tell the model: there is no config.json or params.json beside it and the ",
              "directory name '", directory, "' fits none, or more than one, of the known models (",
              c10::Join(", ", known_model_names()),
              "). Pass --config with one of these names or a JSON file");
  return {ModelArgs::from_name(*name), "the model " + *name + ", chosen by name", {}};
}

namespace {

void limit_to_window(ModelArgs& args) {
  if (args.sliding_window == 0 || args.block_size <= args.sliding_window) return;
  std::cerr << "note: the model has a sliding window of " << args.sliding_window
            << " tokens, which is not implemented: the context is limited to "
            << args.sliding_window << " tokens instead of " << args.block_size << std::endl;
  args.block_size = args.sliding_window;
}

}  // namespace

ModelArgs find_config(const std::filesystem::path& checkpoint_path,
                      const std::string& override_config, const StateDict& tensors) {
  auto [args, source, file] = choose_config(checkpoint_path, override_config);
  if (args.vocab_size == -1) {
    const Tensor& embedding = tensors.at("tok_embeddings.weight");
    TORCH_CHECK(embedding.dim() == 2, checkpoint_path.string(), ": tok_embeddings.weight has ",
                embedding.dim(), " dimensions, 2 were expected");
    args.vocab_size = embedding.size(0);
  }
  try {
    check_config(args, tensors);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, checkpoint_path.string(), " does not fit its configuration (", source,
                "): ", error.what_without_backtrace());
  }
  limit_to_window(args);
  return args;
}

}  // namespace gptfast
