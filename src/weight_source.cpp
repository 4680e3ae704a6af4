#include "weight_source.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>

#include "dtype_names.h"
#include "gptfast/checkpoint.h"

namespace gptfast {

SourceTensor source_from_tensor(const std::string& name, const Tensor& tensor) {
  return {.name = name,
          .shape = tensor.sizes().vec(),
          .dtype = tensor.scalar_type(),
          .bytes = tensor.nbytes(),
          .read = [tensor](at::ScalarType dtype) { return tensor.to(dtype).contiguous(); }};
}

namespace {

// Name, dtype and size of a tensor made of several.
SourceTensor combine(const std::string& name, const std::vector<SourceTensor>& parts) {
  SourceTensor result{.name = name, .shape = parts.front().shape, .dtype = parts.front().dtype};
  for (const auto& part : parts) {
    result.dtype = at::promoteTypes(result.dtype, part.dtype);
    result.quantized = result.quantized || part.quantized;
    result.bytes += part.bytes;
  }
  return result;
}

std::vector<Tensor> read_all(const std::vector<SourceTensor>& parts, at::ScalarType dtype) {
  std::vector<Tensor> tensors;
  tensors.reserve(parts.size());
  for (const auto& part : parts) tensors.push_back(part.read(dtype));
  return tensors;
}

/// Rows of several weights below each other.
PackedInt4 join_rows(const std::string& name, const std::vector<PackedInt4>& parts) {
  const PackedInt4& first = parts.front();
  std::vector<Tensor> q;
  std::vector<Tensor> scales;
  std::vector<Tensor> zeros;
  for (const auto& [weight, perm] : parts) {
    const bool same_order =
        perm.defined() == first.perm.defined() && (!perm.defined() || at::equal(perm, first.perm));
    TORCH_CHECK(same_order, "tensor ", name,
                ": its parts put their columns into groups in different orders (g_idx), so they "
                "cannot be fused");
    TORCH_CHECK(weight.groupsize == first.weight.groupsize, "tensor ", name,
                ": its parts have groups of ", first.weight.groupsize, " and of ", weight.groupsize,
                " columns");
    q.push_back(weight.q);
    scales.push_back(weight.scales);
    zeros.push_back(weight.zeros);
  }
  return {.weight = {.q = at::cat(q),
                     .scales = at::cat(scales),
                     .zeros = at::cat(zeros),
                     .in_features = first.weight.in_features,
                     .groupsize = first.weight.groupsize},
          .perm = first.perm};
}

}  // namespace

SourceTensor concatenate(const std::string& name, std::vector<SourceTensor> parts, int64_t dim) {
  SourceTensor result = combine(name, parts);
  for (size_t i = 1; i < parts.size(); ++i) {
    std::vector<int64_t> shape = parts[i].shape;
    const bool same_rank =
        shape.size() == result.shape.size() && static_cast<size_t>(dim) < shape.size();
    TORCH_CHECK(same_rank, "tensor ", name, ": its parts have different numbers of dimensions");
    result.shape[dim] += shape[dim];
    shape[dim] = result.shape[dim];
    TORCH_CHECK(shape == result.shape, "tensor ", name, ": the shape ",
                at::IntArrayRef(parts[i].shape), " of part ", i + 1,
                " does not fit that of the first, ", at::IntArrayRef(parts[0].shape));
  }
  const bool packed =
      dim == 0 && std::all_of(parts.begin(), parts.end(),
                              [](const SourceTensor& part) { return part.read_int4; });
  const auto shared = std::make_shared<const std::vector<SourceTensor>>(std::move(parts));
  result.read = [shared, dim](at::ScalarType dtype) {
    return at::cat(read_all(*shared, dtype), dim);
  };
  if (packed) {
    result.read_int4 = [shared, name] {
      std::vector<PackedInt4> weights;
      for (const auto& part : *shared) weights.push_back(part.read_int4());
      return join_rows(name, weights);
    };
  }
  return result;
}

SourceTensor stack(const std::string& name, std::vector<SourceTensor> parts) {
  SourceTensor result = combine(name, parts);
  for (const auto& part : parts)
    TORCH_CHECK(part.shape == result.shape, "tensor ", part.name, " has the shape ",
                at::IntArrayRef(part.shape), ", that of the first expert is ",
                at::IntArrayRef(result.shape));
  result.shape.insert(result.shape.begin(), static_cast<int64_t>(parts.size()));
  result.read = [parts = std::move(parts)](at::ScalarType dtype) {
    return at::stack(read_all(parts, dtype));
  };
  return result;
}

SourceTensor transform(SourceTensor source, std::vector<int64_t> shape,
                       std::function<Tensor(const Tensor&)> change) {
  source.shape = std::move(shape);
  source.read_int4 = {};
  source.read = [read = std::move(source.read), change = std::move(change)](at::ScalarType dtype) {
    return change(read(dtype)).contiguous();
  };
  return source;
}

SourceTensor interleave_heads(SourceTensor source, int64_t n_head) {
  const std::vector<int64_t> shape = source.shape;
  TORCH_CHECK(shape.size() == 2 && shape[0] % (2 * n_head) == 0, "tensor ", source.name,
              " has the shape ", at::IntArrayRef(shape), ", which is not made of ", n_head,
              " heads");
  const auto interleave = [n_head](const Tensor& w) {  // rows of a matrix
    const std::vector<int64_t> halves = {n_head, 2, w.size(0) / n_head / 2, w.size(1)};
    return w.view(halves).transpose(1, 2).reshape(w.sizes());
  };
  const auto read_int4 = source.read_int4;
  SourceTensor result = transform(std::move(source), shape, interleave);
  if (read_int4) {
    result.read_int4 = [read_int4, interleave] {
      PackedInt4 packed = read_int4();
      Int4Weight& weight = packed.weight;
      for (Tensor* rows : {&weight.q, &weight.scales, &weight.zeros})
        *rows = interleave(rows->contiguous());
      return packed;
    };
  }
  return result;
}

std::vector<SourceTensor> rename_all(std::vector<SourceTensor> tensors, Renamer renamer) {
  std::vector<SourceTensor> renamed;
  for (SourceTensor& tensor : tensors) {
    const std::string name = renamer(tensor.name).value_or(tensor.name + " (unknown)");
    if (name.empty()) continue;
    tensor.name = name;
    renamed.push_back(std::move(tensor));
  }
  return renamed;
}

namespace {

/// Takes tensors out by name.
class Shelf {
 public:
  explicit Shelf(const WeightSource& source) {
    for (const auto& tensor : source.tensors) {
      TORCH_CHECK(tensors_.emplace(tensor.name, tensor).second, source.file, ": two tensors are ",
                  tensor.name);
    }
  }

