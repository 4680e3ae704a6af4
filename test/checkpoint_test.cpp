#include "gptfast/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint_reader.h"
#include "dtype_names.h"
#include "gptfast/inspect.h"
#include "mount.h"
#include "sha256.h"
#include "zip.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const fs::path kFormats = fs::path(GPTFAST_GOLDEN) / "formats";
const fs::path kPwned =
    "/tmp/gptfast_pwned";  // what the hostile goldens would write if they were run

const json& manifest() {
  static const json parsed = [] {
    json all = json::parse(std::ifstream(kFormats / "manifest.json"));
    all.erase("_about");
    return all;
  }();
  return parsed;
}

StateDict read_as_stored(const fs::path& file) {
  return read_checkpoint(map_file(file), Names::kAsStored, /*records=*/nullptr);
}

std::string sha256(const Tensor& tensor) {
  const Tensor data = tensor.contiguous();
  Sha256 sha;
  sha.update({static_cast<const uint8_t*>(data.const_data_ptr()), data.nbytes()});
  return sha.hex_digest();
}

/// The message of the error that `action` throws; it must be one line.
template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    std::string message = error.what_without_backtrace();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// A folder that goes away with its files.
struct TemporaryFolder {
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "checkpoint_test.XXXXXX").string();
    path = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { fs::remove_all(path); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename());
    return names;
  }
  fs::path path;
};

StateDict every_dtype() {
  StateDict tensors;
  at::manual_seed(1);
  for (const at::ScalarType dtype :
       {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kChar, at::kByte, at::kShort,
        at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kUInt16, at::kUInt32, at::kUInt64,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors.set("layers." + std::string(dtype_name(dtype)), (at::rand({3, 5}) * 100).to(dtype));
  }
  tensors.set("scalar", at::scalar_tensor(2.5));
  tensors.set("empty", at::empty({0, 4}));
  tensors.set("transposed", at::arange(300).view({10, 30}).t());
  tensors.set("\xe4\xb8\xad", at::ones({1}));
  tensors.set("", at::arange(70000, at::kInt));
  return tensors;
}

void expect_equal(const StateDict& a, const StateDict& b) {
  ASSERT_EQ(a.size(), b.size());
  for (auto i = a.begin(), j = b.begin(); i != a.end(); ++i, ++j) {
    EXPECT_EQ(i->first, j->first);
    EXPECT_EQ(i->second.scalar_type(), j->second.scalar_type()) << i->first;
    EXPECT_EQ(i->second.sizes(), j->second.sizes()) << i->first;
    EXPECT_EQ(sha256(i->second), sha256(j->second)) << i->first;
  }
}

// ---- every golden file

std::vector<std::string> golden_files() {
  std::vector<std::string> files;
  for (const auto& [name, entry] : manifest().items()) {
    if (name.ends_with(".pth"))
      files.push_back(name);  // a safetensors companion is there for other readers
  }
  return files;
}

class GoldenFormat : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Manifest, GoldenFormat, testing::ValuesIn(golden_files()),
                         [](const auto& info) {
                           return info.param.substr(0, info.param.size() - 4);
                         });

void expect_tensors(const StateDict& tensors, const json& expected) {
  EXPECT_EQ(tensors.size(), expected.size());
  std::map<int, const void*> storages;
  std::map<const void*, int> ids;
  for (const auto& [name, want] : expected.items()) {
    const Tensor* tensor = tensors.find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(dtype_name(tensor->scalar_type()), want["dtype"]) << name;
    EXPECT_EQ(json(tensor->sizes().vec()), want["shape"]) << name;
    EXPECT_EQ(json(tensor->strides().vec()), want["stride"]) << name;
    EXPECT_EQ(tensor->storage_offset(), want["storage_offset"]) << name;
    EXPECT_EQ(tensor->storage().nbytes(), want["storage_bytes"]) << name;
    EXPECT_EQ(sha256(*tensor), want["sha256"]) << name;
    const int id = want["storage_id"];
    const void* storage = tensor->storage().unsafeGetStorageImpl();
    EXPECT_EQ(storages.emplace(id, storage).first->second, storage)
        << name << " does not share its storage";
    EXPECT_EQ(ids.emplace(storage, id).first->second, id)
        << name << " shares a storage with others";
  }
}

