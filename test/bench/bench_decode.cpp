// bench_decode: how close decoding comes to the memory's read bandwidth. Random weights of any
// known model, or a checkpoint. With --tensor_parallel the model is divided, and bytes, bandwidth
// and plain read are those of rank 0.
//
// Each of kRounds rounds times a plain-read loop with the same threads and then one generate(), so
// that both meet the same neighbours; the medians are printed.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <sstream>

#include "common.h"
#include "gptfast/generate.h"
#include "gptfast/speculative.h"
#include "gptfast/threads.h"
#include "gptfast/tp.h"
#include "ops/cpu/thread_pool.h"
#include "ranks.h"
#ifdef GPTFAST_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "bench/bench_speculation.h"
#include "bench/cuda_read.h"
#endif

namespace gptfast::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;
constexpr int64_t kReadBytes = int64_t{512} << 20;  // far beyond any cache
constexpr int64_t kReadPiece = int64_t{1} << 20;
constexpr int64_t kReadAhead = 8192;  // as the kernels do
constexpr int kReadPasses = 5;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The p-quantile of values, 0 <= p <= 1.
double quantile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(p * static_cast<double>(values.size() - 1)))];
}

double median(const std::vector<double>& values) {
  return quantile(values, 0.5);
}

using Words = uint64_t __attribute__((vector_size(64)));

/// Reads `bytes` (a multiple of 256) once, as widely as the CPU can, asking for memory `ahead`
/// bytes before it is read, or leaving that to the hardware if that is 0.
#if defined(__x86_64__)
__attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#endif
uint64_t
read_all(const std::byte* data, int64_t bytes, int64_t ahead) {
  Words sums[4] = {};
  for (int64_t i = 0; i < bytes; i += sizeof(sums)) {
    for (int64_t j = 0; j < 4; ++j) {
      const std::byte* line = data + i + j * static_cast<int64_t>(sizeof(Words));
      if (ahead > 0) __builtin_prefetch(line + ahead);
      sums[j] += *reinterpret_cast<const Words*>(line);
    }
  }
  return ((sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]))[0];
}

