// The linear stages: weight format -> kernel.
#include "ops/cuda/stage_dispatch.cuh"

namespace gptfast::cuda {

extern template cudaError_t run_stage<Float16Weights<__nv_bfloat16>>(const Launch&, Stage,
                                                                     const StageArgs&);
extern template cudaError_t run_stage<Float16Weights<__half>>(const Launch&, Stage,
                                                              const StageArgs&);
extern template cudaError_t run_stage<Int8Weights>(const Launch&, Stage, const StageArgs&);
extern template cudaError_t run_stage<Int4Weights<32>>(const Launch&, Stage, const StageArgs&);
extern template cudaError_t run_stage<Int4Weights<64>>(const Launch&, Stage, const StageArgs&);
extern template cudaError_t run_stage<Int4Weights<128>>(const Launch&, Stage, const StageArgs&);

namespace {

cudaError_t run(const Launch& launch, Stage stage, const StageArgs& args) {
  switch (args.w.format) {
    case Format::kBFloat16:
      return run_stage<Float16Weights<__nv_bfloat16>>(launch, stage, args);
    case Format::kFloat16:
      return run_stage<Float16Weights<__half>>(launch, stage, args);
    case Format::kInt8:
      return run_stage<Int8Weights>(launch, stage, args);
    default:
      break;
  }
  switch (packed_groupsize(args.w.groupsize)) {
    case 32:
      return run_stage<Int4Weights<32>>(launch, stage, args);
    case 64:
      return run_stage<Int4Weights<64>>(launch, stage, args);
    default:
      return run_stage<Int4Weights<128>>(launch, stage, args);
  }
}

}  // namespace

cudaError_t qkv_stage(const Launch& launch, const StageInput& in, const Weight& wqkv,
                      const RowMap& map, const Cache& cache, const float* freqs_cis, float* q) {
  StageArgs args{};
  args.in = in;
  args.w = wqkv;
  args.map = map;
  args.cache = cache;
  args.freqs_cis = freqs_cis;
  args.out = q;
  return run(launch, Stage::kQkv, args);
}

cudaError_t residual_stage(const Launch& launch, const StageInput& in, const Weight& w, float* x) {
  StageArgs args{};
  args.in = in;
  args.w = w;
  args.out = x;
  return run(launch, Stage::kResidual, args);
}

cudaError_t residual_stage(const Launch& launch, const StageInput& in, const Weight& w, float* x,
                           const Peers& peers) {
  if (w.n % 2 != 0 || static_cast<int64_t>(in.rows) * w.n > peers.capacity)
    return cudaErrorInvalidValue;
  StageArgs args{};
  args.in = in;
  args.w = w;
  args.out = x;
  args.peers = peers;
  return run(launch, Stage::kResidualSum, args);
}

cudaError_t gate_up_stage(const Launch& launch, const StageInput& in, const Weight& w, float* h) {
  StageArgs args{};
  args.in = in;
  args.w = w;
  args.out = h;
  return run(launch, Stage::kGateUp, args);
}

cudaError_t expert_gate_up_stage(const Launch& launch, const StageInput& in, const Router& router,
                                 const Weight& w, const ExpertChoice& chosen, float* h) {
  StageArgs args{};
  args.in = in;
  args.router = router;
  args.w = w;
  args.chosen = chosen;
  args.out = h;
  return run(launch, Stage::kExpertGateUp, args);
}

cudaError_t expert_down_stage(const Launch& launch, const StageInput& h, const Weight& w,
                              const ExpertChoice& chosen, float* x) {
  StageArgs args{};
  args.in = h;
  args.w = w;
  args.chosen = chosen;
  args.out = x;
  return run(launch, Stage::kExpertDown, args);
}

cudaError_t head_stage(const Launch& launch, const StageInput& in, const Weight& w, float* logits) {
  StageArgs args{};
  args.in = in;
  args.w = w;
  args.out = logits;
  return run(launch, Stage::kHead, args);
}

}  // namespace gptfast::cuda
