#include "gptfast/model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "gptfast/checkpoint.h"
#ifdef GPTFAST_CUDA
#include "ops/cuda/step_ops.h"
#endif
#include "gptfast/threads.h"
#include "gptfast/tp.h"
#include "spans.h"

namespace gptfast {

// ---- KVCache

void KVCache::update(const Tensor& cache_pos, const Tensor& k, const Tensor& v,
                     int64_t first_slot) {
  k_cache.narrow(0, first_slot, k.size(0)).index_copy_(/*dim=*/2, cache_pos, k);
  v_cache.narrow(0, first_slot, v.size(0)).index_copy_(/*dim=*/2, cache_pos, v);
}

// ---- RMSNorm, Embedding

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : eps(eps) {
  weight = register_parameter("weight", at::ones({dim}), /*requires_grad=*/false);
}

Tensor RMSNormImpl::forward(const Tensor& x) {
  if (!reference) {
    if (Tensor y = ops::rms_norm(x, weight, eps); y.defined()) return y;
  }
  const Tensor x32 = x.to(at::kFloat);
  const Tensor normed = x32 * at::rsqrt(at::mean(x32 * x32, /*dim=*/-1, /*keepdim=*/true) + eps);
  return normed.to(x.scalar_type()) * weight;
}

EmbeddingImpl::EmbeddingImpl(int64_t vocab_size, int64_t dim) {
  weight = register_parameter("weight", at::empty({vocab_size, dim}), /*requires_grad=*/false);
}

Tensor EmbeddingImpl::forward(const Tensor& idx) {
  return at::embedding(weight, idx);
}

// ---- Attention

AttentionImpl::AttentionImpl(const ModelArgs& config, const SchemeOf& scheme,
                             const std::string& fqn)
    : n_head(config.n_head), n_local_heads(config.n_local_heads), head_dim(config.head_dim) {
  wqkv = register_module("wqkv", Linear(config.dim, config.qkv_dim(), scheme(fqn + ".wqkv")));
  wo = register_module("wo", Linear(n_head * head_dim, config.dim, scheme(fqn + ".wo")));
}

Tensor AttentionImpl::forward(const Tensor& x, const ForwardContext& context) {
  return attend(project(x, context), context);
}

Tensor AttentionImpl::project(const Tensor& x, const ForwardContext& context) {
  const int64_t B = x.size(0), S = x.size(1), kv_size = n_local_heads * head_dim;
  const Tensor whole = wqkv->forward(x);
  if (!wqkv->reference) {
    Tensor q = ops::rope_append(whole, context.freqs_cis, context.spans, kv_cache);
    if (q.defined()) return q;
  }
  const auto qkv = whole.split_with_sizes({n_head * head_dim, kv_size, kv_size}, /*dim=*/-1);
  const Tensor q =
      apply_rotary_emb(qkv[0].view({B, S, n_head, head_dim}), context.freqs_cis).transpose(1, 2);
  const Tensor k = apply_rotary_emb(qkv[1].view({B, S, n_local_heads, head_dim}), context.freqs_cis)
                       .transpose(1, 2);
  const Tensor v = qkv[2].view({B, S, n_local_heads, head_dim}).transpose(1, 2);
  for (const Span& span : context.spans) {
    kv_cache.update(span.cache_pos, k.narrow(2, span.begin, span.length),
                    v.narrow(2, span.begin, span.length), span.first_slot);
  }
  return q;
}

Tensor AttentionImpl::attend(const Tensor& q, const ForwardContext& context) {
  std::vector<Tensor> parts;  // [B, length, H Dh]
  parts.reserve(context.spans.size());
  for (const Span& span : context.spans)
    parts.push_back(attend_span(q.narrow(2, span.begin, span.length), span));
  return wo->forward(parts.size() == 1 ? parts[0] : at::cat(parts, /*dim=*/1));
}

Tensor AttentionImpl::attend_span(const Tensor& q, const Span& span) {
  const int64_t B = q.size(0);
  if (span.causal && !wo->reference) {
    const Tensor y = ops::attention_prompt(q, kv_cache.k_cache, kv_cache.v_cache, span.cache_pos,
                                           span.first_slot);
    if (y.defined()) return y;
  }
  // Only the used part of the cache is read: cost follows the length of the text, not of the
  // allocation.
  const auto used = [&](const Tensor& cache) {  // [B, H, used, Dh]
    const Tensor part = cache.narrow(0, span.first_slot, B).narrow(2, 0, span.used);
    return n_head == n_local_heads ? part
                                   : part.repeat_interleave(n_head / n_local_heads, /*dim=*/1);
  };
  const Tensor y =
      at::scaled_dot_product_attention(q, used(kv_cache.k_cache), used(kv_cache.v_cache),
                                       span.mask.defined() ? std::make_optional(span.mask)
                                                           : std::nullopt,
                                       /*dropout_p=*/0.0,
                                       /*is_causal=*/!span.mask.defined() &&
                                           span.length > 1);  // [B, H, length, Dh]
  return y.transpose(1, 2).flatten(2);
}

// ---- FeedForward

FeedForwardImpl::FeedForwardImpl(const ModelArgs& config, const SchemeOf& scheme,
                                 const std::string& fqn) {
  w1 = register_module("w1", Linear(config.dim, config.intermediate_size, scheme(fqn + ".w1")));
  w3 = register_module("w3", Linear(config.dim, config.intermediate_size, scheme(fqn + ".w3")));
  w2 = register_module("w2", Linear(config.intermediate_size, config.dim, scheme(fqn + ".w2")));
}

Tensor FeedForwardImpl::forward(const Tensor& x) {
  const Tensor gate = w1->forward(x), up = w3->forward(x);
  Tensor h = w1->reference ? Tensor() : ops::silu_mul(gate, up);
  if (!h.defined()) h = at::silu(gate) * up;
  return w2->forward(h);
}

// ---- Mixture of experts

namespace {

/// w1, w2 or w3 of an expert.
LinearImpl& expert_layer(FeedForwardImpl& expert, size_t index) {
  return *std::array{expert.w1.get(), expert.w2.get(), expert.w3.get()}[index];
}

}  // namespace

ConditionalFeedForwardImpl::ConditionalFeedForwardImpl(const ModelArgs& config,
                                                       const SchemeOf& scheme,
                                                       const std::string& fqn) {
  for (int64_t e = 0; e < config.num_experts; ++e) experts.emplace_back(config, scheme, fqn);
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string index = std::to_string(i + 1);
    ExpertWeights& w = weights[i];
    switch (expert_layer(*experts[0], i).scheme.format) {
      case WeightFormat::kInt8:  // ConditionalFeedForwardBit8
        w.weight = register_buffer("w" + index, at::empty({0}, at::kChar));
        w.scales = register_buffer("scales" + index, at::empty({0}));
        break;
      case WeightFormat::kInt4:
        w.weight = register_buffer("w" + index, at::empty({0}, at::kInt));
        w.scales_and_zeros = register_buffer("scales_and_zeros" + index, at::empty({0}));
        break;
      default:
        w.weight = register_parameter("w" + index, at::empty({0}), /*requires_grad=*/false);
    }
  }
}

