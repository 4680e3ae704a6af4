// The op set on CUDA: Tensors become pointers here. Signatures and semantics of gptfast/ops.h;
// everything is enqueued on the current stream of the tensors' device.
#pragma once

#include "gptfast/ops.h"

namespace gptfast {
struct TransformerImpl;
namespace cuda {
struct Peers;
}
}  // namespace gptfast

namespace gptfast::ops::cuda {

/// True if kernels exist for this layer: every format but float32, k a multiple of 8 (int8: 16).
bool supports(const LinearImpl& linear);
/// True if kernels exist for these experts, at most 256 of which a row chooses 1 to 4: they need
/// compute capability 9.0, whose blocks can share memory.
bool supports(const ConditionalFeedForwardImpl& cond_ffn, int64_t choices, at::Device device);
/// True if the attention kernel takes this cache: bfloat16 or float16, head_dim a multiple of 8 up
/// to 256.
bool supports_attention(const Tensor& k_cache);
/// True if every op of a step of this model has a kernel: then a step never touches the host and
/// can be captured.
bool supports(TransformerImpl& model);

/// True if kernels of a step may start while their predecessor runs: compute capability 9.0 or
/// newer, and not GPTFAST_PDL=0 in the environment. Results are the same; the switch is for tests
/// and bug reports.
bool overlap_kernels(at::Device device);
/// Throws unless the kernels can run on `device` (compute capability 8.0 or newer).
void check_device(at::Device device);
/// check_device() of a GPU called `name` with compute capability major.minor.
void check_capability(const char* name, int major, int minor);
/// Throws with needed and free bytes unless `bytes` more fit the memory of `device`. `what`: "the
/// weights".
void check_memory(at::Device device, int64_t bytes, const char* what);

Tensor pack_int4(const Int4Weight& weight, at::Device device);
/// [n, k] in `dtype` (bfloat16 or float16) from what pack_int4 made.
Tensor unpack_int4(const WeightView& weight, at::Device device, at::ScalarType dtype);
/// An int8 tensor whose rows are a multiple of 16 in `dtype` (bfloat16 or float16).
Tensor widen_int8(const Tensor& values, at::ScalarType dtype);
/// True if the kernels of prompts take these: on a GPU, of one 16-bit type, rows of a multiple
/// of 8.
bool supports_prompt(const Tensor& x, const Tensor& other);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& gate, const Tensor& up);
Tensor rope_append(const Tensor& qkv, const Tensor& freqs_cis, const std::vector<Span>& spans,
                   KVCache& cache);
void embed(const StepRows& rows, const Tensor& table, Tensor& x);
void rms_qkv_rope_append(const StepRows& rows, const Tensor& x, const Tensor& norm_weight,
                         double eps, const LinearImpl& wqkv, const Tensor& freqs_cis, Tensor& q,
                         Tensor& k_cache, Tensor& v_cache);
void attention_decode(const StepRows& rows, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& partials, Tensor& y);
void o_proj_residual(int64_t rows, const Tensor& y, const LinearImpl& wo, Tensor& x);
/// As TensorParallel::add_product, on GPUs that write into one another's memory.
void add_product(int64_t rows, const Tensor& in, const LinearImpl& w,
                 const gptfast::cuda::Peers& peers, Tensor& x);
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

}  // namespace gptfast::ops::cuda
