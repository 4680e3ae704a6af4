#include "mapped_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace gptfast {
namespace {

struct FileDescriptor {
  explicit FileDescriptor(int descriptor) : fd(descriptor) {}
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int fd;
};

}  // namespace

FileBytes map_file(const std::filesystem::path& file) {
  struct stat info {};
  // stat before open: opening a named pipe would wait for a writer.
  TORCH_CHECK(::stat(file.c_str(), &info) == 0, "cannot be opened: ", std::strerror(errno));
  TORCH_CHECK(!S_ISDIR(info.st_mode),
              "is a directory; expected a checkpoint file such as model.pth in it");
  TORCH_CHECK(S_ISREG(info.st_mode), "is not a regular file");
  const FileDescriptor descriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  TORCH_CHECK(descriptor.fd >= 0, "cannot be opened: ", std::strerror(errno));
  TORCH_CHECK(::fstat(descriptor.fd, &info) == 0, "cannot be read: ", std::strerror(errno));
  TORCH_CHECK(info.st_size > 0, "is empty (0 bytes); download or write it again");
  const auto size = static_cast<size_t>(info.st_size);
  // NORESERVE: a writable private mapping larger than the machine's memory would otherwise be
  // refused, although pages that nobody writes cost nothing.
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                         descriptor.fd, /*offset=*/0);
  TORCH_CHECK(address != MAP_FAILED, "cannot be mapped into memory: ", std::strerror(errno));
  // Advice: what is not in the page cache yet is read in 2 MB pages where the file system has them,
  // and weights stream faster from those (Zen 5, TinyLlama-1.1B in bfloat16 and in int8: by 8 %).
  ::madvise(address, size, MADV_HUGEPAGE);
  return {std::shared_ptr<uint8_t>(static_cast<uint8_t*>(address),
                                   [size](uint8_t* p) { ::munmap(p, size); }),
          size, /*mapped=*/true};
}

void release_pages(const FileBytes& file, Bytes part) {
  if (!file.mapped) return;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto first = static_cast<size_t>(part.data() - file.owner.get());
  const size_t begin = (first + page - 1) / page * page;
  const size_t end = (first + part.size()) / page * page;
  if (begin < end) ::madvise(file.owner.get() + begin, end - begin, MADV_DONTNEED);
}

}  // namespace gptfast
