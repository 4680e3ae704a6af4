// The op set of one decode step: one declaration each. src/ops/reference.cpp defines what is
// correct in plain ATen, src/ops/cpu and src/ops/cuda hold the kernels, src/ops/dispatch.cpp alone
// decides which one runs.
//
// Legend as in model.h. A step has M = B * S <= kMaxStepRows rows; row r = b * S + s is token
// tokens[b, s] at position pos[b] + s of cache slot slot[b]. A row's result depends only on its own
// token, position and cache, never on M, on other rows or on the allocated length: K is summed in a
// fixed order and the cache is split by the row's own position, merged in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gptfast/config.h"
#include "gptfast/linear.h"
#include "gptfast/sampling.h"

namespace gptfast {

struct ConditionalFeedForwardImpl;  // the experts of a layer; gptfast/model.h
struct KVCache;
struct Span;

constexpr int64_t kMaxStepRows = 8;  ///< prompts of up to 8 tokens, verification, batches
/// Positions that a partial softmax covers: on CPUs from one multiple to the next; GPUs cut a row's
/// into at most position / kAttentionSplit + 1 equal parts.
constexpr int64_t kAttentionSplit = 256;

/// Where the rows of a step stand. All tensors are int32 on the model's device, contiguous.
struct StepRows {
  Tensor tokens;                                      ///< [B, S]
  Tensor pos;                                         ///< [B], position of tokens[b, 0]
  Tensor slot;                                        ///< [B]
  int64_t rows() const { return tokens.numel(); }     ///< M
  int64_t seq_len() const { return tokens.size(1); }  ///< S
};

/// The experts that each row of a step chose, of A activated ones; empty in a dense model.
struct StepExperts {
  Tensor index;   ///< [kMaxStepRows, A] int32
  Tensor weight;  ///< [kMaxStepRows, A] float32, of the experts' outputs
  Tensor scores;  ///< [kMaxStepRows, E] float32, the router's softmax; scratch
};

/// Activations of a step, allocated once. Kernels keep them in float32 on every device; the KV
/// cache has the model's dtype.
struct StepBuffers {
  Tensor x;         ///< [kMaxStepRows, D] residual stream
  Tensor q;         ///< [kMaxStepRows, H, Dh] after RoPE
  Tensor y;         ///< [kMaxStepRows, H * Dh] attention output
  Tensor h;         ///< [kMaxStepRows, I], with experts [kMaxStepRows * A, I]: silu(w1 x) * (w3 x)
  Tensor logits;    ///< [kMaxStepRows, V]
  Tensor partials;  ///< [kMaxStepRows, H, ceil(T / kAttentionSplit), Dh + 2] partial attention:
                    ///< output, max, sum; on CUDA one split more, zero before the first step
  Tensor next;      ///< [kMaxStepRows] int32 sampled tokens
  StepExperts experts;
};

namespace ops {

/// The kernels that run for `device`: "cuda", "avx512_bf16", "avx512", "avx2", "portable" or
/// "reference". GPTFAST_CPU=one of the last five in the environment caps the CPU path (for tests
/// and bug reports).
const char* path(at::Device device, at::ScalarType dtype = at::kBFloat16);

/// Allocates the buffers of a model on `device` for caches of `max_seq_length` positions.
StepBuffers make_step_buffers(const ModelArgs& config, int64_t max_seq_length, at::Device device);

/// The layout that the kernels of `device` read; a 1-D uint8 tensor on that device.
Tensor pack_int4(const Int4Weight& weight, at::Device device);

/// x W^T [..., N] in x's dtype for any number of rows, float32 products: the matrix kernels behind
/// Linear::forward. Undefined where the device has none; plain ATen serves then.
Tensor linear(const Tensor& x /* [..., K] */, const LinearImpl& layer);

/// Attention of a prompt's tokens, whose keys and values are in the caches [slots, Hkv, T, Dh]
/// already: row b reads slot first_slot + b, token s its positions 0 ... input_pos[s]. Undefined
/// where the device has no kernel for these dtypes and sizes; plain ATen serves then.
Tensor attention_prompt(const Tensor& q /* [B, H, S, Dh] */, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& input_pos /* [S] int64 */,
                        int64_t first_slot);  // [B, S, H * Dh]

/// What lies between the products of a prompt's forward pass, in the types and with the roundings
/// of plain ATen. Undefined where the device has no kernel for these dtypes and sizes; plain ATen
/// serves then.
Tensor rms_norm(const Tensor& x /* [..., D] */, const Tensor& weight /* [D] */, double eps);
/// silu(gate) * up, of the same shape.
Tensor silu_mul(const Tensor& gate, const Tensor& up);
/// Rotates queries and keys, writes keys and values to the cache where each span's tokens belong,
/// and returns the queries [B, H, S, Dh].
Tensor rope_append(const Tensor& qkv /* [B, S, (H + 2 Hkv) Dh] */,
                   const Tensor& freqs_cis /* [S, Dh/2, 2] float32 */,
                   const std::vector<Span>& spans, KVCache& cache);

/// x[r] = table[tokens[r]]. An id outside the table gives NaN: ids are checked on the host, this
/// keeps memory safe.
void embed(const StepRows& rows, const Tensor& table /* [V, D] */, Tensor& x /* [M, D] */);

/// qkv = rms_norm(x) wqkv^T; q and k rotated (interleaved pairs); k and v written to the cache at
/// the rows' positions.
void rms_qkv_rope_append(const StepRows& rows, const Tensor& x /* [M, D] */,
                         const Tensor& norm_weight /* [D] */, double eps, const LinearImpl& wqkv,
                         const Tensor& freqs_cis /* [T, Dh/2, 2] float32 */,
                         Tensor& q /* [M, H, Dh] */, Tensor& k_cache /* [slots, Hkv, T, Dh] */,
                         Tensor& v_cache);

/// y = softmax(q k^T / sqrt(Dh)) v over cache positions 0..pos of each row.
void attention_decode(const StepRows& rows, const Tensor& q /* [M, H, Dh] */, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& partials, Tensor& y /* [M, H * Dh] */);

/// x += y wo^T.
void o_proj_residual(int64_t rows, const Tensor& y /* [M, H * Dh] */, const LinearImpl& wo,
                     Tensor& x /* [M, D] */);

/// h = silu(n w1^T) * (n w3^T), n = rms_norm(x).
void rms_gate_up_silu(int64_t rows, const Tensor& x /* [M, D] */, const Tensor& norm_weight,
                      double eps, const LinearImpl& w1, const LinearImpl& w3,
                      Tensor& h /* [M, I] */);

/// x += h w2^T.
void down_proj_residual(int64_t rows, const Tensor& h /* [M, I] */, const LinearImpl& w2,
                        Tensor& x /* [M, D] */);

/// Chooses each row's experts: softmax of rms_norm(x) gate^T over all E, the A largest of it (ties:
/// the lower index), divided by their sum. Then h[r, a] = silu(n w1^T) * (n w3^T) with the weights
/// of expert index[r, a], n = rms_norm(x[r]). Reads the weights of chosen experts only; the CPU
/// once for all rows that chose them.
void moe_gate_up_silu(int64_t rows, const Tensor& x /* [M, D] */, const Tensor& norm_weight,
                      double eps, const LinearImpl& gate,
                      const ConditionalFeedForwardImpl& cond_ffn, StepExperts& experts,
                      Tensor& h /* [M * A, I] */);

/// x[r] += weight[r, a] * (h[r, a] w2^T) over a row's experts, in an order that depends on them
/// alone.
void moe_down_proj_residual(int64_t rows, const Tensor& h /* [M * A, I] */,
                            const ConditionalFeedForwardImpl& cond_ffn, const StepExperts& experts,
                            Tensor& x /* [M, D] */);

/// logits = rms_norm(x) output^T.
void rms_lm_head(int64_t rows, const Tensor& x /* [M, D] */, const Tensor& norm_weight, double eps,
                 const LinearImpl& output, Tensor& logits /* [M, V] */);

/// next[b] from the last row of each b; semantics of gptfast::sample.
void sample(const StepRows& rows, const Tensor& logits /* [M, V] */, const SamplingParams& params,
            Tensor& next /* [B] */);

}  // namespace ops
}  // namespace gptfast
