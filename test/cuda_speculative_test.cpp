// Captured speculative rounds against plain decoding, the host's rounds and exact distributions.
// Skipped without a CUDA device.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>

#include "cuda_test.h"
#include "gptfast/generate.h"
#include "gptfast/speculative.h"
#include "test_util.h"
#ifdef GPTFAST_CUDA
#include <c10/cuda/CUDAStream.h>

#include "gptfast/speculative_graph.h"
#include "ops/cuda/speculate.h"
#endif

namespace gptfast {
namespace {

#ifdef GPTFAST_CUDA

using CudaSpeculation = CudaTest;

ModelArgs small_config(int64_t vocab_size, int64_t block_size) {
  ModelArgs config{.block_size = block_size,
                   .vocab_size = vocab_size,
                   .n_layer = vocab_size < 50 ? 1 : 2,  // the few tokens' models run most often
                   .n_head = 4,
                   .dim = 64,
                   .intermediate_size = 96,
                   .n_local_heads = 2};
  config.finalize();
  return config;
}

Transformer small_model(int64_t vocab_size, uint64_t seed,
                        WeightScheme scheme = {WeightFormat::kBFloat16}, int64_t block_size = 256) {
  return random_model(small_config(vocab_size, block_size), scheme, at::kBFloat16, kGpu, seed);
}

/// A model whose distributions are near those of small_model(vocab_size, seed).
Transformer near_model(int64_t vocab_size, uint64_t seed) {
  Transformer model = small_model(vocab_size, seed);
  for (const auto& [name, linear] : named_linears(*model)) {
    const double std = 1 / std::sqrt(static_cast<double>(linear->in_features));
    linear->weight.add_(at::randn_like(linear->weight), 0.15 * std);
  }
  return model;
}

GenerateOptions greedy(int64_t max_new_tokens) {
  GenerateOptions options;
  options.max_new_tokens = max_new_tokens;
  options.sampling.temperature = 0;
  return options;
}

constexpr int64_t kVocab = 96;
const std::vector<int32_t> kPrompt = {5, 17, 3, 60, 5, 17, 9, 5};

std::vector<int32_t> tokens_of(Transformer& model, const GenerateOptions& options,
                               const std::vector<int32_t>& prompt = kPrompt) {
  return generate(model, prompt, options).rows[0].tokens;
}

TEST_F(CudaSpeculation, GreedyTokensAreThoseOfPlainDecoding) {
  Transformer draft = near_model(kVocab, 3);
  for (const WeightScheme scheme :
       {WeightScheme{WeightFormat::kBFloat16}, {WeightFormat::kInt8}, {WeightFormat::kInt4, 32}}) {
    Transformer model = small_model(kVocab, 3, scheme);
    ASSERT_TRUE(SpeculativeGraph::supported(*model, draft.get()));
    const auto text = tokens_of(model, greedy(90));
    for (int64_t k = 1; k <= 17; ++k) {
      for (const int64_t length : {1, 2, 3, 7, 30, 90}) {
        const std::vector<int32_t> plain(text.begin(), text.begin() + length);
        GenerateOptions options = greedy(length);
        options.speculate_k = k == 17 ? 64 : k;
        options.lookup = true;
        EXPECT_EQ(tokens_of(model, options), plain)
            << to_string(scheme.format) << ", lookup, k " << k << ", length " << length;
        options.draft_model = &draft;
        const GenerateResult result = generate(model, kPrompt, options);
        EXPECT_EQ(result.rows[0].tokens, plain)
            << to_string(scheme.format) << ", draft, k " << k << ", length " << length;
        int64_t added = 0;
        for (size_t i = 0; i < result.accept_counts.size(); ++i)
          added += result.accept_counts[i] * static_cast<int64_t>(i + 1);
        EXPECT_EQ(added, length - 1) << "the prefill's token is no round's";
      }
    }
  }
}

TEST_F(CudaSpeculation, ADraftEqualToTheModelIsAlwaysAccepted) {
  Transformer model = small_model(kVocab, 3), twin = small_model(kVocab, 3);
  for (const double temperature : {0.0, 0.8, 1.0}) {
    for (const int64_t top_k : {0, 5}) {
      GenerateOptions options = greedy(61);
      options.sampling = {.temperature = temperature, .top_k = top_k, .seed = 4};
      options.draft_model = &twin;
      options.speculate_k = 5;
      EXPECT_EQ(generate(model, kPrompt, options).accept_counts,
                (std::vector<int64_t>{0, 0, 0, 0, 0, 10}))
          << temperature << ", top_k " << top_k;
    }
  }
}

TEST_F(CudaSpeculation, StopTokensInsideAnAcceptedBlockEndTheText) {
  Transformer model = small_model(kVocab, 3), twin = small_model(kVocab, 3);
  GenerateOptions options = greedy(60);
  const auto plain = tokens_of(model, options);
  const std::vector<int32_t> other = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  const auto plain_other = tokens_of(model, options, other);
  options.draft_model = &twin;
  options.speculate_k = 6;
  for (size_t at = 1; at < 20; ++at) {
    options.stop_tokens = {plain[at]};
    const auto end = std::find(plain.begin(), plain.end(), plain[at]) + 1;
    const GenerateResult result = generate(model, kPrompt, options);
    EXPECT_EQ(result.rows[0].tokens, std::vector(plain.begin(), end)) << at;
    EXPECT_EQ(result.rows[0].finish_reason, FinishReason::kStop);
    options.stop_tokens = {};  // the round that was launched ahead leaves no trace
    EXPECT_EQ(tokens_of(model, options, other), plain_other) << at;
  }
}

TEST_F(CudaSpeculation, NearTheEndOfTheContext) {
  const auto format = WeightScheme{WeightFormat::kBFloat16};
  Transformer model = small_model(kVocab, 3, format, 64),
              draft = small_model(kVocab, 4, format, 64);
  for (const int64_t length : {55, 60, 62, 63}) {
    std::vector<int32_t> prompt(static_cast<size_t>(length));
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 7 % 20);
    const auto plain = tokens_of(model, greedy(20), prompt);
    EXPECT_EQ(std::ssize(plain), 64 - length);
    for (const int64_t k : {1, 3, 8, 20}) {
      GenerateOptions options = greedy(20);
      options.speculate_k = k;
      options.lookup = true;
      EXPECT_EQ(tokens_of(model, options, prompt), plain) << "lookup " << k << ", " << length;
      options.draft_model = &draft;
      const GenerateResult result = generate(model, prompt, options);
      EXPECT_EQ(result.rows[0].tokens, plain) << "draft " << k << ", " << length;
      EXPECT_EQ(result.rows[0].finish_reason, FinishReason::kContext);
    }
  }
}

TEST_F(CudaSpeculation, SampledTokensAreThoseOfTheHostsRounds) {
  Transformer model = small_model(kVocab, 3), near = near_model(kVocab, 3),
              far = small_model(kVocab, 4);
  int texts = 0, different = 0;  // a chance may differ in its last bit
  for (Transformer* draft : {&near, &far, static_cast<Transformer*>(nullptr)}) {
    for (const int64_t top_k : {0, 1, 5}) {
      for (uint64_t seed = 0; seed < 8; ++seed, ++texts) {
        GenerateOptions options = greedy(50);
        options.sampling = {.temperature = seed % 2 == 0 ? 1.0 : 0.8, .top_k = top_k, .seed = seed};
        options.draft_model = draft;
        options.lookup = draft == nullptr;
        options.speculate_k = seed < 6 ? 4 : 9;
        const GenerateResult device = generate(model, kPrompt, options);
        EXPECT_EQ(generate(model, kPrompt, options).rows[0].tokens, device.rows[0].tokens)
            << "a second run";
        options.return_logits = true;  // needs the host at each round
        const GenerateResult host = generate(model, kPrompt, options);
        different += static_cast<int>(host.rows[0].tokens != device.rows[0].tokens ||
                                      host.accept_counts != device.accept_counts);
      }
    }
  }
  EXPECT_LE(different, 1) << "of " << texts;
}

TEST_F(CudaSpeculation, ADraftOfNaNsProposesNothing) {
  Transformer model = small_model(kVocab, 3), draft = small_model(kVocab, 4);
  draft->output->weight.fill_(std::numeric_limits<double>::quiet_NaN());
  for (const double temperature : {0.0, 1.0}) {
    GenerateOptions options = greedy(20);
    options.sampling.temperature = temperature;
    const auto plain = tokens_of(model, options);
    options.draft_model = &draft;
    const GenerateResult result = generate(model, kPrompt, options);
    EXPECT_EQ(result.rows[0].tokens, plain);
    EXPECT_EQ(result.accept_counts, (std::vector<int64_t>{19, 0, 0, 0, 0, 0}));
  }
}

TEST_F(CudaSpeculation, GraphsFollowTheirCachesAndDrafts) {
  Transformer model = small_model(kVocab, 3), draft = near_model(kVocab, 3);
  GenerateOptions options = greedy(10);
  options.draft_model = &draft;
  tokens_of(model, options);
  {
    SpeculativeGraph& graph = model->speculative_graph(draft.ptr(), options.speculate_k);
    EXPECT_TRUE(graph.is_for(draft.ptr(), 5));
    EXPECT_FALSE(graph.is_for(nullptr, 5));
    EXPECT_FALSE(graph.is_for(draft.ptr(), 6));
    const std::string error = error_of([&] { graph.start(kPrompt, 1 << 20, {}); });
    EXPECT_NE(error.find("may grow to 1048576 does not fit caches of"), std::string::npos) << error;
    draft->setup_caches(1, 200);
    EXPECT_FALSE(graph.is_for(draft.ptr(), 5));
  }
  const auto plain = tokens_of(model, greedy(10));
  EXPECT_EQ(tokens_of(model, options), plain);
  draft = near_model(kVocab, 3);
  EXPECT_EQ(tokens_of(model, options), plain) << "another draft in the place of the first";
}

// ---- The kernels between the steps

/// State and buffers of a round without models.
struct Round {
  Round(int64_t k, int64_t vocab, const std::vector<int32_t>& text, int64_t end,
        const SamplingOptions& sampling)
      : k(k), vocab(vocab) {
    const cuda::RoundState host{.seed = static_cast<int64_t>(sampling.seed),
                                .temperature = static_cast<float>(sampling.temperature),
                                .top_k = static_cast<int32_t>(sampling.top_k),
                                .pos = static_cast<int32_t>(text.size()) - 1,
                                .end = static_cast<int32_t>(end),
                                .round = 0,
                                .drafted = static_cast<int32_t>(k)};
    state = at::empty({sizeof(host)}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &host, sizeof(host));
    state = state.to(kGpu);
    this->text = at::zeros({end + 1}, at::kInt);
    this->text.narrow(0, 0, std::ssize(text)).copy_(at::tensor(text, at::kInt));
    this->text = this->text.to(kGpu);
    args = {.state = reinterpret_cast<cuda::RoundState*>(state.mutable_data_ptr()),
            .text = this->text.mutable_data_ptr<int32_t>(),
            .k = static_cast<int>(k),
            .tokens = tokens.mutable_data_ptr<int32_t>(),
            .positions = positions.mutable_data_ptr<int32_t>(),
            .rows_of_step = kMaxStepRows,
            .first_tokens = first.mutable_data_ptr<int32_t>(),
            .draft_token = first.mutable_data_ptr<int32_t>() + 2,
            .draft_pos = first.mutable_data_ptr<int32_t>() + 3};
  }