void ConditionalFeedForwardImpl::bind() {
  const auto view = [](Tensor& of_expert, const Tensor& of_all, int64_t e) {
    if (of_all.defined()) of_expert.set_data(of_all[e]);
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    for (size_t e = 0; e < experts.size(); ++e) {
      LinearImpl& layer = expert_layer(*experts[e], i);
      view(layer.weight, weights[i].weight, static_cast<int64_t>(e));
      view(layer.scales, weights[i].scales, static_cast<int64_t>(e));
      view(layer.scales_and_zeros, weights[i].scales_and_zeros, static_cast<int64_t>(e));
    }
  }
}

void ConditionalFeedForwardImpl::drop_words() {
  for (ExpertWeights& w : weights) {
    if (w.scales_and_zeros.defined())  // int4
      w.weight.set_data(at::empty({1}, w.weight.options()).expand(w.weight.sizes()));
  }
}

void ConditionalFeedForwardImpl::prepare(at::Device device) {
  if (device.is_cpu()) return;
  for (size_t i = 0; i < weights.size(); ++i) {
    std::vector<LinearImpl*> layers;
    for (FeedForward& expert : experts) layers.push_back(&expert_layer(*expert, i));
    LinearImpl::gather(layers);
  }
}

Tensor ConditionalFeedForwardImpl::forward(const Tensor& x, const Tensor& expert_indices) {
  const int64_t A = expert_indices.size(1);
  const Tensor chosen = expert_indices.flatten();               // [M A]
  const Tensor by_expert = chosen.argsort(/*stable=*/true, 0);  // [M A] places in `chosen`
  const Tensor every = at::arange(std::ssize(experts), chosen.options());
  const Tensor counts = chosen.unsqueeze(1).eq(every).sum(0).cpu();  // [E]; waits for a GPU once
  Tensor outs = at::empty({chosen.numel(), x.size(1)}, x.options());
  int64_t begin = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t count = counts.const_data_ptr<int64_t>()[e];
    if (count == 0) continue;
    const Tensor places = by_expert.narrow(0, begin, count);
    const Tensor rows = places.div(A, /*rounding_mode=*/"floor");
    outs.index_copy_(0, places, experts[e]->forward(x.index_select(0, rows)));
    begin += count;
  }
  return outs.view({x.size(0), A, x.size(1)});
}

