#include "import.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <map>
#include <set>

#include "checkpoint_reader.h"
#include "gptfast/checkpoint.h"
#include "gptfast/tokenizer.h"
#include "import_gptq.h"
#include "json_file.h"
#include "pickle.h"
#include "safetensors.h"
#include "zip.h"

namespace gptfast {

namespace {

namespace fs = std::filesystem;

StateDict load_tensors(const fs::path& file) {
  return file.extension() == ".safetensors" ? load_safetensors(file) : load_checkpoint(file);
}

void append(std::vector<SourceTensor>& tensors, const StateDict& more) {
  for (const auto& [name, tensor] : more) tensors.push_back(source_from_tensor(name, tensor));
}

bool has_hf_names(const std::vector<SourceTensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const SourceTensor& t) {
    return t.name.starts_with("model.") || t.name == "lm_head.weight";
  });
}

int64_t embedding_rows(const WeightSource& source) {
  for (const auto& tensor : source.tensors) {
    if (tensor.name == "tok_embeddings.weight" && tensor.shape.size() == 2) return tensor.shape[0];
  }
  TORCH_CHECK(false, source.file, ": has no token embedding");
}

// Renames tensors and sets what depends on the kind of names.
void adopt(std::vector<SourceTensor> tensors, WeightSource& source) {
  source.halves = has_hf_names(tensors);
  source.tensors = rename_all(std::move(tensors), source.halves ? rename_hf : rename_meta);
  gather_experts(source);
  if (source.config.vocab_size == -1) source.config.vocab_size = embedding_rows(source);
}

void adopt_config(const fs::path& checkpoint, const std::string& config, Import& import) {
  const ConfigChoice choice = choose_config(checkpoint, config);
  import.weights.config = choice.args;
  if (!config.empty()) {
    if (fs::exists(import.folder / "config.json")) {
      import.notes.push_back(
          "--config is not kept where config.json already lies beside model.pth: pass it to "
          "generate too");
    }
  } else if (choice.file.filename() == "config.json") {
    constexpr uint64_t kMaxConfig = 1 << 24;
    import.config_json = read_small_file(choice.file, kMaxConfig);
  }
}

// ---- Hugging Face

constexpr const char* kSafetensorsIndex = "model.safetensors.index.json";
constexpr const char* kBinIndex = "pytorch_model.bin.index.json";

// The shards that an index names, each with the tensors it must hold.
std::map<std::string, std::vector<std::string>> read_index(const fs::path& index) {
  const auto object = read_json_object(index);
  const auto map = object.find("weight_map");
  TORCH_CHECK(map != object.end() && map->is_object() && !map->empty(), index.string(),
              ": has no weight_map");
  std::map<std::string, std::vector<std::string>> shards;
  for (const auto& [name, file] : map->items()) {
    TORCH_CHECK(file.is_string() &&
                    fs::path(file.get<std::string>()).filename() == file.get<std::string>() &&
                    !file.get<std::string>().empty(),
                index.string(), ": the file of ", name, " is not a name in this folder");
    shards[file.get<std::string>()].push_back(name);
  }
  return shards;
}

std::vector<SourceTensor> load_shards(const fs::path& directory, const fs::path& index) {
  const auto shards = read_index(index);
  for (const auto& [file, names] : shards) {
    TORCH_CHECK(fs::exists(directory / file), (directory / file).string(), ": is missing, but ",
                index.filename().string(), " names it: download it");
  }
  std::vector<SourceTensor> tensors;
  for (const auto& [file, names] : shards) {
    const StateDict shard = load_tensors(directory / file);
    for (const auto& name : names) {
      TORCH_CHECK(shard.contains(name), (directory / file).string(), ": has no tensor ", name,
                  ", but ", index.filename().string(), " says so");
    }
    append(tensors, shard);
  }
  return tensors;
}

// Nothing when the directory holds no weights in Hugging Face's files.
std::vector<SourceTensor> load_hf_tensors(const fs::path& directory) {
  for (const char* index : {kSafetensorsIndex, kBinIndex}) {
    if (fs::exists(directory / index)) return load_shards(directory, directory / index);
    const std::string single =
        index == kSafetensorsIndex ? "model.safetensors" : "pytorch_model.bin";
    std::vector<SourceTensor> tensors;
    if (fs::exists(directory / single)) {
      append(tensors, load_tensors(directory / single));
      return tensors;
    }
  }
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const bool shard = name.starts_with("model-0") && name.ends_with(".safetensors");
    TORCH_CHECK(!shard && !(name.starts_with("pytorch_model-0") && name.ends_with(".bin")),
                directory.string(), ": has shards such as ", name, ", but no ",
                shard ? kSafetensorsIndex : kBinIndex, ": download it");
  }
  return {};
}

// ---- Meta

