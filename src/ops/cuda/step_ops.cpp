#include "ops/cuda/step_ops.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <string_view>

#include "gptfast/model.h"
#include "ops/cuda/all_reduce.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/prompt.h"

namespace gptfast::ops::cuda {
namespace {

namespace gpu = gptfast::cuda;

/// Makes the tensors' device current for one op.
class Device {
 public:
  explicit Device(const Tensor& t) : guard_(t.device()) {}
  gpu::Launch launch() const {
    return {.stream = c10::cuda::getCurrentCUDAStream(),
            .pdl = overlap_kernels(guard_.current_device()),
            .clusters = at::cuda::getCurrentDeviceProperties()->major >= 9};
  }

 private:
  c10::cuda::CUDAGuard guard_;
};

gpu::Scalar scalar(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return gpu::Scalar::kBFloat16;
    case at::kHalf:
      return gpu::Scalar::kFloat16;
    default:
      return gpu::Scalar::kFloat32;
  }
}

gpu::Format format(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat16:
      return gpu::Format::kFloat16;
    case WeightFormat::kInt8:
      return gpu::Format::kInt8;
    case WeightFormat::kInt4:
      return gpu::Format::kInt4;
    default:
      return gpu::Format::kBFloat16;
  }
}

gpu::Weight weight(const LinearImpl& linear) {
  const WeightView view = linear.view();
  return {.format = format(view.format),
          .n = static_cast<int>(view.n),
          .k = static_cast<int>(view.k),
          .groupsize = static_cast<int>(view.groupsize),
          .data = view.data,
          .scales = view.scales};
}

/// The weights of all experts, of which `first` and `second` are the first two.
gpu::Weight expert_weight(const LinearImpl& first, const LinearImpl& second) {
  gpu::Weight of_all = weight(first);
  of_all.expert_bytes =
      static_cast<const uint8_t*>(second.view().data) - static_cast<const uint8_t*>(of_all.data);
  return of_all;
}

gpu::ExpertChoice choice(const StepExperts& experts) {
  return {.choices = static_cast<int>(experts.index.size(1)),
          .index = experts.index.data_ptr<int32_t>(),
          .share = experts.weight.data_ptr<float>()};
}

gpu::StageInput input(const Tensor& x, int64_t rows) {
  return {.x = x.const_data_ptr<float>(), .rows = static_cast<int>(rows)};
}

gpu::StageInput normed_input(const Tensor& x, int64_t rows, const Tensor& norm_weight, double eps) {
  gpu::StageInput in = input(x, rows);
  in.norm_weight = norm_weight.const_data_ptr();
  in.norm_type = scalar(norm_weight);
  in.eps = static_cast<float>(eps);
  return in;
}

gpu::RowMap row_map(const StepRows& rows) {
  return {.pos = rows.pos.const_data_ptr<int32_t>(),
          .slot = rows.slot.const_data_ptr<int32_t>(),
          .seq_len = static_cast<int>(rows.seq_len())};
}

gpu::Cache kv_cache(int64_t heads, const Tensor& k_cache, const Tensor& v_cache) {
  return {.k = k_cache.data_ptr(),
          .v = v_cache.data_ptr(),
          .type = scalar(k_cache),
          .heads = static_cast<int>(heads),
          .local_heads = static_cast<int>(k_cache.size(1)),
          .max_seq = static_cast<int>(k_cache.size(2)),
          .head_dim = static_cast<int>(k_cache.size(3))};
}

}  // namespace

bool overlap_kernels(at::Device device) {
  const char* value = std::getenv("GPTFAST_PDL");
  return at::cuda::getDeviceProperties(device.index())->major >= 9 &&
         (value == nullptr || std::string_view(value) != "0");
}

bool supports(const LinearImpl& linear) {
  const WeightFormat f = linear.scheme.format;
  const int64_t multiple = f == WeightFormat::kInt8 ? 16 : 8;  // 16-byte pieces of a row
  return f != WeightFormat::kFloat32 && linear.in_features % multiple == 0;
}

