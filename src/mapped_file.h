// A whole file as one copy-on-write memory mapping.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace gptfast {

using Bytes = std::span<const uint8_t>;

/// Keeps the memory of a file alive; the deleter unmaps it.
struct FileBytes {
  std::shared_ptr<uint8_t> owner;
  size_t size = 0;
  bool mapped = false;

  Bytes bytes() const { return {owner.get(), size}; }
};

/// Maps a regular file (private and writable: changes stay in memory). Throws one line, without the
/// file's name, when it is missing, a directory, something else that cannot be mapped, unreadable
/// or empty.
FileBytes map_file(const std::filesystem::path& file);

/// Lets go of the memory behind `part` of a mapped file, which nobody has changed; it is read again
/// when it is used again.
void release_pages(const FileBytes& file, Bytes part);

}  // namespace gptfast
