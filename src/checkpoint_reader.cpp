#include "checkpoint_reader.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>

#include "dtype_names.h"
#include "pickle.h"
#include "zip.h"

namespace gptfast {
namespace {

using pickle::Kind;
using pickle::Node;
using pickle::Program;
using pickle::Ref;

constexpr size_t kMaxPickleSize = size_t{64} << 20;   // a thousand tensors take 100 KB
constexpr size_t kMaxRecordsSize = size_t{64} << 20;  // our extra records are notes, not data
constexpr size_t kMaxNamesSize = size_t{64} << 20;
constexpr size_t kMaxVisits = size_t{4}
                              << 20;  // items in all containers, shared ones counted each time
constexpr size_t kMaxDepth = 1000;    // of nested containers; Python's own limit
constexpr size_t kMaxDims = 64;
constexpr std::string_view kLegacyMagic("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 10);
constexpr int64_t kLegacyProtocol = 1001;

// Globals that are no dtype and no storage class. The machine calls none of them; the first five
// become tensors here, the others stand for values that are skipped.
constexpr std::string_view kGlobals[] = {"torch._utils._rebuild_tensor",
                                         "torch._utils._rebuild_tensor_v2",
                                         "torch._utils._rebuild_tensor_v3",
                                         "torch._utils._rebuild_parameter",
                                         "torch._utils._rebuild_parameter_with_state",
                                         "collections.OrderedDict",
                                         "collections.Counter",
                                         "torch.Size",
                                         "torch.device",
                                         "torch.serialization._get_layout",
                                         "_codecs.encode",
                                         "builtins.set",
                                         "builtins.frozenset",
                                         "builtins.bytearray",
                                         "builtins.complex",
                                         "__builtin__.set",
                                         "__builtin__.frozenset",
                                         "__builtin__.bytearray",
                                         "__builtin__.complex"};

bool allowed_global(std::string_view name) {
  return std::find(std::begin(kGlobals), std::end(kGlobals), name) != std::end(kGlobals) ||
         dtype_of_global(name) || dtype_of_storage_class(name);
}

// A storage as the pickle names it: its key in the archive, and how many elements of which type it
// must hold.
struct StorageId {
  std::string_view key;
  at::ScalarType dtype = at::kByte;
  size_t nbytes = 0;
};

StorageId storage_id(const Program& program, Ref ref) {
  const Node& persistent = program[ref];
  TORCH_CHECK(persistent.kind == Kind::kPersistent, "a tensor of its pickle has no storage");
  const Node& id = program[persistent.items[0]];
  TORCH_CHECK(id.kind == Kind::kTuple && id.items.size() >= 5 &&
                  program[id.items[0]].text == "storage" &&
                  program[id.items[1]].kind == Kind::kGlobal &&
                  program[id.items[2]].kind == Kind::kString &&
                  program[id.items[4]].kind == Kind::kInt,
              "its pickle describes a storage in an unknown way");
  TORCH_CHECK(id.items.size() == 5 || program[id.items[5]].kind == Kind::kNone,
              "it holds views of storages, as PyTorch before 0.4 wrote them; load and save it "
              "again with a newer Python torch");
  const auto dtype = dtype_of_storage_class(program[id.items[1]].text);
  TORCH_CHECK(dtype, "its pickle gives '", program[id.items[1]].text, "' as the type of a storage");
  const int64_t numel = program[id.items[4]].integer;
  size_t nbytes = 0;
  TORCH_CHECK(numel >= 0 && !__builtin_mul_overflow(static_cast<size_t>(numel),
                                                    c10::elementSize(*dtype), &nbytes),
              "a storage of its pickle has ", numel, " elements");
  return {program[id.items[2]].text, *dtype, nbytes};
}

// Where a view of a storage lies, checked: every element inside the storage, in arithmetic that
// cannot overflow.
struct Geometry {
  int64_t offset = 0;
  std::vector<int64_t> sizes, strides;
};

std::vector<int64_t> integers(const Program& program, Ref ref) {
  if (program[ref].kind == Kind::kCall) {  // torch.Size((2, 3))
    const auto& arguments = program[program[ref].items[1]].items;
    if (arguments.size() == 1) ref = arguments[0];
  }
  const Node& tuple = program[ref];
  TORCH_CHECK((tuple.kind == Kind::kTuple || tuple.kind == Kind::kList) &&
                  tuple.items.size() <= kMaxDims,
              "a tensor's shape is no tuple of at most ", kMaxDims, " numbers");
  std::vector<int64_t> values;
  for (const Ref item : tuple.items) {
    TORCH_CHECK(program[item].kind == Kind::kInt && program[item].integer >= 0,
                "a size or stride of a tensor is no number from 0 to 2^63 - 1");
    values.push_back(program[item].integer);
  }
  return values;
}

// `elements`: what the storage holds. `limit`: the most elements a tensor may have; a view with
// stride 0 can claim any number.
void check_geometry(const Geometry& g, size_t elements, size_t limit) {
  TORCH_CHECK(g.sizes.size() == g.strides.size(), "a tensor has ", g.sizes.size(), " sizes but ",
              g.strides.size(), " strides");
  size_t numel = 1;
  size_t nonzero_numel = 1;
  size_t last = static_cast<size_t>(g.offset);
  bool fits = true;
  for (size_t i = 0; i < g.sizes.size(); ++i) {
    const auto size = static_cast<size_t>(g.sizes[i]);
    size_t reach = 0;
    fits =
        fits && !__builtin_mul_overflow(nonzero_numel, std::max<size_t>(size, 1), &nonzero_numel);
    numel = size == 0 ? 0 : numel;
    fits = fits &&
           !__builtin_mul_overflow(size == 0 ? 0 : size - 1, static_cast<size_t>(g.strides[i]),
                                   &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  fits = fits && nonzero_numel <= static_cast<size_t>(INT64_MAX) &&
         (numel == 0 ? static_cast<size_t>(g.offset) <= elements : last < elements);
  TORCH_CHECK(fits, "a tensor of shape ", at::IntArrayRef(g.sizes), ", strides ",
              at::IntArrayRef(g.strides), " and offset ", g.offset, " does not fit its storage of ",
              elements, " elements");
  TORCH_CHECK(numel == 0 || nonzero_numel <= limit, "a tensor of shape ", at::IntArrayRef(g.sizes),
              " is larger than the whole file");
}

/// Deleter of storages that lie in the mapped file; tells them from others.
void release_mapping(void* owner) {
  delete static_cast<std::shared_ptr<uint8_t>*>(owner);
}

/// Makes tensors of the calls in a pickle. Tensors that name the same storage share it.
class TensorBuilder {
 public:
  using FindStorage = std::function<Bytes(const StorageId&)>;
  TensorBuilder(const Program& program, const FileBytes& file, FindStorage find)
      : program_(program), file_(file), find_(std::move(find)) {}

  bool is_tensor(Ref ref) const {
    return program_[ref].kind == Kind::kCall && callee(ref).starts_with("torch._utils._rebuild_");
  }
  Tensor tensor(Ref ref) {
    // Depth 1: a Parameter around a tensor.
    const bool parameter = callee(ref).starts_with("torch._utils._rebuild_parameter");
    if (!parameter) return rebuild(ref);
    const Ref data = argument(ref, 0);
    TORCH_CHECK(is_tensor(data) && callee(data).starts_with("torch._utils._rebuild_tensor"),
                "a Parameter holds no tensor");
    return rebuild(data);
  }

 private:
  std::string_view callee(Ref ref) const { return program_[program_[ref].items[0]].text; }
  Ref argument(Ref ref, size_t i) const {
    const auto& arguments = program_[program_[ref].items[1]].items;
    TORCH_CHECK(i < arguments.size(), "its pickle calls '", callee(ref), "' with ",
                arguments.size(), " arguments");
    return arguments[i];
  }
  bool has_argument(Ref ref, size_t i) const {
    return i < program_[program_[ref].items[1]].items.size();
  }

  Tensor rebuild(Ref ref) {
    const bool untyped = callee(ref).ends_with("_v3");
    const StorageId id = storage_id(program_, argument(ref, 0));
    at::ScalarType dtype = id.dtype;
    if (untyped) {
      const auto named = dtype_of_global(program_[argument(ref, 6)].text);
      TORCH_CHECK(program_[argument(ref, 6)].kind == Kind::kGlobal && named,
                  "a tensor's dtype is none");
      dtype = *named;
    }
    const at::Storage& storage = find_storage(id);
    const Node& offset = program_[argument(ref, 1)];
    TORCH_CHECK(offset.kind == Kind::kInt && offset.integer >= 0,
                "a tensor's storage offset is no number from 0 to 2^63 - 1");
    const Geometry g{offset.integer, integers(program_, argument(ref, 2)),
                     integers(program_, argument(ref, 3))};
    check_geometry(g, id.nbytes / c10::elementSize(dtype), file_.size / c10::elementSize(dtype));
    Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype));
    tensor.set_(storage, g.offset, g.sizes, g.strides);
    set_bits(tensor, ref, untyped ? 7 : 6);
    return tensor;
  }

  // Lazy conjugation and negation are bits beside the data.
  void set_bits(const Tensor& tensor, Ref ref, size_t index) const {
    if (!has_argument(ref, index) || program_[argument(ref, index)].kind != Kind::kDict) return;
    const auto& items = program_[argument(ref, index)].items;
    for (size_t i = 0; i < items.size(); i += 2) {
      const bool on = program_[items[i + 1]].integer != 0;
      const std::string_view key = program_[items[i]].text;
      if (key == "conj" && tensor.is_complex()) tensor.unsafeGetTensorImpl()->_set_conj(on);
      if (key == "neg") tensor.unsafeGetTensorImpl()->_set_neg(on);
    }
  }

  const at::Storage& find_storage(const StorageId& id) {
    const Bytes data = find_(id);
    TORCH_CHECK(data.size() == id.nbytes, "the storage '", id.key, "' has ", data.size(),
                " bytes, its tensors need ", id.nbytes, "; the file is damaged");
    const auto found = storages_.find(id.key);
    if (found != storages_.end()) return found->second;
    return storages_.emplace(id.key, make_storage(data)).first->second;
  }

  at::Storage make_storage(Bytes data) {
    // Storages that the file does not align as torch.save does (legacy files, archives that another
    // tool wrote) cannot be used in place: kernels load vectors from them.
    if (reinterpret_cast<uintptr_t>(data.data()) % zip::kDataAlignment != 0)
      return copy_storage(data);
    auto* owner = new std::shared_ptr<uint8_t>(file_.owner);
    auto* address = const_cast<uint8_t*>(data.data());  // the mapping is private and writable
    at::DataPtr pointer(address, owner, release_mapping, at::kCPU);
    return at::Storage(at::Storage::use_byte_size_t(), data.size(), std::move(pointer));
  }

  at::Storage copy_storage(Bytes data) {
    copied_ += data.size();
    TORCH_CHECK(copied_ <= file_.size, "its records overlap");
    at::Storage storage(at::Storage::use_byte_size_t(), data.size(), at::getCPUAllocator());
    auto* out = static_cast<uint8_t*>(storage.mutable_data());
    constexpr size_t kChunk = size_t{16} << 20;
    while (!data.empty()) {  // in steps, so that the file and its copy are not both in memory
      const Bytes chunk = data.first(std::min(kChunk, data.size()));
      std::memcpy(out, chunk.data(), chunk.size());
      release_pages(file_, chunk);
      out += chunk.size();
      data = data.subspan(chunk.size());
    }
    return storage;
  }

  const Program& program_;
  const FileBytes& file_;
  FindStorage find_;
  std::map<std::string_view, at::Storage> storages_;
  size_t copied_ = 0;
};

/// Gives every tensor below a node its path as a name.
class Flattener {
 public:
  Flattener(const Program& program, TensorBuilder& builder)
      : program_(program), builder_(builder), active_(program.nodes.size()) {}

  StateDict run(Ref root) {
    visit(root);
    return std::move(tensors_);
  }
  /// The dict under "model" when the tensors of `root` are in there: what training scripts save.
  Ref unwrap(Ref root) const {
    if (program_[root].kind != Kind::kDict) return root;
    Ref inner = root;
    for (const auto& [key, value] : last_entries(program_[root])) {
      if (builder_.is_tensor(value)) return root;
      if (program_[key].kind == Kind::kString && program_[key].text == "model" &&
          program_[value].kind == Kind::kDict)
        inner = value;
    }
    const auto entries = last_entries(program_[inner]);
    const bool holds_tensors =
        std::any_of(entries.begin(), entries.end(),
                    [this](const Entry& entry) { return builder_.is_tensor(entry.second); });
    return holds_tensors ? inner : root;
  }

 private:
  using Entry = std::pair<Ref, Ref>;

  // As in Python, a key that comes again keeps its place and takes the later value.
  std::vector<Entry> last_entries(const Node& dict) const {
    std::vector<Entry> entries;
    std::map<std::tuple<Kind, int64_t, std::string_view>, size_t> places;
    for (size_t i = 0; i < dict.items.size(); i += 2) {
      const Node& key = program_[dict.items[i]];
      const bool named = key.kind == Kind::kString || key.kind == Kind::kInt;
      const auto [place, fresh] =
          named ? places.emplace(std::tuple(key.kind, key.integer, key.text), entries.size())
                : std::pair(places.end(), true);
      if (fresh) {
        entries.emplace_back(dict.items[i], dict.items[i + 1]);
      } else {
        entries[place->second].second = dict.items[i + 1];
      }
    }
    return entries;
  }

  void visit(Ref ref) {
    const Node& node = program_[ref];
    visits_ += 1 + node.items.size();
    TORCH_CHECK(visits_ <= kMaxVisits, "its pickle holds more than ", kMaxVisits, " values");
    if (builder_.is_tensor(ref)) {
      add(ref);
    } else if (node.kind == Kind::kDict || node.kind == Kind::kList || node.kind == Kind::kTuple) {
      TORCH_CHECK(!active_[ref], "its pickle holds a container that contains itself");
      TORCH_CHECK(path_.size() < kMaxDepth, "its pickle nests containers more than ", kMaxDepth,
                  " deep");
      active_[ref] = true;
      visit_items(node);
      active_[ref] = false;
    }
  }
  void visit_items(const Node& node) {
    const auto visit_below = [this](std::optional<std::string> part, Ref value) {
      path_.push_back(std::move(part));
      visit(value);
      path_.pop_back();
    };
    if (node.kind != Kind::kDict) {
      for (size_t i = 0; i < node.items.size(); ++i) visit_below(std::to_string(i), node.items[i]);
      return;
    }
    for (const auto& [key, value] : last_entries(node)) visit_below(key_name(program_[key]), value);
  }
  static std::optional<std::string> key_name(const Node& key) {
    if (key.kind == Kind::kString) return std::string(key.text);
    if (key.kind == Kind::kInt) return std::to_string(key.integer);
    return std::nullopt;
  }
  std::string name() const {
    std::string name;
    for (size_t i = 0; i < path_.size(); ++i) {
      TORCH_CHECK(path_[i], "a tensor below '", name,
                  "' has a dict key that is neither text nor a whole number");
      name += (i > 0 ? "/" : "") + *path_[i];
    }
    return name;
  }

  void add(Ref ref) {
    const std::string name = this->name();
    names_size_ += name.size();
    TORCH_CHECK(names_size_ <= kMaxNamesSize, "the names of its tensors take more than ",
                kMaxNamesSize, " bytes");
    TORCH_CHECK(!tensors_.contains(name), "two tensors have the name '", name, "'");
    try {
      tensors_.set(name, builder_.tensor(ref));
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "tensor '", name, "': ", error.what_without_backtrace());
    }
  }

  const Program& program_;
  TensorBuilder& builder_;
  std::vector<bool> active_;
  std::vector<std::optional<std::string>> path_;  // nullopt: a key that makes no name
  StateDict tensors_;
  size_t visits_ = 0;
  size_t names_size_ = 0;
};

StateDict tensors_of(const Program& program, TensorBuilder& builder, Names names) {
  Flattener flattener(program, builder);
  return flattener.run(names == Names::kStateDict ? flattener.unwrap(program.root) : program.root);
}

void read_extra_records(const zip::Reader& archive, const std::string& prefix,
                        std::map<std::string, std::string>& records) {
  size_t total = 0;
  for (const std::string_view name : archive.names()) {
    const std::string folder = prefix + "extra/";
    if (!name.starts_with(folder)) continue;
    const Bytes data = archive.read(name).data;
    total += data.size();
    TORCH_CHECK(total <= kMaxRecordsSize, "its extra records take more than ", kMaxRecordsSize,
                " bytes");
    records[std::string(name.substr(folder.size()))].assign(reinterpret_cast<const char*>(
                                                                data.data()),
                                                            data.size());
  }
}

StateDict read_zip(const FileBytes& file, Names names,
                   std::map<std::string, std::string>* records) {
  const zip::Reader archive(file.bytes());
  const std::string_view first = archive.first_name();
  const size_t slash = first.find('/');
  const std::string prefix(slash == std::string_view::npos ? "" : first.substr(0, slash + 1));
  TORCH_CHECK(!archive.contains(prefix + "constants.pkl"),
              "is a TorchScript archive, a program with its weights; expected weights alone. In "
              "Python, save "
              "torch.jit.load(FILE).state_dict() with torch.save");
  TORCH_CHECK(archive.contains(prefix + "data.pkl"),
              "is a zip archive but no checkpoint: it has no record 'data.pkl'");
  if (archive.contains(prefix + "byteorder")) {
    const Bytes order = archive.read(prefix + "byteorder").data;
    TORCH_CHECK(std::string_view(reinterpret_cast<const char*>(order.data()), order.size()) ==
                    "little",
                "was written on a big-endian machine; load and save it again with Python");
  }
  const zip::Record data_pkl = archive.read(prefix + "data.pkl");
  TORCH_CHECK(data_pkl.data.size() <= kMaxPickleSize, "its pickle has ", data_pkl.data.size(),
              " bytes; at most ", kMaxPickleSize, " are expected");
  // Zero: Python was told to write none (torch.serialization.set_crc32_options(False)).
  TORCH_CHECK(data_pkl.crc == 0 || zip::crc32(data_pkl.data) == data_pkl.crc,
              "the checksum of its pickle is wrong: the file is damaged");
  const Program program = pickle::parse(data_pkl.data, allowed_global);
  TensorBuilder builder(program, file, [&](const StorageId& id) {
    TORCH_CHECK(id.key.size() <= 256, "a storage's key is too long");
    return archive.read(prefix + "data/" + std::string(id.key)).data;
  });
  StateDict tensors = tensors_of(program, builder, names);
  if (records != nullptr) read_extra_records(archive, prefix, *records);
  return tensors;
}

// The format before zip: five pickles (magic number, protocol, machine, object, storage keys), then
// for each key the number of elements and the elements (torch/serialization.py, _legacy_load).
class LegacyReader {
 public:
  explicit LegacyReader(const FileBytes& file) : file_(file) {}

