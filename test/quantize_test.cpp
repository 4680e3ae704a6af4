// Quantization against the files that the original's quantize.py writes, byte for byte.
#include "gptfast/quantize.h"

#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "int4_layout.h"
#include "sha256.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string sha256_of(const Tensor& tensor) {
  const Tensor bytes = tensor.contiguous();
  Sha256 hash;
  hash.update({static_cast<const uint8_t*>(bytes.const_data_ptr()), bytes.nbytes()});
  return hash.hex_digest();
}

json read_json(const fs::path& file) {
  std::ifstream in(file);
  return json::parse(in);
}

/// The folder of a tiny model of the golden data as a temporary copy that can be written to.
class ModelDir : public TempDir {
 public:
  explicit ModelDir(const std::string& name) {
    fs::copy(golden(name) / "config.json", *this / "config.json");
    fs::copy(golden(name) / "model.fp32.pth", *this / "model.pth");
  }
  fs::path model() const { return *this / "model.pth"; }
};

void expect_same(const StateDict& actual, const StateDict& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    const Tensor* found = actual.find(name);
    ASSERT_NE(found, nullptr) << name;
    EXPECT_EQ(found->scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(found->sizes(), tensor.sizes()) << name;
    EXPECT_EQ(sha256_of(*found), sha256_of(tensor)) << name;
  }
}

// ---- Primitives

TEST(QuantizeInt8, EdgeRows) {
  const StateDict expected = load_checkpoint(golden("quantize/int8_primitive_edge_rows.pth"));
  const auto [weight, scales] = quantize_int8(expected.at("w"));
  EXPECT_TRUE(at::equal(weight, expected.at("q")));
  EXPECT_TRUE(at::equal(scales, expected.at("scales")));
}

TEST(QuantizeInt4, EdgeGroups) {
  const StateDict expected = load_checkpoint(golden("quantize/int4_edge_groups.g32.pth"));
  for (const auto& [dtype, q, suffix] : {std::tuple{at::kBFloat16, "q_bf16", "_bf16in"},
                                         std::tuple{at::kFloat, "q_fp32", "_fp32in"}}) {
    const Tensor w = expected.at("w").to(dtype);
    const GroupParams params = int4_group_params(w, 32);
    EXPECT_TRUE(at::equal(params.scales, expected.at(std::string("scales") + suffix)));
    EXPECT_TRUE(at::equal(params.zeros, expected.at(std::string("zeros") + suffix)));
    EXPECT_TRUE(at::equal(quantize_int4(w, params, 32).to(at::kInt), expected.at(q)));
  }
}

TEST(QuantizeInt4, PacksAnOddColumnAlone) {
  const Tensor codes = at::tensor({1, 2, 3}, at::kByte).view({1, 3});
  EXPECT_TRUE(at::equal(pack_nibbles(codes), at::tensor({0x21, 0x03}, at::kByte).view({1, 2})));
}

TEST(QuantizeInt4, FilePadsAsTheRuntimeExpects) {
  EXPECT_EQ(int4_file_features(4096, 32), 4096);
  EXPECT_EQ(int4_file_features(11008, 128), 11008);  // 86 tiles of 128
  EXPECT_EQ(int4_file_features(11008, 256), 11008);
  EXPECT_EQ(int4_file_features(11136, 256), 11264);  // no whole number of groups
  EXPECT_EQ(int4_file_features(576, 64), 1024);
  EXPECT_EQ(int4_file_features(96, 32), 1024);
}

// ---- Files

TEST(QuantizeFile, Int8IsTheOriginalsFile) {
  const ModelDir dir("tiny-mha");
  const auto layers = quantize(dir.model(), dir / "out.pth", {.format = WeightFormat::kInt8});
  EXPECT_EQ(layers.size(), 2 * 5 + 1);
  expect_same(load_checkpoint(dir / "out.pth"),
              load_checkpoint(golden("quantize/tiny-mha.int8.pth")));
}

TEST(QuantizeFile, Int8OfAnotherModelHasTheOriginalsHashes) {
  const ModelDir dir("tiny-gqa");
  quantize(dir.model(), dir / "out.pth", {.format = WeightFormat::kInt8});
  const json expected = read_json(golden("quantize/tiny-gqa.sha256.json")).at("int8");
  const StateDict actual = load_checkpoint(dir / "out.pth");
  EXPECT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : actual)
    EXPECT_EQ(sha256_of(tensor), expected.at(name).get<std::string>()) << name;
}

