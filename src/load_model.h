// What loading a model and quantizing a checkpoint share.
#pragma once

#include "gptfast/checkpoint.h"
#include "gptfast/config.h"

namespace gptfast {

/// The tensors that a model of `config` has, under its names: wq, wk and wv fused to wqkv, computed
/// tensors dropped, a missing head of a tied model filled in with the embedding.
StateDict normalize(StateDict tensors, const ModelArgs& config);

}  // namespace gptfast