  StateDict read(Names names) {
    const Program magic = next();
    TORCH_CHECK(magic[magic.root].text == kLegacyMagic, "is a pickle, but not one of torch.save");
    const Program protocol = next();
    TORCH_CHECK(protocol[protocol.root].integer == kLegacyProtocol, "has version ",
                protocol[protocol.root].integer, " of the legacy format; only ", kLegacyProtocol,
                " is known");
    const Program machine = next();
    const auto& items = machine[machine.root].items;
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      TORCH_CHECK(machine[items[i]].text != "little_endian" || machine[items[i + 1]].integer != 0,
                  "was written on a big-endian machine; load and save it again with Python");
    }
    const Program program = next();
    const Program keys = next();
    locate(program, keys);
    TensorBuilder builder(program, file_, [this](const StorageId& id) {
      const auto found = storages_.find(id.key);
      TORCH_CHECK(found != storages_.end(), "the storage '", id.key, "' is not in the file");
      return found->second;
    });
    return tensors_of(program, builder, names);
  }

 private:
  Program next() {
    const Bytes rest = file_.bytes().subspan(at_);
    Program program =
        pickle::parse(rest.first(std::min(rest.size(), kMaxPickleSize)), allowed_global);
    at_ += program.size;
    return program;
  }

  // Finds each storage's bytes; sizes of elements are only known from the tensors' side.
  void locate(const Program& program, const Program& keys) {
    std::map<std::string_view, size_t> element_size;
    for (Ref ref = 0; ref < program.nodes.size(); ++ref) {
      if (program[ref].kind != Kind::kPersistent) continue;
      const StorageId id = storage_id(program, ref);
      const size_t size = c10::elementSize(id.dtype);
      TORCH_CHECK(element_size.emplace(id.key, size).first->second == size, "the storage '", id.key,
                  "' has two types");
    }
    for (const Ref ref : keys[keys.root].items) {
      const std::string_view key = keys[ref].text;
      const auto known = element_size.find(key);
      TORCH_CHECK(known != element_size.end(), "the storage '", key, "' belongs to no tensor");
      const Bytes rest = file_.bytes().subspan(at_);
      uint64_t numel = 0;
      TORCH_CHECK(rest.size() >= sizeof(numel), "is truncated: its last storages are missing");
      std::memcpy(&numel, rest.data(), sizeof(numel));
      TORCH_CHECK(numel <= (rest.size() - sizeof(numel)) / known->second,
                  "is truncated: the storage '", key, "' has ", numel, " elements of ",
                  known->second, " bytes, only ", rest.size() - sizeof(numel), " bytes are left");
      const size_t nbytes = numel * known->second;
      TORCH_CHECK(storages_.emplace(std::string(key), rest.subspan(sizeof(numel), nbytes)).second,
                  "the storage '", key, "' comes twice");
      at_ += sizeof(numel) + nbytes;
    }
  }

