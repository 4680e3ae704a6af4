#include "gptfast/linear.h"

#include <ATen/ATen.h>

#include "gptfast/checkpoint.h"
#include "gptfast/ops.h"
#include "int4_layout.h"
#include "load_model.h"
#ifdef GPTFAST_CUDA
#include "ops/cuda/step_ops.h"
#endif

namespace gptfast {
WeightFormat floating_format(at::ScalarType dtype, const std::string& name) {
  switch (dtype) {
    case at::kFloat:
      return WeightFormat::kFloat32;
    case at::kBFloat16:
      return WeightFormat::kBFloat16;
    case at::kHalf:
      return WeightFormat::kFloat16;
    default:
      TORCH_CHECK(false, "tensor '", name, "' has dtype ", dtype,
                  ", expected float32, bfloat16, float16, int8 with scales or int4 with "
                  "scales_and_zeros");
  }
}

const char* to_string(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return "float32";
    case WeightFormat::kBFloat16:
      return "bfloat16";
    case WeightFormat::kFloat16:
      return "float16";
    case WeightFormat::kInt8:
      return "int8";
    case WeightFormat::kInt4:
      return "int4";
  }
  return "";
}

WeightScheme weight_scheme(const StateDict& tensors, const std::string& fqn, int64_t in_features) {
  if (is_expert_weight(fqn)) {  // all experts alike
    const std::string expert = fqn + "[0]";
    return weight_scheme(expert_tensors(tensors, fqn, 0, expert), expert, in_features);
  }
  const Tensor& weight = tensors.at(fqn + ".weight");
  if (const Tensor* scales_and_zeros = tensors.find(fqn + ".scales_and_zeros")) {
    WeightScheme scheme{WeightFormat::kInt4,
                        int4_groupsize(weight, *scales_and_zeros, in_features, fqn)};
    if (const Tensor* perm = tensors.find(fqn + ".perm")) {
      TORCH_CHECK(perm->scalar_type() == at::kInt &&
                      perm->sizes() == at::IntArrayRef{in_features} &&
                      at::equal(std::get<0>(perm->sort()), at::arange(in_features, at::kInt)),
                  "tensor '", fqn, ".perm' is no permutation of the layer's ", in_features,
                  " inputs");
      scheme.act_order = true;
    }
    return scheme;
  }
  if (weight.scalar_type() == at::kChar) {
    const Tensor& scales = tensors.at(fqn + ".scales");
    TORCH_CHECK(scales.dim() == 1 && scales.size(0) == weight.size(0), "tensor '", fqn,
                ".scales' has shape ", scales.sizes(), ", expected [", weight.size(0),
                "], one scale per row of the int8 weight");
    return {WeightFormat::kInt8};
  }
  return {floating_format(weight.scalar_type(), fqn + ".weight")};
}

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, WeightScheme scheme)
    : in_features(in_features), out_features(out_features), scheme(scheme) {
  switch (scheme.format) {
    case WeightFormat::kInt8:  // WeightOnlyInt8Linear
      weight = register_buffer("weight", at::empty({0}, at::kChar));
      scales = register_buffer("scales", at::empty({0}));
      break;
    case WeightFormat::kInt4:  // WeightOnlyInt4Linear
      weight = register_buffer("weight", at::empty({0}, at::kInt));
      scales_and_zeros = register_buffer("scales_and_zeros", at::empty({0}));
      if (scheme.act_order) perm = register_buffer("perm", at::empty({0}, at::kInt));
      break;
    default:  // nn.Linear
      weight = register_parameter("weight", at::empty({0}), /*requires_grad=*/false);
  }
}

Tensor LinearImpl::forward(const Tensor& x) {
  if (substitute) return substitute(x);
  if (!reference && has_kernel_form()) {
    if (Tensor y = ops::linear(x, *this); y.defined()) return y;
  }
  switch (scheme.format) {
    case WeightFormat::kInt8:
#ifdef GPTFAST_CUDA
      if (!reference && x.is_cuda() && x.scalar_type() != at::kFloat && ops::cuda::supports(*this))
        return at::linear(x, ops::cuda::widen_int8(weight, x.scalar_type())) * scales;
#endif
      return at::linear(x, weight.to(x.scalar_type())) * scales;
    case WeightFormat::kInt4:
#ifdef GPTFAST_CUDA
      // On a GPU the packed form is what there is; products run in x's dtype, as for the other
      // formats.
      if (!reference && packed_.defined() && packed_.is_cuda() && x.scalar_type() != at::kFloat) {
        return at::linear(x, scheme.act_order
                                 ? packed_.to(x.scalar_type())
                                 : ops::cuda::unpack_int4(view(), x.device(), x.scalar_type()));
      }
#endif
      return at::linear(x.to(at::kFloat), dequantize().to(x.device())).to(x.scalar_type());
    default:
      return at::linear(x, weight);
  }
}

