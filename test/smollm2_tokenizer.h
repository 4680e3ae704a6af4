// SmolLM2's tokenizer.json, put together from its vocabulary and merges in test/golden.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace gptfast {

inline nlohmann::json byte_level(bool add_prefix_space, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

/// Its ids are: 17 special tokens, bytes, then the results of the merges in their order.
inline nlohmann::json smollm2_json() {
  using nlohmann::json;
  const std::filesystem::path golden = std::filesystem::path(GPTFAST_GOLDEN) / "tokenizers";
  json vocab = json::object();
  json added = json::array();
  json merges = json::array();
  std::ifstream first(golden / "smollm2_first_tokens.txt");
  for (std::string token; std::getline(first, token);) {
    const size_t id = vocab.size();
    if (id < 17) added.push_back({{"id", id}, {"content", token}, {"special", true}});
    vocab.emplace(token, id);
  }
  std::ifstream lines(golden / "smollm2_merges.txt");
  for (std::string merge; std::getline(lines, merge);) {
    merges.push_back(merge);
    merge.erase(merge.find(' '), 1);
    vocab.emplace(merge, vocab.size());
  }
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"}, {"pretokenizers", {digits, byte_level(false, true)}}}},
          {"decoder", byte_level(true, true)},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

}  // namespace gptfast
