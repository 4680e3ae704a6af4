// Does a state dict have the tensors that a configuration implies?
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <charconv>
#include <set>

#include "gptfast/checkpoint.h"
#include "gptfast/config.h"

namespace gptfast {

namespace {

using Names = std::set<std::string>;

std::string brief(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  const size_t shown = std::min(names.size(), kShown);
  std::string text =
      c10::Join(", ", std::vector<std::string>(names.begin(), names.begin() + shown));
  if (names.size() > shown) text += ", and " + std::to_string(names.size() - shown) + " more";
  return text;
}

/// Collects what is missing and unexpected while shapes are compared.
class Checker {
 public:
  explicit Checker(const StateDict& tensors) : tensors_(tensors) {
    for (const auto& [name, tensor] : tensors) unexpected_.insert(name);
  }

  void vector(const std::string& name, int64_t size) {
    if (const Tensor* tensor = take(name)) {
      TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == size, name, " has the shape ",
                  tensor->sizes(), ", the configuration needs [", size, "]");
    }
  }

  /// A weight of `leading` x [n, k] (leading empty, or the number of experts) in any of the formats
  /// of quantize.py.
  void matrix(const std::string& name, const std::vector<int64_t>& leading, int64_t n, int64_t k,
              const std::string& scales, const std::string& scales_and_zeros) {
    const Tensor* tensor = take(name);
    take_optional(scales);
    const bool has_zeros = take_optional(scales_and_zeros);
    if (tensor == nullptr) return;
    std::vector<int64_t> shape = leading;
    shape.insert(shape.end(), {n, k});
    const bool fits =
        has_zeros ? int4_fits(*tensor, leading, n, k) : tensor->sizes() == at::IntArrayRef(shape);
    TORCH_CHECK(fits, name, " has the shape ", tensor->sizes(), has_zeros ? " (int4)" : "",
                ", the configuration needs ", at::IntArrayRef(shape));
  }

  void linear(const std::string& fqn, int64_t n, int64_t k) {
    matrix(fqn + ".weight", {}, n, k, fqn + ".scales", fqn + ".scales_and_zeros");
    take_optional(fqn + ".perm");
  }

  bool contains(const std::string& name) const { return tensors_.contains(name); }
  /// Tensors of Meta's files that hold no weights.
  void ignore(const std::string& name) { unexpected_.erase(name); }

  void finish() const {
    const std::vector<std::string> unexpected(unexpected_.begin(), unexpected_.end());
    TORCH_CHECK(missing_.empty() && unexpected.empty(),
                missing_.empty() ? "" : "missing tensors: ", brief(missing_),
                missing_.empty() || unexpected.empty() ? "" : "; ",
                unexpected.empty() ? "" : "unexpected tensors: ", brief(unexpected));
  }

 private:
  // Four bits a value in whatever integers, with columns padded as the original pads them, or not.
  static bool int4_fits(const Tensor& weight, const std::vector<int64_t>& leading, int64_t n,
                        int64_t k) {
    if (weight.dim() < std::ssize(leading) ||
        weight.sizes().slice(0, leading.size()) != at::IntArrayRef(leading))
      return false;
    int64_t rows = n;
    for (const int64_t size : leading) rows *= size;
    const int64_t values = static_cast<int64_t>(weight.nbytes()) * 2;
    return values == rows * k || values == rows * find_multiple(k, 1024);
  }

  const Tensor* take(const std::string& name) {
    unexpected_.erase(name);
    const Tensor* tensor = tensors_.find(name);
    if (tensor == nullptr) missing_.push_back(name);
    return tensor;
  }
  bool take_optional(const std::string& name) { return unexpected_.erase(name) > 0; }

  const StateDict& tensors_;
  std::vector<std::string> missing_;
  Names unexpected_;
};

// "layers.31.attention..." -> 31, others -> -1
int64_t layer_of(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  if (!name.starts_with(kPrefix)) return -1;
  int64_t layer = -1;
  const auto digits = name.substr(kPrefix.size());
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), layer);
  return result.ec == std::errc() ? layer : -1;
}

// The two numbers that tell most wrong configurations apart, before single tensors.
void check_size(const ModelArgs& config, const StateDict& tensors) {
  if (const Tensor* embedding = tensors.find("tok_embeddings.weight");
      embedding != nullptr && embedding->dim() == 2) {
    TORCH_CHECK(embedding->size(0) == config.vocab_size, "the checkpoint has a vocabulary of ",
                embedding->size(0), " tokens, the configuration one of ", config.vocab_size);
    TORCH_CHECK(embedding->size(1) == config.dim, "the checkpoint has dim ", embedding->size(1),
                ", the configuration ", config.dim);
  }
  int64_t last_layer = -1;
  for (const auto& [name, tensor] : tensors) last_layer = std::max(last_layer, layer_of(name));
  TORCH_CHECK(last_layer + 1 == config.n_layer, "the checkpoint has ", last_layer + 1,
              " layers, the configuration ", config.n_layer);
}

void check_layer(const ModelArgs& config, const std::string& prefix, Checker& checker) {
  const std::string attention = prefix + "attention.";
  if (checker.contains(attention + "wq.weight") || checker.contains(attention + "wk.weight")) {
    checker.linear(attention + "wq", config.n_head * config.head_dim, config.dim);
    checker.linear(attention + "wk", config.n_local_heads * config.head_dim, config.dim);
    checker.linear(attention + "wv", config.n_local_heads * config.head_dim, config.dim);
  } else {
    checker.linear(attention + "wqkv", config.qkv_dim(), config.dim);
  }
  checker.linear(attention + "wo", config.dim, config.n_head * config.head_dim);
  checker.ignore(attention + "inner_attention.rope.freqs");
  if (config.num_experts > 0) {
    const std::string moe = prefix + "block_sparse_moe.";
    checker.linear(moe + "gate", config.num_experts, config.dim);
    for (const char* index : {"1", "2", "3"}) {
      const bool down = *index == '2';
      checker.matrix(moe + "cond_ffn.w" + index, {config.num_experts},
                     down ? config.dim : config.intermediate_size,
                     down ? config.intermediate_size : config.dim, moe + "cond_ffn.scales" + index,
                     moe + "cond_ffn.scales_and_zeros" + index);
    }
  } else {
    checker.linear(prefix + "feed_forward.w1", config.intermediate_size, config.dim);
    checker.linear(prefix + "feed_forward.w3", config.intermediate_size, config.dim);
    checker.linear(prefix + "feed_forward.w2", config.dim, config.intermediate_size);
  }
  checker.vector(prefix + "ffn_norm.weight", config.dim);
  checker.vector(prefix + "attention_norm.weight", config.dim);
}

}  // namespace

void check_config(const ModelArgs& config, const StateDict& tensors) {
  check_size(config, tensors);
  Checker checker(tensors);
  checker.matrix("tok_embeddings.weight", {}, config.vocab_size, config.dim,
                 "tok_embeddings.scales", "tok_embeddings.scales_and_zeros");
  for (int64_t i = 0; i < config.n_layer; ++i)
    check_layer(config, "layers." + std::to_string(i) + ".", checker);
  checker.vector("norm.weight", config.dim);
  if (!config.tie_word_embeddings || checker.contains("output.weight"))
    checker.linear("output", config.vocab_size, config.dim);
  for (const char* name : {"rope.freqs", "freqs_cos", "freqs_sin"}) checker.ignore(name);
  checker.finish();
}

}  // namespace gptfast
