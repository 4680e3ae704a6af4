// The CUDA kernels against plain ATen on the same device: every format, odd sizes, long caches; bit
// for bit over the number of rows and with and without overlapping kernels; sampling; the captured
// step. Skipped without a CUDA device.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <limits>

#include "cuda_test.h"
#include "gptfast/generate.h"
#include "int4_layout.h"
#include "ops/reference.h"
#include "test_util.h"
#ifdef GPTFAST_CUDA
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include "gptfast/decode_graph.h"
#include "ops/cuda/step_ops.h"
#endif

namespace gptfast {

namespace {

#ifdef GPTFAST_CUDA

class CudaFormats : public CudaTest, public testing::WithParamInterface<FormatCase> {
 protected:
  Transformer make_model(const ModelArgs& config = odd_config()) {
    Transformer model =
        random_model(config, GetParam().scheme, GetParam().precision, kGpu, /*seed=*/3);
    model->setup_caches(/*max_batch_size=*/3, /*max_seq_length=*/600);
    for (auto& layer : model->layers) {
      layer->attention->kv_cache.k_cache.normal_();
      layer->attention->kv_cache.v_cache.normal_();
    }
    return model;
  }
};

TEST_P(CudaFormats, EveryOpMatchesPlainATen) {
  Transformer model = make_model();
  const ModelArgs& config = model->config;
  StepBuffers b = ops::make_step_buffers(config, 600, kGpu);
  const Tensor freqs_cis =
      precompute_freqs_cis(600, config.head_dim, 10000, at::kFloat, std::nullopt).to(kGpu);
  const StepRows rows{.tokens = at::tensor({5, 7, 332, 0}, at::kInt).view({2, 2}).to(kGpu),
                      .pos = at::tensor({255, 598}, at::kInt).to(kGpu),
                      .slot = at::tensor({2, 0}, at::kInt).to(kGpu)};
  const double tolerance = GetParam().tolerance;
  const auto expect_near = [&](const Tensor& actual, const Tensor& expected, const char* what) {
    EXPECT_LT(relative_difference(actual.narrow(0, 0, 4), expected.narrow(0, 0, 4)), tolerance)
        << what;
  };
  const double head_tolerance =  // a head whose rows do not come in eights is not quantized to int4
      model->output->scheme.format == WeightFormat::kInt8 ? tolerance : kRounded;
  ops::embed(rows, model->tok_embeddings->weight, b.x);
  Tensor x = at::zeros_like(b.x);
  ops::reference::embed(rows, model->tok_embeddings->weight, x);
  EXPECT_TRUE(at::equal(b.x.narrow(0, 0, 4), x.narrow(0, 0, 4)));

  TransformerBlockImpl& layer = *model->layers[1];
  KVCache& cache = layer.attention->kv_cache;
  Tensor k = cache.k_cache.clone(), v = cache.v_cache.clone();
  Tensor q = at::zeros_like(b.q), y = at::zeros_like(b.y), h = at::zeros_like(b.h),
         logits = at::zeros_like(b.logits);
  const Tensor& norm = layer.attention_norm->weight;
  ops::rms_qkv_rope_append(rows, b.x, norm, 1e-5, *layer.attention->wqkv, freqs_cis, b.q,
                           cache.k_cache, cache.v_cache);
  ops::reference::rms_qkv_rope_append(rows, x, norm, 1e-5, *layer.attention->wqkv, freqs_cis, q, k,
                                      v);
  expect_near(b.q, q, "q");
  const double cache_tolerance = std::max(tolerance, 8e-3);  // a rounding of the dtype may flip
  EXPECT_LT(relative_difference(cache.k_cache, k), cache_tolerance);
  EXPECT_LT(relative_difference(cache.v_cache, v), cache_tolerance);
  EXPECT_TRUE(at::equal(cache.k_cache[1], k[1]));  // the slot that no row names

  ops::attention_decode(rows, q, cache.k_cache, cache.v_cache, b.partials, b.y);
  ops::reference::attention_decode(rows, q, cache.k_cache, cache.v_cache, y);
  EXPECT_LT(relative_difference(b.y.narrow(0, 0, 4), y.narrow(0, 0, 4)), 1e-4);

  ops::o_proj_residual(4, y, *layer.attention->wo, b.x);
  ops::reference::o_proj_residual(4, y, *layer.attention->wo, x);
  expect_near(b.x, x, "o_proj");
  ops::rms_gate_up_silu(4, x, norm, 1e-5, *layer.feed_forward->w1, *layer.feed_forward->w3, b.h);
  ops::reference::rms_gate_up_silu(4, x, norm, 1e-5, *layer.feed_forward->w1,
                                   *layer.feed_forward->w3, h);
  expect_near(b.h, h, "gate_up");
  b.x.copy_(x);
  ops::down_proj_residual(4, h, *layer.feed_forward->w2, b.x);
  ops::reference::down_proj_residual(4, h, *layer.feed_forward->w2, x);
  expect_near(b.x, x, "down");
  ops::rms_lm_head(4, x, norm, 1e-5, *model->output, b.logits);
  ops::reference::rms_lm_head(4, x, norm, 1e-5, *model->output, logits);
  EXPECT_LT(relative_difference(b.logits.narrow(0, 0, 4), logits.narrow(0, 0, 4)), head_tolerance);
}

/// Logits [8, V] of 8 tokens, `rows` at a time.
Tensor logits_in_steps(Transformer& model, int64_t start, int64_t rows) {
  const SamplingParams greedy = make_sampling_params({.temperature = 0}, 1, kGpu);
  std::vector<Tensor> pieces;
  for (int64_t first = 0; first < 8; first += rows) {
    const int64_t count = std::min(rows, 8 - first);
    const Tensor tokens = (at::arange(first, first + count, ints()) * 37 % 333).unsqueeze(0);
    model->step(tokens, at::full({1}, start + first, ints()), at::zeros({1}, ints()), greedy);
    pieces.push_back(model->step_logits().narrow(0, 0, count).clone());
  }
  return at::cat(pieces);
}

TEST_P(CudaFormats, ARowDependsOnItselfAlone) {
  Transformer model = make_model();
  const Tensor one = logits_in_steps(model, 252, 1);
  ASSERT_TRUE(at::isfinite(one).all().item<bool>());
  for (int64_t rows = 2; rows <= 8; ++rows) {
    EXPECT_TRUE(at::equal(logits_in_steps(model, 252, rows), one)) << rows << " rows";
  }
  setenv("GPTFAST_PDL", "0", /*overwrite=*/1);
  EXPECT_TRUE(at::equal(logits_in_steps(model, 252, 1), one)) << "without overlap";
  EXPECT_TRUE(at::equal(logits_in_steps(model, 252, 5), one)) << "5 rows without overlap";
  unsetenv("GPTFAST_PDL");
}

// Widths that blocks share evenly and not, whose rows fit an SM beside a small ring only (28,672),
// in several launches only (24,576 in 16 bits), and of which even one does not fit one block
// (98,304).
TEST_P(CudaFormats, ARowOfAWideLayerDependsOnItselfAlone) {
  for (const int64_t width : {3000, 11008, 24576, 28672, 98304}) {
    ModelArgs config = odd_config();
    config.n_layer = 1;
    config.intermediate_size = width;
    Transformer model = make_model(config);
    const Tensor one = logits_in_steps(model, 100, 1);
    ASSERT_TRUE(at::isfinite(one).all().item<bool>()) << width;
    for (const int64_t rows : {2, 4, 5, 8}) {
      EXPECT_TRUE(at::equal(logits_in_steps(model, 100, rows), one))
          << rows << " rows of " << width;
    }
  }
}

TEST_P(CudaFormats, StepAgreesWithForward) {
  Transformer model = make_model();
  const Tensor tokens = (at::arange(8, ints()) * 37 % 333).unsqueeze(0);
  const Tensor expected = model->forward(tokens, at::arange(8, ints().dtype(at::kLong)))[0];
  EXPECT_LT(relative_difference(logits_in_steps(model, 0, 8), expected), 5e-2);
}

// Two texts of 40 tokens in slots 1 and 2, then two trees of which one continues past kept tokens.
TEST_P(CudaFormats, PromptKernelsAgreeWithPlainATen) {
  Transformer model = make_model();
  const Tensor tokens = (at::arange(80, ints()) * 37 % 333).view({2, 40});
  const Tensor pos = at::arange(40, ints().dtype(at::kLong));
  const std::vector<TokenTree> trees = {{.trunk = {1, 2, 3, 4, 5},
                                         .branches = {{6, 7}, {8, 9, 10}}},
                                        {.trunk = std::vector<int32_t>(30, 11)}};
  const Tensor logits = model->forward(tokens, pos, /*first_slot=*/1),
               k = model->layers[1]->attention->kv_cache.k_cache.clone(),
               v = model->layers[1]->attention->kv_cache.v_cache.clone(),
               hidden = model->hidden(trees);
  model->set_reference(true);
  const KVCache& cache = model->layers[1]->attention->kv_cache;
  const auto written = [](const Tensor& half) { return half.narrow(/*dim=*/0, 1, 2); };
  EXPECT_LT(relative_difference(logits, model->forward(tokens, pos, /*first_slot=*/1)), 4e-2);
  EXPECT_LT(relative_difference(written(k), written(cache.k_cache)), 4e-2);
  EXPECT_LT(relative_difference(written(v), written(cache.v_cache)), 4e-2);
  EXPECT_LT(relative_difference(hidden, model->hidden(trees)), 4e-2);
}

TEST_P(CudaFormats, TheCapturedStepGivesTheTokensOfSingleSteps) {
  Transformer model = make_model();
  ASSERT_TRUE(DecodeGraph::supported(*model));
  GenerateOptions options;
  options.max_new_tokens = 40;
  options.sampling = {.temperature = 0.8, .top_k = 50, .seed = 5};
  const auto captured = generate(model, {1, 2, 3}, options).rows[0].tokens;
  const SingleSteps single(model, {1, 2, 3}, options);
  EXPECT_EQ(captured, single.tokens);
  options.return_logits = true;
  const GenerateResult kept = generate(model, {1, 2, 3}, options);
  EXPECT_EQ(kept.rows[0].tokens, captured);
  EXPECT_TRUE(at::equal(kept.logits, single.logits));
  options.return_logits = false;
  EXPECT_EQ(generate(model, {1, 2, 3}, options).rows[0].tokens, captured);
  options.batch_size = 3;
  EXPECT_EQ(generate(model, {1, 2, 3}, options).rows[0].tokens, captured);
}

INSTANTIATE_TEST_SUITE_P(All, CudaFormats, testing::ValuesIn(kFormats), [](const auto& info) {
  return std::string(to_string(info.param.scheme.format)) + "_" +
         std::to_string(info.param.scheme.groupsize) + "_" + toString(info.param.precision);
});

TEST_F(CudaTest, AttentionMatchesPlainATenUpToTheLongestContext) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& [heads, local_heads, head_dim] :
         {std::array<int64_t, 3>{8, 2, 128}, {8, 1, 128}, {4, 4, 64}, {5, 1, 80}, {2, 2, 256}}) {
      const int64_t length = 131072;
      const auto options = at::TensorOptions(kGpu).dtype(dtype);
      const Tensor k = at::randn({1, local_heads, length, head_dim}, options);
      const Tensor v = at::randn({1, local_heads, length, head_dim}, options);
      const Tensor q = at::randn({8, heads, head_dim}, floats());
      Tensor partials = at::zeros({8, heads, length / kAttentionSplit + 1, head_dim + 2}, floats());
      Tensor y = at::zeros({8, heads * head_dim}, floats()), expected = at::zeros_like(y);
      for (const int64_t pos : {131070, 8190, 4000, 257, 256, 255, 254, 100, 1, 0}) {
        const StepRows rows{.tokens = at::zeros({1, 2}, ints()),
                            .pos = at::full({1}, pos, ints()),
                            .slot = at::zeros({1}, ints())};
        k.narrow(2, pos + 2, length - pos - 2).fill_(NAN);  // what no step has written may be that
        v.narrow(2, pos + 2, length - pos - 2).fill_(NAN);
        ops::attention_decode(rows, q, k, v, partials, y);
        ops::reference::attention_decode(rows, q, k, v, expected);
        EXPECT_LT(relative_difference(y.narrow(0, 0, 2), expected.narrow(0, 0, 2)), 1e-4)
            << dtype << ", " << heads << " heads of " << head_dim << " at " << pos;
      }
    }
  }
}