TEST_P(GoldenFormat, BehavesAsTheManifestSays) {
  const json& entry = manifest()[GetParam()];
  const std::string expected = entry["expected"];
  if (expected == "refuse") {
    const std::string message = error_of([] { load_checkpoint(kFormats / GetParam()); });
    EXPECT_EQ(message.find((kFormats / GetParam()).string() + ": "), 0u) << message;
  } else {  // load, or load-or-refuse where this reader loads
    const StateDict tensors = read_as_stored(kFormats / GetParam());
    if (entry.contains("tensors")) expect_tensors(tensors, entry["tensors"]);
  }
  EXPECT_FALSE(fs::exists(kPwned));
}

TEST(LoadCheckpoint, SaysWhatTheFileIs) {
  const std::map<std::string, std::string> words = {{"empty", "is empty"},
                                                    {"trunc_1", "is truncated"},
                                                    {"trunc_half", "is truncated"},
                                                    {"trunc_legacy_minus1", "is truncated"},
                                                    {"html_page", "is an HTML page"},
                                                    {"gitlfs_pointer", "is a Git-LFS pointer"},
                                                    {"json_error", "Repository not found"},
                                                    {"torchscript", "is a TorchScript archive"},
                                                    {"safetensors_renamed",
                                                     "is a safetensors file"},
                                                    {"zeros_4k", "zero bytes"},
                                                    {"unrelated_zip",
                                                     "is a zip archive but no checkpoint"},
                                                    {"evil_os_system", "'posix.system'"},
                                                    {"evil_os_system_legacy", "'posix.system'"},
                                                    {"evil_builtins_eval", "'__builtin__.eval'"},
                                                    {"record_missing", "'emb.weight'"},
                                                    {"record_short", "'steps'"}};
  for (const auto& entry : words) {
    const fs::path file = kFormats / (entry.first + ".pth");
    const std::string message = error_of([&] { load_checkpoint(file); });
    EXPECT_NE(message.find(entry.second), std::string::npos) << message;
  }
}

TEST(LoadCheckpoint, RefusesWhatIsNoRegularFile) {
  const TemporaryFolder folder;
  EXPECT_NE(error_of([&] { load_checkpoint(folder.path / "absent.pth"); }).find("No such file"),
            std::string::npos);
  EXPECT_NE(error_of([&] { load_checkpoint(folder.path); }).find("is a directory"),
            std::string::npos);
  ASSERT_EQ(::mkfifo((folder.path / "pipe").c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { load_checkpoint(folder.path / "pipe"); }).find("not a regular file"),
            std::string::npos);
}

TEST(LoadCheckpoint, UnwrapsModel) {
  const StateDict tensors = load_checkpoint(kFormats / "nested_model_ordered.pth");
  EXPECT_EQ(tensors.begin()->first, "steps");
  EXPECT_TRUE(tensors.contains("layers.1.bias"));
  EXPECT_TRUE(
      read_as_stored(kFormats / "nested_model_ordered.pth").contains("model/layers.1.bias"));
  EXPECT_TRUE(load_checkpoint(kFormats / "mixed_simple.pth").contains("nested/model/steps"));
}

TEST(LoadCheckpoint, TensorsOutliveTheFileAndNeverChangeIt) {
  const TemporaryFolder folder;
  const fs::path file = folder.path / "model.pth";
  StateDict original;
  original.set("w", at::arange(100000, at::kFloat));
  save_checkpoint(file, original);
  Tensor kept = load_checkpoint(file).take("w");
  kept.add_(1);  // copy on write
  EXPECT_TRUE(at::equal(load_checkpoint(file).at("w"), original.at("w")));
  fs::remove(file);
  EXPECT_TRUE(at::equal(kept, original.at("w") + 1));
}

