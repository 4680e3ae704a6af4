// Metrics and standard errors of evaluation, as lm-evaluation-harness computes them
// (api/metrics.py).
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "gptfast/eval.h"

namespace gptfast {

namespace {

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// With n - 1; nullopt for fewer than two values.
std::optional<double> sample_stddev(const std::vector<double>& values) {
  if (values.size() < 2) {
    return std::nullopt;
  }
  const double mu = mean(values);
  double sum = 0;
  for (const double value : values) {
    sum += (value - mu) * (value - mu);
  }
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

EvalMetric mean_metric(const std::string& name, const std::vector<double>& values) {
  auto error = sample_stddev(values);
  if (error) {
    *error /= std::sqrt(static_cast<double>(values.size()));
  }
  return {.name = name, .value = mean(values), .standard_error = error, .higher_is_better = true};
}

/// The state that Python's random.seed(n) gives its Mersenne Twister (init_by_array of Matsumoto
/// and Nishimura's mt19937ar.c with the one-word key n), in the form in which std::mt19937 takes a
/// state.
struct PythonSeed {
  using result_type = uint32_t;
  uint32_t seed;

  template <typename Iterator>
  void generate(Iterator begin, Iterator end) const {
    constexpr uint32_t kSize = std::mt19937::state_size;
    std::array<uint32_t, kSize> state{};
    state[0] = 19650218U;
    for (uint32_t i = 1; i < kSize; ++i) {
      state[i] = 1812433253U * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
    }
    uint32_t i = 1;
    const auto mix = [&](uint32_t factor, uint32_t add, bool subtract) {
      const uint32_t mixed = state[i] ^ ((state[i - 1] ^ (state[i - 1] >> 30)) * factor);
      state[i] = subtract ? mixed - add : mixed + add;
      if (++i == kSize) {
        state[0] = state[kSize - 1];
        i = 1;
      }
    };
    for (uint32_t k = 0; k < kSize; ++k) {
      mix(1664525U, seed, false);
    }
    for (uint32_t k = 1; k < kSize; ++k) {
      mix(1566083941U, i, true);
    }
    state[0] = 0x80000000U;
    std::copy_n(state.begin(), std::min<size_t>(kSize, end - begin), begin);
  }
};

/// Python's random.random(): 53 random bits in [0, 1).
double python_random(std::mt19937& generator) {
  const double high = generator() >> 5;
  const double low = generator() >> 6;
  return (high * 67108864.0 + low) / 9007199254740992.0;
}

int64_t argmax(const std::vector<double>& values) {
  return std::max_element(values.begin(), values.end()) - values.begin();  // the first of equals
}

void score_choices(const EvalTask& task, EvalResult& result) {
  for (size_t i = 0; i < task.items.size(); ++i) {
    const EvalItem& item = task.items[i];
    std::vector<double> loglikelihoods;
    std::vector<double> normalized;
    for (size_t choice = 0; choice < item.requests.size(); ++choice) {
      loglikelihoods.push_back(result.scores[i][choice].loglikelihood);
      normalized.push_back(loglikelihoods.back() / static_cast<double>(item.lengths[choice]));
    }
    result.acc.push_back(argmax(loglikelihoods) == item.gold ? 1.0 : 0.0);
    if (task.acc_norm) {
      result.acc_norm.push_back(argmax(normalized) == item.gold ? 1.0 : 0.0);
    }
  }
  result.metrics.push_back(mean_metric("acc", result.acc));
  if (task.acc_norm) {
    result.metrics.push_back(mean_metric("acc_norm", result.acc_norm));
  }
}

void score_last_words(EvalResult& result) {
  constexpr int64_t kBootstrapIterations = 100000;  // the harness's default
  std::vector<double> loglikelihoods;
  for (const auto& scores : result.scores) {
    loglikelihoods.push_back(scores.front().loglikelihood);
    result.acc.push_back(scores.front().is_greedy ? 1.0 : 0.0);
  }
  std::optional<double> error;
  if (loglikelihoods.size() > 1) {
    error = bootstrap_perplexity_stderr(loglikelihoods, kBootstrapIterations);
  }
  result.metrics.push_back(mean_metric("acc", result.acc));
  result.metrics.push_back({.name = "perplexity",
                            .value = std::exp(-mean(loglikelihoods)),
                            .standard_error = error,
                            .higher_is_better = false});
}

void score_documents(const EvalTask& task, EvalResult& result) {
  double loglikelihood = 0;
  double words = 0;
  double bytes = 0;
  for (size_t i = 0; i < task.items.size(); ++i) {
    loglikelihood += result.scores[i].front().loglikelihood;
    words += static_cast<double>(task.items[i].words);
    bytes += static_cast<double>(task.items[i].bytes);
  }
  TORCH_CHECK(bytes > 0, "The pages of task '", task.name,
              "' are empty: there is no text to score.");
  const auto add = [&](const char* name, double value) {
    result.metrics.push_back(
        {.name = name, .value = value, .standard_error = std::nullopt, .higher_is_better = false});
  };
  add("bits_per_byte", -loglikelihood / bytes / std::log(2.0));
  add("byte_perplexity", std::exp(-loglikelihood / bytes));
  add("word_perplexity", std::exp(-loglikelihood / words));
}

}  // namespace

double bootstrap_perplexity_stderr(const std::vector<double>& loglikelihoods, int64_t iterations) {
  TORCH_CHECK(iterations >= 2 && !loglikelihoods.empty(),
              "A bootstrap needs at least 2 iterations and 1 value, got ", iterations, " and ",
              loglikelihoods.size(), ".");
  const int64_t chunk = std::min<int64_t>(1000, iterations);
  const auto size = static_cast<double>(loglikelihoods.size());
  std::vector<double> replicates;
  for (int64_t seed = 0; seed < iterations / chunk; ++seed) {
    PythonSeed python_seed{static_cast<uint32_t>(seed)};
    std::mt19937 generator(python_seed);
    for (int64_t i = 0; i < chunk; ++i) {
      double sum = 0;
      for (size_t j = 0; j < loglikelihoods.size(); ++j) {
        sum += loglikelihoods[static_cast<size_t>(python_random(generator) * size)];
      }
      replicates.push_back(std::exp(-sum / size));
    }
  }
  return sample_stddev(replicates).value_or(0);
}

EvalResult aggregate(const EvalTask& task, std::vector<std::vector<Score>> scores) {
  TORCH_CHECK(!task.items.empty() && scores.size() == task.items.size(), "Task '", task.name,
              "' has ", task.items.size(), " items, but ", scores.size(), " are scored.");
  EvalResult result;
  result.scores = std::move(scores);
  switch (task.kind) {
    case TaskKind::kMultipleChoice:
      score_choices(task, result);
      break;
    case TaskKind::kLastWord:
      score_last_words(result);
      break;
    case TaskKind::kRolling:
      score_documents(task, result);
      break;
  }
  return result;
}

}  // namespace gptfast
