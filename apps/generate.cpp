// generate: writes text with a model (the command line of gpt-fast's generate.py and a few flags
// more).
#include <ATen/ATen.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "chat_loop.h"
#include "gptfast/chat.h"
#include "gptfast/checkpoint.h"
#include "gptfast/generate.h"
#include "gptfast/profile.h"
#include "gptfast/speculative.h"
#include "gptfast/tokenizer.h"
#include "model_flags.h"
#include "output_file.h"
#include "ranks.h"

namespace gptfast::app {
namespace {

constexpr int64_t kSyntheticVocab = 1024;  // --prompt N draws ids below this, as the original

/// The prompt as ids, and as text where it was text.
struct Prompt {
  std::vector<int32_t> ids;
  std::string text;
};

std::vector<int32_t> parse_ids(const std::string& list) {
  std::vector<int32_t> ids;
  for (const char *at = list.data(), *end = at + list.size(); at < end;) {
    int32_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    TORCH_CHECK(error == std::errc() && (next == end || *next == ','), "--prompt_ids: '", list,
                "' is not a list of token ids like 1,2,3");
    ids.push_back(id);
    at = next + 1;
  }
  return ids;
}

/// A whole number typed as the prompt asks for that many random tokens, as in the original.
std::optional<int64_t> synthetic_length(const std::string& prompt) {
  int64_t n = 0;
  const auto [end, error] = std::from_chars(prompt.data(), prompt.data() + prompt.size(), n);
  if (error == std::errc::invalid_argument || end != prompt.data() + prompt.size())
    return std::nullopt;
  TORCH_CHECK(error == std::errc(), "--prompt ", prompt,
              " asks for that many random tokens, far too many; write text into --prompt_file");
  TORCH_CHECK(n >= 1, "--prompt ", prompt,
              " asks for that many random tokens; expected at least 1");
  return n;
}

std::vector<int32_t> synthetic_prompt(int64_t length, const ModelArgs& config, int64_t seed) {
  TORCH_CHECK(length <= config.block_size, "--prompt ", length,
              " asks for that many random tokens; the model's context holds ", config.block_size);
  at::manual_seed(static_cast<uint64_t>(seed));
  const Tensor ids =
      at::randint(0, std::min(kSyntheticVocab, config.vocab_size), {length}, at::kInt);
  return {ids.const_data_ptr<int32_t>(), ids.const_data_ptr<int32_t>() + length};
}

/// What the flags say about the prompt, before there is a model: a mistake shows at once.
struct PromptRequest {
  std::vector<int32_t> ids;               // --prompt_ids
  std::optional<int64_t> synthetic = {};  // --prompt N
  std::string text = {};
};

PromptRequest read_prompt(const CommandLine& flags) {
  if (flags.given("prompt_ids")) return {.ids = parse_ids(flags.get_text("prompt_ids"))};
  if (flags.given("prompt_file"))
    return {.text = read_file("prompt_file", flags.get_text("prompt_file"))};
  const std::string text = flags.get_text("prompt");
  return {.synthetic = synthetic_length(text), .text = text};
}

Prompt make_prompt(const CommandLine& flags, const PromptRequest& request,
                   const LoadedModel& loaded, ChatTemplate chat_template) {
  if (flags.given("prompt_ids")) return {request.ids, ""};
  if (request.synthetic)
    return {synthetic_prompt(*request.synthetic, loaded.model->config, flags.get_integer("seed")),
            ""};
  const std::string& text = request.text;
  const Tokenizer& tokenizer = require_tokenizer(loaded, "a text prompt");
  if (chat_template != ChatTemplate::kNone)
    return {encode_turn(tokenizer, chat_template, text, /*first=*/true), text};
  Prompt prompt{tokenizer.encode(text, flags.get_flag("parse_special")), text};
  if (tokenizer.add_bos() && !flags.get_flag("no_bos")) {
    if (!prompt.ids.empty() && prompt.ids[0] == tokenizer.bos_id()) {
      std::cerr << "warning: the prompt already starts with the BOS token; it now has two. "
                   "--no_bos leaves ours out\n";
    }
    prompt.ids.insert(prompt.ids.begin(), tokenizer.bos_id());
  }
  return prompt;
}

/// Prints the prompt and the text after it as it is generated, for the one row that is shown.
class Streamer {
 public:
  Streamer(const Tokenizer* tokenizer, std::vector<int32_t> prompt,
           std::vector<int32_t> stop_tokens)
      : decoder_(tokenizer != nullptr ? std::make_optional<StreamDecoder>(*tokenizer)
                                      : std::nullopt),
        prompt_(std::move(prompt)),
        stop_tokens_(std::move(stop_tokens)) {}

