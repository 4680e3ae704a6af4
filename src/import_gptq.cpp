#include "import_gptq.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "gptfast/quantize.h"
#include "json_file.h"

namespace gptfast {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSuffixes[] = {".qweight", ".qzeros", ".scales", ".g_idx"};

/// The object that describes the quantization, and the file that holds it.
std::pair<json, fs::path> find_description(const fs::path& directory) {
  for (const char* name : {"quantize_config.json", "quant_config.json"}) {
    if (fs::exists(directory / name)) return {read_json_object(directory / name), directory / name};
  }
  const fs::path config = directory / "config.json";
  const json object = fs::exists(config) ? json(read_json_object(config)) : json::object();
  TORCH_CHECK(object.contains("quantization_config") && object["quantization_config"].is_object(),
              directory.string(),
              ": holds packed weights (qweight), but neither a quantize_config.json nor a "
              "quantization_config in config.json says how they are packed");
  return {object["quantization_config"], config};
}

template <typename T>
T value_of(const json& object, std::initializer_list<const char*> keys, T otherwise,
           const fs::path& file) {
  for (const char* key : keys) {
    const auto found = object.find(key);
    if (found == object.end() || found->is_null()) continue;
    try {
      return found->get<T>();
    } catch (const json::exception&) {
      TORCH_CHECK(false, file.string(), ": ", key, " has the value ", found->dump());
    }
  }
  return otherwise;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return text;
}

int64_t zero_offset(const json& object, const std::string& zeros, const fs::path& file) {
  const std::string stated = lower(value_of<std::string>(object, {"checkpoint_format"}, "", file));
  TORCH_CHECK(stated.empty() || stated == "gptq" || stated == "gptq_v2", file.string(),
              ": checkpoint_format '", stated, "' is not supported, gptq and gptq_v2 are");
  if (!zeros.empty()) return zeros == "v1" ? 1 : 0;
  TORCH_CHECK(!stated.empty(), file.string(),
              ": does not say how zeros are stored (checkpoint_format is missing); pass "
              "--gptq_zeros v1 for files of "
              "GPTQ-for-LLaMa and AutoGPTQ, which store them minus one, or v2");
  return stated == "gptq" ? 1 : 0;
}

/// Takes fields of `bits` out of int32 words: [..., words] -> [..., words * 32 / bits] int32.
Tensor fields(const Tensor& words, int64_t bits) {
  const Tensor shifts = at::arange(0, 32, bits, at::kInt);
  const Tensor parts = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and((1 << bits) - 1);
  return parts.flatten(-2);
}

/// Fields of an AWQ word in the order of the columns.
Tensor awq_fields(const Tensor& words) {
  const Tensor order =
      at::tensor({0, 4, 1, 5, 2, 6, 3, 7}, at::kLong);  // column i lies in field order[i]
  const Tensor parts = fields(words, 4).view({words.size(0), -1, 8});
  return parts.index_select(2, order).flatten(1);
}

/// One layer's tensors by suffix.
struct PackedLayer {
  std::string name;
  std::map<std::string, SourceTensor> parts;

