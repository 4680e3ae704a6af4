#include "gptfast/tp.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#ifdef GPTFAST_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#ifdef GPTFAST_CUDA
#include "ops/cuda/step_ops.h"
#include "tp_one_shot.h"
#endif
#include "tp_socket.h"
#include "tp_watch.h"

namespace gptfast {
namespace {

using Clock = std::chrono::steady_clock;
using Backend = c10::intrusive_ptr<c10d::Backend>;

constexpr auto kMeet = std::chrono::seconds(300);  // ranks of other hosts may be started by hand
/// Collectives may wait for as long as rank 0 waits for its user: PeerWatch tells a loss from that.
constexpr auto kForever = std::chrono::hours(24 * 365);

std::optional<int> number_in_environment(const char* name, int low, int high) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  TORCH_CHECK(end != text && *end == '\0' && value >= low && value <= high, "the environment has ",
              name, "='", text, "', expected a number from ", low, " to ", high);
  return static_cast<int>(value);
}

std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string first_line(const std::exception& e) {
  const std::string text = e.what();
  return text.substr(0, text.find('\n'));
}

c10::intrusive_ptr<c10d::Store> open_store(const RankInfo& info, Clock::time_point deadline) {
  const bool serves = info.rank == 0 && !info.agent_store;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(info.master_port);
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = kMeet;
  if (serves) {
    // The store takes the socket over, and says less clearly than we do when it cannot have one.
    options.masterListenFd =
        info.listen_fd ? *info.listen_fd : listen_on(info.master_port).release();
  } else {
    connect_to(info.master_addr, info.master_port, deadline);  // waits until rank 0 is there
  }
  const auto store = c10::make_intrusive<c10d::TCPStore>(info.master_addr, options);
  return c10::make_intrusive<c10d::PrefixStore>("gptfast/" + info.run, store);
}

Backend make_backend(const RankInfo& info, at::Device device, const std::string& address,
                     const c10::intrusive_ptr<c10d::Store>& store) {
#ifdef GPTFAST_CUDA
  if (device.is_cuda()) {
    c10::cuda::set_device(device.index());
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = kForever;
    auto group =
        c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>("nccl",
                                                                                           store),
                                                    info.rank, info.world_size, options);
    group->eagerConnectSingleDevice(device);  // no lazy set-up inside a capture
    return group;
  }
#endif
  TORCH_CHECK(device.is_cpu(), "tensor parallelism runs on the CPU or on CUDA, not on ", device);
  auto options = c10d::ProcessGroupGloo::Options::create(kForever);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  options->threads = 1;  // collectives come one at a time
  return c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("gloo",
                                                                                            store),
                                                     info.rank, info.world_size, options);
}

/// FNV-1a, 64 bits, as 16 hexadecimal digits: the same on every host.
std::string hash_text(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016lx", static_cast<unsigned long>(hash));
  return text.data();
}

/// What ENABLE_INTRA_NODE_COMM asks for; nullopt: what works.
std::optional<bool> forced_one_shot() {
  const auto forced = number_in_environment("ENABLE_INTRA_NODE_COMM", 0, 1);
  return forced ? std::make_optional(*forced == 1) : std::nullopt;
}

/// What NCCL and c10d read from the environment. Call it before there are other threads.
void set_environment() {
  // NVLink multicast: not every machine's driver survives it, and a step's sums are too small to
  // gain from it.
  setenv("NCCL_NVLS_ENABLE", "0", /*replace=*/1);
  setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", /*replace=*/1);
  unsetenv("ENABLE_INTRA_NODE_COMM");  // c10d has such a path of its own
  // PeerWatch ends the process when a rank is lost. c10d's own watch would end it with a stack
  // trace, and asks a store that rank 0 may have closed.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*replace=*/1);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*replace=*/1);
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*replace=*/1);
}

