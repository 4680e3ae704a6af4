// The CPU kernels against plain ATen: every format, odd sizes, unaligned pointers, and bit for bit
// over the number of rows.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu_weights.h"
#include "gptfast/threads.h"
#include "int4_layout.h"
#include "ops/reference.h"
#include "test_util.h"

namespace gptfast {
namespace {

using cpu::Dtype;
using cpu::Kernels;

/// weight rows [begin, n) times the rows of x [M, k].
Tensor gemv(const Kernels& kernels, const cpu::Weight& weight, const Tensor& x, int64_t begin = 0) {
  const auto rows = static_cast<int>(x.size(0));
  const auto bytes =
      static_cast<int64_t>(kernels.activation_bytes(weight.format, weight.k, weight.groupsize));
  const Tensor activations = at::empty({rows, bytes}, at::kByte);
  for (int m = 0; m < rows; ++m) {
    kernels.prepare(weight.format,
                    {.x = x.const_data_ptr<float>() + m * weight.k,
                     .norm_weight = nullptr,
                     .norm_dtype = Dtype::kFloat32,
                     .eps = 0,
                     .k = weight.k,
                     .groupsize = weight.groupsize},
                    static_cast<std::byte*>(activations.data_ptr()) + m * bytes);
  }
  const int64_t stride = (weight.n + 15) / 16 * 16;
  const Tensor out = at::empty({rows, stride});
  kernels.gemv(weight, begin, weight.n, activations.const_data_ptr(), rows, out.data_ptr<float>(),
               stride);
  return out.narrow(1, 0, weight.n - begin).clone();
}

TEST(CpuKernels, GemvMatchesExactProductsForOddSizes) {
  at::manual_seed(1);
  for (const Kernels* kernels : runnable()) {
    for (const FormatCase& c : kFormats) {
      for (const int64_t n : {1, 16, 33, 70}) {
        for (const int64_t k : {8, 32, 96, 101, 576, 1088}) {
          const TestWeight weight(c.format, n, k, c.groupsize);
          const Tensor x = at::randn({3, k});
          const double error = error_of_product(gemv(*kernels, weight.view, x), weight.values, x);
          EXPECT_LT(error, c.tolerance) << kernels->name << " " << to_string(c.format) << " g"
                                        << c.groupsize << " " << n << "x" << k;
        }
      }
    }
  }
}

/// A vocabulary's rows, of which the last tile has one.
TEST(CpuKernels, GemvMatchesExactProductsForManyRows) {
  at::manual_seed(2);
  for (const Kernels* kernels : runnable()) {
    for (const FormatCase& c : kFormats) {
      const TestWeight weight(c.format, 32001, 96, c.groupsize);
      const Tensor x = at::randn({2, 96});
      EXPECT_LT(error_of_product(gemv(*kernels, weight.view, x), weight.values, x), c.tolerance)
          << kernels->name << " " << to_string(c.format) << " g" << c.groupsize;
    }
  }
}

TEST(CpuKernels, Int4TakesFloat32ScalesThatBFloat16WouldRound) {
  at::manual_seed(2);
  for (const Kernels* kernels : runnable()) {
    const TestWeight weight(WeightFormat::kInt4, 40, 96, 32, at::kFloat);
    const Tensor x = at::randn({2, 96});
    EXPECT_LT(error_of_product(gemv(*kernels, weight.view, x), weight.values, x), kQuantized)
        << kernels->name;
  }
}

TEST(CpuKernels, RowsDoNotDependOnTheirNumberOrOnThePiece) {
  at::manual_seed(3);
  for (const Kernels* kernels : runnable()) {
    for (const FormatCase& c : kFormats) {
      const TestWeight weight(c.format, 50, 608, c.groupsize);
      const Tensor x = at::randn({8, 608});
      const Tensor all = gemv(*kernels, weight.view, x);
      for (int64_t rows = 1; rows < 8; ++rows) {
        for (int64_t first = 0; first + rows <= 8; ++first) {
          const Tensor some = gemv(*kernels, weight.view, x.narrow(0, first, rows));
          EXPECT_TRUE(at::equal(some, all.narrow(0, first, rows)))
              << kernels->name << " " << to_string(c.format) << " " << rows;
        }
      }
      EXPECT_TRUE(at::equal(gemv(*kernels, weight.view, x, 16), all.narrow(1, 16, 34)))
          << kernels->name;
    }
  }
}

TEST(CpuKernels, OneLargeColumnCostsLessThanBFloat16Activations) {
  at::manual_seed(4);
  for (const Kernels* kernels : runnable()) {
    for (const FormatCase& c : kFormats) {
      if (c.tolerance == kExact) continue;
      const TestWeight weight(c.format, 256, 1024, c.groupsize);
      Tensor x = at::randn({1, 1024});
      x[0][77] = 300;
      const Tensor expected = at::matmul(x.to(at::kDouble), weight.values.t());
      const Tensor rounded = at::matmul(x.to(at::kBFloat16).to(at::kDouble), weight.values.t());
      const double ours =
          (gemv(*kernels, weight.view, x).to(at::kDouble) - expected).norm().item<double>();
      const double bfloat16 = (rounded - expected).norm().item<double>();
      EXPECT_LT(ours, bfloat16) << kernels->name << " " << to_string(c.format) << " g"
                                << c.groupsize;
    }
  }
}

TEST(CpuKernels, NaNAndInfinityReachTheResult) {
  for (const Kernels* kernels : runnable()) {
    for (const FormatCase& c : kFormats) {
      const TestWeight weight(c.format, 16, 96, c.groupsize);
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        Tensor x = at::randn({1, 96});
        x[0][50] = bad;
        EXPECT_FALSE(at::isfinite(gemv(*kernels, weight.view, x)).any().item<bool>())
            << kernels->name << " " << to_string(c.format);
      }
    }
  }
}

TEST(CpuKernels, ConversionsMatchATen) {
  at::manual_seed(5);
  const Tensor special =
      at::tensor({0.0F, -0.0F, 1e-8F, 6e-8F, 3e-5F, 6.1e-5F, 65504.0F, 65519.0F, 65520.0F, 1e30F,
                  -1e30F, 3.3895e38F, std::numeric_limits<float>::infinity(), 1.00390625F,
                  1.01171875F, 0.333251953125F});
  const Tensor x =
      at::cat({special, at::randn({4001}) * at::pow(2.0, at::randint(-24, 16, {4001}))});
  for (const Kernels* kernels : runnable()) {
    for (const auto& [dtype, scalar] :
         {std::pair{Dtype::kBFloat16, at::kBFloat16}, std::pair{Dtype::kFloat16, at::kHalf}}) {
      const Tensor narrow = at::empty_like(x, x.options().dtype(scalar));
      kernels->from_float(x.const_data_ptr<float>(), x.numel(), dtype, narrow.data_ptr());
      EXPECT_TRUE(at::equal(narrow, x.to(scalar))) << kernels->name << " to " << scalar;
      const Tensor wide = at::empty_like(x);
      kernels->to_float(narrow.const_data_ptr(), dtype, x.numel(), wide.data_ptr<float>());
      EXPECT_TRUE(at::equal(wide, narrow.to(at::kFloat))) << kernels->name << " from " << scalar;
    }
  }
}

// ---- Ops against the reference

/// LibTorch's own threads would only wait for each other in products this small.
const bool kOneLibTorchThread = [] {
  at::set_num_threads(1);
  return true;
}();

/// A small decoder layer in one weight format, and what a step of it needs.
struct Layer {
  static constexpr int64_t kDim = 96, kHeads = 6, kKvHeads = 2, kHeadDim = 24, kHidden = 232,
                           kVocab = 333, kLength = 600;