MOEFeedForwardImpl::MOEFeedForwardImpl(const ModelArgs& config, const SchemeOf& scheme,
                                       const std::string& fqn)
    : num_activated_experts(config.num_activated_experts) {
  gate = register_module("gate", Linear(config.dim, config.num_experts, scheme(fqn + ".gate")));
  cond_ffn = register_module("cond_ffn", ConditionalFeedForward(config, scheme, fqn + ".cond_ffn"));
}

Tensor MOEFeedForwardImpl::forward(const Tensor& x) {
  const Tensor rows = x.reshape({-1, x.size(-1)});                        // [M, D]
  const Tensor scores = at::softmax(gate->forward(rows), -1);             // [M, E]
  auto [weights, experts] = at::topk(scores, num_activated_experts, -1);  // [M, A]
  weights = weights / weights.sum(/*dim=*/-1, /*keepdim=*/true);
  const Tensor outs = cond_ffn->forward(rows, experts);  // [M, A, D]
  return at::einsum("mad,ma->md", {outs, weights}).view(x.sizes());
}

// ---- TransformerBlock

TransformerBlockImpl::TransformerBlockImpl(const ModelArgs& config, const SchemeOf& scheme,
                                           const std::string& fqn) {
  attention = register_module("attention", Attention(config, scheme, fqn + ".attention"));
  if (config.num_experts > 0) {
    block_sparse_moe = register_module("block_sparse_moe",
                                       MOEFeedForward(config, scheme, fqn + ".block_sparse_moe"));
  } else {
    feed_forward =
        register_module("feed_forward", FeedForward(config, scheme, fqn + ".feed_forward"));
  }
  ffn_norm = register_module("ffn_norm", RMSNorm(config.dim, config.norm_eps));
  attention_norm = register_module("attention_norm", RMSNorm(config.dim, config.norm_eps));
}

Tensor TransformerBlockImpl::forward(const Tensor& x, const ForwardContext& context) {
  return finish(x, project(x, context), context);
}

Tensor TransformerBlockImpl::project(const Tensor& x, const ForwardContext& context) {
  return attention->project(attention_norm->forward(x), context);
}