/// The `count` largest of `values` [size], largest first and of equals the lowest index: pairs of a
/// value's bits and its index.
void largest(const float* values, int64_t size, int64_t count, int32_t first_index, int32_t* bits,
             int32_t* indices) {
  std::vector<int32_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const bool nan_a = values[a] != values[a], nan_b = values[b] != values[b];
    if (nan_a != nan_b) return nan_a;  // NaN must reach the sampler, which reports it
    return values[a] > values[b] || ((values[a] == values[b] || nan_a) && a < b);
  };
  std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), before);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t at = order[static_cast<size_t>(i)];
    std::memcpy(bits + i, values + at, sizeof(float));
    indices[i] = first_index + at;
  }
}

}  // namespace

std::string checkpoint_fingerprint(const std::filesystem::path& file) {
  constexpr std::streamoff kEnd = 1 << 20;
  std::ifstream in(file, std::ios::binary);
  in.seekg(0, std::ios::end);
  const std::streamoff size = in.tellg();
  TORCH_CHECK(in, "cannot read '", file.string(), "'");
  std::string ends;
  for (const std::streamoff from : {std::streamoff{0}, std::max(size - kEnd, std::streamoff{0})}) {
    std::string part(static_cast<size_t>(std::min(kEnd, size)), '\0');
    in.seekg(from);
    in.read(part.data(), static_cast<std::streamsize>(part.size()));
    TORCH_CHECK(in, "cannot read '", file.string(), "'");
    ends += part;
  }
  return std::to_string(size) + " bytes, " + hash_text(ends);
}

std::optional<RankInfo> rank_from_environment() {
  constexpr int kMaxRanks = 1 << 16;
  RankInfo info;
  info.world_size = number_in_environment("WORLD_SIZE", 1, kMaxRanks).value_or(1);
  if (info.world_size == 1) return std::nullopt;
  const auto rank = number_in_environment("RANK", 0, info.world_size - 1);
  TORCH_CHECK(rank, "the environment has WORLD_SIZE=", info.world_size,
              " but no RANK; set both, or start the ranks with torchrun or --tensor_parallel");
  info.rank = *rank;
  info.local_world_size =
      number_in_environment("LOCAL_WORLD_SIZE", 1, info.world_size).value_or(info.world_size);
  info.local_rank = number_in_environment("LOCAL_RANK", 0, info.local_world_size - 1)
                        .value_or(info.rank % info.local_world_size);
  if (const char* host = std::getenv("MASTER_ADDR")) info.master_addr = host;
  info.master_port = number_in_environment("MASTER_PORT", 1, 65535).value_or(info.master_port);
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  info.agent_store = agent != nullptr && std::string(agent) == "True";
  if (const char* restart = std::getenv("TORCHELASTIC_RESTART_COUNT")) info.run = restart;
  info.listen_fd = number_in_environment("GPTFAST_LISTEN_FD", 0, 1 << 20);
  return info;
}

at::Device device_of_rank(const RankInfo& info, at::Device requested) {
  if (!requested.is_cuda()) return requested;
  const auto gpus = static_cast<int>(at::getNumGPUs());
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  TORCH_CHECK(info.local_rank < gpus, "rank ", info.rank, " is number ", info.local_rank + 1,
              " on its host, which shows ", gpus, " GPUs",
              visible != nullptr ? " (CUDA_VISIBLE_DEVICES=" + std::string(visible) + ")" : "",
              "; start at most one rank per GPU");
  return {at::kCUDA, static_cast<at::DeviceIndex>(info.local_rank)};
}

struct TensorParallel::Impl {
  RankInfo info;
  at::Device device = at::kCPU;
  c10::intrusive_ptr<c10d::Store> store;
  std::unique_ptr<PeerWatch> watch;
  Backend backend;
  bool finished = false;
#ifdef GPTFAST_CUDA
  std::unique_ptr<OneShot> one_shot;
#endif

