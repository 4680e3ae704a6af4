// Tokenizers: SentencePiece, tiktoken (Llama 3) and byte-level BPE (tokenizer.json), told apart by
// the file's content.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gptfast {

/// Text <-> token ids. Ids equal those of the Python libraries the original uses (tokenizer.py) or,
/// for tokenizer.json, of HF tokenizers. Not modified after loading, so one object may be used from
/// several threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Loads any supported file. tokenizer_config.json, chat_template.jinja, generation_config.json
  /// and config.json beside it, where present, complete bos, eos, stop_ids() and chat_template().
  /// Throws naming the file and what was found in it.
  ///
  /// A tiktoken file does not say how text is split nor which special tokens there are: both are
  /// Llama 3's, as in the original.
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  /// tokenizer.model, else tokenizer.json, in `directory`; throws naming both when neither is
  /// there.
  static std::filesystem::path find(const std::filesystem::path& directory);

  /// Ids of `text`, without BOS. Special tokens written in the text are text unless
  /// `parse_special`. Invalid UTF-8 gives what the Python library gives for it; tokenizer.json,
  /// whose library takes no bytes, sees U+FFFD in its place.
  virtual std::vector<int32_t> encode(std::string_view text, bool parse_special = false) const = 0;
  /// Text of `ids` as the Python library decodes them: SentencePiece drops control tokens, the
  /// others show special tokens; bytes that form no character become U+FFFD. Throws on ids that the
  /// tokenizer does not have, except that a tokenizer.json's unknown ids give no text, as in its
  /// library.
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  /// The id of a special or ordinary token given by its exact spelling in the file, or -1.
  virtual int32_t token_id(std::string_view token) const = 0;

  virtual int64_t vocab_size() const = 0;  ///< largest id + 1
  virtual int32_t bos_id() const = 0;      ///< -1: the tokenizer has none
  virtual int32_t eos_id() const = 0;      ///< -1: the tokenizer has none
  /// Whether the tokenizer's own rule puts BOS in front of a text.
  virtual bool add_bos() const = 0;
  /// Every token that ends generation: eos, eot, eom as far as the tokenizer or the files beside it
  /// name them.
  virtual std::vector<int32_t> stop_ids() const = 0;
  /// "sentencepiece", "tiktoken" or "bpe".
  virtual std::string_view kind() const = 0;
  /// The chat template named in the files beside the tokenizer or implied by its special tokens
  /// ("llama2", "llama3", "mistral", "chatml"), or "" when unknown.
  virtual std::string_view chat_template() const = 0;
  /// The system message that the chat template in the files beside the tokenizer writes where a
  /// conversation has none, or "". Known for ChatML only.
  virtual std::string_view default_system_message() const { return {}; }

 protected:
  friend class StreamDecoder;
  /// What one id adds to a running text.
  struct Piece {
    std::string text;
    bool is_bytes =
        false;  ///< a run of such pieces is bytes, and a character may be spread over several
    bool starts_text = true;  ///< the next piece is no longer at the start of the text
  };
  /// `first`: nothing has started the text yet (SentencePiece drops one space there).
  virtual Piece piece(int32_t id, bool first) const = 0;
  /// Whether each byte of an invalid sequence becomes a U+FFFD (SentencePiece), or the sequence
  /// becomes one.
  virtual bool replaces_each_byte() const { return false; }
};

/// Turns ids into text as they arrive. Never shows half a character; the concatenation of all
/// outputs equals decode() of all ids byte for byte.
class StreamDecoder {
 public:
  /// `tokenizer` must outlive the decoder.
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  /// The text that is complete after `id`; often empty in the middle of a character. Throws as
  /// decode() does.
  std::string push(int32_t id);
  /// What is left at the end of the stream (an incomplete character as decode() shows it). The
  /// decoder then starts a new text.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;  // bytes that may still become a character
  bool first_ = true;
};

/// `text` with every invalid UTF-8 sequence replaced by U+FFFD (for JSON output).
std::string to_valid_utf8(std::string_view text);

}  // namespace gptfast