Tensor TransformerBlockImpl::finish(const Tensor& x, const Tensor& q,
                                    const ForwardContext& context) {
  const auto whole = [&](Tensor part) {
    if (context.tp != nullptr) context.tp->all_reduce(part);
    return part;
  };
  const Tensor h = x + whole(attention->attend(q, context));
  const Tensor normed = ffn_norm->forward(h);
  return h + whole(block_sparse_moe ? block_sparse_moe->forward(normed)
                                    : feed_forward->forward(normed));
}

// ---- Transformer

namespace {

/// Side by side if there are several.
template <class Slice, class Body>
void for_each(std::vector<Slice>& slices, const Body& body) {
  if (slices.size() == 1) return body(slices[0]);
  parallel_for(std::ssize(slices), [&](int64_t i) { body(slices[static_cast<size_t>(i)]); });
}

}  // namespace

TransformerImpl::TransformerImpl(const ModelArgs& args, const SchemeOf& scheme,
                                 std::shared_ptr<TensorParallel> tp)
    : config(args), tp_(std::move(tp)) {
  tok_embeddings = register_module("tok_embeddings", Embedding(config.vocab_size, config.dim));
  auto list = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.n_layer; ++i) {
    layers.emplace_back(config, scheme, "layers." + std::to_string(i));
    list->push_back(layers.back());
  }
  norm = register_module("norm", RMSNorm(config.dim, config.norm_eps));
  const int64_t head_rows = tp_ ? tp_->head_rows(config.vocab_size) : config.vocab_size;
  output = register_module("output", Linear(config.dim, head_rows, scheme("output")));
}

void TransformerImpl::set_reference(bool on) {
  reference_ = on;
  for (const auto& [name, linear] : named_linears(*this)) linear->reference = on;
  for (const auto& module : modules()) {
    if (auto* norm = module->as<RMSNormImpl>()) norm->reference = on;
  }
}

void TransformerImpl::setup_caches(int64_t batch_size, int64_t seq_length) {
  if (max_batch_size >= batch_size && max_seq_length >= seq_length) return;
  batch_size = std::max(max_batch_size, batch_size);
  seq_length = std::max(max_seq_length, find_multiple(seq_length, 8));
  max_batch_size = max_seq_length = 0;  // until there are new ones
  decode_graph_.reset();
  speculative_graph_.reset();
#ifdef GPTFAST_CUDA
  if (device().is_cuda()) {
    for (auto& layer : layers) layer->attention->kv_cache = {};
    const int64_t elements =
        2 * config.n_layer * batch_size * config.n_local_heads * seq_length * config.head_dim;
    ops::cuda::check_memory(device(), elements * static_cast<int64_t>(c10::elementSize(dtype())),
                            "the caches of keys and values");
  }
#endif
  const auto options = at::TensorOptions(device()).dtype(dtype());
  for (auto& layer : layers) {
    KVCache& cache = layer->attention->kv_cache;
    cache = {};  // frees the old one first
    const std::vector<int64_t> shape = {batch_size, config.n_local_heads, seq_length,
                                        config.head_dim};
    // Not zeroed: positions are written before they are read, and the CPU commits fresh pages only
    // as the text grows.
    cache = {.k_cache = at::empty(shape, options), .v_cache = at::empty(shape, options)};
  }
  freqs_cis_ = precompute_freqs_cis(seq_length, config.head_dim, config.rope_base, dtype(),
                                    config.rope_scaling)
                   .to(device());
  buffers_ = ops::make_step_buffers(config, seq_length, device());
  if (tp_) {
    shard_logits_ = at::empty({kMaxStepRows, output->out_features}, buffers_.logits.options());
    gathered_logits_ =
        at::empty({tp_->world_size(), kMaxStepRows, output->out_features}, shard_logits_.options());
  }
  max_batch_size = batch_size;
  max_seq_length = seq_length;
}

