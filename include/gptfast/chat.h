// Chat templates: how a turn of a conversation becomes tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gptfast/tokenizer.h"

namespace gptfast {

enum class ChatTemplate { kNone, kLlama2, kLlama3, kMistral, kChatml };

/// Names as `--chat_template` takes them ("none", "llama2", "llama3", "mistral", "chatml"); "auto"
/// asks the tokenizer (Tokenizer::chat_template, kNone when that does not say). Throws with the
/// list of names for any other.
ChatTemplate chat_template_from_string(std::string_view name, const Tokenizer& tokenizer);

/// Tokens that put `user` before the model and let it answer. The first turn starts with BOS where
/// the tokenizer wants one; a later turn first closes the answer before it, whose last token was
/// sampled but never fed. Markers are inserted by id and `user` is always text: nothing typed can
/// pose as a marker. ChatML: the first turn carries the model's own system message
/// (Tokenizer::default_system_message). Throws naming a marker that the tokenizer lacks.
std::vector<int32_t> encode_turn(const Tokenizer& tokenizer, ChatTemplate chat_template,
                                 std::string_view user, bool first);

/// One message of a conversation.
struct ChatMessage {
  std::string role;  ///< "system" (first message only), "user" or "assistant"
  std::string content;
};

/// Tokens of a whole conversation, ending where the model is to answer. Users and the assistant
/// take turns, a user first and last. Content is always text. Without a system message ChatML takes
/// the model's own (Tokenizer::default_system_message). Templates without a place for a
/// system message put it in front of the first user's text. Throws saying what is wrong with the
/// messages, and for kNone.
std::vector<int32_t> encode_chat(const Tokenizer& tokenizer, ChatTemplate chat_template,
                                 const std::vector<ChatMessage>& messages);

/// The tokens that end an answer under the template, besides Tokenizer::stop_ids().
std::vector<int32_t> turn_end_ids(const Tokenizer& tokenizer, ChatTemplate chat_template);

}  // namespace gptfast
