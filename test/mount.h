// Small file systems for tests of full and read-only disks.
#pragma once

#include <sys/mount.h>

#include <filesystem>

namespace gptfast {

/// A tmpfs over a folder, unmounted with the object; only root may mount one.
struct Mount {
  Mount(const std::filesystem::path& folder, unsigned long flags, const char* options)
      : path(folder), mounted(::mount("tmpfs", folder.c_str(), "tmpfs", flags, options) == 0) {}
  ~Mount() {
    if (mounted) ::umount2(path.c_str(), MNT_DETACH);
  }
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;
  std::filesystem::path path;
  bool mounted;
};

}  // namespace gptfast
