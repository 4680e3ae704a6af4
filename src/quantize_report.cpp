// What quantization did to a model, layer by layer.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "gptfast/model.h"
#include "gptfast/quantize.h"

namespace gptfast {

namespace {

LayerChange compare_layer(const std::string& name, const LinearImpl& original,
                          const LinearImpl& quantized) {
  const Tensor before = original.dequantize();  // [N, K] float32
  const Tensor after = quantized.dequantize();
  TORCH_CHECK(before.sizes() == after.sizes(), name, ": ", before.sizes(), " before and ",
              after.sizes(), " after");
  const Tensor error = (after - before).abs_();
  const double signal = before.square().sum(at::kDouble).item<double>();
  const double noise = error.square().sum(at::kDouble).item<double>();
  LayerChange change{.name = name,
                     .scheme = quantized.scheme,
                     .max_error = error.max().item<double>(),
                     .mean_error = error.mean(at::kDouble).item<double>(),
                     .signal_noise = 10 * std::log10(signal / noise)};
  const WeightScheme& scheme = quantized.scheme;
  const int64_t n = before.size(0);
  const int64_t k = before.size(1);
  switch (scheme.format) {
    case WeightFormat::kInt8:
      change.bytes = n * k + n * static_cast<int64_t>(quantized.scales.element_size());
      break;
    case WeightFormat::kInt4: {
      const int64_t groups = (k + scheme.groupsize - 1) / scheme.groupsize;
      change.bytes =
          n * ((k + 1) / 2) +
          2 * n * groups * static_cast<int64_t>(quantized.scales_and_zeros.element_size());
      break;
    }
    default:
      change.bytes = static_cast<int64_t>(quantized.weight.nbytes());
  }
  return change;
}

}  // namespace

std::vector<LayerChange> compare_layers(const TransformerImpl& original,
                                        const TransformerImpl& quantized) {
  std::vector<LayerChange> changes;
  const auto after = named_linears(quantized);
  for (const auto& [name, before] : named_linears(original)) {
    const auto found =
        std::find_if(after.begin(), after.end(),
                     [&wanted = name](const auto& layer) { return layer.first == wanted; });
    TORCH_CHECK(found != after.end(), "the quantized model has no layer ", name);
    changes.push_back(compare_layer(name, *before, *found->second));
  }
  return changes;
}

}  // namespace gptfast
