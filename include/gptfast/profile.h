// Traces of what runs when (generate.py's --profile), by LibTorch's profiler.
#pragma once

#include <string>

namespace gptfast {

/// Records LibTorch's operators, our fused ops as named ranges and, on CUDA, every kernel from
/// construction until save().
class Profile {
 public:
  /// `cuda`: record the GPU's kernels too.
  explicit Profile(bool cuda);
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Ends the recording and writes a Chrome trace (chrome://tracing, https://ui.perfetto.dev).
  /// Throws naming the file when it cannot be written.
  void save(const std::string& file);

 private:
  bool running_ = true;
};

}  // namespace gptfast