  /// Stop tokens are not shown.
  void push(int32_t id) {
    print_prompt();
    if (std::find(stop_tokens_.begin(), stop_tokens_.end(), id) == stop_tokens_.end()) print(id);
    std::cout.flush();
  }
  void finish() {
    print_prompt();
    std::cout << (decoder_ ? decoder_->finish() : "") << std::endl;
  }

 private:
  void print(int32_t id) {
    std::cout << (decoder_ ? decoder_->push(id) : std::to_string(id) + " ");
  }
  /// With the first token, when nothing can be wrong with the input any more; through the same
  /// decoder, so that spaces at the seam come out right.
  void print_prompt() {
    for (const int32_t id : prompt_) print(id);
    prompt_.clear();
  }

  std::optional<StreamDecoder> decoder_;
  std::vector<int32_t> prompt_;
  std::vector<int32_t> stop_tokens_;
};

double bandwidth_gb_s(const TransformerImpl& model, const GenerateResult& result) {
  return static_cast<double>(model_bytes(model)) * result.tokens_per_sec() / 1e9;
}

/// One JSON object a row, as documented in the README.
void print_json(int64_t sample, const Prompt& prompt, const GenerateResult& result,
                const Tokenizer* tokenizer, const TransformerImpl& model,
                const std::vector<int32_t>& stop_tokens) {
  for (size_t b = 0; b < result.rows.size(); ++b) {
    const GeneratedRow& row = result.rows[b];
    std::vector<int32_t> shown = row.tokens;
    if (!shown.empty() &&
        std::find(stop_tokens.begin(), stop_tokens.end(), shown.back()) != stop_tokens.end())
      shown.pop_back();
    nlohmann::ordered_json line = {
        {"sample", sample},
        {"row", b},
        {"text", tokenizer != nullptr ? to_valid_utf8(tokenizer->decode(shown)) : ""},
        {"prompt_ids", prompt.ids},
        {"token_ids", row.tokens},
        {"new_tokens", row.tokens.size()},
        {"finish_reason", to_string(row.finish_reason)},
        {"seconds", result.seconds},
        {"prefill_seconds", result.prefill_seconds},
        {"tokens_per_sec", result.tokens_per_sec()},
        {"decode_tokens_per_sec", result.decode_tokens_per_sec()},
        {"bandwidth_gb_s", bandwidth_gb_s(model, result)},
        {"model_bytes", model_bytes(model)},
        {"accept_counts", result.accept_counts},
        {"path", model.reference() ? "reference" : ops::path(model.device(), model.dtype())},
    };
    std::cout << line.dump() << std::endl;
  }
}

/// The original's lines after each sample.
void print_figures(int64_t sample, const GenerateResult& result, const TransformerImpl& model,
                   int64_t prompt_length) {
  const auto total_tokens = static_cast<double>(
      result.new_tokens() + prompt_length * static_cast<int64_t>(result.rows.size()));
  std::printf(
      "Time for inference %ld: %.2f sec total, %.2f tokens/sec (decode alone: %.2f tokens/sec)\n",
      sample + 1, result.seconds, result.tokens_per_sec(), result.decode_tokens_per_sec());
  std::printf("Bandwidth achieved: %.2f GB/s", bandwidth_gb_s(model, result));
  if (const ModelArgs& config = model.config; config.num_experts > 0) {
    std::printf(" (counting the %ld of %ld experts that a token activates)",
                config.num_activated_experts, config.num_experts);
  }
  std::printf("\n");
  std::printf("FLOPS achieved: %.2f TF/s\n\n",
              static_cast<double>(model_params(model)) * total_tokens / result.seconds * 2 / 1e12);
  std::fflush(stdout);
}

/// Largest memory this process has used, in GB (mapped file pages that were read count too).
double peak_memory_gb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e9;
}

void save_logits(const std::string& file, const Prompt& prompt, const GenerateResult& result) {
  std::vector<int64_t> tokens(prompt.ids.begin(), prompt.ids.end());
  const auto& row = result.rows[0].tokens;
  tokens.insert(tokens.end(), row.begin(), row.end());
  tokens.resize(
      static_cast<size_t>(result.logits.size(0)));  // the last token was sampled but not fed
  StateDict out;
  out.set("tokens", at::tensor(tokens, at::kLong));
  out.set("logits", result.logits);
  save_checkpoint(file, out);
}

CommandLine make_command_line() {
  CommandLine flags("generate", "Generate text with a Llama-family checkpoint.");
  declare_model_flags(flags);
  declare_rank_flags(flags);
  flags.text("prompt", "text to continue; a whole number asks for that many random tokens",
             "Hello, my name is");
  flags.text("prompt_ids", "token ids to continue, 1,2,3; nothing is added");
  flags.text("prompt_file", "file whose bytes are the prompt");
  flags.flag("interactive", "chat: read prompts from the terminal or a pipe");
  flags.integer("num_samples", "how many times to generate", 5, 1, 1'000'000);
  flags.integer("max_new_tokens", "tokens to generate; 0 with --json tokenizes the prompt", 200, 0,
                int64_t{1} << 24);
  flags.integer("batch_size", "rows of the same prompt", 1, 1, kMaxStepRows);
  flags.integer("top_k", "sample among the k likeliest tokens; 0: all", 200, 0, int64_t{1} << 24);
  flags.number("temperature", "0: always the likeliest token", 0.8, 0, 1e6);
  flags.flag("compile", "accepted for gpt-fast's sake: the fast path is the default");
  flags.flag("compile_prefill", "accepted for gpt-fast's sake");
  flags.flag("parse_special", "special tokens written in the prompt are tokens, not text");
  flags.flag("no_bos", "put no BOS token in front of the prompt");
  flags.flag("ignore_eos", "do not end at the model's stop tokens");
  flags.choice("chat_template",
               "auto: the model's own; without --interactive applied only where this flag is given",
               "auto", {"auto", "none", "llama2", "llama3", "mistral", "chatml"});
  flags.text("draft_checkpoint_path",
             "smaller model of the same vocabulary that drafts tokens (speculative decoding)");
  flags.choice("draft", "lookup: draft what followed the text's last words earlier in it", "",
               {"lookup"});
  flags.integer("speculate_k", "tokens to draft a round", 5, 1, kMaxSpeculateK);
  flags.text("profile",
             "write a Chrome trace of the last sample to PROFILE.json (PROFILE_rank_N.json for "
             "each of several ranks)");
  flags.text("logits_out", "write {tokens, logits} of the only sample, for Python's torch.load");
  return flags;
}

void check_flags(const CommandLine& flags) {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw UsageError(message);
  };
  require(flags.given("prompt") + flags.given("prompt_ids") + flags.given("prompt_file") <= 1,
          "give one of --prompt, --prompt_ids and --prompt_file");
  require(!flags.given("logits_out") || flags.get_integer("num_samples") == 1,
          "--logits_out needs --num_samples 1");
  const bool speculative = flags.given("draft") || flags.given("draft_checkpoint_path");
  require(!flags.given("draft") || !flags.given("draft_checkpoint_path"),
          "give one of --draft lookup and --draft_checkpoint_path");
  require(!speculative || flags.get_integer("batch_size") == 1,
          "speculative decoding needs --batch_size 1");
  require(!speculative || !flags.get_flag("interactive"),
          "--interactive goes without speculative decoding");
  require(!flags.get_flag("interactive") ||
              (flags.get_integer("batch_size") == 1 && !flags.get_flag("json")),
          "--interactive goes with --batch_size 1 and without --json");
  require(!flags.get_flag("interactive") || flags.get_integer("max_new_tokens") > 0,
          "--interactive needs --max_new_tokens of at least 1");
}

