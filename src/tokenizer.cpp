#include "gptfast/tokenizer.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <iterator>

#include "tokenizer_base.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;

// Tokenizer files are a few megabytes; this keeps a checkpoint that is passed by mistake from being
// read.
constexpr uintmax_t kMaxFileBytes = uintmax_t{1} << 30;

std::string read_file(const fs::path& file) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  TORCH_CHECK(fs::exists(status), "tokenizer ", file.string(), " does not exist");
  TORCH_CHECK(!fs::is_directory(status), "tokenizer ", file.string(),
              " is a directory; name the tokenizer.model or tokenizer.json in it");
  const uintmax_t size = fs::file_size(file, error);
  TORCH_CHECK(error || size <= kMaxFileBytes, "tokenizer ", file.string(), " has ", size,
              " bytes, too many for a tokenizer; is it a checkpoint?");
  std::ifstream stream(file, std::ios::binary);
  TORCH_CHECK(stream.is_open(), "tokenizer ", file.string(), " cannot be opened for reading");
  std::string contents{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  TORCH_CHECK(!stream.bad(), "tokenizer ", file.string(), " cannot be read");
  return contents;
}

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
  const std::string contents = read_file(file);
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
