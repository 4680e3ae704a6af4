// --tensor_parallel: the ranks of a program, started by itself or by torchrun.
#pragma once

#include <memory>
#include <optional>

#include "common.h"
#include "gptfast/tp.h"

namespace gptfast::app {

/// Declares --tensor_parallel.
void declare_rank_flags(CommandLine& flags);

/// With --tensor_parallel N > 1 outside of a launcher: runs N ranks of this program to their end
/// and returns the exit status. Else nullopt: this process is to do the work.
std::optional<int> launch_ranks(const CommandLine& flags, char** argv);

/// Meets the other ranks and checks that all have the same files and flags; null when there are
/// none. Ranks but 0 lose their stdout. The loss of a rank ends the process with one line and
/// kPeerLostStatus.
std::shared_ptr<TensorParallel> connect_ranks(const CommandLine& flags);

}  // namespace gptfast::app