TEST(QuantizeFile, Int4IsTheOriginalsFileFromAGpu) {
  const ModelDir dir("tiny-gqa");
  quantize(dir.model(), dir / "out.pth", {.format = WeightFormat::kInt4, .groupsize = 32});
  expect_same(load_checkpoint(dir / "out.pth"),
              load_checkpoint(golden("quantize/tiny-gqa.int4.g32.pth")));
}

TEST(QuantizeFile, Int4OfEveryGroupSizeHasTheOriginalsHashes) {
  const ModelDir dir("tiny-gqa");
  const json expected = read_json(golden("quantize/tiny-gqa.sha256.json"));
  for (const int64_t g : {32, 64, 128, 256}) {
    const auto layers =
        quantize(dir.model(), dir / "out.pth", {.format = WeightFormat::kInt4, .groupsize = g});
    const StateDict actual = load_checkpoint(dir / "out.pth");
    int64_t compared = 0;
    for (const QuantizedLayer& layer : layers) {
      EXPECT_EQ(layer.scheme.groupsize, g);
      const Tensor& scales_and_zeros = actual.at(layer.name + ".scales_and_zeros");
      const Int4Weight weight = unpack_int4(actual.at(layer.name + ".weight"), scales_and_zeros,
                                            layer.in_features, Int4Layout::kAuto, layer.name);
      const json& hashes = expected.at("int4.g" + std::to_string(g));
      if (!hashes.contains(layer.name + ".q_nibbles"))
        continue;  // not every layer is in the golden data
      EXPECT_EQ(sha256_of(weight.q), hashes.at(layer.name + ".q_nibbles").get<std::string>())
          << layer.name;
      EXPECT_EQ(sha256_of(scales_and_zeros),
                hashes.at(layer.name + ".scales_and_zeros").get<std::string>())
          << layer.name;
      ++compared;
    }
    EXPECT_GE(compared, 6);
  }
}

/// A checkpoint of one block with the given sizes, and the configuration beside it.
void write_model(const fs::path& dir, int64_t dim, int64_t intermediate, int64_t vocab, bool tied) {
  std::ofstream(dir / "config.json")
      << json{{"dim", dim},          {"n_layer", 1},
              {"n_head", 2},         {"intermediate_size", intermediate},
              {"vocab_size", vocab}, {"tie_word_embeddings", tied}};
  at::manual_seed(0);
  const auto random = [](int64_t n, int64_t k) { return at::randn({n, k}).to(at::kBFloat16); };
  StateDict tensors;
  tensors.set("tok_embeddings.weight", random(vocab, dim));
  tensors.set("layers.0.attention.wqkv.weight", random(3 * dim, dim));
  tensors.set("layers.0.attention.wo.weight", random(dim, dim));
  tensors.set("layers.0.feed_forward.w1.weight", random(intermediate, dim));
  tensors.set("layers.0.feed_forward.w3.weight", random(intermediate, dim));
  tensors.set("layers.0.feed_forward.w2.weight", random(dim, intermediate));
  tensors.set("layers.0.ffn_norm.weight", at::ones({dim}, at::kBFloat16));
  tensors.set("layers.0.attention_norm.weight", at::ones({dim}, at::kBFloat16));
  tensors.set("norm.weight", at::ones({dim}, at::kBFloat16));
  if (!tied) tensors.set("output.weight", random(vocab, dim));
  save_checkpoint(dir / "model.pth", tensors);
}

TEST(QuantizeFile, Int4PadsInTheFileAndNotInMemory) {
  const TempDir dir;
  write_model(dir.path(), /*dim=*/96, /*intermediate=*/160, /*vocab=*/64, /*tied=*/false);
  const auto layers = quantize(dir / "model.pth", dir / "out.pth",
                               {.format = WeightFormat::kInt4, .groupsize = 64});
  const StateDict source = load_checkpoint(dir / "model.pth");
  const StateDict actual = load_checkpoint(dir / "out.pth");
  for (const QuantizedLayer& layer : layers) {
    EXPECT_EQ(layer.padded_k, 1024) << layer.name;
    EXPECT_EQ(actual.at(layer.name + ".weight").size(1), 1024 / 128);
    const Int4Weight weight =
        unpack_int4(actual.at(layer.name + ".weight"), actual.at(layer.name + ".scales_and_zeros"),
                    layer.in_features, Int4Layout::kAuto, layer.name);
    EXPECT_EQ(weight.q.size(1), layer.in_features / 2);
    EXPECT_EQ(weight.scales.size(1), (layer.in_features + 63) / 64);
    EXPECT_LT(relative_difference(weight.dequantize(), source.at(layer.name + ".weight")), 0.08);
  }
}

