#include "eval_text.h"

#include <c10/util/Exception.h>
#include <clocale>
#include <cwctype>

#include <algorithm>
#include <array>
#include <utility>

namespace gptfast {

namespace {

/// Bytes of the code point that starts at text[i].
size_t char_size(std::string_view text, size_t i) {
  const auto lead = static_cast<unsigned char>(text[i]);
  const size_t size = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  return std::min(size, text.size() - i);
}

char32_t char_at(std::string_view text, size_t i) {
  const size_t size = char_size(text, i);
  char32_t c = static_cast<unsigned char>(text[i]);
  if (size > 1) {
    c &= 0x7fU >> size;
    for (size_t j = 1; j < size; ++j) {
      c = (c << 6) | (static_cast<unsigned char>(text[i + j]) & 0x3fU);
    }
  }
  return c;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

/// str.isspace() of one character; Python's regular expressions use the same set for \s.
bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

std::string_view lstrip(std::string_view text) {
  while (!text.empty() && is_space(char_at(text, 0))) {
    text.remove_prefix(char_size(text, 0));
  }
  return text;
}

/// The C library's Unicode tables, whatever the user's locale is.
locale_t unicode_locale() {
  static const locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  TORCH_CHECK(locale != nullptr,
              "The locale C.UTF-8, whose character tables are needed, is missing; install it "
              "(Debian: libc-bin, other systems: glibc 2.35 or newer).");
  return locale;
}

/// Title case of characters that become more than one (Unicode's SpecialCasing.txt); all others map
/// one to one.
constexpr std::array<std::pair<char32_t, std::u32string_view>, 48> kTitleExpansions = {{
    {0x00df, U"Ss"},
    {0x0149, U"\u02bcN"},
    {0x01f0, U"J\u030c"},
    {0x0390, U"\u0399\u0308\u0301"},
    {0x03b0, U"\u03a5\u0308\u0301"},
    {0x0587, U"\u0535\u0582"},
    {0x1e96, U"H\u0331"},
    {0x1e97, U"T\u0308"},
    {0x1e98, U"W\u030a"},
    {0x1e99, U"Y\u030a"},
    {0x1e9a, U"A\u02be"},
    {0x1f50, U"\u03a5\u0313"},
    {0x1f52, U"\u03a5\u0313\u0300"},
    {0x1f54, U"\u03a5\u0313\u0301"},
    {0x1f56, U"\u03a5\u0313\u0342"},
    {0x1fb2, U"\u1fba\u0345"},
    {0x1fb4, U"\u0386\u0345"},
    {0x1fb6, U"\u0391\u0342"},
    {0x1fb7, U"\u0391\u0342\u0345"},
    {0x1fc2, U"\u1fca\u0345"},
    {0x1fc4, U"\u0389\u0345"},
    {0x1fc6, U"\u0397\u0342"},
    {0x1fc7, U"\u0397\u0342\u0345"},
    {0x1fd2, U"\u0399\u0308\u0300"},
    {0x1fd3, U"\u0399\u0308\u0301"},
    {0x1fd6, U"\u0399\u0342"},
    {0x1fd7, U"\u0399\u0308\u0342"},
    {0x1fe2, U"\u03a5\u0308\u0300"},
    {0x1fe3, U"\u03a5\u0308\u0301"},
    {0x1fe4, U"\u03a1\u0313"},
    {0x1fe6, U"\u03a5\u0342"},
    {0x1fe7, U"\u03a5\u0308\u0342"},
    {0x1ff2, U"\u1ffa\u0345"},
    {0x1ff4, U"\u038f\u0345"},
    {0x1ff6, U"\u03a9\u0342"},
    {0x1ff7, U"\u03a9\u0342\u0345"},
    {0xfb00, U"Ff"},
    {0xfb01, U"Fi"},
    {0xfb02, U"Fl"},
    {0xfb03, U"Ffi"},
    {0xfb04, U"Ffl"},
    {0xfb05, U"St"},
    {0xfb06, U"St"},
    {0xfb13, U"\u0544\u0576"},
    {0xfb14, U"\u0544\u0565"},
    {0xfb15, U"\u0544\u056b"},
    {0xfb16, U"\u054e\u0576"},
    {0xfb17, U"\u0544\u056d"},
}};

void append_title(std::string& out, char32_t c) {
  const auto* expansion = std::find_if(kTitleExpansions.begin(), kTitleExpansions.end(),
                                       [c](const auto& entry) { return entry.first == c; });
  if (expansion != kTitleExpansions.end()) {
    for (const char32_t part : expansion->second) {
      append_utf8(out, part);
    }
    return;
  }
  static const wctrans_t to_title = wctrans_l("totitle", unicode_locale());
  append_utf8(out, towctrans_l(static_cast<wint_t>(c), to_title, unicode_locale()));
}

bool is_cased(char32_t c) {
  const auto wide = static_cast<wint_t>(c);
  return iswupper_l(wide, unicode_locale()) != 0 || iswlower_l(wide, unicode_locale()) != 0;
}

/// The common ones of Unicode's case-ignorable characters: they do not end a word for the sake of a
/// final sigma.
bool is_case_ignorable(char32_t c) {
  return c == '\'' || c == '.' || c == ':' || c == '^' || c == '`' || c == 0xa8 || c == 0xad ||
         c == 0xaf || c == 0xb4 || c == 0xb7 || c == 0xb8 || (c >= 0x300 && c <= 0x36f) ||
         c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027;
}

/// Whether a cased character follows text[i], case-ignorable ones left out.
bool cased_follows(std::string_view text, size_t i) {
  while (i < text.size() && is_case_ignorable(char_at(text, i))) {
    i += char_size(text, i);
  }
  return i < text.size() && is_cased(char_at(text, i));
}

/// Lower case of the character at text[i]. `in_word`: a cased character stands before it,
/// case-ignorable ones left out.
void append_lower(std::string& out, std::string_view text, size_t i, bool in_word) {
  constexpr char32_t kCapitalSigma = 0x3a3;
  constexpr char32_t kFinalSigma = 0x3c2;
  constexpr char32_t kCapitalDottedI = 0x130;
  const char32_t c = char_at(text, i);
  if (c == kCapitalSigma && in_word && !cased_follows(text, i + char_size(text, i))) {
    append_utf8(out, kFinalSigma);
  } else if (c == kCapitalDottedI) {
    out += "i\u0307";
  } else {
    append_utf8(out, towlower_l(static_cast<wint_t>(c), unicode_locale()));
  }
}

/// Removes the white space just inside each pair open ... close: re.sub(r"(\s*([^)]*?)\s*)",
/// r"(\1)"). The first `close` after an `open` ends the pair; the two may be the same character.
std::string tighten(std::string_view text, char open, char close) {
  std::string out;
  size_t done = 0;
  for (size_t begin = text.find(open); begin != std::string_view::npos;
       begin = text.find(open, done)) {
    const size_t end = text.find(close, begin + 1);
    if (end == std::string_view::npos) {
      break;
    }
    out += text.substr(done, begin + 1 - done);
    out += strip(text.substr(begin + 1, end - begin - 1));
    out += close;
    done = end + 1;
  }
  out += text.substr(done);
  return out;
}

/// Removes what stands in square brackets on one line: re.sub(r"\[.*?\]", "").
std::string remove_brackets(std::string_view text) {
  std::string out;
  size_t done = 0;
  for (size_t begin = text.find('['); begin != std::string_view::npos;) {
    const size_t end = text.find_first_of("]\n", begin + 1);
    if (end == std::string_view::npos) {
      break;
    }
    if (text[end] == ']') {
      out += text.substr(done, begin - done);
      done = end + 1;
    }
    begin = text.find('[', end + 1);
  }
  out += text.substr(done);
  return out;
}

/// The harness's slip, kept: its pattern asks for literal slashes, /' 5/, and it puts the text of a
/// character class in.
std::string replace_slashed_digit(std::string_view text) {
  constexpr std::string_view kStart = "/' ";
  constexpr size_t kSize = 5;
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(kStart); at != std::string_view::npos; at = text.find(kStart, at)) {
    if (at + kSize <= text.size() && text[at + 3] >= '0' && text[at + 3] <= '9' &&
        text[at + 4] == '/') {
      out += text.substr(done, at - done);
      out += "/'[0-9]/";
      at += kSize;
      done = at;
    } else {
      ++at;
    }
  }
  out += text.substr(done);
  return out;
}

}  // namespace

int64_t code_points(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

std::string_view rstrip(std::string_view text) {
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xc0) == 0x80) {
      --last;
    }
    if (!is_space(char_at(text, last))) {
      break;
    }
    text = text.substr(0, last);
  }
  return text;
}

