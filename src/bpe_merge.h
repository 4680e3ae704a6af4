// Byte-pair merging: the loop that tiktoken and HF's BPE share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

namespace gptfast {

/// A symbol of the text: first a byte, later what bytes were merged into.
struct BpeSymbol {
  int32_t id = 0;
  size_t start = 0;   ///< offset in the text
  size_t length = 1;  ///< in bytes; 0: merged into the symbol on its left
};

/// What two neighbours merge into.
struct BpeMerge {
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  int32_t rank = kNone;  ///< the lowest goes first, the leftmost of equals
  int32_t id = 0;
};

/// Merges neighbours until no pair has a merge, and appends the ids of what is left to `ids`.
/// `merge_of(left, right)` gives the BpeMerge of two neighbours. O(n log n) in the number of
/// symbols.
template <typename MergeOf>
void merge_pairs(std::vector<BpeSymbol>& symbols, const MergeOf& merge_of,
                 std::vector<int32_t>& ids) {
  struct Candidate {
    BpeMerge merge;
    size_t left;
    size_t length;  // of both: another value means that one of them has changed since
    bool operator<(const Candidate& other) const {  // the top of a priority_queue is its largest
      return merge.rank != other.merge.rank ? merge.rank > other.merge.rank : left > other.left;
    }
  };
  constexpr size_t kEnd = std::numeric_limits<size_t>::max();
  const size_t count = symbols.size();
  std::vector<size_t> previous(count);
  std::vector<size_t> next(count);
  for (size_t i = 0; i < count; ++i) {
    previous[i] = i == 0 ? kEnd : i - 1;
    next[i] = i + 1 == count ? kEnd : i + 1;
  }

  std::priority_queue<Candidate> candidates;
  const auto consider = [&](size_t left) {
    if (left == kEnd || next[left] == kEnd) return;
    const BpeSymbol& right = symbols[next[left]];
    const BpeMerge merge = merge_of(symbols[left], right);
    if (merge.rank != BpeMerge::kNone)
      candidates.push({merge, left, symbols[left].length + right.length});
  };
  for (size_t i = 0; i < count; ++i) consider(i);

  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    BpeSymbol& left = symbols[best.left];
    const size_t right = next[best.left];
    if (left.length == 0 || right == kEnd || left.length + symbols[right].length != best.length)
      continue;
    left.id = best.merge.id;
    left.length = best.length;
    symbols[right].length = 0;
    next[best.left] = next[right];
    if (next[right] != kEnd) previous[next[right]] = best.left;
    consider(previous[best.left]);
    consider(best.left);
  }
  for (const BpeSymbol& symbol : symbols) {
    if (symbol.length > 0) ids.push_back(symbol.id);
  }
}

}  // namespace gptfast
