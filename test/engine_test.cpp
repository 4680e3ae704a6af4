// The engine behind the server: what a sequence gets beside others is what generate() gives it
// alone, on the CPU and, where there is one, on a GPU with its captured steps.
#include "server_engine.h"

#include <gtest/gtest.h>

#include "test_util.h"

namespace gptfast::server {
namespace {

using Ids = std::vector<int32_t>;

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  FinishReason reason = FinishReason::kStop;
  std::string failure;
};

std::shared_ptr<Sequence> sequence(const Ids& prompt, int64_t max_tokens) {
  auto made = std::make_shared<Sequence>();
  made->prompt = prompt;
  made->max_tokens = max_tokens;
  made->sampling.temperature = 0;
  made->channel = std::make_shared<Channel>();
  return made;
}

Answer answer(const Sequence& of) {
  Answer result;
  while (true) {
    const std::optional<Event> event = of.channel->pop(std::chrono::seconds(60));
    if (!event) {
      result.failure = "nothing within a minute";
      return result;
    }
    switch (event->kind) {
      case Event::Kind::kToken:
        result.tokens.push_back(event->token);
        if (event->logprob) result.logprobs.push_back(event->logprob->logprob);
        break;
      case Event::Kind::kFinished:
        result.reason = event->reason;
        return result;
      case Event::Kind::kFailed:
        result.failure = event->message;
        return result;
      default:
        break;
    }
  }
}

class EngineTest : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == at::kCUDA && !at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
  static Transformer model() {
    return load_model(golden("tiny-gqa/model.fp32.pth"),
                      {.config = golden("tiny-gqa/config.json").string(),
                       .precision = at::kBFloat16,
                       .device = at::Device(GetParam(), GetParam() == at::kCUDA ? 0 : -1)});
  }
};

Ids prompt_of(int64_t length, int32_t step) {
  Ids ids;
  for (int64_t i = 0; i < length; ++i) ids.push_back(static_cast<int32_t>(3 + (i * step) % 500));
  return ids;
}

GenerateResult alone(Transformer& model, const Sequence& of, bool logits = false) {
  GenerateOptions options;
  options.max_new_tokens = of.max_tokens;
  options.sampling = of.sampling;
  options.stop_tokens = of.stop_tokens;
  options.return_logits = logits;
  return generate(model, of.prompt, options);
}

TEST_P(EngineTest, SequencesGetWhatTheyGetAlone) {
  Transformer lone = model();
  std::vector<std::shared_ptr<Sequence>> sequences;
  // More than there are slots; prompts of one step and of one piece; some end early.
  for (int32_t i = 0; i < 12; ++i) {
    sequences.push_back(sequence(prompt_of(std::array{3, 40, 200}[i % 3], 7 + i), 5 + 9 * i));
    if (i % 4 == 1) {
      sequences.back()->sampling = {.temperature = 0.9, .top_k = 30, .seed = 50U + i};
    }
    if (i % 4 == 2)
      sequences.back()->stop_tokens = {alone(lone, *sequences.back()).rows[0].tokens[6]};
    if (i % 4 == 3) sequences.back()->logprobs = 2;
  }
  Engine engine(model(), /*parallel=*/4, /*ctx_size=*/1024, /*max_queue=*/64);
  ASSERT_TRUE(engine.submit(sequences));
  for (const auto& of : sequences) {
    const Answer got = answer(*of);
    const GeneratedRow expected = alone(lone, *of).rows[0];
    EXPECT_EQ(got.failure, "");
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(got.reason, expected.finish_reason);
    if (of->logprobs < 0) continue;
    const Tensor logits = alone(lone, *of, /*logits=*/true).logits;
    ASSERT_EQ(got.logprobs.size(), got.tokens.size());
    for (size_t i = 0; i < got.tokens.size(); ++i) {
      const auto at = static_cast<int64_t>(of->prompt.size() + i) - 1;
      const auto logprob = at::log_softmax(logits[at], -1)[got.tokens[i]].item<float>();
      // The prompt's logits come from a product of other rows.
      EXPECT_NEAR(got.logprobs[i], logprob, i == 0 ? 5e-2 : 1e-5) << "token " << i;
    }
  }
}

TEST_P(EngineTest, ACancelledSequenceLeavesTheOthersAlone) {
  Transformer lone = model();
  Engine engine(model(), /*parallel=*/3, /*ctx_size=*/1024, /*max_queue=*/64);
  const auto kept = sequence(prompt_of(5, 3), 200), gone = sequence(prompt_of(6, 11), 900);
  ASSERT_TRUE(engine.submit({gone, kept}));
  ASSERT_TRUE(gone->channel->pop(std::chrono::seconds(60)));
  gone->cancelled = true;
  const auto late = sequence(prompt_of(4, 5), 50);
  ASSERT_TRUE(engine.submit({late}));
  for (const auto& of : {kept, late})
    EXPECT_EQ(answer(*of).tokens, alone(lone, *of).rows[0].tokens);
}

TEST_P(EngineTest, AnEngineEndsWhileItComputes) {
  const auto endless = sequence(prompt_of(5, 3), 1000);
  Engine engine(model(), /*parallel=*/2, /*ctx_size=*/1024, /*max_queue=*/64);
  ASSERT_TRUE(engine.submit({endless}));
  ASSERT_TRUE(endless->channel->pop(std::chrono::seconds(60)));
}

INSTANTIATE_TEST_SUITE_P(Devices, EngineTest, testing::Values(at::kCPU, at::kCUDA),
                         [](const auto& info) {
                           return std::string(info.param == at::kCUDA ? "Cuda" : "Cpu");
                         });

}  // namespace
}  // namespace gptfast::server
