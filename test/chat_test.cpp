// Chat templates as tokens, against transformers' apply_chat_template.
#include "gptfast/chat.h"

#include <gtest/gtest.h>

#include "gptfast/tokenizer.h"
#include "smollm2_tokenizer.h"
#include "test_util.h"

namespace gptfast {
namespace {

using Ids = std::vector<int32_t>;

/// SmolLM2's tokenizer with a chat template.
std::unique_ptr<Tokenizer> tokenizer_with(const TempDir& dir, const std::string& chat_template) {
  std::ofstream(dir / "tokenizer.json") << smollm2_json();
  std::ofstream(dir / "chat_template.jinja") << chat_template;
  return Tokenizer::load(dir / "tokenizer.json");
}

// As the model's tokenizer_config.json has it; "\\n" is an escape of Jinja's there.
constexpr const char* kSmolLm2Template =
    R"({% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %})"
    R"({{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face)"
    R"(<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + )"
    R"('<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }})"
    R"({% endif %})";

// Ids of transformers 5.24.0 for the same conversations.
TEST(Chat, SmolLm2AsTransformers) {
  const TempDir dir;
  const auto tokenizer = tokenizer_with(dir, kSmolLm2Template);
  ASSERT_EQ(chat_template_from_string("auto", *tokenizer), ChatTemplate::kChatml);
  const Ids system = {1,   9690,  198, 2683, 359, 253, 5356,  5646, 11173, 3365, 3511,
                      308, 34519, 28,  7018, 411, 407, 19712, 8182, 2,     198};
  const Ids first = {1, 4093, 198, 5820, 253, 4354, 30, 2, 198, 1, 520, 9531, 198};
  const Ids answer = {39080};  // "Apple"
  const Ids second = {2, 198, 1, 4093, 198, 4809, 2, 198, 1, 520, 9531, 198};
  const auto join = [](std::initializer_list<Ids> parts) {
    Ids all;
    for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  EXPECT_EQ(encode_turn(*tokenizer, ChatTemplate::kChatml, "Name a fruit.", /*first=*/true),
            join({system, first}));
  EXPECT_EQ(encode_turn(*tokenizer, ChatTemplate::kChatml, "Another", /*first=*/false), second);
  std::vector<ChatMessage> messages = {{"user", "Name a fruit."},
                                       {"assistant", "Apple"},
                                       {"user", "Another"}};
  EXPECT_EQ(encode_chat(*tokenizer, ChatTemplate::kChatml, messages),
            join({system, first, answer, second}));
  messages.insert(messages.begin(), {"system", "Be brief."});
  EXPECT_EQ(encode_chat(*tokenizer, ChatTemplate::kChatml, messages),
            join({{1, 9690, 198, 6077, 5453, 30, 2, 198}, first, answer, second}));
}

TEST(Chat, DefaultSystemMessages) {
  for (const auto& [jinja, expected] : std::vector<std::pair<std::string, std::string>>{
           {"{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}", "Be kind."},
           {"{{ '<|im_start|>system\\nBe kind.\\nBe brief.<|im_end|>\\n' }}",
            "Be kind.\nBe brief."},
           // Put together from parts first, spelled out behind it (Qwen2.5).
           {"{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
            "{{ '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}",
            "You are Q."},
           {"{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}",
            ""},
           {"{{ '<|im_start|>system\\nYou are {{ name }}<|im_end|>' }}", ""},
           {"{{ '<|im_start|>system\\nnever closed", ""},
           {"<|im_start|>systematic<|im_end|>", ""}}) {
    const TempDir dir;
    EXPECT_EQ(tokenizer_with(dir, jinja)->default_system_message(), expected) << jinja;
  }
}

}  // namespace
}  // namespace gptfast
