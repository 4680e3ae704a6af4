// The flags that every program with a model has, and what they load.
#pragma once

#include <memory>
#include <string>

#include "common.h"
#include "gptfast/model.h"
#include "gptfast/tokenizer.h"
#include "gptfast/tp.h"

namespace gptfast::app {

/// Declares --checkpoint_path, --tokenizer_path, --config, --precision, --int4_layout, --device,
/// --reference, --num_threads, --seed, --json and --quiet.
void declare_model_flags(CommandLine& flags);

struct LoadedModel {
  Transformer model{nullptr};
  std::unique_ptr<Tokenizer> tokenizer;  // null: none was named and none lies beside the checkpoint
  double seconds = 0;
};

/// Loads what the flags name, with a progress bar, and then says so on stderr unless --quiet or
/// --json; the tokenizer first, where a mistake shows at once.
/// With `tp`: this rank's share, on its device; only rank 0 says so.
LoadedModel load_from_flags(const CommandLine& flags,
                            const std::shared_ptr<TensorParallel>& tp = nullptr);

/// The model of another checkpoint (a draft) with the same flags.
Transformer load_model_from_flags(const CommandLine& flags, const std::string& checkpoint_path,
                                  const std::string& config,
                                  const std::shared_ptr<TensorParallel>& tp = nullptr);

/// tokenizer.model or tokenizer.json beside a checkpoint; null when neither is there.
std::unique_ptr<Tokenizer> load_tokenizer_beside(const std::string& checkpoint_path);

/// The tokenizer, or an error that says how to give one; `why` names what needs it.
const Tokenizer& require_tokenizer(const LoadedModel& loaded, const std::string& why);

}  // namespace gptfast::app
