#include "dtype_names.h"

namespace gptfast {
namespace {

struct DtypeRow {
  at::ScalarType dtype;
  std::string_view name, alias, storage;
};

constexpr DtypeRow kDtypes[] = {
    {at::kFloat, "float32", "float", "FloatStorage"},
    {at::kBFloat16, "bfloat16", "", "BFloat16Storage"},
    {at::kHalf, "float16", "half", "HalfStorage"},
    {at::kDouble, "float64", "double", "DoubleStorage"},
    {at::kChar, "int8", "", "CharStorage"},
    {at::kByte, "uint8", "", "ByteStorage"},
    {at::kShort, "int16", "short", "ShortStorage"},
    {at::kInt, "int32", "int", "IntStorage"},
    {at::kLong, "int64", "long", "LongStorage"},
    {at::kBool, "bool", "", "BoolStorage"},
    {at::kComplexFloat, "complex64", "cfloat", "ComplexFloatStorage"},
    {at::kComplexDouble, "complex128", "cdouble", "ComplexDoubleStorage"},
    {at::kUInt16, "uint16", "", ""},
    {at::kUInt32, "uint32", "", ""},
    {at::kUInt64, "uint64", "", ""},
    {at::kFloat8_e4m3fn, "float8_e4m3fn", "", ""},
    {at::kFloat8_e5m2, "float8_e5m2", "", ""},
    {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz", "", ""},
    {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz", "", ""},
    {at::kFloat8_e8m0fnu, "float8_e8m0fnu", "", ""},
};
constexpr std::string_view kModule = "torch.";

const DtypeRow* row_of(at::ScalarType dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

}  // namespace

std::string_view dtype_name(at::ScalarType dtype) {
  const DtypeRow* row = row_of(dtype);
  return row != nullptr ? row->name : "unknown";
}

std::optional<at::ScalarType> dtype_of_global(std::string_view global) {
  if (!global.starts_with(kModule)) return std::nullopt;
  const std::string_view name = global.substr(kModule.size());
  for (const DtypeRow& row : kDtypes) {
    if (name == row.name || (!row.alias.empty() && name == row.alias)) return row.dtype;
  }
  return std::nullopt;
}

std::optional<at::ScalarType> dtype_of_storage_class(std::string_view global) {
  if (global == "torch.storage.UntypedStorage" || global == "torch.UntypedStorage")
    return at::kByte;
  if (!global.starts_with(kModule)) return std::nullopt;
  const std::string_view name = global.substr(kModule.size());
  for (const DtypeRow& row : kDtypes) {
    if (!row.storage.empty() && name == row.storage) return row.dtype;
  }
  return std::nullopt;
}

std::string_view storage_class(at::ScalarType dtype) {
  const DtypeRow* row = row_of(dtype);
  return row != nullptr ? row->storage : "";
}

}  // namespace gptfast
