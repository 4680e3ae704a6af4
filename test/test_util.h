// What the tests share: golden files, temporary folders, comparisons.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "gptfast/checkpoint.h"
#include "gptfast/model.h"

namespace gptfast {

inline std::filesystem::path golden(const std::string& name) {
  return std::filesystem::path(GPTFAST_GOLDEN) / name;
}

/// A folder that goes away with the test.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "gptfast_test_XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Largest absolute difference as a share of the largest absolute expected value.
inline double relative_difference(const Tensor& actual, const Tensor& expected) {
  const Tensor a = actual.to(at::kCPU, at::kDouble), e = expected.to(at::kCPU, at::kDouble);
  return (a - e).abs().max().item<double>() / e.abs().max().item<double>();
}

/// The one line of the c10::Error that `body` throws; fails the test when it throws nothing.
template <typename Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

/// One of the tiny models of the golden data in the given precision.
inline Transformer tiny_model(const std::string& name, at::ScalarType precision = at::kFloat,
                              const std::string& file = "model.fp32.pth") {
  return load_model(golden(name) / file, {.config = "",
                                          .precision = precision,
                                          .device = at::kCPU,
                                          .reference = false,
                                          .progress = {}});
}

}  // namespace gptfast