TEST(LoadCheckpoint, ReplacesTheFileItsTensorsComeFrom) {
  const TemporaryFolder folder;
  const fs::path file = folder.path / "model.pth";
  save_checkpoint(file, every_dtype());
  save_checkpoint(file, load_checkpoint(file));
  expect_equal(every_dtype(), load_checkpoint(file));
}

// ---- more than 4 GiB

template <class T>
std::string little_endian(std::initializer_list<T> values) {
  std::string out;
  for (const T value : values) out.append(reinterpret_cast<const char*>(&value), sizeof(T));
  return out;
}

/// Writes a zip whose record data/0 is a hole of `hole` bytes; the other records come behind it.
void write_sparse_zip(const fs::path& file, uint64_t hole,
                      const std::vector<std::pair<std::string, std::string>>& records) {
  std::ofstream out(file, std::ios::binary);
  std::string directory;
  uint64_t count = 0;
  const auto add = [&](const std::string& name, uint64_t size, const std::string* data) {
    const uint64_t header = out.tellp();
    const std::string sizes = little_endian<uint64_t>({size, size});
    const auto name_size = static_cast<uint16_t>(name.size());
    constexpr uint32_t kWide = 0xFFFFFFFF;
    const auto padding = static_cast<uint16_t>(63 - (header + 30 + name.size() + 20 + 4 + 63) % 64);
    out << "PK\x03\x04" << little_endian<uint16_t>({45, 0, 0, 0, 0})
        << little_endian<uint32_t>({0, kWide, kWide})
        << little_endian<uint16_t>({name_size, static_cast<uint16_t>(20 + 4 + padding)}) << name
        << little_endian<uint16_t>({1, 16}) << sizes << little_endian<uint16_t>({0x4246, padding})
        << std::string(padding, 'Z');
    if (data != nullptr) {
      out << *data;
    } else {
      out.seekp(static_cast<std::streamoff>(size), std::ios::cur);
    }
    const uint32_t crc =
        data == nullptr
            ? 0
            : zip::crc32({reinterpret_cast<const uint8_t*>(data->data()), data->size()});
    directory += "PK\x01\x02" + little_endian<uint16_t>({45, 45, 0, 0, 0, 0}) +
                 little_endian<uint32_t>({crc, kWide, kWide}) +
                 little_endian<uint16_t>({name_size, 28, 0, 0, 0}) +
                 little_endian<uint32_t>({0, kWide}) + name + little_endian<uint16_t>({1, 24}) +
                 sizes + little_endian<uint64_t>({header});
    ++count;
  };
  add("archive/data/0", hole, nullptr);
  for (const auto& [name, data] : records) add("archive/" + name, data.size(), &data);
  const uint64_t offset = out.tellp();
  out << directory << "PK\x06\x06" << little_endian<uint64_t>({44})
      << little_endian<uint16_t>({45, 45}) << little_endian<uint32_t>({0, 0})
      << little_endian<uint64_t>({count, count, directory.size(), offset}) << "PK\x06\x07"
      << little_endian<uint32_t>({0}) << little_endian<uint64_t>({offset + directory.size()})
      << little_endian<uint32_t>({1}) << "PK\x05\x06"
      << little_endian<uint16_t>({0, 0, 0xFFFF, 0xFFFF}) << little_endian<uint32_t>({~0u, ~0u})
      << little_endian<uint16_t>({0});
}

