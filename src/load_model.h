// What loading a model and quantizing a checkpoint share.
#pragma once

#include <string>

#include "gptfast/checkpoint.h"
#include "gptfast/config.h"

namespace gptfast {

/// The tensors that a model of `config` has, under its names but for fuse_qkv(): computed tensors
/// dropped, a missing head of a tied model filled in with the embedding.
StateDict normalize(const StateDict& tensors, const ModelArgs& config);

/// wq, wk, wv -> wqkv where a checkpoint keeps them apart (Attention.load_hook of model.py).
StateDict fuse_qkv(const StateDict& tensors);

/// True for "....cond_ffn.w1": the weights of all experts of a layer, stored as one tensor.
bool is_expert_weight(const std::string& name);

/// "....cond_ffn.w1" -> "....cond_ffn.scales1" for the kind "scales".
std::string expert_companion(const std::string& fqn, const std::string& kind);

/// The tensors of expert `e` of "....cond_ffn.w1" as those of a linear layer `expert_fqn`: views.
/// Throws naming the tensor unless all of them are stored for the same number of experts.
StateDict expert_tensors(const StateDict& tensors, const std::string& fqn, int64_t e,
                         const std::string& expert_fqn);

}  // namespace gptfast
