// GPTQ against the original's own run: test/golden/gptq holds its Hessians, codes and error
// figures. The figures are taken with the weights before GPTQ (the original's loop overwrites
// float32 weights in place).
#include "gptfast/gptq.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "gptfast/tokenizer.h"
#include "int4_layout.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Share of equal codes.
double agreement(const Tensor& q, const Tensor& expected) {
  const Tensor differ = q.bitwise_xor(expected);
  const auto wrong =
      (differ.bitwise_and(15) != 0).sum() + (differ.bitwise_right_shift(4) != 0).sum();
  return 1 - wrong.item<double>() / static_cast<double>(2 * q.numel());
}

/// A calibration problem with correlated inputs.
struct Problem {
  Tensor w, h;
};
Problem random_problem(int64_t n, int64_t k, uint64_t seed = 0) {
  at::manual_seed(seed);
  const Tensor x =
      at::mm(at::randn({4 * k, k}), at::randn({k, k})) / std::sqrt(static_cast<double>(k));
  return {.w = at::randn({n, k}), .h = at::mm(x.t(), x)};
}

class Golden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Gptq, Golden,
                         testing::Values("layers.0.attention.wqkv", "layers.0.attention.wo",
                                         "layers.0.feed_forward.w1"));

TEST_P(Golden, CodesAndScalesGivenTheHessian) {
  const std::string fqn = GetParam();
  const StateDict expected = load_checkpoint(golden("gptq/tiny-gqa.g32.pth"));
  const StateDict model = load_checkpoint(golden("tiny-gqa/model.fp32.pth"));
  const GptqWeight result = gptq_quantize(model.at(fqn + ".weight"), expected.at(fqn + ".H"), {});
  EXPECT_GE(agreement(pack_nibbles(result.codes), expected.at(fqn + ".q_nibbles")), 0.999);
  EXPECT_TRUE(at::equal(result.params.scales, expected.at(fqn + ".scales")));
  EXPECT_LT(relative_difference(result.params.zeros, expected.at(fqn + ".zeros")), 0.01);
}

TEST(Gptq, LargeGroups) {
  const Tensor h = load_checkpoint(golden("gptq/tiny-gqa.g32.pth")).at("layers.0.attention.wqkv.H");
  const Tensor w =
      load_checkpoint(golden("tiny-gqa/model.fp32.pth")).at("layers.0.attention.wqkv.weight");
  for (const int64_t g : {128, 256}) {
    const StateDict expected =
        load_checkpoint(golden("gptq/tiny-gqa.g" + std::to_string(g) + ".pth"));
    const GptqWeight result = gptq_quantize(w, h, {.groupsize = g});
    EXPECT_GE(agreement(pack_nibbles(result.codes),
                        expected.at("layers.0.attention.wqkv.q_nibbles")),
              0.999);
    EXPECT_TRUE(at::equal(result.params.scales, expected.at("layers.0.attention.wqkv.scales")));
  }
}

TEST(Gptq, WholeRunHasTheOriginalsErrors) {
  const TempDir dir;
  const CalibrationData data{.ids = load_checkpoint(golden("gptq/tiny-gqa.g32.pth"))
                                        .at("calibration_ids"),
                             .lengths = at::full({16}, 64, at::kLong)};
  std::ifstream in(golden("gptq/errors.json"));
  const json errors = json::parse(in);
  const auto layers = quantize_gptq(golden("tiny-gqa/model.fp32.pth"), dir / "out.pth", data, {});
  ASSERT_EQ(layers.size(), 3 * 5 + 1);
  for (const QuantizedLayer& layer : layers) {
    const json& expected = errors.at("g32").at(layer.name);
    EXPECT_NEAR(layer.error / expected.at("gptq").get<double>(), 1, 0.01) << layer.name;
    EXPECT_NEAR(layer.rounded_error / expected.at("rtn").get<double>(), 1, 0.02) << layer.name;
  }
  const Transformer model = load_model(dir / "out.pth", {.config = golden("tiny-gqa/config.json")});
  EXPECT_EQ(model->output->scheme.groupsize, 32);
}

TEST(Gptq, BeatsRoundingToNearest) {
  const auto [w, h] = random_problem(64, 256);
  for (const bool act_order : {false, true}) {
    const GptqWeight result = gptq_quantize(w, h, {.groupsize = 64, .act_order = act_order});
    EXPECT_LT(result.error, 0.8 * result.rounded_error);
    // The codes and parameters are what the error was computed with.
    const Int4Weight stored{.q = pack_nibbles(result.codes),
                            .scales = result.params.scales,
                            .zeros = result.params.zeros,
                            .in_features = 256,
                            .groupsize = 64};
    EXPECT_LT(relative_difference(stored.dequantize(), result.dequantized), 0.01);
  }
}

