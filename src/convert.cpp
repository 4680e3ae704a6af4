#include "gptfast/convert.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <fstream>
#include <iostream>
#include <memory>
#include <set>

#include "dtype_names.h"
#include "gguf.h"
#include "gptfast/checkpoint.h"
#include "output_file.h"
#include "weight_source.h"

namespace gptfast {

namespace {

namespace fs = std::filesystem;

// One dtype for the whole model: that of its matrices. Norms that are kept in float32 beside them
// follow.
at::ScalarType common_dtype(const std::string& file, const std::vector<SourceTensor>& tensors) {
  const SourceTensor* first = nullptr;
  for (const auto& tensor : tensors) {
    if (tensor.quantized) return at::kBFloat16;
    if (tensor.shape.size() < 2) continue;
    if (first == nullptr) first = &tensor;
    TORCH_CHECK(tensor.dtype == first->dtype, file, ": has mixed dtypes: ", first->name, " is ",
                dtype_name(first->dtype), ", ", tensor.name, " is ", dtype_name(tensor.dtype),
                "; choose one with --dtype");
  }
  return first == nullptr ? at::kFloat : first->dtype;
}

// Files that the source already has in the same folder stay as they are.
bool keep_existing(const fs::path& input_folder, const fs::path& side_file) {
  std::error_code error;
  return fs::exists(side_file) && fs::equivalent(input_folder, side_file.parent_path(), error);
}

/// Writes the checkpoint and the files beside it; all of them appear only when everything is
/// written.
void write_model(const WeightSource& source, const fs::path& input_folder, const fs::path& output,
                 std::vector<SideFile> side_files, const ConvertOptions& options) {
  const std::vector<SourceTensor> tensors = arrange(source);
  const at::ScalarType dtype = options.dtype.value_or(common_dtype(source.file, tensors));
  int64_t total = 0;
  for (const auto& tensor : tensors) total += static_cast<int64_t>(tensor.bytes);
  const fs::path folder = output.has_parent_path() ? output.parent_path() : fs::path(".");
  fs::create_directories(folder);
  CheckpointWriter writer(output);
  int64_t done = 0;
  for (const auto& tensor : tensors) {
    writer.add(tensor.name, tensor.read(dtype));
    done += static_cast<int64_t>(tensor.bytes);
    if (options.progress) options.progress(done, total);
  }
  // The original's loader wants a head; a tied one shares the embedding's bytes.
  if (source.config.tie_word_embeddings && tensors.back().name != "output.weight")
    writer.add_alias("output.weight", "tok_embeddings.weight");
  side_files.push_back({"config.json", to_config_json(source.config)});
  std::vector<std::unique_ptr<OutputFile>> pending;
  for (const SideFile& file : side_files) {
    if (keep_existing(input_folder, folder / file.name)) continue;
    pending.push_back(std::make_unique<OutputFile>(folder / file.name));
    pending.back()->write({reinterpret_cast<const uint8_t*>(file.content.data()),
                           file.content.size()},
                          0);
  }
  for (const auto& file : pending) file->commit();
  writer.finish();
}

}  // namespace

void convert_gguf(const fs::path& input, const fs::path& output, const ConvertOptions& options) {
  const GgufFile gguf(input);
  std::vector<SourceTensor> tensors = gguf.tensors();
  WeightSource source{.file = input.string(), .config = gguf_config(gguf, tensors)};
  if (!options.config.empty()) source.config = ModelArgs::from_name_or_file(options.config);
  source.tensors = rename_all(source.file, std::move(tensors), rename_gguf);
  write_model(source, input.parent_path(), output, gguf_tokenizer(gguf), options);
}

void convert(const fs::path& input, const fs::path& output, const ConvertOptions& options) {
  convert_gguf(input, output, options);
}

}  // namespace gptfast
