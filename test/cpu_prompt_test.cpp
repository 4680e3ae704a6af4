// Products and attention of prompts on the CPU against plain ATen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "cpu_weights.h"
#include "gptfast/ops.h"

namespace gptfast {
namespace {

TEST(CpuPrompt, MatmulMatchesExactProductsForOddSizes) {
  at::manual_seed(7);
  for (const Kernels* kernels : runnable()) {
    for (const FormatCase& c : kFormats) {
      for (const int64_t n : {1, 33, 70}) {
        for (const int64_t k : {8, 101, 576, 1088}) {
          const TestWeight weight(c.format, n, k, c.groupsize);
          const Tensor x = at::randn({27, k});
          const Tensor out = at::empty({27, n});
          std::vector<float> panel(cpu::kPanelColumns * cpu::kMaxPanelRows);
          kernels->matmul(weight.view, 0, n, x.const_data_ptr<float>(), 27, out.data_ptr<float>(),
                          n, panel.data());
          EXPECT_LT(error_of_product(out, weight.values, x), kExact)
              << kernels->name << " " << to_string(c.format) << " g" << c.groupsize << " " << n
              << "x" << k;
        }
      }
    }
  }
}

/// x weight^T in bfloat16 through the prompt kernels, in two pieces.
Tensor product(const cpu::PromptKernels& kernels, const cpu::Weight& weight, const Tensor& x) {
  const int64_t rows = x.size(0);
  const Tensor packed = at::empty({cpu::packed_bytes(rows, weight.k)}, at::kByte);
  auto* activations = static_cast<uint32_t*>(packed.data_ptr());
  kernels.pack_rows(static_cast<const uint16_t*>(x.const_data_ptr()), rows, weight.k, activations);
  const Tensor out = at::empty({rows, weight.n}, at::kBFloat16);
  auto* products = static_cast<uint16_t*>(out.data_ptr());
  std::vector<uint32_t> panel(cpu::kPanelPairs * cpu::kMaxPanelRows);
  std::vector<float> sums(cpu::packed_rows(rows) * cpu::kMaxPanelRows);
  const int64_t half = weight.n / 2 / cpu::kMaxPanelRows * cpu::kMaxPanelRows;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, half}, std::pair{half, weight.n}})
    kernels.matmul(weight, begin, end, activations, rows, products, sums.data(), panel.data());
  return out;
}

bool has_prompt_kernel(WeightFormat format) {
  return format == WeightFormat::kBFloat16 || format == WeightFormat::kInt8 ||
         format == WeightFormat::kInt4;
}

TEST(CpuPrompt, BFloat16ProductsMatchExactOnes) {
  const cpu::PromptKernels* kernels = cpu::prompt_kernels();
  if (kernels == nullptr) GTEST_SKIP() << "no AVX512_BF16";
  at::manual_seed(9);
  for (const FormatCase& c : kFormats) {
    if (!has_prompt_kernel(c.format)) continue;
    for (const int64_t n : {1, 33, 70}) {
      for (const int64_t k : std::vector<int64_t>{32, 576, 1088, 2 * cpu::kPanelPairs + 96}) {
        const TestWeight weight(c.format, n, k, c.groupsize);
        const Tensor values = c.format == WeightFormat::kInt4
                                  ? weight.values.to(at::kFloat).to(at::kBFloat16).to(at::kDouble)
                                  : weight.values;
        for (const int64_t rows : {1, 8, 12, 29}) {
          const Tensor x = at::randn({rows, k}).to(at::kBFloat16);
          const Tensor expected = at::matmul(x.to(at::kDouble), values.t());
          const Tensor error = (product(*kernels, weight.view, x).to(at::kDouble) - expected).abs();
          const Tensor sums = at::matmul(x.abs().to(at::kDouble), values.abs().t());
          constexpr double kRounding = 0x1p-8;  // half a unit of bfloat16's last place
          EXPECT_TRUE((error <= expected.abs() * kRounding + sums * 1e-6).all().item<bool>())
              << to_string(c.format) << " g" << c.groupsize << " " << n << "x" << k << ", " << rows
              << " rows";
        }
      }
    }
  }
}

