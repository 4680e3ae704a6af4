// Files that nobody means well with: each is refused or loads something harmless, in bounded time
// and memory.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "checkpoint_reader.h"
#include "zip.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using Records = std::vector<std::pair<std::string, std::string>>;

const fs::path kFormats = fs::path(GPTFAST_GOLDEN) / "formats";

FileBytes in_memory(const std::string& bytes) {
  // At 64 bytes like a mapping, and exactly as long as the file, so that a sanitizer sees a read
  // past its end.
  void* memory = nullptr;
  if (::posix_memalign(&memory, 64, std::max<size_t>(bytes.size(), 1)) != 0) throw std::bad_alloc();
  std::memcpy(memory, bytes.data(), bytes.size());
  return {std::shared_ptr<uint8_t>(static_cast<uint8_t*>(memory), std::free), bytes.size()};
}

std::string zip_of(const Records& records, uint64_t zip64_limit = zip::kZip64Limit) {
  std::string out;
  zip::Writer writer(
      [&out](Bytes bytes, uint64_t offset) {
        out.resize(std::max<size_t>(out.size(), offset + bytes.size()));
        std::memcpy(out.data() + offset, bytes.data(), bytes.size());
      },
      zip64_limit);
  for (const auto& [name, data] : records) {
    writer.add("archive/" + name, {reinterpret_cast<const uint8_t*>(data.data()), data.size()});
  }
  writer.finish();
  return out;
}

StateDict load(const std::string& bytes) {
  return read_checkpoint(in_memory(bytes), Names::kAsStored, nullptr);
}

