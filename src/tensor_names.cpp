// Names of weights in other formats -> those of the original.
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "weight_source.h"

namespace gptfast {

namespace {

using NamePair = std::pair<std::string_view, std::string_view>;

constexpr std::array<NamePair, 11> kHfLayer = {
    {{"self_attn.q_proj.weight", "attention.wq.weight"},
     {"self_attn.k_proj.weight", "attention.wk.weight"},
     {"self_attn.v_proj.weight", "attention.wv.weight"},
     {"self_attn.o_proj.weight", "attention.wo.weight"},
     {"self_attn.rotary_emb.inv_freq", ""},
     {"mlp.gate_proj.weight", "feed_forward.w1.weight"},
     {"mlp.up_proj.weight", "feed_forward.w3.weight"},
     {"mlp.down_proj.weight", "feed_forward.w2.weight"},
     {"input_layernorm.weight", "attention_norm.weight"},
     {"post_attention_layernorm.weight", "ffn_norm.weight"},
     {"block_sparse_moe.gate.weight", "block_sparse_moe.gate.weight"}}};

// Meta's names are those of the original, but for the experts.
constexpr std::array<NamePair, 16> kMetaLayer = {
    {{"attention.wqkv.weight", "attention.wqkv.weight"},
     {"attention.wq.weight", "attention.wq.weight"},
     {"attention.wk.weight", "attention.wk.weight"},
     {"attention.wv.weight", "attention.wv.weight"},
     {"attention.wo.weight", "attention.wo.weight"},
     {"attention.inner_attention.rope.freqs", ""},
     {"feed_forward.w1.weight", "feed_forward.w1.weight"},
     {"feed_forward.w2.weight", "feed_forward.w2.weight"},
     {"feed_forward.w3.weight", "feed_forward.w3.weight"},
     {"feed_forward.gate.weight", "block_sparse_moe.gate.weight"},
     {"attention_norm.weight", "attention_norm.weight"},
     {"ffn_norm.weight", "ffn_norm.weight"},
     {"block_sparse_moe.gate.weight", "block_sparse_moe.gate.weight"},
     {"block_sparse_moe.w1", "block_sparse_moe.w1"},
     {"block_sparse_moe.w2", "block_sparse_moe.w2"},
     {"block_sparse_moe.w3", "block_sparse_moe.w3"}}};

constexpr std::array<NamePair, 15> kGgufLayer = {
    {{"attn_q.weight", "attention.wq.weight"},
     {"attn_k.weight", "attention.wk.weight"},
     {"attn_v.weight", "attention.wv.weight"},
     {"attn_output.weight", "attention.wo.weight"},
     {"ffn_gate.weight", "feed_forward.w1.weight"},
     {"ffn_up.weight", "feed_forward.w3.weight"},
     {"ffn_down.weight", "feed_forward.w2.weight"},
     {"ffn_gate_inp.weight", "block_sparse_moe.gate.weight"},
     {"ffn_gate_exps.weight", "block_sparse_moe.cond_ffn.w1"},
     {"ffn_down_exps.weight", "block_sparse_moe.cond_ffn.w2"},
     {"ffn_up_exps.weight", "block_sparse_moe.cond_ffn.w3"},
     {"attn_norm.weight", "attention_norm.weight"},
     {"ffn_norm.weight", "ffn_norm.weight"},
     {"attn_rot_embd", ""},
     {"attn_rot_embd.weight", ""}}};

std::optional<std::string> lookup(const auto& table, std::string_view name) {
  for (const auto& [from, to] : table) {
    if (name == from) return std::string(to);
  }
  return std::nullopt;
}

struct LayerName {
  std::string layer;  // "layers.12."
  std::string_view rest;
};

// "model.layers.12.rest" with the prefix "model.layers."
std::optional<LayerName> split_layer(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  const std::string_view tail = name.substr(prefix.size());
  int32_t layer = -1;
  const auto result = std::from_chars(tail.data(), tail.data() + tail.size(), layer);
  const auto digits = static_cast<size_t>(result.ptr - tail.data());
  if (result.ec != std::errc() || layer < 0 || digits >= tail.size() || tail[digits] != '.')
    return std::nullopt;
  return LayerName{"layers." + std::to_string(layer) + ".", tail.substr(digits + 1)};
}

std::optional<std::string> lookup_layer(const auto& table, std::string_view name,
                                        std::string_view prefix) {
  const auto split = split_layer(name, prefix);
  if (!split) return std::nullopt;
  auto rest = lookup(table, split->rest);
  if (!rest || rest->empty()) return rest;
  return split->layer + *rest;
}

// "<prefix>N.<experts>E.wK.weight" -> "layers.N.block_sparse_moe.experts.E.wK"
std::optional<std::string> lookup_expert(std::string_view name, std::string_view prefix,
                                         std::string_view experts) {
  constexpr std::string_view kWeight = ".weight";
  const auto split = split_layer(name, prefix);
  if (!split || !split->rest.starts_with(experts) || !split->rest.ends_with(kWeight))
    return std::nullopt;
  std::string_view expert = split->rest.substr(experts.size());
  expert.remove_suffix(kWeight.size());
  return split->layer + "block_sparse_moe.experts." + std::string(expert);
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

std::optional<std::string> rename_hf(const std::string& name) {
  constexpr std::array<NamePair, 4> kTop = {{{"model.embed_tokens.weight", "tok_embeddings.weight"},
                                             {"model.norm.weight", "norm.weight"},
                                             {"lm_head.weight", "output.weight"},
                                             {"model.rotary_emb.inv_freq", ""}}};
  constexpr std::string_view kLayers = "model.layers.";
  if (auto found = lookup(kTop, name)) return found;
  if (auto found = lookup_layer(kHfLayer, name, kLayers)) return found;
  return lookup_expert(name, kLayers, "block_sparse_moe.experts.");
}

std::optional<std::string> rename_meta(const std::string& name) {
  constexpr std::array<NamePair, 6> kTop = {{{"tok_embeddings.weight", "tok_embeddings.weight"},
                                             {"norm.weight", "norm.weight"},
                                             {"output.weight", "output.weight"},
                                             {"rope.freqs", ""},
                                             {"freqs_cos", ""},
                                             {"freqs_sin", ""}}};
  constexpr std::string_view kLayers = "layers.";
  constexpr std::string_view kCompiled = "_orig_mod.";  // what torch.compile puts in front
  const std::string_view plain = std::string_view(name).starts_with(kCompiled)
                                     ? std::string_view(name).substr(kCompiled.size())
                                     : name;
  if (auto found = lookup(kTop, plain)) return found;
  if (auto found = lookup_layer(kMetaLayer, plain, kLayers)) return found;
  return lookup_expert(plain, kLayers, "feed_forward.experts.");
}

}  // namespace gptfast
