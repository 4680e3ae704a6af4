// Random weights for the tests of the CPU kernels, and what they are compared with.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "gptfast/ops.h"
#include "int4_layout.h"
#include "ops/cpu/kernels.h"
#include "test_util.h"

namespace gptfast {

using cpu::Dtype;
using cpu::Format;
using cpu::Kernels;

/// The tables that this CPU can run.
inline std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> tables = {&cpu::kPortableKernels};
#if defined(__x86_64__)
  // Every CPU with AVX2 has F16C.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    tables.push_back(&cpu::kAvx2Kernels);
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl"))
    tables.push_back(&cpu::kAvx512Kernels);
#endif
  return tables;
}

/// A tensor whose data starts `offset` bytes behind a 64-byte boundary: mapped files promise no
/// alignment.
inline Tensor misaligned(const Tensor& t, int64_t offset) {
  const Tensor buffer = at::empty({static_cast<int64_t>(t.nbytes()) + 64 + offset}, at::kByte);
  auto* start = static_cast<std::byte*>(buffer.data_ptr());
  auto* data = start + (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64 + offset;
  Tensor copy = at::from_blob(
      data, t.sizes(), [buffer](void*) {}, t.options());
  copy.copy_(t);
  return copy;
}

/// A random weight [n, k] for the kernels, and its values.
struct TestWeight {
  TestWeight(WeightFormat format, int64_t n, int64_t k, int64_t groupsize,
             at::ScalarType scale_dtype = at::kBFloat16) {
    const Tensor w = at::randn({n, k});
    view.n = n;
    view.k = k;
    view.groupsize = groupsize;
    switch (format) {
      case WeightFormat::kFloat32:
        set_float(Format::kFloat32, w);
        break;
      case WeightFormat::kBFloat16:
        set_float(Format::kBFloat16, w.to(at::kBFloat16));
        break;
      case WeightFormat::kFloat16:
        set_float(Format::kFloat16, w.to(at::kHalf));
        break;
      case WeightFormat::kInt8:
        view.format = Format::kInt8;
        data = misaligned(at::randint(-128, 128, {n, k}, at::kChar), 3);
        scales = at::rand({n}) + 0.5;
        view.scales = scales.const_data_ptr<float>();
        values = data.to(at::kDouble) * scales.unsqueeze(1);
        break;
      case WeightFormat::kInt4:
        set_int4(n, k, groupsize, scale_dtype);
        break;
    }
    view.data = data.const_data_ptr();
  }

  void set_float(Format format, const Tensor& w) {
    view.format = format;
    data = misaligned(w, w.element_size());
    values = data.to(at::kDouble);
  }

  void set_int4(int64_t n, int64_t k, int64_t groupsize, at::ScalarType scale_dtype) {
    view.format = Format::kInt4;
    const int64_t groups = (k + groupsize - 1) / groupsize;
    const Int4Weight weight{.q = at::randint(0, 256, {n, (k + 1) / 2}, at::kByte),
                            .scales = at::rand({n, groups}).add(0.1).to(scale_dtype),
                            .zeros = at::randn({n, groups}).to(scale_dtype),
                            .in_features = k,
                            .groupsize = groupsize};
    data = ops::pack_int4(weight, at::kCPU);
    values = weight.dequantize().to(at::kDouble);
  }

  cpu::Weight view{};
  Tensor data, scales, values;
};

/// Largest error as a share of sum |w| max |x|.
inline double error_of_product(const Tensor& actual, const Tensor& weight, const Tensor& x) {
  const Tensor expected = at::matmul(x.to(at::kDouble), weight.t());
  const Tensor scale = weight.abs().sum(1).unsqueeze(0) * x.abs().amax(1, /*keepdim=*/true);
  return ((actual.to(at::kDouble) - expected).abs() / scale).max().item<double>();
}

struct FormatCase {
  WeightFormat format;
  int64_t groupsize;
  double tolerance;  // of error_of_product
};

// float32 sums of exact products; 15-bit activations round by up to half of their largest / 16256.
constexpr double kExact = 1e-6, kQuantized = 1.02 / (2 * 16256);
const std::vector<FormatCase> kFormats = {{WeightFormat::kFloat32, 0, kExact},
                                          {WeightFormat::kBFloat16, 0, kExact},
                                          {WeightFormat::kFloat16, 0, kExact},
                                          {WeightFormat::kInt8, 0, kQuantized},
                                          {WeightFormat::kInt4, 32, kQuantized},
                                          {WeightFormat::kInt4, 64, kQuantized},
                                          {WeightFormat::kInt4, 128, kQuantized},
                                          {WeightFormat::kInt4, 256, kQuantized}};

}  // namespace gptfast
