// Tensors of a foreign checkpoint: what they are called, and how to read one at a time. Nothing is
// read before read() is called, so that a conversion holds about one tensor beside the page cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gptfast/config.h"
#include "gptfast/linear.h"

namespace gptfast {

using at::Tensor;

/// A linear weight that other programs quantized to 4 bits.
struct PackedInt4 {
  Int4Weight weight;
  Tensor perm =
      {};  ///< [K] int64: stored column k is the layer's input perm[k]; undefined: in order
};

struct SourceTensor {
  std::string name = {};
  std::vector<int64_t> shape = {};
  at::ScalarType dtype = at::kFloat;  ///< of the values; of a quantized tensor float32
  bool quantized = false;
  uint64_t bytes = 0;  ///< in the file
  /// The values as `dtype`, contiguous or a view of the mapped file.
  std::function<Tensor(at::ScalarType dtype)> read = {};
  /// The same values as codes, for weights that stay quantized; empty for all others.
  std::function<PackedInt4()> read_int4 = {};
};

/// A tensor that already exists (a view of a mapped file).
SourceTensor source_from_tensor(const std::string& name, const Tensor& tensor);
/// Parts below each other: [n1, ...] and [n2, ...] give [n1 + n2, ...]; dim 1 puts them side by
/// side.
SourceTensor concatenate(const std::string& name, std::vector<SourceTensor> parts, int64_t dim);
/// E tensors of one shape give [E, ...].
SourceTensor stack(const std::string& name, std::vector<SourceTensor> parts);
/// Applies `change` to the values; `shape` is that of the result.
SourceTensor transform(SourceTensor source, std::vector<int64_t> shape,
                       std::function<Tensor(const Tensor&)> change);
/// Rows of each head from Hugging Face's order (first halves of all pairs, then the second ones) to
/// the interleaved order of Meta's checkpoints and the original. [H * head_dim, D] -> the same
/// shape.
SourceTensor interleave_heads(SourceTensor source, int64_t n_head);

/// A checkpoint under the original's names, with wq, wk, wv still separate or already fused.
struct WeightSource {
  std::string file;  ///< for messages
  ModelArgs config;
  std::vector<SourceTensor> tensors = {};
  bool halves = false;  ///< rows of wq and wk are in Hugging Face's order
};

/// Puts experts together: layers.N.block_sparse_moe.experts.E.w{1,2,3} (one matrix each) and
/// block_sparse_moe.w{1,2,3} (all below each other, Meta's) become
/// block_sparse_moe.cond_ffn.w{1,2,3} [E, ...], the original's layout.
void gather_experts(WeightSource& source);

/// Fuses wq, wk and wv, puts everything in the model's order and checks all of it against the
/// configuration. Throws naming missing and unexpected tensors.
std::vector<SourceTensor> arrange(const WeightSource& source);

/// Names of the original for names of another format: "" for a tensor that is left out, nullopt for
/// an unknown one.
using Renamer = std::optional<std::string> (*)(const std::string& name);
std::optional<std::string> rename_hf(const std::string& name);
std::optional<std::string> rename_meta(const std::string& name);
std::optional<std::string> rename_gguf(const std::string& name);

/// Renames all of `tensors`. Unknown names are marked as such, so that arrange() lists them beside
/// the missing ones.
std::vector<SourceTensor> rename_all(std::vector<SourceTensor> tensors, Renamer renamer);

}  // namespace gptfast