TEST(QuantizeFile, RowsThatAreNoMultipleOfEightStayBFloat16) {
  const TempDir dir;
  write_model(dir.path(), /*dim=*/128, /*intermediate=*/128, /*vocab=*/33, /*tied=*/false);
  const auto layers = quantize(dir / "model.pth", dir / "out.pth", {.format = WeightFormat::kInt4});
  EXPECT_EQ(layers.back().name, "output");
  EXPECT_EQ(layers.back().scheme.format, WeightFormat::kBFloat16);
  EXPECT_NE(layers.back().note.find("33 rows"), std::string::npos);
  EXPECT_NE(layers.back().note.find("Python original cannot load this file"), std::string::npos);
  const StateDict actual = load_checkpoint(dir / "out.pth");
  EXPECT_EQ(actual.at("output.weight").scalar_type(), at::kBFloat16);
  EXPECT_FALSE(actual.contains("output.scales_and_zeros"));
  EXPECT_EQ(load_model(dir / "out.pth", {})->output->scheme.format, WeightFormat::kBFloat16);
}

TEST(QuantizeFile, ATiedHeadGetsItsOwnQuantizedCopy) {
  const TempDir dir;
  write_model(dir.path(), /*dim=*/128, /*intermediate=*/128, /*vocab=*/64, /*tied=*/true);
  quantize(dir / "model.pth", dir / "out.pth", {.format = WeightFormat::kInt8});
  const StateDict actual = load_checkpoint(dir / "out.pth");
  EXPECT_EQ(actual.at("tok_embeddings.weight").scalar_type(), at::kBFloat16);
  EXPECT_EQ(actual.at("output.weight").scalar_type(), at::kChar);
  const Transformer model = load_model(dir / "out.pth", {});
  EXPECT_EQ(model->output->scheme.format, WeightFormat::kInt8);
  EXPECT_EQ(model->tok_embeddings->weight.scalar_type(), at::kBFloat16);
}

/// An int4 file whose codes never reach 15, as imported ones may be.
void write_import(const ModelDir& dir, const std::string& name, bool with_record) {
  quantize(dir.model(), dir / "int4.pth", {.format = WeightFormat::kInt4, .groupsize = 32});
  StateDict tensors = load_checkpoint(dir / "int4.pth");
  for (const auto& [key, tensor] : StateDict(tensors)) {
    if (tensor.scalar_type() == at::kInt) tensors.set(key, tensor.bitwise_and(0x77777777));
  }
  std::map<std::string, std::string> records;
  if (with_record) records[kInt4LayoutRecord] = "cuda";
  save_checkpoint(dir / name, tensors, records);
}

TEST(QuantizeFile, ARecordOrTheUserNamesTheLayout) {
  const ModelDir dir("tiny-gqa");
  write_import(dir, "without.pth", /*with_record=*/false);
  write_import(dir, "with.pth", /*with_record=*/true);
  const std::string error = error_of([&] { load_model(dir / "without.pth", {}); });
  EXPECT_NE(error.find("--int4_layout"), std::string::npos) << error;
  const Tensor told = load_model(dir / "with.pth", {})->layers[0]->attention->wo->dequantize();
  const Transformer model = load_model(dir / "without.pth", {.int4_layout = "cuda"});
  EXPECT_TRUE(at::equal(told, model->layers[0]->attention->wo->dequantize()));
  EXPECT_NE(error_of([&] { load_model(dir / "with.pth", {.int4_layout = "gpu"}); }).find("'gpu'"),
            std::string::npos);
}