bool supports(const ConditionalFeedForwardImpl& cond_ffn, int64_t choices, at::Device device) {
  const FeedForwardImpl& expert = *cond_ffn.experts[0];
  return choices <= gpu::kMaxChoices && cond_ffn.experts.size() <= gpu::kMaxExperts &&
         at::cuda::getDeviceProperties(device.index())->major >= 9 && supports(*expert.w1) &&
         supports(*expert.w3) && supports(*expert.w2);
}

bool supports_attention(const Tensor& k_cache) {
  const int64_t head_dim = k_cache.size(3);
  return k_cache.scalar_type() != at::kFloat && head_dim % 8 == 0 && head_dim <= 256;
}

bool supports(TransformerImpl& model) {
  if (!model.device().is_cuda() || model.dtype() == at::kFloat) return false;
  for (const auto& module : model.modules()) {
    const auto* linear = module->as<LinearImpl>();
    if (linear != nullptr && !supports(*linear)) return false;
    const auto* cond_ffn = module->as<ConditionalFeedForwardImpl>();
    if (cond_ffn != nullptr &&
        !supports(*cond_ffn, model.config.num_activated_experts, model.device()))
      return false;
  }
  return model.config.head_dim % 8 == 0 && model.config.head_dim <= 256;
}

void check_device(at::Device device) {
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
  check_capability(properties.name, properties.major, properties.minor);
}

void check_capability(const char* name, int major, int minor) {
  TORCH_CHECK(major >= 8, "the GPU ", name, " has compute capability ", major, ".", minor,
              "; bfloat16 and the CUDA kernels need 8.0 or newer: use --device cpu");
}

void check_memory(at::Device device, int64_t bytes, const char* what) {
  const c10::cuda::CUDAGuard guard(device);
  c10::cuda::CUDACachingAllocator::emptyCache();  // what earlier tensors left reserved is free, too
  size_t free = 0;
  size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  TORCH_CHECK(static_cast<size_t>(bytes) <= free, what, " need ", bytes, " bytes on ", device,
              ", which has ", free, " of ", total,
              " free; use a quantized checkpoint, a shorter text or another device");
}

Tensor pack_int4(const Int4Weight& weight, at::Device device) {
  const Tensor q = weight.q.to(device).contiguous();
  const Tensor scales = weight.scales.to(device, at::kBFloat16).contiguous();
  const Tensor zeros = weight.zeros.to(device, at::kBFloat16).contiguous();
  const auto n = static_cast<int>(q.size(0)), k = static_cast<int>(weight.in_features),
             g = static_cast<int>(weight.groupsize);
  Tensor packed =
      at::empty({gpu::packed_int4_bytes(n, k, g)}, at::TensorOptions(device).dtype(at::kByte));
  const Device on(packed);
  C10_CUDA_CHECK(gpu::pack_int4(on.launch().stream, q.const_data_ptr<uint8_t>(),
                                scales.const_data_ptr(), zeros.const_data_ptr(), n, k, g,
                                packed.mutable_data_ptr<uint8_t>()));
  return packed;
}

Tensor unpack_int4(const WeightView& weight, at::Device device, at::ScalarType dtype) {
  Tensor out = at::empty({weight.n, weight.k}, at::TensorOptions(device).dtype(dtype));
  const Device on(out);
  C10_CUDA_CHECK(gpu::unpack_int4(on.launch().stream, static_cast<const uint8_t*>(weight.data),
                                  static_cast<int>(weight.n), static_cast<int>(weight.k),
                                  static_cast<int>(weight.groupsize), scalar(out),
                                  out.mutable_data_ptr()));
  return out;
}

Tensor widen_int8(const Tensor& values, at::ScalarType dtype) {
  Tensor out = at::empty(values.sizes(), values.options().dtype(dtype));
  const Device on(out);
  C10_CUDA_CHECK(gpu::widen_int8(on.launch().stream, values.const_data_ptr<int8_t>(),
                                 values.numel(), scalar(out), out.mutable_data_ptr()));
  return out;
}

