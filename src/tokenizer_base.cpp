#include "tokenizer_base.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "json_file.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// ---- The files beside a tokenizer.

// The templates of known models have a few thousand characters.
constexpr uint64_t kMaxTemplateBytes = 1 << 20;

bool is_there(const fs::path& file) {
  std::error_code error;
  return fs::exists(file, error);
}

// An empty object when the file is not there.
json read_optional_json(const fs::path& file) {
  return is_there(file) ? read_json_object(file) : json::object();
}

// "<s>" or {"content": "<s>", ...}, as tokenizer_config.json writes its tokens; "" for null or
// absent.
std::string token_text(const fs::path& file, const json& object, const char* key) {
  const auto value = object.find(key);
  if (value == object.end() || value->is_null()) return "";
  if (value->is_string()) return value->get<std::string>();
  TORCH_CHECK(value->is_object() && value->contains("content") && value->at("content").is_string(),
              file.string(), ": ", key, " is neither a string nor an object with a content string");
  return value->at("content").get<std::string>();
}

// An id or a list of ids; none for null or absent.
std::vector<int32_t> token_ids(const fs::path& file, const json& object, const char* key) {
  std::vector<int32_t> ids;
  const auto add = [&](const json& id) {
    TORCH_CHECK(id.is_number_integer() && id >= -1 && id <= INT32_MAX, file.string(), ": ", key,
                " holds ", id.is_structured() ? id.type_name() : id.dump(),
                ", which is not a token id");
    if (id >= 0) ids.push_back(id.get<int32_t>());
  };
  const auto value = object.find(key);
  if (value == object.end() || value->is_null()) return ids;
  if (!value->is_array()) {
    add(*value);
  } else {
    for (const json& id : *value) add(id);
  }
  return ids;
}

// The value of a key that holds a string; nullptr otherwise.
const std::string* find_string(const json& object, const char* key) {
  const auto value = object.find(key);
  return value != object.end() ? value->get_ptr<const std::string*>() : nullptr;
}

// The default template: a string, or the entry called "default" of a list of named ones.
std::optional<std::string> template_text(const json& config) {
  if (const std::string* text = find_string(config, "chat_template")) return *text;
  const auto list = config.find("chat_template");
  if (list == config.end() || !list->is_array()) return std::nullopt;
  for (const json& entry : *list) {
    if (!entry.is_object()) continue;
    const std::string* name = find_string(entry, "name");
    const std::string* text = find_string(entry, "template");
    if (name != nullptr && text != nullptr && *name == "default") return *text;
  }
  return std::nullopt;
}

// ---- Chat templates and stop tokens.

// A template is known by the markers that it writes.
std::string_view template_name(std::string_view jinja) {
  const auto has = [&](std::string_view marker) {
    return jinja.find(marker) != std::string_view::npos;
  };
  if (has("<|start_header_id|>")) return "llama3";
  if (has("<|im_start|>")) return "chatml";
  if (has("<<SYS>>")) return "llama2";
  if (has("[INST]")) return "mistral";
  return "";
}

// The system message that a ChatML template spells out for conversations without one (SmolLM2,
// Qwen2.5). A message that the template puts together from parts is none.
std::string spelled_out_system_message(std::string_view jinja) {
  constexpr std::string_view kOpen = "<|im_start|>system", kClose = "<|im_end|>";
  for (size_t at = jinja.find(kOpen); at != std::string_view::npos; at = jinja.find(kOpen, at)) {
    at += kOpen.size();
    const size_t end = jinja.find(kClose, at);
    if (end == std::string_view::npos) break;
    std::string text(jinja.substr(at, end - at));
    for (size_t n = 0; (n = text.find("\\n", n)) != std::string::npos;) text.replace(n, 2, "\n");
    if (text.starts_with('\n') && text.find_first_of("'\"{}\\") == std::string::npos)
      return text.substr(1);
  }
  return "";
}

