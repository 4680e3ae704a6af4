// What the three kinds of tokenizer share: the rules that come from the files beside them, and the
// search for special tokens.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gptfast/tokenizer.h"

namespace gptfast {

/// What the files beside a tokenizer say about it; all of it is optional.
struct TokenizerHints {
  std::string bos_token, eos_token;  ///< tokenizer_config.json
  std::optional<bool> add_bos;       ///< tokenizer_config.json
  std::optional<std::string>
      chat_template;              ///< tokenizer_config.json or chat_template.jinja: the Jinja text
  std::optional<int32_t> bos_id;  ///< generation_config.json, else config.json
  std::vector<int32_t> eos_ids;   ///< generation_config.json and config.json
};

/// Reads tokenizer_config.json, chat_template.jinja, generation_config.json and config.json in
/// `directory`, where present. Throws naming the file when one is not valid JSON or holds a value
/// of the wrong type.
TokenizerHints read_hints(const std::filesystem::path& directory);

/// Holds what does not depend on the kind. A kind sets its own bos_id_, eos_id_ and add_bos_;
/// apply() completes them.
class TokenizerBase : public Tokenizer {
 public:
  int32_t bos_id() const override { return bos_id_; }
  int32_t eos_id() const override { return eos_id_; }
  bool add_bos() const override { return add_bos_ && bos_id_ >= 0; }
  std::vector<int32_t> stop_ids() const override { return stop_ids_; }
  std::string_view chat_template() const override { return chat_template_; }
  std::string_view default_system_message() const override { return default_system_message_; }

  /// Call once, after the vocabulary is there.
  void apply(const TokenizerHints& hints);

 protected:
  /// The id of a special token (not of ordinary text that is spelled like one), or -1.
  virtual int32_t special_id(std::string_view token) const = 0;

  int32_t bos_id_ = -1;
  int32_t eos_id_ = -1;
  bool add_bos_ = false;

 private:
  std::vector<int32_t> stop_ids_;
  std::string chat_template_;
  std::string default_system_message_;
};

/// Factories, one per kind. `contents` is the whole file; `file` is for messages.
std::unique_ptr<TokenizerBase> load_sentencepiece(const std::filesystem::path& file,
                                                  const std::string& contents);
std::unique_ptr<TokenizerBase> load_tiktoken(const std::filesystem::path& file,
                                             const std::string& contents);
std::unique_ptr<TokenizerBase> load_bpe(const std::filesystem::path& file,
                                        const std::string& contents);

/// Whether the file looks like the kind, from its first bytes (the whole file for SentencePiece).
bool looks_like_sentencepiece(std::string_view contents);
bool looks_like_tiktoken(std::string_view contents);

/// Hash for maps of strings that are looked up by string_view.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
using StringIds = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

/// A token that is found in the text itself, before any other rule (`added_tokens` of a
/// tokenizer.json).
struct SpecialToken {
  std::string text;
  int32_t id = -1;
  bool skip = false;         ///< its spelling is matched but stays text
  bool single_word = false;  ///< only where no word character touches it
  bool lstrip = false;       ///< takes the whitespace in front of it along
  bool rstrip = false;       ///< takes the whitespace behind it along
};

/// Finds special tokens in a text: leftmost first, longest of those that start at one place.
class SpecialTokens {
 public:
  explicit SpecialTokens(std::vector<SpecialToken> tokens = {});

  struct Segment {
    std::string_view text;
    int32_t id = -1;  ///< -1: ordinary text
  };
  std::vector<Segment> split(std::string_view text) const;

 private:
  const SpecialToken* match(std::string_view text, size_t at) const;

  std::vector<SpecialToken> tokens_;
  std::array<std::vector<size_t>, 256> by_first_byte_;  // indices of tokens_, longest first
};

/// Length in bytes of the valid UTF-8 at the front of `text`.
size_t valid_utf8_prefix(std::string_view text);

/// Removes from the front of `bytes` what is decided and returns it with U+FFFD for what cannot be
/// a character; a sequence that more bytes may complete stays unless `at_end`. `each_byte`: one
/// U+FFFD per invalid byte instead of per sequence.
std::string take_characters(std::string& bytes, bool at_end, bool each_byte);

}  // namespace gptfast
