#include "json_file.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <fstream>

namespace gptfast {

namespace {

constexpr uint64_t kMaxJsonBytes = uint64_t{256} << 20;

int64_t to_integer(const nlohmann::json& value, std::string_view key, const std::string& source) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    TORCH_CHECK(number <= INT64_MAX, source, ": field '", key, "' is ", number,
                ", which is out of range");
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (std::nearbyint(number) == number && std::abs(number) < 9e15)
      return static_cast<int64_t>(number);
  }
  TORCH_CHECK(false, source, ": field '", key, "' must be an integer, but is ",
              value.dump().substr(0, 60));
}

double to_number(const nlohmann::json& value, std::string_view key, const std::string& source) {
  TORCH_CHECK(value.is_number(), source, ": field '", key, "' must be a number, but is ",
              value.dump().substr(0, 60));
  return value.get<double>();
}

}  // namespace

std::string read_small_file(const std::filesystem::path& file, uint64_t max_bytes) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  TORCH_CHECK(std::filesystem::exists(status), file.string(), ": no such file");
  TORCH_CHECK(std::filesystem::is_regular_file(status), file.string(), ": is not a regular file");
  const auto size = std::filesystem::file_size(file, error);
  TORCH_CHECK(!error, file.string(), ": ", error.message());
  TORCH_CHECK(size <= max_bytes, file.string(), ": has ", size, " bytes, at most ", max_bytes,
              " were expected");
  std::ifstream stream(file, std::ios::binary);
  TORCH_CHECK(stream.good(), file.string(), ": cannot be opened for reading");
  std::string text(size, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(size));
  TORCH_CHECK(static_cast<uint64_t>(stream.gcount()) == size, file.string(),
              ": cannot be read to its end");
  return text;
}

nlohmann::json read_json_object(const std::filesystem::path& file) {
  const std::string text = read_small_file(file, kMaxJsonBytes);
  auto object = nlohmann::json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(!object.is_discarded(), file.string(), ": is not valid JSON");
  TORCH_CHECK(object.is_object(), file.string(), ": holds a JSON ", object.type_name(),
              ", an object was expected");
  return object;
}

bool JsonFields::has(std::string_view key) const {
  const auto it = object.find(key);
  return it != object.end() && !it->is_null();
}

int64_t JsonFields::integer(std::initializer_list<std::string_view> keys) const {
  for (const std::string_view key : keys) {
    if (has(key)) return to_integer(*object.find(key), key, source);
  }
  TORCH_CHECK(false, source, ": the field '", *keys.begin(), "' is missing");
}

int64_t JsonFields::integer_or(std::string_view key, int64_t otherwise) const {
  return has(key) ? to_integer(*object.find(key), key, source) : otherwise;
}

double JsonFields::number(std::string_view key) const {
  TORCH_CHECK(has(key), source, ": the field '", key, "' is missing");
  return to_number(*object.find(key), key, source);
}

double JsonFields::number_or(std::string_view key, double otherwise) const {
  return has(key) ? to_number(*object.find(key), key, source) : otherwise;
}

bool JsonFields::boolean_or(std::string_view key, bool otherwise) const {
  if (!has(key)) return otherwise;
  const auto& value = *object.find(key);
  TORCH_CHECK(value.is_boolean(), source, ": field '", key, "' must be true or false, but is ",
              value.dump().substr(0, 60));
  return value.get<bool>();
}

std::string JsonFields::string_or(std::string_view key, std::string_view otherwise) const {
  if (!has(key)) return std::string(otherwise);
  const auto& value = *object.find(key);
  TORCH_CHECK(value.is_string(), source, ": field '", key, "' must be a string, but is ",
              value.dump().substr(0, 60));
  return value.get<std::string>();
}

}  // namespace gptfast
