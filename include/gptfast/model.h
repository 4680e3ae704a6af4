// The model, in the order and with the names of gpt-fast's model.py.
//
// Shapes: B batch, S query length, T cache length, D dim, H heads, Hkv key/value heads, Dh head
// dim, I intermediate, V vocab, E experts, A experts that a token activates,
//         M = B * S rows of a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gptfast/config.h"
#include "gptfast/linear.h"
#include "gptfast/ops.h"

namespace gptfast {

class DecodeGraph;
class SpeculativeGraph;
class StateDict;
class TensorParallel;

/// Keys and values of one layer. A slot is one sequence.
struct KVCache {
  Tensor k_cache;  ///< [slots, Hkv, T, Dh]
  Tensor v_cache;  ///< [slots, Hkv, T, Dh]

  /// Writes k, v [B, Hkv, S, Dh] at `cache_pos` [S] of slots first_slot .. first_slot + B.
  void update(const Tensor& cache_pos, const Tensor& k, const Tensor& v, int64_t first_slot);
};

/// Root mean square norm, computed in float32 (RMSNorm of model.py).
struct RMSNormImpl : torch::nn::Module {
  RMSNormImpl(int64_t dim, double eps);  ///< weights are ones until they are loaded
  Tensor forward(const Tensor& x);       ///< [..., D] -> [..., D], in x's dtype times the weight's

  double eps;
  bool reference = false;  ///< plain ATen whatever kernels exist
  Tensor weight;           // [D]
};
TORCH_MODULE(RMSNorm);

/// The token table. (torch::nn::Embedding would fill it with random numbers first.)
struct EmbeddingImpl : torch::nn::Module {
  EmbeddingImpl(int64_t vocab_size,
                int64_t dim);         ///< the weight is uninitialised until it is loaded
  Tensor forward(const Tensor& idx);  ///< [B, S] int32 or int64 -> [B, S, D]

  Tensor weight;  // [V, D]
};
TORCH_MODULE(Embedding);

/// Texts that begin alike, for a forward pass that computes the beginning once: branches that each
/// continue the trunk as if the others were not there. A plain text is a trunk.
struct TokenTree {
  std::vector<int32_t> trunk;
  std::vector<std::vector<int32_t>> branches = {};

  int64_t size() const;  ///< tokens
};

/// Neighbouring queries of a forward pass that attend to the same slots.
struct Span {
  int64_t begin, length;  // of the S queries
  Tensor cache_pos;       // [length] int64, where their keys and values go
  Tensor mask;   // [1, 1, length, used] bool; undefined when the queries are plainly causal from
                 // position 0, or one that sees everything
  int64_t used;  // cache positions to attend to: max(cache_pos) + 1
  int64_t first_slot;
  bool causal;  // each query sees the positions up to its own, with a mask or without
};

/// What forward() shares between layers.
struct ForwardContext {
  Tensor freqs_cis;         // [S, Dh/2, 2] float32
  std::vector<Span> spans;  // one for a prompt, one for each of several texts
  TensorParallel* tp;       // adds up the blocks' parts of the ranks; nullptr on one device
};

/// Grouped-query attention with a KV cache (Attention of model.py). In this and the modules below
/// `fqn` is the module's own name, "layers.0.attention", by which it asks for its linears' schemes.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl(const ModelArgs& config, const SchemeOf& scheme, const std::string& fqn);
  /// [B, S, D] -> [B, S, D]; appends to the cache. With ranks, this one's part of the sum.
  Tensor forward(const Tensor& x, const ForwardContext& context);
  /// The first half of forward(): the queries [B, H, S, Dh]; keys and values go to the cache.
  Tensor project(const Tensor& x, const ForwardContext& context);
  /// The second half: [B, H, S, Dh] -> [B, S, D].
  Tensor attend(const Tensor& q, const ForwardContext& context);
  /// Attention of the queries of one span, [B, H, length, Dh] -> [B, length, H Dh].
  Tensor attend_span(const Tensor& q, const Span& span);

  Linear wqkv{nullptr};  // D -> (H + 2 Hkv) Dh: query, key and value projections of all heads
  Linear wo{nullptr};    // H Dh -> D
  KVCache kv_cache;
  int64_t n_head, n_local_heads, head_dim;
};
TORCH_MODULE(Attention);

/// w2(silu(w1 x) * (w3 x)), Llama's gated feed-forward layer (FeedForward of model.py).
struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl(const ModelArgs& config, const SchemeOf& scheme, const std::string& fqn);
  /// [B, S, D] -> [B, S, D]. With ranks, this one's part of the sum.
  Tensor forward(const Tensor& x);

  Linear w1{nullptr};  // D -> I, gate
  Linear w3{nullptr};  // D -> I, up
  Linear w2{nullptr};  // I -> D, down
};
TORCH_MODULE(FeedForward);

