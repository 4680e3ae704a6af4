// The parts of a forward pass that attend alike: prompts, and several texts without padding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gptfast/model.h"

namespace gptfast {

/// Positions input_pos [S] of a text, for slots from first_slot on.
Span span_of_prompt(const Tensor& input_pos, int64_t first_slot);

/// The tokens of trees, a tree after the other. In the cache a tree has a slot of its own, where
/// its tokens lie as they come; a branch does not see those of the branches before it.
class PackedTrees {
 public:
  /// Tensors are made on `device`.
  PackedTrees(const std::vector<TokenTree>& trees, at::Device device);

  int64_t size() const { return ids_.numel(); }  ///< tokens
  int64_t longest() const { return longest_; }   ///< tokens of the largest tree

  /// Ids of tokens [begin, end), int64.
  Tensor ids(int64_t begin, int64_t end) const { return ids_.slice(0, begin, end); }
  /// Their positions in their texts, int64.
  Tensor pos(int64_t begin, int64_t end) const { return pos_.slice(0, begin, end); }
  /// Their spans, counted from `begin`. Tokens before `begin` must be in the cache.
  std::vector<Span> spans(int64_t begin, int64_t end) const;

 private:
  struct Tree {
    int64_t begin, end;  // of all tokens
    int64_t trunk;       // tokens
  };

  std::vector<Tree> trees_;
  Tensor ids_, pos_;
  Tensor own_;  // [tokens] int64: the place in its tree where a token's branch begins
  int64_t longest_ = 0;
};

}  // namespace gptfast
