// The conversation of `generate --interactive`.
#pragma once

#include "gptfast/chat.h"
#include "gptfast/generate.h"

namespace gptfast::app {

/// Reads a line, answers it, keeps the conversation in the cache so that only new tokens are
/// prefilled; until the end of the input or a full context. Ctrl-C ends the answer, not the
/// program.
void chat_loop(Transformer& model, const Tokenizer& tokenizer, ChatTemplate chat_template,
               GenerateOptions options);

}  // namespace gptfast::app