/// Long caches take another shape of the kernel (attention.cu), whose results must not differ.
TEST_F(CudaTest, AttentionDoesNotDependOnTheAllocatedLength) {
  for (const auto& [heads, local_heads, head_dim] : {std::array<int64_t, 3>{32, 32, 128},
                                                     {8, 2, 128},
                                                     {16, 2, 128},
                                                     {5, 1, 80},
                                                     {12, 4, 64},
                                                     {4, 4, 40},
                                                     {9, 3, 32},
                                                     {2, 2, 256}}) {
    const auto options = at::TensorOptions(kGpu).dtype(at::kBFloat16);
    const Tensor k = at::randn({2, local_heads, 65536, head_dim}, options);
    const Tensor v = at::randn({2, local_heads, 65536, head_dim}, options);
    const Tensor q = at::randn({8, heads, head_dim}, floats());
    const auto attend = [&](int64_t length, int64_t pos, int64_t S) {
      Tensor partials = at::zeros({8, heads, length / kAttentionSplit + 1, head_dim + 2}, floats());
      Tensor y = at::zeros({8, heads * head_dim}, floats());
      const StepRows rows{.tokens = at::zeros({2, S}, ints()),
                          .pos = at::tensor({pos, pos / 2}, ints()),
                          .slot = at::tensor({1, 0}, ints())};
      ops::attention_decode(rows, q, k.narrow(2, 0, length).contiguous(),
                            v.narrow(2, 0, length).contiguous(), partials, y);
      Tensor again = at::zeros_like(y);  // the counters of finished splits are where they were
      ops::attention_decode(rows, q, k.narrow(2, 0, length).contiguous(),
                            v.narrow(2, 0, length).contiguous(), partials, again);
      EXPECT_TRUE(at::equal(y, again));
      return y.narrow(0, 0, 2 * S).clone();
    };
    for (const int64_t pos : {0, 3, 254, 255, 256, 1000}) {
      EXPECT_TRUE(at::equal(attend(65536, pos, 4), attend(1024, pos, 4)))
          << heads << " heads of " << head_dim << " at " << pos;
      EXPECT_TRUE(at::equal(attend(65536, pos, 1)[0], attend(1024, pos, 4)[0])) << "one row";
    }
    EXPECT_TRUE(at::equal(attend(65536, 60000, 1)[0], attend(61440, 60000, 4)[0])) << "far";
  }
}

