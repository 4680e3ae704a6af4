// The names that Python's torch gives to dtypes and storage classes.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace gptfast {

/// "float32", "bfloat16", "int8", ...; "unknown" for a dtype that no checkpoint holds.
std::string_view dtype_name(at::ScalarType dtype);
/// Of "torch.float32" and its aliases ("torch.float").
std::optional<at::ScalarType> dtype_of_global(std::string_view global);
/// Of "torch.FloatStorage", ...; an untyped storage counts bytes.
std::optional<at::ScalarType> dtype_of_storage_class(std::string_view global);
/// The class name under module torch ("FloatStorage"), or "" for dtypes that have none and are
/// saved untyped.
std::string_view storage_class(at::ScalarType dtype);

}  // namespace gptfast
