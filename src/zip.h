// The zip archives of torch.save: stored (uncompressed) records, 64-bit sizes, data aligned to 64
// bytes. Format: PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mapped_file.h"

namespace gptfast::zip {

inline constexpr uint64_t kDataAlignment =
    64;  // torch.save's; one cache line, and enough for any vector load
inline constexpr uint64_t kZip64Limit = 0xFFFFFFFF;

/// CRC-32 (IEEE 802.3) of `bytes`, continuing from `crc`.
uint32_t crc32(Bytes bytes, uint32_t crc = 0);

struct Record {
  std::string_view name;  ///< points into the archive
  Bytes data;             ///< points into the archive
  uint32_t crc = 0;       ///< as the archive states it
};

/// The records of an archive in memory, in the order of its central directory. The constructor
/// checks every offset and size against the archive and throws one line, without the file's name,
/// for a truncated, inconsistent, encrypted or multi-volume one. A compressed record is refused
/// when it is asked for.
class Reader {
 public:
  explicit Reader(Bytes archive);

  /// Name of the first record.
  std::string_view first_name() const { return entries_.front().name; }
  bool contains(std::string_view name) const { return index_.count(name) > 0; }
  /// Throws when the record is absent, compressed, or its local header does not agree with the
  /// central directory.
  Record read(std::string_view name) const;
  std::vector<std::string_view> names() const;

 private:
  struct Entry {
    std::string_view name;
    uint64_t header_offset = 0;
    uint64_t compressed_size = 0;
    uint64_t size = 0;
    uint32_t crc = 0;
    uint16_t method = 0;
    uint16_t flags = 0;
  };
  struct Directory {
    uint64_t offset = 0, size = 0, entries = 0;
  };
  Directory find_directory() const;
  size_t parse_entry(uint64_t at, uint64_t end);
  static void parse_zip64_sizes(Bytes extra, Entry& entry, bool header_offset_is_wide);

  Bytes archive_;
  uint64_t directory_offset_ = 0;
  std::vector<Entry> entries_;
  std::unordered_map<std::string_view, size_t> index_;
};

/// Writes an archive from front to back. Bytes go to `write(bytes, offset)`, which throws when it
/// fails; offsets other than the current end are only used to complete a header that was already
/// written.
class Writer {
 public:
  using Write = std::function<void(Bytes bytes, uint64_t offset)>;
  /// Sizes and offsets from `zip64_limit` on take the 64-bit form; tests lower it.
  explicit Writer(Write write, uint64_t zip64_limit = kZip64Limit)
      : write_(std::move(write)), zip64_limit_(zip64_limit) {}

  void add(const std::string& name, Bytes data);
  void finish();

 private:
  struct Entry {
    std::string name;
    uint64_t header_offset = 0;
    uint64_t size = 0;
    uint32_t crc = 0;
  };
  void append(Bytes bytes);
  std::string local_header(const Entry& entry) const;
  std::string central_header(const Entry& entry) const;

  Write write_;
  uint64_t zip64_limit_;
  uint64_t end_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace gptfast::zip