  const FileBytes& file_;
  size_t at_ = 0;
  std::map<std::string, Bytes, std::less<>> storages_;
};

std::string printable(Bytes bytes, size_t limit) {
  std::string out;
  for (const uint8_t byte : bytes.first(std::min(bytes.size(), limit))) {
    out += std::isprint(byte) != 0 ? static_cast<char>(byte) : '.';
  }
  return out;
}

bool is_safetensors(Bytes file) {
  uint64_t header_size = 0;
  if (file.size() < 10) return false;
  std::memcpy(&header_size, file.data(), sizeof(header_size));
  return header_size >= 2 && header_size <= file.size() && file[8] == '{';
}

}  // namespace

std::string describe_foreign_file(Bytes file) {
  constexpr size_t kHead = 4096;
  const std::string_view head(reinterpret_cast<const char*>(file.data()),
                              std::min(file.size(), kHead));
  std::string start;  // of the text, lower case
  for (const char c :
       head.substr(std::min(head.find_first_not_of(" \t\r\n\xef\xbb\xbf"), head.size()))
           .substr(0, 64)) {
    start += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (std::string_view("PK\x03\x04").starts_with(head))
    return "is truncated: it has only " + std::to_string(file.size()) + " bytes";
  if (head.find_first_not_of('\0') == std::string_view::npos)
    return "begins with zero bytes: it was never completely written; download it again";
  if (start.starts_with("<!doctype") || start.starts_with("<html") || start.starts_with("<?xml")) {
    return "is an HTML page, not a checkpoint; the download went wrong (a login or an error page?)";
  }
  if (start.starts_with("version https://git-lfs")) {
    return "is a Git-LFS pointer, not the file itself; run `git lfs pull` in its repository";
  }
  if (is_safetensors(file))
    return "is a safetensors file, not a .pth; convert it with the program `convert`";
  if (head.starts_with("GGUF"))
    return "is a GGUF file, not a .pth; convert it with the program `convert`";
  if (head.size() > 262 && head.substr(257, 5) == "ustar") {
    return "has the tar format of PyTorch before 0.1.10; load and save it again with Python";
  }
  if (start.starts_with("{") || start.starts_with("["))
    return "is text, not a checkpoint: " + printable(file, 80);
  return "is no checkpoint of torch.save; it begins with '" + printable(file, 16) + "'";
}

StateDict read_checkpoint(const FileBytes& file, Names names,
                          std::map<std::string, std::string>* records) {
  const Bytes bytes = file.bytes();
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()),
                              std::min<size_t>(bytes.size(), 4));
  if (head == "PK\x03\x04" || head == "PK\x05\x06") return read_zip(file, names, records);
  constexpr char kPickleProtocol = '\x80';
  if (head.starts_with(kPickleProtocol)) return LegacyReader(file).read(names);
  TORCH_CHECK(false, describe_foreign_file(bytes));
}

void release_pages(const Tensor& tensor) {
  if (!tensor.has_storage() || tensor.storage().data_ptr().get_deleter() != release_mapping) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto* begin = static_cast<uint8_t*>(const_cast<void*>(tensor.const_data_ptr()));
  const size_t extent =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  // Whole pages only: the bytes beside them belong to other tensors.
  const size_t before = (page - reinterpret_cast<uintptr_t>(begin) % page) % page;
  if (extent <= before) return;
  madvise(begin + before, (extent - before) / page * page, MADV_DONTNEED);
}

}  // namespace gptfast
