// bench_all_reduce: what one sum over the ranks costs inside a captured graph, by NCCL and by the
// one-shot kernel where it runs. Start it with --tensor_parallel N.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "common.h"
#include "gptfast/tp.h"
#include "ranks.h"

namespace gptfast::app {
namespace {

constexpr int kSums = 200;  // of a graph: what starting it costs is spread over as many
constexpr int kReplays = 20;

/// Microseconds of one `sum` of kSums in a graph: the fastest replay.
double measure(const std::function<void()>& sum) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  sum();  // loads the kernels, which a capture must not do
  stream.synchronize();
  C10_CUDA_CHECK(cudaStreamBeginCapture(stream.stream(), cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kSums; ++i) sum();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  C10_CUDA_CHECK(cudaStreamEndCapture(stream.stream(), &graph));
  C10_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, /*flags=*/0));
  C10_CUDA_CHECK(cudaGraphDestroy(graph));
  double fastest = 1e9;
  for (int i = 0; i < kReplays; ++i) {
    const auto start = std::chrono::steady_clock::now();
    C10_CUDA_CHECK(cudaGraphLaunch(exec, stream.stream()));
    stream.synchronize();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    fastest = std::min(fastest, took.count() / kSums);
  }
  C10_CUDA_CHECK(cudaGraphExecDestroy(exec));
  return fastest;
}

int bench_all_reduce(int argc, char** argv) {
  CommandLine flags("bench_all_reduce", "Latency of a sum over the ranks in a graph.");
  declare_rank_flags(flags);
  flags.text("device", "cuda", "cuda");
  if (!flags.parse(argc, argv)) return 0;
  if (const auto status = launch_ranks(flags, argv)) return *status;
  const auto tp = connect_ranks(flags);
  if (!tp || !tp->device().is_cuda())
    throw UsageError("start it on GPUs with --tensor_parallel N, or with torchrun");
  const c10::InferenceMode guard;
  const bool one_shot = std::string(tp->all_reduce_path()) == "one-shot";
  for (const int64_t kib : {4, 8, 16, 32, 64, 128}) {
    const auto options = at::TensorOptions(tp->device()).dtype(at::kFloat);
    const Tensor x = at::zeros({1, kib * 256}, options);
    std::printf("%4ld KB: NCCL %.2f us", kib, measure([&] { tp->all_reduce(x); }));
    if (one_shot)
      std::printf(", one-shot %.2f us", measure([&] { tp->sum_into(x, [](Tensor& /*sum*/) {}); }));
    std::printf("\n");
  }
  tp->finish();
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("bench_all_reduce",
                           [&] { return gptfast::app::bench_all_reduce(argc, argv); });
}
