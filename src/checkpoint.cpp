#include "gptfast/checkpoint.h"

#include <c10/util/Exception.h>

#include "checkpoint_reader.h"
#include "mapped_file.h"

namespace gptfast {

const Tensor* StateDict::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  return found == index_.end() ? nullptr : &entries_[found->second].second;
}

const Tensor& StateDict::at(std::string_view name) const {
  const Tensor* tensor = find(name);
  TORCH_CHECK(tensor != nullptr, "the checkpoint has no tensor '", name, "'");
  return *tensor;
}

void StateDict::set(const std::string& name, Tensor tensor) {
  const auto [place, fresh] = index_.emplace(name, entries_.size());
  if (fresh) {
    entries_.emplace_back(name, std::move(tensor));
  } else {
    entries_[place->second].second = std::move(tensor);
  }
}

Tensor StateDict::take(std::string_view name) {
  const auto found = index_.find(std::string(name));
  TORCH_CHECK(found != index_.end(), "the checkpoint has no tensor '", name, "'");
  const size_t place = found->second;
  Tensor tensor = std::move(entries_[place].second);
  index_.erase(found);
  entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(place));
  for (size_t i = place; i < entries_.size(); ++i) --index_[entries_[i].first];
  return tensor;
}

StateDict load_checkpoint(const std::filesystem::path& file,
                          std::map<std::string, std::string>* records) {
  try {
    return read_checkpoint(map_file(file), Names::kStateDict, records);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, file.string(), ": ", error.what_without_backtrace());
  }
}

void save_checkpoint(const std::filesystem::path& file, const StateDict& tensors,
                     const std::map<std::string, std::string>& records) {
  CheckpointWriter writer(file);
  for (const auto& [name, tensor] : tensors) writer.add(name, tensor);
  for (const auto& [name, bytes] : records) writer.set_record(name, bytes);
  writer.finish();
}

}  // namespace gptfast
