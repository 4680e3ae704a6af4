// generate(): the original's greedy tokens, and everything around the loop.
#include "gptfast/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "test_util.h"

namespace gptfast {
namespace {

std::vector<int32_t> to_vector(const Tensor& ids) {
  const Tensor i32 = ids.to(at::kInt).contiguous();
  return {i32.const_data_ptr<int32_t>(), i32.const_data_ptr<int32_t>() + i32.numel()};
}

GenerateOptions greedy(int64_t max_new_tokens) {
  GenerateOptions options;
  options.max_new_tokens = max_new_tokens;
  options.sampling.temperature = 0;
  return options;
}

class Generate : public ::testing::Test {
 protected:
  Generate()
      : model(tiny_model("tiny-gqa")),
        golden_data(load_checkpoint(golden("tiny-gqa/golden.fp32.pth"))) {
    prompt = to_vector(golden_data.at("prompt_ids"));
    expected = to_vector(golden_data.at("decode_tokens"));
  }
  std::vector<int32_t> tokens(const GenerateOptions& options) {
    return generate(model, prompt, options).rows[0].tokens;
  }

  Transformer model;
  StateDict golden_data;
  std::vector<int32_t> prompt, expected;
};

TEST_F(Generate, GreedyTokensAreTheOriginals) {
  const auto count = static_cast<int64_t>(expected.size());
  EXPECT_EQ(tokens(greedy(count)), expected);
  model->set_reference(true);
  EXPECT_EQ(tokens(greedy(count)), expected);
}

TEST_F(Generate, ShortPromptsGoThroughStep) {
  prompt.resize(5);
  const auto through_step = tokens(greedy(20));
  model->set_reference(true);
  EXPECT_EQ(tokens(greedy(20)), through_step);
}

TEST_F(Generate, ZeroAndOneToken) {
  const GenerateResult none = generate(model, prompt, greedy(0));
  EXPECT_TRUE(none.rows[0].tokens.empty());
  EXPECT_EQ(none.rows[0].finish_reason, FinishReason::kLength);
  EXPECT_EQ(tokens(greedy(1)), std::vector<int32_t>{expected[0]});
  EXPECT_TRUE(generate(model, {}, greedy(0)).rows[0].tokens.empty());
}

TEST_F(Generate, RowsOfABatch) {
  GenerateOptions options = greedy(12);
  options.batch_size = 4;
  for (const auto& row : generate(model, prompt, options).rows)
    EXPECT_EQ(row.tokens, std::vector(expected.begin(), expected.begin() + 12));
  options.sampling.temperature = 1.5;
  options.sampling.top_k = 0;
  const GenerateResult batch = generate(model, prompt, options);
  options.batch_size = 1;
  for (size_t b = 0; b < 4; ++b) {  // row b draws with seed + b whatever runs beside it
    EXPECT_EQ(generate(model, prompt, options).rows[0].tokens, batch.rows[b].tokens);
    ++options.sampling.seed;
  }
  EXPECT_NE(batch.rows[0].tokens, batch.rows[1].tokens);
  EXPECT_EQ(batch.new_tokens(), 48);
}

TEST_F(Generate, SeedsRepeat) {
  GenerateOptions options = greedy(20);
  options.sampling = {.temperature = 1.2, .top_k = 50, .seed = 7};
  const auto first = tokens(options);
  EXPECT_EQ(tokens(options), first);
  options.sampling.seed = 8;
  EXPECT_NE(tokens(options), first);
}

TEST_F(Generate, StopsAtStopTokens) {
  GenerateOptions options = greedy(20);
  options.stop_tokens = {expected[6]};
  const auto first = std::find(expected.begin(), expected.end(), expected[6]) + 1;
  const GenerateResult result = generate(model, prompt, options);
  EXPECT_EQ(result.rows[0].tokens, std::vector(expected.begin(), first));
  EXPECT_EQ(result.rows[0].finish_reason, FinishReason::kStop);
  options.stop_tokens = {expected[0]};
  EXPECT_EQ(tokens(options).size(), 1U);
}

TEST_F(Generate, TheCallbackSeesAndEndsRows) {
  GenerateOptions options = greedy(20);
  std::vector<int32_t> seen;
  options.callback = [&](int64_t, int32_t token) {
    seen.push_back(token);
    return seen.size() < 5;
  };
  EXPECT_EQ(generate(model, prompt, options).rows[0].finish_reason, FinishReason::kStop);
  EXPECT_EQ(seen, std::vector(expected.begin(), expected.begin() + 5));
}

TEST_F(Generate, EndsAtTheContext) {
  model = tiny_model("tiny-mha");  // 512 tokens
  const std::vector<int32_t> long_prompt(505, 7);
  const GenerateResult result = generate(model, long_prompt, greedy(20));
  EXPECT_EQ(result.rows[0].tokens.size(), 7U);
  EXPECT_EQ(result.rows[0].finish_reason, FinishReason::kContext);
  EXPECT_EQ(generate(model, std::vector<int32_t>(511, 7), greedy(20)).rows[0].tokens.size(), 1U);
  for (const size_t length : {512, 513}) {
    const std::string error =
        error_of([&] { generate(model, std::vector<int32_t>(length, 7), greedy(20)); });
    EXPECT_NE(error.find("does not fit the model's context of 512"), std::string::npos) << error;
  }
  EXPECT_EQ(generate(model, std::vector<int32_t>(512, 7), greedy(0)).new_tokens(), 0);
}

TEST_F(Generate, RunsInOneProcessDoNotTouchEachOther) {
  const auto fresh = tokens(greedy(10));
  generate(model, std::vector<int32_t>(300, 3), greedy(30));  // a longer text in the same cache
  EXPECT_EQ(tokens(greedy(10)), fresh);
}

TEST_F(Generate, ContinuesAConversation) {
  const std::vector<int32_t> head(prompt.begin(), prompt.begin() + 11),
      tail(prompt.begin() + 11, prompt.end());
  model->setup_caches(1, 64);
  generate(model, head, greedy(1));
  GenerateOptions options = greedy(10);
  options.start_pos = 11;
  EXPECT_EQ(generate(model, tail, options).rows[0].tokens,
            std::vector(expected.begin(), expected.begin() + 10));
}

TEST_F(Generate, LogitsOfEveryFedToken) {
  GenerateOptions options = greedy(4);
  options.return_logits = true;
  const GenerateResult result = generate(model, prompt, options);
  ASSERT_EQ(result.logits.size(0),
            static_cast<int64_t>(prompt.size()) + 3);  // the last token is not fed
  const auto T = static_cast<int64_t>(prompt.size());
  EXPECT_LT(relative_difference(result.logits.narrow(0, 0, T), golden_data.at("prefill_logits")),
            1e-5);
  EXPECT_LT(relative_difference(result.logits.narrow(0, T, 3),
                                golden_data.at("decode_logits").narrow(0, 0, 3)),
            1e-5);
  options.max_new_tokens = 0;
  EXPECT_EQ(generate(model, prompt, options).logits.size(0), T);
}

TEST_F(Generate, RefusesBadInput) {
  EXPECT_NE(error_of([&] { generate(model, {}, greedy(1)); }).find("prompt is empty"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              generate(model, {1, 512}, greedy(1));
            }).find("token id 512 is outside"),
            std::string::npos);
  EXPECT_NE(error_of([&] { generate(model, {-1}, greedy(1)); }).find("token id -1 is outside"),
            std::string::npos);
  GenerateOptions options = greedy(1);
  options.batch_size = 9;
  EXPECT_NE(error_of([&] { generate(model, prompt, options); }).find("batch_size"),
            std::string::npos);
  model->norm->weight.fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_NE(error_of([&] {
              generate(model, prompt, greedy(1));
            }).find("logits are NaN at position"),
            std::string::npos);
}

}  // namespace
}  // namespace gptfast
