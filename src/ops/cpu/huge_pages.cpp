#include "ops/cpu/huge_pages.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>

namespace gptfast::cpu {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kSharedMapping = int64_t{32} << 20;
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// An anonymous mapping that starts at a huge page; pages nobody writes cost nothing.
class Mapping {
 public:
  explicit Mapping(int64_t size) : size_(round_up(size, kHugePage)) {
    address_ = ::mmap(nullptr, size_ + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
    TORCH_CHECK(address_ != MAP_FAILED, "cannot allocate ", size_ >> 20,
                " MiB for weights: ", std::strerror(errno));
    void* aligned = address_;
    size_t space = size_ + kHugePage;
    data_ = static_cast<std::byte*>(std::align(kHugePage, size_, aligned, space));
    ::madvise(data_, size_, MADV_HUGEPAGE);  // advice: ordinary pages do, more slowly
  }
  ~Mapping() { ::munmap(address_, size_ + kHugePage); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  /// The next `bytes` of the mapping, null if there are not so many left.
  std::byte* take(int64_t bytes) {
    if (used_ + bytes > size_) return nullptr;
    std::byte* start = data_ + used_;
    used_ = round_up(used_ + bytes, kAlignment);
    return start;
  }

 private:
  void* address_;
  int64_t size_;
  std::byte* data_;
  int64_t used_ = 0;
};

}  // namespace

at::Tensor empty_in_huge_pages(int64_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Mapping> shared;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Mapping> mapping = shared.lock();
  std::byte* data = mapping ? mapping->take(bytes) : nullptr;
  if (data == nullptr) {
    mapping = std::make_shared<Mapping>(std::max(bytes, kSharedMapping));
    data = mapping->take(bytes);
    shared = mapping;
  }
  return at::from_blob(
      data, {bytes}, [mapping](void*) mutable { mapping.reset(); }, at::kByte);
}

}  // namespace gptfast::cpu
