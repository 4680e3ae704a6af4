// Names of weights in other formats -> those of the original.
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "weight_source.h"

namespace gptfast {

namespace {

using NamePair = std::pair<std::string_view, std::string_view>;

constexpr std::array<NamePair, 12> kGgufLayer = {{{"attn_q.weight", "attention.wq.weight"},
                                                  {"attn_k.weight", "attention.wk.weight"},
                                                  {"attn_v.weight", "attention.wv.weight"},
                                                  {"attn_output.weight", "attention.wo.weight"},
                                                  {"ffn_gate.weight", "feed_forward.w1.weight"},
                                                  {"ffn_up.weight", "feed_forward.w3.weight"},
                                                  {"ffn_down.weight", "feed_forward.w2.weight"},
                                                  {"attn_norm.weight", "attention_norm.weight"},
                                                  {"ffn_norm.weight", "ffn_norm.weight"},
                                                  {"attn_rot_embd", ""},
                                                  {"attn_rot_embd.weight", ""},
                                                  {"rope_freqs.weight", ""}}};

std::optional<std::string> lookup(const auto& table, std::string_view name) {
  for (const auto& [from, to] : table) {
    if (name == from) return std::string(to);
  }
  return std::nullopt;
}

// "model.layers.12.rest" with the prefix "model.layers." -> "rest" looked up, under "layers.12."
std::optional<std::string> lookup_layer(const auto& table, std::string_view name,
                                        std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  const std::string_view tail = name.substr(prefix.size());
  int32_t layer = -1;
  const auto result = std::from_chars(tail.data(), tail.data() + tail.size(), layer);
  const auto digits = static_cast<size_t>(result.ptr - tail.data());
  if (result.ec != std::errc() || layer < 0 || digits >= tail.size() || tail[digits] != '.')
    return std::nullopt;
  auto rest = lookup(table, tail.substr(digits + 1));
  if (!rest || rest->empty()) return rest;
  return "layers." + std::to_string(layer) + "." + *rest;
}

}  // namespace

std::optional<std::string> rename_gguf(const std::string& name) {
  constexpr std::array<NamePair, 4> kTop = {{{"token_embd.weight", "tok_embeddings.weight"},
                                             {"output_norm.weight", "norm.weight"},
                                             {"output.weight", "output.weight"},
                                             {"rope_freqs.weight", ""}}};
  if (auto found = lookup(kTop, name)) return found;
  return lookup_layer(kGgufLayer, name, "blk.");
}

}  // namespace gptfast
