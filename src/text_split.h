// Splitting text by a regular expression, as the pre-tokenizers of tiktoken and HF tokenizers do.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct pcre2_real_code_8;

namespace gptfast {

/// `\s` in a pattern means the Unicode property White_Space, as in the Python libraries (PCRE2's
/// own `\s` also holds U+180E).
class TextSplitter {
 public:
  /// Which parts of the text become pieces.
  enum class Keep { kAll, kMatches, kGaps };

  /// Throws naming the pattern when it is malformed or uses an escape whose meaning differs between
  /// regular expression libraries. `literal`: the pattern is a string, not a regular expression.
  explicit TextSplitter(const std::string& pattern, Keep keep = Keep::kAll, bool literal = false);

  /// Calls `found` for every piece from left to right; pieces are never empty. `text` must be valid
  /// UTF-8.
  void split(std::string_view text, const std::function<void(std::string_view)>& found) const;

 private:
  std::shared_ptr<pcre2_real_code_8> code_;
  Keep keep_;
};

}  // namespace gptfast
