// Evaluation: requests in tokens, metrics, and scores against the original and against plain
// one-by-one scoring.
#include "gptfast/eval.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gptfast/tokenizer.h"
#include "test_util.h"

namespace gptfast {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

json golden_json(const std::string& name) {
  std::ifstream stream(golden("eval") / name);
  return json::parse(stream);
}

/// One token a byte, behind BOS (1) and EOS (2).
class ByteTokenizer : public Tokenizer {
 public:
  explicit ByteTokenizer(bool add_bos = false, bool has_bos = true)
      : add_bos_(add_bos), has_bos_(has_bos) {}

  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      if (parse_special && text.starts_with("<s>")) {
        ids.push_back(1);
        text.remove_prefix(3);
        continue;
      }
      ids.push_back(3 + static_cast<unsigned char>(text.front()));
      text.remove_prefix(1);
    }
    return ids;
  }
  std::string decode(const std::vector<int32_t>& /*ids*/) const override { return ""; }
  int32_t token_id(std::string_view /*token*/) const override { return -1; }
  int64_t vocab_size() const override { return 259; }
  int32_t bos_id() const override { return has_bos_ ? 1 : -1; }
  int32_t eos_id() const override { return 2; }
  bool add_bos() const override { return add_bos_; }
  std::vector<int32_t> stop_ids() const override { return {2}; }
  std::string_view kind() const override { return "bpe"; }
  std::string_view chat_template() const override { return ""; }

 protected:
  Piece piece(int32_t /*id*/, bool /*first*/) const override { return {}; }

 private:
  bool add_bos_;
  bool has_bos_;
};

// ---- Requests in tokens

std::vector<int32_t> bytes(std::string_view text) {
  return ByteTokenizer().encode(text, false);
}