// Spellings of eos, eot and eom in the known families; they count only where they are special
// tokens.
constexpr std::array<std::string_view, 6> kEndTokens = {"<|end_of_text|>", "<|eot_id|>",
                                                        "<|eom_id|>",      "<|im_end|>",
                                                        "<|endoftext|>",   "</s>"};

// ---- UTF-8.

struct Utf8 {
  size_t length =
      1;  // of the character, or of the longest part of one that an invalid sequence begins with
  bool valid = false;
  bool incomplete = false;  // the text ends inside of a character
};

// The well-formed byte sequences of the Unicode standard, table 3-7.
Utf8 next_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {.length = 1, .valid = true};
  if (lead < 0xC2 || lead > 0xF4) return {};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  const uint8_t second_min = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t second_max = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {.length = i, .incomplete = true};
    const bool fits = i == 1 ? byte(i) >= second_min && byte(i) <= second_max
                             : byte(i) >= 0x80 && byte(i) <= 0xBF;
    if (!fits) return {.length = i};
  }
  return {.length = length, .valid = true};
}

bool is_space(std::string_view character) {
  if (character.size() == 1)
    return character[0] == ' ' || (character[0] >= '\t' && character[0] <= '\r');
  static constexpr std::array<std::string_view, 19> kSpaces = {"\u0085", "\u00a0", "\u1680",
                                                               "\u2000", "\u2001", "\u2002",
                                                               "\u2003", "\u2004", "\u2005",
                                                               "\u2006", "\u2007", "\u2008",
                                                               "\u2009", "\u200a", "\u2028",
                                                               "\u2029", "\u202f", "\u205f",
                                                               "\u3000"};
  return std::find(kSpaces.begin(), kSpaces.end(), character) != kSpaces.end();
}

size_t leading_space(std::string_view text) {
  size_t size = 0;
  while (size < text.size()) {
    const size_t length = next_utf8(text.substr(size)).length;
    if (!is_space(text.substr(size, length))) break;
    size += length;
  }
  return size;
}

// Start of the last character of `text`.
size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t at = last_character(text.substr(0, end));
    if (!is_space(text.substr(at, end - at))) break;
    end = at;
  }
  return text.size() - end;
}

// Word characters; outside of ASCII everything but whitespace counts.
bool is_word(std::string_view character) {
  if (character.size() == 1)
    return std::isalnum(static_cast<uint8_t>(character[0])) != 0 || character[0] == '_';
  return !is_space(character);
}

}  // namespace

TokenizerHints read_hints(const fs::path& directory) {
  TokenizerHints hints;
  const fs::path tokenizer_file = directory / "tokenizer_config.json";
  const json tokenizer_config = read_optional_json(tokenizer_file);
  hints.bos_token = token_text(tokenizer_file, tokenizer_config, "bos_token");
  hints.eos_token = token_text(tokenizer_file, tokenizer_config, "eos_token");
  const auto add_bos = tokenizer_config.find("add_bos_token");
  if (add_bos != tokenizer_config.end() && add_bos->is_boolean())
    hints.add_bos = add_bos->get<bool>();
  const fs::path template_file = directory / "chat_template.jinja";
  hints.chat_template = is_there(template_file) ? read_small_file(template_file, kMaxTemplateBytes)
                                                : template_text(tokenizer_config);

  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path file = directory / name;
    const json object = read_optional_json(file);
    const std::vector<int32_t> bos = token_ids(file, object, "bos_token_id");
    if (!hints.bos_id && !bos.empty()) hints.bos_id = bos.front();
    for (int32_t id : token_ids(file, object, "eos_token_id")) hints.eos_ids.push_back(id);
  }
  return hints;
}

