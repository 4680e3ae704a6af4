// Files of karpathy/llama2.c: model .bin and tokenizer.bin. Source: export.py and tokenizer.py of
// that project.
#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <optional>

#include "import.h"
#include "json_file.h"
#include "mapped_file.h"
#include "sentencepiece_model.h"

namespace gptfast {

namespace {

namespace fs = std::filesystem;

constexpr uint32_t kMagic = 0x616b3432;
constexpr uint64_t kVersion1Header = 256;
constexpr uint64_t kLegacyHeader = 7 * sizeof(int32_t);

struct Layout {
  ModelArgs args;
  int32_t version = 0;  // 0: legacy
  bool shared_head = true;
  int64_t hidden_frequencies = 0;  // legacy: values of the frequency tables before the head
  uint64_t header = kLegacyHeader;
};

int32_t int_at(Bytes bytes, uint64_t offset) {
  int32_t value = 0;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// nullopt when the numbers are no model.
std::optional<Layout> read_layout(Bytes bytes) {
  if (bytes.size() < kLegacyHeader) return std::nullopt;
  Layout layout;
  uint64_t offset = 0;
  if (static_cast<uint32_t>(int_at(bytes, 0)) == kMagic) {
    if (bytes.size() < kVersion1Header) return std::nullopt;
    layout.version = int_at(bytes, 4);
    layout.header = kVersion1Header;
    layout.shared_head = bytes[8 + 7 * sizeof(int32_t)] != 0;
    offset = 8;
  }
  std::array<int64_t, 7> numbers{};
  for (auto& number : numbers) {
    number = int_at(bytes, offset);
    offset += sizeof(int32_t);
  }
  if (layout.version == 0) {
    layout.shared_head =
        numbers[5] > 0;  // the legacy form marks a head of its own by a negative vocabulary
    numbers[5] = std::abs(numbers[5]);
  }
  layout.args = {.block_size = numbers[6],
                 .vocab_size = numbers[5],
                 .n_layer = numbers[2],
                 .n_head = numbers[3],
                 .dim = numbers[0],
                 .intermediate_size = numbers[1],
                 .n_local_heads = numbers[4],
                 .tie_word_embeddings = layout.shared_head};
  try {
    layout.args.finalize();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  if (layout.version == 0)
    layout.hidden_frequencies = layout.args.block_size * layout.args.head_dim;
  return layout;
}

uint64_t expected_size(const Layout& layout) {
  return layout.header + sizeof(float) * static_cast<uint64_t>(layout.args.num_parameters() +
                                                               layout.hidden_frequencies);
}

/// Hands out float32 tensors one behind the other.
class Walker {
 public:
  Walker(const FileBytes& file, uint64_t offset) : file_(file), offset_(offset) {}

  void take(const std::string& name, const std::vector<int64_t>& shape) {
    const Tensor view = at::from_blob(
        file_.owner.get() + offset_, shape, [owner = file_.owner](void*) {}, at::kFloat);
    offset_ += view.nbytes();
    tensors.push_back(source_from_tensor(name, view));
  }
  void skip(int64_t values) { offset_ += sizeof(float) * static_cast<uint64_t>(values); }
  /// The same tensor of every layer.
  void layers(const std::string& name, int64_t count, const std::vector<int64_t>& shape) {
    for (int64_t i = 0; i < count; ++i)
      take("layers." + std::to_string(i) + "." + name + ".weight", shape);
  }

  std::vector<SourceTensor> tensors;

 private:
  const FileBytes& file_;
  uint64_t offset_;
};

std::vector<SourceTensor> walk(const FileBytes& file, const Layout& layout) {
  const ModelArgs& a = layout.args;
  const int64_t kv = a.n_local_heads * a.head_dim;
  const auto embedding = std::vector<int64_t>{a.vocab_size, a.dim};
  Walker walker(file, layout.header);
  const bool legacy = layout.version == 0;
  if (legacy) walker.take("tok_embeddings.weight", embedding);
  walker.layers("attention_norm", a.n_layer, {a.dim});
  if (!legacy) {
    walker.layers("ffn_norm", a.n_layer, {a.dim});
    walker.take("norm.weight", {a.dim});
    walker.take("tok_embeddings.weight", embedding);
  }
  walker.layers("attention.wq", a.n_layer, {a.dim, a.dim});
  walker.layers("attention.wk", a.n_layer, {kv, a.dim});
  walker.layers("attention.wv", a.n_layer, {kv, a.dim});
  walker.layers("attention.wo", a.n_layer, {a.dim, a.dim});
  if (legacy) walker.layers("ffn_norm", a.n_layer, {a.dim});
  walker.layers("feed_forward.w1", a.n_layer, {a.intermediate_size, a.dim});
  walker.layers("feed_forward.w2", a.n_layer, {a.dim, a.intermediate_size});
  walker.layers("feed_forward.w3", a.n_layer, {a.intermediate_size, a.dim});
  if (legacy) {
    walker.take("norm.weight", {a.dim});
    walker.skip(layout.hidden_frequencies);
  }
  if (!layout.shared_head) walker.take("output.weight", embedding);
  return std::move(walker.tensors);
}

}  // namespace

bool is_llama2c(const fs::path& file) {
  const FileBytes mapped = map_file(file);
  const auto layout = read_layout(mapped.bytes());
  return layout && (layout->version != 0 || mapped.size == expected_size(*layout));
}

Import import_llama2c(const fs::path& file, const std::string& config) {
  const FileBytes mapped = map_file(file);
  const auto layout = read_layout(mapped.bytes());
  TORCH_CHECK(layout, file.string(), ": is no model of llama2.c");
  TORCH_CHECK(layout->version <= 1, file.string(), ": is version ", layout->version,
              " of llama2.c's format, which is quantized: export version 0 or 1");
  TORCH_CHECK(mapped.size == expected_size(*layout), file.string(), ": has ", mapped.size,
              " bytes, its header describes ", expected_size(*layout),
              ": it is cut short or damaged");
  Import import{.folder = file.parent_path()};
  import.weights.file = file.string();
  import.weights.config = config.empty() ? layout->args : ModelArgs::from_name_or_file(config);
  import.weights.tensors = walk(mapped, *layout);
  carry_llama2c_tokenizer(import);
  carry_tokenizer(import);
  return import;
}

void carry_llama2c_tokenizer(Import& import) {
  const fs::path file = import.folder / "tokenizer.bin";
  if (fs::exists(import.folder / "tokenizer.model") || !fs::exists(file)) return;
  constexpr uint64_t kMaxFile = 64 << 20;
  const std::string bytes = read_small_file(file, kMaxFile);
  const auto check = [&](bool condition) {
    TORCH_CHECK(condition, file.string(), ": is no tokenizer of llama2.c, or cut short");
  };
  std::vector<std::string> texts;
  std::vector<float> scores;
  check(bytes.size() >= sizeof(int32_t));
  for (size_t at = sizeof(int32_t);
       at < bytes.size();) {  // the first number is the longest token's length
    check(bytes.size() - at >= 2 * sizeof(int32_t));
    float score = 0;
    int32_t length = 0;
    std::memcpy(&score, bytes.data() + at, sizeof score);
    std::memcpy(&length, bytes.data() + at + sizeof score, sizeof length);
    at += 2 * sizeof(int32_t);
    check(length > 0 && static_cast<size_t>(length) <= bytes.size() - at);
    std::string text;
    for (const char c : bytes.substr(at, static_cast<size_t>(length)))
      text += c == ' ' ? std::string("\xE2\x96\x81") : std::string(1, c);
    at += static_cast<size_t>(length);
    texts.push_back(std::move(text));
    scores.push_back(score);
  }
  constexpr size_t kFirstByte = 3;  // behind <unk>, <s>, </s>
  constexpr size_t kFirstText = kFirstByte + 256;
  check(texts.size() >= kFirstText);
  // The file spells them with line feeds around, for printing.
  texts[1] = "<s>";
  texts[2] = "</s>";
  TORCH_CHECK(static_cast<int64_t>(texts.size()) <= import.weights.config.vocab_size, file.string(),
              ": has ", texts.size(), " tokens, the model's embedding only ",
              import.weights.config.vocab_size, ": they do not belong together");
  std::vector<Piece> pieces;
  for (size_t id = 0; id < texts.size(); ++id) {
    const PieceType type = id == 0           ? PieceType::kUnknown
                           : id < kFirstByte ? PieceType::kControl
                           : id < kFirstText ? PieceType::kByte
                                             : PieceType::kNormal;
    pieces.push_back({.text = texts[id], .score = scores[id], .type = type});
  }
  import.files.push_back(
      {"tokenizer.model", sentencepiece_model(pieces, {.bos_id = 1, .eos_id = 2})});
}

}  // namespace gptfast
