#include "gguf.h"

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <charconv>
#include <cstring>

namespace gptfast {

namespace {

// Numbers of the types of metadata values and of tensors in the format.
enum ValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kText = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12
};
enum TensorType : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kBF16 = 30 };

constexpr int64_t kBlock = 32;  // values of a quantized block

struct TypeTraits {
  const char* name;
  int64_t values;  // of a block
  int64_t bytes;   // of a block
};

std::optional<TypeTraits> traits_of(uint32_t type) {
  switch (type) {
    case kF32:
      return TypeTraits{"F32", 1, 4};
    case kF16:
      return TypeTraits{"F16", 1, 2};
    case kBF16:
      return TypeTraits{"BF16", 1, 2};
    case kQ4_0:
      return TypeTraits{"Q4_0", kBlock, 18};
    case kQ4_1:
      return TypeTraits{"Q4_1", kBlock, 20};
    case kQ8_0:
      return TypeTraits{"Q8_0", kBlock, 34};
    default:
      return std::nullopt;
  }
}

/// Reads the header front to back and refuses whatever does not fit in the file.
class Cursor {
 public:
  Cursor(const std::string& name, Bytes bytes) : name_(name), bytes_(bytes) {}

  uint64_t position() const { return position_; }
  uint64_t left() const { return bytes_.size() - position_; }

  template <typename T>
  T value() {
    T result;
    std::memcpy(&result, take(sizeof(T)), sizeof(T));
    return result;
  }

  std::string_view text() {
    const auto length = value<uint64_t>();
    return {reinterpret_cast<const char*>(take(length)), length};
  }

  /// A count of things that take at least `smallest` bytes each.
  uint64_t count(const char* what, uint64_t smallest) {
    const auto number = value<uint64_t>();
    TORCH_CHECK(number <= left() / smallest, name_, ": claims ", number, " ", what,
                ", more than the file can hold; it is damaged");
    return number;
  }

 private:
  const uint8_t* take(uint64_t size) {
    TORCH_CHECK(size <= left(), name_, ": is cut short: the header needs ", size,
                " bytes at offset ", position_, ", the file has ", bytes_.size());
    const uint8_t* data = bytes_.data() + position_;
    position_ += size;
    return data;
  }

  const std::string& name_;
  Bytes bytes_;
  uint64_t position_ = 0;
};

// 0.00001f is meant as 1e-5: the shortest decimal that gives the float.
double as_written(float number) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, number).ptr;
  double result = number;
  std::from_chars(text, end, result);
  return result;
}

GgufFile::Value read_scalar(Cursor& cursor, uint32_t type, const std::string& name,
                            std::string_view key) {
  switch (type) {
    case kUint8:
      return int64_t{cursor.value<uint8_t>()};
    case kInt8:
      return int64_t{cursor.value<int8_t>()};
    case kUint16:
      return int64_t{cursor.value<uint16_t>()};
    case kInt16:
      return int64_t{cursor.value<int16_t>()};
    case kUint32:
      return int64_t{cursor.value<uint32_t>()};
    case kInt32:
      return int64_t{cursor.value<int32_t>()};
    case kBool:
      return int64_t{cursor.value<uint8_t>() != 0};
    case kInt64:
      return cursor.value<int64_t>();
    case kUint64: {
      const auto number = cursor.value<uint64_t>();
      TORCH_CHECK(number <= INT64_MAX, name, ": metadata ", key, " is ", number,
                  ", which is out of range");
      return static_cast<int64_t>(number);
    }
    case kFloat32:
      return as_written(cursor.value<float>());
    case kFloat64:
      return cursor.value<double>();
    case kText:
      return cursor.text();
    default:
      TORCH_CHECK(false, name, ": metadata ", key, " has the unknown type ", type,
                  "; the file is damaged");
  }
}

uint64_t smallest_size(uint32_t type) {
  switch (type) {
    case kUint16:
    case kInt16:
      return 2;
    case kUint32:
    case kInt32:
    case kFloat32:
      return 4;
    case kText:
    case kUint64:
    case kInt64:
    case kFloat64:
      return 8;
    default:
      return 1;
  }
}

template <typename T>
std::vector<T> read_items(Cursor& cursor, uint32_t type, uint64_t count, const std::string& name,
                          std::string_view key) {
  std::vector<T> items;
  items.reserve(count);
  for (uint64_t i = 0; i < count; ++i)
    items.push_back(std::get<T>(read_scalar(cursor, type, name, key)));
  return items;
}

