// A file that appears whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "mapped_file.h"

namespace gptfast {

/// Writes beside the target and renames in commit(). Where the file system allows it the unfinished
/// file has no name at all, so not even a killed process leaves it behind; otherwise the destructor
/// removes it. Throws with the target's name.
class OutputFile {
 public:
  /// A symbolic link is followed. Throws when the folder is missing or not writable, or the target
  /// is no regular file.
  explicit OutputFile(const std::filesystem::path& target);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(Bytes bytes, uint64_t offset);
  /// Waits until all bytes are on the disk, so that commit() cannot fail for want of space.
  void sync();
  /// Syncs and renames.
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;
  std::filesystem::path temporary_name() const;

  std::filesystem::path target_;
  std::filesystem::path temporary_;  // empty while the file has no name
  int fd_ = -1;
};

}  // namespace gptfast
