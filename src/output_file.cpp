#include "output_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace gptfast {
namespace {

constexpr mode_t kMode = 0666;  // less the umask

std::filesystem::path folder_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& target) : target_(target) {
  std::error_code error;
  if (std::filesystem::is_symlink(target_, error)) {
    const auto resolved = std::filesystem::weakly_canonical(target_, error);
    if (!error) target_ = resolved;
  }
  const auto status = std::filesystem::status(target_, error);
  TORCH_CHECK(!std::filesystem::is_directory(status), target_.string(),
              ": is a directory; expected a file to write");
  TORCH_CHECK(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status),
              target_.string(), ": is not a regular file");
  if (std::filesystem::exists(status) && ::access(target_.c_str(), W_OK) != 0)
    fail("cannot be written");
  fd_ = ::open(folder_of(target_).c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kMode);
  if (fd_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR ||
                  errno == EINVAL)) {  // the file system has no unnamed files
    temporary_ = temporary_name();
    fd_ = ::open(temporary_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, kMode);
  }
  if (fd_ < 0) fail("cannot be written");
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::fail(const char* what) const {
  TORCH_CHECK(false, target_.string(), ": ", what, ": ", std::strerror(errno));
}

std::filesystem::path OutputFile::temporary_name() const {
  return folder_of(target_) / ("." + target_.filename().string().substr(0, 200) + "." +
                               std::to_string(::getpid()) + ".tmp");
}

void OutputFile::write(Bytes bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void OutputFile::sync() {
  if (::fsync(fd_) != 0) fail("cannot be written");
}

void OutputFile::commit() {
  sync();
  if (temporary_.empty()) {
    const auto name = temporary_name();
    const std::string descriptor = "/proc/self/fd/" + std::to_string(fd_);
    ::unlink(name.c_str());  // of a dead process with our number
    if (::linkat(AT_FDCWD, descriptor.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0)
      fail("cannot be named");
    temporary_ = name;
  }
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be renamed to");
  temporary_.clear();
  const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >=
      0) {  // makes the name durable; where a folder cannot be opened it is not ours to insist
    ::fsync(folder);
    ::close(folder);
  }
}

}  // namespace gptfast