int64_t TransformerImpl::slices_of(int64_t batch_size, int64_t seq_len) const {
  // Each slice goes through the weights once, which fewer tokens do not repay; later slices see
  // more positions, which several slices for each thread even out (Zen 5, 2 threads, SmolLM2, 512
  // tokens: slices of 64 instead of 256 cost 4 % in bfloat16 and 10 % in int4).
  constexpr int64_t kLeastTokens = 32, kUsualTokens = 256, kMostSlices = 4;
  const int64_t tokens = batch_size * seq_len, threads = num_threads();
  if (reference_ || !device().is_cpu() || tp_ || tokens < kLeastTokens * threads) return 1;
  return std::min(std::clamp(tokens / kUsualTokens, threads, kMostSlices * threads), seq_len);
}

std::vector<TransformerImpl::Slice> TransformerImpl::hidden(const Tensor& idx,
                                                            const Tensor& input_pos,
                                                            int64_t first_slot) {
  TORCH_CHECK(freqs_cis_.defined(), "setup_caches must be called before forward");
  const int64_t S = input_pos.numel(), used = input_pos.max().item<int64_t>() + 1;
  TORCH_CHECK(idx.size(1) == S && used <= max_seq_length &&
                  first_slot + idx.size(0) <= max_batch_size,
              "idx ", idx.sizes(), " at positions up to ", used - 1, " does not fit caches of ",
              max_batch_size, " slots of ", max_seq_length, " tokens");
  std::vector<Slice> slices;
  const int64_t count = slices_of(idx.size(0), S);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = S * i / count, length = S * (i + 1) / count - begin;
    const Tensor pos = input_pos.narrow(0, begin, length);
    slices.push_back({.context = {.freqs_cis = freqs_cis_.index_select(0, pos),
                                  .spans = {span_of_prompt(pos, first_slot)},
                                  .tp = tp_.get()},
                      .x = tok_embeddings->forward(idx.narrow(1, begin, length)),
                      .q = {}});
  }
  run_layers(slices);
  return slices;
}

void TransformerImpl::run_layers(std::vector<Slice>& slices) {
  for (auto& layer : layers) {
    for_each(slices, [&](Slice& s) { s.q = layer->project(s.x, s.context); });
    for_each(slices, [&](Slice& s) { s.x = layer->finish(s.x, s.q, s.context); });
  }
}

Tensor TransformerImpl::forward(const Tensor& idx, const Tensor& input_pos, int64_t first_slot) {
  std::vector<Slice> slices = hidden(idx, input_pos, first_slot);
  for_each(slices, [&](Slice& s) { s.x = output->forward(norm->forward(s.x)); });
  std::vector<Tensor> logits;
  logits.reserve(slices.size());
  for (Slice& slice : slices) logits.push_back(std::move(slice.x));
  return whole_logits(logits.size() == 1 ? logits[0] : at::cat(logits, /*dim=*/1));
}

Tensor TransformerImpl::head(const Tensor& x) {
  return whole_logits(output->forward(norm->forward(x)));
}

Tensor TransformerImpl::last_logits(const Tensor& idx, const Tensor& input_pos,
                                    int64_t first_slot) {
  return head(hidden(idx, input_pos, first_slot).back().x.select(/*dim=*/1, -1));
}

Tensor TransformerImpl::hidden(const std::vector<TokenTree>& trees) {
  const PackedTrees packed(trees, device());
  TORCH_CHECK(packed.longest() <= max_seq_length && std::ssize(trees) <= max_batch_size,
              std::ssize(trees), " trees of up to ", packed.longest(),
              " tokens do not fit caches of ", max_batch_size, " slots of ", max_seq_length,
              " tokens");
  // Bounds what activations take beside the caches.
  constexpr int64_t kMostTokens = 4096;
  std::vector<Tensor> parts;
  for (int64_t first = 0; first < packed.size(); first += kMostTokens) {
    const int64_t tokens = std::min(kMostTokens, packed.size() - first),
                  count = slices_of(/*batch_size=*/1, tokens);
    std::vector<Slice> slices;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = first + tokens * i / count, end = first + tokens * (i + 1) / count;
      slices.push_back({.context = {.freqs_cis = freqs_cis_.index_select(0, packed.pos(begin, end)),
                                    .spans = packed.spans(begin, end),
                                    .tp = tp_.get()},
                        .x = tok_embeddings->forward(packed.ids(begin, end).unsqueeze(0)),
                        .q = {}});
    }
    run_layers(slices);
    for (Slice& slice : slices) parts.push_back(slice.x.squeeze(0));
  }
  return at::cat(parts);
}