std::string_view strip(std::string_view text) {
  return lstrip(rstrip(text));
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from, done)) {
    out += text.substr(done, at - done);
    out += to;
    done = at + from.size();
  }
  out += text.substr(done);
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  bool in_word = false;
  for (size_t i = 0; i < text.size(); i += char_size(text, i)) {
    const char32_t c = char_at(text, i);
    if (i == 0) {
      append_title(out, c);
    } else {
      append_lower(out, text, i, in_word);
    }
    if (!is_case_ignorable(c)) {
      in_word = is_cased(c);
    }
  }
  return out;
}

int64_t split_count(std::string_view text) {
  int64_t count = 1;
  bool in_space = false;
  for (size_t i = 0; i < text.size(); i += char_size(text, i)) {
    const bool space = is_space(char_at(text, i));
    count += static_cast<int64_t>(space && !in_space);
    in_space = space;
  }
  return count;
}

std::string hellaswag_preprocess(std::string_view text) {
  return replace_all(remove_brackets(replace_all(strip(text), " [title]", ". ")), "  ", " ");
}

std::string wikitext_detokenize(std::string_view page) {
  using Replacement = std::pair<std::string_view, std::string_view>;
  constexpr std::array<Replacement, 9> kNumbersAndPunctuation = {{{" @-@ ", "-"},
                                                                  {" @,@ ", ","},
                                                                  {" @.@ ", "."},
                                                                  {" : ", ": "},
                                                                  {" ; ", "; "},
                                                                  {" . ", ". "},
                                                                  {" ! ", "! "},
                                                                  {" ? ", "? "},
                                                                  {" , ", ", "}}};
  constexpr std::array<std::pair<char, char>, 5> kPairs = {
      {{'(', ')'}, {'[', ']'}, {'{', '}'}, {'"', '"'}, {'\'', '\''}}};
  constexpr std::array<Replacement, 8> kMiscellaneous = {{{"= = = =", "===="},
                                                          {"= = =", "==="},
                                                          {"= =", "=="},
                                                          {" \u00b0 ", "\u00b0"},
                                                          {" \n", "\n"},
                                                          {"\n ", "\n"},
                                                          {" N ", " 1 "},
                                                          {" 's", "'s"}}};
  std::string text = replace_slashed_digit(replace_all(page, "s '", "s'"));
  for (const auto& [from, to] : kNumbersAndPunctuation) {
    text = replace_all(text, from, to);
  }
  for (const auto& [open, close] : kPairs) {
    text = tighten(text, open, close);
  }
  for (const auto& [from, to] : kMiscellaneous) {
    text = replace_all(text, from, to);
  }
  return text;
}

}  // namespace gptfast
