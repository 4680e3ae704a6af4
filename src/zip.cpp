#include "zip.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace gptfast::zip {
namespace {

constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocator64Signature = 0x07064b50;
constexpr size_t kLocalSize = 30, kCentralSize = 46, kEndSize = 22, kEnd64Size = 56,
                 kLocator64Size = 20;
constexpr uint16_t kZip64ExtraId = 1;
constexpr uint16_t kPaddingExtraId = 0x4246;  // "FB", as torch.save pads
constexpr uint16_t kEncryptedFlag = 1;
constexpr uint16_t kVersionNeeded = 45;  // 4.5: zip64
constexpr size_t kMaxCommentSize = 0xFFFF;
constexpr char kTruncated[] =
    "the zip archive has no valid end: the file is truncated or damaged; download or write it "
    "again";
constexpr char kDamaged[] = "the zip archive is damaged: ";

// Slicing-by-8 tables: one table would give 0.4 GB/s, eight give more than a disk writes.
constexpr std::array<std::array<uint32_t, 256>, 8> make_crc_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) != 0 ? 0xEDB88320u : 0u);
    tables[0][i] = c;
  }
  for (size_t t = 1; t < 8; ++t) {
    for (size_t i = 0; i < 256; ++i)
      tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
  }
  return tables;
}
constexpr auto kCrcTables = make_crc_tables();

template <class T>
T load(Bytes bytes, uint64_t offset) {  // the caller has checked the range; zip and this project's
                                        // machines are little endian
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

template <class T>
void store(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

Bytes as_bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

bool in_range(uint64_t offset, uint64_t size, uint64_t limit) {
  return offset <= limit && size <= limit - offset;
}

}  // namespace

uint32_t crc32(Bytes bytes, uint32_t crc) {
  const auto& t = kCrcTables;
  crc = ~crc;
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    const uint32_t a = load<uint32_t>(bytes, i) ^ crc;
    const uint32_t b = load<uint32_t>(bytes, i + 4);
    crc = t[7][a & 255] ^ t[6][(a >> 8) & 255] ^ t[5][(a >> 16) & 255] ^ t[4][a >> 24] ^
          t[3][b & 255] ^ t[2][(b >> 8) & 255] ^ t[1][(b >> 16) & 255] ^ t[0][b >> 24];
  }
  for (; i < bytes.size(); ++i) crc = (crc >> 8) ^ t[0][(crc ^ bytes[i]) & 255];
  return ~crc;
}

Reader::Reader(Bytes archive) : archive_(archive) {
  const Directory directory = find_directory();
  directory_offset_ = directory.offset;
  TORCH_CHECK(directory.entries > 0, "is an empty zip archive");
  // Each entry takes at least kCentralSize bytes, so what is reserved is bounded by the file.
  TORCH_CHECK(directory.entries <= directory.size / kCentralSize, kDamaged,
              "its directory is too short for ", directory.entries, " records");
  entries_.reserve(directory.entries);
  uint64_t at = directory.offset;
  for (uint64_t i = 0; i < directory.entries; ++i)
    at += parse_entry(at, directory.offset + directory.size);
  index_.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    TORCH_CHECK(index_.emplace(entries_[i].name, i).second, kDamaged, "two records have the name '",
                entries_[i].name, "'");
  }
}

Reader::Directory Reader::find_directory() const {
  const uint64_t size = archive_.size();
  TORCH_CHECK(size >= kEndSize, kTruncated);
  const uint64_t lowest = size - kEndSize - std::min<uint64_t>(size - kEndSize, kMaxCommentSize);
  for (uint64_t at = size - kEndSize;; --at) {
    if (load<uint32_t>(archive_, at) == kEndSignature &&
        at + kEndSize + load<uint16_t>(archive_, at + 20) == size) {
      Directory found{load<uint32_t>(archive_, at + 16), load<uint32_t>(archive_, at + 12),
                      load<uint16_t>(archive_, at + 10)};
      if (at >= kLocator64Size &&
          load<uint32_t>(archive_, at - kLocator64Size) == kLocator64Signature) {
        const auto end64 = load<uint64_t>(archive_, at - kLocator64Size + 8);
        TORCH_CHECK(in_range(end64, kEnd64Size, at) &&
                        load<uint32_t>(archive_, end64) == kEnd64Signature,
                    kTruncated);
        found = {load<uint64_t>(archive_, end64 + 48), load<uint64_t>(archive_, end64 + 40),
                 load<uint64_t>(archive_, end64 + 32)};
      }
      TORCH_CHECK(in_range(found.offset, found.size, at), kTruncated);
      return found;
    }
    TORCH_CHECK(at > lowest, kTruncated);
  }
}

