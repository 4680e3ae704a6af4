// Int4 layouts of files: against tensors that the original's operators packed on a GPU and on CPUs
// of three instruction sets.
#include "int4_layout.h"

#include <string>

#include "test_util.h"

namespace gptfast {
namespace {

struct Case {
  const char* name;
  int64_t in_features, groupsize;
};

class Int4LayoutTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    tensors_ = load_checkpoint(golden(std::string("int4/") + GetParam().name + ".pth"));
    q_ = tensors_.at("q_nibbles");  // [N, Kp / 2]
    scales_and_zeros_ = tensors_.at("scales_and_zeros");
  }

  void expect_unpacks(const Tensor& packed, Int4Layout layout) {
    const auto [name, in_features, groupsize] = GetParam();
    const Int4Weight weight = unpack_int4(packed, scales_and_zeros_, in_features, layout);
    const int64_t groups = (in_features + groupsize - 1) / groupsize;
    EXPECT_TRUE(at::equal(weight.q, q_.narrow(1, 0, in_features / 2)));
    EXPECT_TRUE(at::equal(weight.scales, scales_and_zeros_.select(2, 0).t().narrow(1, 0, groups)));
    EXPECT_TRUE(at::equal(weight.zeros, scales_and_zeros_.select(2, 1).t().narrow(1, 0, groups)));
    EXPECT_EQ(weight.in_features, in_features);
    EXPECT_EQ(weight.groupsize, groupsize);
  }

  StateDict tensors_;
  Tensor q_, scales_and_zeros_;
};

INSTANTIATE_TEST_SUITE_P(
    Golden, Int4LayoutTest,
    testing::Values(Case{"k256_n384_g32", 256, 32}, Case{"k256_n64_g64", 256, 64},
                    Case{"k512_n32_g256", 512, 256}, Case{"k512_n48_g128", 512, 128},
                    Case{"k576_pad1024_n32_g64", 576, 64}, Case{"k96_pad1024_n32_g32", 96, 32}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(Int4LayoutTest, PacksAsTheGpuOperator) {
  for (const int64_t inner : {2, 4, 8}) {
    EXPECT_TRUE(at::equal(pack_int4_cuda(q_, inner),
                          tensors_.at("packed_cuda_inner" + std::to_string(inner))));
  }
}

TEST_P(Int4LayoutTest, ReadsAndTellsTheCudaLayout) {
  for (const int64_t inner : {2, 4, 8}) {
    const Tensor& packed = tensors_.at("packed_cuda_inner" + std::to_string(inner));
    expect_unpacks(packed, Int4Layout::kCuda);
    expect_unpacks(packed, Int4Layout::kAuto);
  }
}

TEST_P(Int4LayoutTest, ReadsAndTellsTheCpuLayouts) {
  for (const Int4Layout layout : {Int4Layout::kCpu, Int4Layout::kCpuAvx2, Int4Layout::kCpuAvx512}) {
    const Tensor& packed = tensors_.at(std::string("packed_") + to_string(layout));
    expect_unpacks(packed, layout);
    expect_unpacks(packed, Int4Layout::kAuto);
    // LibTorch up to 2.4 showed the same bytes in the shape of the CUDA layout.
    const Tensor old = packed.view(at::kInt).view(tensors_.at("packed_cuda_inner8").sizes());
    expect_unpacks(old, layout);
    expect_unpacks(old, Int4Layout::kAuto);
  }
}

TEST(Int4Layout, UnknownLayoutIsAnErrorThatOneCanOverride) {
  // Codes that never reach 15: nothing to tell the layout by.
  const Tensor q = at::randint(0, 119, {32, 64}, at::kByte);
  const Tensor scales_and_zeros = at::ones({4, 32, 2}, at::kBFloat16);
  const Tensor packed = pack_int4_cuda(q, /*inner=*/8);
  const std::string error = error_of([&] {
    unpack_int4(packed, scales_and_zeros, 128, Int4Layout::kAuto, "layers.0.attention.wo");
  });
  EXPECT_NE(error.find("layers.0.attention.wo"), std::string::npos) << error;
  EXPECT_NE(error.find("--int4_layout"), std::string::npos) << error;
}

TEST(Int4Layout, ConstantWeightsLoad) {
  const Tensor packed = pack_int4_cuda(at::zeros({32, 64}, at::kByte), /*inner=*/8);
  const Int4Weight weight = unpack_int4(packed, at::ones({4, 32, 2}, at::kBFloat16), 128);
  EXPECT_EQ(weight.q.sum().item<int64_t>(), 0);
}

TEST(Int4Layout, ShapesThatFitNothingAreNamed) {
  const Tensor packed = pack_int4_cuda(at::zeros({32, 64}, at::kByte), /*inner=*/8);  // N 32, K 128
  const auto error = [&](const Tensor& weight, const Tensor& scales_and_zeros,
                         int64_t in_features) {
    return error_of(
        [&] { unpack_int4(weight, scales_and_zeros, in_features, Int4Layout::kAuto, "w2"); });
  };
  const Tensor good = at::ones({4, 32, 2}, at::kBFloat16);
  EXPECT_NE(error(packed, at::ones({3, 32, 2}), 128).find("w2: 3 groups for 128 columns"),
            std::string::npos);
  EXPECT_NE(error(packed, at::ones({4, 16, 2}), 128)
                .find("expected bfloat16 or float32 [groups, 32, 2]"),
            std::string::npos);
  EXPECT_NE(error(packed, good.to(at::kHalf), 128).find("expected bfloat16 or float32"),
            std::string::npos);
  EXPECT_NE(error(packed, good, 96).find("128 columns, but the layer has 96"), std::string::npos);
  EXPECT_NE(error(packed.flatten(), good, 128).find("is no int4 weight"), std::string::npos);
  EXPECT_THROW(int4_layout_from_string("gpu"), c10::Error);
}

}  // namespace
}  // namespace gptfast