TEST(Gptq, ActOrderKeepsTheScalesOfRounding) {
  const auto [w, h] = random_problem(16, 128);
  const GroupParams rounded = int4_group_params(w, 32);
  const GptqWeight result = gptq_quantize(w, h, {.groupsize = 32, .act_order = true});
  EXPECT_TRUE(at::equal(result.params.scales, rounded.scales));
  EXPECT_TRUE(at::equal(result.params.zeros, rounded.zeros));
}

TEST(Gptq, AGpuGivesTheSameCodes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const auto [w, h] = random_problem(96, 320);
  for (const bool act_order : {false, true}) {
    const GptqOptions options{.groupsize = 64, .act_order = act_order};
    const GptqWeight cpu = gptq_quantize(w, h, options), gpu = gptq_quantize(w.cuda(), h, options);
    EXPECT_TRUE(gpu.codes.is_cuda());
    EXPECT_GE(agreement(pack_nibbles(gpu.codes.cpu()), pack_nibbles(cpu.codes)), 0.995);
    EXPECT_LT(relative_difference(gpu.params.scales.cpu(), cpu.params.scales), 0.01);
    EXPECT_NEAR(gpu.error / cpu.error, 1, 0.01);
  }
}

TEST(Gptq, AWholeRunOnAGpuHasTheErrorsOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const TempDir dir;
  const CalibrationData data{.ids = load_checkpoint(golden("gptq/tiny-gqa.g32.pth"))
                                        .at("calibration_ids"),
                             .lengths = at::full({16}, 64, at::kLong)};
  for (const bool act_order : {false, true}) {
    GptqRunOptions options{.gptq = {.act_order = act_order}};
    const fs::path model = golden("tiny-gqa/model.fp32.pth");
    const auto cpu = quantize_gptq(model, dir / "cpu.pth", data, options);
    options.device = at::Device(at::kCUDA, 0);
    const auto gpu = quantize_gptq(model, dir / "gpu.pth", data, options);
    ASSERT_EQ(gpu.size(), cpu.size());
    for (size_t i = 0; i < cpu.size(); ++i)
      EXPECT_NEAR(gpu[i].error / cpu[i].error, 1, 0.01) << cpu[i].name;
  }
}

TEST(Gptq, AShortLastGroup) {
  const auto [w, h] = random_problem(16, 80);
  for (const bool act_order : {false, true}) {
    const GptqWeight result = gptq_quantize(w, h, {.groupsize = 64, .act_order = act_order});
    EXPECT_EQ(result.params.scales.size(1), 2);
    EXPECT_LT(result.error, result.rounded_error);
  }
}

TEST(Gptq, DeadColumnsBecomeZero) {
  auto [w, h] = random_problem(16, 64);
  h.select(0, 5).zero_();
  h.select(1, 5).zero_();
  const GptqWeight result = gptq_quantize(w, h, {});
  EXPECT_TRUE(at::isfinite(result.dequantized).all().item<bool>());
  EXPECT_LT(result.dequantized.select(1, 5).abs().max().item<float>(), 0.3);  // within a step of 0
}

TEST(Gptq, ALayerWithoutInputIsRounded) {
  const auto [w, h] = random_problem(16, 64);
  const GptqWeight result = gptq_quantize(w, at::zeros_like(h), {});
  EXPECT_FALSE(result.calibrated);
  EXPECT_TRUE(at::equal(result.codes, quantize_int4(w, int4_group_params(w, 32), 32)));
}

TEST(Gptq, DampingIsRaisedWhenTooLittle) {
  const auto [w, h] = random_problem(16, 64);
  Tensor indefinite = h.clone();
  indefinite.diagonal().sub_(h.diagonal().mean() * 0.5);
  const GptqWeight result = gptq_quantize(w, indefinite, {.percdamp = 0});
  EXPECT_GT(result.percdamp, 0);
  EXPECT_TRUE(at::isfinite(result.dequantized).all().item<bool>());
}

