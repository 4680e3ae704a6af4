// SentencePiece models (Llama 2, Mistral, ...), through the library.
#include <c10/util/Exception.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>

#include "json_file.h"
#include "tokenizer_base.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using sentencepiece::SentencePieceProcessor;

constexpr std::string_view kSpaceSymbol = "\u2581";

// ---- The file: a protocol buffer of length-delimited fields, ModelProto of
// sentencepiece_model.proto.

constexpr uint64_t kPiecesField = 1;
constexpr uint64_t kDenormalizerField = 5;
constexpr uint64_t kCharsmapField = 2;  // of NormalizerSpec
constexpr uint64_t kLastField = 5;
constexpr uint64_t kLengthDelimited = 2;

struct Field {
  uint64_t number = 0;
  std::string_view bytes;
};

bool read_varint(std::string_view& text, uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 64 && !text.empty(); shift += 7) {
    const auto byte = static_cast<uint8_t>(text.front());
    text.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

// Takes the next top-level field; false when `text` does not begin with a complete one.
bool read_field(std::string_view& text, Field& field) {
  uint64_t key = 0;
  uint64_t length = 0;
  if (!read_varint(text, key) || key % 8 != kLengthDelimited || !read_varint(text, length))
    return false;
  field.number = key / 8;
  if (field.number < 1 || field.number > kLastField || length > text.size()) return false;
  field.bytes = text.substr(0, length);
  text.remove_prefix(length);
  return true;
}

// Whether a NormalizerSpec does anything: one that rewrites the text at its end is something a
// stream cannot follow.
bool has_charsmap(std::string_view spec) {
  Field field;
  while (read_field(spec, field)) {
    if (field.number == kCharsmapField && !field.bytes.empty()) return true;
  }
  return false;
}

void check_file(const fs::path& file, std::string_view contents) {
  std::string_view rest = contents;
  Field field;
  while (!rest.empty()) {
    const size_t offset = contents.size() - rest.size();
    TORCH_CHECK(read_field(rest, field), "tokenizer ", file.string(),
                " is a SentencePiece model that is damaged or cut short at byte ", offset, " of ",
                contents.size(), "; download it again");
    TORCH_CHECK(field.number != kDenormalizerField || !has_charsmap(field.bytes), "tokenizer ",
                file.string(),
                " is a SentencePiece model with a denormalizer, which is not supported");
  }
}

// ---- Tokens that fine-tunes add behind the model's pieces, in Hugging Face's files beside it.

using AddedTokens = std::map<int32_t, std::string>;

// added_tokens.json: {"<|im_end|>": 32000}; tokenizer_config.json:
// {"added_tokens_decoder": {"32000": {"content": "<|im_end|>"}}}.
AddedTokens read_added_tokens(const fs::path& directory, int64_t pieces) {
  const auto read = [&](const char* name) {
    std::error_code error;
    return fs::exists(directory / name, error) ? read_json_object(directory / name)
                                               : nlohmann::json::object();
  };
  // Padding tokens are sometimes added without an embedding.
  const auto config = read("config.json");
  const auto rows = config.find("vocab_size");
  const int64_t limit =
      rows != config.end() && rows->is_number_integer() ? rows->get<int64_t>() : int64_t{INT32_MAX};
  AddedTokens added;
  const auto add = [&](const char* name, int64_t id, const std::string& text) {
    TORCH_CHECK(id >= 0 && id < INT32_MAX && !text.empty(), (directory / name).string(),
                ": the token '", text, "' has the id ", id, ", which makes no sense");
    if (id >= pieces && id < limit) added[static_cast<int32_t>(id)] = text;
  };
  const auto check = [&](bool condition, const char* name, const std::string& key) {
    TORCH_CHECK(condition, (directory / name).string(), ": the added token '", key,
                "' is not described as Hugging Face does");
  };
  const auto added_tokens = read("added_tokens.json");
  for (const auto& [text, id] : added_tokens.items()) {
    check(id.is_number_integer(), "added_tokens.json", text);
    add("added_tokens.json", id.get<int64_t>(), text);
  }
  const auto tokenizer_config = read("tokenizer_config.json");
  const auto decoder = tokenizer_config.find("added_tokens_decoder");
  if (decoder == tokenizer_config.end() || !decoder->is_object()) return added;
  for (const auto& [key, token] : decoder->items()) {
    int64_t id = -1;
    const char* end = key.data() + key.size();
    const bool number = std::from_chars(key.data(), end, id).ptr == end;
    const bool text =
        token.is_object() && token.contains("content") && token["content"].is_string();
    check(number && text, "tokenizer_config.json", key);
    add("tokenizer_config.json", id, token["content"].get<std::string>());
  }
  return added;
}

// ---- The tokenizer.

std::string with_spaces(std::string text) {
  for (size_t at = 0; (at = text.find(kSpaceSymbol, at)) != std::string::npos; ++at)
    text.replace(at, kSpaceSymbol.size(), " ");
  return text;
}

class SentencePieceTokenizer final : public TokenizerBase {
 public:
  SentencePieceTokenizer(const fs::path& file, const std::string& contents) {
    const auto status = processor_.LoadFromSerializedProto(contents);
    TORCH_CHECK(status.ok(), "tokenizer ", file.string(),
                " is no valid SentencePiece model: ", status.message());
    bos_id_ = processor_.bos_id();
    eos_id_ = processor_.eos_id();
    add_bos_ = true;  // the original always does
    std::vector<SpecialToken> specials;
    for (int id = 0; id < processor_.GetPieceSize(); ++id) {
      if (processor_.IsControl(id) || processor_.IsUnknown(id))
        specials.push_back({processor_.IdToPiece(id), id});
    }
    added_ = read_added_tokens(file.parent_path(), processor_.GetPieceSize());
    for (const auto& [id, text] : added_) {
      specials.push_back({text, id});
      added_ids_.emplace(text, id);
    }
    specials_ = SpecialTokens(std::move(specials));
    drops_all_leading_space_ = drops_all_leading_space();
  }

  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override {
    if (!parse_special) return encode_text(text);
    std::vector<int32_t> ids;
    for (const SpecialTokens::Segment& segment : specials_.split(text)) {
      if (segment.id >= 0) {
        ids.push_back(segment.id);
      } else {
        const std::vector<int32_t> more = encode_text(segment.text);
        ids.insert(ids.end(), more.begin(), more.end());
      }
    }
    return ids;
  }

  std::string decode(const std::vector<int32_t>& ids) const override {
    if (std::any_of(ids.begin(), ids.end(), [&](int32_t id) { return added_.contains(id); })) {
      StreamDecoder stream(*this);
      std::string text;
      for (const int32_t id : ids) text += stream.push(id);
      return text + stream.finish();
    }
    std::string text;
    const auto status = processor_.Decode(ids, &text);
    TORCH_CHECK(status.ok(), "cannot decode: ", status.message(), " (the tokenizer has ",
                vocab_size(), " tokens)");
    return text;
  }

  int32_t token_id(std::string_view token) const override {
    if (const auto added = added_ids_.find(token); added != added_ids_.end()) return added->second;
    const int id = processor_.PieceToId(token);
    return id != processor_.unk_id() || token == processor_.IdToPiece(id) ? id : -1;
  }

  int64_t vocab_size() const override {
    return added_.empty() ? processor_.GetPieceSize() : added_.rbegin()->first + 1;
  }
  std::string_view kind() const override { return "sentencepiece"; }

 protected:
  int32_t special_id(std::string_view token) const override { return token_id(token); }

  Piece piece(int32_t id, bool first) const override {
    TORCH_CHECK(id >= 0 && id < vocab_size(), "cannot decode: token id ", id,
                " is not one of the tokenizer's ", vocab_size());
    if (id >= processor_.GetPieceSize()) {
      const auto added = added_.find(id);
      return {.text = added != added_.end() ? added->second : ""};
    }
    const std::string& spelling = processor_.IdToPiece(id);
    if (processor_.IsByte(id)) {  // spelled <0x0A>
      return {.text =
                  std::string(1, static_cast<char>(std::stoi(spelling.substr(3, 2), nullptr, 16))),
              .is_bytes = true};
    }
    if (processor_.IsControl(id) || processor_.IsUnknown(id)) {
      std::string text = decode({id});
      return {.text = text, .starts_text = !text.empty()};
    }
    std::string text = with_spaces(spelling);
    if (!first) return {.text = std::move(text)};
    text = decode({id});  // without the space that encoding put in front
    const bool starts_text = !text.empty() || !drops_all_leading_space_;
    return {.text = std::move(text), .starts_text = starts_text};
  }

  bool replaces_each_byte() const override { return true; }

 private:
  std::vector<int32_t> encode_text(std::string_view text) const {
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    TORCH_CHECK(status.ok(), "cannot encode: ", status.message());
    return ids;
  }

  // Models that remove extra whitespace drop every space at the start of a text, others the one
  // that encoding put there.
  bool drops_all_leading_space() const {
    const int32_t space = token_id(kSpaceSymbol);
    return space >= 0 && decode({space, space}).empty();
  }

  SentencePieceProcessor processor_;
  SpecialTokens specials_;
  AddedTokens added_;
  StringIds added_ids_;
  bool drops_all_leading_space_ = false;
};

}  // namespace

bool looks_like_sentencepiece(std::string_view contents) {
  // The first field is a piece, whose own first field is its spelling.
  Field field;
  return read_field(contents, field) && field.number == kPiecesField &&
         field.bytes.starts_with('\x0A');
}

std::unique_ptr<TokenizerBase> load_sentencepiece(const fs::path& file,
                                                  const std::string& contents) {
  check_file(file, contents);
  return std::make_unique<SentencePieceTokenizer>(file, contents);
}

}  // namespace gptfast