/// Random caches, Llama-3.1's stretched rotations.
TEST_F(CudaTest, StepAgreesWithForwardAtLongPositions) {
  ModelArgs config = odd_config();
  config.head_dim = 64;
  config.block_size = 131072;
  config.rope_base = 500000;
  config.rope_scaling = RopeScaling{.factor = 8,
                                    .low_freq_factor = 1,
                                    .high_freq_factor = 4,
                                    .original_max_position_embeddings = 8192};
  Transformer model = random_model(config, {WeightFormat::kBFloat16}, at::kBFloat16, kGpu, 3);
  model->setup_caches(/*max_batch_size=*/1, config.block_size);
  for (auto& layer : model->layers) {
    layer->attention->kv_cache.k_cache.normal_();
    layer->attention->kv_cache.v_cache.normal_();
  }
  for (const int64_t pos : {255, 256, 257, 8191, 131071}) {
    const Tensor token = at::full({1, 1}, 7, ints());
    const Tensor expected = model->forward(token, at::full({1}, pos, ints().dtype(at::kLong)))[0];
    const SamplingParams greedy = make_sampling_params({.temperature = 0}, 1, kGpu);
    model->step(token, at::full({1}, pos, ints()), at::zeros({1}, ints()), greedy);
    EXPECT_LT(relative_difference(model->step_logits(1), expected), 3e-2) << pos;
  }
}

