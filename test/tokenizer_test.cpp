#include "gptfast/tokenizer.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "smollm2_tokenizer.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;

const fs::path kGolden = fs::path(GPTFAST_GOLDEN) / "tokenizers";

// ---- Helpers.

std::string read(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  EXPECT_TRUE(stream.is_open()) << file;
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

json read_json(const std::string& name) {
  return json::parse(read(kGolden / name));
}

// A directory for one test, removed with its contents.
class Folder {
 public:
  Folder() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string(test->test_suite_name()) + "." + test->name();
    std::replace(name.begin(), name.end(), '/', '_');
    path_ = fs::path(testing::TempDir()) / ("gptfast_" + std::to_string(getpid()) + "_" + name);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  fs::path write(const std::string& name, const std::string& contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
    return path_ / name;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string from_base64(const std::string& text) {
  static const std::string alphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<uint32_t>(alphabet.find(c));
    count += 6;
    if (count >= 8) bytes += static_cast<char>(bits >> (count -= 8) & 0xFF);
  }
  return bytes;
}

std::string stream(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder decoder(tokenizer);
  std::string text;
  for (int32_t id : ids) {
    const std::string part = decoder.push(id);
    EXPECT_EQ(to_valid_utf8(part), part) << "half a character at id " << id;
    text += part;
  }
  return text + decoder.finish();
}

// One file of answers of a Python library. `encoded` names the ids that encode(text, parse_special)
// has to give.
void expect_golden(const Tokenizer& tokenizer, const json& golden, const char* encoded = "ids",
                   bool parse_special = false) {
  ASSERT_GT(golden["strings"].size(), 100U);
  for (const json& row : golden["strings"]) {
    const std::string text = row["text"];
    SCOPED_TRACE(row["text"].dump().substr(0, 80));
    if (row.contains(encoded)) {
      EXPECT_EQ(tokenizer.encode(text, parse_special), row[encoded].get<Ids>());
    }
    if (row.contains("decoded") && row.contains("ids")) {
      EXPECT_EQ(tokenizer.decode(row["ids"].get<Ids>()), row["decoded"]);
      EXPECT_EQ(stream(tokenizer, row["ids"].get<Ids>()), row["decoded"]);
    }
  }
  for (const json& row : golden["invalid_utf8"]) {
    SCOPED_TRACE(row.dump());
    const std::string text = from_base64(row["bytes_b64"]);
    const Ids ids = tokenizer.encode(text);
    if (row.contains("ids")) {
      EXPECT_EQ(ids, row["ids"].get<Ids>());
    } else {
      EXPECT_EQ(ids, tokenizer.encode(to_valid_utf8(text)));
    }
    EXPECT_EQ(stream(tokenizer, ids), tokenizer.decode(ids));
  }
  ASSERT_GT(golden["decode_only"].size(), 30U);
  for (const json& row : golden["decode_only"]) {
    SCOPED_TRACE(row["ids"].dump());
    EXPECT_EQ(tokenizer.decode(row["ids"].get<Ids>()), row["decoded"]);
    EXPECT_EQ(stream(tokenizer, row["ids"].get<Ids>()), row["decoded"]);
  }
}

// Random ids hit every order of byte pieces, half characters, spaces and specials.
void expect_stream_equals_decode(const Tokenizer& tokenizer, int rounds) {
  std::mt19937 random(7);
  const auto size = static_cast<int32_t>(tokenizer.vocab_size());
  for (int round = 0; round < rounds; ++round) {
    // Small ids are bytes and specials, so half of the rounds stay among them.
    std::uniform_int_distribution<int32_t> id(0,
                                              round % 2 == 0 ? size - 1 : std::min(size - 1, 300));
    Ids ids(random() % 24);
    for (int32_t& each : ids) each = id(random);
    ASSERT_EQ(stream(tokenizer, ids), tokenizer.decode(ids)) << json(ids).dump();
  }
}

// The message of the exception that loading `contents` throws; "" when it loads.
std::string load_error(const Folder& folder, const std::string& contents) {
  try {
    Tokenizer::load(folder.write("tokenizer", contents));
  } catch (const c10::Error& error) {
    std::string message = error.what_without_backtrace();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_NE(message.find((folder.path() / "tokenizer").string()), std::string::npos) << message;
    return message;
  }
  return "";
}

void expect_error(const Folder& folder, const std::string& contents, const std::string& part) {
  const std::string message = load_error(folder, contents);
  EXPECT_NE(message.find(part), std::string::npos)
      << "message: '" << message << "', expected: " << part;
}

/// Computing time, which other programs on the machine do not change.
double seconds_of(const std::function<void()>& work) {
  const std::clock_t start = std::clock();
  work();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

/// What a megabyte of one letter may take: a quadratic merge loop would need hours, ours takes less
/// than a second. The limit leaves room for slow machines and sanitizers.
constexpr double kMostSeconds = 60;

// ---- The files.

// One of the tokenizer.json variants of small_bpe.json, with the model that they share.
json variant_json(const json& bpe, const std::string& name) {
  json file = bpe["variants"][name]["tokenizer"];
  if (!file["model"].contains("vocab")) {
    file["model"]["vocab"] = bpe["vocab"];
    file["model"]["merges"] = bpe["merges"];
  }
  return file;
}

// ---- Ids equal to those of the Python libraries.

class SmallSentencePiece : public testing::TestWithParam<const char*> {};

TEST_P(SmallSentencePiece, MatchesPython) {
  const std::string name = std::string("small_sp_") + GetParam();
  const auto tokenizer = Tokenizer::load(kGolden / (name + ".model"));
  EXPECT_EQ(tokenizer->kind(), "sentencepiece");
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->stop_ids(), Ids{2});
  expect_golden(*tokenizer, read_json(name + ".json"));
  expect_stream_equals_decode(*tokenizer, 4000);
}
INSTANTIATE_TEST_SUITE_P(Models, SmallSentencePiece, testing::Values("bpe", "unigram", "noprefix"),
                         [](const auto& info) { return info.param; });

TEST(SmallTiktoken, MatchesPython) {
  const auto tokenizer = Tokenizer::load(kGolden / "small.tiktoken");
  EXPECT_EQ(tokenizer->kind(), "tiktoken");
  EXPECT_EQ(tokenizer->vocab_size(), 571 + 256);
  EXPECT_EQ(tokenizer->bos_id(), 571);
  EXPECT_EQ(tokenizer->eos_id(), 572);
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->token_id("<|eot_id|>"), 580);
  EXPECT_EQ(tokenizer->stop_ids(), (Ids{572, 580, 579}));
  EXPECT_EQ(tokenizer->chat_template(), "llama3");
  const json golden = read_json("small_tiktoken.json");
  expect_golden(*tokenizer, golden);
  expect_golden(*tokenizer, golden, "allowed_all", /*parse_special=*/true);
  expect_stream_equals_decode(*tokenizer, 4000);
}

TEST(SmallBpe, VariantsMatchPython) {
  const json bpe = read_json("small_bpe.json");
  ASSERT_EQ(bpe["variants"].size(), 7U);
  const Folder folder;
  for (const auto& [name, golden] : bpe["variants"].items()) {
    SCOPED_TRACE(name);
    const auto tokenizer =
        Tokenizer::load(folder.write("tokenizer.json", variant_json(bpe, name).dump()));
    EXPECT_EQ(tokenizer->kind(), "bpe");
    expect_golden(*tokenizer, golden, "ids", /*parse_special=*/true);
    expect_golden(*tokenizer, golden, "as_text", /*parse_special=*/false);
    expect_stream_equals_decode(*tokenizer, 1000);
    EXPECT_EQ(tokenizer->add_bos(), name == "llama3");
    EXPECT_EQ(tokenizer->bos_id(), tokenizer->token_id("<|begin_of_text|>"));
    EXPECT_EQ(tokenizer->stop_ids(), Ids{tokenizer->token_id("<|eot_id|>")});
  }
}

TEST(SmolLm2, MatchesPython) {
  const Folder folder;
  const auto tokenizer = Tokenizer::load(folder.write("tokenizer.json", smollm2_json().dump()));
  EXPECT_EQ(tokenizer->vocab_size(), 49152);
  EXPECT_EQ(tokenizer->chat_template(), "chatml");
  EXPECT_EQ(tokenizer->stop_ids(), (Ids{2, 0}));
  EXPECT_FALSE(tokenizer->add_bos());
  expect_golden(*tokenizer, read_json("smollm2.json"), "ids", /*parse_special=*/true);
  expect_stream_equals_decode(*tokenizer, 4000);
  EXPECT_EQ(tokenizer->decode({49152, -1}), "");
}

// The published models, where GPTFAST_TOKENIZERS names a folder that holds them: they are too large
// for the repository.
class Published : public testing::Test {
 protected:
  std::unique_ptr<Tokenizer> load(const std::string& name) {
    const char* folder = std::getenv("GPTFAST_TOKENIZERS");
    if (folder == nullptr) return nullptr;
    return Tokenizer::load(fs::path(folder) / name);
  }
};

TEST_F(Published, MistralV1) {
  const auto tokenizer = load("tokenizer.model.v1");
  if (tokenizer == nullptr) GTEST_SKIP() << "GPTFAST_TOKENIZERS is not set";
  EXPECT_EQ(tokenizer->vocab_size(), 32000);
  EXPECT_EQ(tokenizer->stop_ids(), Ids{2});
  EXPECT_EQ(tokenizer->chat_template(), "");
  EXPECT_EQ(tokenizer->encode("This")[0], 851);
  expect_golden(*tokenizer, read_json("sp_mistral_v1.json"));
  expect_stream_equals_decode(*tokenizer, 4000);
  EXPECT_LT(seconds_of([&] { tokenizer->encode(std::string(1 << 20, 'a')); }), kMostSeconds);
}

TEST_F(Published, MistralV3) {
  const auto tokenizer = load("mistral_instruct_tokenizer_240323.model.v3");
  if (tokenizer == nullptr) GTEST_SKIP() << "GPTFAST_TOKENIZERS is not set";
  EXPECT_EQ(tokenizer->vocab_size(), 32768);
  EXPECT_EQ(tokenizer->chat_template(), "mistral");
  EXPECT_EQ(tokenizer->encode("[INST][/INST]", /*parse_special=*/true), (Ids{3, 4}));
  expect_golden(*tokenizer, read_json("sp_mistral_v3.json"));
  expect_stream_equals_decode(*tokenizer, 4000);
}

TEST_F(Published, Llama3) {
  const auto tokenizer = load("tokenizer.model");
  if (tokenizer == nullptr) GTEST_SKIP() << "GPTFAST_TOKENIZERS is not set";
  EXPECT_EQ(tokenizer->vocab_size(), 128256);
  EXPECT_EQ(tokenizer->bos_id(), 128000);
  EXPECT_EQ(tokenizer->stop_ids(), (Ids{128001, 128009, 128008}));
  EXPECT_EQ(tokenizer->token_id("<|reserved_special_token_250|>"), 128255);
  const json golden = read_json("tiktoken_llama3.json");
  expect_golden(*tokenizer, golden);
  expect_golden(*tokenizer, golden, "allowed_all", /*parse_special=*/true);
  expect_stream_equals_decode(*tokenizer, 4000);
  EXPECT_LT(seconds_of([&] { tokenizer->encode(std::string(1 << 20, 'a')); }), kMostSeconds);
}

// ---- Rules around the ids.

TEST(Rules, FilesBesideTheTokenizer) {
  const Folder folder;
  json file = smollm2_json();
  const fs::path path = folder.write("tokenizer.json", file.dump());
  folder.write(
      "tokenizer_config.json",
      R"({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": true,
      "chat_template": [{"name": "default", "template": "[INST] <<SYS>>"}]})");
  folder.write("generation_config.json", R"({"eos_token_id": [2, 7], "bos_token_id": 5})");
  folder.write("config.json", R"({"eos_token_id": 9})");
  auto tokenizer = Tokenizer::load(path);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->stop_ids(), (Ids{2, 7, 9, 0}));
  EXPECT_EQ(tokenizer->chat_template(), "llama2");

  // chat_template.jinja goes before tokenizer_config.json, and a template that is not known is not
  // guessed.
  folder.write("chat_template.jinja", "{{ '<|im_start|>' }}");
  folder.write("tokenizer_config.json", R"({"eos_token": "<not a token>", "bos_token": null})");
  tokenizer = Tokenizer::load(path);
  EXPECT_EQ(tokenizer->chat_template(), "chatml");
  EXPECT_EQ(tokenizer->bos_id(), 5);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_FALSE(tokenizer->add_bos());
  folder.write("chat_template.jinja", "### User:");
  EXPECT_EQ(Tokenizer::load(path)->chat_template(), "");

  folder.write("generation_config.json", R"({"eos_token_id": "two"})");
  EXPECT_THROW(Tokenizer::load(path), c10::Error);
  folder.write("generation_config.json", "{");
  EXPECT_THROW(Tokenizer::load(path), c10::Error);
}