size_t Reader::parse_entry(uint64_t at, uint64_t end) {
  TORCH_CHECK(in_range(at, kCentralSize, end) && load<uint32_t>(archive_, at) == kCentralSignature,
              kDamaged, "its directory is malformed at byte ", at);
  const auto name_size = load<uint16_t>(archive_, at + 28);
  const auto extra_size = load<uint16_t>(archive_, at + 30);
  const auto comment_size = load<uint16_t>(archive_, at + 32);
  const size_t entry_size = kCentralSize + name_size + extra_size + comment_size;
  TORCH_CHECK(in_range(at, entry_size, end), kDamaged, "its directory is malformed at byte ", at);
  Entry entry;
  entry.name = {reinterpret_cast<const char*>(archive_.data()) + at + kCentralSize, name_size};
  entry.flags = load<uint16_t>(archive_, at + 8);
  entry.method = load<uint16_t>(archive_, at + 10);
  entry.crc = load<uint32_t>(archive_, at + 16);
  entry.compressed_size = load<uint32_t>(archive_, at + 20);
  entry.size = load<uint32_t>(archive_, at + 24);
  const auto header_offset = load<uint32_t>(archive_, at + 42);
  entry.header_offset = header_offset;
  parse_zip64_sizes(archive_.subspan(at + kCentralSize + name_size, extra_size), entry,
                    header_offset == kZip64Limit);
  entries_.push_back(entry);
  return entry_size;
}

// The 64-bit values stand in this order, each only when its 32-bit field is all ones.
void Reader::parse_zip64_sizes(Bytes extra, Entry& entry, bool header_offset_is_wide) {
  for (size_t at = 0; in_range(at, 4, extra.size());) {
    const auto id = load<uint16_t>(extra, at);
    const auto size = load<uint16_t>(extra, at + 2);
    at += 4;
    TORCH_CHECK(in_range(at, size, extra.size()), kDamaged, "an extra field of '", entry.name,
                "' is cut");
    if (id == kZip64ExtraId) {
      size_t field = at;
      const auto widen = [&](uint64_t& value) {
        TORCH_CHECK(in_range(field, 8, at + size), kDamaged, "the 64-bit sizes of '", entry.name,
                    "' are missing");
        value = load<uint64_t>(extra, field);
        field += 8;
      };
      if (entry.size == kZip64Limit) widen(entry.size);
      if (entry.compressed_size == kZip64Limit) widen(entry.compressed_size);
      if (header_offset_is_wide) widen(entry.header_offset);
      return;
    }
    at += size;
  }
}

Record Reader::read(std::string_view name) const {
  const auto found = index_.find(name);
  TORCH_CHECK(found != index_.end(), "the archive has no record '", name, "'");
  const Entry& entry = entries_[found->second];
  TORCH_CHECK((entry.flags & kEncryptedFlag) == 0, "the record '", name, "' is encrypted");
  TORCH_CHECK(entry.method == 0, "the record '", name,
              "' is compressed, torch.save never does that; unzip the file and zip it "
              "again without compression (zip -0), or load and save it with Python");
  TORCH_CHECK(entry.compressed_size == entry.size, kDamaged, "two sizes for the stored record '",
              name, "'");
  const uint64_t header = entry.header_offset;
  TORCH_CHECK(in_range(header, kLocalSize, directory_offset_) &&
                  load<uint32_t>(archive_, header) == kLocalSignature,
              kDamaged, "the record '", name, "' is not where the directory says");
  const auto name_size = load<uint16_t>(archive_, header + 26);
  const uint64_t data = header + kLocalSize + name_size + load<uint16_t>(archive_, header + 28);
  TORCH_CHECK(in_range(data, entry.size, directory_offset_), kDamaged, "the record '", name, "' (",
              entry.size, " bytes) reaches past the end of the data");
  const std::string_view local_name(reinterpret_cast<const char*>(archive_.data()) + header +
                                        kLocalSize,
                                    name_size);
  TORCH_CHECK(local_name == name, kDamaged, "the record '", name,
              "' has another name in its own header");
  return {entry.name, archive_.subspan(data, entry.size), entry.crc};
}

std::vector<std::string_view> Reader::names() const {
  std::vector<std::string_view> names;
  names.reserve(entries_.size());
  for (const Entry& entry : entries_) names.push_back(entry.name);
  return names;
}

void Writer::append(Bytes bytes) {
  write_(bytes, end_);
  end_ += bytes.size();
}

void Writer::add(const std::string& name, Bytes data) {
  TORCH_CHECK(name.size() <= 0xFFFF - kDataAlignment, "a record's name is too long");
  Entry entry{.name = name, .header_offset = end_, .size = data.size(), .crc = 0};
  append(as_bytes(local_header(entry)));
  constexpr size_t kChunk = 1 << 20;  // the checksum and the copy to the kernel share the cache
  for (size_t at = 0; at < data.size(); at += kChunk) {
    const Bytes chunk = data.subspan(at, std::min(kChunk, data.size() - at));
    entry.crc = crc32(chunk, entry.crc);
    append(chunk);
  }
  write_(as_bytes(local_header(entry)), entry.header_offset);  // now with the checksum
  entries_.push_back(std::move(entry));
}

