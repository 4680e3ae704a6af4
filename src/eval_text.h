// Python's string semantics, as far as the task formats of evaluation need them. All text is valid
// UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gptfast {

/// Number of Unicode code points: Python's len(str).
int64_t code_points(std::string_view text);

/// str.strip() and str.rstrip(): Unicode white space, as str.isspace() knows it.
std::string_view strip(std::string_view text);
std::string_view rstrip(std::string_view text);

/// str.replace(from, to): left to right, without looking at what was just inserted.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

/// str.capitalize(): the first character in title case, the others in lower case, with Unicode's
/// full mappings.
std::string capitalize(std::string_view text);

/// len(re.split(r"\s+", text)): runs of white space plus one, so that empty strings at the ends
/// count.
int64_t split_count(std::string_view text);

/// HellaSwag's cleaning of a context or an ending (lm-evaluation-harness,
/// tasks/hellaswag/utils.py).
std::string hellaswag_preprocess(std::string_view text);

/// Undoes WikiText's tokenization (lm-evaluation-harness, tasks/wikitext/preprocess_wikitext.py).
std::string wikitext_detokenize(std::string_view page);

}  // namespace gptfast