// What fine-tunes do to Llama 2's tokenizer: tokens behind those of tokenizer.model.
TEST(Rules, TokensAddedToSentencePiece) {
  const Folder folder;
  const fs::path path =
      folder.write("tokenizer.model", read(kGolden / "small_sp_bpe.model"));  // 450 pieces
  const auto plain = Tokenizer::load(path);
  folder.write("added_tokens.json", R"({"<|im_start|>": 450, "<|im_end|>": 451, "[PAD]": 453})");
  folder.write("tokenizer_config.json",
               R"({"added_tokens_decoder": {"1": {"content": "<s>"}, "452": {"content": "new"}}})");
  folder.write("config.json", R"({"vocab_size": 453})");  // no embedding for [PAD]
  const auto tokenizer = Tokenizer::load(path);
  EXPECT_EQ(tokenizer->vocab_size(), 453);
  EXPECT_EQ(tokenizer->token_id("<|im_start|>"), 450);
  EXPECT_EQ(tokenizer->token_id("new"), 452);
  EXPECT_EQ(tokenizer->token_id("[PAD]"), -1);
  EXPECT_EQ(tokenizer->stop_ids(), (Ids{2, 451}));
  EXPECT_EQ(tokenizer->chat_template(), "chatml");
  EXPECT_EQ(tokenizer->encode("the <|im_start|>user"), plain->encode("the <|im_start|>user"));
  Ids expected = plain->encode("the ");
  expected.push_back(450);
  for (const int32_t id : plain->encode("user")) expected.push_back(id);
  EXPECT_EQ(tokenizer->encode("the <|im_start|>user", /*parse_special=*/true), expected);
  EXPECT_EQ(tokenizer->decode({450, plain->encode("the")[0], 451}), "<|im_start|> the<|im_end|>");
  expect_stream_equals_decode(*tokenizer, 1000);

  using Case = std::pair<std::string, std::string>;
  const std::string added = "added_tokens.json", config = "tokenizer_config.json";
  for (const auto& [name, contents] :
       {Case{added, R"({"x": "450"})"}, Case{added, R"({"x": -5})"},
        Case{added, R"({"x": 18446744073709551615})"},
        Case{config, R"({"added_tokens_decoder": {"450": {"text": "x"}}})"},
        Case{config, R"({"added_tokens_decoder": {"one": {"content": "x"}}})"}}) {
    folder.write(name, contents);
    EXPECT_NE(error_of([&] { Tokenizer::load(path); }).find(name), std::string::npos) << contents;
    folder.write(name, "{}");
  }
}

