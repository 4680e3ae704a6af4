// What is in a checkpoint file (`convert --inspect`).
#pragma once

#include <filesystem>
#include <iosfwd>

namespace gptfast {

/// Writes a table of the tensors in `file`, under their whole paths and in file order: name, dtype,
/// shape, stride, bytes; with `hash` also the SHA-256 of each one's contiguous little-endian bytes.
/// `as_json`: one object on one line instead. Tensor data is only read for `hash`. Throws as
/// load_checkpoint does, before anything is written.
void inspect(const std::filesystem::path& file, bool hash, bool as_json, std::ostream& out);

}  // namespace gptfast
