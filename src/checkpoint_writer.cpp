// What torch.save writes, tensor by tensor: the storages first, then the pickle that names them.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <map>
#include <set>

#include "dtype_names.h"
#include "gptfast/checkpoint.h"
#include "output_file.h"
#include "zip.h"

namespace gptfast {
namespace {

constexpr std::string_view kPrefix = "archive/";

Bytes as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

/// The pickle (protocol 2) of a dict of tensors. LibTorch's reader takes it too, which is why long
/// numbers have 8 bytes.
class PickleWriter {
 public:
  PickleWriter() { out_ = "\x80\x02}("; }

  void add(const std::string& name, const Tensor& tensor, const std::string& key) {
    const std::string_view storage = storage_class(tensor.scalar_type());
    string(name);
    global("torch._utils", storage.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    out_ += "((";
    string("storage");
    if (storage.empty()) {
      global("torch.storage", "UntypedStorage");
    } else {
      global("torch", storage);
    }
    string(key);
    string("cpu");
    integer(storage.empty() ? static_cast<int64_t>(tensor.nbytes()) : tensor.numel());
    out_ += "tQ";
    integer(0);
    tuple(tensor.sizes());
    tuple(tensor.strides());
    out_ += '\x89';  // requires_grad: False
    global("collections", "OrderedDict");
    out_ += ")R";  // no hooks
    if (storage.empty()) global("torch", dtype_name(tensor.scalar_type()));
    out_ += "tR";
  }
  std::string finish() { return std::move(out_) + "u."; }

 private:
  template <class T>
  void raw(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void string(std::string_view text) {
    out_ += 'X';
    raw(static_cast<uint32_t>(text.size()));
    out_ += text;
  }
  void global(std::string_view module, std::string_view name) {
    out_ += 'c';
    (out_ += module) += '\n';
    (out_ += name) += '\n';
  }
  void integer(int64_t value) {
    if (value >= 0 && value < 256) {
      out_ += 'K';
      raw(static_cast<uint8_t>(value));
    } else if (value == static_cast<int32_t>(value)) {
      out_ += 'J';
      raw(static_cast<int32_t>(value));
    } else {
      out_ += "\x8a\x08";
      raw(value);
    }
  }
  void tuple(at::IntArrayRef values) {
    out_ += '(';
    for (const int64_t value : values) integer(value);
    out_ += 't';
  }

  std::string out_;
};

struct Saved {
  std::string key;  // of the storage
  Tensor outline;   // shape, strides and dtype, without data
};

}  // namespace

struct CheckpointWriter::Impl {
  explicit Impl(const std::filesystem::path& target)
      : file(target),
        output(target),
        archive([this](Bytes bytes, uint64_t offset) { output.write(bytes, offset); }) {}

  // A change that throws leaves the writer closed: what it wrote is of no use any more.
  void begin() {
    TORCH_CHECK(open, file.string(), ": nothing can be written after the end or a failure");
    open = false;
  }
  void add_record(std::string_view name, Bytes data) {
    std::string path(kPrefix);
    path += name;
    archive.add(path, data);
  }

  std::filesystem::path file;
  OutputFile output;
  zip::Writer archive;
  PickleWriter pickle;
  std::map<std::string, Saved> tensors;
  std::set<std::string> records;
  bool open = true;     // false after the end and after a failure
  bool sealed = false;  // only the name is missing
};

CheckpointWriter::CheckpointWriter(const std::filesystem::path& file)
    : impl_(std::make_unique<Impl>(file)) {}
CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::add(const std::string& name, const Tensor& tensor) {
  impl_->begin();
  TORCH_CHECK(tensor.defined() && dtype_name(tensor.scalar_type()) != "unknown",
              impl_->file.string(), ": tensor '", name, "' has a dtype that cannot be saved");
  const std::string key = std::to_string(impl_->tensors.size());
  const Tensor data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const Tensor outline = at::empty(data.sizes(), data.options().device(at::kMeta));
  TORCH_CHECK(impl_->tensors.emplace(name, Saved{key, outline}).second, impl_->file.string(),
              ": two tensors have the name '", name, "'");
  impl_->add_record("data/" + key,
                    {static_cast<const uint8_t*>(data.const_data_ptr()), data.nbytes()});
  impl_->pickle.add(name, data, key);
  impl_->open = true;
}

void CheckpointWriter::add_alias(const std::string& name, const std::string& existing) {
  const auto found = impl_->tensors.find(existing);
  TORCH_CHECK(found != impl_->tensors.end(), impl_->file.string(), ": there is no tensor '",
              existing, "' to share");
  const Saved saved = found->second;
  TORCH_CHECK(impl_->tensors.emplace(name, saved).second, impl_->file.string(),
              ": two tensors have the name '", name, "'");
  impl_->pickle.add(name, saved.outline, saved.key);
}

void CheckpointWriter::set_record(const std::string& name, const std::string& bytes) {
  impl_->begin();
  TORCH_CHECK(impl_->records.insert(name).second, impl_->file.string(),
              ": two records have the name '", name, "'");
  impl_->add_record("extra/" + name, as_bytes(bytes));
  impl_->open = true;
}

void CheckpointWriter::seal() {
  impl_->begin();
  impl_->add_record("data.pkl", as_bytes(impl_->pickle.finish()));
  impl_->add_record("byteorder", as_bytes("little"));
  impl_->add_record("version", as_bytes("3\n"));
  impl_->archive.finish();
  impl_->output.sync();
  impl_->sealed = true;
}

void CheckpointWriter::finish() {
  if (!impl_->sealed) seal();
  impl_->sealed = false;
  impl_->output.commit();
}

}  // namespace gptfast