  const SourceTensor& part(const std::string& suffix, at::ScalarType dtype) const {
    const auto found = parts.find(suffix);
    TORCH_CHECK(found != parts.end(), "tensor ", name, suffix, " is missing");
    TORCH_CHECK(found->second.dtype == dtype, "tensor ", name, suffix, " is ", found->second.dtype,
                ", expected ", dtype);
    return found->second;
  }
};

/// Codes and group parameters of a layer in the source's terms: w[n, k] = scales[g, n] * (codes[n,
/// k] - zeros[g, n]).
struct UnpackedLayer {
  Tensor codes;   // [N, K] int32, columns of a group side by side
  Tensor scales;  // [N, G] float32
  Tensor zeros;   // [N, G] float32
  Tensor
      perm;  // [K] int64: column k of `codes` is the source's column perm[k]; undefined: in order
  int64_t groupsize;
};

struct Sizes {
  int64_t n, k, groups, groupsize;
};

Sizes sizes_of(const PackedLayer& layer, const PackedFormat& format) {
  const auto shape = [&](const std::string& suffix, at::ScalarType dtype) {
    const SourceTensor& part = layer.part(suffix, dtype);
    TORCH_CHECK(part.shape.size() == 2, "tensor ", layer.name, suffix, " has the shape ",
                at::IntArrayRef(part.shape), ", expected two dimensions");
    return part.shape;
  };
  const bool gptq = format.method == PackedFormat::Method::kGptq;
  const int64_t fields_per_word = 32 / format.bits;
  const auto qweight = shape(".qweight", at::kInt);
  const int64_t k = qweight[0] * (gptq ? fields_per_word : 1);
  const int64_t n = qweight[1] * (gptq ? 1 : fields_per_word);
  const int64_t groupsize = format.groupsize == -1 ? k : format.groupsize;
  const int64_t groups = (k + groupsize - 1) / groupsize;
  const auto expect = [&](const std::string& suffix, at::ScalarType dtype, int64_t columns) {
    const auto found = shape(suffix, dtype);
    TORCH_CHECK(found[0] == groups && found[1] == columns, "tensor ", layer.name, suffix,
                " has the shape ", at::IntArrayRef(found), "; ", format.bits, " bits in groups of ",
                format.groupsize, " for a weight of ", n, " x ", k, " give [", groups, ", ",
                columns, "]");
  };
  expect(".qzeros", at::kInt, n / fields_per_word);
  const auto scales = layer.parts.find(".scales");
  expect(".scales", scales == layer.parts.end() ? at::kHalf : scales->second.dtype, n);
  return {.n = n, .k = k, .groups = groups, .groupsize = groupsize};
}

/// The order that puts the columns of each group side by side; undefined when they are.
Tensor group_order(const PackedLayer& layer, const PackedFormat& format, const Sizes& sizes) {
  if (!layer.parts.contains(".g_idx")) {
    TORCH_CHECK(!format.desc_act, "tensor ", layer.name,
                ".g_idx is missing, but desc_act says that columns belong to groups in any order");
    return {};
  }
  const Tensor g_idx = layer.part(".g_idx", at::kInt).read(at::kInt).to(at::kLong);
  const Tensor expected = at::arange(sizes.k).floor_divide(sizes.groupsize);
  if (g_idx.sizes() == expected.sizes() && at::equal(g_idx, expected)) return {};
  const Tensor perm = g_idx.flatten().argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  TORCH_CHECK(g_idx.sizes() == expected.sizes() && at::equal(g_idx.index_select(0, perm), expected),
              "tensor ", layer.name, ".g_idx does not give each of ", sizes.groups, " groups its ",
              sizes.groupsize, " columns");
  return perm;
}

UnpackedLayer unpack_layer(const PackedLayer& layer, const PackedFormat& format) {
  const Sizes sizes = sizes_of(layer, format);
  const Tensor qweight = layer.parts.at(".qweight").read(at::kInt);
  const Tensor qzeros = layer.parts.at(".qzeros").read(at::kInt);
  const bool gptq = format.method == PackedFormat::Method::kGptq;
  UnpackedLayer result{.codes = gptq ? fields(qweight.t(), format.bits) : awq_fields(qweight).t(),
                       .scales = layer.parts.at(".scales").read(at::kFloat).t(),
                       .zeros = (gptq ? fields(qzeros, format.bits) : awq_fields(qzeros)).t(),
                       .perm = group_order(layer, format, sizes),
                       .groupsize = sizes.groupsize};
  const int64_t mask =
      (int64_t{1} << format.bits) - 1;  // a zero of 0 is stored as the greatest code by version 1
  result.zeros = (result.zeros + format.zero_offset).bitwise_and(mask).to(at::kFloat);
  if (result.perm.defined()) result.codes = result.codes.index_select(1, result.perm);
  return result;
}

Tensor per_column(const Tensor& per_group, int64_t groupsize, int64_t columns) {
  return per_group.repeat_interleave(groupsize, /*dim=*/1).narrow(1, 0, columns);
}

Tensor dequantize(const UnpackedLayer& layer) {
  const int64_t k = layer.codes.size(1);
  const Tensor w = per_column(layer.scales, layer.groupsize, k) *
                   (layer.codes.to(at::kFloat) - per_column(layer.zeros, layer.groupsize, k));
  return layer.perm.defined() ? w.index_select(1, layer.perm.argsort()) : w;
}

/// The group size of our files for groups of `groupsize` columns: itself or the greatest part of
/// it; a group of the whole row may be cut anywhere.
int64_t stored_groupsize(const UnpackedLayer& layer, const std::string& name) {
  constexpr int64_t kForWholeRows = 128;  // the original's default
  if (layer.groupsize >= layer.codes.size(1)) return kForWholeRows;
  for (const int64_t g : {256, 128, 64, 32}) {
    if (layer.groupsize % g == 0) return g;
  }
  TORCH_CHECK(false, "tensor ", name, ".qweight: groups of ", layer.groupsize,
              " columns are not supported, multiples of 32 are");
}

PackedInt4 to_int4(const UnpackedLayer& layer, const std::string& name) {
  const int64_t k = layer.codes.size(1);
  const int64_t g = stored_groupsize(layer, name);
  const Tensor group = (at::arange((k + g - 1) / g) * g).floor_divide(layer.groupsize);
  const Tensor scales = layer.scales.index_select(1, group);
  const Tensor zeros = layer.zeros.index_select(1, group);
  return {.weight = {.q = pack_nibbles(layer.codes.to(at::kByte)),
                     .scales = scales,
                     .zeros = scales * (8 - zeros),  // exact: 11 bits times 4 in float32
                     .in_features = k,
                     .groupsize = g},
          .perm = layer.perm};
}

SourceTensor to_source(PackedLayer layer, const PackedFormat& format) {
  const Sizes sizes = sizes_of(layer, format);
  SourceTensor result{.name = layer.name + ".weight",
                      .shape = {sizes.n, sizes.k},
                      .dtype =
                          layer.parts.at(".scales").dtype};  // that of the model's other tensors
  for (const auto& [suffix, part] : layer.parts) result.bytes += part.bytes;
  const auto shared = std::make_shared<const PackedLayer>(std::move(layer));
  result.read = [shared, format](at::ScalarType dtype) {
    return dequantize(unpack_layer(*shared, format)).to(dtype);
  };
  if (format.bits == 4) {
    result.read_int4 = [shared, format] {
      return to_int4(unpack_layer(*shared, format), shared->name);
    };
  }
  return result;
}

/// "model.layers.0.mlp.up_proj" and ".qweight".
std::optional<std::pair<std::string, std::string>> split_suffix(const std::string& name) {
  for (const std::string suffix : kSuffixes) {
    if (name.ends_with(suffix))
      return std::pair{name.substr(0, name.size() - suffix.size()), suffix};
  }
  return std::nullopt;
}

bool is_zero_bias(const SourceTensor& tensor, const std::map<std::string, PackedLayer>& layers) {
  const std::string suffix = ".bias";
  return tensor.name.ends_with(suffix) &&
         layers.contains(tensor.name.substr(0, tensor.name.size() - suffix.size())) &&
         tensor.read(at::kFloat).count_nonzero().item<int64_t>() == 0;
}

}  // namespace