TEST(Rules, SpecialTokensInAPromptAreTextUnlessAsked) {
  const Folder folder;
  const auto bpe = Tokenizer::load(folder.write("tokenizer.json", smollm2_json().dump()));
  const auto tiktoken = Tokenizer::load(kGolden / "small.tiktoken");
  const auto sentencepiece = Tokenizer::load(kGolden / "small_sp_bpe.model");
  for (const auto& [tokenizer, special] : {std::pair(bpe.get(), "<|im_start|>"),
                                           {tiktoken.get(), "<|eot_id|>"},
                                           {sentencepiece.get(), "[INST]"}}) {
    SCOPED_TRACE(tokenizer->kind());
    const int32_t id = tokenizer->token_id(special);
    ASSERT_GE(id, 0);
    const std::string text = std::string("a") + special + "b";
    const Ids plain = tokenizer->encode(text);
    EXPECT_EQ(std::count(plain.begin(), plain.end(), id), 0);
    EXPECT_EQ(tokenizer->decode(plain), text);
    const Ids parsed = tokenizer->encode(text, /*parse_special=*/true);
    EXPECT_EQ(std::count(parsed.begin(), parsed.end(), id), 1);
    EXPECT_EQ(tokenizer->token_id("no such token"), -1);
    EXPECT_EQ(tokenizer->encode(""), Ids{});
    EXPECT_EQ(tokenizer->decode({}), "");
  }
  EXPECT_EQ(sentencepiece->token_id("<unk>"), 0);
  EXPECT_EQ(sentencepiece->encode("<tool>").back(),
            sentencepiece->token_id("<tool>"));  // user-defined: always a token
  for (const Tokenizer* tokenizer : {tiktoken.get(), sentencepiece.get()}) {
    for (const int32_t id : {-1, static_cast<int32_t>(tokenizer->vocab_size())}) {
      EXPECT_THROW(tokenizer->decode({id}), c10::Error);
      EXPECT_THROW(StreamDecoder(*tokenizer).push(id), c10::Error);
    }
  }
}

