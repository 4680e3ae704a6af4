#include "tp_one_shot.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <cstring>
#include <fstream>
#include <span>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ops/cuda/all_reduce.h"
#include "ops/cuda/step_ops.h"

namespace gptfast {
namespace {

using at::Tensor;

constexpr int64_t kMaxDim = 16384;       // of a model
constexpr int64_t kMaxVocab = 1 << 18;   // 67 MB of mailbox among 2 to 8 ranks
constexpr uint64_t kSelfTestNs = 10e9;   // a peer may still be loading its kernels
constexpr double kSelfTestError = 1e-5;  // of sums of up to 8 values in [-1, 1]

/// What a rank tells the others: the reason why it cannot take part, or where its mailbox is.
struct Offer {
  std::array<char, 256> problem{};
  std::array<char, 40> boot{};  // tells hosts apart
  std::array<char, 32> bus{};   // the GPU's place, by which every process finds it
  cudaIpcMemHandle_t handle{};
};

void set_text(std::span<char> to, const std::string& text) {
  text.copy(to.data(), to.size() - 1);
}

std::string describe(cudaError_t error) {
  cudaGetLastError();  // it is dealt with
  return cudaGetErrorString(error);
}

std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(in, text);
  return text;
}

}  // namespace

struct OneShot::Impl {
  Impl(c10d::Store& s, int own_rank, int ranks, at::Device where)
      : store(s), rank(own_rank), world_size(ranks), device(where) {}

  std::string key(const std::string& what, int of) const {
    return "one_shot/" + what + '/' + std::to_string(of);
  }

  /// Allocates this rank's mailbox; "" or what went wrong.
  std::string allocate(Offer& offer) {
    const int multiprocessors = at::cuda::getDeviceProperties(device.index())->multiProcessorCount;
    if (multiprocessors > cuda::kPeerCounters)
      return c10::str("its GPU has ", multiprocessors, " multiprocessors, more than the ",
                      cuda::kPeerCounters, " blocks of a sum");
    peers.rank = rank;
    peers.world_size = world_size;
    peers.capacity =
        kMaxStepRows * std::max(kMaxDim, (kMaxVocab + world_size - 1) / world_size / 2 * 2);
    const size_t bytes = 2 * static_cast<size_t>(world_size * peers.capacity) * sizeof(uint64_t);
    // Not from the allocator of tensors: what is mapped elsewhere is a whole allocation.
    if (const cudaError_t e = cudaMalloc(&mailbox, bytes); e != cudaSuccess) return describe(e);
    if (const cudaError_t e = cudaMemset(mailbox, 0, bytes); e != cudaSuccess) return describe(e);
    if (const cudaError_t e = cudaDeviceSynchronize(); e != cudaSuccess) return describe(e);
    if (const cudaError_t e = cudaIpcGetMemHandle(&offer.handle, mailbox); e != cudaSuccess)
      return "cannot share GPU memory with other processes: " + describe(e);
    if (const cudaError_t e =
            cudaDeviceGetPCIBusId(offer.bus.data(), offer.bus.size(), device.index());
        e != cudaSuccess)
      return describe(e);
    const auto ints = at::TensorOptions(device).dtype(at::kInt);
    rounds = at::zeros({cuda::kPeerCounters}, ints);
    failed = at::zeros({1}, ints);
    partial = at::zeros({kMaxStepRows * kMaxDim}, ints.dtype(at::kFloat));
    peers.mailbox[rank] = static_cast<uint64_t*>(mailbox);
    peers.rounds = reinterpret_cast<uint32_t*>(rounds.mutable_data_ptr<int32_t>());
    peers.failed = reinterpret_cast<uint32_t*>(failed.mutable_data_ptr<int32_t>());
    return "";
  }

  /// Maps the mailbox of rank `peer`; "" or what went wrong.
  std::string map(int peer, const Offer& offer, const Offer& own) {
    const std::string name =
        "GPU " + std::string(offer.bus.data()) + " of rank " + std::to_string(peer);
    if (offer.boot != own.boot) return "rank " + std::to_string(peer) + " is on another host";
    int index = -1;
    if (cudaDeviceGetByPCIBusId(&index, offer.bus.data()) != cudaSuccess) {
      cudaGetLastError();
      return "the " + name + " is not visible to it; let every rank see all GPUs";
    }
    int can = 0;
    if (const cudaError_t e = cudaDeviceCanAccessPeer(&can, device.index(), index);
        e != cudaSuccess)
      return describe(e);
    if (can == 0) return "its GPU cannot access the memory of the " + name;
    void* memory = nullptr;
    if (const cudaError_t e =
            cudaIpcOpenMemHandle(&memory, offer.handle, cudaIpcMemLazyEnablePeerAccess);
        e != cudaSuccess)
      return "cannot map the memory of the " + name + ": " + describe(e);
    peers.mailbox[peer] = static_cast<uint64_t*>(memory);
    return "";
  }

  /// Posts this rank's problem ("" is none) and returns the first that any rank has.
  std::string agree(const std::string& step, const std::string& problem) {
    Offer offer;
    set_text(offer.problem, problem);
    for (const Offer& of : exchange(step, offer)) {
      if (of.problem[0] != '\0') return of.problem.data();
    }
    return "";
  }