Tensor TransformerImpl::whole_logits(Tensor logits) const {
  return tp_ ? tp_->gather_logits(logits, config.vocab_size) : logits;
}

Tensor TransformerImpl::step_logits(int64_t rows) {
  return whole_logits((tp_ ? shard_logits_ : buffers_.logits).narrow(0, 0, rows));
}

Tensor TransformerImpl::step(const Tensor& tokens, const Tensor& pos, const Tensor& slot,
                             const SamplingParams& params) {
  const StepRows rows{.tokens = tokens, .pos = pos, .slot = slot};
  StepBuffers& b = buffers_;
  const int64_t M = rows.rows();
  TORCH_CHECK(b.x.defined(), "setup_caches must be called before step");
  TORCH_CHECK(M >= 1 && M <= kMaxStepRows, "a step has 1 to ", kMaxStepRows, " rows, got ", M);

  // x += a product whose inner dimension is divided among the ranks.
  const auto add_product = [&](const Tensor& in, const LinearImpl& w, const auto& op) {
    tp_ ? tp_->add_product(M, in, w, b.x) : op(M, in, w, b.x);
  };

  ops::embed(rows, tok_embeddings->weight, b.x);
  for (auto& layer : layers) {
    AttentionImpl& attention = *layer->attention;
    const Tensor& ffn_norm = layer->ffn_norm->weight;
    KVCache& cache = attention.kv_cache;
    ops::rms_qkv_rope_append(rows, b.x, layer->attention_norm->weight, config.norm_eps,
                             *attention.wqkv, freqs_cis_, b.q, cache.k_cache, cache.v_cache);
    ops::attention_decode(rows, b.q, cache.k_cache, cache.v_cache, b.partials, b.y);
    add_product(b.y, *attention.wo, ops::o_proj_residual);
    if (layer->block_sparse_moe) {
      const MOEFeedForwardImpl& moe = *layer->block_sparse_moe;
      ops::moe_gate_up_silu(M, b.x, ffn_norm, config.norm_eps, *moe.gate, *moe.cond_ffn, b.experts,
                            b.h);
      const auto add_experts = [&](Tensor& x) {
        ops::moe_down_proj_residual(M, b.h, *moe.cond_ffn, b.experts, x);
      };
      tp_ ? tp_->sum_into(b.x.narrow(0, 0, M), add_experts) : add_experts(b.x);
    } else {
      const FeedForwardImpl& ffn = *layer->feed_forward;
      ops::rms_gate_up_silu(M, b.x, ffn_norm, config.norm_eps, *ffn.w1, *ffn.w3, b.h);
      add_product(b.h, *ffn.w2, ops::down_proj_residual);
    }
  }
  ops::rms_lm_head(M, b.x, norm->weight, config.norm_eps, *output, tp_ ? shard_logits_ : b.logits);
  if (tp_) {
    tp_->sample(rows, shard_logits_, params, gathered_logits_, b.logits, b.next);
  } else {
    ops::sample(rows, b.logits, params, b.next);
  }
  return b.next.narrow(0, 0, pos.numel());
}

// ---- Rotary embedding

