// The speed of captured speculative rounds beside a model of their cost.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "gptfast/model.h"

namespace gptfast::app {

struct SpeculationSetting {
  Transformer* draft = nullptr;  ///< nullptr: prompt lookup
  int64_t k = 4;
  std::vector<double> mean_accepted;  ///< drafts that a round is made to accept on average
  int64_t prompt_tokens = 5;
  int64_t new_tokens = 200;
  double plain_tokens_per_sec = 0;  ///< of decoding without speculation
};

/// Throws c10::Error unless the rounds can be captured.
nlohmann::ordered_json measure_speculation(Transformer& model, const SpeculationSetting& setting);
void print_speculation(const nlohmann::ordered_json& measured);

}  // namespace gptfast::app