  std::string key(const std::string& what, int rank) const {
    return what + '/' + std::to_string(rank);
  }
  /// Waits until every rank has called it with the same name.
  void meet(const std::string& name) {
    store->set(key(name, info.rank), to_bytes("here"));
    for (int rank = 0; rank < info.world_size; ++rank) store->wait({key(name, rank)}, kMeet);
  }
  /// Runs one collective. When it fails a rank was lost, which the watch can say better.
  template <typename Start>
  void collective(Start start) {
    try {
      if (const auto work = start()) work->wait();  // NCCL without asyncOp gives none
    } catch (const std::exception& e) {
      watch->wait_for_loss();
      TORCH_CHECK(false, "the connection between the ranks broke: ", first_line(e));
    }
  }
  /// The tensors of all ranks, one after the other, in one dimension.
  Tensor all_gather(const Tensor& mine) {
    Tensor all = at::empty({info.world_size * mine.numel()}, mine.options());
    all_gather_into(all, mine);
    return all;
  }
  void all_gather_into(Tensor& all, const Tensor& mine) {
    Tensor flat = mine.flatten();
    c10d::AllgatherOptions options;
    options.asyncOp = false;  // on the current stream
    collective([&] { return backend->_allgather_base(all, flat, options); });
  }
};

TensorParallel::TensorParallel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TensorParallel::~TensorParallel() {
#ifdef GPTFAST_CUDA
  // What the group's own destructor does, too, but with a warning beside the error that led here.
  if (!impl_->finished && impl_->device.is_cuda() && impl_->backend) impl_->backend->abort();
#endif
}

int TensorParallel::rank() const {
  return impl_->info.rank;
}
int TensorParallel::world_size() const {
  return impl_->info.world_size;
}
int TensorParallel::local_world_size() const {
  return impl_->info.local_world_size;
}
at::Device TensorParallel::device() const {
  return impl_->device;
}

std::shared_ptr<TensorParallel> TensorParallel::connect(const RankInfo& info, at::Device device,
                                                        PeerLostHandler on_peer_lost) {
  const std::optional<bool> forced = forced_one_shot();
  set_environment();
  const auto deadline = Clock::now() + kMeet;
  auto impl = std::make_unique<Impl>();
  impl->info = info;
  impl->device = device;
  try {
    impl->store = open_store(info, deadline);
    const std::string address = local_address(info.master_addr);
    impl->watch = std::make_unique<PeerWatch>(*impl->store, info.rank, info.world_size, address,
                                              deadline, std::move(on_peer_lost));
    impl->backend = make_backend(info, device, address, impl->store);
  } catch (const c10::Error& e) {
    TORCH_CHECK(false, "rank ", info.rank, " of ", info.world_size,
                " cannot meet the others: ", e.what_without_backtrace());
  } catch (const std::exception& e) {
    TORCH_CHECK(false, "rank ", info.rank, " of ", info.world_size,
                " cannot meet the others: ", first_line(e));
  }
  const std::shared_ptr<TensorParallel> tp(new TensorParallel(std::move(impl)));
  tp->choose_all_reduce(forced);
  return tp;
}

void TensorParallel::choose_all_reduce(std::optional<bool> one_shot) {
  std::string why_not;
#ifdef GPTFAST_CUDA
  if (device().is_cuda() && one_shot.value_or(true)) {
    impl_->one_shot = OneShot::connect(
        *impl_->store, rank(), world_size(), device(),
        [this](Tensor x) { all_reduce(std::move(x)); }, why_not);
    if (impl_->one_shot) return;
  }
#endif
  if (!one_shot.value_or(false)) {
    if (!why_not.empty() && rank() == 0 && local_world_size() == world_size())
      std::fprintf(stderr, "Sums over the ranks go through NCCL: %s\n", why_not.c_str());
    return;
  }
  impl_->watch->finish();  // every rank leaves with this message, none because another did
  TORCH_CHECK(false,
              "ENABLE_INTRA_NODE_COMM=1 asks for the one-shot all-reduce, which is not possible "
              "here: ",
              why_not.empty() ? "it runs between GPUs only" : why_not, "; unset it for ",
              device().is_cuda() ? "NCCL" : "Gloo");
}

const char* TensorParallel::all_reduce_path() const {
#ifdef GPTFAST_CUDA
  if (impl_->one_shot) return "one-shot";
#endif
  return device().is_cuda() ? "nccl" : "gloo";
}