TEST(Rules, FindPrefersTokenizerModel) {
  const Folder folder;
  EXPECT_THROW(Tokenizer::find(folder.path()), c10::Error);
  folder.write("tokenizer.json", "{}");
  EXPECT_EQ(Tokenizer::find(folder.path()), folder.path() / "tokenizer.json");
  folder.write("tokenizer.model", "x");
  EXPECT_EQ(Tokenizer::find(folder.path()), folder.path() / "tokenizer.model");
}

TEST(Stream, HoldsBackHalfCharactersAndKeepsSpaces) {
  const auto tokenizer = Tokenizer::load(kGolden / "small.tiktoken");
  const auto byte = [&](const char* bytes) { return tokenizer->token_id(bytes); };
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.push(byte(" ")), " ");
  EXPECT_EQ(decoder.push(byte("\xF0")), "");
  EXPECT_EQ(decoder.push(byte("\x9F")), "");
  EXPECT_EQ(decoder.push(byte("\x98")), "");
  EXPECT_EQ(decoder.push(byte("\x80")), "\U0001F600");
  EXPECT_EQ(decoder.push(byte("\xE4")), "");
  EXPECT_EQ(decoder.push(byte("a")), "\uFFFDa");
  EXPECT_EQ(decoder.push(byte("\xE4")), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");

  // SentencePiece: the space that encoding put in front goes, the user's spaces stay, also after
  // finish().
  const auto sentencepiece = Tokenizer::load(kGolden / "small_sp_bpe.model");
  StreamDecoder pieces(*sentencepiece);
  for (int round = 0; round < 2; ++round) {
    std::string text;
    for (int32_t id : sentencepiece->encode("  the end ")) text += pieces.push(id);
    EXPECT_EQ(text + pieces.finish(), "  the end ");
  }
}