  cuda::RoundState host_state() const {
    cuda::RoundState host{};
    std::memcpy(&host, state.cpu().const_data_ptr(), sizeof(host));
    return host;
  }

  /// The tokens that a round adds.
  std::vector<int32_t> accept(const Tensor& logits, const Tensor& draft_logits, bool clusters) {
    const Tensor stats = at::empty({(2 * k + 1) * static_cast<int64_t>(sizeof(cuda::RowStats))},
                                   at::TensorOptions(kGpu).dtype(at::kByte));
    const Tensor history = at::zeros({k + 2}, tokens.options());
    EXPECT_EQ(cuda::accept_round({.stream = c10::cuda::getCurrentCUDAStream(),
                                  .clusters = clusters},
                                 {.round = args,
                                  .logits = logits.const_data_ptr<float>(),
                                  .draft_logits = draft_logits.defined()
                                                      ? draft_logits.const_data_ptr<float>()
                                                      : nullptr,
                                  .vocab = static_cast<int>(vocab),
                                  .stats = static_cast<cuda::RowStats*>(stats.mutable_data_ptr()),
                                  .history = history.mutable_data_ptr<int32_t>(),
                                  .history_rounds = 1}),
              cudaSuccess);
    const Tensor row = history.cpu();
    const int32_t* added = row.const_data_ptr<int32_t>();
    return {added + 1, added + 1 + added[0]};
  }