/// The denominator: what the pool's threads, or the GPU, reach when they do nothing but read, the
/// threads in the better of two ways.
class PlainRead {
 public:
  explicit PlainRead(at::Device device) : device_(device) {
    if (device_.is_cuda()) return;
    void* memory = mmap(nullptr, kReadBytes + kReadAhead, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "cannot allocate ", kReadBytes >> 20,
                " MiB for the plain-read loop");
    madvise(memory, kReadBytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
    std::fill_n(data_, kReadBytes, std::byte{1});
  }
  ~PlainRead() {
    if (data_ != nullptr) munmap(data_, kReadBytes + kReadAhead);
  }
  PlainRead(const PlainRead&) = delete;
  PlainRead& operator=(const PlainRead&) = delete;

  /// Bytes per second.
  double measure() {
#ifdef GPTFAST_CUDA
    if (device_.is_cuda()) {  // alone on its memory: once is enough
      const c10::DeviceGuard guard(device_);
      if (cuda_bandwidth_ == 0) cuda_bandwidth_ = cuda_read_bandwidth();
      return cuda_bandwidth_;
    }
#endif
    std::vector<double> plain, prefetched;
    for (int pass = 0; pass < kReadPasses; ++pass) {
      plain.push_back(read_once(/*ahead=*/0));
      prefetched.push_back(read_once(kReadAhead));
    }
    return std::max(median(plain), median(prefetched));
  }

 private:
  double read_once(int64_t ahead) {
    cpu::ThreadPool& pool = cpu::ThreadPool::get();
    const auto start = Clock::now();
    pool.run([&](int thread) noexcept {
      uint64_t sum = 0;
      for (cpu::Range range{}; pool.next(thread, kReadBytes, kReadPiece, range);)
        sum += read_all(data_ + range.begin, range.end - range.begin, ahead);
      checksum_ = sum;
    });
    return static_cast<double>(kReadBytes) / seconds_since(start);
  }

  at::Device device_;
  std::byte* data_ = nullptr;
  [[maybe_unused]] double cuda_bandwidth_ = 0;  // unused without CUDA
  std::atomic<uint64_t> checksum_{0};           // keeps the reads
};

/// The sum over the layers that a token goes through: of a mixture's experts as many as it
/// activates.
template <typename Measure>
int64_t for_a_token(const TransformerImpl& model, Measure measure) {
  int64_t total = 0;
  int64_t experts = 0;
  for (const auto& [name, linear] : named_linears(model)) {
    (name.find(".cond_ffn.") == std::string::npos ? total : experts) += measure(*linear);
  }
  if (experts == 0) return total;
  return total + experts / model.config.num_experts * model.config.num_activated_experts;
}

/// Bytes of weights that the kernels read for a token: without the padding and the tables of files.
int64_t streamed_bytes(const TransformerImpl& model) {
  return for_a_token(model, [](const LinearImpl& linear) { return linear.kernel_bytes(); });
}

/// flag: "scheme" or "draft_scheme".
WeightScheme scheme_of(const CommandLine& flags, const char* flag) {
  const std::string name = flags.get_text(flag);
  if (name == "int8") return {.format = WeightFormat::kInt8};
  if (name == "int4")
    return {.format = WeightFormat::kInt4, .groupsize = flags.get_integer("groupsize")};
  return {.format = WeightFormat::kBFloat16};
}

CommandLine command_line() {
  CommandLine flags("bench_decode", "Decoding speed against the memory's read bandwidth.");
  flags.text("config", "name of a known model", "TinyLlama-1.1B");
  flags.choice("scheme", "weights", "bf16", {"bf16", "int8", "int4"});
  flags.integer("groupsize", "columns that share a scale; int4 only: 32, 64, 128 or 256", 32, 32,
                256);
  flags.text("checkpoint_path", "measure this file instead of random weights");
  flags.text("device", "cpu, cuda or cuda:N", "cpu");
  flags.integer("prompt_tokens", "length of the prompt", 5, 1, INT32_MAX);
  flags.integer("new_tokens", "tokens to generate", 200, 2, INT32_MAX);
  flags.integer("batch_size", "rows", 1, 1, kMaxStepRows);
  flags.text("draft_config", "measure speculation too, on CUDA: known model that drafts");
  flags.choice("draft", "lookup: measure the verification of lookup's drafts", "", {"lookup"});
  flags.choice("draft_scheme", "the draft's weights", "bf16", {"bf16", "int8", "int4"});
  flags.integer("speculate_k", "drafted tokens of a round", 4, 1, kMaxSpeculateK);
  flags.text("mean_accepted", "drafts a round is made to accept on average: numbers and commas",
             "1.9,2.3,3");
  flags.integer("num_threads", "0: the physical cores this process may use", 0, 0, kMaxThreads);
  declare_rank_flags(flags);
  flags.flag("json", "one JSON object on stdout");
  return flags;
}

#ifdef GPTFAST_CUDA
int64_t weights(const LinearImpl& linear) {
  return linear.out_features * linear.in_features;
}

/// Multiplications and additions of a prompt's products with weights. Attention's are not counted;
/// the head is computed for the last token only.
int64_t prompt_operations(const TransformerImpl& model, int64_t tokens) {
  const int64_t head = weights(*model.output);
  return 2 * ((for_a_token(model, weights) - head) * tokens + head);
}

/// Multiplications and additions a second of a large product of random bfloat16 matrices.
double cuda_matmul_rate(at::Device device) {
  constexpr int64_t kSize = 8192;
  constexpr int kProducts = 30;
  const at::Tensor a = at::randn({kSize, kSize}, at::TensorOptions(device).dtype(at::kBFloat16));
  const at::Tensor b = at::randn_like(a);
  at::Tensor product = at::mm(a, b);
  const c10::DeviceGuard guard(device);
  c10::cuda::device_synchronize();
  const auto start = Clock::now();
  for (int i = 0; i < kProducts; ++i) at::mm_out(product, a, b);
  c10::cuda::device_synchronize();
  return 2.0 * kSize * kSize * kSize * kProducts / seconds_since(start);
}

/// The most that tensors took on the device since the last reset.
int64_t peak_bytes(at::Device device) {
  constexpr size_t kAll = 0;  // of StatType: not the pools one by one
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
}

/// What a GPU takes for the prompt beside decoding's figures.
void add_prompt_figures(nlohmann::ordered_json& out, const TransformerImpl& model) {
  out["peak_device_bytes"] = peak_bytes(model.device());
  const auto tokens = out["prompt_tokens"].get<int64_t>();
  if (tokens <= kMaxStepRows) return;
  const double rate = out["prefill_tokens_per_sec"].get<double>() / static_cast<double>(tokens) *
                      static_cast<double>(prompt_operations(model, tokens));
  const double matmul = cuda_matmul_rate(model.device());
  out["prefill_tflops"] = rate / 1e12;
  out["matmul_tflops"] = matmul / 1e12;
  out["prefill_share_of_matmul"] = rate / matmul;
}
#endif

Transformer make_model(const CommandLine& flags, at::Device device,
                       const std::shared_ptr<TensorParallel>& tp) {
  if (flags.given("checkpoint_path")) {
    return load_model(flags.get_text("checkpoint_path"),
                      {.config = flags.given("config") ? flags.get_text("config") : "",
                       .precision = at::kBFloat16,
                       .device = device,
                       .reference = false,
                       .tp = tp,
                       .progress = {}});
  }
  const int64_t groupsize = flags.get_integer("groupsize");
  if (groupsize != 32 && groupsize != 64 && groupsize != 128 && groupsize != 256) {
    throw UsageError("--groupsize is " + std::to_string(groupsize) +
                     ", expected 32, 64, 128 or 256");
  }
  return random_model(ModelArgs::from_name(flags.get_text("config")), scheme_of(flags, "scheme"),
                      at::kBFloat16, device, /*seed=*/1, tp);
}

std::vector<double> means_of(const CommandLine& flags) {
  std::vector<double> means;
  std::istringstream list(flags.get_text("mean_accepted"));
  for (std::string word; std::getline(list, word, ',');) {
    size_t used = 0;
    double mean = -1;
    try {
      mean = std::stod(word, &used);
    } catch (const std::exception&) {
    }
    if (used != word.size() || !(mean >= 0 && mean <= flags.get_integer("speculate_k"))) {
      throw UsageError("--mean_accepted has '" + word +
                       "', expected numbers from 0 to --speculate_k");
    }
    means.push_back(mean);
  }
  return means;
}

#ifdef GPTFAST_CUDA
nlohmann::ordered_json run_speculation(Transformer& model, const CommandLine& flags,
                                       const std::vector<double>& means,
                                       double plain_tokens_per_sec) {
  Transformer draft{nullptr};
  if (flags.given("draft_config")) {
    draft = random_model(ModelArgs::from_name(flags.get_text("draft_config")),
                         scheme_of(flags, "draft_scheme"), at::kBFloat16, model->device(),
                         /*seed=*/2);
    check_draft_model(*draft, *model, /*max_seq_length=*/0);
  }
  return measure_speculation(model, {.draft = draft ? &draft : nullptr,
                                     .k = flags.get_integer("speculate_k"),
                                     .mean_accepted = means,
                                     .prompt_tokens = flags.get_integer("prompt_tokens"),
                                     .new_tokens = flags.get_integer("new_tokens"),
                                     .plain_tokens_per_sec = plain_tokens_per_sec});
}
#endif

/// What the rounds gave.
struct Samples {
  std::vector<double> read;            // bytes per second
  std::vector<double> tokens_per_sec;  // prefill included
  std::vector<double> decode_tokens_per_sec;
  std::vector<double> prefill_seconds;
  std::vector<double> share;  // of the read bandwidth of the same round
  std::vector<double>
      overhead_us;  // each token's time less that of reading the weights in the same round
};

void measure_round(Transformer& model, const CommandLine& flags, PlainRead& read, int64_t bytes,
                   Samples& samples) {
  std::vector<int32_t> prompt(flags.get_integer("prompt_tokens"));
  std::iota(prompt.begin(), prompt.end(), 1);
  std::vector<Clock::time_point> times;
  const GenerateOptions options{.max_new_tokens = flags.get_integer("new_tokens"),
                                .batch_size = flags.get_integer("batch_size"),
                                .sampling = {},
                                .stop_tokens = {},
                                .callback = [&](int64_t row, int32_t /*token*/) {
                                  if (row == 0) times.push_back(Clock::now());
                                  return true;
                                }};
  const double before = read.measure();
  const GenerateResult result = generate(model, prompt, options);
  const double bandwidth = (before + read.measure()) / 2;
  const double steps = result.decode_tokens_per_sec() / static_cast<double>(options.batch_size);
  samples.read.push_back(bandwidth);
  samples.tokens_per_sec.push_back(result.tokens_per_sec());
  samples.decode_tokens_per_sec.push_back(result.decode_tokens_per_sec());
  samples.prefill_seconds.push_back(result.prefill_seconds);
  samples.share.push_back(steps * static_cast<double>(bytes) / bandwidth);
  for (size_t i = 1; i < times.size(); ++i) {
    const double seconds = std::chrono::duration<double>(times[i] - times[i - 1]).count();
    samples.overhead_us.push_back(1e6 * (seconds - static_cast<double>(bytes) / bandwidth));
  }
}

nlohmann::ordered_json report(const CommandLine& flags, const TransformerImpl& model, int64_t bytes,
                              const Samples& samples) {
  const double decode = median(samples.decode_tokens_per_sec);
  nlohmann::ordered_json out;
  out["model"] =
      flags.given("checkpoint_path") ? flags.get_text("checkpoint_path") : flags.get_text("config");
  out["scheme"] = to_string(model.layers[0]->attention->wqkv->scheme.format);
  if (const int64_t groupsize = model.layers[0]->attention->wqkv->scheme.groupsize)
    out["groupsize"] = groupsize;
  out["path"] = ops::path(model.device(), model.dtype());
  out["num_threads"] = num_threads();
  if (const TensorParallel* tp = model.tp()) {
    out["tensor_parallel"] = tp->world_size();
    out["all_reduce"] = tp->all_reduce_path();
  }
  out["prompt_tokens"] = flags.get_integer("prompt_tokens");
  out["new_tokens"] = flags.get_integer("new_tokens");
  out["batch_size"] = flags.get_integer("batch_size");
  out["tokens_per_sec"] = median(samples.tokens_per_sec);
  out["decode_tokens_per_sec"] = decode;
  out["prefill_tokens_per_sec"] =
      static_cast<double>(flags.get_integer("prompt_tokens")) / median(samples.prefill_seconds);
  out["streamed_bytes"] = bytes;
  out["bandwidth_gb_s"] = decode / static_cast<double>(flags.get_integer("batch_size")) *
                          static_cast<double>(bytes) / 1e9;
  out["read_gb_s"] = median(samples.read) / 1e9;
  out["share_of_read"] = median(samples.share);
  out["overhead_us"] = {{"p10", quantile(samples.overhead_us, 0.1)},
                        {"p50", quantile(samples.overhead_us, 0.5)},
                        {"p90", quantile(samples.overhead_us, 0.9)},
                        {"p99", quantile(samples.overhead_us, 0.99)}};
  return out;
}

void print(const nlohmann::ordered_json& out) {
  const auto number = [&](const char* key) { return out[key].get<double>(); };
  printf("%s %s, %s, %d threads, %d + %d tokens, batch %d", out["model"].get<std::string>().c_str(),
         out["scheme"].get<std::string>().c_str(), out["path"].get<std::string>().c_str(),
         out["num_threads"].get<int>(), out["prompt_tokens"].get<int>(),
         out["new_tokens"].get<int>(), out["batch_size"].get<int>());
  if (out.contains("tensor_parallel"))
    printf(", %d ranks, %s", out["tensor_parallel"].get<int>(),
           out["all_reduce"].get<std::string>().c_str());
  printf("\n");
  printf("  %.2f tokens/s, decode only %.2f tokens/s, prefill %.1f tokens/s\n",
         number("tokens_per_sec"), number("decode_tokens_per_sec"),
         number("prefill_tokens_per_sec"));
  printf("  %.2f GB/s of weights, plain read %.2f GB/s: %.1f %%\n", number("bandwidth_gb_s"),
         number("read_gb_s"), 100 * number("share_of_read"));
  if (out.contains("load_gb_s"))
    printf("  loaded in %.2f s, %.2f GB/s\n", number("load_seconds"), number("load_gb_s"));
  if (out.contains("prefill_tflops"))
    printf("  prefill %.0f TFLOP/s, large bfloat16 product %.0f TFLOP/s: %.1f %%\n",
           number("prefill_tflops"), number("matmul_tflops"),
           100 * number("prefill_share_of_matmul"));
  if (out.contains("peak_device_bytes"))
    printf("  device memory at most %.2f GB\n", number("peak_device_bytes") / 1e9);
  printf("  outside weight streaming, us per token: p10 %.0f, median %.0f, p90 %.0f, p99 %.0f\n",
         out["overhead_us"]["p10"].get<double>(), out["overhead_us"]["p50"].get<double>(),
         out["overhead_us"]["p90"].get<double>(), out["overhead_us"]["p99"].get<double>());
#ifdef GPTFAST_CUDA
  if (out.contains("speculation")) print_speculation(out["speculation"]);
#endif
}

int bench_decode(int argc, char** argv) {
  CommandLine flags = command_line();
  if (!flags.parse(argc, argv)) return 0;
  if (const auto status = launch_ranks(flags, argv)) return *status;
  const auto tp = connect_ranks(flags);
  const c10::InferenceMode guard;
  const auto threads = static_cast<int>(flags.get_integer("num_threads"));
  const int ranks = tp ? tp->local_world_size() : 1;  // they share the host's cores
  set_num_threads(threads == 0 ? std::max(default_num_threads() / ranks, 1) : threads);
  const at::Device device = tp ? tp->device() : parse_device(flags.get_text("device"));
  const bool speculation = flags.given("draft") || flags.given("draft_config");
  if (speculation && (tp || !device.is_cuda() || flags.get_integer("batch_size") != 1))
    throw UsageError("speculation is measured with --device cuda, --batch_size 1 and one rank");
  const auto means = flags.given("draft_config") ? means_of(flags) : std::vector<double>();
  PlainRead read(device);
  read.measure();  // before the model takes the memory
  const auto start = Clock::now();
  Transformer model = make_model(flags, device, tp);
  const double load_seconds = seconds_since(start);
  const int64_t bytes = streamed_bytes(*model);
  Samples samples;
  for (int round = 0; round < kRounds; ++round) measure_round(model, flags, read, bytes, samples);
  nlohmann::ordered_json out = report(flags, *model, bytes, samples);
  if (flags.given("checkpoint_path")) {
    const auto size = std::filesystem::file_size(flags.get_text("checkpoint_path"));
    out["load_seconds"] = load_seconds;
    out["load_gb_s"] = static_cast<double>(size) / load_seconds / 1e9;
  }
#ifdef GPTFAST_CUDA
  if (device.is_cuda()) add_prompt_figures(out, *model);
  if (speculation) {
    out["speculation"] =
        run_speculation(model, flags, means, out["decode_tokens_per_sec"].get<double>());
  }
#endif
  if (flags.get_flag("json")) {
    std::cout << out.dump() << std::endl;
  } else {
    print(out);
  }
  model = nullptr;
  if (tp) tp->finish();
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("bench_decode", [&] { return gptfast::app::bench_decode(argc, argv); });
}