GenerateOptions generate_options(const CommandLine& flags, const Tokenizer* tokenizer,
                                 ChatTemplate chat_template) {
  GenerateOptions options;
  options.max_new_tokens = flags.get_integer("max_new_tokens");
  options.batch_size = flags.get_integer("batch_size");
  options.sampling = {.temperature = flags.get_number("temperature"),
                      .top_k = flags.get_integer("top_k"),
                      .seed = static_cast<uint64_t>(flags.get_integer("seed"))};
  options.return_logits = flags.given("logits_out");
  options.lookup = flags.given("draft");
  options.speculate_k = flags.get_integer("speculate_k");
  if (tokenizer != nullptr && !flags.get_flag("ignore_eos")) {
    options.stop_tokens = tokenizer->stop_ids();
    for (const int32_t id : turn_end_ids(*tokenizer, chat_template))
      options.stop_tokens.push_back(id);
  }
  return options;
}

/// The draft model of --draft_checkpoint_path. Throws when its tokenizer is another one.
Transformer load_draft(const CommandLine& flags, const LoadedModel& loaded,
                       const std::shared_ptr<TensorParallel>& tp) {
  const std::string path = flags.get_text("draft_checkpoint_path");
  const auto tokenizer = load_tokenizer_beside(path);
  constexpr const char* kProbe =
      "The quick brown fox, 12345 times:\n\tfor (i = 0; i < n; ++i) été 东京 🦙";
  TORCH_CHECK(tokenizer == nullptr || loaded.tokenizer == nullptr ||
                  tokenizer->encode(kProbe) == loaded.tokenizer->encode(kProbe),
              "the draft '", path, "' and the model '", flags.get_text("checkpoint_path"),
              "' have different tokenizers; a draft must share its model's");
  return load_model_from_flags(flags, path, /*config=*/"", tp);
}

