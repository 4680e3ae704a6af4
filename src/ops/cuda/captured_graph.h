// Work on a stream, captured once and replayed.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace gptfast::cuda {

class CapturedGraph {
 public:
  CapturedGraph() = default;
  ~CapturedGraph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  bool captured() const { return exec_ != nullptr; }

  /// `work` enqueues on `stream`. It must have run before, since a capture must not load kernels.
  template <typename Work>
  void capture(const c10::cuda::CUDAStream& stream, const Work& work) {
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(cudaStreamBeginCapture(stream.stream(), cudaStreamCaptureModeThreadLocal));
    work();
    C10_CUDA_CHECK(cudaStreamEndCapture(stream.stream(), &graph));
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, /*flags=*/0);
    cudaGraphDestroy(graph);
    C10_CUDA_CHECK(error);
  }

  void launch(const c10::cuda::CUDAStream& stream) {
    C10_CUDA_CHECK(cudaGraphLaunch(exec_, stream.stream()));
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace gptfast::cuda
