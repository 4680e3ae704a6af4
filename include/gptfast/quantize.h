// Weight-only quantization (quantize.py): int8 per row, int4 per group of columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gptfast/linear.h"

namespace gptfast {

struct TransformerImpl;

/// An int8 weight: w[n, k] = weight[n, k] * scales[n].
struct Int8Weight {
  Tensor weight;  ///< [N, K] int8
  Tensor scales;  ///< [N] float32
};

/// Symmetric per row, absmax / 127.5 as the step, so that +absmax gives 127 and -absmax -128
/// (dynamically_quantize_per_channel of quantize.py). w [N, K] floating, computed in float32 on its
/// device.
Int8Weight quantize_int8(const Tensor& w);

/// Scales and zeros of groups of columns; w[n, k] = (q[n, k] - 8) * scales[n, k / g] + zeros[n, k /
/// g].
struct GroupParams {
  Tensor scales;  ///< [N, K / g] bfloat16
  Tensor zeros;   ///< [N, K / g] bfloat16
};

/// Spreads the 16 codes evenly from each group's least to its greatest value (get_group_qparams of
/// quantize.py). w [N, K] floating, K a multiple of groupsize; computed in w's dtype, which the
/// bytes depend on.
GroupParams int4_group_params(const Tensor& w, int64_t groupsize);

/// Codes of w: [N, K] uint8 in 0..15 (group_quantize_tensor_from_qparams of quantize.py), computed
/// in w's dtype.
Tensor quantize_int4(const Tensor& w, const GroupParams& params, int64_t groupsize);

/// Codes [N, K] in 0..15 -> [N, ceil(K / 2)] uint8, even column in the low nibble.
Tensor pack_nibbles(const Tensor& codes);

/// Columns that an int4 weight has in a file: in_features where the groups and the GPU kernel's
/// tiles of 128 fit it, else the next multiple of 1024, which is what the original's runtime
/// expects.
int64_t int4_file_features(int64_t in_features, int64_t groupsize);

/// The two tensors of an int4 layer in a file.
struct Int4FileTensors {
  Tensor weight;            ///< CUDA layout, int32 [N / 8][Kp / 128][32][4]
  Tensor scales_and_zeros;  ///< [Kp / g, N, 2]
};

/// Packs a weight whose codes were found elsewhere (GPTQ, imports), padded with code 0, scale 1 and
/// zero 1 as the original's GPTQ does. N must be a multiple of 8.
Int4FileTensors int4_file_tensors(const Int4Weight& weight);

/// The note for an int4 layer that stays bfloat16 because its `rows` are no multiple of 8.
std::string unpacked_rows_note(const std::string& fqn, int64_t rows);

/// What became of one linear layer.
struct QuantizedLayer {
  std::string name;  ///< "layers.0.attention.wqkv"
  WeightScheme scheme;
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t padded_k = 0;      ///< columns in the file
  std::string note = {};     ///< why it stayed unquantized, or what else was unusual
  double error = 0;          ///< GPTQ: squared error of the outputs on the calibration data
  double rounded_error = 0;  ///< GPTQ: the same had it been rounded to nearest
};

struct QuantizeOptions {
  WeightFormat format = WeightFormat::kInt8;  ///< kInt8 or kInt4
  int64_t groupsize = 32;                     ///< int4: 32, 64, 128 or 256
  std::string config = {};                    ///< --config: table name or JSON file
  at::Device device = at::kCPU;               ///< where the arithmetic runs; the file is the same
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< bytes of the source
};

/// Quantizes every linear layer of a checkpoint, the head included, and writes what the original's
/// quantize.py writes: bfloat16 for the rest, int4 in the CUDA layout. Embeddings, norms and the
/// routers of mixtures stay bfloat16, experts are quantized one by one (int8 scales stay float32);
/// a head tied to the embedding gets its own quantized copy. An int4 layer whose out_features are
/// no multiple of 8 stays bfloat16, with a note.
///
/// Goes layer by layer: memory is the mapped source and one layer. Nothing is left behind when it
/// fails. Throws naming the file when it is quantized already, does not match its configuration or
/// holds NaN or infinite weights.
std::vector<QuantizedLayer> quantize(const std::filesystem::path& checkpoint_path,
                                     const std::filesystem::path& output,
                                     const QuantizeOptions& options);

/// The original's file name beside `checkpoint_path`: model.pth -> model_int8.pth,
/// model_int4.g32.pth. `mode` is "int8", "int4" or "int4-gptq", `label` stands before it.
std::filesystem::path quantized_path(const std::filesystem::path& checkpoint_path,
                                     std::string_view mode, int64_t groupsize,
                                     std::string_view label = "_");

/// How far the weights of a layer moved.
struct LayerChange {
  std::string name;
  WeightScheme scheme;    ///< of the quantized layer
  double max_error = 0;   ///< greatest |quantized - original|
  double mean_error = 0;  ///< mean of it
  double signal_noise =
      0;  ///< sum of squares of the original over that of the error, in dB; infinite without error
  int64_t bytes = 0;  ///< of the quantized layer in memory, scales included
};

/// Compares the linear layers of two models of one configuration, in order. Throws when they differ
/// in their layers.
std::vector<LayerChange> compare_layers(const TransformerImpl& original,
                                        const TransformerImpl& quantized);

}  // namespace gptfast