TEST(Utf8, InvalidSequencesBecomeReplacementCharacters) {
  // As Python's bytes.decode(errors="replace").
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"plain \u00e9\u4e2d\U0001F600", "plain \u00e9\u4e2d\U0001F600"},
      {"\xff", "\uFFFD"},
      {"a\x80z", "a\uFFFDz"},
      {"\xe4\xbd", "\uFFFD"},
      {"\xf0\x9f\x98z", "\uFFFDz"},
      {"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xc0\x80", "\uFFFD\uFFFD"},
      {"\xf5\x80\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"\xf4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"\xe4\xbd\xf0\x9f\x98\x80", "\uFFFD\U0001F600"},
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(to_valid_utf8(bytes), text);
  EXPECT_EQ(to_valid_utf8(std::string_view("\0\x80", 2)), std::string_view("\0\uFFFD", 4));
}

TEST(Speed, OneMegabyteOfOneLetter) {
  const Folder folder;
  const std::string letters(1 << 20, 'a');
  const std::string spaces = std::string(1 << 20, ' ') + "x";
  for (const fs::path& file : {folder.write("tokenizer.json", smollm2_json().dump()),
                               kGolden / "small.tiktoken", kGolden / "small_sp_bpe.model"}) {
    const auto tokenizer = Tokenizer::load(file);
    for (const std::string& text : {letters, spaces}) {
      Ids ids;
      EXPECT_LT(seconds_of([&] { ids = tokenizer->encode(text); }), kMostSeconds) << file;
      EXPECT_EQ(tokenizer->decode(ids), text) << file;
    }
  }
}

