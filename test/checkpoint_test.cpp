#include "gptfast/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint_reader.h"
#include "dtype_names.h"
#include "gptfast/inspect.h"
#include "sha256.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const fs::path kFormats = fs::path(GPTFAST_GOLDEN) / "formats";
const fs::path kPwned =
    "/tmp/gptfast_pwned";  // what the hostile goldens would write if they were run

const json& manifest() {
  static const json kManifest = [] {
    json all = json::parse(std::ifstream(kFormats / "manifest.json"));
    all.erase("_about");
    return all;
  }();
  return kManifest;
}

StateDict read(const fs::path& file, Names names) {
  return read_checkpoint(map_file(file), names, /*records=*/nullptr);
}

std::string sha256(const Tensor& tensor) {
  const Tensor data = tensor.contiguous();
  Sha256 sha;
  sha.update({static_cast<const uint8_t*>(data.const_data_ptr()), data.nbytes()});
  return sha.hex_digest();
}

// Files whose names end in .pth; a safetensors companion is there for other readers.
std::vector<std::string> golden_files() {
  std::vector<std::string> files;
  for (const auto& [name, entry] : manifest().items()) {
    if (name.ends_with(".pth")) files.push_back(name);
  }
  return files;
}

class GoldenFormat : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Manifest, GoldenFormat, testing::ValuesIn(golden_files()),
                         [](const auto& info) {
                           return info.param.substr(0, info.param.size() - 4);
                         });

void expect_tensors(const StateDict& tensors, const json& expected) {
  EXPECT_EQ(tensors.size(), expected.size());
  std::map<int, const void*> storages;
  for (const auto& [name, want] : expected.items()) {
    const Tensor* tensor = tensors.find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(dtype_name(tensor->scalar_type()), want["dtype"]) << name;
    EXPECT_EQ(json(tensor->sizes().vec()), want["shape"]) << name;
    EXPECT_EQ(json(tensor->strides().vec()), want["stride"]) << name;
    EXPECT_EQ(tensor->storage_offset(), want["storage_offset"]) << name;
    EXPECT_EQ(tensor->storage().nbytes(), want["storage_bytes"]) << name;
    EXPECT_EQ(sha256(*tensor), want["sha256"]) << name;
    const void* data = tensor->storage().data();
    const auto [place, fresh] = storages.emplace(want["storage_id"].get<int>(), data);
    EXPECT_EQ(place->second, data) << name << " does not share its storage";
  }
}

TEST_P(GoldenFormat, BehavesAsTheManifestSays) {
  const json& entry = manifest()[GetParam()];
  const std::string expected = entry["expected"];
  try {
    const StateDict tensors = read(kFormats / GetParam(), Names::kAsStored);
    EXPECT_NE(expected, "refuse");
    if (entry.contains("tensors")) expect_tensors(tensors, entry["tensors"]);
  } catch (const c10::Error& error) {
    EXPECT_NE(expected, "load") << error.what_without_backtrace();
    const std::string message = error.what_without_backtrace();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    RecordProperty("message", message);
  }
  EXPECT_FALSE(fs::exists(kPwned));
}

}  // namespace
}  // namespace gptfast