std::vector<fs::path> consolidated_files(const fs::path& directory) {
  std::set<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const auto extension = entry.path().extension();
    const bool weights = extension == ".pth" || extension == ".pt" || extension == ".safetensors";
    if (weights && entry.path().filename().string().starts_with("consolidated"))
      files.insert(entry.path());
  }
  return {files.begin(), files.end()};
}

// Along which dimension a tensor that Meta's model parallelism split is put together; nullopt for
// one that every part has whole.
std::optional<int64_t> split_dim(const SourceTensor& part, int64_t parts, int64_t dim) {
  if (part.shape.size() < 2) return std::nullopt;
  if (part.name.ends_with("attention.wo.weight") || part.name.ends_with("feed_forward.w2.weight"))
    return 1;
  // Llama 1 and 2 split the embedding's width, Llama 3 its vocabulary.
  if (part.name == "tok_embeddings.weight") return part.shape[1] * parts == dim ? 1 : 0;
  return 0;
}

/// A tensor that several parts hold alike; reading it checks that they do.
SourceTensor one_of_copies(std::vector<SourceTensor> copies) {
  SourceTensor result = copies.front();
  for (size_t i = 1; i < copies.size(); ++i) result.bytes += copies[i].bytes;
  result.read = [copies = std::move(copies)](at::ScalarType dtype) {
    const Tensor first = copies.front().read(dtype);
    for (const auto& copy : copies) {
      TORCH_CHECK(at::equal(first, copy.read(dtype)), "tensor ", copy.name,
                  ": parts that should repeat the same key/value heads differ; is n_kv_heads of "
                  "params.json right?");
    }
    return first;
  };
  return result;
}

// With more parts than key/value heads, neighbouring parts repeat a head (Llama 3.1 405B, MP16).
std::vector<SourceTensor> drop_repeated_heads(std::vector<SourceTensor> parts,
                                              const ModelArgs& config) {
  const SourceTensor& first = parts.front();
  const auto count = static_cast<int64_t>(parts.size());
  const int64_t rows = config.n_local_heads * config.head_dim;
  const bool keys_or_values =
      first.name.ends_with("attention.wk.weight") || first.name.ends_with("attention.wv.weight");
  if (!keys_or_values || first.shape.size() != 2 || first.shape[0] * count <= rows ||
      first.shape[0] * count % rows != 0)
    return parts;
  const int64_t copies = first.shape[0] * count / rows;
  if (count % copies != 0) return parts;
  std::vector<SourceTensor> heads;
  for (auto part = parts.begin(); part != parts.end(); part += copies)
    heads.push_back(one_of_copies({part, part + copies}));
  return heads;
}

std::vector<SourceTensor> merge_parts(std::vector<std::vector<SourceTensor>> files,
                                      const ModelArgs& config) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<SourceTensor>> parts;
  for (auto& file : files) {
    for (auto& tensor : file) {
      if (!parts.contains(tensor.name)) order.push_back(tensor.name);
      parts[tensor.name].push_back(std::move(tensor));
    }
  }
  std::vector<SourceTensor> merged;
  for (const auto& name : order) {
    auto& group = parts[name];
    const auto count = static_cast<int64_t>(group.size());
    const auto along = split_dim(group.front(), count, config.dim);
    if (count == 1 || !along) {
      merged.push_back(std::move(group.front()));
    } else {
      TORCH_CHECK(group.size() == files.size(), "tensor ", name, " is in ", count, " of ",
                  files.size(), " parts");
      merged.push_back(concatenate(name, drop_repeated_heads(std::move(group), config), *along));
    }
  }
  return merged;
}

Import import_meta_directory(const fs::path& directory, const std::vector<fs::path>& files,
                             const std::string& config) {
  Import import{.folder = directory};
  import.weights.file = directory.string();
  adopt_config(directory / "model.pth", config, import);
  std::vector<std::vector<SourceTensor>> parts;
  for (const auto& file : files) {
    parts.emplace_back();
    append(parts.back(), load_tensors(file));
  }
  try {
    adopt(merge_parts(std::move(parts), import.weights.config), import.weights);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, directory.string(), ": ", error.what_without_backtrace());
  }
  carry_tokenizer(import);
  return import;
}

// ---- llama2.c's .pt: the configuration lies in the file.

