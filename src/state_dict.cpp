#include <c10/util/Exception.h>

#include "gptfast/checkpoint.h"

namespace gptfast {

const Tensor* StateDict::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &entries_[it->second].second;
}

const Tensor& StateDict::at(std::string_view name) const {
  const Tensor* tensor = find(name);
  TORCH_CHECK(tensor != nullptr, "the checkpoint has no tensor '", name, "'");
  return *tensor;
}

void StateDict::set(const std::string& name, Tensor tensor) {
  const auto [it, inserted] = index_.emplace(name, entries_.size());
  if (inserted) {
    entries_.emplace_back(name, std::move(tensor));
  } else {
    entries_[it->second].second = std::move(tensor);
  }
}

Tensor StateDict::take(std::string_view name) {
  const auto it = index_.find(std::string(name));
  TORCH_CHECK(it != index_.end(), "the checkpoint has no tensor '", name, "'");
  const size_t position = it->second;
  Tensor tensor = std::move(entries_[position].second);
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(position));
  index_.erase(it);
  for (auto& [key, index] : index_) {
    if (index > position) --index;
  }
  return tensor;
}

}  // namespace gptfast
