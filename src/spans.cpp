#include "spans.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace gptfast {

int64_t TokenTree::size() const {
  int64_t size = std::ssize(trunk);
  for (const auto& branch : branches) size += std::ssize(branch);
  return size;
}

Span span_of_prompt(const Tensor& input_pos, int64_t first_slot) {
  Span span{.begin = 0,
            .length = input_pos.numel(),
            .cache_pos = input_pos.to(at::kLong),
            .mask = {},
            .used = input_pos.max().item<int64_t>() + 1,
            .first_slot = first_slot,
            .causal = true};
  if (span.length > 1 && span.used != span.length) {
    const Tensor key = at::arange(span.used, span.cache_pos.options());
    span.mask = (key.unsqueeze(0) <= span.cache_pos.unsqueeze(1)).unsqueeze(0).unsqueeze(0);
  }
  return span;
}

PackedTrees::PackedTrees(const std::vector<TokenTree>& trees, at::Device device) {
  std::vector<int64_t> ids, pos, own;
  const auto append = [&](const std::vector<int32_t>& tokens, int64_t first_pos, int64_t begin) {
    for (const int32_t id : tokens) {
      ids.push_back(id);
      pos.push_back(first_pos++);
      own.push_back(begin);
    }
  };
  for (const TokenTree& tree : trees) {
    const auto begin = std::ssize(ids), trunk = std::ssize(tree.trunk);
    append(tree.trunk, /*first_pos=*/0, /*begin=*/0);
    for (const auto& branch : tree.branches) append(branch, trunk, std::ssize(ids) - begin);
    trees_.push_back({.begin = begin, .end = std::ssize(ids), .trunk = trunk});
    longest_ = std::max(longest_, std::ssize(ids) - begin);
  }
  ids_ = at::tensor(ids, at::kLong).to(device);
  pos_ = at::tensor(pos, at::kLong).to(device);
  own_ = at::tensor(own, at::kLong).to(device);
}

std::vector<Span> PackedTrees::spans(int64_t begin, int64_t end) const {
  std::vector<Span> spans;
  for (size_t slot = 0; slot < trees_.size(); ++slot) {
    const Tree& tree = trees_[slot];
    const int64_t from = std::max(begin, tree.begin), to = std::min(end, tree.end);
    if (from >= to) continue;
    const int64_t first = from - tree.begin, used = to - tree.begin;
    Span span{.begin = from - begin,
              .length = to - from,
              .cache_pos = at::arange(first, used, own_.options()),
              .mask = {},
              .used = used,
              .first_slot = static_cast<int64_t>(slot),
              .causal = used <= tree.trunk};
    if (first > 0 || used > tree.trunk) {
      const Tensor key = at::arange(used, own_.options()).unsqueeze(0),
                   query = span.cache_pos.unsqueeze(1), own = own_.slice(0, from, to).unsqueeze(1);
      span.mask = ((key <= query) & ((key < tree.trunk) | (key >= own))).unsqueeze(0).unsqueeze(0);
    }
    spans.push_back(std::move(span));
  }
  return spans;
}

}  // namespace gptfast