std::vector<int32_t> with(std::vector<int32_t> first, const std::vector<int32_t>& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

TEST(EvalRequest, GivesSpaceAtTheContextsEndToTheContinuation) {
  const TokenRequest request =
      encode_request(ByteTokenizer(), {"ab \u00a0", "cd"}, BosRule::kHarness);
  EXPECT_EQ(request.tokens, bytes("ab \u00a0cd"));
  EXPECT_EQ(request.num_context, 2);
}

TEST(EvalRequest, PutsBosWhereTheRuleSays) {
  const EvalRequest request{"a", " b"};
  EXPECT_EQ(encode_request(ByteTokenizer(false), request, BosRule::kHarness).tokens, bytes("a b"));
  EXPECT_EQ(encode_request(ByteTokenizer(true), request, BosRule::kHarness).tokens,
            with({1}, bytes("a b")));
  EXPECT_EQ(encode_request(ByteTokenizer(true), request, BosRule::kHarness).num_context, 2);
  EXPECT_EQ(encode_request(ByteTokenizer(false), request, BosRule::kOriginal).tokens,
            with({1}, bytes("a b")));
  // A text that spells BOS out does not get a second one, except from the original.
  EXPECT_EQ(encode_request(ByteTokenizer(true), {"<s>a", "b"}, BosRule::kHarness).tokens,
            with({1}, bytes("ab")));
  EXPECT_EQ(encode_request(ByteTokenizer(true), {"<s>a", "b"}, BosRule::kOriginal).tokens,
            with({1}, bytes("<s>ab")));
  EXPECT_THAT(error_of([&] {
                encode_request(ByteTokenizer(false, false), request, BosRule::kOriginal);
              }),
              HasSubstr("no BOS token"));
}

TEST(EvalRequest, StandsAPrefixTokenInForAnEmptyContext) {
  const auto tokens = [](const ByteTokenizer& tokenizer, BosRule rule) {
    const TokenRequest request = encode_request(tokenizer, {"", " b"}, rule);
    EXPECT_EQ(request.num_context, 1);
    return request.tokens;
  };
  EXPECT_EQ(tokens(ByteTokenizer(true), BosRule::kHarness), with({1}, bytes(" b")));
  EXPECT_EQ(tokens(ByteTokenizer(false, false), BosRule::kHarness), with({2}, bytes(" b")));
  EXPECT_EQ(tokens(ByteTokenizer(true), BosRule::kOriginal), with({2, 1}, bytes(" b")));
}

TEST(EvalRequest, StridesOverAText) {
  const std::vector<int32_t> tokens = {10, 11, 12, 13, 14, 15, 16};
  const auto windows = strided_windows(tokens, 4, 2);
  ASSERT_EQ(windows.size(), 2U);
  EXPECT_THAT(windows[0].tokens, ElementsAre(10, 11, 12, 13, 14));
  EXPECT_EQ(windows[0].num_context, 1);
  EXPECT_THAT(windows[1].tokens, ElementsAre(12, 13, 14, 15, 16));
  EXPECT_EQ(windows[1].num_context, 3);
  const auto disjoint = strided_windows(tokens, 3, 3);
  ASSERT_EQ(disjoint.size(), 2U);
  EXPECT_THAT(disjoint[1].tokens, ElementsAre(13, 14, 15, 16));
  EXPECT_EQ(disjoint[1].num_context, 1);
}

// ---- Metrics

EvalTask choices_task(size_t items) {
  EvalTask task{.name = "t",
                .kind = TaskKind::kMultipleChoice,
                .acc_norm = true,
                .version = 1,
                .items = {}};
  for (size_t i = 0; i < items; ++i) {
    task.items.push_back({.requests = {{"c", " a"}, {"c", " bb"}},
                          .lengths = {1, 2},
                          .gold = 1,
                          .words = 0,
                          .bytes = 0,
                          .doc = ""});
  }
  return task;
}

std::vector<Score> scores(const std::vector<double>& loglikelihoods) {
  std::vector<Score> result;
  result.reserve(loglikelihoods.size());
  for (const double value : loglikelihoods) {
    result.push_back({.loglikelihood = value, .is_greedy = false});
  }
  return result;
}

TEST(EvalMetrics, PicksTheLikeliestChoice) {
  // Right both ways; right only per character; a tie goes to the first; wrong both ways.
  const EvalResult result = aggregate(choices_task(4), {scores({-3, -2}), scores({-2, -3}),
                                                        scores({-2, -2}), scores({-1, -9})});
  EXPECT_THAT(result.acc, ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(result.acc_norm, ElementsAre(1, 1, 1, 0));
  ASSERT_EQ(result.metrics.size(), 2U);
  EXPECT_EQ(result.metrics[0].name, "acc");
  EXPECT_DOUBLE_EQ(result.metrics[0].value, 0.25);
  EXPECT_DOUBLE_EQ(result.metrics[0].standard_error.value(), 0.25);
  EXPECT_DOUBLE_EQ(result.metrics[1].value, 0.75);
}

TEST(EvalMetrics, HasNoStandardErrorOfOneItem) {
  EXPECT_FALSE(
      aggregate(choices_task(1), {scores({-3, -2})}).metrics[0].standard_error.has_value());
}

TEST(EvalMetrics, AggregatesDocuments) {
  EvalTask task{.name = "t",
                .kind = TaskKind::kRolling,
                .acc_norm = false,
                .version = 2,
                .items = {}};
  task.items.push_back(
      {.requests = {{"", "x"}}, .lengths = {}, .gold = 0, .words = 2, .bytes = 10, .doc = ""});
  task.items.push_back(
      {.requests = {{"", "y"}}, .lengths = {}, .gold = 0, .words = 3, .bytes = 15, .doc = ""});
  const EvalResult result = aggregate(task, {scores({-4}), scores({-6})});
  EXPECT_DOUBLE_EQ(result.metrics.at(0).value, 0.4 / std::log(2.0));
  EXPECT_DOUBLE_EQ(result.metrics.at(1).value, std::exp(0.4));
  EXPECT_DOUBLE_EQ(result.metrics.at(2).value, std::exp(2.0));
  EXPECT_FALSE(result.metrics.at(2).standard_error.has_value());
}

TEST(EvalMetrics, BootstrapsWithPythonsDraws) {
  // lm_eval.api.metrics.bootstrap_stderr(perplexity, xs, 3000)
  EXPECT_NEAR(bootstrap_perplexity_stderr({-0.5, -1.25, -3.0, -0.125, -2.0}, 3000),
              2.2600048137331514, 1e-12);
}

// ---- Scores

/// A random model small enough to score many times.
Transformer random_tiny(WeightFormat format = WeightFormat::kFloat32) {
  ModelArgs config;
  config.block_size = 64;
  config.vocab_size = 259;
  config.n_layer = 2;
  config.n_head = 4;
  config.n_local_heads = 2;
  config.dim = 64;
  config.intermediate_size = 96;
  config.finalize();
  return random_model(config, {.format = format, .groupsize = 32}, at::kFloat, at::kCPU,
                      /*seed=*/7);
}

/// The definition, one request at a time: all positions in one forward pass of a fresh sequence.
Score score_alone(Transformer& model, const TokenRequest& request, int64_t max_length) {
  const c10::InferenceMode guard;
  std::vector<int64_t> tokens(request.tokens.begin(), request.tokens.end());
  const int64_t scored = std::ssize(tokens) - request.num_context;
  if (std::ssize(tokens) > max_length + 1) {
    tokens.erase(tokens.begin(), tokens.end() - max_length - 1);
  }
  const Tensor all = at::tensor(tokens);
  const int64_t n = all.numel() - 1;
  model->setup_caches(1, n);
  const Tensor logits = model->forward(all.narrow(0, 0, n).unsqueeze(0), at::arange(n));
  const Tensor logprobs = at::log_softmax(logits.squeeze(0), -1, at::kDouble);
  const Tensor targets = all.narrow(0, n + 1 - scored, scored);
  const Tensor rows = logprobs.narrow(0, n - scored, scored);
  return {.loglikelihood = rows.gather(1, targets.unsqueeze(1)).sum().item<double>(),
          .is_greedy = rows.argmax(-1).equal(targets)};
}

/// Items whose choices share much, little or nothing, some longer than the context.
std::vector<std::vector<TokenRequest>> mixed_items() {
  const std::string story = "A short story about requests that are scored in batches.";
  const std::vector<std::vector<EvalRequest>> items = {
      {{story.substr(0, 30), " one"},
       {story.substr(0, 30), " a longer choice"},
       {story.substr(0, 30), " x"}},
      {{"The cat sat because the cat", " was tired"},
       {"The cat sat because the mat", " was tired"}},
      {{"", " no context"}},
      {{story + story, " cut on the left"}, {story + story, " differently"}},
      {{"x", "y"}},
      {{story, " alone"}},
      {{"a", " 1"}, {"b", " 2"}, {"c", " 3"}, {"d", " 4"}, {"e", " 5"}},
  };
  std::vector<std::vector<TokenRequest>> requests;
  for (const auto& item : items) {
    auto& encoded = requests.emplace_back();
    for (const EvalRequest& request : item) {
      encoded.push_back(encode_request(ByteTokenizer(), request, BosRule::kHarness));
    }
  }
  return requests;
}

class EvalFormats : public ::testing::TestWithParam<WeightFormat> {};

INSTANTIATE_TEST_SUITE_P(All, EvalFormats,
                         ::testing::Values(WeightFormat::kFloat32, WeightFormat::kInt8,
                                           WeightFormat::kInt4),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST_P(EvalFormats, ScoresEqualScoringOneByOne) {
  Transformer model = random_tiny(GetParam());
  const auto items = mixed_items();
  std::vector<std::vector<Score>> expected;
  for (const auto& item : items) {
    auto& scores = expected.emplace_back();
    for (const TokenRequest& request : item) {
      scores.push_back(score_alone(model, request, 64));
    }
  }
  for (const int64_t batch_size : {1, 3, 16}) {
    int64_t last_done = 0;
    const auto progress = [&](int64_t done, int64_t total) {
      EXPECT_EQ(total, 15);
      EXPECT_GT(done, last_done);
      last_done = done;
    };
    const auto scores =
        score_requests(model, items, {.batch_size = batch_size, .progress = progress});
    EXPECT_EQ(last_done, 15);
    for (size_t i = 0; i < items.size(); ++i) {
      for (size_t choice = 0; choice < items[i].size(); ++choice) {
        EXPECT_NEAR(scores[i][choice].loglikelihood, expected[i][choice].loglikelihood, 1e-4)
            << i << " " << choice;
        EXPECT_EQ(scores[i][choice].is_greedy, expected[i][choice].is_greedy) << i << " " << choice;
      }
    }
  }
}

TEST(EvalScore, KnowsAGreedyContinuation) {
  Transformer model = random_tiny();
  const c10::InferenceMode guard;
  std::vector<int32_t> tokens = {5};
  model->setup_caches(1, 64);
  for (int64_t i = 0; i < 6; ++i) {
    const Tensor logits =
        model->forward(at::tensor({static_cast<int64_t>(tokens.back())}).unsqueeze(0),
                       at::arange(i, i + 1));
    tokens.push_back(logits.argmax().item<int32_t>());
  }
  const TokenRequest greedy{.tokens = tokens, .num_context = 1};
  tokens.back() = (tokens.back() + 1) % 259;
  const auto scores = score_requests(model, {{greedy}, {{.tokens = tokens, .num_context = 1}}}, {});
  EXPECT_TRUE(scores[0][0].is_greedy);
  EXPECT_FALSE(scores[1][0].is_greedy);
}

TEST(EvalScore, TakesTheFirstOfEqualLogitsForTheChoice) {
  Transformer model = random_tiny();
  model->output->weight.zero_();
  const auto scores = score_requests(model,
                                     {{{.tokens = {5, 0, 0}, .num_context = 1}},
                                      {{.tokens = {5, 0, 1}, .num_context = 1}},
                                      {{.tokens = {5, 258}, .num_context = 1}}},
                                     {});
  EXPECT_TRUE(scores[0][0].is_greedy);
  EXPECT_FALSE(scores[1][0].is_greedy);
  EXPECT_FALSE(scores[2][0].is_greedy);
  EXPECT_NEAR(scores[1][0].loglikelihood, -2 * std::log(259), 1e-5);
}

TEST(EvalScore, SumsTheWindowsOfAText) {
  Transformer model = random_tiny();
  const std::string text =
      "Perplexity of a text that is longer than one window, in strides, is a mean over tokens.";
  const auto tokens = bytes(text);
  double expected = 0;
  for (const auto& window : strided_windows(tokens, 32, 20)) {
    expected += score_alone(model, window, 64).loglikelihood;
  }
  const Perplexity result = text_perplexity(model, ByteTokenizer(), text, 32, 20, {});
  EXPECT_EQ(result.tokens, std::ssize(text) - 1);
  EXPECT_NEAR(result.nll, -expected / static_cast<double>(result.tokens), 1e-6);
  EXPECT_NEAR(result.perplexity, std::exp(result.nll), 1e-9);
  for (const auto& [window, stride] : {std::pair{65, 1}, {8, 9}, {8, 0}}) {
    EXPECT_THAT(error_of([&, window = window, stride = stride] {
                  text_perplexity(model, ByteTokenizer(), text, window, stride, {});
                }),
                HasSubstr("1 <= stride <= window <= 64"));
  }
  EXPECT_THAT(error_of([&] { text_perplexity(model, ByteTokenizer(), "a", 8, 8, {}); }),
              HasSubstr("at least 2"));
}

TEST(EvalScore, RefusesWhatCannotBeScored) {
  Transformer model = random_tiny();
  const auto error = [&](const TokenRequest& request, const EvalOptions& options = {}) {
    return error_of([&] { score_requests(model, {{request}}, options); });
  };
  EXPECT_THAT(error({.tokens = {1, 259}, .num_context = 1}), HasSubstr("vocabulary of 259"));
  EXPECT_THAT(error({.tokens = {1, -1}, .num_context = 1}), HasSubstr("vocabulary"));
  EXPECT_THAT(error({.tokens = {1}, .num_context = 1}), HasSubstr("at least one"));
  EXPECT_THAT(error({.tokens = {1, 2}, .num_context = 0}), HasSubstr("at least one"));
  EXPECT_THAT(error({.tokens = std::vector<int32_t>(67, 5), .num_context = 1}),
              HasSubstr("longest input of 64"));
  EXPECT_THAT(error({.tokens = {1, 2}, .num_context = 1}, {.max_seq_length = 65}),
              HasSubstr("context of 64"));
  EXPECT_THAT(error({.tokens = {1, 2}, .num_context = 1}, {.batch_size = 0}),
              HasSubstr("--batch_size"));
  model->norm->weight.fill_(std::nan(""));
  EXPECT_THAT(error({.tokens = {1, 2}, .num_context = 1}), HasSubstr("NaN"));
}

TEST(EvalScore, EqualsTheOriginal) {
  Transformer model = tiny_model("tiny-gqa");
  const auto tokenizer = Tokenizer::load(golden("eval") / "tokenizer.model");
  const json golden_scores = golden_json("original.json");
  for (const auto& [name, lengths] : golden_scores.items()) {
    const EvalTask task = load_task(name, golden("eval"));
    for (const auto& [length, expected] : lengths.items()) {
      EvalOptions options{.bos = BosRule::kOriginal};
      if (length != "2048") {
        options.max_seq_length = std::stoll(length);
      }
      const EvalResult result = evaluate(model, *tokenizer, task, options);
      for (size_t i = 0; i < task.items.size(); ++i) {
        for (size_t choice = 0; choice < result.scores[i].size(); ++choice) {
          const double reference = expected["loglikelihoods"][i][choice];
          EXPECT_NEAR(result.scores[i][choice].loglikelihood, reference,
                      2e-3 + 1e-6 * std::abs(reference))
              << name << " " << length << " " << i << " " << choice;
        }
      }
      for (const EvalMetric& metric : result.metrics) {
        const double reference = expected["results"][metric.name];
        EXPECT_NEAR(metric.value, reference, 1e-3 * std::abs(reference))
            << name << " " << metric.name;
        if (metric.standard_error && metric.name != "perplexity") {
          EXPECT_NEAR(*metric.standard_error,
                      expected["results"][metric.name + "_stderr"].get<double>(), 1e-9);
        }
      }
    }
  }
}

// ---- Calibration inputs

std::vector<std::vector<int32_t>> calibration(const std::string& task, const std::string& lines,
                                              int64_t seq_length) {
  const TempDir dir;
  std::ofstream(dir / (task + ".jsonl")) << lines;
  return calibration_inputs(ByteTokenizer(), {.tasks = {task},
                                              .data_dir = dir.path(),
                                              .limit = 10,
                                              .seq_length = seq_length});
}

TEST(EvalCalibration, CutsRequestsOnTheLeft) {
  const auto inputs = calibration("lambada_openai",
                                  R"({"text": "abcdefg h"})"
                                  "\n"
                                  R"({"text": "a b"})",
                                  4);
  EXPECT_THAT(inputs,
              ElementsAre(bytes("efg "), with({1}, bytes("a "))));  // without the last token
}

TEST(EvalCalibration, TakesEveryWindowOfADocument) {
  const auto inputs = calibration("wikitext", R"({"page": "abcdef"})", 3);  // with BOS 7 tokens
  EXPECT_THAT(inputs, ElementsAre(with({2, 1}, bytes("a")), bytes("bcd"), bytes("cde")))
      << "the last window is moved left";
}

TEST(EvalCalibration, RefusesWhatItCannotRead) {
  EXPECT_THAT(error_of([] { calibration("wikitext", R"({"page": "a"})", 0); }),
              HasSubstr("--calibration_seq_length 0"));
  EXPECT_THAT(error_of([] { calibration_inputs(ByteTokenizer(), {.tasks = {"no such"}}); }),
              HasSubstr("Known tasks"));
}

}  // namespace
}  // namespace gptfast