std::string pickle_string(const std::string& text) {
  return "X" + little_endian<uint32_t>({static_cast<uint32_t>(text.size())}) + text;
}
std::string pickle_int(int64_t value) {
  return "\x8a\x08" + little_endian<int64_t>({value});
}
std::string pickle_byte_tensor(const std::string& key, int64_t numel) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + pickle_string("storage") +
         "ctorch\nByteStorage\n" + pickle_string(key) + pickle_string("cpu") + pickle_int(numel) +
         "tQ" + pickle_int(0) + pickle_int(numel) + "\x85" + pickle_int(1) + "\x85\x89" +
         "ccollections\nOrderedDict\n)RtR";
}

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST(LoadCheckpoint, MapsMoreThanFourGigabytesWithoutReadingThem) {
  const TemporaryFolder folder;
  const fs::path file = folder.path / "large.pth";
  constexpr int64_t kHole = (int64_t{4} << 30) + (int64_t{1} << 20);
  write_sparse_zip(file, kHole,
                   {{"data/1", "hello"},
                    {"data.pkl", "\x80\x02}(" + pickle_string("large") +
                                     pickle_byte_tensor("0", kHole) + pickle_string("small") +
                                     pickle_byte_tensor("1", 5) + "u."}});
  if (fs::file_size(file) < static_cast<uint64_t>(kHole))
    GTEST_SKIP() << "no room for a sparse file";
  const int64_t before = resident_bytes();
  const StateDict tensors = load_checkpoint(file);
  EXPECT_EQ(tensors.at("large").numel(), kHole);
  EXPECT_EQ(tensors.at("large")[kHole - 1].item<uint8_t>(), 0);
  EXPECT_EQ(tensors.at("small")[4].item<uint8_t>(), 'o');
  EXPECT_LT(resident_bytes() - before, int64_t{16} << 20);
}

// ---- writing

TEST(CheckpointWriter, KeepsOrderDtypesShapesAndValues) {
  const TemporaryFolder folder;
  const fs::path file = folder.path / "model.pth";
  save_checkpoint(file, every_dtype(), {{"note", std::string("a\0b", 3)}, {"empty", ""}});
  std::map<std::string, std::string> records;
  expect_equal(every_dtype(), load_checkpoint(file, &records));
  EXPECT_EQ(records,
            (std::map<std::string, std::string>{{"note", std::string("a\0b", 3)}, {"empty", ""}}));
  EXPECT_EQ(folder.files(), std::vector<std::string>{"model.pth"});
}

TEST(CheckpointWriter, WritesEveryGoldenFileThatLoads) {
  const TemporaryFolder folder;
  for (const std::string& file : golden_files()) {
    if (manifest()[file]["expected"] == "refuse") continue;
    const StateDict tensors = read_as_stored(kFormats / file);
    save_checkpoint(folder.path / file, tensors);
    expect_equal(tensors, read_as_stored(folder.path / file));
  }
}

TEST(CheckpointWriter, AlignsTensorsAndIsReproducible) {
  const TemporaryFolder folder;
  save_checkpoint(folder.path / "a.pth", every_dtype());
  save_checkpoint(folder.path / "b.pth", every_dtype());
  const FileBytes a = map_file(folder.path / "a.pth"), b = map_file(folder.path / "b.pth");
  EXPECT_TRUE(std::equal(a.bytes().begin(), a.bytes().end(), b.bytes().begin(), b.bytes().end()));
  const zip::Reader archive(a.bytes());
  for (const std::string_view name : archive.names()) {
    const zip::Record record = archive.read(name);
    EXPECT_EQ((record.data.data() - a.owner.get()) % 64, 0) << name;
    EXPECT_EQ(zip::crc32(record.data), record.crc) << name;
  }
}

TEST(CheckpointWriter, IsReadByLibTorch) {
  const TemporaryFolder folder;
  StateDict tensors;  // LibTorch's reader has no dtypes that are saved untyped
  for (const auto& [name, tensor] : every_dtype()) {
    if (!storage_class(tensor.scalar_type()).empty()) tensors.set(name, tensor);
  }
  save_checkpoint(folder.path / "model.pth", tensors);
  std::ifstream in(folder.path / "model.pth", std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(in), {});
  StateDict read;
  for (const auto& item : torch::jit::pickle_load(bytes).toGenericDict()) {
    read.set(item.key().toStringRef(), item.value().toTensor());
  }
  expect_equal(tensors, read);
}