bool has_packed_weights(const std::vector<SourceTensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const SourceTensor& t) { return t.name.ends_with(".qweight"); });
}

PackedFormat read_packed_format(const fs::path& directory, const std::string& zeros) {
  const auto [object, file] = find_description(directory);
  PackedFormat format;
  const std::string method = lower(value_of<std::string>(object, {"quant_method"}, "", file));
  const std::string version = lower(value_of<std::string>(object, {"version"}, "", file));
  const bool awq =
      method == "awq" || (method.empty() && (object.contains("w_bit") || version == "gemm"));
  TORCH_CHECK(awq || method.empty() || method == "gptq", file.string(), ": weights quantized by '",
              method, "' are not supported, those of gptq and awq are");
  format.method = awq ? PackedFormat::Method::kAwq : PackedFormat::Method::kGptq;
  format.bits = value_of<int64_t>(object, {"bits", "w_bit"}, 0, file);
  format.groupsize = value_of<int64_t>(object, {"group_size", "q_group_size"}, 0, file);
  TORCH_CHECK(format.bits == 4 || (!awq && format.bits == 8), file.string(), ": weights of ",
              format.bits, " bits are not supported, those of 4 bits ",
              awq ? "are" : "and 8 bits are");
  TORCH_CHECK(format.groupsize == -1 || format.groupsize > 0, file.string(), ": group_size is ",
              format.groupsize);
  if (awq) {
    TORCH_CHECK(version.empty() || version == "gemm", file.string(), ": the AWQ version '", version,
                "' is not supported, gemm is");
  } else {
    format.desc_act = value_of<bool>(object, {"desc_act"}, false, file);
    format.zero_offset = zero_offset(object, zeros, file);
  }
  return format;
}

std::vector<SourceTensor> unpack_quantized(std::vector<SourceTensor> tensors,
                                           const PackedFormat& format) {
  std::map<std::string, PackedLayer> layers;
  for (const SourceTensor& tensor : tensors) {
    const auto split = split_suffix(tensor.name);
    if (!split) continue;
    TORCH_CHECK(tensor.name.find(".experts.") == std::string::npos, "tensor ", tensor.name,
                ": packed experts are not supported; convert the unquantized model, then quantize "
                "it");
    PackedLayer& layer = layers[split->first];
    layer.name = split->first;
    layer.parts[split->second] = tensor;
  }
  std::vector<SourceTensor> result;
  for (SourceTensor& tensor : tensors) {
    const auto split = split_suffix(tensor.name);
    if (split &&
        (split->second == ".qweight" || !layers.at(split->first).parts.contains(".qweight"))) {
      result.push_back(to_source(layers.at(split->first), format));
    } else if (!split && !is_zero_bias(tensor, layers)) {
      result.push_back(std::move(tensor));
    }
  }
  return result;
}

}  // namespace gptfast
