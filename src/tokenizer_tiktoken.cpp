// tiktoken files (Llama 3): lines of a base64 token and its rank. Pattern and special tokens are
// those of tokenizer.py.
#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>

#include "bpe_merge.h"
#include "text_split.h"
#include "tokenizer_base.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr int32_t kSpecialTokens = 256;
// Llama 3.1 ends a message that calls a tool with this one, which Llama 3 and so the original's
// list call reserved.
constexpr std::string_view kEndOfMessage = "<|reserved_special_token_4|>";

std::vector<std::string> special_tokens() {
  std::vector<std::string> tokens = {"<|begin_of_text|>", "<|end_of_text|>"};
  int32_t reserved = 0;
  const auto add_reserved = [&](int32_t count) {
    for (; count > 0; --count)
      tokens.push_back("<|reserved_special_token_" + std::to_string(reserved++) + "|>");
  };
  add_reserved(4);
  tokens.insert(tokens.end(), {"<|start_header_id|>", "<|end_header_id|>"});
  add_reserved(1);
  tokens.emplace_back("<|eot_id|>");
  add_reserved(kSpecialTokens - static_cast<int32_t>(tokens.size()));
  return tokens;
}

// Strict base64 with padding; false when `text` is not that.
bool decode_base64(std::string_view text, std::string& bytes) {
  static constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  bytes.clear();
  if (text.empty() || text.size() % 4 != 0) return false;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  text.remove_suffix(padding);
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    const size_t value = kAlphabet.find(c);
    if (value == std::string_view::npos) return false;
    bits = bits << 6 | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes += static_cast<char>(bits >> count & 0xFF);
    }
  }
  return true;
}

// "aGVsbG8= 15339"
bool parse_line(std::string_view line, std::string& token, int32_t& rank) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || !decode_base64(line.substr(0, space), token)) return false;
  const char* end = line.data() + line.size();
  const auto [parsed, error] = std::from_chars(line.data() + space + 1, end, rank);
  return error == std::errc() && parsed == end && rank >= 0;
}

