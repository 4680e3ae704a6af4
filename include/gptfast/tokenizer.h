// Tokenizers: SentencePiece, tiktoken (Llama 3) and byte-level BPE (tokenizer.json), told apart by the file's content.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gptfast {

/// Text <-> token ids. Ids equal those of the Python libraries the original uses (tokenizer.py) or, for tokenizer.json, of HF
/// tokenizers. Not modified after loading, so one object may be used from several threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Loads any supported file. Throws naming the file and what was found in it.
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  /// tokenizer.model, else tokenizer.json, in `directory`; throws naming both when neither is there.
  static std::filesystem::path find(const std::filesystem::path& directory);

  /// Ids of `text`, without BOS. Special tokens written in the text are text unless `parse_special`. Invalid UTF-8 gives what the
  /// Python library gives for it.
  virtual std::vector<int32_t> encode(std::string_view text, bool parse_special = false) const = 0;
  /// Text of `ids` as the Python library decodes them (control tokens dropped or shown as it does).
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  /// The id of a special or ordinary token given by its exact spelling, or -1.
  virtual int32_t token_id(std::string_view token) const = 0;

  virtual int64_t vocab_size() const = 0;
  virtual int32_t bos_id() const = 0;  ///< -1: the tokenizer has none
  virtual int32_t eos_id() const = 0;  ///< -1: the tokenizer has none
  /// Whether the tokenizer's own rule puts BOS in front of a text.
  virtual bool add_bos() const = 0;
  /// Every token that ends generation: eos, eot, eom as far as the tokenizer names them.
  virtual std::vector<int32_t> stop_ids() const = 0;
  /// "sentencepiece", "tiktoken" or "bpe".
  virtual std::string_view kind() const = 0;
  /// The chat template named in the files beside the tokenizer or implied by its special tokens ("llama2", "llama3", "mistral",
  /// "chatml"), or "" when unknown.
  virtual std::string_view chat_template() const = 0;

 protected:
  friend class StreamDecoder;
  /// The bytes that `id` adds to the running text; `first` is true at the start of a text (SentencePiece drops one space there).
  virtual std::string piece_bytes(int32_t id, bool first) const = 0;
};

/// Turns ids into text as they arrive. Never shows half a character; the concatenation of all outputs equals decode() of all
/// ids byte for byte.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  /// The text that is complete after `id`; often empty in the middle of a character.
  std::string push(int32_t id);
  /// What is left at the end of the stream (an incomplete character as decode() shows it).
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
  bool first_ = true;
};

/// `text` with every invalid UTF-8 sequence replaced by U+FFFD (for JSON output).
std::string to_valid_utf8(std::string_view text);

}  // namespace gptfast