  int64_t k, vocab;
  Tensor state, text;
  Tensor tokens = at::zeros({65}, at::TensorOptions(kGpu).dtype(at::kInt));
  Tensor positions = at::zeros({9}, tokens.options());
  Tensor first = at::zeros({4}, tokens.options());
  cuda::RoundArgs args;
};

TEST_F(CudaSpeculation, LookupFindsWhatTheHostFinds) {
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const int64_t size = i < 200 ? 2 + static_cast<int64_t>(random() % 60) : 3000 + i;
    const uint32_t alphabet = 2 + random() % (i < 200 ? 20 : 2000);
    std::vector<int32_t> text;
    for (int64_t j = 0; j < size; ++j) text.push_back(static_cast<int32_t>(random() % alphabet));
    const int64_t k = 1 + static_cast<int64_t>(random() % 64),
                  left = static_cast<int64_t>(random() % 70);
    Round round(k, /*vocab=*/0, text, size + left, {});
    ASSERT_EQ(cuda::begin_round({.stream = c10::cuda::getCurrentCUDAStream()}, round.args,
                                /*lookup=*/true, kLookupNgram),
              cudaSuccess);
    const auto expected = lookup_draft(text, std::min(k, std::max<int64_t>(left - 1, 0)));
    const int32_t drafted = round.host_state().drafted;
    EXPECT_EQ(drafted, left == 0 ? -1 : static_cast<int32_t>(expected.size())) << size;
    const Tensor tokens = round.tokens.cpu();
    EXPECT_EQ(tokens[0].item<int32_t>(), text.back());
    for (size_t j = 0; j < expected.size(); ++j)
      EXPECT_EQ(tokens[static_cast<int64_t>(j) + 1].item<int32_t>(), expected[j]) << size;
    for (int64_t j = 0; j <= k / kMaxStepRows; ++j)
      EXPECT_EQ(round.positions[j].item<int32_t>(), size - 1 + j * kMaxStepRows);
  }
}

