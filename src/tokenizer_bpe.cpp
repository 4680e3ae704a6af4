// Byte-level BPE from a tokenizer.json of HF tokenizers (GPT-2, Llama 3, SmolLM2, ...).
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bpe_merge.h"
#include "text_split.h"
#include "tokenizer_base.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr int32_t kLargestId =
    (1 << 24) - 1;  // far above any vocabulary; keeps a damaged file from asking for much memory

constexpr int kMaxSequences = 8;  // inside of each other; real files have one

// ---- The byte alphabet: a vocabulary spells each byte as a printable character, itself where it
// is one, else U+0100 and up.

std::string utf8_of(uint32_t code_point) {  // below U+0800
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

class ByteAlphabet {
 public:
  ByteAlphabet() {
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      bytes_.emplace(utf8_of(printable ? byte : next++), byte);
    }
  }

  // The bytes that `spelling` stands for; nothing when it holds a character outside of the
  // alphabet.
  std::optional<std::string> bytes_of(std::string_view spelling) const {
    std::string result;
    while (!spelling.empty()) {
      const size_t length = static_cast<uint8_t>(spelling[0]) < 0x80 ? 1 : 2;
      const auto byte = bytes_.find(spelling.substr(0, length));
      if (byte == bytes_.end()) return std::nullopt;
      result += static_cast<char>(byte->second);
      spelling.remove_prefix(length);
    }
    return result;
  }

 private:
  StringIds bytes_;
};

// ---- Reading the file. Every rule that changes ids is either followed or refused by name.

class Reader {
 public:
  Reader(const fs::path& file, const std::string& contents)
      : file_(file), root_(json::parse(contents, nullptr, /*allow_exceptions=*/false)) {
    check(root_.is_object(), "is not valid JSON; is it cut short?");
  }

  template <typename... Parts>
  void check(bool condition, const Parts&... parts) const {
    if (!condition) fail(parts...);
  }

  // What the file says may hold line breaks; the message has one line.
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::string message = c10::str(parts...);
    std::replace_if(
        message.begin(), message.end(), [](char c) { return c >= 0 && c < ' '; }, ' ');
    TORCH_CHECK(false, "tokenizer ", file_.string(), " ", message);
  }

  const json& root() const { return root_; }

  // nullptr when absent or null.
  static const json* find(const json& object, const char* key) {
    const auto value = object.find(key);
    return value == object.end() || value->is_null() ? nullptr : &*value;
  }

  std::string type_of(const json& object, const char* what) const {
    const json* type = object.is_object() ? find(object, "type") : nullptr;
    check(type != nullptr && type->is_string(), "has a ", what, " without a type");
    return type->get<std::string>();
  }

  bool flag(const json& object, const char* key, bool otherwise) const {
    const json* value = find(object, key);
    if (value == nullptr) return otherwise;
    check(value->is_boolean(), "has a ", key, " that is neither true nor false");
    return value->get<bool>();
  }

  std::string text(const json& object, const char* key) const {
    const json* value = find(object, key);
    check(value != nullptr && value->is_string(), "lacks the string ", key);
    return value->get<std::string>();
  }

  int32_t id(const json& value, std::string_view token) const {
    check(value.is_number_integer() && value >= 0 && value <= kLargestId, "gives the token '",
          token, "' the id ", value.is_structured() ? value.type_name() : value.dump());
    return value.get<int32_t>();
  }

  // Visits a component, or the members of a "Sequence" of components.
  template <typename Visit>
  void each(const json& component, const char* what, const char* members, const Visit& visit,
            int depth = 0) const {
    const std::string type = type_of(component, what);
    if (type != "Sequence") return visit(component, type);
    const json* list = find(component, members);
    check(list != nullptr && list->is_array(), "has a ", what, " of type Sequence without ",
          members);
    check(depth < kMaxSequences, "has a ", what, " of too many Sequences inside of each other");
    for (const json& member : *list) each(member, what, members, visit, depth + 1);
  }

 private:
  const fs::path& file_;
  json root_;
};

// ---- The tokenizer.