  bool has(const std::string& name) const { return tensors_.contains(name); }
  SourceTensor take(const std::string& name) {
    auto node = tensors_.extract(name);
    return std::move(node.mapped());
  }

 private:
  std::map<std::string, SourceTensor> tensors_;
};

// Shapes only, for check_config.
StateDict outline(const std::vector<SourceTensor>& tensors) {
  StateDict result;
  for (const auto& tensor : tensors)
    result.set(tensor.name,
               at::empty(tensor.shape, at::TensorOptions(at::kMeta).dtype(tensor.dtype)));
  return result;
}

SourceTensor fused_qkv(const WeightSource& source, Shelf& shelf, const std::string& attention) {
  if (shelf.has(attention + "wqkv.weight")) return shelf.take(attention + "wqkv.weight");
  SourceTensor q = shelf.take(attention + "wq.weight");
  SourceTensor k = shelf.take(attention + "wk.weight");
  if (source.halves) {
    q = interleave_heads(std::move(q), source.config.n_head);
    k = interleave_heads(std::move(k), source.config.n_local_heads);
  }
  return concatenate(attention + "wqkv.weight",
                     {std::move(q), std::move(k), shelf.take(attention + "wv.weight")}, /*dim=*/0);
}

}  // namespace

std::vector<SourceTensor> arrange(const WeightSource& source) {
  Shelf shelf(source);
  try {
    check_config(source.config, outline(source.tensors));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, source.file,
                ": does not fit its configuration: ", error.what_without_backtrace());
  }
  for (const auto& tensor : source.tensors) {
    const bool known = tensor.dtype == at::kFloat || tensor.dtype == at::kBFloat16 ||
                       tensor.dtype == at::kHalf || tensor.dtype == at::kDouble;
    TORCH_CHECK(known, source.file, ": ", tensor.name, " has the dtype ", dtype_name(tensor.dtype),
                ", float32, bfloat16 or float16 was expected (quantized checkpoints of other "
                "programs cannot be converted)");
  }
  std::vector<SourceTensor> result;
  const auto move_over = [&](const std::string& name) { result.push_back(shelf.take(name)); };
  move_over("tok_embeddings.weight");
  for (int64_t i = 0; i < source.config.n_layer; ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    result.push_back(fused_qkv(source, shelf, layer + "attention."));
    move_over(layer + "attention.wo.weight");
    if (source.config.num_experts > 0) {
      for (const char* name : {"gate.weight", "cond_ffn.w1", "cond_ffn.w2", "cond_ffn.w3"})
        move_over(layer + "block_sparse_moe." + name);
    } else {
      for (const char* name : {"w1", "w3", "w2"})
        move_over(layer + "feed_forward." + name + ".weight");
    }
    move_over(layer + "ffn_norm.weight");
    move_over(layer + "attention_norm.weight");
  }
  move_over("norm.weight");
  if (shelf.has("output.weight")) move_over("output.weight");
  return result;
}

}  // namespace gptfast
