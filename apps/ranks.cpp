#include "ranks.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <iostream>

namespace gptfast::app {
namespace {

/// Flags that may differ between ranks: what each host has, and what only rank 0 prints.
constexpr std::array kOwnFlags = {"device", "num_threads", "json", "quiet", "profile"};
/// Files that may lie elsewhere on each host and must have the same contents.
constexpr std::array kFileFlags = {"checkpoint_path", "tokenizer_path", "prompt_file",
                                   "draft_checkpoint_path"};

bool is_one_of(const auto& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string fingerprint(const std::filesystem::path& file) {
  return std::filesystem::is_regular_file(file) ? checkpoint_fingerprint(file) : "none";
}

/// What all ranks must have in common, by content where it is a file.
TensorParallel::Facts facts(const CommandLine& flags) {
  TensorParallel::Facts facts;
  for (const auto& [name, value] : flags.values()) {
    if (is_one_of(kFileFlags, name)) {
      facts.emplace_back("the file of --" + name, fingerprint(value));
    } else if (name == "logits_out") {
      facts.emplace_back("--" + name, value.empty() ? "not given" : "given");
    } else if (!is_one_of(kOwnFlags, name)) {
      facts.emplace_back("--" + name, value);
    }
    if (name == "checkpoint_path") {
      for (const char* file : {"config.json", "params.json", "tokenizer.model", "tokenizer.json"})
        facts.emplace_back(file, fingerprint(std::filesystem::path(value).parent_path() / file));
    }
  }
  return facts;
}

[[noreturn]] void end_for_lost_peer(const std::string& message) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, message.c_str());
  _exit(kPeerLostStatus);  // the main thread may wait for the lost rank, and destructors for it
}

}  // namespace

void declare_rank_flags(CommandLine& flags) {
  constexpr int64_t kMaxLocalRanks = 1024;
  flags.integer("tensor_parallel", "divide the model among this many processes of this host", 1, 1,
                kMaxLocalRanks);
}

std::optional<int> launch_ranks(const CommandLine& flags, char** argv) {
  const int64_t ranks = flags.get_integer("tensor_parallel");
  const auto info = rank_from_environment();
  if (info && flags.given("tensor_parallel") && ranks != info->world_size) {
    throw UsageError("--tensor_parallel " + std::to_string(ranks) + " but the launcher started " +
                     std::to_string(info->world_size) + " ranks (WORLD_SIZE)");
  }
  if (info || ranks == 1) return std::nullopt;
  return launch_local_ranks(static_cast<int>(ranks), argv);
}

std::shared_ptr<TensorParallel> connect_ranks(const CommandLine& flags) {
  const auto info = rank_from_environment();
  if (!info) return nullptr;
  if (info->rank != 0) {
    const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    close(null);
  }
  const at::Device device = device_of_rank(*info, parse_device(flags.get_text("device")));
  auto tp = TensorParallel::connect(*info, device, end_for_lost_peer);
  tp->check_agreement(facts(flags));
  return tp;
}

}  // namespace gptfast::app