/// One kernel at a time: a sum in another order may flip a rounding, nothing else may differ.
TEST_F(CudaTest, PromptKernelsRoundAsPlainATen) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto options = at::TensorOptions(kGpu).dtype(dtype);
    RMSNorm norm(4104, 1e-5);
    norm->weight.set_data(at::rand({4104}, options));
    const Tensor x = at::randn({3, 5, 4104}, options) * 4, y = at::randn_like(x);
    const Tensor normed = norm->forward(x);
    norm->reference = true;
    const Tensor expected = norm->forward(x);
    EXPECT_LT(relative_difference(normed, expected), 8e-3);
    EXPECT_LT(normed.ne(expected).sum().item<int64_t>(), x.numel() / 100);
    EXPECT_TRUE(at::equal(ops::silu_mul(x, y), at::silu(x) * y));
    const Tensor bytes = at::randint(-128, 128, {37, 48}, ints().dtype(at::kChar));
    EXPECT_TRUE(at::equal(ops::cuda::widen_int8(bytes, dtype), bytes.to(dtype)));

    const int64_t B = 2, S = 20, H = 6, Hkv = 2, Dh = 40;
    const Tensor qkv = at::randn({B, S, (H + 2 * Hkv) * Dh}, options);
    const Tensor cis = precompute_freqs_cis(S, Dh, 10000, at::kFloat, std::nullopt).to(kGpu);
    KVCache cache{.k_cache = at::zeros({4, Hkv, 64, Dh}, options),
                  .v_cache = at::zeros({4, Hkv, 64, Dh}, options)};
    const Tensor places = at::randperm(64, ints().dtype(at::kLong));
    const auto span = [&](int64_t begin, int64_t length, int64_t slot) {
      return Span{.begin = begin,
                  .length = length,
                  .cache_pos = places.narrow(0, begin, length),
                  .mask = {},
                  .used = 64,
                  .first_slot = slot,
                  .causal = false};
    };
    const Tensor q = ops::rope_append(qkv, cis, {span(0, 13, 0), span(13, 7, 2)}, cache);
    const auto parts = qkv.view({B, S, H + 2 * Hkv, Dh}).split_with_sizes({H, Hkv, Hkv}, 2);
    EXPECT_TRUE(at::equal(q, apply_rotary_emb(parts[0], cis).transpose(1, 2)));
    for (const auto& [half, values] :
         {std::pair{cache.k_cache, apply_rotary_emb(parts[1], cis)}, {cache.v_cache, parts[2]}}) {
      Tensor filled = at::zeros_like(half);
      const Tensor from = values.transpose(1, 2);  // [B, Hkv, S, Dh]
      filled.narrow(0, 0, B).index_copy_(2, places.narrow(0, 0, 13), from.narrow(2, 0, 13));
      filled.narrow(0, 2, B).index_copy_(2, places.narrow(0, 13, 7), from.narrow(2, 13, 7));
      EXPECT_TRUE(at::equal(half, filled));
    }
  }
}