std::string Writer::local_header(const Entry& entry) const {
  const bool wide = entry.size >= zip64_limit_;
  std::string out;
  store<uint32_t>(out, kLocalSignature);
  store<uint16_t>(out, kVersionNeeded);
  store<uint16_t>(out, 0);  // flags
  store<uint16_t>(out, 0);  // stored
  store<uint32_t>(out, 0);  // no date: the same tensors give the same file
  store<uint32_t>(out, entry.crc);
  const auto size32 = static_cast<uint32_t>(wide ? kZip64Limit : entry.size);
  store<uint32_t>(out, size32);
  store<uint32_t>(out, size32);
  store<uint16_t>(out, static_cast<uint16_t>(entry.name.size()));
  std::string extra;
  if (wide) {
    store<uint16_t>(extra, kZip64ExtraId);
    store<uint16_t>(extra, 16);
    store<uint64_t>(extra, entry.size);
    store<uint64_t>(extra, entry.size);
  }
  const uint64_t unpadded = entry.header_offset + kLocalSize + entry.name.size() + extra.size() + 4;
  const uint64_t padding = (kDataAlignment - unpadded % kDataAlignment) % kDataAlignment;
  store<uint16_t>(extra, kPaddingExtraId);
  store<uint16_t>(extra, static_cast<uint16_t>(padding));
  extra.append(padding, 'Z');
  store<uint16_t>(out, static_cast<uint16_t>(extra.size()));
  return out + entry.name + extra;
}

std::string Writer::central_header(const Entry& entry) const {
  const bool wide_size = entry.size >= zip64_limit_;
  const bool wide_offset = entry.header_offset >= zip64_limit_;
  std::string extra;
  if (wide_size || wide_offset) {
    store<uint16_t>(extra, kZip64ExtraId);
    store<uint16_t>(extra, static_cast<uint16_t>((wide_size ? 16 : 0) + (wide_offset ? 8 : 0)));
    if (wide_size) store<uint64_t>(extra, entry.size);
    if (wide_size) store<uint64_t>(extra, entry.size);
    if (wide_offset) store<uint64_t>(extra, entry.header_offset);
  }
  std::string out;
  store<uint32_t>(out, kCentralSignature);
  store<uint16_t>(out, kVersionNeeded);
  store<uint16_t>(out, kVersionNeeded);
  store<uint16_t>(out, 0);
  store<uint16_t>(out, 0);
  store<uint32_t>(out, 0);
  store<uint32_t>(out, entry.crc);
  const auto size32 = static_cast<uint32_t>(wide_size ? kZip64Limit : entry.size);
  store<uint32_t>(out, size32);
  store<uint32_t>(out, size32);
  store<uint16_t>(out, static_cast<uint16_t>(entry.name.size()));
  store<uint16_t>(out, static_cast<uint16_t>(extra.size()));
  store<uint16_t>(out, 0);  // comment
  store<uint16_t>(out, 0);  // volume
  store<uint16_t>(out, 0);  // internal attributes
  store<uint32_t>(out, 0);  // external attributes
  store<uint32_t>(out, static_cast<uint32_t>(wide_offset ? kZip64Limit : entry.header_offset));
  return out + entry.name + extra;
}

void Writer::finish() {
  const uint64_t directory = end_;
  for (const Entry& entry : entries_) append(as_bytes(central_header(entry)));
  const uint64_t directory_size = end_ - directory;
  const uint64_t count = entries_.size();
  const bool wide = directory >= zip64_limit_ || directory_size >= zip64_limit_ || count >= 0xFFFF;
  std::string out;
  if (wide) {
    store<uint32_t>(out, kEnd64Signature);
    store<uint64_t>(out, kEnd64Size - 12);
    store<uint16_t>(out, kVersionNeeded);
    store<uint16_t>(out, kVersionNeeded);
    store<uint32_t>(out, 0);
    store<uint32_t>(out, 0);
    store<uint64_t>(out, count);
    store<uint64_t>(out, count);
    store<uint64_t>(out, directory_size);
    store<uint64_t>(out, directory);
    store<uint32_t>(out, kLocator64Signature);
    store<uint32_t>(out, 0);
    store<uint64_t>(out, end_);
    store<uint32_t>(out, 1);
  }
  store<uint32_t>(out, kEndSignature);
  store<uint32_t>(out, 0);  // volumes
  const auto count16 = static_cast<uint16_t>(wide ? 0xFFFF : count);
  store<uint16_t>(out, count16);
  store<uint16_t>(out, count16);
  store<uint32_t>(out, static_cast<uint32_t>(wide ? kZip64Limit : directory_size));
  store<uint32_t>(out, static_cast<uint32_t>(wide ? kZip64Limit : directory));
  store<uint16_t>(out, 0);
  append(as_bytes(out));
}

}  // namespace gptfast::zip