  std::vector<Offer> exchange(const std::string& step, const Offer& own) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&own);
    store.set(key(step, rank), std::vector<uint8_t>(bytes, bytes + sizeof(own)));
    std::vector<Offer> offers(static_cast<size_t>(world_size));
    for (int r = 0; r < world_size; ++r) {
      const std::vector<uint8_t> theirs = store.get(key(step, r));
      TORCH_CHECK(theirs.size() == sizeof(Offer), "rank ", r, " runs another version");
      std::memcpy(&offers[static_cast<size_t>(r)], theirs.data(), sizeof(Offer));
    }
    return offers;
  }

  cuda::Launch launch() const {
    return {.stream = c10::cuda::getCurrentCUDAStream(device.index()),
            .pdl = ops::cuda::overlap_kernels(device),
            .clusters = false};
  }

  void add_partials(const Tensor& from, const Tensor& x) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cuda::all_reduce(launch(), peers, from.mutable_data_ptr<float>(),
                                    static_cast<int>(x.numel()), x.mutable_data_ptr<float>()));
  }

  /// Sums of several sizes, several times each, against `all_reduce`; "" or what was wrong.
  std::string self_test(const AllReduce& all_reduce) {
    peers.limit_ns = kSelfTestNs;
    const auto floats = at::TensorOptions(device).dtype(at::kFloat);
    std::string problem;
    for (const int64_t size : {int64_t{2}, int64_t{4096}, kMaxStepRows * kMaxDim}) {
      for (int round = 0; round < 4; ++round) {
        const Tensor mine = (at::arange(size, floats) * (rank + 1) + round).sin();
        Tensor sum = mine.clone(), x = at::zeros_like(mine);
        all_reduce(sum);
        const Tensor part = partial.narrow(0, 0, size);
        part.copy_(mine);
        add_partials(part, x);
        const auto error = (x - sum).abs().max().item<double>();
        if (problem.empty() && !(error < kSelfTestError))
          problem = c10::str("a test sum of ", size, " numbers was wrong by ", error);
      }
    }
    peers.limit_ns = 0;
    if (failed.item<int32_t>() != 0) problem = "what a peer wrote did not arrive within 10 s";
    return problem;
  }

  c10d::Store& store;
  int rank, world_size;
  at::Device device;
  void* mailbox = nullptr;
  cuda::Peers peers;
  Tensor rounds, failed, partial;
};

OneShot::OneShot(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OneShot::~OneShot() = default;

std::unique_ptr<OneShot> OneShot::connect(c10d::Store& store, int rank, int world_size,
                                          at::Device device, const AllReduce& all_reduce,
                                          std::string& why_not) {
  if (world_size > cuda::kMaxPeers) {
    why_not = c10::str("it takes up to ", cuda::kMaxPeers, " ranks, not ", world_size);
    return nullptr;
  }
  const c10::cuda::CUDAGuard guard(device);
  auto impl = std::make_unique<Impl>(store, rank, world_size, device);
  const auto named = [&](const std::string& problem) {
    return problem.empty() ? "" : c10::str("rank ", rank, ": ", problem);
  };
  Offer own;
  set_text(own.boot, boot_id());
  const std::string allocated = impl->allocate(own);
  set_text(own.problem, named(allocated));
  const std::vector<Offer> offers = impl->exchange("offer", own);
  for (const Offer& offer : offers) {
    if (why_not.empty()) why_not = offer.problem.data();
  }
  if (!why_not.empty()) return nullptr;

  std::string problem;
  for (int peer = 0; peer < world_size && problem.empty(); ++peer) {
    if (peer != rank) problem = impl->map(peer, offers[static_cast<size_t>(peer)], own);
  }
  why_not = impl->agree("mapped", named(problem));
  if (!why_not.empty()) return nullptr;
  why_not = impl->agree("tested", named(impl->self_test(all_reduce)));
  if (!why_not.empty()) return nullptr;
  return std::unique_ptr<OneShot>(new OneShot(std::move(impl)));
}

bool OneShot::takes(const Tensor& x) const {
  return x.device() == impl_->device && x.scalar_type() == at::kFloat && x.is_contiguous() &&
         x.numel() % 2 == 0 && x.numel() <= impl_->partial.numel();
}

Tensor OneShot::partial_for(const Tensor& x) {
  return impl_->partial.narrow(0, 0, x.numel()).view(x.sizes());
}

void OneShot::add_partials(Tensor& partial, Tensor& x) {
  impl_->add_partials(partial, x);
}

void OneShot::add_product(int64_t rows, const Tensor& in, const LinearImpl& w, Tensor& x) {
  ops::cuda::add_product(rows, in, w, impl_->peers, x);
}

bool OneShot::takes_shards(int64_t head_rows) const {
  return kMaxStepRows * head_rows <= impl_->peers.capacity;
}

void OneShot::sample(const StepRows& rows, const Tensor& shard, const SamplingParams& params,
                     Tensor& logits, Tensor& next) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  const auto batch = static_cast<int>(rows.pos.numel());
  const cuda::GatherArgs gather{.shard = shard.const_data_ptr<float>(),
                                .width = static_cast<int>(shard.size(1)),
                                .logits = logits.mutable_data_ptr<float>(),
                                .vocab = static_cast<int>(logits.size(1)),
                                .batch = batch,
                                .seq_len = static_cast<int>(rows.seq_len())};
  C10_CUDA_CHECK(cuda::gather_logits(impl_->launch(), impl_->peers, gather));
  if (impl_->rank == 0) ops::sample(rows, logits, params, next);
  C10_CUDA_CHECK(cuda::broadcast_tokens(impl_->launch(), impl_->peers,
                                        next.mutable_data_ptr<int32_t>(), batch));
}

void OneShot::close(const std::function<void(const std::string&)>& meet) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  for (int peer = 0; peer < impl_->world_size; ++peer) {
    if (peer != impl_->rank) C10_CUDA_CHECK(cudaIpcCloseMemHandle(impl_->peers.mailbox[peer]));
  }
  meet("one_shot_closed");  // memory that others have mapped must not be freed
  C10_CUDA_CHECK(cudaFree(impl_->mailbox));
}

}  // namespace gptfast
