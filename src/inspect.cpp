#include "gptfast/inspect.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "checkpoint_reader.h"
#include "dtype_names.h"
#include "sha256.h"

namespace gptfast {
namespace {

// Hashes row by row, so that a large view is not copied whole.
void hash_bytes(const Tensor& tensor, Sha256& sha) {
  constexpr size_t kCopyLimit = size_t{64} << 20;
  if (tensor.numel() == 0) return;
  if (!tensor.is_contiguous() && tensor.dim() > 0 && tensor.nbytes() > kCopyLimit) {
    for (int64_t i = 0; i < tensor.size(0); ++i) hash_bytes(tensor.select(/*dim=*/0, i), sha);
    return;
  }
  const Tensor data = tensor.resolve_conj().resolve_neg().contiguous();
  sha.update({static_cast<const uint8_t*>(data.const_data_ptr()), data.nbytes()});
}

std::string sha256_of(const Tensor& tensor) {
  Sha256 sha;
  hash_bytes(tensor, sha);
  return sha.hex_digest();
}

nlohmann::ordered_json to_json(const std::string& name, const Tensor& tensor, bool hash) {
  nlohmann::ordered_json entry;
  entry["name"] = name;
  entry["dtype"] = dtype_name(tensor.scalar_type());
  entry["shape"] = tensor.sizes().vec();
  entry["stride"] = tensor.strides().vec();
  entry["bytes"] = tensor.nbytes();
  if (hash) entry["sha256"] = sha256_of(tensor);
  return entry;
}

std::string to_text(at::IntArrayRef values) {
  std::ostringstream out;
  out << values;
  return out.str();
}

void write_table(const StateDict& tensors, bool hash, std::ostream& out) {
  size_t name_width = 4, shape_width = 5, stride_width = 6, bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    name_width = std::max(name_width, name.size());
    shape_width = std::max(shape_width, to_text(tensor.sizes()).size());
    stride_width = std::max(stride_width, to_text(tensor.strides()).size());
    bytes += tensor.nbytes();
  }
  const auto column = [&out](size_t width) -> std::ostream& {
    return out << std::left << std::setw(static_cast<int>(width) + 2);
  };
  column(name_width) << "name";
  column(13) << "dtype";
  column(shape_width) << "shape";
  column(stride_width) << "stride";
  out << "bytes" << (hash ? "  sha256" : "") << '\n';
  for (const auto& [name, tensor] : tensors) {
    column(name_width) << name;
    column(13) << dtype_name(tensor.scalar_type());
    column(shape_width) << to_text(tensor.sizes());
    column(stride_width) << to_text(tensor.strides());
    out << tensor.nbytes();
    if (hash) out << "  " << sha256_of(tensor);
    out << '\n';
  }
  out << tensors.size() << " tensors, " << bytes << " bytes\n";
}

StateDict read(const std::filesystem::path& file) {
  try {
    return read_checkpoint(map_file(file), Names::kAsStored, /*records=*/nullptr);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, file.string(), ": ", error.what_without_backtrace());
  }
}

}  // namespace

void inspect(const std::filesystem::path& file, bool hash, bool as_json, std::ostream& out) {
  const StateDict tensors = read(file);
  if (!as_json) return write_table(tensors, hash, out);
  nlohmann::ordered_json result;
  result["file"] = file.string();
  result["tensors"] = nlohmann::ordered_json::array();
  for (const auto& [name, tensor] : tensors)
    result["tensors"].push_back(to_json(name, tensor, hash));
  out << result.dump(/*indent=*/-1, /*indent_char=*/' ', /*ensure_ascii=*/false,
                     nlohmann::json::error_handler_t::replace)
      << '\n';
}

}  // namespace gptfast
