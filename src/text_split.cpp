#include "text_split.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <c10/util/Exception.h>
#include <pcre2.h>

#include <array>

namespace gptfast {
namespace {

// The members of White_Space, for use inside of brackets.
constexpr std::string_view kWhiteSpace =
    R"(\x09-\x0d\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

std::string error_text(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// Writes out \s and \S; refuses \w, \W, \b and \B, whose meaning differs between regular expression
// libraries.
std::string translate(const std::string& pattern) {
  std::string result;
  bool in_brackets = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c != '\\' || i + 1 == pattern.size()) {
      if (c == '[') in_brackets = true;
      if (c == ']') in_brackets = false;
      result += c;
      continue;
    }
    const char escaped = pattern[++i];
    TORCH_CHECK(std::string_view("wWbB").find(escaped) == std::string_view::npos &&
                    !(escaped == 'S' && in_brackets),
                "cannot split text by the pattern ", pattern, ": \\", escaped,
                " is not supported there");
    if (escaped == 's') {
      result += in_brackets ? std::string(kWhiteSpace) : "[" + std::string(kWhiteSpace) + "]";
    } else if (escaped == 'S') {
      result += "[^" + std::string(kWhiteSpace) + "]";
    } else {
      result += {c, escaped};
    }
  }
  return result;
}

using MatchData = std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)>;
using MatchContext = std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)>;

}  // namespace

TextSplitter::TextSplitter(const std::string& pattern, Keep keep, bool literal) : keep_(keep) {
  const std::string source = literal ? pattern : translate(pattern);
  const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                                   options, &error, &offset, nullptr);
  TORCH_CHECK(code != nullptr, "cannot split text by the pattern ", pattern, ": ",
              error_text(error));
  code_ = std::shared_ptr<pcre2_code>(code, pcre2_code_free);
}

void TextSplitter::split(std::string_view text,
                         const std::function<void(std::string_view)>& found) const {
  const MatchData match(pcre2_match_data_create_from_pattern(code_.get(), nullptr),
                        pcre2_match_data_free);
  const MatchContext context(pcre2_match_context_create(nullptr), pcre2_match_context_free);
  TORCH_CHECK(match && context, "out of memory while splitting text");
  pcre2_set_match_limit(context.get(),
                        UINT32_MAX);  // one match may backtrack over a megabyte of spaces
  const auto emit = [&](size_t begin, size_t end, Keep kind) {
    if (end > begin && (keep_ == Keep::kAll || keep_ == kind))
      found(text.substr(begin, end - begin));
  };
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    // The caller vouches for the UTF-8; checking it again here would read all of the text for each
    // match.
    const int result =
        pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                    PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match.get(), context.get());
    if (result == PCRE2_ERROR_NOMATCH) break;
    TORCH_CHECK(result > 0, "splitting text failed: ", error_text(result));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
    emit(done, range[0], Keep::kGaps);
    emit(range[0], range[1], Keep::kMatches);
    at = done = range[1];
  }
  emit(done, text.size(), Keep::kGaps);
}

}  // namespace gptfast