std::optional<nlohmann::json> model_args_in(const fs::path& file) {
  const FileBytes mapped = map_file(file);
  constexpr std::string_view kZip = "PK\x03\x04";
  const Bytes bytes = mapped.bytes();
  if (bytes.size() < kZip.size() || !std::equal(kZip.begin(), kZip.end(), bytes.begin()))
    return std::nullopt;
  const zip::Reader archive(bytes);
  const auto names = archive.names();
  const auto name = std::find_if(names.begin(), names.end(),
                                 [](std::string_view n) { return n.ends_with("/data.pkl"); });
  if (name == names.end()) return std::nullopt;
  // load_checkpoint has read the file before, and refused any global that is not allowed.
  const auto program =
      pickle::parse(archive.read(*name).data, [](std::string_view) { return true; });
  const auto find = [&](const pickle::Node& dict, std::string_view key) -> const pickle::Node* {
    for (size_t i = 0; dict.kind == pickle::Kind::kDict && i + 1 < dict.items.size(); i += 2) {
      const auto& candidate = program[dict.items[i]];
      if (candidate.kind == pickle::Kind::kString && candidate.text == key)
        return &program[dict.items[i + 1]];
    }
    return nullptr;
  };
  const pickle::Node* args = find(program[program.root], "model_args");
  if (args == nullptr) return std::nullopt;
  nlohmann::json object = nlohmann::json::object();
  for (const char* key : {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim",
                          "multiple_of", "norm_eps", "max_seq_len"}) {
    const pickle::Node* value = find(*args, key);
    if (value != nullptr && value->kind == pickle::Kind::kInt) object[key] = value->integer;
    if (value != nullptr && value->kind == pickle::Kind::kFloat) object[key] = value->number;
  }
  return object;
}

}  // namespace

Import import_directory(const fs::path& directory, const std::string& config,
                        const std::string& gptq_zeros) {
  std::vector<SourceTensor> tensors = load_hf_tensors(directory);
  if (tensors.empty()) {
    const auto files = consolidated_files(directory);
    TORCH_CHECK(!files.empty(), directory.string(),
                ": holds no weights: expected model.safetensors or pytorch_model.bin (one file, or "
                "shards with their index), or ",
                "Meta's consolidated.NN.pth");
    return import_meta_directory(directory, files, config);
  }
  Import import{.folder = directory};
  import.weights.file = directory.string();
  adopt_config(directory / "model.pth", config, import);
  if (has_packed_weights(tensors)) {
    const PackedFormat format = read_packed_format(directory, gptq_zeros);
    tensors = unpack_quantized(std::move(tensors), format);
    if (format.bits == 8)
      import.notes.push_back(
          "weights of 8 bits become floating ones; only --dtype float32 keeps them exactly");
  }
  adopt(std::move(tensors), import.weights);
  carry_tokenizer(import);
  return import;
}

Import import_tensor_file(const fs::path& file, const std::string& config) {
  Import import{.folder = file.parent_path()};
  import.weights.file = file.string();
  std::vector<SourceTensor> tensors;
  append(tensors, load_tensors(file));
  const auto model_args =
      config.empty() && file.extension() != ".safetensors" ? model_args_in(file) : std::nullopt;
  if (model_args) {
    import.weights.config = model_args_from_json(*model_args, file.string() + ": model_args");
    import.weights.config.tie_word_embeddings = true;  // llama2.c always ties
  } else {
    adopt_config(file, config, import);
  }
  adopt(std::move(tensors), import.weights);
  carry_llama2c_tokenizer(import);
  carry_tokenizer(import);
  return import;
}

namespace {

// The tokenizer file that generate would use, or an empty path.
fs::path tokenizer_of(const Import& import) {
  for (const char* name : {"tokenizer.model", "original/tokenizer.model",
                           "original/mp16/tokenizer.model", "tokenizer.json"}) {
    if (fs::exists(import.folder / name)) return import.folder / name;
  }
  return {};
}

void check_tokenizer(const fs::path& file, Import& import) {
  int64_t tokens = 0;
  try {
    tokens = Tokenizer::load(file)->vocab_size();
  } catch (const c10::Error& error) {
    import.notes.push_back(std::string("the tokenizer cannot be used: ") +
                           error.what_without_backtrace());
    return;
  }
  TORCH_CHECK(tokens <= import.weights.config.vocab_size, file.string(), ": has ", tokens,
              " tokens, the model's embedding only ", import.weights.config.vocab_size,
              ": they do not belong together");
}

}  // namespace

void carry_tokenizer(Import& import) {
  constexpr uint64_t kMaxFile = uint64_t{256} << 20;
  const auto carried = [&](const std::string& name) {
    return std::any_of(import.files.begin(), import.files.end(),
                       [&](const SideFile& file) { return file.name == name; });
  };
  const fs::path tokenizer = tokenizer_of(import);
  if (tokenizer.empty()) {
    if (!carried("tokenizer.model")) {
      import.notes.push_back(
          "there is no tokenizer beside the weights: put the model's tokenizer.model or "
          "tokenizer.json beside model.pth");
    }
  } else {
    check_tokenizer(tokenizer, import);
    import.files.push_back({tokenizer.filename().string(), read_small_file(tokenizer, kMaxFile)});
  }
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "added_tokens.json",
                           "generation_config.json", "chat_template.jinja"}) {
    if (fs::exists(import.folder / name) && !carried(name))
      import.files.push_back({name, read_small_file(import.folder / name, kMaxFile)});
  }
}

}  // namespace gptfast