GgufFile::Value read_value(Cursor& cursor, const std::string& name, std::string_view key) {
  const auto type = cursor.value<uint32_t>();
  if (type != kArray) return read_scalar(cursor, type, name, key);
  const auto item = cursor.value<uint32_t>();
  TORCH_CHECK(item != kArray, name, ": metadata ", key,
              " is an array of arrays, which is not supported");
  const uint64_t count = cursor.count("array items", smallest_size(item));
  if (item == kText) return read_items<std::string_view>(cursor, item, count, name, key);
  if (item == kFloat32 || item == kFloat64)
    return read_items<double>(cursor, item, count, name, key);
  return read_items<int64_t>(cursor, item, count, name, key);
}

void check_magic(Cursor& cursor, const std::string& name, Bytes bytes) {
  TORCH_CHECK(bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0, name,
              ": is not a GGUF file");
  cursor.value<uint32_t>();
  const auto version = cursor.value<uint32_t>();
  TORCH_CHECK(version == 2 || version == 3, name, ": is GGUF version ", version,
              ", versions 2 and 3 in little-endian order are supported");
}

float half_at(const uint8_t* data) {
  at::Half value;
  std::memcpy(&value, data, sizeof value);
  return static_cast<float>(value);
}

// Blocks of ggml: one or two halfs, then 32 codes. Four-bit codes lie as 16 bytes whose low nibbles
// are the first 16 values.
void dequantize_block(uint32_t type, const uint8_t* block, float* out) {
  const float scale = half_at(block);
  if (type == kQ8_0) {
    for (int64_t i = 0; i < kBlock; ++i)
      out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
    return;
  }
  // No sum with a zero minimum: it would turn -0 into 0.
  if (type == kQ4_0) {
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      out[i] = scale * static_cast<float>((block[2 + i] & 15) - 8);
      out[i + kBlock / 2] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
    }
    return;
  }
  const float minimum = half_at(block + 2);
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    out[i] = scale * static_cast<float>(block[4 + i] & 15) + minimum;
    out[i + kBlock / 2] = scale * static_cast<float>(block[4 + i] >> 4) + minimum;
  }
}

Tensor dequantize(uint32_t type, const uint8_t* data, at::IntArrayRef shape, at::ScalarType dtype) {
  constexpr int64_t kChunkBlocks =
      1 << 15;  // 4 MiB of float32 at a time, small beside any tensor that matters
  Tensor result = at::empty(shape, dtype);
  Tensor flat = result.view({-1});
  const int64_t block_bytes = traits_of(type)->bytes;
  const int64_t blocks = flat.numel() / kBlock;
  Tensor chunk = at::empty({std::min(blocks, kChunkBlocks) * kBlock}, at::kFloat);
  for (int64_t first = 0; first < blocks; first += kChunkBlocks) {
    const int64_t count = std::min(kChunkBlocks, blocks - first);
    float* out = chunk.mutable_data_ptr<float>();
    for (int64_t i = 0; i < count; ++i)
      dequantize_block(type, data + (first + i) * block_bytes, out + i * kBlock);
    flat.narrow(0, first * kBlock, count * kBlock).copy_(chunk.narrow(0, 0, count * kBlock));
  }
  return result;
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& file) : name_(file.string()) {
  try {
    file_ = map_file(file);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, name_, ": ", error.what_without_backtrace());
  }
  const Bytes bytes = file_.bytes();
  Cursor cursor(name_, bytes);
  check_magic(cursor, name_, bytes);
  constexpr uint64_t kSmallestTensorInfo = 8 + 4 + 8 + 4 + 8;
  constexpr uint64_t kSmallestMetadata = 8 + 4 + 1;
  const uint64_t tensor_count = cursor.count("tensors", kSmallestTensorInfo);
  const uint64_t metadata_count = cursor.count("metadata entries", kSmallestMetadata);
  for (uint64_t i = 0; i < metadata_count; ++i) {
    const std::string_view key = cursor.text();
    TORCH_CHECK(metadata_.emplace(key, read_value(cursor, name_, key)).second, name_, ": metadata ",
                key, " appears twice");
  }
  for (uint64_t i = 0; i < tensor_count; ++i) {
    TensorInfo info{.name = cursor.text()};
    const auto dims = cursor.value<uint32_t>();
    TORCH_CHECK(dims >= 1 && dims <= 4, name_, ": tensor ", info.name, " has ", dims,
                " dimensions, 1 to 4 were expected");
    for (uint32_t d = 0; d < dims; ++d) {
      const auto size = cursor.value<uint64_t>();
      TORCH_CHECK(size >= 1 && size <= INT32_MAX, name_, ": tensor ", info.name,
                  " has a dimension of ", size);
      info.shape.insert(info.shape.begin(), static_cast<int64_t>(size));
    }
    info.type = cursor.value<uint32_t>();
    info.offset = cursor.value<uint64_t>();
    infos_.push_back(std::move(info));
  }
  const int64_t alignment = integer_or("general.alignment", 32);
  TORCH_CHECK(alignment >= 8 && alignment <= (1 << 20) && (alignment & (alignment - 1)) == 0, name_,
              ": general.alignment is ", alignment, ", a power of two from 8 was expected");
  const uint64_t start = (cursor.position() + alignment - 1) / alignment * alignment;
  for (TensorInfo& info : infos_) {
    TORCH_CHECK(info.offset % alignment == 0, name_, ": tensor ", info.name, " is not aligned to ",
                alignment, " bytes");
    TORCH_CHECK(start <= bytes.size() && info.offset <= bytes.size() - start, name_, ": tensor ",
                info.name, " lies behind the end of the file, which is cut short or damaged");
    info.offset += start;
  }
}