/// The original's closing lines about speculation.
void print_acceptance(const std::vector<int64_t>& counts) {
  const auto rounds =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  if (rounds == 0) return;
  double mean = 0;
  std::printf("Acceptance probs: [");
  for (size_t i = 0; i < counts.size(); ++i) {
    std::printf("%s%.4f", i == 0 ? "" : ", ", static_cast<double>(counts[i]) / rounds);
    mean += static_cast<double>(i) * static_cast<double>(counts[i]) / rounds;
  }
  std::printf("]\nMean Accepted: %.4f\n", mean);
}

/// PROFILE.json; among ranks each writes its own.
std::string trace_file(const CommandLine& flags, const TensorParallel* tp) {
  const std::string rank = tp == nullptr ? "" : "_rank_" + std::to_string(tp->rank());
  return flags.get_text("profile") + rank + ".json";
}

/// Generates --num_samples times and prints each as it comes.
void run_samples(const CommandLine& flags, LoadedModel& loaded, const Prompt& prompt,
                 GenerateOptions options) {
  const bool json = flags.get_flag("json");
  std::vector<double> rates;
  std::vector<int64_t> accept_counts(static_cast<size_t>(options.speculate_k) + 1);
  for (int64_t i = 0; i < flags.get_integer("num_samples"); ++i) {
    Streamer streamer(loaded.tokenizer.get(), prompt.ids, options.stop_tokens);
    if (!json) {
      if (options.batch_size > 1) {
        std::cerr << "Only displaying the first generation of the batch\n";
      }
      options.callback = [&](int64_t row, int32_t token) {
        if (row == 0) streamer.push(token);
        return true;
      };
    }
    std::optional<Profile> profile;
    const bool last = i == flags.get_integer("num_samples") - 1;
    if (last && flags.given("profile")) profile.emplace(loaded.model->device().is_cuda());
    const GenerateResult result = generate(loaded.model, prompt.ids, options);
    const TensorParallel* tp = loaded.model->tp();
    if (profile) profile->save(trace_file(flags, tp));
    options.sampling.seed += static_cast<uint64_t>(
        options.batch_size);  // every row of every sample has a seed of its own
    rates.push_back(result.tokens_per_sec());
    for (size_t n = 0; n < result.accept_counts.size(); ++n)
      accept_counts[n] += result.accept_counts[n];
    if (options.return_logits && (tp == nullptr || tp->rank() == 0))
      save_logits(flags.get_text("logits_out"), prompt, result);
    if (json) {
      print_json(i, prompt, result, loaded.tokenizer.get(), *loaded.model, options.stop_tokens);
    } else {
      streamer.finish();
      print_figures(i, result, *loaded.model, static_cast<int64_t>(prompt.ids.size()));
    }
  }
  if (json) return;
  std::printf("==========\n");
  print_acceptance(accept_counts);
  std::printf(
      "Batch Size: %ld\nPrompt Length: %zu\nGenerated tokens: %ld\nAverage tokens/sec: "
      "%.2f\nMemory used: %.2f GB\n",
      options.batch_size, prompt.ids.size(), options.max_new_tokens,
      std::accumulate(rates.begin(), rates.end(), 0.0) / static_cast<double>(rates.size()),
      peak_memory_gb());
}

