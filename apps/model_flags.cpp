#include "model_flags.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <filesystem>

#include "gptfast/config.h"
#include "gptfast/threads.h"

namespace gptfast::app {
namespace {

constexpr int64_t kMaxThreads = 1024;

}  // namespace

void declare_model_flags(CommandLine& flags) {
  flags.text("checkpoint_path", "model.pth, model_int8.pth, model_int4.g32.pth, ...",
             "checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth");
  flags.text("tokenizer_path",
             "tokenizer.model or tokenizer.json; else the one beside the checkpoint");
  flags.text("config",
             "name of a known model or a JSON file; else config.json beside the checkpoint, else "
             "its folder's name");
  flags.choice("precision", "floating weights are cast to this", "bfloat16",
               {"bfloat16", "float16", "float32"});
  flags.choice("int4_layout", "how int4 codes lie in the file, where its contents do not tell",
               "auto", {"auto", "cuda", "cpu-avx512", "cpu-avx2", "cpu"});
  flags.text("device", "cpu, cuda or cuda:N", default_device());
  flags.flag("reference", "plain LibTorch instead of the fused kernels, to compare with");
  flags.integer("num_threads", "CPU threads; 0: the physical cores this process may use", 0, 0,
                kMaxThreads);
  flags.integer("seed", "of the random numbers", 1234, 0, INT64_MAX);
  flags.flag("json", "one JSON object a line on stdout and nothing else");
  flags.flag("quiet", "no progress and no messages");
}

std::unique_ptr<Tokenizer> load_tokenizer_beside(const std::string& checkpoint_path) {
  const auto directory = std::filesystem::path(checkpoint_path).parent_path();
  for (const char* name : {"tokenizer.model", "tokenizer.json"}) {
    if (std::filesystem::exists(directory / name)) return Tokenizer::load(directory / name);
  }
  return nullptr;
}

Transformer load_model_from_flags(const CommandLine& flags, const std::string& checkpoint_path,
                                  const std::string& config,
                                  const std::shared_ptr<TensorParallel>& tp) {
  const bool quiet = flags.get_flag("quiet") || (tp && tp->rank() != 0);
  Progress progress("Loading", Progress::Unit::kBytes, quiet);
  return load_model(checkpoint_path,
                    {.config = config,
                     .precision = parse_dtype("precision", flags.get_text("precision")),
                     .device = tp ? tp->device() : parse_device(flags.get_text("device")),
                     .reference = flags.get_flag("reference"),
                     .int4_layout = flags.get_text("int4_layout"),
                     .tp = tp,
                     .progress = progress.callback()});
}

LoadedModel load_from_flags(const CommandLine& flags, const std::shared_ptr<TensorParallel>& tp) {
  const auto start = std::chrono::steady_clock::now();
  const bool silent = flags.get_flag("quiet") || flags.get_flag("json") || (tp && tp->rank() != 0);
  const std::string checkpoint_path = flags.get_text("checkpoint_path");
  if (checkpoint_path.empty()) throw UsageError("--checkpoint_path is empty");
  const auto threads = static_cast<int>(flags.get_integer("num_threads"));
  const int ranks = tp ? tp->local_world_size() : 1;  // they share the host's cores
  set_num_threads(threads == 0 ? std::max(default_num_threads() / ranks, 1) : threads);
  LoadedModel loaded;
  loaded.tokenizer = flags.given("tokenizer_path")
                         ? Tokenizer::load(flags.get_text("tokenizer_path"))
                         : load_tokenizer_beside(checkpoint_path);
  loaded.model = load_model_from_flags(flags, checkpoint_path, flags.get_text("config"), tp);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  loaded.seconds = elapsed.count();
  if (!silent) {
    fprintf(stderr, "Using device=%s\nTime to load model: %.2f seconds\n",
            flags.get_text("device").c_str(), loaded.seconds);
  }
  return loaded;
}

const Tokenizer& require_tokenizer(const LoadedModel& loaded, const std::string& why) {
  TORCH_CHECK(loaded.tokenizer != nullptr, why,
              " needs a tokenizer: put tokenizer.model or tokenizer.json beside the checkpoint, or "
              "give --tokenizer_path");
  return *loaded.tokenizer;
}

}  // namespace gptfast::app
