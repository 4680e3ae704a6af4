// The only place that decides which kernels run.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "gptfast/model.h"
#include "ops/cpu/step_ops.h"
#include "ops/reference.h"
#ifdef GPTFAST_CUDA
#include "ops/cuda/step_ops.h"
#endif

namespace gptfast::ops {

namespace {

/// GPTFAST_CPU=reference: plain ATen instead of the CPU kernels.
bool cpu_reference() {
  static const bool forced = [] {
    const char* cap = std::getenv("GPTFAST_CPU");
    return cap != nullptr && std::string_view(cap) == "reference";
  }();
  return forced;
}

/// True if the CPU kernels run for tensors of the device of `t`.
bool on_cpu(const Tensor& t) {
  return t.is_cpu() && !cpu_reference();
}

/// True if the CUDA kernels run: the tensor is on a GPU and `linears` have formats and sizes that
/// kernels exist for.
template <typename... Linears>
bool on_cuda([[maybe_unused]] const Tensor& t, [[maybe_unused]] const Linears&... linears) {
#ifdef GPTFAST_CUDA
  return t.is_cuda() && (cuda::supports(linears) && ...);
#else
  return false;
#endif
}

}  // namespace

const char* path(at::Device device, [[maybe_unused]] at::ScalarType dtype) {
#ifdef GPTFAST_CUDA
  if (device.is_cuda() && dtype != at::kFloat) return "cuda";
#endif
  return device.is_cpu() && !cpu_reference() ? gptfast::cpu::path() : "reference";
}

StepBuffers make_step_buffers(const ModelArgs& config, int64_t max_seq_length, at::Device device) {
  const auto f32 = at::TensorOptions(device).dtype(at::kFloat);
  const int64_t M = kMaxStepRows, H = config.n_head, Dh = config.head_dim,
                A = config.num_activated_experts;
  int64_t splits = (max_seq_length + kAttentionSplit - 1) / kAttentionSplit;
  if (device.is_cuda()) ++splits;  // its kernels count finished splits in the last entry
  return {.x = at::empty({M, config.dim}, f32),
          .q = at::empty({M, H, Dh}, f32),
          .y = at::empty({M, H * Dh}, f32),
          .h = at::empty({M * std::max<int64_t>(A, 1), config.intermediate_size}, f32),
          .logits = at::empty({M, config.vocab_size}, f32),
          .partials = at::zeros({M, H, splits, Dh + 2}, f32),
          .next = at::empty({M}, f32.dtype(at::kInt)),
          .experts = {.index = at::empty({M, A}, f32.dtype(at::kInt)),
                      .weight = at::empty({M, A}, f32),
                      .scores = at::empty({M, config.num_experts}, f32)}};
}

Tensor pack_int4(const Int4Weight& weight, at::Device device) {
  if (device.is_cpu()) return cpu::pack_int4(weight);
#ifdef GPTFAST_CUDA
  return cuda::pack_int4(weight, device);
#else
  TORCH_CHECK(false, "this build has no CUDA kernels: --device ", device, " is not possible");
#endif
}

Tensor linear(const Tensor& x, const LinearImpl& layer) {
  return on_cpu(x) ? cpu::linear(x, layer) : Tensor();
}

Tensor attention_prompt(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& input_pos, int64_t first_slot) {
  if (!on_cpu(q)) return {};
  return cpu::attention_prompt(q, k_cache, v_cache, input_pos, first_slot);
}

Tensor rms_norm([[maybe_unused]] const Tensor& x, [[maybe_unused]] const Tensor& weight,
                [[maybe_unused]] double eps) {
#ifdef GPTFAST_CUDA
  if (cuda::supports_prompt(x, weight)) return cuda::rms_norm(x, weight, eps);
#endif
  return {};
}

Tensor silu_mul([[maybe_unused]] const Tensor& gate, [[maybe_unused]] const Tensor& up) {
#ifdef GPTFAST_CUDA
  if (cuda::supports_prompt(gate, up)) return cuda::silu_mul(gate, up);
#endif
  return {};
}

Tensor rope_append([[maybe_unused]] const Tensor& qkv, [[maybe_unused]] const Tensor& freqs_cis,
                   [[maybe_unused]] const std::vector<Span>& spans,
                   [[maybe_unused]] KVCache& cache) {
#ifdef GPTFAST_CUDA
  if (cuda::supports_prompt(qkv, cache.k_cache))
    return cuda::rope_append(qkv, freqs_cis, spans, cache);
#endif
  return {};
}

void embed(const StepRows& rows, const Tensor& table, Tensor& x) {
  RECORD_FUNCTION("gptfast::embed", {});
  if (on_cpu(table)) return cpu::embed(rows, table, x);
#ifdef GPTFAST_CUDA
  if (on_cuda(table)) return cuda::embed(rows, table, x);
#endif
  reference::embed(rows, table, x);
}

void rms_qkv_rope_append(const StepRows& rows, const Tensor& x, const Tensor& norm_weight,
                         double eps, const LinearImpl& wqkv, const Tensor& freqs_cis, Tensor& q,
                         Tensor& k_cache, Tensor& v_cache) {
  RECORD_FUNCTION("gptfast::rms_qkv_rope_append", {});
  if (on_cpu(x))
    return cpu::rms_qkv_rope_append(rows, x, norm_weight, eps, wqkv, freqs_cis, q, k_cache,
                                    v_cache);
#ifdef GPTFAST_CUDA
  if (on_cuda(x, wqkv) && cuda::supports_attention(k_cache))
    return cuda::rms_qkv_rope_append(rows, x, norm_weight, eps, wqkv, freqs_cis, q, k_cache,
                                     v_cache);
#endif
  reference::rms_qkv_rope_append(rows, x, norm_weight, eps, wqkv, freqs_cis, q, k_cache, v_cache);
}

void attention_decode(const StepRows& rows, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& partials, Tensor& y) {
  RECORD_FUNCTION("gptfast::attention_decode", {});
  if (on_cpu(q)) return cpu::attention_decode(rows, q, k_cache, v_cache, partials, y);
#ifdef GPTFAST_CUDA
  if (on_cuda(q) && cuda::supports_attention(k_cache))
    return cuda::attention_decode(rows, q, k_cache, v_cache, partials, y);
#endif
  reference::attention_decode(rows, q, k_cache, v_cache, y);
}

void o_proj_residual(int64_t rows, const Tensor& y, const LinearImpl& wo, Tensor& x) {
  RECORD_FUNCTION("gptfast::o_proj_residual", {});
  if (on_cpu(x)) return cpu::o_proj_residual(rows, y, wo, x);
#ifdef GPTFAST_CUDA
  if (on_cuda(x, wo)) return cuda::o_proj_residual(rows, y, wo, x);
#endif
  reference::o_proj_residual(rows, y, wo, x);
}

void rms_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& w1, const LinearImpl& w3, Tensor& h) {
  RECORD_FUNCTION("gptfast::rms_gate_up_silu", {});
  if (on_cpu(x)) return cpu::rms_gate_up_silu(rows, x, norm_weight, eps, w1, w3, h);
#ifdef GPTFAST_CUDA
  if (on_cuda(x, w1, w3)) return cuda::rms_gate_up_silu(rows, x, norm_weight, eps, w1, w3, h);
#endif
  reference::rms_gate_up_silu(rows, x, norm_weight, eps, w1, w3, h);
}