TEST(Gptq, BadInput) {
  const auto problem = random_problem(16, 64);
  const Tensor& w = problem.w;  // lambdas of clang 14 cannot take structured bindings
  const Tensor& h = problem.h;
  Tensor nan = h.clone();
  nan[3][4] = std::nan("");
  EXPECT_NE(error_of([&] {
              gptq_quantize(w, nan, {}, "layers.7.wo");
            }).find("layers.7.wo: the inputs hold NaN"),
            std::string::npos);
  for (const int64_t blocksize : {0, -1, 100}) {
    EXPECT_NE(error_of([&] { gptq_quantize(w, h, {.blocksize = blocksize}); }).find("--blocksize"),
              std::string::npos);
  }
  EXPECT_NE(error_of([&] { gptq_quantize(w, h, {.groupsize = 48}); }).find("32, 64, 128 or 256"),
            std::string::npos);
  EXPECT_THROW(gptq_quantize(w, h, {.percdamp = -1}), c10::Error);
}

// ---- Calibration data

TEST(CalibrationData, CutsDropsAndPads) {
  const std::vector<std::vector<int32_t>> sequences = {{1, 2, 3, 4}, {5, 6}, {}, {7, 8, 9}};
  const CalibrationData cut = calibration_data(sequences, 3, /*pad=*/false);
  EXPECT_TRUE(at::equal(cut.ids, at::tensor({1, 2, 3, 7, 8, 9}, at::kLong).view({2, 3})));
  const CalibrationData padded = calibration_data(sequences, 3, /*pad=*/true);
  EXPECT_TRUE(at::equal(padded.lengths, at::tensor({3, 2, 3}, at::kLong)));
  EXPECT_TRUE(at::equal(padded.ids[1], at::tensor({5, 6, 0}, at::kLong)));
  EXPECT_NE(error_of([&] {
              calibration_data(sequences, 5, /*pad=*/false);
            }).find("the longest of 4 has 4"),
            std::string::npos);
}

TEST(CalibrationData, PaddingDoesNotChangeTheResult) {
  const TempDir dir;
  at::manual_seed(0);
  const Tensor ids = at::randint(0, 300, {8, 32}, at::kLong);
  const Tensor lengths = at::full({8}, 32, at::kLong);
  const fs::path model = golden("tiny-mha/model.fp32.pth");
  const auto exact = quantize_gptq(model, dir / "out.pth", {.ids = ids, .lengths = lengths}, {});
  const auto padded =
      quantize_gptq(model, dir / "out.pth",
                    {.ids = at::constant_pad_nd(ids, {0, 8}), .lengths = lengths}, {});
  for (size_t i = 0; i < exact.size(); ++i)
    EXPECT_NEAR(padded[i].error, exact[i].error, 0.02 * exact[i].error) << exact[i].name;
}

TEST(CalibrationData, OneTokenIsEnough) {
  const TempDir dir;
  const CalibrationData data = calibration_data({{7}}, 1, /*pad=*/false);
  const auto layers = quantize_gptq(golden("tiny-mha/model.fp32.pth"), dir / "out.pth", data, {});
  for (const QuantizedLayer& layer : layers) EXPECT_TRUE(std::isfinite(layer.error)) << layer.name;
  EXPECT_TRUE(at::isfinite(load_model(dir / "out.pth", {.config = golden("tiny-mha/config.json")})
                               ->output->dequantize())
                  .all()
                  .item<bool>());
}

TEST(CalibrationData, NaNInActivationsNamesTheLayerAndLeavesNothingBehind) {
  const TempDir dir;
  StateDict tensors = load_checkpoint(golden("tiny-mha/model.fp32.pth"));
  tensors.at("layers.1.ffn_norm.weight")[0].fill_(std::nan(""));
  save_checkpoint(dir / "model.pth", tensors);
  fs::copy(golden("tiny-mha/config.json"), dir / "config.json");
  const std::string error = error_of([&] {
    quantize_gptq(dir / "model.pth", dir / "out.pth", calibration_data({{1, 2, 3}}, 3, false), {});
  });
  EXPECT_NE(error.find("layers.1.feed_forward.w1: the inputs hold NaN"), std::string::npos)
      << error;
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 2);
}

TEST(CalibrationData, TokensAndLengthsMustFitTheModel) {
  const TempDir dir;
  const auto error = [&](const CalibrationData& data) {
    return error_of(
        [&] { quantize_gptq(golden("tiny-mha/model.fp32.pth"), dir / "out.pth", data, {}); });
  };
  EXPECT_NE(error(calibration_data({{300}}, 1, false)).find("outside the vocabulary of 300"),
            std::string::npos);
  EXPECT_NE(error(calibration_data({std::vector<int32_t>(513, 1)}, 513, false))
                .find("context of 512"),
            std::string::npos);
}

}  // namespace
}  // namespace gptfast