  Layer(WeightFormat format, int64_t groupsize, at::ScalarType dtype)
      : dtype(dtype),
        norm_weight((at::randn({kDim}) * 0.1 + 1).to(dtype)),
        k_cache(at::randn({3, kKvHeads, kLength, kHeadDim}).to(dtype)),
        v_cache(at::randn({3, kKvHeads, kLength, kHeadDim}).to(dtype)),
        freqs_cis(precompute_freqs_cis(kLength, kHeadDim, 10000, at::kFloat, std::nullopt)),
        wqkv(make(format, groupsize, (kHeads + 2 * kKvHeads) * kHeadDim, kDim)),
        wo(make(format, groupsize, kDim, kHeads * kHeadDim)),
        w1(make(format, groupsize, kHidden, kDim)),
        w3(make(format, groupsize, kHidden, kDim)),
        w2(make(format, groupsize, kDim, kHidden)),
        output(
            make(format == WeightFormat::kInt4 ? WeightFormat::kInt8 : format, 0, kVocab, kDim)) {}

  Linear make(WeightFormat format, int64_t groupsize, int64_t n, int64_t k) const {
    Linear linear(k, n, WeightScheme{.format = format, .groupsize = groupsize});
    const Tensor w = at::randn({n, k}) / std::sqrt(static_cast<double>(k));
    switch (format) {
      case WeightFormat::kInt8:
        linear->weight.set_data(at::randint(-127, 128, {n, k}, at::kChar));
        linear->scales.set_data(at::full({n}, 0.01F));
        break;
      case WeightFormat::kInt4: {
        const int64_t padded = find_multiple(k, 1024);
        linear->scheme.layout = Int4Layout::kCuda;
        linear->weight.set_data(
            pack_int4_cuda(at::randint(0, 256, {n, padded / 2}, at::kByte), /*inner=*/2));
        linear->scales_and_zeros.set_data(
            (at::rand({padded / groupsize, n, 2}) * 0.02).to(at::kBFloat16));
        break;
      }
      case WeightFormat::kFloat32:
        linear->weight.set_data(w);
        break;
      case WeightFormat::kBFloat16:
        linear->weight.set_data(w.to(at::kBFloat16));
        break;
      case WeightFormat::kFloat16:
        linear->weight.set_data(w.to(at::kHalf));
        break;
    }
    linear->prepare(at::kCPU);
    return linear;
  }

