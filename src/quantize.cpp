#include "gptfast/quantize.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "gptfast/checkpoint.h"
#include "gptfast/config.h"
#include "int4_layout.h"
#include "load_model.h"

namespace gptfast {

namespace {

constexpr int64_t kInnerKTiles = 8;  // what the original's runtime builds its modules for

/// A divisor on x's device: dividing by a number would multiply by its reciprocal on CUDA, and the
/// bytes would differ from the CPU's.
Tensor divisor(const Tensor& x, double value) {
  return at::full({}, value, x.options());
}

Tensor as_groups(const Tensor& w, int64_t groupsize) {
  TORCH_CHECK(w.dim() == 2 && w.size(1) % groupsize == 0, "int4: a weight of shape ", w.sizes(),
              " does not divide into groups of ", groupsize, " columns");
  return w.reshape({-1, groupsize});
}

}  // namespace

Int8Weight quantize_int8(const Tensor& w) {
  constexpr double kSteps = 127.5;  // half of the 255 steps between -128 and 127
  const Tensor x = w.to(at::kFloat);
  Tensor scales = x.abs().amax(/*dim=*/1) / divisor(x, kSteps);
  scales = scales.clamp_min(std::numeric_limits<float>::epsilon());
  const Tensor codes = (x / scales.unsqueeze(1)).round_().clamp_(-128, 127);
  return {.weight = codes.to(at::kChar), .scales = scales};
}

GroupParams int4_group_params(const Tensor& w, int64_t groupsize) {
  const auto [least, greatest] = at::aminmax(as_groups(w, groupsize), /*dim=*/1);
  const Tensor scales = (greatest - least).clamp_min(1e-6) / divisor(w, 15);
  const Tensor zeros = least + scales * 8;
  const auto per_row = [&](const Tensor& t) { return t.to(at::kBFloat16).view({w.size(0), -1}); };
  return {.scales = per_row(scales), .zeros = per_row(zeros)};
}

Tensor quantize_int4(const Tensor& w, const GroupParams& params, int64_t groupsize) {
  const Tensor scales = params.scales.reshape({-1, 1});
  const Tensor least = params.zeros.reshape({-1, 1}) - scales * 8;
  const Tensor codes = (as_groups(w, groupsize) - least).div_(scales).round_().clamp_(0, 15);
  return codes.to(at::kByte).view(w.sizes());
}

Tensor pack_nibbles(const Tensor& codes) {
  const Tensor even = codes.size(1) % 2 == 0 ? codes : at::constant_pad_nd(codes, {0, 1});
  return even.slice(1, 0, std::nullopt, 2)
      .bitwise_or(even.slice(1, 1, std::nullopt, 2).bitwise_left_shift(4));
}

int64_t int4_file_features(int64_t in_features, int64_t groupsize) {
  const bool fits = in_features % groupsize == 0 && in_features % (kInnerKTiles * 16) == 0;
  return fits ? in_features : find_multiple(in_features, 1024);
}

Int4FileTensors int4_file_tensors(const Int4Weight& weight) {
  const int64_t padded_k = int4_file_features(weight.in_features, weight.groupsize);
  const int64_t new_groups = padded_k / weight.groupsize - weight.scales.size(1);
  const auto padded = [&](const Tensor& t) { return at::constant_pad_nd(t, {0, new_groups}, 1); };
  const Tensor q = at::constant_pad_nd(weight.q, {0, padded_k / 2 - weight.q.size(1)});
  return {.weight = pack_int4_cuda(q, kInnerKTiles),
          .scales_and_zeros = pack_scales_and_zeros(padded(weight.scales), padded(weight.zeros))};
}

std::string unpacked_rows_note(const std::string& fqn, int64_t rows) {
  return c10::str(fqn, " stays bfloat16: its ", rows,
                  " rows are no multiple of 8. The Python original cannot load this file.");
}

namespace {

bool is_linear(const std::string& name, const Tensor& tensor) {
  return tensor.dim() == 2 && name.ends_with(".weight") && !name.ends_with(".gate.weight") &&
         name.find("embeddings") == std::string::npos;
}

/// As the original casts the model before it quantizes.
Tensor to_bfloat16(const std::string& name, const Tensor& tensor, at::Device device) {
  const Tensor w = tensor.to(device, at::kBFloat16);
  TORCH_CHECK(at::isfinite(w).all().item<bool>(), "tensor '", name,
              "' holds NaN or values outside bfloat16: it cannot be quantized");
  return w;
}

class Quantizer {
 public:
  Quantizer(CheckpointWriter& writer, const QuantizeOptions& options)
      : writer_(writer), options_(options) {}

  void add(const std::string& name, const Tensor& tensor) {
    if (is_expert_weight(name)) {
      add_experts(name, tensor);
    } else if (!is_linear(name, tensor)) {
      writer_.add(name, tensor.to(at::kBFloat16));
    } else if (options_.format == WeightFormat::kInt8) {
      add_int8(name, tensor);
    } else {
      add_int4(name, tensor);
    }
  }

  std::vector<QuantizedLayer> layers() && { return std::move(layers_); }

 private:
  void add_int8(const std::string& name, const Tensor& tensor) {
    const auto [weight, scales] = quantize_int8(to_bfloat16(name, tensor, options_.device));
    const std::string fqn = name.substr(0, name.rfind('.'));
    writer_.add(name, weight);
    writer_.add(fqn + ".scales", scales.to(at::kBFloat16));
    report(fqn, tensor, {.format = WeightFormat::kInt8}, tensor.size(1));
  }