void TensorParallel::check_agreement(const Facts& facts) {
  Impl& self = *impl_;
  std::string mine;
  for (const auto& [name, value] : facts)
    mine.append(name).append(1, '\0').append(value).append(1, '\0');
  self.store->set(self.key("facts", rank()), to_bytes(mine));
  self.meet("facts_posted");
  std::string complaint;
  const auto facts_of = [&](int rank) {
    const auto bytes = self.store->get(self.key("facts", rank));
    return std::string(bytes.begin(), bytes.end());
  };
  const auto split = [](const std::string& bytes) {
    std::vector<std::string> words;
    for (auto at = bytes.begin(); at != bytes.end();) {
      const auto end = std::find(at, bytes.end(), '\0');
      words.emplace_back(at, end);
      at = end == bytes.end() ? end : end + 1;
    }
    return words;
  };
  const std::string text0 = facts_of(0);
  for (int rank = 1; rank < world_size() && complaint.empty(); ++rank) {
    const std::string text = facts_of(rank);
    if (text == text0) continue;
    const std::vector<std::string> first = split(text0), other = split(text);
    const auto differ = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    const auto same = static_cast<size_t>(differ.first - first.begin());
    const auto word = [](const std::vector<std::string>& words, size_t i) {
      return i < words.size() ? words[i] : std::string("nothing");
    };
    const size_t name = same - same % 2;
    complaint = c10::str("the ranks disagree on ", word(first, name), ": rank 0 has '",
                         word(first, name + 1), "', rank ", rank, " has '", word(other, name + 1),
                         "' (hashes of all settings ", hash_text(text0), " and ", hash_text(text),
                         "); start every rank with the same files and flags");
  }
  self.meet("facts_read");
  if (complaint.empty()) return;
  self.watch->finish();  // every rank leaves with this message, none because another did
  TORCH_CHECK(false, complaint);
}

void TensorParallel::finish() {
#ifdef GPTFAST_CUDA
  if (impl_->device.is_cuda()) c10::cuda::device_synchronize();
#endif
  impl_->meet("finish");
#ifdef GPTFAST_CUDA
  if (impl_->one_shot) impl_->one_shot->close([this](const auto& name) { impl_->meet(name); });
#endif
  impl_->watch->finish();
  impl_->backend->shutdown();
  impl_->finished = true;
}

void TensorParallel::all_reduce(Tensor x) {
  std::vector<Tensor> tensors = {std::move(x)};
  c10d::AllreduceOptions options;
  options.asyncOp = false;  // on the current stream
  impl_->collective([&] { return impl_->backend->allreduce(tensors, options); });
}

void TensorParallel::sum_into(Tensor x, const std::function<void(Tensor&)>& add_partial) {
#ifdef GPTFAST_CUDA
  if (impl_->one_shot && impl_->one_shot->takes(x)) {
    Tensor partial = impl_->one_shot->partial_for(x);
    add_partial(partial);
    impl_->one_shot->add_partials(partial, x);
    return;
  }
#endif
  if (rank() != 0) x.zero_();  // the residual counts once
  add_partial(x);
  all_reduce(x);
}

void TensorParallel::add_product(int64_t rows, const Tensor& in, const LinearImpl& w, Tensor& x) {
  const Tensor used = x.narrow(0, 0, rows);
#ifdef GPTFAST_CUDA
  if (impl_->one_shot && impl_->one_shot->takes(used) && ops::cuda::supports(w))
    return impl_->one_shot->add_product(rows, in, w, x);
#endif
  sum_into(used, [&](Tensor& partial) { ops::o_proj_residual(rows, in, w, partial); });
}

void TensorParallel::broadcast(Tensor x) {
  std::vector<Tensor> tensors = {std::move(x)};
  c10d::BroadcastOptions options;
  options.asyncOp = false;
  impl_->collective([&] { return impl_->backend->broadcast(tensors, options); });
}

std::vector<int32_t> TensorParallel::broadcast(const std::vector<int32_t>& values) {
  Tensor size = at::full({1}, static_cast<int64_t>(values.size()), at::kLong).to(impl_->device);
  broadcast(size);
  Tensor data = at::empty({size.item<int64_t>()}, at::kInt);
  if (rank() == 0) std::copy(values.begin(), values.end(), data.mutable_data_ptr<int32_t>());
  data = data.to(impl_->device);
  broadcast(data);
  data = data.cpu();
  return {data.const_data_ptr<int32_t>(), data.const_data_ptr<int32_t>() + data.numel()};
}