bool supports_prompt(const Tensor& x, const Tensor& other) {
  return x.is_cuda() && x.scalar_type() != at::kFloat && x.scalar_type() == other.scalar_type() &&
         x.size(-1) % 8 == 0 && other.size(-1) % 8 == 0;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor rows = x.contiguous();
  Tensor out = at::empty_like(rows);
  const Device on(x);
  const int64_t dim = x.size(-1);
  C10_CUDA_CHECK(gpu::rms_norm(on.launch().stream, rows.const_data_ptr(), scalar(x),
                               rows.numel() / dim, static_cast<int>(dim), weight.const_data_ptr(),
                               static_cast<float>(eps), out.mutable_data_ptr()));
  return out;
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  const Tensor a = gate.contiguous(), b = up.contiguous();
  Tensor out = at::empty_like(a);
  const Device on(a);
  C10_CUDA_CHECK(gpu::silu_mul(on.launch().stream, a.const_data_ptr(), b.const_data_ptr(),
                               scalar(a), a.numel(), out.mutable_data_ptr()));
  return out;
}

Tensor rope_append(const Tensor& qkv, const Tensor& freqs_cis, const std::vector<Span>& spans,
                   KVCache& cache) {
  const Tensor from = qkv.contiguous();
  const int64_t B = qkv.size(0), S = qkv.size(1), Hkv = cache.k_cache.size(1),
                Dh = cache.k_cache.size(3), H = qkv.size(2) / Dh - 2 * Hkv;
  Tensor q = at::empty({B, S, H, Dh}, qkv.options());
  const Device on(qkv);
  for (const Span& span : spans) {
    C10_CUDA_CHECK(gpu::rope_append(on.launch().stream, from.const_data_ptr(),
                                    {.batch = static_cast<int>(B),
                                     .seq_len = static_cast<int>(S),
                                     .begin = static_cast<int>(span.begin),
                                     .length = static_cast<int>(span.length),
                                     .cache_pos = span.cache_pos.const_data_ptr<int64_t>(),
                                     .first_slot = static_cast<int>(span.first_slot)},
                                    kv_cache(H, cache.k_cache, cache.v_cache),
                                    freqs_cis.const_data_ptr<float>(), q.mutable_data_ptr()));
  }
  return q.transpose(1, 2);
}

void embed(const StepRows& rows, const Tensor& table, Tensor& x) {
  const Device on(x);
  C10_CUDA_CHECK(gpu::embed(on.launch(), rows.tokens.const_data_ptr<int32_t>(),
                            static_cast<int>(rows.rows()), table.const_data_ptr(), scalar(table),
                            static_cast<int>(table.size(0)), static_cast<int>(table.size(1)),
                            x.mutable_data_ptr<float>()));
}

void rms_qkv_rope_append(const StepRows& rows, const Tensor& x, const Tensor& norm_weight,
                         double eps, const LinearImpl& wqkv, const Tensor& freqs_cis, Tensor& q,
                         Tensor& k_cache, Tensor& v_cache) {
  const Device on(x);
  C10_CUDA_CHECK(gpu::qkv_stage(on.launch(), normed_input(x, rows.rows(), norm_weight, eps),
                                weight(wqkv), row_map(rows), kv_cache(q.size(1), k_cache, v_cache),
                                freqs_cis.const_data_ptr<float>(), q.mutable_data_ptr<float>()));
}

void attention_decode(const StepRows& rows, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& partials, Tensor& y) {
  const Device on(q);
  C10_CUDA_CHECK(gpu::attention(on.launch(), q.const_data_ptr<float>(),
                                kv_cache(q.size(1), k_cache, v_cache), row_map(rows),
                                static_cast<int>(rows.rows()), partials.mutable_data_ptr<float>(),
                                y.mutable_data_ptr<float>()));
}

