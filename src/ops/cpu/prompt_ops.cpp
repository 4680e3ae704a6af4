// The matrix products of prompts and evaluation.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "ops/cpu/kernels.h"
#include "ops/cpu/step_ops.h"
#include "ops/cpu/thread_pool.h"

namespace gptfast::ops::cpu {

using gptfast::cpu::Format;
using gptfast::cpu::kBlock;
using gptfast::cpu::kernels;
using gptfast::cpu::kMaxPanelRows;
using gptfast::cpu::kPanelPairs;
using gptfast::cpu::packed_bytes;
using gptfast::cpu::packed_rows;
using gptfast::cpu::prompt_kernels;
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

/// A layer's products in bfloat16, where the CPU has instructions for them.
bool takes_bfloat16(const Tensor& x, const Weight& weight) {
  const bool has_format = weight.format == Format::kBFloat16 || weight.format == Format::kInt8 ||
                          weight.format == Format::kInt4;
  return prompt_kernels() != nullptr && x.scalar_type() == at::kBFloat16 && has_format &&
         weight.k % kBlock == 0;
}

const uint16_t* bits(const Tensor& t) {
  return static_cast<const uint16_t*>(t.const_data_ptr());
}

void linear_bfloat16(const Tensor& x /* [rows, k] */, const Weight& weight, Tensor& out) {
  const auto& kernels = *prompt_kernels();
  const int64_t rows = x.size(0);
  const Tensor packed = at::empty({packed_bytes(rows, weight.k)}, x.options().dtype(at::kByte));
  auto* activations = static_cast<uint32_t*>(packed.data_ptr());
  kernels.pack_rows(bits(x), rows, weight.k, activations);
  auto* products = static_cast<uint16_t*>(out.data_ptr());
  for_pieces(weight.n, kMaxPanelRows, [&](int thread, const Range& range) {
    auto* panel = reinterpret_cast<uint32_t*>(
        ThreadPool::get().scratch(thread, (kPanelPairs + packed_rows(rows)) * kMaxPanelRows *
                                              sizeof(float)));
    auto* sums = reinterpret_cast<float*>(panel + kPanelPairs * kMaxPanelRows);
    kernels.matmul(weight, range.begin, range.end, activations, rows, products, sums, panel);
  });
}

}  // namespace

Tensor linear(const Tensor& x, const LinearImpl& layer) {
  const Weight weight = weight_of(layer);
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == weight.k, "a linear layer with ", weight.k,
              " inputs got activations of shape ", x.sizes());
  const Tensor ordered = weight.perm == nullptr ? x : x.index_select(-1, layer.perm);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.n;
  if (takes_bfloat16(x, weight)) {
    Tensor out = at::empty(shape, x.options());
    linear_bfloat16(ordered.reshape({-1, weight.k}).contiguous(), weight, out);
    return out;
  }
  const Tensor in = ordered.to(at::kFloat).contiguous();
  Tensor out = at::empty(shape, in.options());
  const int64_t rows = in.numel() / weight.k;
  const auto* activations = in.const_data_ptr<float>();
  auto* products = out.data_ptr<float>();
  for_pieces(weight.n, kMaxPanelRows, [&](int thread, const Range& range) {
    auto* panel = reinterpret_cast<float*>(
        ThreadPool::get().scratch(thread,
                                  gptfast::cpu::kPanelColumns * kMaxPanelRows * sizeof(float)));
    kernels().matmul(weight, range.begin, range.end, activations, rows, products, weight.n, panel);
  });
  return out.to(x.scalar_type());
}

Tensor attention_prompt(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& input_pos, int64_t first_slot) {
  const int64_t B = q.size(0), H = q.size(1), S = q.size(2), Dh = q.size(3);
  const int64_t Hkv = k_cache.size(1), T = k_cache.size(2), group = H / Hkv;
  if (prompt_kernels() == nullptr || q.scalar_type() != at::kBFloat16 ||
      k_cache.scalar_type() != at::kBFloat16 || Dh % kBlock != 0)
    return {};
  TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "a KV cache must be contiguous");
  const Tensor queries = q.transpose(1, 2).contiguous();  // [B, S, H, Dh]
  Tensor out = at::empty({B, S, H * Dh}, q.options());
  auto* y = static_cast<uint16_t*>(out.data_ptr());
  // Enough rows to repay the panels of keys and values; their scores stay in the second-level
  // cache.
  constexpr int64_t kRows = 192;
  const int64_t tokens = std::clamp<int64_t>(kRows / group, 1, S);
  const int64_t blocks = (S + tokens - 1) / tokens;
  for_pieces(B * Hkv * blocks, 1, [&](int thread, const Range& range) {
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t first = i % blocks * tokens, head = i / blocks % Hkv, b = i / blocks / Hkv;
      const int64_t at = ((b * S + first) * H + head * group) * Dh;
      const int64_t cache = ((first_slot + b) * Hkv + head) * T * Dh;
      gptfast::cpu::PromptAttendArgs args{.q = bits(queries) + at,
                                          .k = bits(k_cache) + cache,
                                          .v = bits(v_cache) + cache,
                                          .pos = input_pos.const_data_ptr<int64_t>() + first,
                                          .tokens = std::min(tokens, S - first),
                                          .heads = group,
                                          .head_dim = Dh,
                                          .token_stride = H * Dh,
                                          .scale = 1 / std::sqrt(static_cast<float>(Dh)),
                                          .out = y + at,
                                          .scratch = nullptr};
      args.scratch = ThreadPool::get().scratch(thread, prompt_kernels()->attend_prompt_bytes(args));
      prompt_kernels()->attend_prompt(args);
    }
  });
  return out;
}

}  // namespace gptfast::ops::cpu