TEST_F(CudaTest, PackedInt4HoldsTheCanonicalValues) {
  for (const auto& [g, k] : {std::pair<int64_t, int64_t>{32, 616},
                             {64, 616},
                             {128, 616},
                             {256, 616},
                             {32, 100}}) {  // rows that are not 16 bytes apart
    const int64_t n = 37, groups = (k + g - 1) / g;
    const Int4Weight weight{.q = at::randint(0, 256, {n, k / 2}, at::kByte),
                            .scales = at::rand({n, groups}).to(at::kBFloat16),
                            .zeros = at::randn({n, groups}).to(at::kBFloat16),
                            .in_features = k,
                            .groupsize = g};
    const Tensor packed = ops::pack_int4(weight, kGpu);
    const WeightView view{.format = WeightFormat::kInt4,
                          .n = n,
                          .k = k,
                          .groupsize = g,
                          .data = packed.const_data_ptr()};
    EXPECT_TRUE(at::equal(ops::cuda::unpack_int4(view, kGpu, at::kBFloat16).cpu(),
                          weight.dequantize().to(at::kBFloat16)))
        << "group size " << g;
  }
}

TEST_F(CudaTest, Int4WordsOfFilesAreUnpackedAsOnTheHost) {
  for (const int64_t inner : {2, 4, 8}) {
    const Tensor words = pack_int4_cuda(at::randint(0, 256, {40, 512}, at::kByte), inner);
    const Tensor affine = at::randn({16, 40, 2}).to(at::kBFloat16);
    for (const Int4Layout layout : {Int4Layout::kCuda, Int4Layout::kAuto}) {
      const Int4Weight host = unpack_int4(words, affine, /*in_features=*/1000, layout);
      const Int4Weight here = unpack_int4(words.to(kGpu), affine.to(kGpu), 1000, layout);
      EXPECT_TRUE(here.q.is_cuda());
      EXPECT_TRUE(at::equal(here.q.cpu(), host.q)) << inner;
      EXPECT_TRUE(at::equal(here.scales.cpu(), host.scales));
      EXPECT_TRUE(at::equal(here.zeros.cpu(), host.zeros));
    }
  }
}

