#pragma once

namespace gptfast {

/// Bytes per second that the current CUDA device reads from its memory.
double cuda_read_bandwidth();

}  // namespace gptfast