std::string error_of(const std::string& bytes) {
  try {
    load(bytes);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "(it loads)";
}

void expect_refused(const std::string& bytes, const std::string& word) {
  const std::string message = error_of(bytes);
  EXPECT_NE(message.find(word), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

/// Loads if it can and reads every element, for a sanitizer to watch.
void load_and_touch(const std::string& bytes) {
  try {
    for (const auto& [name, tensor] : load(bytes)) {
      if (tensor.numel() > 0) tensor.contiguous();
    }
  } catch (const c10::Error&) {
    return;  // refused
  }
}

// ---- pickles by hand

std::string repeat(const std::string& text, size_t times) {
  std::string out;
  for (size_t i = 0; i < times; ++i) out += text;
  return out;
}
template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}
std::string string(const std::string& text) {
  return "X" + raw(static_cast<uint32_t>(text.size())) + text;
}
std::string integer(int64_t value) {
  return "\x8a\x08" + raw(value);
}
std::string tuple(const std::vector<int64_t>& values) {
  std::string out = "(";
  for (const int64_t value : values) out += integer(value);
  return out + "t";
}
std::string storage(const std::string& key, int64_t numel,
                    const std::string& type = "FloatStorage") {
  return "(" + string("storage") + "ctorch\n" + type + "\n" + string(key) + string("cpu") +
         integer(numel) + "tQ";
}
std::string view(const std::string& storage, int64_t offset, const std::vector<int64_t>& sizes,
                 const std::vector<int64_t>& strides) {
  return "ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(offset) + tuple(sizes) +
         tuple(strides) +
         "\x89"
         "ccollections\nOrderedDict\n)RtR";
}
/// A dict {"w": value} as a checkpoint with one storage of six floats.
std::string checkpoint_of(const std::string& value, const Records& more = {}) {
  Records records = {{"data.pkl", "\x80\x02}(" + string("w") + value + "u."},
                     {"data/0", std::string(24, '\1')}};
  records.insert(records.end(), more.begin(), more.end());
  return zip_of(records);
}
std::string checkpoint_of_pickle(const std::string& pickle) {
  return zip_of({{"data.pkl", "\x80\x02" + pickle + "."}});
}

const std::string kGood = view(storage("0", 6), 0, {2, 3}, {3, 1});

TEST(HostilePickle, TheHandMadeOneLoads) {
  EXPECT_EQ(load(checkpoint_of(kGood)).at("w").sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(load(checkpoint_of(view(storage("0", 6), 5, {1, 0, 9}, {7, 7, 7}))).at("w").numel(), 0);
  EXPECT_EQ(load(checkpoint_of(view(storage("0", 6), 5, {1}, {INT64_MAX}))).at("w").numel(), 1);
}

TEST(HostilePickle, ViewsOutsideTheirStorage) {
  const int64_t two32 = int64_t{1} << 32;
  const auto refuse = [](int64_t offset, const std::vector<int64_t>& sizes,
                         const std::vector<int64_t>& strides, const char* word) {
    expect_refused(checkpoint_of(view(storage("0", 6), offset, sizes, strides)), word);
  };
  refuse(0, {7}, {1}, "does not fit its storage");
  refuse(1, {2, 3}, {3, 1}, "does not fit its storage");
  refuse(-2, {2}, {1}, "storage offset");
  refuse(0, {-3}, {1}, "size or stride");
  refuse(5, {6}, {-1}, "size or stride");
  refuse(0, {two32, two32}, {1, 1}, "does not fit its storage");
  refuse(0, {two32, two32, 0}, {1, 1, 1}, "does not fit its storage");
  refuse(0, {3}, {INT64_MAX}, "does not fit its storage");
  refuse(INT64_MAX, {1}, {1}, "does not fit its storage");
  refuse(7, {0}, {1}, "does not fit its storage");
  refuse(0, {two32 << 8}, {0}, "larger than the whole file");
  refuse(0, std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1), "at most 64");
}

TEST(HostilePickle, StoragesThatLie) {
  const auto refuse = [](const std::string& stored, const char* word) {
    expect_refused(checkpoint_of(view(stored, 0, {1}, {1}), {{"secret", std::string(24, '\2')}}),
                   word);
  };
  refuse(storage("0", 7), "has 24 bytes, its tensors need 28");
  refuse(storage("0", 5), "has 24 bytes, its tensors need 20");
  refuse(storage("0", -1), "-1 elements");
  refuse(storage("0", INT64_MAX), "elements");
  refuse(storage("1", 6), "no record 'archive/data/1'");
  refuse(storage("../secret", 6), "no record 'archive/data/../secret'");
  refuse(storage(std::string(300, 'k'), 6), "key is too long");
  refuse("KaQ", "describes a storage in an unknown way");
  refuse(integer(7), "has no storage");
}

TEST(HostilePickle, ArgumentsOfTheWrongKind) {
  const std::string call = "ctorch._utils\n_rebuild_tensor_v2\n";
  for (const std::string& arguments :
       std::vector<std::string>{")", storage("0", 6) + "\x85", "(" + storage("0", 6) + "NNNt",
                                "(" + storage("0", 6) + integer(0) + "NNt", "(NNNNNNt"}) {
    EXPECT_NE(error_of(checkpoint_of(call + arguments + "R")), "(it loads)");
  }
  expect_refused(checkpoint_of("ctorch._utils\n_rebuild_parameter\n)R"), "with 0 arguments");
  expect_refused(checkpoint_of("ctorch._utils\n_rebuild_parameter\n" + integer(1) + "\x85R"),
                 "holds no tensor");
  expect_refused(checkpoint_of(call + "(" + storage("0", 6) + integer(0) + "ctorch\nSize\n)R" +
                               tuple({1}) + "tR"),
                 "shape is no tuple");
  expect_refused(checkpoint_of_pickle("NNR"), "calls something that is no known global");
  expect_refused(checkpoint_of_pickle("ccollections\nOrderedDict\n]" + integer(1) + "a\x85R"),
                 "no list of pairs");
  expect_refused(checkpoint_of_pickle("}" + integer(1) + integer(2) + integer(3) + "u"),
                 "misses a mark");
  expect_refused(checkpoint_of_pickle("}(" + integer(1) + "u"), "takes none");
  expect_refused(checkpoint_of_pickle("a"), "empty stack");
  expect_refused(checkpoint_of_pickle("]}b"), "has none");
}

TEST(HostilePickle, GlobalsAreRefusedByName) {
  for (const char* name : {"os\nsystem", "builtins\nexec", "torch\nload",
                           "torch.storage\n_load_from_bytes", "numpy\ndtype"}) {
    std::string dotted = name;
    dotted.replace(dotted.find('\n'), 1, ".");
    expect_refused(checkpoint_of("c" + std::string(name) + "\n"), "'" + dotted + "'");
  }
  // The same through STACK_GLOBAL of protocol 4.
  expect_refused(checkpoint_of(string("os") + string("system") + "\x93"), "'os.system'");
}

TEST(HostilePickle, Cycles) {
  const std::string self = std::string("}q\0", 3) + string("a") + std::string("h\0s", 3);
  expect_refused(checkpoint_of_pickle(self), "contains itself");
  expect_refused(checkpoint_of_pickle(std::string("]q\0h\0a", 6)), "contains itself");
}

TEST(HostilePickle, DeepNestingNeitherOverflowsTheStackNorTakesLong) {
  expect_refused(checkpoint_of_pickle(repeat("]", 500000) + repeat("a", 499999)), "1000 deep");
  expect_refused(checkpoint_of_pickle(repeat("(", 1000000)), "empty stack");
  EXPECT_TRUE(load(checkpoint_of_pickle(repeat("(", 100000) + repeat("]", 200000))).empty());
  expect_refused(checkpoint_of_pickle("N" + repeat("\x85", 1000000)), "1000 deep");
}

TEST(HostilePickle, SharedContainersDoNotMultiply) {
  std::string doubling = "]q" + std::string(1, '\0');
  for (char level = 0; level < 60; ++level) {
    doubling += std::string("](h") + level + "h" + level + "eq" + static_cast<char>(level + 1);
  }
  expect_refused(checkpoint_of_pickle(doubling), "more than");
  // A list of 100,000 pairs, copied again and again into dicts.
  const std::string pairs = "](" + repeat("NN\x86", 100000) + "eq" + std::string(1, '\0');
  expect_refused(checkpoint_of_pickle(
                     pairs + "(" +
                     repeat(std::string("ccollections\nOrderedDict\nh\0\x85R", 29), 2000) + "t"),
                 "steps");
  // One tensor under very many long names.
  const std::string longs = string(std::string(100000, 'n'));
  expect_refused(checkpoint_of("}" + std::string("q\0", 2) + longs + kGood + "s0" + "](" +
                               repeat(std::string("h\0", 2), 2000) + "e"),
                 "names of its tensors");
}

TEST(HostilePickle, NamesThatMeetAreRefused) {
  const std::string inner = "}" + string("b") + kGood + "s";
  expect_refused(checkpoint_of_pickle("}(" + string("a/b") + "N" + string("a") + inner + "u"),
                 "no record 'archive/data/0'");
  const Records storage0 = {{"data/0", std::string(24, '\1')}};
  const std::string both = "\x80\x02}(" + string("a/b") + kGood + string("a") + inner + "u.";
  expect_refused(zip_of({{"data.pkl", both}, storage0[0]}), "two tensors have the name 'a/b'");
  const std::string none = "\x80\x02}N" + kGood + "s.";
  expect_refused(zip_of({{"data.pkl", none}, storage0[0]}), "neither text nor a whole number");
  // As in Python, the later value of a key counts.
  const std::string twice =
      "\x80\x02}(" + string("a") + kGood + string("b") + kGood + string("a") + "Nu.";
  const StateDict tensors = load(zip_of({{"data.pkl", twice}, storage0[0]}));
  EXPECT_EQ(tensors.size(), 1u);
  EXPECT_TRUE(tensors.contains("b"));
}

TEST(HostilePickle, UnknownOpcodesAndProtocols) {
  expect_refused(checkpoint_of_pickle("\x80\x06N"), "protocol 6");
  for (const char* opcode : {"i", "o", "I1\n", "V\n", "p0\n", "\x82\1", "\x92", "\x97"}) {
    expect_refused(checkpoint_of_pickle(opcode), "opcode");
  }
}

// ---- archives

TEST(HostileZip, SixtyFourBitSizesOfSmallRecords) {
  const Records records = {{"data/0", std::string(24, '\1')},
                           {"data.pkl", "\x80\x02}" + string("w") + kGood + "s."}};
  const std::string plain = zip_of(records);
  for (const uint64_t limit : {uint64_t{0}, uint64_t{20}, uint64_t{100}, uint64_t{200}}) {
    const std::string wide = zip_of(records, limit);
    EXPECT_NE(wide, plain);
    EXPECT_TRUE(at::equal(load(wide).at("w"), load(plain).at("w")));
  }
}

TEST(HostileZip, CompressedRecordsAndWrongOrderAreRefused) {
  std::string bytes = checkpoint_of(kGood);
  for (size_t at = 0; (at = bytes.find("archive/data/0", at)) != std::string::npos; ++at) {
    const bool central = bytes.compare(at - 46, 4, "PK\x01\x02") == 0;
    bytes[at - (central ? 36 : 22)] = 8;  // method: deflate
  }
  expect_refused(bytes, "is compressed");
  expect_refused(checkpoint_of(kGood, {{"byteorder", "big"}}), "big-endian");
  expect_refused(checkpoint_of(kGood, {{"data/0", "again"}}), "two records have the name");
  expect_refused(checkpoint_of(kGood, {{"constants.pkl", ""}}), "TorchScript");
}

TEST(HostileZip, AChecksumIsRightOrWasNotWritten) {
  std::string bytes = checkpoint_of(kGood);
  const size_t pickle = bytes.rfind("archive/data.pkl");  // in the directory
  bytes[pickle - 46 + 16] = static_cast<char>(bytes[pickle - 46 + 16] ^ 1);
  expect_refused(bytes, "checksum of its pickle is wrong");
  std::memset(bytes.data() + pickle - 46 + 16, 0, 4);
  EXPECT_TRUE(at::equal(load(bytes).at("w"), load(checkpoint_of(kGood)).at("w")));
}

TEST(HostileZip, HeadersThatDisagree) {
  const std::string good = checkpoint_of(kGood);
  const size_t central = good.find("PK\x01\x02", good.find("PK\x01\x02") + 1);  // of data/0
  const auto patched = [&](size_t at, uint32_t value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    return bytes;
  };
  expect_refused(patched(central + 42, 0), "another name");
  expect_refused(patched(central + 42, 1), "not where the directory says");
  expect_refused(patched(central + 42, 0x7fffffff), "not where the directory says");
  expect_refused(patched(central + 24, 25), "two sizes");
  expect_refused(patched(good.size() - 10, 0x7fffffff), "truncated or damaged");  // directory size
  expect_refused(patched(good.size() - 14, 0xffffffff),
                 "too short for 65535 records");  // and number of records
  std::string longer = patched(central + 20, 0x7fffff00);
  std::memcpy(longer.data() + central + 24, longer.data() + central + 20, 4);
  expect_refused(longer, "reaches past the end");
}

// ---- every prefix and every damaged byte of good files

std::string golden(const char* name) {
  std::ifstream in(kFormats / name, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(DamagedFile, EveryPrefixIsRefused) {
  for (const char* name : {"plain_dict.pth", "legacy.pth", "pickle_protocol4.pth"}) {
    const std::string bytes = golden(name);
    for (size_t size = 1; size < bytes.size(); ++size) {
      ASSERT_NE(error_of(bytes.substr(0, size)), "(it loads)") << name << " cut to " << size;
    }
  }
}

TEST(DamagedFile, NoDamagedByteDoesHarm) {
  for (const char* name : {"plain_dict.pth", "legacy.pth", "module_state_dict.pth",
                           "dtype_float8.pth", "views_shared_storage.pth"}) {
    const std::string bytes = golden(name);
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (const char mask : {'\x01', '\x80', '\xff'}) {
        std::string damaged = bytes;
        damaged[at] = static_cast<char>(damaged[at] ^ mask);
        load_and_touch(damaged);
      }
    }
  }
}

TEST(DamagedFile, NoDamagedPickleDoesHarm) {
  for (const std::string& value : {kGood, "ctorch._utils\n_rebuild_parameter\n" + kGood +
                                              "\x88"
                                              "ccollections\nOrderedDict\n)R\x87R"}) {
    const std::string pickle = "\x80\x02}(" + string("w") + value + "u.";
    for (size_t at = 0; at < pickle.size(); ++at) {
      for (int byte = 0; byte < 256; byte += 3) {
        std::string damaged = pickle;
        damaged[at] = static_cast<char>(byte);
        load_and_touch(zip_of({{"data.pkl", damaged}, {"data/0", std::string(24, '\1')}}));
      }
    }
  }
}

}  // namespace
}  // namespace gptfast