// A token that a file names and the tokenizer does not have is passed over: it belongs to another
// form of the same tokenizer.
void TokenizerBase::apply(const TokenizerHints& hints) {
  if (bos_id_ < 0 && !hints.bos_token.empty()) bos_id_ = token_id(hints.bos_token);
  if (bos_id_ < 0 && hints.bos_id) bos_id_ = *hints.bos_id;
  if (bos_id_ < 0) bos_id_ = special_id("<|begin_of_text|>");
  if (hints.add_bos) add_bos_ = *hints.add_bos;

  const int32_t named_eos = hints.eos_token.empty() ? -1 : token_id(hints.eos_token);
  if (eos_id_ < 0) eos_id_ = named_eos;
  if (eos_id_ < 0 && !hints.eos_ids.empty()) eos_id_ = hints.eos_ids.front();

  std::vector<int32_t> candidates = {eos_id_, named_eos};
  candidates.insert(candidates.end(), hints.eos_ids.begin(), hints.eos_ids.end());
  for (std::string_view token : kEndTokens) candidates.push_back(special_id(token));
  for (int32_t id : candidates) {
    if (id >= 0 && std::find(stop_ids_.begin(), stop_ids_.end(), id) == stop_ids_.end())
      stop_ids_.push_back(id);
  }
  if (eos_id_ < 0 && !stop_ids_.empty()) eos_id_ = stop_ids_.front();

  if (hints.chat_template) {
    chat_template_ = template_name(*hints.chat_template);
    default_system_message_ = spelled_out_system_message(*hints.chat_template);
  } else {
    for (std::string_view marker : {"<|start_header_id|>", "<|im_start|>", "[INST]"}) {
      if (special_id(marker) >= 0) {
        chat_template_ = template_name(marker);
        break;
      }
    }
  }
}

SpecialTokens::SpecialTokens(std::vector<SpecialToken> tokens) : tokens_(std::move(tokens)) {
  std::erase_if(tokens_, [](const SpecialToken& token) { return token.text.empty(); });
  for (size_t i = 0; i < tokens_.size(); ++i) {
    by_first_byte_[static_cast<uint8_t>(tokens_[i].text[0])].push_back(i);
  }
  for (std::vector<size_t>& indices : by_first_byte_) {
    std::stable_sort(indices.begin(), indices.end(), [&](size_t a, size_t b) {
      return tokens_[a].text.size() > tokens_[b].text.size();
    });
  }
}

const SpecialToken* SpecialTokens::match(std::string_view text, size_t at) const {
  for (size_t index : by_first_byte_[static_cast<uint8_t>(text[at])]) {
    if (text.substr(at).starts_with(tokens_[index].text)) return &tokens_[index];
  }
  return nullptr;
}

std::vector<SpecialTokens::Segment> SpecialTokens::split(std::string_view text) const {
  std::vector<Segment> segments;
  size_t done = 0;  // text before it is in `segments`
  for (size_t at = 0; at < text.size();) {
    const SpecialToken* token = match(text, at);
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t start = at;
    size_t stop = at + token->text.size();
    at = stop;
    if (token->skip) continue;
    const std::string_view before = text.substr(0, start);
    const std::string_view after = text.substr(stop);
    if (token->single_word &&
        ((!before.empty() && is_word(before.substr(last_character(before)))) ||
         (!after.empty() && is_word(after.substr(0, next_utf8(after).length))))) {
      continue;
    }
    if (token->lstrip) start -= trailing_space(before);
    if (token->rstrip) stop += leading_space(after);
    start = std::max(start, done);
    if (start > done) segments.push_back({text.substr(done, start - done)});
    segments.push_back({text.substr(start, stop - start), token->id});
    done = at = stop;
  }
  if (done < text.size()) segments.push_back({text.substr(done)});
  return segments;
}

size_t valid_utf8_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8 next = next_utf8(text.substr(at));
    if (!next.valid) break;
    at += next.length;
  }
  return at;
}

std::string take_characters(std::string& bytes, bool at_end, bool each_byte) {
  const std::string_view text = bytes;
  std::string characters;
  size_t at = 0;
  while (at < text.size()) {
    const Utf8 next = next_utf8(text.substr(at));
    if (next.incomplete && !at_end) break;
    const size_t length = next.valid || !each_byte ? next.length : 1;
    characters += next.valid ? text.substr(at, length) : std::string_view("\uFFFD");
    at += length;
  }
  bytes.erase(0, at);
  return characters;
}

}  // namespace gptfast
