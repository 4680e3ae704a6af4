// Memory for weights.
#pragma once

#include <ATen/core/Tensor.h>

namespace gptfast::cpu {

/// Uninitialized bytes [bytes] on the CPU in 2 MB pages where the system has them: streaming a
/// model through 4 KB pages costs a tenth of the bandwidth (Zen 5, TinyLlama-1.1B in int4: 54
/// against 63 tokens/s). Small tensors share mappings, which live until their last tensor does.
at::Tensor empty_in_huge_pages(int64_t bytes);

}  // namespace gptfast::cpu