TEST_F(CudaTest, SamplingDrawsWhatTheHostDraws) {
  struct Case {
    int64_t vocab, top_k;
    double temperature;
  };
  int draws = 0, different = 0;  // logf differs in the last bit: a near-tie may go the other way
  for (const Case& c : {Case{32000, 200, 0.8},
                        {128256, 200, 0.8},
                        {32000, 0, 1.0},
                        {32000, 1, 1.0},
                        {32000, 200, 0.0},
                        {32000, 5000, 1.5},
                        {700, 200, 0.7},
                        {700, 700, 0.7}}) {
    const Tensor logits = at::randn({8, c.vocab}) * 4;
    logits[1].fill_(1.0);                  // all equal
    logits[2].narrow(0, 0, 300).fill_(9);  // ties at the pivot
    const SamplingParams params =
        make_sampling_params({.temperature = c.temperature, .top_k = c.top_k, .seed = 77},
                             /*batch_size=*/8, kGpu);
    Tensor next = at::zeros({8}, ints());
    for (int64_t pos = 0; pos < 20; ++pos) {
      const StepRows rows{.tokens = at::zeros({8, 1}, ints()),
                          .pos = at::full({8}, pos, ints()),
                          .slot = at::arange(8, ints())};
      ops::sample(rows, logits.to(kGpu), params, next);
      const Tensor host = next.cpu();
      for (int64_t b = 0; b < 8; ++b, ++draws) {
        different += static_cast<int>(host[b].item<int32_t>() !=
                                      sample_row(logits[b].const_data_ptr<float>(), c.vocab,
                                                 c.temperature, c.top_k, 77 + b, pos));
      }
    }
  }
  EXPECT_LE(different, draws / 200) << "of " << draws;
}