// Takes the first line, without its end.
std::string_view take_line(std::string_view& text) {
  const size_t end = text.find('\n');
  std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

class TiktokenTokenizer final : public TokenizerBase {
 public:
  TiktokenTokenizer(const fs::path& file, std::string_view contents) : splitter_(kPattern) {
    read_ranks(file, contents);
    std::vector<SpecialToken> specials;
    for (const std::string& token : special_tokens()) {
      const auto id = static_cast<int32_t>(bytes_.size());
      special_ids_.emplace(token, id);
      bytes_.push_back(token);
      specials.push_back({token, id});
    }
    specials_ = SpecialTokens(std::move(specials));
    bos_id_ = special_id("<|begin_of_text|>");
    eos_id_ = special_id("<|end_of_text|>");
    add_bos_ = true;
  }

  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override {
    std::vector<int32_t> ids;
    if (!parse_special) {
      encode_text(text, ids);
      return ids;
    }
    for (const SpecialTokens::Segment& segment : specials_.split(text)) {
      if (segment.id >= 0) {
        ids.push_back(segment.id);
      } else {
        encode_text(segment.text, ids);
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
    const auto rank = ranks_.find(token);
    return rank != ranks_.end() ? rank->second : special_id(token);
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(bytes_.size()); }
  std::string_view kind() const override { return "tiktoken"; }

 protected:
  int32_t special_id(std::string_view token) const override {
    const auto id = special_ids_.find(token == "<|eom_id|>" ? kEndOfMessage : token);
    return id != special_ids_.end() ? id->second : -1;
  }

  Piece piece(int32_t id, bool /*first*/) const override {
    return {.text = bytes_of(id), .is_bytes = true};
  }

 private:
  void read_ranks(const fs::path& file, std::string_view contents) {
    std::string token;
    for (int64_t line_number = 1; !contents.empty(); ++line_number) {
      const std::string_view line = take_line(contents);
      if (line.empty()) continue;
      int32_t rank = -1;
      TORCH_CHECK(parse_line(line, token, rank), "tokenizer ", file.string(),
                  " is a tiktoken file whose line ", line_number,
                  " is not a base64 token and its rank; is it cut short?");
      TORCH_CHECK(rank == static_cast<int32_t>(bytes_.size()) && ranks_.emplace(token, rank).second,
                  "tokenizer ", file.string(), " is a tiktoken file whose line ", line_number,
                  " repeats a token or does not have the rank ", bytes_.size());
      longest_ = std::max(longest_, token.size());
      bytes_.push_back(token);
    }
    for (int byte = 0; byte < 256; ++byte) {
      const auto rank = ranks_.find(std::string(1, static_cast<char>(byte)));
      TORCH_CHECK(rank != ranks_.end(), "tokenizer ", file.string(),
                  " is a tiktoken file without a token for the byte ", byte);
      byte_ids_[byte] = rank->second;
    }
  }

  const std::string& bytes_of(int32_t id) const {
    TORCH_CHECK(id >= 0 && id < vocab_size(), "cannot decode: token id ", id,
                " is not one of the tokenizer's ", vocab_size());
    return bytes_[id];
  }

  void encode_text(std::string_view text, std::vector<int32_t>& ids) const {
    // Splitting needs valid UTF-8. As in the library, what follows the valid part joins the last
    // piece (and the whitespace in front of it, where that is all the piece is) and is merged as
    // bytes.
    const size_t valid = valid_utf8_prefix(text);
    size_t last_piece = 0;  // offset in `text`
    size_t last_ids = ids.size();
    const size_t first_ids = ids.size();
    splitter_.split(text.substr(0, valid), [&](std::string_view piece) {
      last_piece = piece.data() - text.data();
      last_ids = ids.size();
      encode_piece(piece, ids);
    });
    if (valid == text.size()) return;
    if (last_ids < ids.size() && is_blank(ids[last_ids])) {
      while (last_ids > first_ids && is_blank(ids[last_ids - 1])) {
        --last_ids;
        last_piece -= bytes_[ids[last_ids]].size();
      }
    }
    ids.resize(last_ids);
    encode_piece(text.substr(last_piece), ids);
  }

  bool is_blank(int32_t id) const {
    return bytes_[id].find_first_not_of(" \n\t") == std::string::npos;
  }

  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
    if (const auto whole = ranks_.find(piece); whole != ranks_.end()) {
      ids.push_back(whole->second);
      return;
    }
    std::vector<BpeSymbol> symbols(piece.size());
    for (size_t i = 0; i < piece.size(); ++i) {
      symbols[i] = {.id = byte_ids_[static_cast<uint8_t>(piece[i])], .start = i};
    }
    const auto merge_of = [&](const BpeSymbol& left, const BpeSymbol& right) -> BpeMerge {
      const size_t length = left.length + right.length;
      if (length > longest_) return {};
      const auto rank = ranks_.find(piece.substr(left.start, length));
      if (rank == ranks_.end()) return {};
      return {.rank = rank->second, .id = rank->second};
    };
    merge_pairs(symbols, merge_of, ids);
  }

  TextSplitter splitter_;
  std::vector<std::string> bytes_;  // by id
  StringIds ranks_;                 // a token's rank is its id
  size_t longest_ = 0;
  std::array<int32_t, 256> byte_ids_{};
  StringIds special_ids_;
  SpecialTokens specials_;
};

}  // namespace

bool looks_like_tiktoken(std::string_view contents) {
  std::string token;
  int32_t rank = -1;
  return parse_line(take_line(contents), token, rank);
}

std::unique_ptr<TokenizerBase> load_tiktoken(const fs::path& file, const std::string& contents) {
  return std::make_unique<TiktokenTokenizer>(file, contents);
}

}  // namespace gptfast