int64_t TensorParallel::head_rows(int64_t vocab_size) const {
  return (vocab_size + world_size() - 1) / world_size();
}

Tensor TensorParallel::gather_logits(const Tensor& shard, int64_t vocab_size) {
  const Tensor mine = shard.contiguous();
  const Tensor all = impl_->all_gather(mine);
  std::vector<int64_t> shape = mine.sizes().vec();
  const Tensor rows = all.view({world_size(), -1, mine.size(-1)}).transpose(0, 1);  // [M, N, V / N]
  shape.back() = vocab_size;
  return rows.flatten(/*start_dim=*/1).narrow(1, 0, vocab_size).reshape(shape);
}

namespace {

/// How many logits of one rank the sampler may have to see; 0: all of them.
int64_t candidates(const SamplingParams& params, int64_t batch_size) {
  const auto* temperature = params.temperature.const_data_ptr<float>();
  const auto* top_k = params.top_k.const_data_ptr<int32_t>();
  int64_t most = 1;
  for (int64_t b = 0; b < batch_size; ++b) {
    if (temperature[b] == 0) continue;
    if (top_k[b] <= 0) return 0;
    most = std::max<int64_t>(most, top_k[b]);
  }
  return most;
}

}  // namespace

void TensorParallel::sample(const StepRows& rows, const Tensor& shard, const SamplingParams& params,
                            Tensor& gathered, Tensor& logits, Tensor& next) {
  const int64_t B = rows.pos.numel(), width = shard.size(1);
#ifdef GPTFAST_CUDA
  if (impl_->one_shot && impl_->one_shot->takes_shards(width))
    return impl_->one_shot->sample(rows, shard, params, logits, next);
#endif
  const int64_t count = shard.is_cpu() ? candidates(params, B) : 0;
  // A candidate costs twice the bytes of a logit.
  if (count == 0 || 2 * count > width) {
    gather_rows(shard.narrow(0, 0, rows.rows()), gathered, logits);
  } else {
    gather_candidates(rows, shard, count, logits);
  }
  if (rank() == 0) ops::sample(rows, logits, params, next);
  broadcast(next.narrow(0, 0, B));
}

void TensorParallel::gather_rows(const Tensor& shard, Tensor& gathered, Tensor& logits) {
  const int64_t M = shard.size(0), V = logits.size(1), width = shard.size(1);
  Tensor all = gathered.flatten().narrow(0, 0, world_size() * M * width);
  impl_->all_gather_into(all, shard);
  if (rank() != 0) return;
  all = all.view({world_size(), M, width});
  for (int64_t r = 0; r * width < V; ++r) {
    const int64_t size = std::min(width, V - r * width);
    logits.narrow(0, 0, M).narrow(1, r * width, size).copy_(all[r].narrow(1, 0, size));
  }
}

void TensorParallel::gather_candidates(const StepRows& rows, const Tensor& shard, int64_t count,
                                       Tensor& logits) {
  const int64_t B = rows.pos.numel(), S = rows.seq_len(), V = logits.size(1), width = shard.size(1);
  const int64_t mine = std::clamp<int64_t>(V - rank() * width, 0, width);
  Tensor best = at::full({2, B, count}, -1, at::kInt);  // bits of the values, indices
  auto* bits = best.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < B && mine > 0; ++b) {
    largest(shard[b * S + S - 1].const_data_ptr<float>(), mine, std::min(count, mine),
            static_cast<int32_t>(rank() * width), bits + b * count, bits + (B + b) * count);
  }
  const Tensor all = impl_->all_gather(best);  // [N, 2, B, count]
  if (rank() != 0) return;
  const auto* gathered = all.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < B; ++b) {
    auto* row = logits[b * S + S - 1].mutable_data_ptr<float>();
    std::fill(row, row + V, -std::numeric_limits<float>::infinity());
    for (int64_t r = 0; r < world_size(); ++r) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = ((r * 2) * B + b) * count + i, index = gathered[at + B * count];
        if (index >= 0) std::memcpy(row + index, gathered + at, sizeof(float));
      }
    }
  }
}

}  // namespace gptfast
