// Builds GGUF files for tests, valid and not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gptfast::testing {

class GgufBuilder {
 public:
  enum Type : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kBF16 = 30 };

  struct TensorEntry {
    std::string name;
    std::vector<uint64_t> dims;  // fastest first, as in the file
    uint32_t type;
    std::string data;
  };

  template <typename T>
  static std::string raw(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
  static std::string text(const std::string& value) { return raw(uint64_t{value.size()}) + value; }

  void entry(const std::string& key, uint32_t type, const std::string& bytes) {
    metadata_.push_back(text(key) + raw(type) + bytes);
  }
  void integer(const std::string& key, uint32_t value) { entry(key, 4, raw(value)); }
  void number(const std::string& key, float value) { entry(key, 6, raw(value)); }
  void boolean(const std::string& key, bool value) { entry(key, 7, raw(uint8_t{value})); }
  void string(const std::string& key, const std::string& value) { entry(key, 8, text(value)); }
  void strings(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = raw(uint32_t{8}) + raw(uint64_t{values.size()});
    for (const auto& value : values) bytes += text(value);
    entry(key, 9, bytes);
  }
  template <typename T>
  void list(const std::string& key, uint32_t item_type, const std::vector<T>& values) {
    std::string bytes = raw(item_type) + raw(uint64_t{values.size()});
    for (const auto& value : values) bytes += raw(value);
    entry(key, 9, bytes);
  }
  void tensor(TensorEntry entry) { tensors.push_back(std::move(entry)); }

  std::string build() const {
    std::string out = "GGUF" + raw(version) + raw(tensor_count.value_or(tensors.size())) +
                      raw(metadata_count.value_or(metadata_.size()));
    for (const auto& bytes : metadata_) out += bytes;
    uint64_t offset = 0;
    for (const auto& t : tensors) {
      out += text(t.name) + raw(static_cast<uint32_t>(t.dims.size()));
      for (const uint64_t dim : t.dims) out += raw(dim);
      out += raw(t.type) + raw(offset);
      offset += (t.data.size() + 31) / 32 * 32;
    }
    for (const auto& t : tensors) {
      out.resize((out.size() + 31) / 32 * 32);
      out += t.data;
    }
    return out;
  }

  uint32_t version = 3;
  std::optional<uint64_t> tensor_count;  // lies, when set
  std::optional<uint64_t> metadata_count;
  std::vector<TensorEntry> tensors;

 private:
  std::vector<std::string> metadata_;
};

}  // namespace gptfast::testing
