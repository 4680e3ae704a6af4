#include "safetensors.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "mapped_file.h"

namespace gptfast {

namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the format's own reader

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kTypes = {{"F64", at::kDouble},
                                                               {"F32", at::kFloat},
                                                               {"F16", at::kHalf},
                                                               {"BF16", at::kBFloat16},
                                                               {"I64", at::kLong},
                                                               {"I32", at::kInt},
                                                               {"I16", at::kShort},
                                                               {"I8", at::kChar},
                                                               {"U8", at::kByte},
                                                               {"BOOL", at::kBool},
                                                               {"U16", at::kUInt16},
                                                               {"U32", at::kUInt32},
                                                               {"U64", at::kUInt64},
                                                               {"F8_E4M3", at::kFloat8_e4m3fn},
                                                               {"F8_E5M2", at::kFloat8_e5m2}};
  const auto it = kTypes.find(name);
  return it == kTypes.end() ? std::nullopt : std::optional(it->second);
}

struct Entry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Reads the header of one file; every message has its name.
class Header {
 public:
  Header(std::string name, Bytes bytes) : name_(std::move(name)), bytes_(bytes) {
    check(bytes.size() >= kLengthBytes, "is too short for a safetensors file");
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    check(length <= kMaxHeader && length <= bytes.size() - kLengthBytes, "has a header of ", length,
          " bytes in a file of ", bytes.size(), ": it is no safetensors file, or cut short");
    data_begin_ = kLengthBytes + length;
    parse({reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length});
    check_layout();
  }

  const std::vector<Entry>& entries() const { return entries_; }
  uint64_t data_begin() const { return data_begin_; }

 private:
  template <typename... Parts>
  void check(bool condition, const Parts&... parts) const {
    TORCH_CHECK(condition, name_, ": ", parts...);
  }

  void parse(std::string_view text) {
    std::set<std::string> names;
    std::string duplicate;
    const auto watch = [&](int depth, json::parse_event_t event, json& value) {
      if (event == json::parse_event_t::key && depth == 1 &&
          !names.insert(value.get<std::string>()).second)
        duplicate = value.get<std::string>();
      return true;
    };
    const json header = json::parse(text, watch, /*allow_exceptions=*/false);
    check(!header.is_discarded() && header.is_object(),
          "has a header that is no JSON object: it is no safetensors file, or damaged");
    check(duplicate.empty(), "has two tensors called ", duplicate);
    for (const auto& [name, value] : header.items()) {
      if (name != "__metadata__") entries_.push_back(parse_entry(name, value));
    }
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
  }

  static std::vector<uint64_t> numbers(const json& value, const char* key, bool& valid) {
    std::vector<uint64_t> result;
    const auto list = value.is_object() ? value.find(key) : value.end();
    valid = value.is_object() && list != value.end() && list->is_array();
    if (!valid) return result;
    for (const json& item : *list) {
      valid = valid && item.is_number_unsigned();
      if (valid) result.push_back(item.get<uint64_t>());
    }
    return result;
  }

  Entry parse_entry(const std::string& name, const json& value) const {
    bool valid_shape = false;
    bool valid_offsets = false;
    const auto shape = numbers(value, "shape", valid_shape);
    const auto offsets = numbers(value, "data_offsets", valid_offsets);
    const bool has_dtype =
        value.is_object() && value.contains("dtype") && value["dtype"].is_string();
    check(valid_shape && valid_offsets && offsets.size() == 2 && has_dtype, "tensor ", name,
          " is described wrongly in the header");
    const auto dtype = dtype_of(value["dtype"].get<std::string>());
    check(dtype.has_value(), "tensor ", name, " has the dtype ", value["dtype"].get<std::string>(),
          ", which is not supported");
    Entry entry{.name = name, .dtype = *dtype, .begin = offsets[0], .end = offsets[1]};
    uint64_t bytes = at::elementSize(*dtype);
    for (const uint64_t size : shape) {
      check(size <= INT64_MAX &&
                !__builtin_mul_overflow(bytes, std::max<uint64_t>(size, 1), &bytes) &&
                bytes <= INT64_MAX,
            "tensor ", name, " has a shape that is too large");
      entry.shape.push_back(static_cast<int64_t>(size));
    }
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) bytes = 0;
    check(entry.begin <= entry.end && entry.end - entry.begin == bytes, "tensor ", name,
          " of shape ", at::IntArrayRef(entry.shape), " needs ", bytes, " bytes, its offsets are ",
          entry.begin, " and ", entry.end);
    return entry;
  }

  void check_layout() const {
    uint64_t position = 0;
    for (const Entry& entry : entries_) {
      check(entry.begin == position, "tensor ", entry.name, " begins at ", entry.begin,
            ", the one before it ends at ", position);
      position = entry.end;
    }
    const uint64_t size = bytes_.size() - data_begin_;
    check(position == size, "has ", size, " bytes of data, its header describes ", position,
          ": it is cut short or damaged");
  }

  std::string name_;
  Bytes bytes_;
  uint64_t data_begin_ = 0;
  std::vector<Entry> entries_;
};

Tensor view_of(const FileBytes& file, const Entry& entry, uint64_t data_begin) {
  uint8_t* data = file.owner.get() + data_begin + entry.begin;
  if (reinterpret_cast<uintptr_t>(data) % at::elementSize(entry.dtype) == 0) {
    return at::from_blob(
        data, entry.shape, [owner = file.owner](void*) {}, entry.dtype);
  }
  // The format does not align data; reading misaligned numbers is not defined.
  Tensor copy = at::empty(entry.shape, entry.dtype);
  std::memcpy(copy.mutable_data_ptr(), data, entry.end - entry.begin);
  return copy;
}

}  // namespace

StateDict load_safetensors(const std::filesystem::path& file) {
  FileBytes mapped;
  try {
    mapped = map_file(file);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, file.string(), ": ", error.what_without_backtrace());
  }
  const Header header(file.string(), mapped.bytes());
  StateDict tensors;
  for (const Entry& entry : header.entries())
    tensors.set(entry.name, view_of(mapped, entry, header.data_begin()));
  return tensors;
}

}  // namespace gptfast