// ---- Files that are no tokenizer, broken, or of a kind that is not supported.

TEST(BadFiles, AreNamedInOneLine) {
  const Folder folder;
  expect_error(folder, "", "an empty file");
  expect_error(folder, "version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
               "Git-LFS pointer");
  expect_error(folder, "<!DOCTYPE html><html></html>", "HTML");
  expect_error(folder, std::string("PK\x03\x04 archive"), "zip archive");
  expect_error(folder, "GGUF....", "GGUF");
  expect_error(folder, "just some words\n", "no tokenizer of a known kind");
  expect_error(folder, std::string(100, '\0'), "no tokenizer of a known kind");
  EXPECT_THROW(Tokenizer::load(folder.path()), c10::Error);
  EXPECT_THROW(Tokenizer::load(folder.path() / "absent"), c10::Error);
}

TEST(BadFiles, SentencePiece) {
  const Folder folder;
  const std::string good = read(kGolden / "small_sp_bpe.model");
  EXPECT_EQ(load_error(folder, good), "");
  expect_error(folder, good.substr(0, good.size() / 2), "damaged or cut short");
  expect_error(folder, good + "trailing", "damaged or cut short");
  // One piece and nothing else: a well-formed file, which the library refuses.
  expect_error(folder, std::string("\x0A\x07\x0A\x01x\x18\x01", 7) + std::string("\x10\x01", 2),
               "SentencePiece model");
  // A denormalizer (field 5) with a charsmap (field 2).
  expect_error(folder, good + std::string("\x2A\x03\x12\x01x", 5), "denormalizer");
  // Every place where a download can stop.
  for (size_t size = 1; size < good.size(); size += 13)
    EXPECT_NE(load_error(folder, good.substr(0, size)), "") << size;
}

TEST(BadFiles, Tiktoken) {
  const Folder folder;
  const std::string good = read(kGolden / "small.tiktoken");
  EXPECT_EQ(load_error(folder, good), "");
  expect_error(folder, good.substr(0, good.rfind(' ') - 1), "cut short");
  expect_error(folder, good.substr(0, good.find('\n') + 1), "without a token for the byte");
  expect_error(folder, good + "!!!! 571\n", "line 572");
  expect_error(folder, good + "AAAA\n", "line 572");
  expect_error(folder, good + "YWFhYWFhYWE= 573\n", "does not have the rank 571");
  expect_error(folder, good + good.substr(0, good.find(' ')) + " 571\n", "repeats a token");
}