bool LinearImpl::has_kernel_form() const {
  switch (scheme.format) {
    case WeightFormat::kInt8:
      return kernel_scales_.defined();
    case WeightFormat::kInt4:
      return packed_.defined();
    default:
      return weight.is_contiguous();
  }
}

Tensor LinearImpl::dequantize() const {
  switch (scheme.format) {
    case WeightFormat::kInt8:
      return weight.to(at::kFloat) * scales.to(at::kFloat).unsqueeze(1);
    case WeightFormat::kInt4: {
      const Tensor w = int4_weight().dequantize();
      return scheme.act_order ? w.index_select(1, perm.to(w.device()).argsort()) : w;
    }
    default:
      return weight.to(at::kFloat);
  }
}

Int4Weight LinearImpl::int4_weight() const {
  TORCH_CHECK(weight.is_contiguous(), "the int4 words of this layer [", out_features, ", ",
              in_features, "] are gone, only the kernels' form is left; load with --reference");
  return unpack_int4(weight, scales_and_zeros, in_features, scheme.layout);
}

Tensor Int4Weight::dequantize() const {
  const int64_t n = q.size(0);
  const Tensor nibbles = at::stack({q.bitwise_and(15), at::bitwise_right_shift(q, 4)}, /*dim=*/-1)
                             .view({n, -1})
                             .narrow(1, 0, in_features)
                             .to(at::kFloat);  // [N, K]
  const auto per_column = [&](const Tensor& per_group) {
    return per_group.to(at::kFloat)
        .repeat_interleave(groupsize, /*dim=*/1)
        .narrow(1, 0, in_features);
  };
  return (nibbles - 8) * per_column(scales) + per_column(zeros);
}

void LinearImpl::prepare(at::Device device) {
  if (scheme.format == WeightFormat::kInt4) {
    packed_ = scheme.act_order && !device.is_cpu()
                  ? dequantize().to(device, at::kBFloat16).contiguous()
                  : ops::pack_int4(int4_weight(), device);
    release_pages(weight);  // the packed form alone is read from here on
  }
  if (scheme.format == WeightFormat::kInt8)
    kernel_scales_ = scales.to(device, at::kFloat).contiguous();
}

void LinearImpl::drop_words() {
  if (scheme.format == WeightFormat::kInt4)  // the size stays: it counts as the model's
    weight.set_data(at::empty({1}, weight.options()).expand(weight.sizes()));
}

void LinearImpl::gather(const std::vector<LinearImpl*>& layers) {
  for (Tensor LinearImpl::*const form : {&LinearImpl::packed_, &LinearImpl::kernel_scales_}) {
    std::vector<Tensor> parts;
    parts.reserve(layers.size());
    for (const LinearImpl* layer : layers) parts.push_back(layer->*form);
    if (!parts[0].defined()) continue;
    const Tensor all = at::stack(parts);
    for (size_t i = 0; i < layers.size(); ++i) layers[i]->*form = all[static_cast<int64_t>(i)];
  }
}

void LinearImpl::copy_from(const LinearImpl& other) {
  scheme = other.scheme;
  weight.set_data(other.weight);
  if (other.scales.defined()) scales.set_data(other.scales);
  if (other.scales_and_zeros.defined()) scales_and_zeros.set_data(other.scales_and_zeros);
  if (other.packed_.defined()) packed_ = other.packed_.clone();
  kernel_scales_ = other.kernel_scales_;
  perm = other.perm;
}

int64_t LinearImpl::kernel_bytes() const {
  const int64_t n = out_features, k = in_features;
  switch (scheme.format) {
    case WeightFormat::kFloat32:
      return n * k * 4;
    case WeightFormat::kInt8:
      return n * (k + 4);
    case WeightFormat::kInt4:
      return n * (k / 2 + 4 * ((k + scheme.groupsize - 1) / scheme.groupsize));
    default:
      return n * k * 2;
  }
}

WeightView LinearImpl::view() const {
  const bool int8 = scheme.format == WeightFormat::kInt8,
             int4 = scheme.format == WeightFormat::kInt4;
  const bool on_cpu = !packed_.defined() || packed_.is_cpu();
  return {.format = scheme.act_order && !on_cpu ? WeightFormat::kBFloat16 : scheme.format,
          .n = out_features,
          .k = in_features,
          .groupsize = scheme.groupsize,
          .data = int4 ? packed_.const_data_ptr() : weight.const_data_ptr(),
          .scales = int8 ? kernel_scales_.const_data_ptr<float>() : nullptr,
          .perm = scheme.act_order && on_cpu ? perm.const_data_ptr<int32_t>() : nullptr};
}

}  // namespace gptfast
