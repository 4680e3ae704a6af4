// Linear and its weight formats. A Linear knows its format from construction; kernels see it as a
// WeightView.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gptfast {

using at::Tensor;
class StateDict;
enum class Int4Layout;  // how a file lays the nibbles out; src/int4_layout.h

enum class WeightFormat { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

/// "float32", "bfloat16", "float16", "int8" or "int4".
const char* to_string(WeightFormat format);

/// How one linear layer stores its weight.
struct WeightScheme {
  WeightFormat format = WeightFormat::kBFloat16;
  int64_t groupsize = 0;   ///< columns that share a scale and a zero; int4 only
  Int4Layout layout{};     ///< of the file's tensor; told by its contents unless named
  bool act_order = false;  ///< int4 whose columns lie in the order of `perm`, see LinearImpl
};

/// The scheme of the linear layer `fqn` ("layers.0.attention.wqkv") as a checkpoint stores it, from
/// keys and dtypes alone: a floating `weight`; int8 `weight` [N, K] with `scales` [N]; or int4
/// `weight` with `scales_and_zeros` [K/g, N, 2]. K is the layer's true in_features. Throws naming
/// the tensor when its shape fits no scheme.
WeightScheme weight_scheme(const StateDict& tensors, const std::string& fqn, int64_t in_features);

/// Scheme of each linear layer by name; what module constructors take.
using SchemeOf = std::function<WeightScheme(const std::string& fqn)>;

/// The canonical form of an int4 weight, between files and kernels (DESIGN: the only layout that
/// code outside checkpoint conversion and packing sees): w[n, k] = (q[n, k] - 8) * scales[n, k / g]
/// + zeros[n, k / g], in fp32.
struct Int4Weight {
  Tensor q;       ///< [N, ceil(K/2)] uint8, even column in the low nibble
  Tensor scales;  ///< [N, ceil(K/g)] bfloat16 or float32
  Tensor zeros;   ///< [N, ceil(K/g)], same dtype
  int64_t in_features = 0;
  int64_t groupsize = 0;

  Tensor dequantize() const;  ///< [N, K] float32
};

/// What a kernel reads: raw pointers on one device, valid as long as the Linear. Layout of `data`
/// by format:
///   float32/bfloat16/float16  [n, k] row-major
///   int8                      [n, k] row-major, `scales` [n] float32
///   int4                      packed by ops::pack_int4 for the device; scales and zeros are inside
///   `data`
struct WeightView {
  WeightFormat format = WeightFormat::kFloat32;
  int64_t n = 0;          ///< out_features
  int64_t k = 0;          ///< in_features, without padding
  int64_t groupsize = 0;  ///< int4 only
  const void* data = nullptr;
  const float* scales = nullptr;  ///< int8 only
  const int32_t* perm = nullptr;  ///< int4 with act-order, on the CPU only: LinearImpl::perm
};

/// y = x W^T without bias. Parameters and buffers carry the names of the original's modules
/// (nn.Linear, WeightOnlyInt8Linear, WeightOnlyInt4Linear of quantize.py), so that
/// named_parameters() and named_buffers() give the keys of the .pth.
struct LinearImpl : torch::nn::Module {
  /// Registers the tensors of `scheme`, still empty: load_model and random_model fill them.
  LinearImpl(int64_t in_features, int64_t out_features, WeightScheme scheme);

  /// x [..., K] floating -> [..., N] in x's dtype. The matrix kernels of ops::linear where the
  /// device has them, else and with `reference` the literal translation of the original's forward;
  /// int4 dequantizes to fp32.
  Tensor forward(const Tensor& x);
  /// [N, K] in float32: the values that every kernel of this layer computes with.
  Tensor dequantize() const;
  /// The canonical int4 weight, columns as stored; int4 only.
  Int4Weight int4_weight() const;
  /// Called once after the tensors are loaded: makes what kernels on `device` want (int4 packing,
  /// fp32 int8 scales).
  void prepare(at::Device device);
  /// After prepare(): frees the int4 words of the file, which no kernel reads. Only the kernels'
  /// form is left; int4_weight() and dequantize() throw.
  void drop_words();
  /// Moves what prepare() made for layers of one shape to one block of memory, in their order.
  static void gather(const std::vector<LinearImpl*>& layers);
  /// Takes the weight of `other`, a prepared layer of the same shape and scheme; the kernels' copy
  /// is one of its own.
  void copy_from(const LinearImpl& other);
  /// Valid after prepare().
  WeightView view() const;
  /// Bytes of the weight that kernels read for a row: without the padding and the tables of files.
  int64_t kernel_bytes() const;

  int64_t in_features;
  int64_t out_features;
  WeightScheme scheme;
  bool reference = false;  ///< forward() in plain ATen whatever kernels exist
  /// Stands in for forward() when set: calibration watches inputs and swaps weights with it.
  std::function<Tensor(const Tensor& x)> substitute = {};
  Tensor weight;            ///< [N, K]; int4: as in the file
  Tensor scales;            ///< [N]; int8 only
  Tensor scales_and_zeros;  ///< [Kp/g, N, 2], Kp >= K padded; int4 only
  /// [K] int32: stored column k belongs to input perm[k]. Only where GPTQ's act-order mixed the
  /// columns of groups. The CPU's kernels permute the activations; a GPU's read a bfloat16 copy.
  Tensor perm;

 private:
  bool has_kernel_form() const;  // prepare() was called where the format needs it

  Tensor packed_;  // int4: the device's layout. Not registered: it is no part of the checkpoint
  Tensor kernel_scales_;  // int8: [N] float32
};
TORCH_MODULE(Linear);

/// The format of a floating weight of `dtype`; throws naming the tensor for any other dtype.
WeightFormat floating_format(at::ScalarType dtype, const std::string& name);

}  // namespace gptfast