TEST(BadFiles, TokenizerJson) {
  const Folder folder;
  const json bpe = read_json("small_bpe.json");
  const json good = variant_json(bpe, "llama3");
  EXPECT_EQ(load_error(folder, good.dump()), "");
  const std::string text = good.dump();
  expect_error(folder, text.substr(0, text.size() / 2), "not valid JSON");
  expect_error(folder, "{}", "JSON without a model");

  const auto with = [&](const char* pointer, const json& value) {
    json file = good;
    file[json::json_pointer(pointer)] = value;
    return file.dump();
  };
  expect_error(folder, with("/model/type", "Unigram"), "model of type Unigram");
  expect_error(folder, with("/model/type", "WordPiece"), "model of type WordPiece");
  expect_error(folder, with("/model/byte_fallback", true), "byte_fallback");
  expect_error(folder, with("/model/end_of_word_suffix", "</w>"), "end_of_word_suffix");
  expect_error(folder, with("/model/vocab", json::object()), "without a vocab");
  expect_error(folder, with("/model/vocab", 3), "without a vocab");
  expect_error(folder, with("/model/vocab/a", -1), "'a' the id -1");
  expect_error(folder, with("/model/vocab/a", 1e12), "'a' the id");
  expect_error(folder, with("/model/vocab/a", "x"), "'a' the id \"x\"");
  expect_error(folder, with("/model/merges", "x"), "without merges");
  expect_error(folder, with("/model/merges/0", "nospace"), "has the merge 0");
  expect_error(folder, with("/model/merges/0", {"zq", "zq"}), "('zq' and 'zq')");
  expect_error(folder, with("/normalizer", {{"type", "NFC"}}), "normalizer of type NFC");
  expect_error(folder,
               with("/normalizer",
                    {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}),
               "normalizer of type Lowercase");
  EXPECT_EQ(load_error(folder,
                       with("/normalizer", {{"type", "Sequence"}, {"normalizers", json::array()}})),
            "");
  expect_error(folder, with("/pre_tokenizer", nullptr), "no pre_tokenizer");
  expect_error(folder, with("/pre_tokenizer", {{"type", "Metaspace"}}),
               "pre_tokenizer of type Metaspace");
  expect_error(folder, with("/pre_tokenizer", {{"type", "Digits"}}), "without ByteLevel");
  expect_error(folder, with("/pre_tokenizer", 4), "pre_tokenizer without a type");
  expect_error(folder, with("/pre_tokenizer/pretokenizers/0/behavior", "MergedWithNext"),
               "behavior MergedWithNext");
  expect_error(folder, with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "("),
               "by the pattern (");
  expect_error(folder, with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+"),
               "\\w is not supported");
  expect_error(folder, with("/post_processor", {{"type", "BertProcessing"}}),
               "post_processor of type BertProcessing");
  expect_error(folder, with("/decoder", {{"type", "WordPiece"}}), "decoder of type WordPiece");
  expect_error(folder, with("/decoder", nullptr), "no decoder");
  expect_error(folder, with("/added_tokens/0", {{"content", "x"}}), "added token without an id");
  expect_error(folder, with("/added_tokens", 1), "added_tokens");

  // Nesting deeper than any stack.
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested += R"({"type":"Sequence","pretokenizers":[)";
  for (int i = 0; i < 100000; ++i) nested += "]}";
  std::string file = with("/pre_tokenizer", "HERE");
  file.replace(file.find("\"HERE\""), 6, nested);
  expect_error(folder, file, "too many Sequences");
  file = with("/model/vocab/a", "HERE");
  file.replace(file.find("\"HERE\""), 6, nested);
  expect_error(folder, file, "'a' the id object");
}

// Damaged bytes anywhere: an error or a tokenizer that still works, never a crash.
TEST(BadFiles, DamagedBytesNeverCrash) {
  const Folder folder;
  std::mt19937 random(11);
  const json bpe = read_json("small_bpe.json");
  for (const std::string& good :
       {read(kGolden / "small_sp_bpe.model"), read(kGolden / "small.tiktoken"),
        variant_json(bpe, "smollm").dump()}) {
    for (int round = 0; round < 100; ++round) {
      std::string damaged = good;
      for (int i = 0; i < 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
      try {
        const auto tokenizer = Tokenizer::load(folder.write("tokenizer", damaged));
        const Ids ids = tokenizer->encode("The quick brown fox, 1234 \U0001F600 times.");
        EXPECT_EQ(stream(*tokenizer, ids), tokenizer->decode(ids));
      } catch (const c10::Error& error) {
        EXPECT_EQ(std::string(error.what_without_backtrace()).find('\n'), std::string::npos);
      }
    }
  }
}

}  // namespace
}  // namespace gptfast
