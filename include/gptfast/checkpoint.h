// Checkpoints: reading and writing the files of Python's torch.save without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gptfast {

using at::Tensor;

/// Named tensors in file order: what Python calls a state dict.
class StateDict {
 public:
  using Entry = std::pair<std::string, Tensor>;

  /// nullptr when absent.
  const Tensor* find(std::string_view name) const;
  /// Whether there is a tensor of this name.
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  /// Throws naming the tensor when absent.
  const Tensor& at(std::string_view name) const;
  /// Replaces in place, or appends.
  void set(const std::string& name, Tensor tensor);
  /// Removes and returns; throws naming the tensor when absent. The others keep their order.
  Tensor take(std::string_view name);

  /// The number of tensors.
  size_t size() const { return entries_.size(); }
  /// Whether there is none.
  bool empty() const { return entries_.empty(); }
  /// Entries (name, tensor) in order, for range-based loops.
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }  ///< see begin()

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> index_;
};

/// Reads what Python's torch.save wrote: a dict, an OrderedDict, a module's state_dict() with its
/// _metadata, or any of these under "model"; tensors and Parameters, shared storages, pickle
/// protocols 2 to 5, zip and legacy files. Nested dicts give names joined by '/'. No code in a file
/// is ever executed: a global outside the allow-list is refused by name.
///
/// The file is mapped once and tensors are views of the mapping (copy-on-write), which lives as
/// long as any of them; sizes, offsets and strides are checked against the file. Only storages that
/// the file does not align to 64 bytes, as legacy files do not, are copied. requires_grad and the
/// device in the file are ignored: tensors are plain ones on the CPU. Throws c10::Error with one
/// line that names the file, what it is (an HTML page, a Git-LFS pointer, a TorchScript archive, a
/// safetensors file, a truncated file, ...) and what to do. A file without tensors gives an empty
/// StateDict.
///
/// `records`, when given, receives the small extra zip records that are ours (see
/// CheckpointWriter::set_record).
StateDict load_checkpoint(const std::filesystem::path& file,
                          std::map<std::string, std::string>* records = nullptr);

/// Takes the file's pages under `tensor` out of this process's memory, for a tensor of
/// load_checkpoint (or a view of one) that nobody has written to: it stays valid, and the next read
/// brings the pages back. No effect on tensors that do not lie in a mapped file.
void release_pages(const Tensor& tensor);

/// Writes a .pth tensor by tensor, for models larger than memory. Python reads the result with
/// torch.load(weights_only=True, mmap=True): a plain dict with the keys in the order of add().
/// Nothing appears under `file` before finish(): a temporary file in the same directory is synced
/// and renamed. The destructor removes an unfinished temporary file. Tensors lie at multiples of 64
/// bytes, and each is written whole: storages that tensors share are shared in the file only
/// through add_alias.
class CheckpointWriter {
 public:
  /// Opens the temporary file. Throws naming the file when its folder cannot be written.
  explicit CheckpointWriter(const std::filesystem::path& file);
  /// Without finish() before, nothing of the file remains.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Appends one tensor (made contiguous, copied from its device). Throws when the name was used or
  /// the disk is full.
  void add(const std::string& name, const Tensor& tensor);
  /// Gives the tensor `existing` a second name that shares its storage, as torch.save does for tied
  /// weights. Throws when there is no such tensor, or `name` was used.
  void add_alias(const std::string& name, const std::string& existing);
  /// Adds a record `extra/<name>` beside the tensors, which Python ignores. Throws as add() does.
  void set_record(const std::string& name, const std::string& bytes);
  /// Writes the rest of the file, which still has no name: only finish() may follow. For callers
  /// with other files that shall appear together with this one. Throws when the disk is full.
  void seal();
  /// Seals the file where that is not done, and names it. Throws naming the file when that fails.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// CheckpointWriter over a whole StateDict and its extra records. Throws as its functions do;
/// `file` is then as it was before.
void save_checkpoint(const std::filesystem::path& file, const StateDict& tensors,
                     const std::map<std::string, std::string>& records = {});

}  // namespace gptfast
