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
  /// What a ChatML conversation starts with: BOS, unless it is the first marker itself.
  TurnBuilder& chatml_bos() {
    const int32_t bos = tokenizer_.add_bos() ? tokenizer_.bos_id() : -1;
    return id(bos != tokenizer_.token_id("<|im_start|>") ? bos : -1);
  }
  TurnBuilder& chatml_message(std::string_view role, std::string_view content) {
    marker("<|im_start|>").text(std::string(role) + "\n" + std::string(content));
    return marker("<|im_end|>").text("\n");
  }
  /// The model's own system message, for a conversation that has none.
  TurnBuilder& chatml_default_system() {
    const std::string_view message = tokenizer_.default_system_message();
    return message.empty() ? *this : chatml_message("system", message);
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

/// Llama 3 and ChatML: every message has a header, whoever speaks.
std::vector<int32_t> encode_messages(const Tokenizer& tokenizer, ChatTemplate chat_template,
                                     const std::vector<ChatMessage>& messages) {
  TurnBuilder turn(tokenizer);
  if (chat_template == ChatTemplate::kLlama3) {
    turn.marker("<|begin_of_text|>");
    const auto header = [&](const std::string& role) {
      turn.marker("<|start_header_id|>").text(role).marker("<|end_header_id|>");
    };
    for (const ChatMessage& message : messages) {
      header(message.role);
      turn.text("\n\n" + trimmed(message.content)).marker("<|eot_id|>");
    }
    header("assistant");
    turn.text("\n\n");
  } else {
    turn.chatml_bos();
    if (messages.front().role != "system") turn.chatml_default_system();
    for (const ChatMessage& message : messages) turn.chatml_message(message.role, message.content);
    turn.marker("<|im_start|>").text("assistant\n");
  }
  return turn.take();
}

/// Llama 2 and Mistral: turns of a user and the answer.
std::vector<int32_t> encode_turns(const Tokenizer& tokenizer, ChatTemplate chat_template,
                                  const std::vector<ChatMessage>& messages) {
  const bool llama2 = chat_template == ChatTemplate::kLlama2;
  std::vector<int32_t> ids;
  std::string system;
  bool first = true;
  for (const ChatMessage& message : messages) {
    std::vector<int32_t> more;
    if (message.role == "system") {
      system = llama2 ? "<<SYS>>\n" + message.content + "\n<</SYS>>\n\n" : message.content + "\n\n";
    } else if (message.role == "user") {
      more = encode_turn(tokenizer, chat_template, system + message.content, first);
      system.clear();
      first = false;
    } else {
      more = tokenizer.encode(trimmed(message.content) + (llama2 ? " " : ""));
    }
    ids.insert(ids.end(), more.begin(), more.end());
  }
  return ids;
}

void check_messages(const std::vector<ChatMessage>& messages) {
  std::string_view expected = "user";
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (i == 0 && role == "system") continue;
    TORCH_CHECK(role == expected, "message ", i, " has the role '", role.substr(0, 40),
                "', expected '", expected,
                "': after one system message at most, user and assistant take turns");
    expected = role == "user" ? "assistant" : "user";
  }
  TORCH_CHECK(expected == "assistant", "the last message must be the user's");
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
        turn.chatml_bos().chatml_default_system();
      } else {
        turn.marker("<|im_end|>").text("\n");
      }
      turn.chatml_message("user", user);
      turn.marker("<|im_start|>").text("assistant\n");
      break;
  }
  return turn.take();
}

std::vector<int32_t> encode_chat(const Tokenizer& tokenizer, ChatTemplate chat_template,
                                 const std::vector<ChatMessage>& messages) {
  TORCH_CHECK(chat_template != ChatTemplate::kNone,
              "no chat template is known for this model; name one with --chat_template");
  check_messages(messages);
  const bool headers =
      chat_template == ChatTemplate::kLlama3 || chat_template == ChatTemplate::kChatml;
  return headers ? encode_messages(tokenizer, chat_template, messages)
                 : encode_turns(tokenizer, chat_template, messages);
}

std::vector<int32_t> turn_end_ids(const Tokenizer& tokenizer, ChatTemplate chat_template) {
  int32_t id = -1;
  if (chat_template == ChatTemplate::kLlama3) id = tokenizer.token_id("<|eot_id|>");
  if (chat_template == ChatTemplate::kChatml) id = tokenizer.token_id("<|im_end|>");
  return id >= 0 ? std::vector<int32_t>{id} : std::vector<int32_t>{};
}

}  // namespace gptfast