void o_proj_residual(int64_t rows, const Tensor& y, const LinearImpl& wo, Tensor& x) {
  const Device on(x);
  C10_CUDA_CHECK(
      gpu::residual_stage(on.launch(), input(y, rows), weight(wo), x.mutable_data_ptr<float>()));
}

void add_product(int64_t rows, const Tensor& in, const LinearImpl& w, const gpu::Peers& peers,
                 Tensor& x) {
  const Device on(x);
  C10_CUDA_CHECK(gpu::residual_stage(on.launch(), input(in, rows), weight(w),
                                     x.mutable_data_ptr<float>(), peers));
}

void rms_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& w1, const LinearImpl& w3, Tensor& h) {
  gpu::Weight pair = weight(w1);
  const gpu::Weight up = weight(w3);
  pair.data2 = up.data;
  pair.scales2 = up.scales;
  const Device on(x);
  C10_CUDA_CHECK(gpu::gate_up_stage(on.launch(), normed_input(x, rows, norm_weight, eps), pair,
                                    h.mutable_data_ptr<float>()));
}

void down_proj_residual(int64_t rows, const Tensor& h, const LinearImpl& w2, Tensor& x) {
  o_proj_residual(rows, h, w2, x);
}

void moe_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& gate, const ConditionalFeedForwardImpl& cond_ffn,
                      StepExperts& experts, Tensor& h) {
  const FeedForwardImpl& first = *cond_ffn.experts.front();
  const FeedForwardImpl& second = *cond_ffn.experts[cond_ffn.experts.size() > 1 ? 1 : 0];
  gpu::Weight pair = expert_weight(*first.w1, *second.w1);
  const gpu::Weight up = weight(*first.w3);
  pair.data2 = up.data;
  pair.scales2 = up.scales;
  const Device on(x);
  C10_CUDA_CHECK(gpu::expert_gate_up_stage(on.launch(), normed_input(x, rows, norm_weight, eps),
                                           {.gate = gate.weight.const_data_ptr(),
                                            .type = scalar(gate.weight),
                                            .experts = static_cast<int>(gate.out_features)},
                                           pair, choice(experts), h.mutable_data_ptr<float>()));
}

void moe_down_proj_residual(int64_t rows, const Tensor& h,
                            const ConditionalFeedForwardImpl& cond_ffn, const StepExperts& experts,
                            Tensor& x) {
  const FeedForwardImpl& first = *cond_ffn.experts.front();
  const FeedForwardImpl& second = *cond_ffn.experts[cond_ffn.experts.size() > 1 ? 1 : 0];
  const Device on(x);
  C10_CUDA_CHECK(gpu::expert_down_stage(on.launch(), input(h, rows),
                                        expert_weight(*first.w2, *second.w2), choice(experts),
                                        x.mutable_data_ptr<float>()));
}

void rms_lm_head(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                 const LinearImpl& output, Tensor& logits) {
  const Device on(x);
  C10_CUDA_CHECK(gpu::head_stage(on.launch(), normed_input(x, rows, norm_weight, eps),
                                 weight(output), logits.mutable_data_ptr<float>()));
}

void sample(const StepRows& rows, const Tensor& logits, const SamplingParams& params,
            Tensor& next) {
  const Device on(logits);
  const gpu::SampleArgs args{.logits = logits.const_data_ptr<float>(),
                             .vocab = static_cast<int>(logits.size(1)),
                             .seq_len = static_cast<int>(rows.seq_len()),
                             .pos = rows.pos.const_data_ptr<int32_t>(),
                             .temperature = params.temperature.const_data_ptr<float>(),
                             .top_k = params.top_k.const_data_ptr<int32_t>(),
                             .seed = params.seed.const_data_ptr<int64_t>(),
                             .next = next.mutable_data_ptr<int32_t>()};
  C10_CUDA_CHECK(gpu::sample(on.launch(), args, static_cast<int>(rows.pos.numel())));
}

}  // namespace gptfast::ops::cuda