/// One of the three weights of all experts of a layer, as the checkpoint stores it.
struct ExpertWeights {
  Tensor weight;            ///< [E, N, K]; int4: [E, ...] of the file's layout
  Tensor scales;            ///< [E, N]; int8 only
  Tensor scales_and_zeros;  ///< [E, Kp/g, N, 2]; int4 only
};

/// The experts of a layer. Parameters and buffers are those of the original's modules: w1, w2, w3,
/// scales1 ... of quantize.py; scales_and_zeros1 ... are ours.
struct ConditionalFeedForwardImpl : torch::nn::Module {
  ConditionalFeedForwardImpl(const ModelArgs& config, const SchemeOf& scheme,
                             const std::string& fqn);
  /// The outputs of the experts that each row chose: x [M, D], expert_indices [M, A] int64 ->
  /// [M, A, D]. Rows are grouped by expert: only chosen experts run, each once, on its rows alone.
  Tensor forward(const Tensor& x, const Tensor& expert_indices);
  /// Called once after the tensors are loaded, before the layers' prepare(): makes the experts'
  /// layers views of `weights`.
  void bind();
  /// After the layers' drop_words().
  void drop_words();
  /// Called once after the layers' prepare(): on a GPU the kernels' forms of an expert's layers lie
  /// at a fixed distance from those of the next expert.
  void prepare(at::Device device);

  std::array<ExpertWeights, 3> weights;  // w1, w2, w3
  std::vector<FeedForward> experts;      // [E], not registered: they own no tensors
};
TORCH_MODULE(ConditionalFeedForward);

/// A sparse mixture of experts (Mixtral).
struct MOEFeedForwardImpl : torch::nn::Module {
  MOEFeedForwardImpl(const ModelArgs& config, const SchemeOf& scheme, const std::string& fqn);
  /// [B, S, D] -> [B, S, D]. With ranks, this one's part of the sum.
  Tensor forward(const Tensor& x);

  Linear gate{nullptr};  // D -> E, never quantized
  ConditionalFeedForward cond_ffn{nullptr};
  int64_t num_activated_experts;
};
TORCH_MODULE(MOEFeedForward);

/// One layer: attention and feed-forward, each behind a norm and added to the residual stream.
struct TransformerBlockImpl : torch::nn::Module {
  TransformerBlockImpl(const ModelArgs& config, const SchemeOf& scheme, const std::string& fqn);
  /// [B, S, D] -> [B, S, D], whole on every rank.
  Tensor forward(const Tensor& x, const ForwardContext& context);
  /// forward() in two halves, between which other slices of the same prompt can be at the first.
  Tensor project(const Tensor& x, const ForwardContext& context);  // -> q [B, H, S, Dh]
  Tensor finish(const Tensor& x, const Tensor& q, const ForwardContext& context);

  Attention attention{nullptr};
  FeedForward feed_forward{nullptr};         // dense models
  MOEFeedForward block_sparse_moe{nullptr};  // mixtures of experts
  RMSNorm ffn_norm{nullptr};
  RMSNorm attention_norm{nullptr};
};
TORCH_MODULE(TransformerBlock);

/// Two ways through one model. forward() is the literal translation of model.py, with `reference`
/// in plain ATen: prefill, evaluation, the yardstick of the tests. step() runs the fused ops on at
/// most kMaxStepRows rows: decode, short prompts, verification, batches.
struct TransformerImpl : torch::nn::Module {
  /// With `tp` the model is one rank's share: `config` is shard_config's, the head has
  /// tp->head_rows() rows, and forward() and step() are collectives whose results are whole.
  TransformerImpl(const ModelArgs& config, const SchemeOf& scheme,
                  std::shared_ptr<TensorParallel> tp = nullptr);

  /// Allocates caches for `max_batch_size` slots of `max_seq_length` tokens; keeps larger ones that
  /// exist.
  void setup_caches(int64_t max_batch_size, int64_t max_seq_length);

  /// Logits [B, S, V] in the model's dtype of tokens idx [B, S] at positions input_pos [S]; rows go
  /// to slots first_slot ...
  Tensor forward(const Tensor& idx, const Tensor& input_pos, int64_t first_slot = 0);
  /// forward() that applies the head to the last position only: [B, V].
  Tensor last_logits(const Tensor& idx, const Tensor& input_pos, int64_t first_slot = 0);
  /// What head() takes of every token of `trees`, a tree after the other, a trunk before its
  /// branches, without padding: [tokens, D]. Tree i goes to slot i.
  Tensor hidden(const std::vector<TokenTree>& trees);
  /// The norm and the head: [..., D] -> [..., V].
  Tensor head(const Tensor& x);
  /// One fused step; see ops.h for the rows. Returns the next tokens [B] int32, a view that the
  /// following step overwrites. step_logits() gives the logits until then.
  Tensor step(const Tensor& tokens /* [B, S] */, const Tensor& pos /* [B] */,
              const Tensor& slot /* [B] */, const SamplingParams& params);
  /// Logits [rows, V] float32 of the last step. A collective where the model has ranks.
  Tensor step_logits(int64_t rows = kMaxStepRows);
  /// CUDA builds: the captured step for `batch_size` rows of one token, kept until the caches
  /// change.
  DecodeGraph& decode_graph(int64_t batch_size);
  /// CUDA builds: the captured speculative round, kept likewise. `draft`: its model, nullptr for
  /// lookup; its caches must exist.
  SpeculativeGraph& speculative_graph(const std::shared_ptr<TransformerImpl>& draft, int64_t k);

