#include "gptfast/tokenizer.h"

#include <c10/util/Exception.h>

#include "json_file.h"
#include "tokenizer_base.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;

// Tokenizer files are a few megabytes; this keeps a checkpoint that is passed by mistake from being
// read.
constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20;

// What a file that is no tokenizer looks like, for the error message.
std::string_view describe(std::string_view contents) {
  if (contents.empty()) return "an empty file; download it again";
  if (contents.starts_with("version https://git-lfs")) {
    return "a Git-LFS pointer, not the file itself; run `git lfs pull`";
  }
  const size_t text = contents.find_first_not_of(" \t\r\n");
  if (text != std::string_view::npos && contents[text] == '<')
    return "an HTML or XML page; download the file itself";
  if (contents.starts_with("PK")) return "a zip archive (a checkpoint?)";
  if (contents.starts_with("GGUF")) return "a GGUF model; convert it first";
  return "no tokenizer of a known kind";
}

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::load(const fs::path& file) {
  const std::string contents = read_small_file(file, kMaxFileBytes);
  const size_t text = contents.find_first_not_of(" \t\r\n");
  std::unique_ptr<TokenizerBase> tokenizer;
  if (text != std::string::npos && contents[text] == '{') {
    tokenizer = load_bpe(file, contents);
  } else if (looks_like_tiktoken(contents)) {
    tokenizer = load_tiktoken(file, contents);
  } else if (looks_like_sentencepiece(contents)) {
    tokenizer = load_sentencepiece(file, contents);
  }
  TORCH_CHECK(tokenizer != nullptr, "tokenizer ", file.string(), " is ", describe(contents),
              " (known kinds: SentencePiece, tiktoken, byte-level BPE as tokenizer.json)");
  tokenizer->apply(read_hints(file.parent_path()));
  return tokenizer;
}

fs::path Tokenizer::find(const fs::path& directory) {
  for (const char* name : {"tokenizer.model", "tokenizer.json"}) {
    std::error_code error;
    if (fs::exists(directory / name, error)) return directory / name;
  }
  TORCH_CHECK(false, "neither tokenizer.model nor tokenizer.json is in ",
              directory.empty() ? "." : directory.string(),
              "; put one there or pass --tokenizer_path");
}

std::string StreamDecoder::push(int32_t id) {
  const Tokenizer::Piece piece = tokenizer_.piece(id, first_);
  if (piece.starts_text) first_ = false;
  if (piece.is_bytes) {
    pending_ += piece.text;
    return take_characters(pending_, /*at_end=*/false, tokenizer_.replaces_each_byte());
  }
  return take_characters(pending_, /*at_end=*/true, tokenizer_.replaces_each_byte()) + piece.text;
}

std::string StreamDecoder::finish() {
  first_ = true;
  return take_characters(pending_, /*at_end=*/true, tokenizer_.replaces_each_byte());
}

std::string to_valid_utf8(std::string_view text) {
  std::string bytes(text);
  return take_characters(bytes, /*at_end=*/true, /*each_byte=*/false);
}

}  // namespace gptfast