template <typename T>
const T& GgufFile::get(std::string_view key, const char* expected) const {
  const auto it = metadata_.find(key);
  TORCH_CHECK(it != metadata_.end(), name_, ": the metadata ", key, " is missing");
  const T* value = std::get_if<T>(&it->second);
  TORCH_CHECK(value != nullptr, name_, ": the metadata ", key, " is not ", expected);
  return *value;
}

template const int64_t& GgufFile::get<int64_t>(std::string_view, const char*) const;
template const std::string_view& GgufFile::get<std::string_view>(std::string_view,
                                                                 const char*) const;

double GgufFile::number(std::string_view key) const {
  const auto it = metadata_.find(key);
  if (it != metadata_.end() && std::holds_alternative<int64_t>(it->second))
    return static_cast<double>(std::get<int64_t>(it->second));
  return get<double>(key, "a number");
}

const std::vector<std::string_view>& GgufFile::texts(std::string_view key) const {
  return get<std::vector<std::string_view>>(key, "a list of strings");
}

const std::vector<int64_t>& GgufFile::integers(std::string_view key) const {
  return get<std::vector<int64_t>>(key, "a list of integers");
}

const std::vector<double>& GgufFile::numbers(std::string_view key) const {
  return get<std::vector<double>>(key, "a list of numbers");
}

std::vector<SourceTensor> GgufFile::tensors() const {
  std::vector<SourceTensor> result;
  for (const TensorInfo& info : infos_) {
    const auto traits = traits_of(info.type);
    TORCH_CHECK(traits, name_, ": tensor ", info.name, " has the type number ", info.type,
                ", which is not supported (known: F32, F16, BF16, Q8_0, Q4_0, Q4_1)");
    TORCH_CHECK(info.shape.back() % traits->values == 0, name_, ": tensor ", info.name, " of type ",
                traits->name, " has ", info.shape.back(), " columns, a multiple of ",
                traits->values, " was expected");
    uint64_t blocks = 1;
    for (size_t d = 0; d < info.shape.size(); ++d) {
      const int64_t size =
          d + 1 == info.shape.size() ? info.shape[d] / traits->values : info.shape[d];
      TORCH_CHECK(!__builtin_mul_overflow(blocks, static_cast<uint64_t>(size), &blocks), name_,
                  ": tensor ", info.name, " is too large");
    }
    const uint64_t room = (file_.size - info.offset) / static_cast<uint64_t>(traits->bytes);
    TORCH_CHECK(blocks <= room, name_, ": tensor ", info.name,
                " does not fit in the file, which is cut short or damaged");
    uint8_t* data = file_.owner.get() + info.offset;
    const bool quantized = traits->values != 1;
    if (quantized) {
      SourceTensor tensor{.name = std::string(info.name),
                          .shape = info.shape,
                          .quantized = true,
                          .bytes = blocks * traits->bytes};
      tensor.read = [owner = file_.owner, type = info.type, data, shape = info.shape](
                        at::ScalarType dtype) { return dequantize(type, data, shape, dtype); };
      result.push_back(std::move(tensor));
    } else {
      const auto dtype = info.type == kF32   ? at::kFloat
                         : info.type == kF16 ? at::kHalf
                                             : at::kBFloat16;
      const Tensor view = at::from_blob(
          data, info.shape, [owner = file_.owner](void*) {}, dtype);
      result.push_back(source_from_tensor(std::string(info.name), view));
    }
  }
  return result;
}

}  // namespace gptfast