class BpeTokenizer final : public TokenizerBase {
 public:
  BpeTokenizer(const fs::path& file, const std::string& contents) {
    const Reader reader(file, contents);
    read_model(reader);
    read_added_tokens(reader);
    refuse_normalizer(reader);
    read_pre_tokenizer(reader);
    read_post_processor(reader);
    check_decoder(reader);
  }

  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override {
    std::string repaired;
    if (valid_utf8_prefix(text) != text.size()) text = repaired = to_valid_utf8(text);
    std::vector<int32_t> ids;
    // Tokens marked "normalized" are looked for in what the others leave.
    for (const auto& outer : added_[parse_special][0].split(text)) {
      if (outer.id >= 0) {
        ids.push_back(outer.id);
        continue;
      }
      for (const auto& inner : added_[parse_special][1].split(outer.text)) {
        if (inner.id >= 0) {
          ids.push_back(inner.id);
        } else {
          encode_text(inner.text, 0, ids);
        }
      }
    }
    return ids;
  }

  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (int32_t id : ids) text += bytes_of(id);
    return to_valid_utf8(text);
  }

  int32_t token_id(std::string_view token) const override {
    if (const auto id = added_ids_.find(token); id != added_ids_.end()) return id->second;
    const std::optional<std::string> bytes = alphabet_.bytes_of(token);
    if (!bytes) return -1;
    const auto id = vocab_.find(*bytes);
    return id != vocab_.end() ? id->second : -1;
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(bytes_.size()); }
  std::string_view kind() const override { return "bpe"; }

 protected:
  int32_t special_id(std::string_view token) const override {
    const auto id = special_ids_.find(token);
    return id != special_ids_.end() ? id->second : -1;
  }

  Piece piece(int32_t id, bool /*first*/) const override {
    return {.text = std::string(bytes_of(id)), .is_bytes = true};
  }

 private:
  // One step of the pre-tokenizer: a space in front of each piece that does not begin with one,
  // then a split.
  struct Step {
    bool add_prefix_space = false;
    std::optional<TextSplitter> splitter = std::nullopt;
  };

  void read_model(const Reader& reader) {
    const json* model = Reader::find(reader.root(), "model");
    reader.check(model != nullptr && model->is_object(),
                 "is JSON without a model, so no tokenizer.json");
    // Files of early versions leave the type out; only BPE has merges.
    const std::string type = model->contains("type")     ? reader.type_of(*model, "model")
                             : model->contains("merges") ? "BPE"
                                                         : "?";
    reader.check(type == "BPE", "has a model of type ", type, "; only byte-level BPE is supported");
    reader.check(!reader.flag(*model, "byte_fallback", false),
                 "has a BPE model with byte_fallback, so it is not byte-level; use its "
                 "tokenizer.model");
    const bool has_unknown = Reader::find(*model, "unk_token") != nullptr;
    reader.check(!has_unknown || !reader.flag(*model, "fuse_unk", false),
                 "has a BPE model with fuse_unk, which is not supported");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
      const json* value = Reader::find(*model, key);
      reader.check(value == nullptr || *value == "" || *value == 0.0, "has a BPE model with ", key,
                   ", which is not supported");
    }
    ignore_merges_ = reader.flag(*model, "ignore_merges", false);
    read_vocab(reader, *model);
    read_merges(reader, *model);
    if (has_unknown) unknown_id_ = token_id(reader.text(*model, "unk_token"));
  }

  void read_vocab(const Reader& reader, const json& model) {
    const json* vocab = Reader::find(model, "vocab");
    reader.check(vocab != nullptr && vocab->is_object() && !vocab->empty(),
                 "has a BPE model without a vocab");
    vocab_.reserve(vocab->size());
    for (const auto& [token, value] : vocab->items()) {
      const int32_t id = reader.id(value, token);
      const std::optional<std::string> bytes = alphabet_.bytes_of(token);
      set_bytes(id, bytes.value_or(token));
      if (bytes) vocab_.emplace(*bytes, id);
    }
    for (int byte = 0; byte < 256; ++byte) {
      const auto id = vocab_.find(std::string(1, static_cast<char>(byte)));
      byte_ids_[byte] = id != vocab_.end() ? id->second : -1;
    }
  }

  // "a b" or ["a", "b"]; empty parts when it is neither.
  static std::pair<std::string, std::string> merge_parts(const json& merge) {
    if (merge.is_string()) {
      const auto& both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space == std::string::npos) return {};
      return {both.substr(0, space), both.substr(space + 1)};
    }
    if (!merge.is_array() || merge.size() != 2) return {};
    if (!merge[0].is_string() || !merge[1].is_string()) return {};
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }

  void read_merges(const Reader& reader, const json& model) {
    const json* merges = Reader::find(model, "merges");
    reader.check(merges != nullptr && merges->is_array(), "has a BPE model without merges");
    merges_.reserve(merges->size());
    int32_t rank = 0;
    for (const json& merge : *merges) {
      const auto [left, right] = merge_parts(merge);
      const int32_t left_id = token_id(left);
      const int32_t right_id = token_id(right);
      const int32_t id = token_id(left + right);
      reader.check(!left.empty() && !right.empty() && left_id >= 0 && right_id >= 0 && id >= 0,
                   "has the merge ", rank, " ('", left, "' and '", right,
                   "'), which is not of two tokens of its vocab into a third");
      merges_[pair_key(left_id, right_id)] = {.rank = rank++, .id = id};
    }
  }

  void read_added_tokens(const Reader& reader) {
    const json* list = Reader::find(reader.root(), "added_tokens");
    if (list == nullptr) return;
    reader.check(list->is_array(), "has added_tokens that are no list");
    std::array<std::array<std::vector<SpecialToken>, 2>, 2> tokens;  // as added_
    for (const json& entry : *list) {
      reader.check(entry.is_object() && entry.contains("id"), "has an added token without an id");
      SpecialToken token{.text = reader.text(entry, "content")};
      token.id = reader.id(entry["id"], token.text);
      token.single_word = reader.flag(entry, "single_word", false);
      token.lstrip = reader.flag(entry, "lstrip", false);
      token.rstrip = reader.flag(entry, "rstrip", false);
      const bool special = reader.flag(entry, "special", false);
      const bool normalized = reader.flag(entry, "normalized", !special);
      if (special) special_ids_.emplace(token.text, token.id);
      added_ids_[token.text] = token.id;
      set_bytes(token.id, alphabet_.bytes_of(token.text).value_or(token.text));
      tokens[1][normalized].push_back(token);
      token.skip = special;
      tokens[0][normalized].push_back(token);
    }
    for (int parse_special : {0, 1}) {
      for (int normalized : {0, 1})
        added_[parse_special][normalized] =
            SpecialTokens(std::move(tokens[parse_special][normalized]));
    }
  }

  void refuse_normalizer(const Reader& reader) const {
    const json* normalizer = Reader::find(reader.root(), "normalizer");
    if (normalizer == nullptr) return;
    reader.each(*normalizer, "normalizer", "normalizers",
                [&](const json&, const std::string& type) {
                  reader.fail("has a normalizer of type ", type, ", which is not supported");
                });
  }

  void read_pre_tokenizer(const Reader& reader) {
    const json* pre_tokenizer = Reader::find(reader.root(), "pre_tokenizer");
    reader.check(pre_tokenizer != nullptr, "has no pre_tokenizer, so it is not byte-level");
    bool byte_level = false;
    const auto add_step = [&](const json& step, const std::string& type) {
      reader.check(!byte_level, "has a pre_tokenizer of type ", type,
                   " behind ByteLevel, which is not supported");
      steps_.push_back(read_step(reader, step, type));
      byte_level = type == "ByteLevel";
    };
    reader.each(*pre_tokenizer, "pre_tokenizer", "pretokenizers", add_step);
    reader.check(byte_level,
                 "has a pre_tokenizer without ByteLevel; only byte-level BPE is supported");
  }

  static Step read_step(const Reader& reader, const json& step, const std::string& type) {
    if (type == "ByteLevel") {
      Step result{.add_prefix_space = reader.flag(step, "add_prefix_space", true)};
      if (reader.flag(step, "use_regex", true)) result.splitter.emplace(kByteLevelPattern);
      return result;
    }
    if (type == "Digits") {
      const bool individual = reader.flag(step, "individual_digits", false);
      return {.splitter = TextSplitter(individual ? R"(\p{N})" : R"(\p{N}+)")};
    }
    if (type == "Split") return {.splitter = read_split(reader, step)};
    reader.fail("has a pre_tokenizer of type ", type,
                ", which is not supported (known: ByteLevel, Digits, Split)");
  }

  static TextSplitter read_split(const Reader& reader, const json& step) {
    const json* pattern = Reader::find(step, "pattern");
    reader.check(pattern != nullptr && pattern->is_object(),
                 "has a pre_tokenizer of type Split without a pattern");
    const bool literal = pattern->contains("String");
    const bool invert = reader.flag(step, "invert", false);
    const std::string behavior = reader.text(step, "behavior");
    reader.check(behavior == "Isolated" || behavior == "Removed",
                 "has a pre_tokenizer of type Split with the behavior ", behavior,
                 ", which is not supported (known: Isolated, Removed)");
    using Keep = TextSplitter::Keep;
    const Keep keep = behavior == "Isolated" ? Keep::kAll : invert ? Keep::kMatches : Keep::kGaps;
    const std::string source = reader.text(*pattern, literal ? "String" : "Regex");
    try {
      return TextSplitter(source, keep, literal);
    } catch (const c10::Error& error) {
      reader.fail("has a pre_tokenizer of type Split: ", error.what_without_backtrace());
    }
  }

  // A template that begins with a special token: that is BOS, and it goes in front of a text.
  void read_post_processor(const Reader& reader) {
    const json* post_processor = Reader::find(reader.root(), "post_processor");
    if (post_processor == nullptr) return;
    reader.each(*post_processor, "post_processor", "processors",
                [&](const json& step, const std::string& type) {
                  if (type == "ByteLevel") return;
                  reader.check(type == "TemplateProcessing", "has a post_processor of type ", type,
                               ", which is not supported");
                  const json* single = Reader::find(step, "single");
                  reader.check(single != nullptr && single->is_array(),
                               "has a TemplateProcessing without a list called single");
                  if (single->empty() || !single->front().is_object() ||
                      !single->front().contains("SpecialToken"))
                    return;
                  bos_id_ = token_id(reader.text(single->front()["SpecialToken"], "id"));
                  add_bos_ = true;
                });
  }

  static void check_decoder(const Reader& reader) {
    const json* decoder = Reader::find(reader.root(), "decoder");
    reader.check(decoder != nullptr, "has no decoder; only ByteLevel is supported");
    const std::string type = reader.type_of(*decoder, "decoder");
    reader.check(type == "ByteLevel", "has a decoder of type ", type,
                 "; only ByteLevel is supported");
  }

  void set_bytes(int32_t id, std::string bytes) {
    if (static_cast<size_t>(id) >= bytes_.size()) bytes_.resize(id + 1);
    bytes_[id] = std::move(bytes);
  }

  std::string_view bytes_of(int32_t id) const {
    return id >= 0 && id < vocab_size() ? std::string_view(bytes_[id]) : std::string_view();
  }

  static uint64_t pair_key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }

  // Applies the steps from `step` on, then merges.
  void encode_text(std::string_view text, size_t step, std::vector<int32_t>& ids) const {
    if (step == steps_.size()) return encode_piece(text, ids);
    std::string with_space;
    if (steps_[step].add_prefix_space && !text.starts_with(' '))
      text = with_space = " " + std::string(text);
    if (!steps_[step].splitter) return encode_text(text, step + 1, ids);
    steps_[step].splitter->split(text, [&](std::string_view piece) {
      encode_text(piece, step + 1, ids);
    });
  }

  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
    if (ignore_merges_) {
      if (const auto whole = vocab_.find(piece); whole != vocab_.end()) {
        ids.push_back(whole->second);
        return;
      }
    }
    std::vector<BpeSymbol> symbols;
    symbols.reserve(piece.size());
    for (char c : piece) {
      const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
      if (id >= 0 || unknown_id_ >= 0) symbols.push_back({.id = id >= 0 ? id : unknown_id_});
    }
    const auto merge_of = [&](const BpeSymbol& left, const BpeSymbol& right) -> BpeMerge {
      const auto merge = merges_.find(pair_key(left.id, right.id));
      return merge != merges_.end() ? merge->second : BpeMerge{};
    };
    merge_pairs(symbols, merge_of, ids);
  }

  ByteAlphabet alphabet_;
  std::vector<std::string> bytes_;  // by id: the text that a token stands for
  StringIds vocab_;                 // the model's tokens by their bytes
  std::array<int32_t, 256>
      byte_ids_{};  // -1: the vocabulary leaves this byte out, and texts lose it
  int32_t unknown_id_ = -1;
  std::unordered_map<uint64_t, BpeMerge> merges_;
  bool ignore_merges_ = false;
  StringIds added_ids_;
  StringIds special_ids_;
  std::array<std::array<SpecialTokens, 2>, 2> added_;  // [parse_special][normalized]
  std::vector<Step> steps_;
};

}  // namespace

std::unique_ptr<TokenizerBase> load_bpe(const fs::path& file, const std::string& contents) {
  return std::make_unique<BpeTokenizer>(file, contents);
}

}  // namespace gptfast
