#include "gptfast/convert.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "checkpoint_reader.h"
#include "dtype_names.h"
#include "gguf.h"
#include "gptfast/checkpoint.h"
#include "gptfast/quantize.h"
#include "import.h"
#include "int4_layout.h"
#include "output_file.h"

namespace gptfast {

namespace {

namespace fs = std::filesystem;

// One dtype for the whole model: that of its matrices. Norms and routers that are kept in float32
// beside them follow.
at::ScalarType common_dtype(const std::string& file, const std::vector<SourceTensor>& tensors) {
  const SourceTensor* first = nullptr;
  for (const auto& tensor : tensors) {
    if (tensor.quantized) return at::kBFloat16;
    if (tensor.shape.size() < 2 || tensor.name.ends_with("gate.weight")) continue;
    if (first == nullptr) first = &tensor;
    TORCH_CHECK(tensor.dtype == first->dtype, file, ": has mixed dtypes: ", first->name, " is ",
                dtype_name(first->dtype), ", ", tensor.name, " is ", dtype_name(tensor.dtype),
                "; choose one with --dtype");
  }
  return first == nullptr || first->dtype == at::kDouble ? at::kFloat : first->dtype;
}

// Files that the source already has in the same folder stay as they are.
bool keep_existing(const fs::path& source_folder, const fs::path& side_file) {
  std::error_code error;
  const fs::path folder = source_folder.empty() ? fs::path(".") : source_folder;
  return fs::exists(side_file) && fs::equivalent(folder, side_file.parent_path(), error);
}

/// Files beside the checkpoint, written but not yet visible.
std::vector<std::unique_ptr<OutputFile>> write_side_files(const Import& import,
                                                          const fs::path& folder) {
  std::vector<SideFile> files = import.files;
  const auto& config_json = import.config_json;
  files.push_back(
      {"config.json", config_json.empty() ? to_config_json(import.weights.config) : config_json});
  std::vector<std::unique_ptr<OutputFile>> pending;
  for (const SideFile& file : files) {
    if (keep_existing(import.folder, folder / file.name)) continue;
    pending.push_back(std::make_unique<OutputFile>(folder / file.name));
    pending.back()->write({reinterpret_cast<const uint8_t*>(file.content.data()),
                           file.content.size()},
                          0);
  }
  return pending;
}

/// Writes a weight that stays int4. Returns the largest change of a value that bfloat16 scales
/// made.
double write_int4(CheckpointWriter& writer, const SourceTensor& tensor,
                  at::ScalarType scales_dtype) {
  const auto [exact, perm] = tensor.read_int4();
  Int4Weight weight = exact;
  weight.scales = exact.scales.to(scales_dtype);
  weight.zeros = exact.zeros.to(scales_dtype);
  const auto [packed, scales_and_zeros] = int4_file_tensors(weight);
  const std::string fqn = tensor.name.substr(0, tensor.name.rfind('.'));
  writer.add(tensor.name, packed);
  writer.add(fqn + ".scales_and_zeros", scales_and_zeros);
  if (perm.defined()) writer.add(fqn + ".perm", perm.to(at::kInt));
  if (scales_dtype == at::kFloat) return 0;
  return (weight.dequantize() - exact.dequantize()).abs().max().item<double>();
}

/// Drops the head of a tied model where the source stores the embedding a second time under its
/// name.
void drop_tied_head(std::vector<SourceTensor>& tensors, at::ScalarType dtype) {
  if (tensors.back().name != "output.weight") return;
  const auto embedding = std::find_if(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.name == "tok_embeddings.weight";
  });
  if (embedding != tensors.end() && at::equal(embedding->read(dtype), tensors.back().read(dtype)))
    tensors.pop_back();
}

/// Writes the checkpoint and the files beside it; all of them appear only when everything is
/// written.
void write_model(const Import& import, const fs::path& output, const ConvertOptions& options) {
  const WeightSource& source = import.weights;
  std::vector<SourceTensor> tensors = arrange(source);
  const at::ScalarType dtype = options.dtype ? *options.dtype : common_dtype(source.file, tensors);
  if (source.config.tie_word_embeddings) drop_tied_head(tensors, dtype);
  int64_t total = 0;
  for (const auto& tensor : tensors) total += static_cast<int64_t>(tensor.bytes);
  const fs::path folder = output.has_parent_path() ? output.parent_path() : fs::path(".");
  std::error_code error;
  fs::create_directories(folder, error);
  TORCH_CHECK(!error, folder.string(), ": cannot be made: ", error.message());
  CheckpointWriter writer(output);
  int64_t done = 0;
  std::vector<std::string> notes = import.notes;
  double largest_change = 0;
  bool packed = false;
  for (const auto& tensor : tensors) {
    if (tensor.read_int4 && tensor.shape[0] % 8 == 0) {
      largest_change = std::max(largest_change, write_int4(writer, tensor, options.scales));
      packed = true;
    } else {
      if (tensor.read_int4) notes.push_back(unpacked_rows_note(tensor.name, tensor.shape[0]));
      const Tensor values = tensor.read(dtype);
      writer.add(tensor.name, values);
      release_pages(values);
    }
    malloc_trim(/*pad=*/0);  // else glibc keeps most of what it gave out, up to the whole model
    done += static_cast<int64_t>(tensor.bytes);
    if (options.progress) options.progress(done, total);
  }
  if (packed) writer.set_record(kInt4LayoutRecord, to_string(Int4Layout::kCuda));
  if (packed && options.scales != at::kFloat)
    notes.push_back(
        c10::str("the largest change of a weight by bfloat16 scales is ", largest_change));
  // The original's loader wants a head; a tied one shares the embedding's bytes.
  if (source.config.tie_word_embeddings && tensors.back().name != "output.weight")
    writer.add_alias("output.weight", "tok_embeddings.weight");
  const auto side_files = write_side_files(import, folder);
  writer.seal();
  for (const auto& file : side_files) file->sync();
  for (const auto& file : side_files) file->commit();
  writer.finish();
  if (options.note) {
    for (const auto& note : notes) options.note(note);
  }
}

bool begins_with(Bytes bytes, std::string_view magic) {
  return bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
}

Import import_file(const fs::path& file, const std::string& config) {
  FileBytes mapped;
  try {
    mapped = map_file(file);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, file.string(), ": ", error.what_without_backtrace());
  }
  const Bytes bytes = mapped.bytes();
  constexpr size_t kSafetensorsBrace = 8;  // behind the header's length
  if (begins_with(bytes, "GGUF")) return import_gguf(file, config);
  if (begins_with(bytes, "PK\x03\x04") || begins_with(bytes, "\x80\x02"))
    return import_tensor_file(file, config);
  if (is_llama2c(file)) return import_llama2c(file, config);
  const bool safetensors = file.extension() == ".safetensors" ||
                           (bytes.size() > kSafetensorsBrace && bytes[kSafetensorsBrace] == '{');
  if (safetensors) return import_tensor_file(file, config);
  TORCH_CHECK(false, file.string(), ": ", describe_foreign_file(bytes));
}

}  // namespace

Import import_gguf(const fs::path& file, const std::string& config) {
  const GgufFile gguf(file);
  std::vector<SourceTensor> tensors = gguf.tensors();
  Import import{.folder = file.parent_path()};
  import.weights.file = file.string();
  import.weights.config =
      config.empty() ? gguf_config(gguf, tensors) : ModelArgs::from_name_or_file(config);
  import.weights.tensors = rename_all(std::move(tensors), rename_gguf);
  import.files = gguf_tokenizer(gguf);
  return import;
}

void convert(const fs::path& input, const fs::path& output, const ConvertOptions& options) {
  write_model(fs::is_directory(input) ? import_directory(input, options.config, options.gptq_zeros)
                                      : import_file(input, options.config),
              output, options);
}

}  // namespace gptfast
