#include "gptfast/profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdlib>
#include <filesystem>
#include <set>

namespace gptfast {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

Profile::Profile(bool cuda) {
  // Without this a CUDA LibTorch complains on stderr that a machine without a GPU has no driver.
  // (99: nothing at all. Kineto reads it once, when it starts.)
  if (!cuda) setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (cuda) activities.insert(ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

Profile::~Profile() {
  if (running_) profiler::disableProfiler();
}

void Profile::save(const std::string& file) {
  running_ = false;
  const auto result = profiler::disableProfiler();
  std::error_code ignored;
  std::filesystem::remove(file, ignored);  // the profiler reports nothing when it cannot write
  result->save(file);
  TORCH_CHECK(std::filesystem::exists(file), "cannot write the trace '", file,
              "'; check the folder and its permissions");
}

}  // namespace gptfast