TEST(QuantizeFile, PythonLoadsAFileWithARecord) {
  const char* python = std::getenv("GPTFAST_PYTHON");
  const std::string interpreter = python != nullptr ? python : "python3";
  if (std::system((interpreter + " -c 'import torch' 2>/dev/null").c_str()) != 0)
    GTEST_SKIP() << "no Python with torch; GPTFAST_PYTHON names one";
  const ModelDir dir("tiny-gqa");
  write_import(dir, "with.pth", /*with_record=*/true);
  std::ofstream(dir / "check.py")
      << "import sys, torch\n"
         "d = torch.load(sys.argv[1], mmap=True, weights_only=True)\n"
         "assert d['output.weight'].shape == (64, 2, 32, 4), d\n"
         "assert d['output.scales_and_zeros'].dtype == torch.bfloat16\n";
  const std::string command =
      interpreter + " " + (dir / "check.py").string() + " " + (dir / "with.pth").string();
  EXPECT_EQ(std::system(command.c_str()), 0);
}

// ---- Bad input

TEST(QuantizeFile, AGpuWritesTheSameFile) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const char* name : {"tiny-gqa", "tiny-mha", "tiny-moe"}) {
    const ModelDir dir(name);
    for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt4}) {
      SCOPED_TRACE(std::string(name) + " " + to_string(format));
      quantize(dir.model(), dir / "cpu.pth", {.format = format});
      quantize(dir.model(), dir / "gpu.pth",
               {.format = format, .device = at::Device(at::kCUDA, 0)});
      expect_same(load_checkpoint(dir / "gpu.pth"), load_checkpoint(dir / "cpu.pth"));
    }
  }
}

TEST(QuantizeFile, RefusesAQuantizedFile) {
  const ModelDir dir("tiny-mha");
  quantize(dir.model(), dir / "model_int8.pth", {.format = WeightFormat::kInt8});
  const std::string error = error_of([&] {
    quantize(dir / "model_int8.pth", dir / "again.pth", {.format = WeightFormat::kInt4});
  });
  EXPECT_NE(error.find("model_int8.pth' is quantized already"), std::string::npos) << error;
  EXPECT_FALSE(fs::exists(dir / "again.pth"));
}

TEST(QuantizeFile, RefusesNaNAndLeavesNothingBehind) {
  const TempDir dir;
  write_model(dir.path(), /*dim=*/64, /*intermediate=*/128, /*vocab=*/32, /*tied=*/false);
  StateDict tensors = load_checkpoint(dir / "model.pth");
  tensors.at("layers.0.feed_forward.w2.weight")[1][2].fill_(std::nan(""));
  save_checkpoint(dir / "nan.pth", tensors);
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt4}) {
    const std::string error =
        error_of([&] { quantize(dir / "nan.pth", dir / "out.pth", {.format = format}); });
    EXPECT_NE(error.find("'layers.0.feed_forward.w2.weight' holds NaN"), std::string::npos)
        << error;
  }
  int files = 0;
  for (const auto& entry : fs::directory_iterator(dir.path()))
    files += entry.is_regular_file() ? 1 : 0;
  EXPECT_EQ(files, 3);  // config.json, model.pth, nan.pth
}

TEST(QuantizeFile, RefusesOtherGroupSizes) {
  const ModelDir dir("tiny-mha");
  for (const int64_t g : {0, 16, 96, 512}) {
    const std::string error = error_of([&] {
      quantize(dir.model(), dir / "out.pth", {.format = WeightFormat::kInt4, .groupsize = g});
    });
    EXPECT_NE(error.find("32, 64, 128 or 256"), std::string::npos) << error;
  }
}

TEST(QuantizeFile, ACutFileAndAWrongNameAreErrorsOnLoad) {
  const ModelDir dir("tiny-mha");
  quantize(dir.model(), dir / "model_int4.g32.pth", {.format = WeightFormat::kInt4});
  fs::copy(dir / "model_int4.g32.pth", dir / "model_int8.pth");
  EXPECT_NE(error_of([&] {
              load_model(dir / "model_int8.pth", {});
            }).find("named int8 but holds int4"),
            std::string::npos);
  fs::copy(dir / "model_int4.g32.pth", dir / "model_int4.g64.pth");
  EXPECT_NE(error_of([&] { load_model(dir / "model_int4.g64.pth", {}); }).find("group size 32"),
            std::string::npos);
  const auto size = fs::file_size(dir / "model_int4.g32.pth");
  for (const double share : {0.1, 0.5, 0.99}) {
    fs::resize_file(dir / "model_int4.g32.pth",
                    static_cast<uintmax_t>(static_cast<double>(size) * share));
    EXPECT_NE(error_of([&] {
                load_model(dir / "model_int4.g32.pth", {});
              }).find("model_int4.g32.pth"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace gptfast
