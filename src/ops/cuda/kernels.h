// The CUDA kernels of one decode step as functions of pointers and sizes. Shapes: legend in
// model.h; rows of a step: ops.h. Every function enqueues on `Launch::stream` and returns the
// launch's error. All pointers are device pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gptfast::cuda {

enum class Scalar : int { kFloat32, kBFloat16, kFloat16 };
enum class Format : int { kBFloat16, kFloat16, kInt8, kInt4 };

/// How to enqueue: `pdl` lets a kernel start while its predecessor runs (device.cuh); results do
/// not depend on it.
struct Launch {
  cudaStream_t stream = nullptr;
  bool pdl = true;
  bool clusters = false;  ///< the device has thread block clusters (sm_90)
};

/// One linear layer as linear.h's WeightView lays it out. A gated pair has its second weight in
/// data2, scales2.
struct Weight {
  Format format = Format::kBFloat16;
  int n = 0;
  int k = 0;
  int groupsize = 0;
  const void* data = nullptr;
  const float* scales = nullptr;
  const void* data2 = nullptr;
  const float* scales2 = nullptr;
  int64_t expert_bytes = 0;  ///< from one expert's data to the next; its scales are n apart
};

/// int4 groups that the kernels work in: larger groups than 128 are stored as several with equal
/// scale and zero.
inline int packed_groupsize(int groupsize) {
  return groupsize > 128 ? 128 : groupsize;
}

/// Bytes of an int4 weight [n, k] in the kernels' layout (formats.cuh).
int64_t packed_int4_bytes(int n, int k, int groupsize);
/// q [n, ceil(k/2)] uint8 with the even column in the low nibble; scales, zeros [n,
/// ceil(k/groupsize)] bfloat16.
cudaError_t pack_int4(cudaStream_t stream, const uint8_t* q, const void* scales, const void* zeros,
                      int n, int k, int groupsize, uint8_t* packed);

/// Input of a linear stage: x [rows, k] float32, optionally RMS-normalised.
struct StageInput {
  const float* x = nullptr;
  int rows = 0;
  const void* norm_weight = nullptr;  ///< [k]; null: no norm
  Scalar norm_type = Scalar::kBFloat16;
  float eps = 0;
};

/// Where the rows of a step stand, and the cache of a layer.
struct RowMap {
  const int32_t* pos = nullptr;   ///< [B]
  const int32_t* slot = nullptr;  ///< [B]
  int seq_len = 1;                ///< S
};
struct Cache {
  void* k = nullptr;  ///< [slots, Hkv, T, Dh]
  void* v = nullptr;
  Scalar type = Scalar::kBFloat16;
  int heads = 0;        ///< H
  int local_heads = 0;  ///< Hkv
  int max_seq = 0;      ///< T
  int head_dim = 0;     ///< Dh
};

/// x [rows, dim] = table[tokens]; an id outside the table gives NaN. Waits for everything before
/// it: the first kernel of a step.
cudaError_t embed(const Launch& launch, const int32_t* tokens, int rows, const void* table,
                  Scalar type, int vocab, int dim, float* x);
/// q [rows, H * Dh] = rotated queries; rotated keys and values go to the cache. freqs_cis [T, Dh/2,
/// 2].
cudaError_t qkv_stage(const Launch& launch, const StageInput& in, const Weight& wqkv,
                      const RowMap& map, const Cache& cache, const float* freqs_cis, float* q);
/// y [rows, H * Dh] = softmax(q k^T / sqrt(Dh)) v over positions 0 .. pos of each row. Dh is a
/// multiple of 8 and at most 256; the cache is bfloat16 or float16. partials [rows, H, ceil(T /
/// 256) + 1, Dh + 2], all zero before the first step.
cudaError_t attention(const Launch& launch, const float* q, const Cache& cache, const RowMap& map,
                      int rows, float* partials, float* y);
/// x [rows, n] += in w^T.
cudaError_t residual_stage(const Launch& launch, const StageInput& in, const Weight& w, float* x);
/// h [rows, n] = silu(in w1^T) * (in w3^T); w.data is w1, w.data2 is w3.
cudaError_t gate_up_stage(const Launch& launch, const StageInput& in, const Weight& w, float* h);
/// The router's choice for each row of a step: `choices` of the experts, at most kMaxChoices.
struct ExpertChoice {
  int choices = 0;           ///< A
  int32_t* index = nullptr;  ///< [rows, A] different experts
  float* share = nullptr;    ///< [rows, A] of the experts' outputs
};
constexpr int kMaxChoices = 4;

/// The router: index, share [rows, choices] of `chosen` become the largest of softmax(in gate^T),
/// of equal ones that of the lower index first, and each divided by their sum.
struct Router {
  const void* gate = nullptr;  ///< [experts, k] bfloat16 or float16
  Scalar type = Scalar::kBFloat16;
  int experts = 0;  ///< at most kMaxExperts
};
constexpr int kMaxExperts = 256;
/// Chooses, then h [rows * A, n]: row r * A + a is gate_up_stage of row r with expert index[r, a],
/// whose weights lie index * w.expert_bytes after those of expert 0.
cudaError_t expert_gate_up_stage(const Launch& launch, const StageInput& in, const Router& router,
                                 const Weight& w, const ExpertChoice& chosen, float* h);
/// x [rows, n] += sum over a of share[r, a] * (h [rows * A, k] of expert index[r, a] w^T), in the
/// order of a. It comes right after expert_gate_up_stage, on devices with clusters.
cudaError_t expert_down_stage(const Launch& launch, const StageInput& h, const Weight& w,
                              const ExpertChoice& chosen, float* x);
/// logits [rows, n] = in w^T.
cudaError_t head_stage(const Launch& launch, const StageInput& in, const Weight& w, float* logits);

/// Settings per batch entry as sampling.h's SamplingParams.
struct SampleArgs {
  const float* logits = nullptr;  ///< [B * S, vocab]
  int vocab = 0;
  int seq_len = 1;  ///< S
  const int32_t* pos = nullptr;
  const float* temperature = nullptr;
  const int32_t* top_k = nullptr;
  const int64_t* seed = nullptr;
  int32_t* next = nullptr;  ///< [B]
};
/// next[b] from the last row of each b, by the rules of sampling.h.
cudaError_t sample(const Launch& launch, const SampleArgs& args, int batch_size);

/// What a captured step does after sampling: feed the tokens, move on, and tell the host.
struct AdvanceArgs {
  const int32_t* next = nullptr;  ///< [rows]
  int rows = 0;                   ///< at most 32
  int32_t* tokens = nullptr;      ///< [rows] = next
  int32_t* pos = nullptr;         ///< [rows] += 1
  int32_t* step = nullptr;        ///< += 1
  int32_t* history =
      nullptr;  ///< [history_steps, rows] host memory: row step % history_steps = next
  int history_steps = 0;
};
cudaError_t advance(const Launch& launch, const AdvanceArgs& args);

/// out [n, k] in `type` (bfloat16 or float16) = the values of a packed int4 weight.
cudaError_t unpack_int4(cudaStream_t stream, const uint8_t* packed, int n, int k, int groupsize,
                        Scalar type, void* out);

}  // namespace gptfast::cuda
