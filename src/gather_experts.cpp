// Mixtures of experts: one tensor for all experts of a layer, as the original's
// ConditionalFeedForward has them.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <charconv>
#include <map>

#include "weight_source.h"

namespace gptfast {

namespace {

constexpr std::string_view kMoe = "block_sparse_moe.";
constexpr std::string_view kExperts = "block_sparse_moe.experts.";

struct ExpertName {
  std::string target;  // layers.N.block_sparse_moe.cond_ffn.wK
  int64_t expert;      // -1: all of them, below each other
};

// nullopt for any other tensor.
std::optional<ExpertName> parse(const std::string& name) {
  const size_t moe = name.find(kMoe);
  if (moe == std::string::npos || name.size() < 3 || name[name.size() - 2] != 'w')
    return std::nullopt;
  const std::string weight = name.substr(name.size() - 2);
  if (weight != "w1" && weight != "w2" && weight != "w3") return std::nullopt;
  const std::string target = name.substr(0, moe) + std::string(kMoe) + "cond_ffn." + weight;
  if (name == name.substr(0, moe) + std::string(kMoe) + weight) return ExpertName{target, -1};
  const size_t digits = moe + kExperts.size();
  if (name.compare(moe, kExperts.size(), kExperts) != 0) return std::nullopt;
  int32_t expert = -1;
  const char* end = name.data() + name.size() - 3;  // of ".wK"
  const auto result = std::from_chars(name.data() + digits, end, expert);
  if (result.ec != std::errc() || result.ptr != end || expert < 0) return std::nullopt;
  return ExpertName{target, expert};
}

// [E * I, D] -> [E, I, D], and for w2 on to [E, D, I]
SourceTensor split_experts(const std::string& file, const std::string& target, SourceTensor all,
                           int64_t experts) {
  TORCH_CHECK(all.shape.size() == 2 && experts > 0 && all.shape[0] % experts == 0, file, ": ",
              all.name, " has the shape ", at::IntArrayRef(all.shape), ", which is not made of ",
              experts, " experts");
  const int64_t rows = all.shape[0] / experts;
  const int64_t columns = all.shape[1];
  all.name = target;
  if (!target.ends_with("w2")) {
    return transform(std::move(all), {experts, rows, columns}, [=](const Tensor& w) {
      return w.view({experts, rows, columns});
    });
  }
  return transform(std::move(all), {experts, columns, rows}, [=](const Tensor& w) {
    return w.view({experts, rows, columns}).permute({0, 2, 1});
  });
}

}  // namespace

void gather_experts(WeightSource& source) {
  std::map<std::string, std::map<int64_t, SourceTensor>> groups;
  std::vector<SourceTensor> others;
  for (SourceTensor& tensor : source.tensors) {
    if (const auto name = parse(tensor.name)) {
      auto& group = groups[name->target];
      TORCH_CHECK(group.emplace(name->expert, tensor).second, source.file, ": two tensors are ",
                  tensor.name);
    } else {
      others.push_back(std::move(tensor));
    }
  }
  for (auto& [target, group] : groups) {
    if (group.begin()->first == -1) {
      TORCH_CHECK(group.size() == 1, source.file, ": has ", target,
                  " both as one tensor and by expert");
      others.push_back(split_experts(source.file, target, std::move(group.begin()->second),
                                     source.config.num_experts));
      continue;
    }
    std::vector<SourceTensor> parts;
    for (auto& [expert, tensor] : group) {
      TORCH_CHECK(expert == static_cast<int64_t>(parts.size()), source.file, ": expert ",
                  parts.size(), " of ", target, " is missing");
      parts.push_back(std::move(tensor));
    }
    others.push_back(stack(target, std::move(parts)));
  }
  source.tensors = std::move(others);
}

}  // namespace gptfast