// The interpreter that LibTorch's wheel belongs to, else the system's.
std::string python() {
  const fs::path own = fs::path(GPTFAST_TORCH_ROOT) / "../../../../bin/python";
  return fs::exists(own) ? own.string() : "python3";
}

TEST(CheckpointWriter, IsReadByPython) {
  const TemporaryFolder folder;
  save_checkpoint(folder.path / "model.pth", every_dtype(), {{"note", "ignored"}});
  std::ofstream(folder.path / "read.py") << R"(
import hashlib, json, sys
try:
    import torch
except ImportError:
    sys.exit(77)
for mmap in (False, True):
    tensors = torch.load(sys.argv[1], weights_only=True, mmap=mmap)
    assert type(tensors) is dict
    for name, t in tensors.items():
        data = bytes(t.contiguous().untyped_storage())[:t.nbytes]
        print(json.dumps([name, str(t.dtype)[6:], list(t.shape), hashlib.sha256(data).hexdigest()]))
)";
  const std::string command = python() + " " + (folder.path / "read.py").string() + " " +
                              (folder.path / "model.pth").string() + " > " +
                              (folder.path / "out").string();
  const int status = std::system(command.c_str());
  const int exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (exit_code == 77 || exit_code == 127) GTEST_SKIP() << "no Python with torch";
  ASSERT_EQ(exit_code, 0);
  std::ifstream out(folder.path / "out");
  std::string line;
  for (int pass = 0; pass < 2; ++pass) {
    for (const auto& [name, tensor] : every_dtype()) {
      ASSERT_TRUE(std::getline(out, line)) << name;
      EXPECT_EQ(json::parse(line), json({name, dtype_name(tensor.scalar_type()),
                                         tensor.sizes().vec(), sha256(tensor)}));
    }
  }
  EXPECT_FALSE(std::getline(out, line)) << line;
}

TEST(CheckpointWriter, ShowsNothingBeforeTheEnd) {
  const TemporaryFolder folder;
  const fs::path file = folder.path / "model.pth";
  {
    CheckpointWriter writer(file);
    writer.add("w", at::ones({1000}));
    EXPECT_FALSE(fs::exists(file));
  }
  EXPECT_TRUE(folder.files().empty());
}

TEST(CheckpointWriter, RefusesANameTwiceAndKeepsTheOldFile) {
  const TemporaryFolder folder;
  const fs::path file = folder.path / "model.pth";
  save_checkpoint(file, every_dtype());
  {
    CheckpointWriter writer(file);
    writer.add("w", at::ones({2}));
    EXPECT_NE(error_of([&] {
                writer.add("w", at::ones({2}));
              }).find("two tensors have the name 'w'"),
              std::string::npos);
    EXPECT_NE(error_of([&] { writer.finish(); }).find("after the end or a failure"),
              std::string::npos);
  }
  expect_equal(every_dtype(), load_checkpoint(file));
  EXPECT_EQ(folder.files().size(), 1u);
}

TEST(CheckpointWriter, FollowsALinkAndRefusesOtherTargets) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path / "store");
  save_checkpoint(folder.path / "store" / "real.pth", every_dtype());
  fs::create_symlink("store/real.pth", folder.path / "link.pth");
  StateDict one;
  one.set("w", at::ones({1}));
  save_checkpoint(folder.path / "link.pth", one);
  EXPECT_TRUE(fs::is_symlink(folder.path / "link.pth"));
  expect_equal(one, load_checkpoint(folder.path / "store" / "real.pth"));
  EXPECT_NE(error_of([&] { save_checkpoint(folder.path / "store", one); }).find("is a directory"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              save_checkpoint(folder.path / "no" / "x.pth", one);
            }).find("No such file"),
            std::string::npos);
  EXPECT_NE(error_of([&] { save_checkpoint("/dev/null", one); }).find("not a regular file"),
            std::string::npos);
}