TEST_F(CudaSpeculation, AcceptsWhatTheHostAccepts) {
  int rounds = 0,
      different = 0;  // expf and sums differ in the last bit: a near-tie may go either way
  for (const auto& [temperature, top_k] :
       std::vector<std::pair<double, int64_t>>{{0, 200}, {1, 0}, {0.8, 5}, {0.8, 200}, {1, 1}}) {
    for (const int64_t vocab : {700, 32000}) {
      for (const int64_t k : {1, 4, 13, 64}) {
        for (uint64_t seed = 0; seed < 12; ++seed, ++rounds) {
          const bool lookup = seed % 3 == 2;
          const SamplingOptions sampling{.temperature = temperature, .top_k = top_k, .seed = seed};
          const Tensor logits = at::randn({k + 1, vocab}) * 3;
          const Tensor draft_logits =
              logits.narrow(0, 0, k) + at::randn({k, vocab}) * (seed % 2 == 0 ? 0.05 : 1.0);
          const int64_t pos = 40 + static_cast<int64_t>(seed);
          Draft draft;
          for (int64_t i = 0; i < k; ++i) {
            draft.tokens.push_back(sample_row(draft_logits[i].const_data_ptr<float>(), vocab,
                                              temperature, top_k, seed, pos + i));
          }
          if (!lookup && temperature > 0)
            draft.probs = logits_to_probs(draft_logits, temperature, top_k);
          Round round(k, vocab, std::vector<int32_t>(static_cast<size_t>(pos + 1), 1), pos + k + 9,
                      sampling);
          round.tokens.narrow(0, 1, k).copy_(at::tensor(draft.tokens, at::kInt));
          const auto host = accept(draft, logits, sampling, pos);
          const Tensor of_draft = lookup ? Tensor() : draft_logits.to(kGpu);
          const auto device = round.accept(logits.to(kGpu), of_draft, /*clusters=*/seed % 4 < 2);
          different += static_cast<int>(device != host);
          const cuda::RoundState state = round.host_state();
          EXPECT_EQ(state.pos, pos + std::ssize(device));
          for (size_t i = 0; i < device.size(); ++i)
            EXPECT_EQ(round.text[pos + 1 + static_cast<int64_t>(i)].item<int32_t>(), device[i]);
        }
      }
    }
  }
  EXPECT_LE(different, rounds / 100) << "of " << rounds;
}