  at::ScalarType dtype;
  Tensor norm_weight, k_cache, v_cache, freqs_cis;
  Linear wqkv, wo, w1, w3, w2, output;
};

struct LayerCase {
  WeightFormat format;
  int64_t groupsize;
  at::ScalarType dtype;
};

class CpuOps : public testing::TestWithParam<LayerCase> {
 protected:
  void SetUp() override { at::manual_seed(6); }
  static constexpr double kTolerance =
      5e-4;  // relative to the largest value; 15-bit activations, bfloat16 caches apart
  Layer layer{GetParam().format, GetParam().groupsize, GetParam().dtype};
  // Two sequences of two tokens in slots 2 and 0, on both sides of a split's end.
  StepRows rows{.tokens = at::tensor({5, 7, 332, 0}, at::kInt).view({2, 2}),
                .pos = at::tensor({255, 598}, at::kInt),
                .slot = at::tensor({2, 0}, at::kInt)};
};

TEST_P(CpuOps, Embed) {
  const Tensor table = at::randn({Layer::kVocab, Layer::kDim}).to(GetParam().dtype);
  rows.tokens[1][1] = Layer::kVocab;
  Tensor x = at::zeros({8, Layer::kDim});
  Tensor expected = at::zeros({8, Layer::kDim});
  ops::embed(rows, table, x);
  ops::reference::embed(rows, table, expected);
  EXPECT_TRUE(at::isnan(x[3]).all().item<bool>());
  EXPECT_TRUE(at::equal(x.narrow(0, 0, 3), expected.narrow(0, 0, 3)));
}

TEST_P(CpuOps, RmsQkvRopeAppend) {
  const Tensor x = at::randn({8, Layer::kDim});
  Tensor q = at::zeros({8, Layer::kHeads, Layer::kHeadDim});
  Tensor expected_q = at::zeros_like(q);
  Tensor k = layer.k_cache.clone(), v = layer.v_cache.clone();
  ops::rms_qkv_rope_append(rows, x, layer.norm_weight, 1e-5, *layer.wqkv, layer.freqs_cis, q, k, v);
  ops::reference::rms_qkv_rope_append(rows, x, layer.norm_weight, 1e-5, *layer.wqkv,
                                      layer.freqs_cis, expected_q, layer.k_cache, layer.v_cache);
  EXPECT_LT(relative_difference(q, expected_q), kTolerance);
  const double cache_tolerance =
      GetParam().dtype == at::kFloat ? kTolerance : 8e-3;  // a rounding of the dtype may flip
  EXPECT_LT(relative_difference(k, layer.k_cache), cache_tolerance);
  EXPECT_LT(relative_difference(v, layer.v_cache), cache_tolerance);
  EXPECT_TRUE(at::equal(k[1], layer.k_cache[1]));  // the slot that no row names
}

TEST_P(CpuOps, AttentionDecode) {
  const Tensor q = at::randn({8, Layer::kHeads, Layer::kHeadDim});
  Tensor partials = at::empty({8, Layer::kHeads, 3, Layer::kHeadDim + 2});
  Tensor y = at::zeros({8, Layer::kHeads * Layer::kHeadDim});
  Tensor expected = at::zeros_like(y);
  for (const int first : {0, 1, 2, 3, 254, 255, 256, 510, 511, 512, 598}) {
    rows.pos[0] = first;
    ops::attention_decode(rows, q, layer.k_cache, layer.v_cache, partials, y);
    ops::reference::attention_decode(rows, q, layer.k_cache, layer.v_cache, expected);
    EXPECT_LT(relative_difference(y, expected), 1e-5) << "position " << first;
  }
}

TEST_P(CpuOps, Projections) {
  const Tensor x = at::randn({8, Layer::kDim});
  const Tensor y = at::randn({8, Layer::kHeads * Layer::kHeadDim});
  Tensor h = at::zeros({8, Layer::kHidden});
  Tensor expected_h = at::zeros_like(h);
  ops::rms_gate_up_silu(5, x, layer.norm_weight, 1e-5, *layer.w1, *layer.w3, h);
  ops::reference::rms_gate_up_silu(5, x, layer.norm_weight, 1e-5, *layer.w1, *layer.w3, expected_h);
  EXPECT_LT(relative_difference(h, expected_h), kTolerance);

  Tensor out = x.clone(), expected = x.clone();
  ops::o_proj_residual(5, y, *layer.wo, out);
  ops::reference::o_proj_residual(5, y, *layer.wo, expected);
  ops::down_proj_residual(5, expected_h, *layer.w2, out);
  ops::reference::down_proj_residual(5, expected_h, *layer.w2, expected);
  EXPECT_LT(relative_difference(out, expected), kTolerance);

  Tensor logits = at::zeros({8, Layer::kVocab});
  Tensor expected_logits = at::zeros_like(logits);
  ops::rms_lm_head(5, x, layer.norm_weight, 1e-5, *layer.output, logits);
  ops::reference::rms_lm_head(5, x, layer.norm_weight, 1e-5, *layer.output, expected_logits);
  EXPECT_LT(relative_difference(logits, expected_logits), kTolerance);
}

TEST_P(CpuOps, BadPositionsAreErrors) {
  Tensor q = at::zeros({8, Layer::kHeads, Layer::kHeadDim});
  const Tensor x = at::randn({8, Layer::kDim});
  const auto append = [&] {
    ops::rms_qkv_rope_append(rows, x, layer.norm_weight, 1e-5, *layer.wqkv, layer.freqs_cis, q,
                             layer.k_cache, layer.v_cache);
  };
  rows.pos[1] = 599;
  EXPECT_NE(error_of(append).find("position 600 of slot 0"), std::string::npos);
  rows.pos[1] = 0;
  rows.slot[0] = 3;
  EXPECT_NE(error_of(append).find("slot 3"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Formats, CpuOps,
                         testing::Values(LayerCase{WeightFormat::kFloat32, 0, at::kFloat},
                                         LayerCase{WeightFormat::kBFloat16, 0, at::kBFloat16},
                                         LayerCase{WeightFormat::kFloat16, 0, at::kHalf},
                                         LayerCase{WeightFormat::kInt8, 0, at::kBFloat16},
                                         LayerCase{WeightFormat::kInt4, 32, at::kBFloat16},
                                         LayerCase{WeightFormat::kInt4, 64, at::kFloat},
                                         LayerCase{WeightFormat::kInt4, 256, at::kHalf}),
                         [](const auto& info) {
                           return std::string(to_string(info.param.format)) + "_g" +
                                  std::to_string(info.param.groupsize);
                         });

// ---- Whole steps

Transformer small_model(WeightFormat format, int64_t groupsize = 0) {
  ModelArgs config;
  config.block_size = 8192;
  config.vocab_size = 328;
  config.n_layer = 2;
  config.n_head = 6;
  config.n_local_heads = 2;
  config.dim = 96;
  config.intermediate_size = 256;
  config.finalize();
  Transformer model =
      random_model(config, {.format = format, .groupsize = groupsize}, at::kBFloat16, at::kCPU, 1);
  model->setup_caches(1, config.block_size);
  for (auto& layer : model->layers) {  // as if that many tokens had been seen
    layer->attention->kv_cache.k_cache.normal_();
    layer->attention->kv_cache.v_cache.normal_();
  }
  return model;
}

/// Logits [S, V] of tokens fed in one step of S rows at pos, or in S steps.
Tensor step_logits(Transformer& model, const Tensor& tokens, int64_t pos, bool at_once) {
  const SamplingParams greedy = make_sampling_params({.temperature = 0}, 1, at::kCPU);
  const int64_t S = tokens.size(1);
  if (at_once) {
    model->step(tokens, at::full({1}, pos, at::kInt), at::zeros({1}, at::kInt), greedy);
    return model->step_logits().narrow(0, 0, S).clone();
  }
  std::vector<Tensor> rows;
  for (int64_t s = 0; s < S; ++s)
    rows.push_back(step_logits(model, tokens.narrow(1, s, 1).contiguous(), pos + s, true));
  return at::cat(rows);
}

TEST(CpuStep, RowsAreBitIdenticalForEveryNumberOfRowsAndThreads) {
  for (const auto& [format, groupsize] :
       {std::pair{WeightFormat::kBFloat16, 0}, std::pair{WeightFormat::kInt8, 0},
        std::pair{WeightFormat::kInt4, 32}}) {
    set_num_threads(1);
    Transformer model = small_model(format, groupsize);
    const Tensor tokens = at::randint(0, 328, {1, 8}, at::kInt);
    const Tensor expected = step_logits(model, tokens, 252, /*at_once=*/false);
    for (const int threads : {1, 2, 5}) {
      set_num_threads(threads);
      for (int64_t rows = 1; rows <= 8; ++rows) {
        const Tensor some =
            step_logits(model, tokens.narrow(1, 0, rows).contiguous(), 252, /*at_once=*/true);
        EXPECT_TRUE(at::equal(some, expected.narrow(0, 0, rows)))
            << to_string(format) << " " << rows << " rows " << threads;
      }
    }
  }
  set_num_threads(0);
}

TEST(CpuStep, MatchesForwardAroundTheEndsOfSplits) {
  for (const auto& [format, groupsize] :
       {std::pair{WeightFormat::kBFloat16, 0}, std::pair{WeightFormat::kInt8, 0},
        std::pair{WeightFormat::kInt4, 64}}) {
    Transformer model = small_model(format, groupsize);
    model->set_reference(true);
    for (const int64_t pos : {0, 255, 256, 257, 8191}) {
      const Tensor tokens = at::randint(0, 328, {1, 1}, at::kInt);
      const Tensor expected = model->forward(tokens, at::full({1}, pos, at::kLong)).squeeze(0);
      // forward() rounds every activation to bfloat16.
      EXPECT_LT(relative_difference(step_logits(model, tokens, pos, true), expected), 0.03)
          << to_string(format) << " at " << pos;
    }
  }
}

TEST(CpuStep, PromptsMatchTheReference) {
  for (const auto& [format, groupsize] :
       {std::pair{WeightFormat::kBFloat16, 0}, std::pair{WeightFormat::kInt8, 0},
        std::pair{WeightFormat::kInt4, 32}}) {
    Transformer model = small_model(format, groupsize);
    const Tensor tokens = at::randint(0, 328, {1, 300}, at::kInt);
    const Tensor logits = model->forward(tokens, at::arange(300));
    model->set_reference(true);
    EXPECT_LT(relative_difference(logits, model->forward(tokens, at::arange(300))), 0.03)
        << to_string(format);
  }
}

TEST(CpuThreads, NumberIsCheckedAndKept) {
  EXPECT_GE(default_num_threads(), 1);
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  EXPECT_NE(error_of([] { set_num_threads(-1); }).find("num_threads is -1"), std::string::npos);
  EXPECT_NE(error_of([] { set_num_threads(kMaxThreads + 1); }).find("expected 0"),
            std::string::npos);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), default_num_threads());
}

TEST(CpuPath, IsCappedByTheEnvironment) {
  const std::string path = ops::path(at::kCPU);
  const char* cap = std::getenv("GPTFAST_CPU");
  if (cap == nullptr) {
    EXPECT_EQ(path, cpu::prompt_kernels() != nullptr ? "avx512_bf16" : runnable().back()->name);
    return;
  }
  for (const Kernels* kernels : runnable()) {
    if (std::string(cap) != kernels->name) continue;
    EXPECT_EQ(path, cap);
    EXPECT_EQ(cpu::prompt_kernels(), nullptr);
  }
}

}  // namespace
}  // namespace gptfast
