// Layouts of int4 weights in files, and their translation to the canonical Int4Weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "gptfast/linear.h"

namespace gptfast {

/// How the nibbles of an int4 weight lie in a file. Python packs for the device it quantizes on:
/// the CPU layouts depend on the instruction set of that machine. int32 tensors of 4 dimensions
/// hold any of them, uint8 tensors [N, Kp / 2] the CPU ones.
enum class Int4Layout {
  kAuto,       ///< told by the contents, see unpack_int4
  kCuda,       ///< tinygemm: int32 [N / 8][Kp / (inner * 16)][32][inner / 2], inner in {2, 4, 8}
  kCpuAvx512,  ///< blocks of 64 rows; a byte holds rows j and j + 32 of one column
  kCpuAvx2,    ///< blocks of 32 rows; a byte holds rows j and j + 16 of one column
  kCpu,        ///< blocks of 32 rows; a byte holds rows 2j and 2j + 1 of one column
};

/// The zip record in which files of ours name their layout, for weights whose groups need not reach
/// both ends of the code.
inline constexpr const char* kInt4LayoutRecord = "int4_layout";

/// "auto", "cuda", "cpu-avx512", "cpu-avx2" or "cpu".
const char* to_string(Int4Layout layout);
/// Throws with the list of names when `name` is none of them.
Int4Layout int4_layout_from_string(std::string_view name);

/// The canonical codes [N, K / 2] as a weight of a StateDict: a share of tensor parallelism that
/// the layout of the file cannot express. No file holds it; a third dimension of 1 tells it apart,
/// and whatever layout is named does not apply to it.
Tensor canonical_int4(const Tensor& q);

/// Columns that an int4 weight of a file has, padding included (Kp); 0 when neither dtype nor shape
/// is that of an int4 weight.
int64_t int4_padded_features(const Tensor& weight);

/// Columns that share a scale: Kp / scales_and_zeros.size(0). Throws naming `name` unless the two
/// tensors fit each other, `in_features` and a group size of 32, 64, 128 or 256.
int64_t int4_groupsize(const Tensor& weight, const Tensor& scales_and_zeros, int64_t in_features,
                       std::string_view name);

/// Translates an int4 weight of a file, dropping padded columns and groups. weight as described at
/// Int4Layout, scales_and_zeros [Kp / g, N, 2] bfloat16 or float32. The codes of a weight on a GPU
/// stay there if they lie in the CUDA layout, else they are on the CPU.
///
/// kAuto: int32 is the CUDA layout when at least 75 % of the groups hold both code 0 and code 15,
/// as round-to-nearest makes them; else the CPU layout in which most groups do, if at least 75 %.
/// Throws naming `name` when no layout passes.
Int4Weight unpack_int4(const Tensor& weight, const Tensor& scales_and_zeros, int64_t in_features,
                       Int4Layout layout = Int4Layout::kAuto,
                       std::string_view name = "int4 weight");

/// Canonical codes [N, Kp / 2] uint8 -> the CUDA layout with `inner` k tiles, as
/// _convert_weight_to_int4pack of a GPU gives it. N must be a multiple of 8 and Kp of 16 * inner.
Tensor pack_int4_cuda(const Tensor& q, int64_t inner);

/// [N, G] scales and zeros -> [G, N, 2] contiguous, same dtype.
Tensor pack_scales_and_zeros(const Tensor& scales, const Tensor& zeros);

}  // namespace gptfast
