#include "bench/bench_speculation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>

#include "gptfast/generate.h"
#include "gptfast/speculative_graph.h"

namespace gptfast::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepeats = 3;
constexpr int64_t kPatternRounds = 100;  // means of two decimals come out exactly

/// Whole numbers whose mean is `mean`, as even as they can be.
std::vector<int32_t> pattern_of(double mean) {
  std::vector<int32_t> pattern;
  int64_t sum = 0;
  for (int64_t i = 1; i <= kPatternRounds; ++i) {
    const auto wanted = static_cast<int64_t>(static_cast<double>(i) * mean + 1e-9);
    pattern.push_back(static_cast<int32_t>(wanted - sum));
    sum = wanted;
  }
  return pattern;
}

struct Speed {
  double round_seconds, tokens_per_sec, mean_accepted;
};

/// Decodes new_tokens as generate() does, `forced` deciding how many drafts are accepted.
Speed decode(Transformer& model, const std::shared_ptr<TransformerImpl>& draft,
             const SpeculationSetting& setting, const std::vector<int32_t>& forced) {
  std::vector<int32_t> text(static_cast<size_t>(setting.prompt_tokens) + 1);
  std::iota(text.begin(), text.end(), 1);
  const int64_t length = std::ssize(text) + setting.new_tokens + 3 * (setting.k + 1);
  model->setup_caches(1, length);
  prefill(model, text, 0);
  if (draft) {
    draft->setup_caches(1, length);
    prefill(*setting.draft, text, 0);
  }
  SpeculativeGraph graph(*model, draft, setting.k);
  graph.force_acceptance(forced);
  graph.start(text, length, {});
  graph.launch();
  graph.launch();
  graph.read();  // the first round may still load something
  int64_t tokens = 0, rounds = 0;
  const auto start = Clock::now();
  for (; tokens < setting.new_tokens; ++rounds) {
    graph.launch();
    tokens += std::ssize(graph.read());
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return {seconds / static_cast<double>(rounds), static_cast<double>(tokens) / seconds,
          static_cast<double>(tokens - rounds) / static_cast<double>(rounds)};
}

/// The median in speed of several runs.
Speed median_decode(Transformer& model, const std::shared_ptr<TransformerImpl>& draft,
                    const SpeculationSetting& setting, const std::vector<int32_t>& forced) {
  std::array<Speed, kRepeats> speeds{};
  for (Speed& speed : speeds) speed = decode(model, draft, setting, forced);
  std::sort(speeds.begin(), speeds.end(),
            [](const Speed& a, const Speed& b) { return a.tokens_per_sec < b.tokens_per_sec; });
  return speeds[kRepeats / 2];
}

double seconds_of_draft_step(Transformer& draft, const SpeculationSetting& setting) {
  std::vector<int32_t> prompt(static_cast<size_t>(setting.prompt_tokens));
  std::iota(prompt.begin(), prompt.end(), 1);
  std::array<double, kRepeats> rates{};
  for (double& rate : rates) {
    rate = generate(draft, prompt, {.max_new_tokens = setting.new_tokens}).decode_tokens_per_sec();
  }
  std::sort(rates.begin(), rates.end());
  return 1 / rates[kRepeats / 2];
}

}  // namespace

nlohmann::ordered_json measure_speculation(Transformer& model, const SpeculationSetting& setting) {
  const std::shared_ptr<TransformerImpl> draft =
      setting.draft != nullptr ? setting.draft->ptr() : nullptr;
  TORCH_CHECK(SpeculativeGraph::supported(*model, draft.get()),
              "speculation is measured on CUDA, where its rounds can be captured");
  // A round of lookup that accepts nothing is a verification of k + 1 rows and little else.
  const double verify = median_decode(model, nullptr, setting, {0}).round_seconds;
  const double plain = 1 / setting.plain_tokens_per_sec;
  nlohmann::ordered_json out;
  out["k"] = setting.k;
  out["plain_ms"] = 1e3 * plain;
  out["verify_ms"] = 1e3 * verify;
  out["verify_per_plain"] = verify / plain;
  if (!draft) return out;
  const double step = seconds_of_draft_step(*setting.draft, setting);
  out["draft_ms"] = 1e3 * step;
  out["model_round_ms"] = 1e3 * (static_cast<double>(setting.k) * step + verify);
  for (const double mean : setting.mean_accepted) {
    const Speed speed = median_decode(model, draft, setting, pattern_of(mean));
    out["forced"].push_back({{"mean_accepted", speed.mean_accepted},
                             {"round_ms", 1e3 * speed.round_seconds},
                             {"tokens_per_sec", speed.tokens_per_sec},
                             {"per_plain", speed.tokens_per_sec * plain}});
  }
  return out;
}

void print_speculation(const nlohmann::ordered_json& measured) {
  const auto number = [&](const char* key) { return measured[key].get<double>(); };
  const int k = measured["k"].get<int>();
  printf("  verification of %d rows %.3f ms, plain step %.3f ms: %.3fx\n", k + 1,
         number("verify_ms"), number("plain_ms"), number("verify_per_plain"));
  if (!measured.contains("draft_ms")) return;
  printf("  model of a round: %d x %.3f ms of draft + %.3f ms = %.3f ms\n", k, number("draft_ms"),
         number("verify_ms"), number("model_round_ms"));
  if (!measured.contains("forced")) return;
  for (const auto& run : measured["forced"]) {
    printf("  forced mean accepted %.2f: round %.3f ms, %.2f tokens/s, %.3fx plain\n",
           run["mean_accepted"].get<double>(), run["round_ms"].get<double>(),
           run["tokens_per_sec"].get<double>(), run["per_plain"].get<double>());
  }
}

}  // namespace gptfast::app
