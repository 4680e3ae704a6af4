// libFuzzer target of the server's request parser: the first byte chooses the endpoint, the rest is
// the body. From the project's folder:
//   build-fuzz/bin/request_fuzz -dict=test/fuzz/request.dict -max_len=2048 CORPUS_FOLDER
#include <c10/util/Exception.h>

#include <cstdlib>
#include <memory>

#include "server_request.h"

namespace {

using namespace gptfast;
using namespace gptfast::server;

const Tokenizer& tokenizer() {
  static const std::unique_ptr<Tokenizer> loaded =
      Tokenizer::load(GPTFAST_GOLDEN "/eval/tokenizer.model");
  return *loaded;
}

constexpr Limits kLimits = {.vocab_size = 512, .max_prompt = 257, .max_sequences = 8, .seed = 1};

/// What the engine relies on without looking again.
void check(const CompletionRequest& request) {
  const auto demand = [](bool holds) {
    if (!holds) std::abort();
  };
  const auto prompts = static_cast<int64_t>(request.prompts.size());
  demand(prompts >= 1 && request.n >= 1 && prompts * request.n <= kLimits.max_sequences);
  for (const auto& prompt : request.prompts) {
    demand(!prompt.empty() && static_cast<int64_t>(prompt.size()) <= kLimits.max_prompt);
    for (const int32_t id : prompt) demand(id >= 0 && id < kLimits.vocab_size);
  }
  demand(request.max_tokens >= -1 && request.logprobs >= -1);
  demand(request.sampling.temperature >= 0 && request.sampling.top_k >= 0);
  for (const std::string& stop : request.stop) demand(!stop.empty());
}

void parse(uint8_t endpoint, const std::string& text) {
  const nlohmann::json body = parse_body(text);
  switch (endpoint % 5) {
    case 0:
      return check(
          parse_completion(body, Api::kCompletions, tokenizer(), ChatTemplate::kNone, kLimits));
    case 1:
      return check(parse_completion(body, Api::kChat, tokenizer(),
                                    endpoint < 128 ? ChatTemplate::kLlama2 : ChatTemplate::kMistral,
                                    kLimits));
    case 2:
      return check(
          parse_completion(body, Api::kLlamaCpp, tokenizer(), ChatTemplate::kNone, kLimits));
    case 3:
      parse_tokenize(body, tokenizer());
      return;
    default:
      tokenizer().decode(parse_detokenize(body, tokenizer()));
  }
}

}  // namespace

// libFuzzer gives the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  try {
    parse(data[0], std::string(data + 1, data + size));
  } catch (const RequestError&) {
    return 0;  // refused, as most inputs should be
  } catch (const c10::Error&) {
    return 0;  // of the tokenizer, which the server answers with 400; any other is a finding
  }
  return 0;
}