TEST_F(CudaSpeculation, ANaNRowGivesMinusOneWhenItIsReached) {
  const int64_t vocab = 500;
  for (const double temperature : {0.0, 1.0}) {
    for (const int64_t bad : {0, 2, 4}) {
      Tensor logits = at::zeros({5, vocab});
      logits.narrow(1, 7, 1).fill_(50);  // token 7 is all but certain
      logits[bad][33] = std::numeric_limits<float>::quiet_NaN();
      Round round(4, vocab, {1, 2}, 20, {.temperature = temperature, .top_k = 0, .seed = 1});
      round.tokens.fill_(7);
      const auto added = round.accept(logits.to(kGpu), {}, /*clusters=*/true);
      EXPECT_EQ(added, accept({{7, 7, 7, 7}, {}}, logits,
                              {.temperature = temperature, .top_k = 0, .seed = 1}, 1));
      EXPECT_EQ(added.back(), -1);
    }
  }
}

// ---- Distributions

constexpr int64_t kDraws = 20000;
constexpr int64_t kFewTokens = 24;

struct Setting {
  const char* name;
  double temperature;
  int64_t top_k;
  const char* draft;
};

class CudaDistribution : public CudaSpeculation, public testing::WithParamInterface<Setting> {};

/// p [V] of the token after `text`, whose other tokens are in the model's cache.
Tensor probs_after(Transformer& model, const std::vector<int32_t>& text, const Setting& setting) {
  const Tensor row = verify(model, {&text.back(), 1}, std::ssize(text) - 1)[0];
  return logits_to_probs(row.cpu().to(at::kDouble), setting.temperature, setting.top_k);
}

Tensor probs_of_prompt(Transformer& model, const std::vector<int32_t>& prompt,
                       const Setting& setting) {
  model->setup_caches(1, 64);
  prefill(model, prompt, 0);
  return probs_after(model, prompt, setting);
}

/// p [V, V] of each two tokens after the prompt.
Tensor exact_pairs(Transformer& model, std::vector<int32_t> prompt, const Setting& setting) {
  const Tensor first = probs_of_prompt(model, prompt, setting);
  std::vector<Tensor> pairs(kFewTokens);
  prompt.push_back(0);
  for (int32_t token = 0; token < kFewTokens; ++token) {
    prompt.back() = token;
    pairs[static_cast<size_t>(token)] = first[token] * probs_after(model, prompt, setting);
  }
  return at::stack(pairs);
}

/// A draft, and a prompt at whose end the draft's token is accepted now and then. Lookup has none:
/// it proposes what followed the prompt's last token.
struct Pair {
  Transformer draft{nullptr};
  std::vector<int32_t> prompt = {3, 9, 14, 20, 3, 9, 11, 3};
};

Pair make_pair(Transformer& model, const Setting& setting) {
  constexpr double kLeast = 0.05;
  const std::string kind = setting.draft;
  Pair pair;
  for (int32_t i = 0; i < 100; ++i) {
    if (kind == "near") pair.draft = near_model(kFewTokens, 3);
    if (kind == "far") pair.draft = small_model(kFewTokens, 4 + static_cast<uint64_t>(i));
    if (kind == "lookup") pair.prompt[5] = i % static_cast<int32_t>(kFewTokens);
    const Tensor p = probs_of_prompt(model, pair.prompt, setting);
    const double accepted =
        (kind == "lookup" ? p[pair.prompt[5]]
                          : at::minimum(p, probs_of_prompt(pair.draft, pair.prompt, setting)).sum())
            .item<double>();
    if (accepted >= kLeast && pair.prompt[5] != 3) return pair;
  }
  ADD_FAILURE() << "no draft of which anything is accepted";
  return pair;
}

