// Speculative decoding: exact at temperature 0, exact in distribution above, whatever the draft
// proposes.
#include "gptfast/speculative.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "gptfast/generate.h"
#include "gptfast/threads.h"
#include "test_util.h"

namespace gptfast {
namespace {

std::vector<int32_t> to_vector(const Tensor& ids) {
  const Tensor i32 = ids.to(at::kInt).contiguous();
  return {i32.const_data_ptr<int32_t>(), i32.const_data_ptr<int32_t>() + i32.numel()};
}

class Speculative : public ::testing::Test {
 protected:
  Speculative()
      : exact(load_checkpoint(golden("tiny-spec/spec_exact.pth"))),
        prompt(to_vector(exact.at("prompt_ids"))) {
    set_num_threads(1);  // models this small only lose by sharing
  }

  GenerateOptions greedy(int64_t max_new_tokens) const {
    GenerateOptions options;
    options.max_new_tokens = max_new_tokens;
    options.sampling.temperature = 0;
    return options;
  }

  StateDict exact;
  std::vector<int32_t> prompt;
};

TEST_F(Speculative, GreedyTokensAreThoseOfPlainDecoding) {
  for (const at::ScalarType precision : {at::kFloat, at::kBFloat16}) {
    Transformer model = tiny_model("tiny-spec", precision),
                draft = tiny_model("tiny-draft", precision);
    for (const int64_t length : {1, 2, 3, 64}) {
      const auto plain = generate(model, prompt, greedy(length)).rows[0].tokens;
      if (length == 64 && precision == at::kFloat) {
        EXPECT_EQ(plain, to_vector(exact.at("greedy64")));
      }
      for (const int64_t k : {1, 2, 5, 8, 20, 64}) {
        GenerateOptions options = greedy(length);
        options.speculate_k = k;
        options.draft_model = &draft;
        const GenerateResult with_draft = generate(model, prompt, options);
        EXPECT_EQ(with_draft.rows[0].tokens, plain) << "draft, k " << k << ", length " << length;
        options.draft_model = nullptr;
        options.lookup = true;
        EXPECT_EQ(generate(model, prompt, options).rows[0].tokens, plain)
            << "lookup, k " << k << ", length " << length;
        int64_t added = 0;
        for (size_t i = 0; i < with_draft.accept_counts.size(); ++i)
          added += with_draft.accept_counts[i] * static_cast<int64_t>(i + 1);
        EXPECT_EQ(added, length - 1) << "the prefill's token is no round's";
      }
    }
  }
}

TEST_F(Speculative, ADraftEqualToTheModelIsAlwaysAccepted) {
  Transformer model = tiny_model("tiny-spec"), twin = tiny_model("tiny-spec");
  for (const double temperature : {0.0, 1.0}) {
    GenerateOptions options = greedy(61);
    options.sampling.temperature = temperature;
    options.draft_model = &twin;
    options.speculate_k = 5;
    EXPECT_EQ(generate(model, prompt, options).accept_counts,
              (std::vector<int64_t>{0, 0, 0, 0, 0, 10}));
  }
}

TEST_F(Speculative, StopTokensInsideAnAcceptedBlockEndTheText) {
  Transformer model = tiny_model("tiny-spec"), twin = tiny_model("tiny-spec");
  GenerateOptions options = greedy(30);
  const auto plain = generate(model, prompt, options).rows[0].tokens;
  options.draft_model = &twin;
  options.stop_tokens = {plain[8]};
  const auto first = std::find(plain.begin(), plain.end(), plain[8]) + 1;
  const GenerateResult result = generate(model, prompt, options);
  EXPECT_EQ(result.rows[0].tokens, std::vector(plain.begin(), first));
  EXPECT_EQ(result.rows[0].finish_reason, FinishReason::kStop);
}

TEST_F(Speculative, NearTheEndOfTheContext) {
  ModelArgs config{.block_size = 64,
                   .vocab_size = 128,
                   .n_layer = 1,
                   .n_head = 2,
                   .dim = 32,
                   .intermediate_size = 64};
  config.finalize();
  Transformer model = random_model(config, {WeightFormat::kFloat32}, at::kFloat, at::kCPU, 1);
  const std::vector<int32_t> long_prompt(60, 5);
  const auto plain = generate(model, long_prompt, greedy(20)).rows[0].tokens;
  EXPECT_EQ(plain.size(), 4U);
  GenerateOptions options = greedy(20);
  options.lookup = true;
  options.speculate_k = 8;
  const GenerateResult result = generate(model, long_prompt, options);
  EXPECT_EQ(result.rows[0].tokens, plain);
  EXPECT_EQ(result.rows[0].finish_reason, FinishReason::kContext);
}

TEST_F(Speculative, LogitsOfEveryFedTokenEqualPlainDecoding) {
  Transformer model = tiny_model("tiny-spec"), draft = tiny_model("tiny-draft");
  GenerateOptions options = greedy(20);
  options.return_logits = true;
  const Tensor plain = generate(model, prompt, options).logits;
  options.draft_model = &draft;
  EXPECT_TRUE(at::equal(generate(model, prompt, options).logits, plain));
}

/// Chi-square of observed counts, in standard deviations of its distribution; cells with fewer than
/// 5 expected are pooled.
double chi_square_sigmas(const std::map<std::vector<int32_t>, int64_t>& counts,
                         const std::map<std::vector<int32_t>, double>& probs, int64_t draws) {
  double chi2 = 0, pooled_expected = 0, pooled_observed = 0;
  int64_t cells = 0;
  for (const auto& [cell, p] : probs) {
    const double expected = p * static_cast<double>(draws);
    const double observed = counts.contains(cell) ? static_cast<double>(counts.at(cell)) : 0;
    if (expected < 5) {
      pooled_expected += expected;
      pooled_observed += observed;
      continue;
    }
    chi2 += (observed - expected) * (observed - expected) / expected;
    ++cells;
  }
  if (pooled_expected >= 5) {
    chi2 +=
        (pooled_observed - pooled_expected) * (pooled_observed - pooled_expected) / pooled_expected;
    ++cells;
  }
  return (chi2 - static_cast<double>(cells - 1)) / std::sqrt(2.0 * static_cast<double>(cells - 1));
}

constexpr int64_t kDraws = 20000;

/// `count` tokens after the prompt by whole rounds with seed `seed`; `propose` drafts.
template <typename Propose>
std::vector<int32_t> continuation(Transformer& model, std::vector<int32_t> text, size_t count,
                                  const SamplingOptions& sampling, Propose propose) {
  const size_t start = text.size();
  while (text.size() < start + count) {
    const Draft draft = propose(text);
    std::vector<int32_t> fed = {text.back()};
    fed.insert(fed.end(), draft.tokens.begin(), draft.tokens.end());
    const auto pos = static_cast<int64_t>(text.size()) - 1;
    const auto added = accept(draft, verify(model, fed, pos), sampling, pos);
    text.insert(text.end(), added.begin(), added.end());
  }
  return {text.begin() + static_cast<int64_t>(start),
          text.begin() + static_cast<int64_t>(start + count)};
}

struct Setting {
  const char* tag;
  double temperature;
  int64_t top_k;
};

/// Counts of kDraws continuations against the exact distribution of the model: all first three
/// tokens where the reference has them, else the second token.
template <typename Propose>
void expect_exact(const StateDict& exact, Transformer& model, const std::vector<int32_t>& prompt,
                  const Setting& setting, Propose make_propose) {
  const c10::InferenceMode guard;
  const std::string tag = setting.tag;
  std::map<std::vector<int32_t>, double> probs;
  const bool joint = exact.contains(tag + ".joint3_cells");
  if (joint) {
    const Tensor cells = exact.at(tag + ".joint3_cells");
    for (int64_t i = 0; i < cells.size(0); ++i)
      probs[to_vector(cells[i])] = exact.at(tag + ".joint3_probs")[i].item<double>();
  } else {
    const Tensor marginal = exact.at(tag + ".p_token2_marginal");
    for (int32_t i = 0; i < marginal.numel(); ++i) probs[{i}] = marginal[i].item<double>();
  }
  std::map<std::vector<int32_t>, int64_t> counts;
  for (int64_t i = 0; i < kDraws; ++i) {
    const SamplingOptions sampling{.temperature = setting.temperature,
                                   .top_k = setting.top_k,
                                   .seed = static_cast<uint64_t>(i)};
    auto tokens = continuation(model, prompt, joint ? 3 : 2, sampling, make_propose(sampling));
    ++counts[joint ? tokens : std::vector<int32_t>{tokens[1]}];
  }
  for (const auto& [cell, count] : counts)
    EXPECT_GT(probs[cell], 0) << "an impossible continuation";
  EXPECT_LT(std::abs(chi_square_sigmas(counts, probs, kDraws)), 4) << tag;
}

class Distribution : public Speculative, public ::testing::WithParamInterface<Setting> {};

INSTANTIATE_TEST_SUITE_P(Settings, Distribution,
                         ::testing::Values(Setting{"t1.0.k4", 1.0, 4}, Setting{"t1.0.k2", 1.0, 2},
                                           Setting{"t0.8.k200", 0.8, 200},
                                           Setting{"t2.0.kNone", 2.0, 0}));

class DistributionOfOtherDrafts : public Distribution {};

INSTANTIATE_TEST_SUITE_P(Settings, DistributionOfOtherDrafts,
                         ::testing::Values(Setting{"t1.0.k4", 1.0, 4},
                                           Setting{"t0.8.k200", 0.8, 200}));

/// Drafts of `k` tokens by `draft`, whose cache holds the prompt but its last token.
auto drafts_of(Transformer& draft, const std::vector<int32_t>& prompt, int64_t k) {
  const auto known = std::span<const int32_t>(prompt).first(prompt.size() - 1);
  auto drafter = std::make_shared<DraftModel>(draft, known, 64);
  return [drafter, k, known](const SamplingOptions& sampling) {
    drafter->keep(static_cast<int64_t>(known.size()));
    return [drafter, k, sampling](const std::vector<int32_t>& text) {
      drafter->keep(static_cast<int64_t>(text.size()) - 1);
      return drafter->draft(text, k, sampling);
    };
  };
}

TEST_P(Distribution, WithANearDraft) {
  Transformer model = tiny_model("tiny-spec"), draft = tiny_model("tiny-draft");
  model->setup_caches(1, 64);
  prefill(model, prompt, 0);
  expect_exact(exact, model, prompt, GetParam(), drafts_of(draft, prompt, 2));
}

TEST_P(DistributionOfOtherDrafts, WithAFarDraft) {
  Transformer model = tiny_model("tiny-spec");
  ModelArgs config{.block_size = 512,
                   .vocab_size = 512,
                   .n_layer = 1,
                   .n_head = 2,
                   .dim = 32,
                   .intermediate_size = 64};
  config.finalize();
  Transformer draft = random_model(config, {WeightFormat::kFloat32}, at::kFloat, at::kCPU, 1);
  model->setup_caches(1, 64);
  prefill(model, prompt, 0);
  expect_exact(exact, model, prompt, GetParam(), drafts_of(draft, prompt, 2));
}

TEST_P(Distribution,
       WithCertainProposals) {  // as prompt lookup makes them: a likely token, then an unlikely one
  Transformer model = tiny_model("tiny-spec");
  model->setup_caches(1, 64);
  prefill(model, prompt, 0);
  const auto likely = static_cast<int32_t>(
      exact.at(std::string(GetParam().tag) + ".p_token1").argmax().item<int64_t>());
  expect_exact(exact, model, prompt, GetParam(), [&](const SamplingOptions&) {
    return [&](const std::vector<int32_t>&) { return Draft{{likely, 3}, {}}; };
  });
}

TEST(LookupDraft, FindsTheLatestLongestSuffix) {
  const std::vector<int32_t> text = {1, 2, 3, 9, 9, 2, 3, 8, 1, 2, 3};
  EXPECT_EQ(lookup_draft(text, 2), (std::vector<int32_t>{9, 9}))
      << "three tokens beat the later two";
  EXPECT_EQ(lookup_draft(text, 20), (std::vector<int32_t>{9, 9, 2, 3, 8, 1, 2, 3}));
  EXPECT_EQ(lookup_draft(std::vector<int32_t>{4, 5, 4, 6, 4}, 1), (std::vector<int32_t>{6}))
      << "the latest occurrence";
  EXPECT_TRUE(lookup_draft(std::vector<int32_t>{1, 2, 3}, 5).empty());
  EXPECT_TRUE(lookup_draft(std::vector<int32_t>{1}, 5).empty());
  EXPECT_EQ(lookup_draft(std::vector<int32_t>{7, 7}, 5), (std::vector<int32_t>{7}));
  EXPECT_TRUE(lookup_draft(text, 0).empty());
}

TEST_F(Speculative, RefusesWhatCannotWork) {
  Transformer model = tiny_model("tiny-spec"), other = tiny_model("tiny-mha");
  GenerateOptions options = greedy(10);
  options.draft_model = &other;
  EXPECT_NE(error_of([&] {
              generate(model, prompt, options);
            }).find("vocabulary has 300 tokens and the model's 512"),
            std::string::npos);
  options.draft_model = nullptr;
  options.lookup = true;
  for (const int64_t k : {int64_t{0}, int64_t{-1}, kMaxSpeculateK + 1}) {
    options.speculate_k = k;
    EXPECT_NE(error_of([&] {
                generate(model, prompt, options);
              }).find("speculate_k must be 1 to 64"),
              std::string::npos);
  }
  options.speculate_k = 5;
  options.batch_size = 2;
  EXPECT_NE(error_of([&] { generate(model, prompt, options); }).find("batch_size 2"),
            std::string::npos);
  options.batch_size = 1;
  EXPECT_NE(error_of([&] { generate(model, {}, options); }).find("prompt is empty"),
            std::string::npos);
}

}  // namespace
}  // namespace gptfast