namespace {

/// Llama-3.1: long wavelengths are stretched by `factor`, short ones kept, those between
/// interpolated.
Tensor apply_rope_scaling(const Tensor& freqs, const RopeScaling& s) {
  const auto old_len = static_cast<double>(s.original_max_position_embeddings);
  const double low_freq_wavelen = old_len / s.low_freq_factor,
               high_freq_wavelen = old_len / s.high_freq_factor;
  const Tensor wavelen =
      freqs.reciprocal() * (2 * std::numbers::pi);  // Python's 2 * pi / freq rounds like this
  const Tensor smooth = (wavelen.reciprocal() * old_len - s.low_freq_factor) /
                        (s.high_freq_factor - s.low_freq_factor);
  const Tensor between = (1 - smooth) * freqs / s.factor + smooth * freqs;
  return at::where(wavelen < high_freq_wavelen, freqs,
                   at::where(wavelen > low_freq_wavelen, freqs / s.factor, between));
}

}  // namespace

Tensor precompute_freqs_cis(int64_t seq_len, int64_t n_elem, double base, at::ScalarType dtype,
                            const std::optional<RopeScaling>& scaling) {
  const Tensor exponent =
      at::arange(0, n_elem, 2, at::kLong).to(at::kFloat) / static_cast<double>(n_elem);
  Tensor freqs = at::pow(base, exponent).reciprocal();
  if (scaling) freqs = apply_rope_scaling(freqs, *scaling);
  const Tensor angles = at::outer(at::arange(seq_len, at::kFloat), freqs);  // [T, Dh/2]
  const Tensor cis = at::view_as_real(at::polar(at::ones_like(angles), angles));
  return cis.to(dtype).to(at::kFloat).contiguous();
}

Tensor apply_rotary_emb(const Tensor& x, const Tensor& freqs_cis) {
  const Tensor pairs = x.to(at::kFloat).reshape({x.size(0), x.size(1), x.size(2), -1, 2});
  const Tensor cis = freqs_cis.view({1, x.size(1), 1, -1, 2});
  const Tensor re = pairs.select(-1, 0), im = pairs.select(-1, 1), cos = cis.select(-1, 0),
               sin = cis.select(-1, 1);
  return at::stack({re * cos - im * sin, im * cos + re * sin}, /*dim=*/-1)
      .flatten(/*start_dim=*/3)
      .to(x.scalar_type());
}

// ---- Layers and sizes

std::vector<std::pair<std::string, LinearImpl*>> named_linears(const TransformerImpl& model) {
  std::vector<std::pair<std::string, LinearImpl*>> linears;
  for (const auto& module : model.named_modules()) {
    if (auto* linear = module.value()->as<LinearImpl>()) linears.emplace_back(module.key(), linear);
    auto* cond_ffn = module.value()->as<ConditionalFeedForwardImpl>();
    if (cond_ffn == nullptr) continue;
    for (size_t i = 0; i < cond_ffn->weights.size(); ++i) {
      for (size_t e = 0; e < cond_ffn->experts.size(); ++e) {
        linears.emplace_back(c10::str(module.key(), ".w", i + 1, "[", e, "]"),
                             &expert_layer(*cond_ffn->experts[e], i));
      }
    }
  }
  return linears;
}

namespace {

template <typename Measure>
int64_t sum_for_a_token(const TransformerImpl& model, Measure measure) {
  int64_t total = 0;
  for (const auto& module : model.modules()) {
    if (module->as<EmbeddingImpl>() != nullptr) continue;
    int64_t sum = 0;
    for (const Tensor& t : module->parameters(/*recurse=*/false)) sum += measure(t);
    for (const Tensor& t : module->buffers(/*recurse=*/false)) sum += measure(t);
    const bool experts = module->as<ConditionalFeedForwardImpl>() != nullptr;
    total += experts ? sum / model.config.num_experts * model.config.num_activated_experts : sum;
  }
  return total;
}

}  // namespace

int64_t model_bytes(const TransformerImpl& model) {
  return sum_for_a_token(model, [](const Tensor& t) {
    return t.numel() * static_cast<int64_t>(t.element_size());
  });
}

int64_t model_params(const TransformerImpl& model) {
  return sum_for_a_token(model, [](const Tensor& t) { return t.numel(); });
}

}  // namespace gptfast