TEST(CpuPrompt, Int4WeightsRoundToTheNearestBFloat16) {
  const cpu::PromptKernels* kernels = cpu::prompt_kernels();
  if (kernels == nullptr) GTEST_SKIP() << "no AVX512_BF16";
  at::manual_seed(8);
  const Tensor unit = at::eye(576).to(at::kBFloat16);
  for (const int64_t groupsize : {32, 64, 128, 256}) {
    for (const at::ScalarType scale_dtype : {at::kBFloat16, at::kFloat}) {
      const TestWeight weight(WeightFormat::kInt4, 70, 576, groupsize, scale_dtype);
      EXPECT_TRUE(at::equal(product(*kernels, weight.view, unit).t(),
                            weight.values.to(at::kFloat).to(at::kBFloat16)))
          << "g" << groupsize << " " << scale_dtype;
    }
  }
}

/// Caches [3, Hkv, 520, Dh], whose positions from `used` on are NaN, as memory may be that nothing
/// was written to.
Tensor random_cache(int64_t heads, int64_t head_dim, int64_t used) {
  Tensor cache = at::randn({3, heads, 520, head_dim}).to(at::kBFloat16);
  cache.narrow(2, used, 520 - used).fill_(std::numeric_limits<float>::quiet_NaN());
  return cache;
}

/// Attention of q [B, H, S, Dh] in float64 for rows that stand in slots 1, 2.
Tensor exact_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& input_pos) {
  const int64_t B = q.size(0), H = q.size(1), S = q.size(2), Dh = q.size(3);
  const int64_t used = input_pos.max().item<int64_t>() + 1;
  const auto read = [&](const Tensor& cache) {
    return cache.narrow(0, 1, B)
        .narrow(2, 0, used)
        .to(at::kDouble)
        .repeat_interleave(H / cache.size(1), 1);
  };
  const Tensor hidden = at::arange(used).unsqueeze(0) > input_pos.unsqueeze(1);  // [S, used]
  const Tensor scores = at::matmul(q.to(at::kDouble), read(k_cache).transpose(2, 3)) /
                        std::sqrt(static_cast<double>(Dh));
  const Tensor weights =
      at::softmax(scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()), -1);
  return at::matmul(weights, read(v_cache)).transpose(1, 2).reshape({B, S, H * Dh});
}

TEST(CpuPrompt, AttentionMatchesFloat64) {
  if (cpu::prompt_kernels() == nullptr) GTEST_SKIP() << "no AVX512_BF16";
  at::manual_seed(10);
  struct Shape {
    int64_t heads, kv_heads, head_dim;
  };
  for (const Shape& shape : {Shape{9, 3, 64}, Shape{2, 2, 96}, Shape{4, 1, 32}, Shape{3, 1, 128}}) {
    for (const Tensor& input_pos :
         {at::arange(1), at::arange(130), at::arange(127, 129), at::arange(255, 512),
          at::tensor({300, 5, 128, 127, 0}, at::kLong)}) {
      const int64_t used = input_pos.max().item<int64_t>() + 1;
      const Tensor k = random_cache(shape.kv_heads, shape.head_dim, used);
      const Tensor v = random_cache(shape.kv_heads, shape.head_dim, used);
      const Tensor q = (at::randn({2, input_pos.numel(), shape.heads, shape.head_dim}) * 2)
                           .to(at::kBFloat16)
                           .transpose(1, 2);
      const Tensor y = ops::attention_prompt(q, k, v, input_pos, /*first_slot=*/1);
      ASSERT_TRUE(y.defined());
      const Tensor expected = exact_attention(q, k, v, input_pos);
      ASSERT_EQ(y.sizes(), expected.sizes());
      EXPECT_LT((y.to(at::kDouble) - expected).abs().max().item<double>(), 0.02)
          << shape.heads << " heads of " << shape.head_dim << ", " << input_pos.numel()
          << " tokens up to " << used - 1;
    }
  }
}

TEST(CpuPrompt, AttentionPassesNaNOn) {
  if (cpu::prompt_kernels() == nullptr) GTEST_SKIP() << "no AVX512_BF16";
  Tensor k = random_cache(1, 64, 130), v = random_cache(1, 64, 130);
  k[1][0][100][3] = std::numeric_limits<float>::quiet_NaN();
  const Tensor q = at::ones({1, 1, 130, 64}, at::kBFloat16);
  const Tensor y = ops::attention_prompt(q, k, v, at::arange(130), /*first_slot=*/1);
  EXPECT_TRUE(at::isfinite(y[0].narrow(0, 0, 96)).all().item<bool>());
  EXPECT_TRUE(at::isnan(y[0].narrow(0, 100, 30)).all().item<bool>());
}

}  // namespace
}  // namespace gptfast