void down_proj_residual(int64_t rows, const Tensor& h, const LinearImpl& w2, Tensor& x) {
  RECORD_FUNCTION("gptfast::down_proj_residual", {});
  if (on_cpu(x)) return cpu::down_proj_residual(rows, h, w2, x);
#ifdef GPTFAST_CUDA
  if (on_cuda(x, w2)) return cuda::down_proj_residual(rows, h, w2, x);
#endif
  reference::down_proj_residual(rows, h, w2, x);
}

void moe_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& gate, const ConditionalFeedForwardImpl& cond_ffn,
                      StepExperts& experts, Tensor& h) {
  RECORD_FUNCTION("gptfast::moe_gate_up_silu", {});
  if (on_cpu(x))
    return cpu::moe_gate_up_silu(rows, x, norm_weight, eps, gate, cond_ffn, experts, h);
#ifdef GPTFAST_CUDA
  if (on_cuda(x, gate) && cuda::supports(cond_ffn, experts.index.size(1), x.device()))
    return cuda::moe_gate_up_silu(rows, x, norm_weight, eps, gate, cond_ffn, experts, h);
#endif
  reference::moe_gate_up_silu(rows, x, norm_weight, eps, gate, cond_ffn, experts, h);
}

void moe_down_proj_residual(int64_t rows, const Tensor& h,
                            const ConditionalFeedForwardImpl& cond_ffn, const StepExperts& experts,
                            Tensor& x) {
  RECORD_FUNCTION("gptfast::moe_down_proj_residual", {});
  if (on_cpu(x)) return cpu::moe_down_proj_residual(rows, h, cond_ffn, experts, x);
#ifdef GPTFAST_CUDA
  if (on_cuda(x) && cuda::supports(cond_ffn, experts.index.size(1), x.device()))
    return cuda::moe_down_proj_residual(rows, h, cond_ffn, experts, x);
#endif
  reference::moe_down_proj_residual(rows, h, cond_ffn, experts, x);
}

void rms_lm_head(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                 const LinearImpl& output, Tensor& logits) {
  RECORD_FUNCTION("gptfast::rms_lm_head", {});
  if (on_cpu(x)) return cpu::rms_lm_head(rows, x, norm_weight, eps, output, logits);
#ifdef GPTFAST_CUDA
  if (on_cuda(x, output)) return cuda::rms_lm_head(rows, x, norm_weight, eps, output, logits);
#endif
  reference::rms_lm_head(rows, x, norm_weight, eps, output, logits);
}

void sample(const StepRows& rows, const Tensor& logits, const SamplingParams& params,
            Tensor& next) {
  RECORD_FUNCTION("gptfast::sample", {});
  if (on_cpu(logits)) return cpu::sample(rows, logits, params, next);
#ifdef GPTFAST_CUDA
  if (on_cuda(logits)) return cuda::sample(rows, logits, params, next);
#endif
  reference::sample(rows, logits, params, next);
}

}  // namespace gptfast::ops
