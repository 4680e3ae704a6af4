// The op set on the CPU: Tensors become pointers here, and each stage is spread over the threads.
// Signatures and semantics of gptfast/ops.h.
#pragma once

#include "gptfast/ops.h"
#include "ops/cpu/kernels.h"

namespace gptfast::ops::cpu {

Tensor pack_int4(const Int4Weight& weight);
/// What the kernels read of a layer.
gptfast::cpu::Weight weight_of(const LinearImpl& linear);
/// As ops::linear.
Tensor linear(const Tensor& x, const LinearImpl& layer);
/// As ops::attention_prompt.
Tensor attention_prompt(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& input_pos, int64_t first_slot);
void embed(const StepRows& rows, const Tensor& table, Tensor& x);
void rms_qkv_rope_append(const StepRows& rows, const Tensor& x, const Tensor& norm_weight,
                         double eps, const LinearImpl& wqkv, const Tensor& freqs_cis, Tensor& q,
                         Tensor& k_cache, Tensor& v_cache);
void attention_decode(const StepRows& rows, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& partials, Tensor& y);
void o_proj_residual(int64_t rows, const Tensor& y, const LinearImpl& wo, Tensor& x);
void rms_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& w1, const LinearImpl& w3, Tensor& h);
void down_proj_residual(int64_t rows, const Tensor& h, const LinearImpl& w2, Tensor& x);
void moe_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& gate, const ConditionalFeedForwardImpl& cond_ffn,
                      StepExperts& experts, Tensor& h);
void moe_down_proj_residual(int64_t rows, const Tensor& h,
                            const ConditionalFeedForwardImpl& cond_ffn, const StepExperts& experts,
                            Tensor& x);
void rms_lm_head(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                 const LinearImpl& output, Tensor& logits);
void sample(const StepRows& rows, const Tensor& logits, const SamplingParams& params, Tensor& next);

}  // namespace gptfast::ops::cpu