  void add_int4(const std::string& name, const Tensor& tensor) {
    const std::string fqn = name.substr(0, name.rfind('.'));
    if (tensor.size(0) % 8 != 0) return keep(name, fqn, tensor);
    const auto [weight, scales_and_zeros] = to_int4(name, tensor);
    writer_.add(name, weight);
    writer_.add(fqn + ".scales_and_zeros", scales_and_zeros);
    report(fqn, tensor, {.format = WeightFormat::kInt4, .groupsize = options_.groupsize},
           int4_padded_features(weight));
  }

  void keep(const std::string& name, const std::string& fqn, const Tensor& tensor) {
    writer_.add(name, tensor.to(at::kBFloat16));
    report(fqn, tensor, {.format = WeightFormat::kBFloat16}, tensor.size(-1),
           unpacked_rows_note(fqn, tensor.size(-2)));
  }

  Int4FileTensors to_int4(const std::string& name, const Tensor& tensor /* [N, K] */) const {
    const int64_t k = tensor.size(1);
    const int64_t padded_k = int4_file_features(k, options_.groupsize);
    const Tensor w =
        at::constant_pad_nd(to_bfloat16(name, tensor, options_.device), {0, padded_k - k});
    const GroupParams params = int4_group_params(w, options_.groupsize);
    const Tensor q = pack_nibbles(quantize_int4(w, params, options_.groupsize));
    return {.weight = pack_int4_cuda(q, kInnerKTiles),
            .scales_and_zeros = pack_scales_and_zeros(params.scales, params.zeros)};
  }

  /// The weights of all experts of a layer, [E, N, K].
  void add_experts(const std::string& name, const Tensor& tensor) {
    if (options_.format == WeightFormat::kInt8) return add_int8_experts(name, tensor);
    if (tensor.size(1) % 8 != 0) return keep(name, name, tensor);
    std::vector<Tensor> weight, scales_and_zeros;
    for (int64_t expert = 0; expert < tensor.size(0); ++expert) {
      Int4FileTensors quantized = to_int4(name, tensor[expert]);
      weight.push_back(std::move(quantized.weight));
      scales_and_zeros.push_back(std::move(quantized.scales_and_zeros));
    }
    writer_.add(name, at::stack(weight));
    writer_.add(expert_companion(name, "scales_and_zeros"), at::stack(scales_and_zeros));
    report(name, tensor, {.format = WeightFormat::kInt4, .groupsize = options_.groupsize},
           int4_padded_features(weight[0]));
  }

  // The original keeps the experts' scales in float32, those of the linear layers in bfloat16.
  void add_int8_experts(const std::string& name, const Tensor& tensor) {
    Tensor weight = at::empty(tensor.sizes(), at::kChar);
    Tensor scales = at::empty({tensor.size(0), tensor.size(1)}, at::kFloat);
    for (int64_t expert = 0; expert < tensor.size(0); ++expert) {
      const auto quantized = quantize_int8(to_bfloat16(name, tensor[expert], options_.device));
      weight[expert].copy_(quantized.weight);
      scales[expert].copy_(quantized.scales);
    }
    writer_.add(name, weight);
    writer_.add(expert_companion(name, "scales"), scales);
    report(name, tensor, {.format = WeightFormat::kInt8}, tensor.size(2));
  }

  void report(const std::string& fqn, const Tensor& tensor, WeightScheme scheme, int64_t padded_k,
              std::string note = {}) {
    layers_.push_back({.name = fqn,
                       .scheme = scheme,
                       .out_features = tensor.size(-2),
                       .in_features = tensor.size(-1),
                       .padded_k = padded_k,
                       .note = std::move(note)});
  }

  CheckpointWriter& writer_;
  const QuantizeOptions& options_;
  std::vector<QuantizedLayer> layers_;
};

/// The floating tensors of a checkpoint under the model's names, checked against its configuration.
StateDict load_unquantized(const std::filesystem::path& file, const std::string& config_name) {
  StateDict tensors = load_checkpoint(file);
  for (const auto& [name, tensor] : tensors) {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype != at::kChar && dtype != at::kByte && dtype != at::kInt, "'", file.string(),
                "' is quantized already (tensor '", name, "' is ", dtype,
                "); quantize the model.pth that it was made from");
  }
  const ModelArgs config = find_config(file, config_name, tensors);
  tensors = normalize(tensors, config);
  tensors = fuse_qkv(tensors);
  check_config(config, tensors);
  return tensors;
}

}  // namespace

std::vector<QuantizedLayer> quantize(const std::filesystem::path& checkpoint_path,
                                     const std::filesystem::path& output,
                                     const QuantizeOptions& options) {
  const int64_t g = options.groupsize;
  TORCH_CHECK(options.format == WeightFormat::kInt8 || g == 32 || g == 64 || g == 128 || g == 256,
              "int4 groups have 32, 64, 128 or 256 columns, not ", g);
  const StateDict tensors = load_unquantized(checkpoint_path, options.config);
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors) total += static_cast<int64_t>(tensor.nbytes());
  CheckpointWriter writer(output);
  Quantizer quantizer(writer, options);
  int64_t done = 0;
  for (const auto& [name, tensor] : tensors) {
    quantizer.add(name, tensor);
    done += static_cast<int64_t>(tensor.nbytes());
    if (options.progress) options.progress(done, total);
  }
  writer.finish();
  return std::move(quantizer).layers();
}

std::filesystem::path quantized_path(const std::filesystem::path& checkpoint_path,
                                     std::string_view mode, int64_t groupsize,
                                     std::string_view label) {
  std::string name = checkpoint_path.stem().string();
  name.append(label).append(mode);
  if (mode != "int8") name.append(".g").append(std::to_string(groupsize));
  return checkpoint_path.parent_path() / (name + ".pth");
}

}  // namespace gptfast
