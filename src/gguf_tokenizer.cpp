// The tokenizer in a GGUF file's metadata, as the files that it was made from.
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "gguf.h"
#include "sentencepiece_model.h"

namespace gptfast {

namespace {

using Json = nlohmann::ordered_json;

// Splits of the text before merging, by the name in tokenizer.ggml.pre. The expressions are part of
// the models.
constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

Json pre_tokenizer(const GgufFile& gguf, std::string_view pre) {
  if (pre == "gpt-2") return byte_level(true);
  if (pre == "smollm") {
    return {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Digits"}, {"individual_digits", true}}, byte_level(true)}}};
  }
  if (pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3") {
    const Json split = {{"type", "Split"},
                        {"pattern", {{"Regex", kLlama3Pattern}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
    return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level(false)}}};
  }
  TORCH_CHECK(false, gguf.name(), ": the pre-tokenizer '", pre,
              "' (tokenizer.ggml.pre) is not supported (known: gpt-2, smollm, llama-bpe)");
}

/// What both kinds of tokenizers have.
struct Vocabulary {
  const std::vector<std::string_view>& tokens;
  std::vector<int64_t> types;
  int64_t bos, eos;
  bool add_bos;

  std::string text(int64_t id) const { return std::string(tokens[static_cast<size_t>(id)]); }
  bool is(size_t id, PieceType type) const { return types[id] == static_cast<int64_t>(type); }
};

int64_t special_id(const GgufFile& gguf, const std::string& key, size_t vocabulary) {
  const int64_t id = gguf.integer_or("tokenizer.ggml." + key, -1);
  TORCH_CHECK(id >= -1 && id < static_cast<int64_t>(vocabulary), gguf.name(), ": tokenizer.ggml.",
              key, " is ", id, ", the vocabulary has ", vocabulary, " tokens");
  return id;
}

Vocabulary read_vocabulary(const GgufFile& gguf, bool add_bos) {
  const auto& tokens = gguf.texts("tokenizer.ggml.tokens");
  std::vector<int64_t> types(tokens.size(), static_cast<int64_t>(PieceType::kNormal));
  if (gguf.has("tokenizer.ggml.token_type")) types = gguf.integers("tokenizer.ggml.token_type");
  TORCH_CHECK(types.size() == tokens.size(), gguf.name(), ": has ", tokens.size(), " tokens, but ",
              types.size(), " token types");
  std::unordered_set<std::string_view> seen;
  for (const auto& token : tokens) {
    TORCH_CHECK(seen.insert(token).second, gguf.name(), ": the token '", token,
                "' appears twice in the vocabulary");
  }
  for (const int64_t type : types)
    TORCH_CHECK(type >= 1 && type <= 6, gguf.name(), ": has the unknown token type ", type);
  return {.tokens = tokens,
          .types = std::move(types),
          .bos = special_id(gguf, "bos_token_id", tokens.size()),
          .eos = special_id(gguf, "eos_token_id", tokens.size()),
          .add_bos = gguf.integer_or("tokenizer.ggml.add_bos_token", add_bos ? 1 : 0) != 0};
}

SideFile json_file(const GgufFile& gguf, const std::string& name, const Json& object) {
  try {
    return {name, object.dump(1) + "\n"};
  } catch (const Json::exception&) {
    TORCH_CHECK(false, gguf.name(), ": the tokenizer holds text that is not valid UTF-8");
  }
}

// BOS, EOS, whether BOS goes in front, the chat template; and every id that ends a text.
void add_config_files(const GgufFile& gguf, const Vocabulary& vocabulary,
                      const char* tokenizer_class, std::vector<SideFile>& files) {
  Json config = {{"tokenizer_class", tokenizer_class},
                 {"add_bos_token", vocabulary.add_bos && vocabulary.bos >= 0}};
  if (vocabulary.bos >= 0) config["bos_token"] = vocabulary.text(vocabulary.bos);
  if (vocabulary.eos >= 0) config["eos_token"] = vocabulary.text(vocabulary.eos);
  const auto chat_template = gguf.text_or("tokenizer.chat_template", "");
  if (!chat_template.empty()) config["chat_template"] = std::string(chat_template);
  files.push_back(json_file(gguf, "tokenizer_config.json", config));

  Json generation = Json::object();
  if (vocabulary.bos >= 0) generation["bos_token_id"] = vocabulary.bos;
  Json stops = Json::array();
  for (const char* key : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
    const int64_t id = special_id(gguf, key, vocabulary.tokens.size());
    if (id >= 0 && std::find(stops.begin(), stops.end(), id) == stops.end()) stops.push_back(id);
  }
  if (!stops.empty()) generation["eos_token_id"] = stops;
  files.push_back(json_file(gguf, "generation_config.json", generation));
}

std::vector<SideFile> bpe_files(const GgufFile& gguf) {
  const Vocabulary vocabulary = read_vocabulary(gguf, /*add_bos=*/false);
  const auto pre = gguf.text_or("tokenizer.ggml.pre", "gpt-2");
  Json added = Json::array();
  Json vocab = Json::object();
  auto& entries = vocab.get_ref<Json::object_t&>();
  entries.reserve(vocabulary.tokens.size());
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string token(vocabulary.tokens[id]);
    entries.Container::emplace_back(token,
                                    id);  // emplace() would search all of them for the name first
    const bool control = vocabulary.is(id, PieceType::kControl);
    if (!control && !vocabulary.is(id, PieceType::kUserDefined)) continue;
    added.push_back({{"id", id},
                     {"content", token},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", control}});
  }
  Json merges = Json::array();
  for (const auto& merge : gguf.texts("tokenizer.ggml.merges"))
    merges.push_back(std::string(merge));
  Json tokenizer = {{"version", "1.0"},
                    {"truncation", nullptr},
                    {"padding", nullptr},
                    {"added_tokens", added},
                    {"normalizer", nullptr}};
  tokenizer["pre_tokenizer"] = pre_tokenizer(gguf, pre);
  tokenizer["post_processor"] = nullptr;
  if (vocabulary.add_bos && vocabulary.bos >= 0) {
    const std::string bos = vocabulary.text(vocabulary.bos);
    const Json front = {{"SpecialToken", {{"id", bos}, {"type_id", 0}}}};
    const auto sequence = [](const char* id, int type) {
      return Json{{"Sequence", {{"id", id}, {"type_id", type}}}};
    };
    tokenizer["post_processor"] =
        {{"type", "TemplateProcessing"},
         {"single", {front, sequence("A", 0)}},
         {"pair", {front, sequence("A", 0), front, sequence("B", 1)}},
         {"special_tokens", {{bos, {{"id", bos}, {"ids", {vocabulary.bos}}, {"tokens", {bos}}}}}}};
  }
  tokenizer["decoder"] = byte_level(true);
  tokenizer["model"] = {{"type", "BPE"},
                        {"dropout", nullptr},
                        {"unk_token", nullptr},
                        {"continuing_subword_prefix", nullptr},
                        {"end_of_word_suffix", nullptr},
                        {"fuse_unk", false},
                        {"byte_fallback", false},
                        {"ignore_merges", pre.starts_with("llama")}};
  tokenizer["model"]["vocab"] = std::move(vocab);
  tokenizer["model"]["merges"] = std::move(merges);
  std::vector<SideFile> files = {json_file(gguf, "tokenizer.json", tokenizer)};
  add_config_files(gguf, vocabulary, "PreTrainedTokenizerFast", files);
  return files;
}

// Exports spell the spaces of added tokens plainly; a SentencePiece model never sees one.
std::string with_space_symbols(std::string_view token) {
  std::string text;
  for (const char c : token) text += c == ' ' ? std::string("\u2581") : std::string(1, c);
  return text;
}

/// What exporters make of the types of a SentencePiece model's tokens, undone.
void set_sentencepiece_types(const GgufFile& gguf, Vocabulary& vocabulary) {
  // Exports of recent years call the unknown token a control token and name it apart.
  if (std::count(vocabulary.types.begin(), vocabulary.types.end(),
                 static_cast<int64_t>(PieceType::kUnknown)) == 0) {
    const auto id = static_cast<size_t>(
        std::max<int64_t>(special_id(gguf, "unknown_token_id", vocabulary.tokens.size()), 0));
    if (id < vocabulary.types.size() && vocabulary.is(id, PieceType::kControl))
      vocabulary.types[id] = static_cast<int64_t>(PieceType::kUnknown);
  }
  // Older ones call every added token user-defined, which is found in any text; but nothing that is
  // typed may pose as a marker of a chat.
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string_view token = vocabulary.tokens[id];
    if (vocabulary.is(id, PieceType::kUserDefined) && token.starts_with("<|") &&
        token.ends_with("|>"))
      vocabulary.types[id] = static_cast<int64_t>(PieceType::kControl);
  }
}

std::vector<SideFile> sentencepiece_files(const GgufFile& gguf) {
  Vocabulary vocabulary = read_vocabulary(gguf, /*add_bos=*/true);
  const auto& scores = gguf.numbers("tokenizer.ggml.scores");
  TORCH_CHECK(scores.size() == vocabulary.tokens.size(), gguf.name(), ": has ",
              vocabulary.tokens.size(), " tokens, but ", scores.size(), " scores");
  set_sentencepiece_types(gguf, vocabulary);
  std::vector<std::string> texts;
  texts.reserve(vocabulary.tokens.size());  // pieces point into it
  std::vector<Piece> pieces;
  int64_t unknown = 0;
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    TORCH_CHECK(!vocabulary.tokens[id].empty(), gguf.name(), ": token ", id,
                " is empty, which a SentencePiece model cannot hold: bring the model's own "
                "tokenizer.model");
    texts.push_back(with_space_symbols(vocabulary.tokens[id]));
    pieces.push_back({.text = texts.back(),
                      .score = static_cast<float>(scores[id]),
                      .type = static_cast<PieceType>(vocabulary.types[id])});
    unknown += vocabulary.is(id, PieceType::kUnknown) ? 1 : 0;
  }
  TORCH_CHECK(unknown == 1, gguf.name(), ": the vocabulary has ", unknown,
              " unknown tokens, a SentencePiece model needs one: bring the model's own "
              "tokenizer.model");
  const SentencePieceSettings settings{.bos_id = vocabulary.bos,
                                       .eos_id = vocabulary.eos,
                                       .add_dummy_prefix =
                                           gguf.integer_or("tokenizer.ggml.add_space_prefix", 1) !=
                                           0};
  std::vector<SideFile> files = {{"tokenizer.model", sentencepiece_model(pieces, settings)}};
  add_config_files(gguf, vocabulary, "LlamaTokenizer", files);
  return files;
}

}  // namespace

std::vector<SideFile> gguf_tokenizer(const GgufFile& gguf) {
  const auto model = gguf.text("tokenizer.ggml.model");
  if (model == "gpt2") return bpe_files(gguf);
  if (model == "llama") return sentencepiece_files(gguf);
  TORCH_CHECK(false, gguf.name(), ": the tokenizer model '", model,
              "' is not supported (known: gpt2, llama)");
}

}  // namespace gptfast
