#include "gptfast/chat.h"

#include <c10/util/Exception.h>

namespace gptfast {
namespace {

/// Builds a token sequence from markers (by id) and text.
class TurnBuilder {
 public:
  explicit TurnBuilder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  TurnBuilder& marker(std::string_view token) {
    const int32_t id = tokenizer_.token_id(token);
    TORCH_CHECK(id >= 0, "the tokenizer has no token '", token,
                "' that the chat template needs; choose another --chat_template");
    ids_.push_back(id);
    return *this;
  }
  TurnBuilder& text(std::string_view text) {
    const auto ids = tokenizer_.encode(text);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    return *this;
  }
  TurnBuilder& id(int32_t id) {
    if (id >= 0) ids_.push_back(id);
    return *this;
  }
  std::vector<int32_t> take() { return std::move(ids_); }

 private:
  const Tokenizer& tokenizer_;
  std::vector<int32_t> ids_;
};

std::string trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1));
}

}  // namespace

ChatTemplate chat_template_from_string(std::string_view name, const Tokenizer& tokenizer) {
  if (name == "auto") {
    const std::string_view own = tokenizer.chat_template();
    return own.empty() ? ChatTemplate::kNone : chat_template_from_string(own, tokenizer);
  }
  if (name == "none") return ChatTemplate::kNone;
  if (name == "llama2") return ChatTemplate::kLlama2;
  if (name == "llama3") return ChatTemplate::kLlama3;
  if (name == "mistral") return ChatTemplate::kMistral;
  if (name == "chatml") return ChatTemplate::kChatml;
  TORCH_CHECK(false, "unknown chat template '", name,
              "'; known are auto, none, llama2, llama3, mistral, chatml");
}

std::vector<int32_t> encode_turn(const Tokenizer& tokenizer, ChatTemplate chat_template,
                                 std::string_view user, bool first) {
  TurnBuilder turn(tokenizer);
  const int32_t bos = tokenizer.add_bos() ? tokenizer.bos_id() : -1;
  switch (chat_template) {
    case ChatTemplate::kNone:
      if (first) turn.id(bos);
      turn.text(user);
      break;
    case ChatTemplate::kLlama2:  // <s>[INST] u [/INST] a </s><s>[INST] u [/INST]
      if (!first) turn.id(tokenizer.eos_id());
      turn.id(tokenizer.bos_id()).text("[INST] " + trimmed(user) + " [/INST]");
      break;
    case ChatTemplate::kMistral:  // <s>[INST] u [/INST] a</s>[INST] u [/INST]; newer vocabularies
                                  // have the brackets as tokens
      turn.id(first ? tokenizer.bos_id() : tokenizer.eos_id());
      if (tokenizer.token_id("[INST]") >= 0) {
        turn.marker("[INST]").text(trimmed(user)).marker("[/INST]");
      } else {
        turn.text("[INST] " + trimmed(user) + " [/INST]");
      }
      break;
    case ChatTemplate::kLlama3:
      if (first) {
        turn.marker("<|begin_of_text|>");
      } else {
        turn.marker("<|eot_id|>");
      }
      turn.marker("<|start_header_id|>")
          .text("user")
          .marker("<|end_header_id|>")
          .text("\n\n" + trimmed(user));
      turn.marker("<|eot_id|>")
          .marker("<|start_header_id|>")
          .text("assistant")
          .marker("<|end_header_id|>")
          .text("\n\n");
      break;
    case ChatTemplate::kChatml:
      if (first) {
        if (bos != tokenizer.token_id("<|im_start|>")) turn.id(bos);
      } else {
        turn.marker("<|im_end|>").text("\n");
      }
      turn.marker("<|im_start|>")
          .text("user\n" + std::string(user))
          .marker("<|im_end|>")
          .text("\n");
      turn.marker("<|im_start|>").text("assistant\n");
      break;
  }
  return turn.take();
}

std::vector<int32_t> turn_end_ids(const Tokenizer& tokenizer, ChatTemplate chat_template) {
  int32_t id = -1;
  if (chat_template == ChatTemplate::kLlama3) id = tokenizer.token_id("<|eot_id|>");
  if (chat_template == ChatTemplate::kChatml) id = tokenizer.token_id("<|im_end|>");
  return id >= 0 ? std::vector<int32_t>{id} : std::vector<int32_t>{};
}

}  // namespace gptfast
