// The matrix products of prompts and evaluation.
#include <ATen/ATen.h>

#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/step_ops.h"
#include "ops/cpu/thread_pool.h"

namespace gptfast::ops::cpu {

using gptfast::cpu::Format;
using gptfast::cpu::kernels;
using gptfast::cpu::kRowTile;
using gptfast::cpu::Range;
using gptfast::cpu::ThreadPool;
using gptfast::cpu::Weight;

Weight weight_of(const LinearImpl& linear) {
  const WeightView view = linear.view();
  TORCH_CHECK(view.data != nullptr, "a linear layer of ", view.n, " x ", view.k,
              " is used before prepare()");
  Format format{};
  switch (view.format) {
    case WeightFormat::kFloat32:
      format = Format::kFloat32;
      break;
    case WeightFormat::kBFloat16:
      format = Format::kBFloat16;
      break;
    case WeightFormat::kFloat16:
      format = Format::kFloat16;
      break;
    case WeightFormat::kInt8:
      format = Format::kInt8;
      break;
    case WeightFormat::kInt4:
      format = Format::kInt4;
      break;
  }
  return {.format = format,
          .n = view.n,
          .k = view.k,
          .groupsize = view.groupsize,
          .data = view.data,
          .scales = view.scales,
          .perm = view.perm};
}

namespace {

/// Calls body(thread, range) for pieces of [0, n): on all threads, or on this one if it is at work
/// on its slice of a prompt.
template <class Body>
void for_pieces(int64_t n, int64_t piece, const Body& body) {
  if (const int thread = ThreadPool::current_thread; thread >= 0) return body(thread, {0, n});
  ThreadPool& pool = ThreadPool::get();
  pool.run([&](int thread) noexcept {
    for (Range range{}; pool.next(thread, n, piece, range);) body(thread, range);
  });
}

/// LibTorch's bfloat16 products are faster than our float32 ones where the CPU has instructions for
/// them: SmolLM2-135M, 512 tokens, about 1000 against 490 tokens/s (Zen 5, 2 threads). Without
/// these it is several times slower than its float32 (Zen 3).
bool library_is_faster(const Tensor& x) {
  if (x.scalar_type() != at::kBFloat16) return false;
#if defined(__x86_64__)
  static const bool has_bfloat16 =
      __builtin_cpu_supports("avx512bf16") && std::strcmp(path(), "avx512") == 0;
  return has_bfloat16;
#else
  return false;
#endif
}

/// Weights [n, k] in bfloat16, to which the original's int4 kernels round them as well.
Tensor unpack_int4(const Weight& weight, const at::TensorOptions& options) {
  Tensor out = at::empty({weight.n, weight.k}, options.dtype(at::kBFloat16));
  auto* data = static_cast<uint16_t*>(out.data_ptr());
  constexpr int64_t kPiece = 4 * kRowTile;
  for_pieces(weight.n, kPiece, [&](int /*thread*/, const Range& range) {
    kernels().unpack_int4(weight, range.begin, range.end, data + range.begin * weight.k);
  });
  return out;
}

}  // namespace

Tensor linear(const Tensor& x, const LinearImpl& layer) {
  const Weight weight = weight_of(layer);
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == weight.k, "a linear layer with ", weight.k,
              " inputs got activations of shape ", x.sizes());
  const Tensor ordered = weight.perm == nullptr ? x : x.index_select(-1, layer.perm);
  if (library_is_faster(x)) {
    if (weight.format == Format::kBFloat16 || weight.format == Format::kInt8) return {};
    if (weight.format == Format::kInt4)
      return at::linear(ordered, unpack_int4(weight, x.options()));
  }
  const Tensor in = ordered.to(at::kFloat).contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.n;
  Tensor out = at::empty(shape, in.options());
  const int64_t rows = in.numel() / weight.k;
  const auto* activations = in.const_data_ptr<float>();
  auto* products = out.data_ptr<float>();
  constexpr int64_t kPanel = gptfast::cpu::kMaxPanelRows;
  for_pieces(weight.n, kPanel, [&](int thread, const Range& range) {
    auto* panel = reinterpret_cast<float*>(
        ThreadPool::get().scratch(thread, gptfast::cpu::kPanelColumns * kPanel * sizeof(float)));
    kernels().matmul(weight, range.begin, range.end, activations, rows, products, weight.n, panel);
  });
  return out.to(x.scalar_type());
}

}  // namespace gptfast::ops::cpu