TEST_F(CudaTest, NaNLogitsGiveMinusOne) {
  Tensor logits = at::randn({1, 5000}, floats());
  logits[0][4321] = std::numeric_limits<float>::quiet_NaN();
  Tensor next = at::zeros({1}, ints());
  const SamplingParams params = make_sampling_params({}, 1, kGpu);
  ops::sample({.tokens = at::zeros({1, 1}, ints()),
               .pos = at::zeros({1}, ints()),
               .slot = at::zeros({1}, ints())},
              logits, params, next);
  EXPECT_EQ(next.item<int32_t>(), -1);
}

/// Tokens of a model whose logits never change, drawn through the captured step.
TEST_F(CudaTest, ReplayedDrawsFollowTheDistributionAndAreIndependent) {
  constexpr int64_t kVocab = 16, kDraws = 20000;
  ModelArgs config = odd_config();
  config.vocab_size = kVocab;
  config.n_layer = 1;
  config.block_size = kDraws + 8;
  Transformer model =
      random_model(config, {WeightFormat::kBFloat16}, at::kBFloat16, kGpu, /*seed=*/3);
  model->tok_embeddings->weight.fill_(0.5);
  model->layers[0]->attention->wo->weight.zero_();
  model->layers[0]->feed_forward->w2->weight.zero_();
  GenerateOptions options;
  options.max_new_tokens = kDraws;
  options.batch_size = 2;
  options.sampling = {.temperature = 0.9, .top_k = 0, .seed = 42};
  const GenerateResult result = generate(model, {1, 2}, options);
  const Tensor p = at::softmax(model->step_logits()[0].cpu() / 0.9, 0).to(at::kDouble);

  const auto counts = [&](const Tensor& ids, int64_t bins) {
    return at::bincount(ids, {}, bins).to(at::kDouble);
  };
  const auto ids = [](const GeneratedRow& row) {
    return at::tensor(row.tokens, at::kInt).to(at::kLong);
  };
  const auto chi_square = [](const Tensor& seen, const Tensor& expected) {
    return ((seen - expected).square() / expected).sum().item<double>();
  };
  const Tensor a = ids(result.rows[0]), b = ids(result.rows[1]);
  ASSERT_EQ(a.numel(), kDraws);
  // 99.99 % quantiles of chi-square with 15 and 255 degrees of freedom.
  EXPECT_LT(chi_square(counts(a, kVocab), p * kDraws), 44.3);
  EXPECT_LT(chi_square(counts(b, kVocab), p * kDraws), 44.3);
  const Tensor pairs = at::outer(p, p).flatten();
  const Tensor lag = a.narrow(0, 0, kDraws - 1) * kVocab + a.narrow(0, 1, kDraws - 1);
  EXPECT_LT(chi_square(counts(lag, kVocab * kVocab), pairs * (kDraws - 1)), 345.0);
  EXPECT_LT(chi_square(counts(a * kVocab + b, kVocab * kVocab), pairs * kDraws), 345.0);
}