TEST_P(CudaDistribution, OfTwoTokensIsTheModels) {
  const Setting& setting = GetParam();
  Transformer model = small_model(kFewTokens, 3);
  const auto [draft, prompt] = make_pair(model, setting);
  const Tensor exact = exact_pairs(model, prompt, setting).flatten();
  prefill(model, prompt, 0);
  SpeculativeGraph& graph = model->speculative_graph(draft ? draft.ptr() : nullptr, /*k=*/2);

  Tensor seen = at::zeros({kFewTokens * kFewTokens}, at::kDouble);
  auto* counts = seen.mutable_data_ptr<double>();
  int64_t accepted = 0;
  const int64_t size = std::ssize(prompt);
  for (int64_t i = 0; i < kDraws; ++i) {
    // Every other text ends after two tokens, which caps what may be accepted.
    graph.start(prompt, size + (i % 2 == 0 ? 2 : 8),
                {.temperature = setting.temperature,
                 .top_k = setting.top_k,
                 .seed = static_cast<uint64_t>(i)});
    graph.launch();
    std::vector<int32_t> added = graph.read();
    accepted += std::ssize(added) - 1;
    if (added.size() < 2) {
      graph.launch();
      const auto more = graph.read();
      added.insert(added.end(), more.begin(), more.end());
    }
    ASSERT_GE(added.size(), 2U);
    ++counts[added[0] * kFewTokens + added[1]];
  }

  const Tensor expected = exact * kDraws;
  EXPECT_EQ(at::masked_select(seen, expected == 0).sum().item<double>(), 0) << "impossible texts";
  const Tensor large = expected >= 5;
  const auto pooled = [&](const Tensor& t) {  // cells that are expected fewer than 5 times are one
    return at::cat({at::masked_select(t, large), at::masked_select(t, ~large).sum().view({1})});
  };
  const Tensor e = pooled(expected), s = pooled(seen);
  const Tensor terms = (s - e).square() / e.clamp_min(1e-9);
  const bool rest = e[-1].item<double>() >= 5;
  const auto cells = static_cast<double>(e.numel() - (rest ? 0 : 1));
  const double chi2 = (rest ? terms : terms.narrow(0, 0, e.numel() - 1)).sum().item<double>();
  const double sigmas = (chi2 - (cells - 1)) / std::sqrt(2 * (cells - 1));
  std::cout << setting.name << ": " << cells << " cells, " << sigmas << " sigmas, "
            << static_cast<double>(accepted) / kDraws << " accepted in the first round"
            << std::endl;
  EXPECT_GT(accepted, 0);
  EXPECT_LT(std::abs(sigmas), 4);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, CudaDistribution,
    testing::Values(Setting{"t1_near", 1, 0, "near"}, Setting{"t1_top5_near", 1, 5, "near"},
                    Setting{"t08_near", 0.8, 0, "near"}, Setting{"t08_top5_near", 0.8, 5, "near"},
                    Setting{"t1_far", 1, 0, "far"}, Setting{"t1_top5_far", 1, 5, "far"},
                    Setting{"t08_far", 0.8, 0, "far"}, Setting{"t08_top5_far", 0.8, 5, "far"},
                    Setting{"t1_lookup", 1, 0, "lookup"}, Setting{"t1_top5_lookup", 1, 5, "lookup"},
                    Setting{"t08_lookup", 0.8, 0, "lookup"},
                    Setting{"t08_top5_lookup", 0.8, 5, "lookup"}),
    [](const auto& info) { return std::string(info.param.name); });

#else

TEST(CudaSpeculation, Skipped) {
  GTEST_SKIP() << "built without CUDA";
}

#endif

}  // namespace
}  // namespace gptfast