  /// Plain ATen everywhere (--reference): forward() uses no matrix kernels of ours and generate()
  /// decodes through forward().
  void set_reference(bool on);
  bool reference() const { return reference_; }  ///< what set_reference() chose

  TensorParallel* tp() const { return tp_.get(); }  ///< nullptr: the whole model is here
  /// Where the weights lie.
  at::Device device() const { return tok_embeddings->weight.device(); }
  /// Of floating weights, caches and logits.
  at::ScalarType dtype() const { return tok_embeddings->weight.scalar_type(); }

  ModelArgs config;
  Embedding tok_embeddings{nullptr};
  std::vector<TransformerBlock>
      layers;  // the same blocks as the registered ModuleList "layers", with their type
  RMSNorm norm{nullptr};
  Linear output{nullptr};

  int64_t max_batch_size = 0;
  int64_t max_seq_length = 0;

 private:
  std::shared_ptr<TensorParallel> tp_;
  Tensor whole_logits(Tensor logits) const;  // of this rank's [..., V / ranks]
  /// Consecutive positions of a prompt, which the threads of the CPU work on side by side.
  struct Slice {
    ForwardContext context;
    Tensor x;  // [B, S', D]
    Tensor q;  // [B, H, S', Dh]
  };
  std::vector<Slice> hidden(const Tensor& idx, const Tensor& input_pos,
                            int64_t first_slot);  // before the head
  void run_layers(std::vector<Slice>& slices);
  int64_t slices_of(int64_t batch_size, int64_t seq_len) const;

  bool reference_ = false;
  Tensor freqs_cis_;  // [T, Dh/2, 2] float32, rounded to the model's dtype as the original's table
  StepBuffers buffers_;
  Tensor shard_logits_;     // [kMaxStepRows, V / ranks] where the model has ranks
  Tensor gathered_logits_;  // [ranks, kMaxStepRows, V / ranks]
  std::shared_ptr<DecodeGraph> decode_graph_;
  int64_t decode_graph_batch_ = 0;
  std::shared_ptr<SpeculativeGraph> speculative_graph_;
};
TORCH_MODULE(Transformer);

/// cos and sin of the rotary embedding: [seq_len, n_elem / 2, 2] float32 holding values rounded to
/// `dtype` (model.py).
Tensor precompute_freqs_cis(int64_t seq_len, int64_t n_elem, double base, at::ScalarType dtype,
                            const std::optional<RopeScaling>& scaling);
/// Rotates interleaved pairs. x [B, S, H, Dh], freqs_cis [S, Dh/2, 2].
Tensor apply_rotary_emb(const Tensor& x, const Tensor& freqs_cis);

struct LoadOptions {
  std::string config =
      {};  ///< --config: table name or JSON file; empty: found beside the checkpoint
  at::ScalarType precision =
      at::kBFloat16;  ///< floating tensors are cast to this, as the original does
  at::Device device = at::kCPU;
  bool reference = false;            ///< --reference
  std::string int4_layout = "auto";  ///< --int4_layout: auto, cuda, cpu-avx512, cpu-avx2 or cpu
  std::shared_ptr<TensorParallel> tp = nullptr;                    ///< load this rank's share
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< bytes
};

/// Reads a checkpoint and builds the model in its weight formats. wq, wk, wv are fused to wqkv,
/// {"model": ...} is unwrapped, a missing head is tied to the embedding where the configuration
/// says so. Throws one line that names the file and what does not fit: no checkpoint, no or another
/// configuration, missing or unexpected tensors.
Transformer load_model(const std::filesystem::path& checkpoint_path, const LoadOptions& options);

/// A model of random weights (N(0, 1) / sqrt(K), quantized at random) for benchmarks and tests.
/// With `tp` one rank's share of such a model; only the share is ever in memory.
Transformer random_model(const ModelArgs& config, WeightScheme scheme, at::ScalarType precision,
                         at::Device device, uint64_t seed,
                         std::shared_ptr<TensorParallel> tp = nullptr);

/// Every linear layer with its name, "layers.0.attention.wqkv"; those of the experts are
/// "layers.0.block_sparse_moe.cond_ffn.w1[3]".
std::vector<std::pair<std::string, LinearImpl*>> named_linears(const TransformerImpl& model);

/// Bytes that one token streams: all parameters and buffers but embeddings (the original's
/// _get_model_size); for a tied head the embedding counts once. Of a mixture's experts only as many
/// count as a token activates (the original counts all).
int64_t model_bytes(const TransformerImpl& model);
/// The number of those parameters.
int64_t model_params(const TransformerImpl& model);

}  // namespace gptfast
