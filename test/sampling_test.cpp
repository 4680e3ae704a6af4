// Sampling against the original's probabilities, and draws against the distribution they should
// follow.
#include "gptfast/sampling.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "philox.h"
#include "test_util.h"

namespace gptfast {
namespace {

TEST(LogitsToProbs, EqualsTheOriginal) {
  const StateDict g = load_checkpoint(golden("sampling/logits_to_probs.pth"));
  int compared = 0;
  for (const auto& [name, expected] : g) {  // {fp32,bf16}.t{temperature}.k{top_k or None}
    const size_t t = name.find(".t"), k = name.rfind(".k");
    if (t == std::string::npos || k == std::string::npos) continue;
    const bool bf16 = name.starts_with("bf16");
    const double temperature = std::stod(name.substr(t + 2, k - t - 2));
    const std::string top_k = name.substr(k + 2);
    const Tensor logits = g.at("logits").to(bf16 ? at::kBFloat16 : at::kFloat);
    const Tensor actual =
        logits_to_probs(logits, temperature, top_k == "None" ? 0 : std::stoll(top_k));
    EXPECT_LT((actual.to(at::kFloat) - expected.to(at::kFloat)).abs().max().item<double>(),
              bf16 ? 4e-3 : 1e-6)
        << name;
    ++compared;
  }
  EXPECT_EQ(compared, 72);
}

/// Chi-square of counts against probabilities, as a number of standard deviations from its mean.
double chi_square_sigmas(const std::vector<int64_t>& counts, const Tensor& probs, int64_t draws) {
  double chi2 = 0;
  int64_t cells = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected =
        probs[static_cast<int64_t>(i)].item<double>() * static_cast<double>(draws);
    if (expected == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " has probability 0";
      continue;
    }
    chi2 += std::pow(static_cast<double>(counts[i]) - expected, 2) / expected;
    ++cells;
  }
  const auto degrees = static_cast<double>(cells - 1);
  return degrees == 0 ? 0 : (chi2 - degrees) / std::sqrt(2 * degrees);
}

constexpr int64_t kDraws = 20000;

TEST(SampleRow, DrawsFollowTheDistribution) {
  at::manual_seed(1);
  const Tensor logits = at::randn({40}) * 1.5;
  for (const auto& [temperature, top_k] :
       {std::pair{1.0, int64_t{0}}, {0.8, 5}, {2.0, 17}, {0.5, 1000}}) {
    std::vector<int64_t> counts(40);
    for (int64_t i = 0; i < kDraws; ++i)
      ++counts[sample_row(logits.const_data_ptr<float>(), 40, temperature, top_k, /*seed=*/77,
                          /*pos=*/i)];
    EXPECT_LT(std::abs(
                  chi_square_sigmas(counts, logits_to_probs(logits, temperature, top_k), kDraws)),
              4)
        << temperature << " " << top_k;
  }
}

TEST(SampleRow, RowsPositionsAndSeedsAreIndependent) {
  const Tensor logits = at::zeros({4});  // four even tokens: pairs of draws fill sixteen even cells
  const auto draw = [&](uint64_t seed, int64_t pos) {
    return sample_row(logits.const_data_ptr<float>(), 4, 1.0, 0, seed, pos);
  };
  std::vector<int64_t> next_position(16), next_seed(16);
  for (int64_t i = 0; i < kDraws; ++i) {
    ++next_position[draw(5, i) * 4 + draw(5, i + 1)];
    ++next_seed[draw(5, i) * 4 + draw(6, i)];
  }
  const Tensor even = at::full({16}, 1.0 / 16);
  EXPECT_LT(std::abs(chi_square_sigmas(next_position, even, kDraws)), 4);
  EXPECT_LT(std::abs(chi_square_sigmas(next_seed, even, kDraws)), 4);
  EXPECT_EQ(draw(5, 9), draw(5, 9));
}

TEST(SampleRow, EdgesOfTemperatureAndTopK) {
  std::vector<float> logits = {1, 3, 3, 2};
  const auto draw = [&](double temperature, int64_t top_k) {
    return sample_row(logits.data(), static_cast<int64_t>(logits.size()), temperature, top_k, 1, 1);
  };
  EXPECT_EQ(draw(0, 0), 1) << "argmax, ties to the lowest id";
  EXPECT_EQ(draw(0, 200), 1);
  EXPECT_EQ(draw(1, 1), 1);
  logits = {-std::numeric_limits<float>::infinity(), 0, -std::numeric_limits<float>::infinity()};
  for (const int64_t top_k : {0, 1, 2, 3, 4}) EXPECT_EQ(draw(1, top_k), 1);
  EXPECT_EQ(draw(1e-9, 0), 1);
  logits[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(draw(0, 0), -1);
  EXPECT_EQ(draw(1, 5), -1);
}

TEST(SampleRow, TiesAtThePivotStay) {
  const std::vector<float> logits = {5, 1, 1, 1,
                                     0};  // top 2 keeps the three ones, as the original's
  std::vector<int64_t> counts(5);
  for (int64_t i = 0; i < 2000; ++i) ++counts[sample_row(logits.data(), 5, 3.0, 2, 3, i)];
  for (const int64_t i : {0, 1, 2, 3}) EXPECT_GT(counts[i], 0);
  EXPECT_EQ(counts[4], 0);
}

TEST(SampleRow, FindsThePivotOfLargeRows) {
  at::manual_seed(2);
  const Tensor logits = at::randn({50000}) * 4 - 100;
  for (const int64_t k : {2, 200, 4000, 49999}) {
    const float pivot = std::get<0>(at::topk(logits, k))[k - 1].item<float>();
    for (int64_t i = 0; i < 200; ++i) {
      const int32_t token =
          sample_row(logits.const_data_ptr<float>(), 50000, /*temperature=*/50, k, 9, i);
      EXPECT_GE(logits[token].item<float>(), pivot);
    }
  }
}

TEST(Philox, EqualsThePublishedVectors) {  // Random123's known answers; the fourth counter word is
                                           // always 0 here
  const PhiloxBlock zeros = philox(0, 0, 0, 0);
  EXPECT_EQ(zeros.word[0], 0x6627e8d5U);
  EXPECT_EQ(zeros.word[1], 0xe169c58dU);
  EXPECT_EQ(zeros.word[2], 0xbc57ac4cU);
  EXPECT_EQ(zeros.word[3], 0x9b00dbd8U);
}

}  // namespace
}  // namespace gptfast