TEST(CheckpointWriter, SaysThatTheDiskIsFull) {
  const TemporaryFolder folder;
  const Mount disk(folder.path, 0, "size=1m");
  if (!disk.mounted) GTEST_SKIP() << "only root can mount a small disk";
  const fs::path file = folder.path / "model.pth";
  StateDict small, large;
  small.set("w", at::ones({10}));
  large.set("w", at::ones({1 << 20}));
  save_checkpoint(file, small);
  const std::string message = error_of([&] { save_checkpoint(file, large); });
  EXPECT_NE(message.find("model.pth: cannot be written: No space left on device"),
            std::string::npos)
      << message;
  expect_equal(small, load_checkpoint(file));
  EXPECT_EQ(folder.files().size(), 1u);
}

TEST(CheckpointWriter, SaysThatTheFolderIsReadOnly) {
  const TemporaryFolder folder;
  const Mount disk(folder.path, MS_RDONLY, "size=1m");
  if (!disk.mounted) {
    if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere and cannot mount here";
    fs::permissions(folder.path, fs::perms::owner_read | fs::perms::owner_exec);
  }
  const std::string message =
      error_of([&] { save_checkpoint(folder.path / "model.pth", every_dtype()); });
  EXPECT_NE(message.find("model.pth: cannot be written: "), std::string::npos) << message;
  if (!disk.mounted) fs::permissions(folder.path, fs::perms::owner_all);
}

// ---- StateDict and inspect

TEST(StateDict, KeepsOrder) {
  StateDict tensors;
  for (const char* name : {"c", "a", "b"}) tensors.set(name, at::ones({1}));
  tensors.set("a", at::zeros({1}));
  EXPECT_EQ(tensors.at("a").item<float>(), 0);
  tensors.take("c");
  EXPECT_FALSE(tensors.contains("c"));
  EXPECT_EQ(tensors.begin()->first, "a");
  tensors.set("c", at::ones({1}));
  EXPECT_EQ(std::prev(tensors.end())->first, "c");
  EXPECT_EQ(tensors.at("b").item<float>(), 1);
  EXPECT_EQ(tensors.size(), 3u);
  EXPECT_NE(error_of([&] { tensors.at("z"); }).find("'z'"), std::string::npos);
  EXPECT_NE(error_of([&] { tensors.take("z"); }).find("'z'"), std::string::npos);
}

TEST(Inspect, ListsWhatTheManifestLists) {
  for (const std::string& file : golden_files()) {
    const json& entry = manifest()[file];
    if (!entry.contains("tensors")) continue;
    std::ostringstream out;
    inspect(kFormats / file, /*hash=*/true, /*as_json=*/true, out);
    const std::string text = out.str();
    EXPECT_EQ(text.find('\n'), text.size() - 1);
    const json listed = json::parse(text)["tensors"];
    ASSERT_EQ(listed.size(), entry["tensors"].size()) << file;
    for (const json& tensor : listed) {
      const json& want = entry["tensors"][tensor["name"].get<std::string>()];
      for (const char* key : {"dtype", "shape", "stride", "sha256"})
        EXPECT_EQ(tensor[key], want[key]) << file;
    }
  }
}

TEST(Inspect, WritesATable) {
  std::ostringstream out;
  inspect(kFormats / "one_entry.pth", /*hash=*/false, /*as_json=*/false, out);
  EXPECT_EQ(out.str(),
            "name  dtype          shape   stride  bytes\n"
            "only  float32        [3, 2]  [2, 1]  24\n"
            "1 tensors, 24 bytes\n");
}

TEST(Sha256, KnownDigests) {
  const auto digest = [](const std::string& text, size_t times) {
    Sha256 sha;
    for (size_t i = 0; i < times; ++i)
      sha.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    return sha.hex_digest();
  };
  EXPECT_EQ(digest("", 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc", 1), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("aaaaaaaaaa", 100000),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace
}  // namespace gptfast