/// The original's greedy text and logits of a tiny model, computed by it on a GPU in bfloat16.
void expect_golden(const std::string& file, const std::string& golden_file) {
  const StateDict original = load_checkpoint(golden("cuda/" + golden_file));
  const Tensor prompt = original.at("prompt").to(at::kInt);
  const Tensor expected = original.at("prompt_logits");
  LoadOptions load{.config = golden("tiny-gqa/config.json").string(), .device = kGpu};
  Transformer model = load_model(golden(file), load);
  GenerateOptions options;
  options.max_new_tokens = 32;
  options.sampling.temperature = 0;
  options.return_logits = true;
  const std::vector<int32_t> ids(prompt.const_data_ptr<int32_t>(),
                                 prompt.const_data_ptr<int32_t>() + prompt.numel());
  const GenerateResult result = generate(model, ids, options);
  EXPECT_LT(relative_difference(result.logits.narrow(0, 0, 24), expected), 3e-2);

  options.return_logits = false;
  EXPECT_EQ(generate(model, ids, options).rows[0].tokens, result.rows[0].tokens);
  load.device = at::kCPU;
  Transformer on_cpu = load_model(golden(file), load);
  options.return_logits = true;
  const GenerateResult host = generate(on_cpu, ids, options);
  const Tensor theirs = original.at("greedy_tokens").to(at::kInt);
  for (size_t i = 0; i < 32; ++i) {
    const int32_t ours = result.rows[0].tokens[i];
    if (ours == theirs[static_cast<int64_t>(i)].item<int32_t>() && ours == host.rows[0].tokens[i])
      continue;
    // Texts part at a near-tie only: the margin of our first choice there.
    const Tensor row = result.logits[static_cast<int64_t>(ids.size() + i) - 1];
    const Tensor top = std::get<0>(row.topk(2));
    const double margin = (top[0] - top[1]).item<double>() / row.abs().max().item<double>();
    std::cout << file << ": texts part at token " << i << ", margin " << margin << std::endl;
    EXPECT_LT(margin, 2e-2);
    break;
  }
}

TEST_F(CudaTest, TextIsTheOriginalsInBFloat16) {
  expect_golden("tiny-gqa/model.fp32.pth", "tiny-gqa.cuda.bf16.pth");
}

TEST_F(CudaTest, Int4FilesOfTheOriginalGiveItsText) {
  expect_golden("quantize/tiny-gqa.int4.g32.pth", "tiny-gqa.int4.g32.cuda.golden.pth");
}

TEST_F(CudaTest, TooMuchMemoryIsOneLineBeforeAnyWork) {
  Transformer model = random_model(odd_config(), {WeightFormat::kBFloat16}, at::kBFloat16, kGpu, 3);
  const std::string error =
      error_of([&] { model->setup_caches(/*max_batch_size=*/8, int64_t{1} << 40); });
  EXPECT_NE(error.find("caches of keys and values need"), std::string::npos) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
  model->setup_caches(1, 64);  // and the model goes on working
  logits_in_steps(model, 0, 8);

  ModelArgs huge = odd_config();
  huge.n_layer = 2000;
  huge.dim = huge.intermediate_size = 1 << 15;
  const std::string weights = error_of(
      [&] { random_model(huge, {WeightFormat::kBFloat16}, at::kBFloat16, kGpu, /*seed=*/3); });
  EXPECT_NE(weights.find("the weights need"), std::string::npos) << weights;
  EXPECT_EQ(weights.find('\n'), std::string::npos);
}

/// Resident memory of this process.
int64_t resident_bytes() {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST_F(CudaTest, TenThousandTokensTakeNoMoreMemory) {
  Transformer model = random_model(odd_config(), {WeightFormat::kBFloat16}, at::kBFloat16, kGpu, 3);
  GenerateOptions options;
  options.max_new_tokens = 1000;
  const auto free_bytes = [] {
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
  };
  for (int i = 0; i < 2; ++i) generate(model, {1, 2, 3}, options);
  const size_t free = free_bytes();
  const int64_t resident = resident_bytes();
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(generate(model, {1, 2, 3}, options).rows[0].tokens.size(), 1000U);
  }
  EXPECT_EQ(free_bytes(), free);
  EXPECT_LT(resident_bytes() - resident, 2 << 20);
}

TEST(CudaDevice, OldGpusAreRefusedInOneLine) {
  ops::cuda::check_capability("H200", 9, 0);
  ops::cuda::check_capability("A100", 8, 0);
  EXPECT_EQ(error_of([] { ops::cuda::check_capability("T4", 7, 5); }),
            "the GPU T4 has compute capability 7.5; bfloat16 and the CUDA kernels need 8.0 or "
            "newer: use --device cpu");
}

#else

TEST(Cuda, Skipped) {
  GTEST_SKIP() << "built without CUDA";
}

#endif

}  // namespace
}  // namespace gptfast