/// Throws when this process cannot write what --logits_out or --profile names.
void check_outputs(const CommandLine& flags, const TensorParallel* tp) {
  if (flags.given("logits_out") && (tp == nullptr || tp->rank() == 0))
    const OutputFile logits(flags.get_text("logits_out"));
  if (flags.given("profile")) const OutputFile trace(trace_file(flags, tp));
}

int generate_main(int argc, char** argv) {
  CommandLine flags = make_command_line();
  if (!flags.parse(argc, argv)) return 0;
  check_flags(flags);
  if (const auto status = launch_ranks(flags, argv)) return *status;
  const PromptRequest request = read_prompt(flags);
  const auto tp = connect_ranks(flags);
  check_outputs(flags, tp.get());
  LoadedModel loaded = load_from_flags(flags, tp);
  const bool interactive = flags.get_flag("interactive");
  const bool templated =
      interactive || (flags.given("chat_template") && flags.get_text("chat_template") != "none");
  const ChatTemplate chat_template =
      templated ? chat_template_from_string(flags.get_text("chat_template"),
                                            require_tokenizer(loaded, "a chat"))
                : ChatTemplate::kNone;
  GenerateOptions options = generate_options(flags, loaded.tokenizer.get(), chat_template);
  Transformer draft_model{nullptr};
  if (flags.given("draft_checkpoint_path")) {
    draft_model = load_draft(flags, loaded, tp);
    options.draft_model = &draft_model;
  }
  if (interactive) {
    chat_loop(loaded.model, *loaded.tokenizer, chat_template, options);
  } else {
    run_samples(flags, loaded, make_prompt(flags, request, loaded, chat_template), options);
  }
  loaded.model = draft_model = nullptr;
  if (tp) tp->finish();
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("generate", [&] { return gptfast::app::generate_main(argc, argv); });
}
