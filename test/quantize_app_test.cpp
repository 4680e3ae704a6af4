// The quantize program: what it prints and writes, and one line of error for every mistake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gptfast/eval.h"
#include "gptfast/tokenizer.h"
#include "test_util.h"

namespace gptfast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

/// 15 sentences that differ: about 700 tokens of golden("eval")'s tokenizer.
std::string sample_text() {
  std::string text;
  for (int i = 0; i < 15; ++i)
    text += "Of the making of " + std::to_string(i * i) + " books there is no end. ";
  return text;
}

struct Outcome {
  int status = -1;
  std::string out;  // with 2>&1 in the arguments: stderr as well
};

class QuantizeApp : public ::testing::Test {
 protected:
  /// A folder with a tiny model, a tokenizer and a text.
  QuantizeApp() {
    fs::copy(golden("tiny-gqa") / "model.fp32.pth", dir_ / "model.pth");
    fs::copy(golden("tiny-gqa") / "config.json", dir_ / "config.json");
    fs::copy(golden("eval") / "tokenizer.model", dir_ / "tokenizer.model");
    write("text.txt", sample_text());
  }

  std::string write(const std::string& name, const std::string& contents) const {
    std::ofstream(dir_ / name, std::ios::binary) << contents;
    return (dir_ / name).string();
  }

  Outcome quantize(const std::string& arguments) const {
    // One LibTorch thread: on so small a model more would only wait for each other.
    const std::string command = "OMP_NUM_THREADS=1 " + std::string(GPTFAST_BIN) +
                                "/quantize --device cpu --checkpoint_path " +
                                (dir_ / "model.pth").string() + " " + arguments;
    Outcome run;
    FILE* pipe = popen(command.c_str(), "r");
    std::array<char, 4096> buffer{};
    while (const size_t size = fread(buffer.data(), 1, buffer.size(), pipe))
      run.out.append(buffer.data(), size);
    run.status = WEXITSTATUS(pclose(pipe));
    return run;
  }

  json quantize_json(const std::string& arguments) const {
    const Outcome run = quantize(arguments + " --json --quiet");
    EXPECT_EQ(run.status, 0) << run.out;
    return json::parse(run.out);
  }

  /// One line of error, and no file of the result or part of it.
  void expect_error(const std::string& arguments, int status, const std::string& part) const {
    const Outcome run = quantize(arguments + " --quiet 2>&1");
    EXPECT_EQ(run.status, status) << run.out;
    EXPECT_THAT(run.out, HasSubstr("quantize: "));
    EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 1) << run.out;
    EXPECT_THAT(run.out, HasSubstr(part));
    for (const auto& entry : fs::directory_iterator(dir_.path())) {
      EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr("int4"))) << arguments;
    }
  }

  double perplexity(const fs::path& model_file) const {
    Transformer model = load_model(model_file, {});
    return text_perplexity(model, *Tokenizer::load(dir_ / "tokenizer.model"), sample_text(), 2048,
                           2048, {})
        .perplexity;
  }

  TempDir dir_;
};

TEST_F(QuantizeApp, WritesTheOriginalsNamesAndJson) {
  const json result = quantize_json("");
  EXPECT_EQ(result.at("mode"), "int8");
  EXPECT_EQ(result.at("output"), (dir_ / "model_int8.pth").string());
  EXPECT_EQ(result.at("layers").size(), 3 * 5 + 1);
  EXPECT_EQ(result.at("layers").at(0).at("scheme"), "int8");
  EXPECT_TRUE(fs::exists(dir_ / "model_int8.pth"));
  quantize_json("-q int4 --groupsize 64 --label _new_");
  EXPECT_TRUE(fs::exists(dir_ / "model_new_int4.g64.pth"));
}

TEST_F(QuantizeApp, ReportsLayersAndPerplexity) {
  const std::string text = (dir_ / "text.txt").string();
  const json report = quantize_json("--mode int4 --report --report_text " + text).at("report");
  ASSERT_EQ(report.at("layers").size(), 3 * 5 + 1);
  const Transformer before = load_model(dir_ / "model.pth", {});
  const Transformer after = load_model(dir_ / "model_int4.g32.pth", {});
  const Tensor original = before->layers[0]->attention->wqkv->dequantize();
  const Tensor error = after->layers[0]->attention->wqkv->dequantize() - original;
  const json& layer = report.at("layers").at(0);
  EXPECT_EQ(layer.at("name"), "layers.0.attention.wqkv");
  EXPECT_EQ(layer.at("scheme"), "int4");
  EXPECT_NEAR(layer.at("max_error"), error.abs().max().item<double>(), 1e-6);
  EXPECT_NEAR(layer.at("mean_error"), error.abs().mean().item<double>(), 1e-6);
  EXPECT_NEAR(layer.at("signal_noise_db"),
              20 * std::log10((original.norm() / error.norm()).item<double>()), 1e-3);
  const int64_t n = original.size(0);
  EXPECT_EQ(layer.at("bytes"), n * 256 / 2 + 2 * n * (256 / 32) * 2);
  // In bfloat16, where the division of a prompt among the threads shows.
  const double original_perplexity = perplexity(dir_ / "model.pth");
  const double quantized_perplexity = perplexity(dir_ / "model_int4.g32.pth");
  EXPECT_NEAR(report.at("perplexity_before").get<double>() / original_perplexity, 1, 0.01);
  EXPECT_NEAR(report.at("perplexity_after").get<double>() / quantized_perplexity, 1, 0.01);
  EXPECT_NE(report.at("perplexity_before"), report.at("perplexity_after"));

  const Outcome table = quantize("--mode int8 --report --report_text " + text);
  ASSERT_EQ(table.status, 0);
  EXPECT_THAT(table.out, HasSubstr("layer                            scheme     max error"));
  EXPECT_THAT(table.out, HasSubstr("layers.2.feed_forward.w2         int8"));
  EXPECT_THAT(table.out, HasSubstr("perplexity: "));
}

TEST_F(QuantizeApp, RefusesAReportThatItCannotMake) {
  expect_error("--report_text x", 2, "--report_text needs --report");
  expect_error("--mode int4 --report --report_text /nowhere/text", 1,
               "cannot read '/nowhere/text'");
  expect_error("--mode int4 --report --report_text " + write("empty.txt", ""), 1, "has 0 tokens");
  fs::remove(dir_ / "tokenizer.model");
  expect_error("--mode int4 --report --report_text " + (dir_ / "text.txt").string(), 1,
               "tokenizer");
}

TEST_F(QuantizeApp, CalibratesOnAText) {
  const std::string flags = "--mode int4-gptq --calibration_seq_length 32 --calibration_file " +
                            (dir_ / "text.txt").string();
  const json result = quantize_json(flags);
  EXPECT_EQ(result.at("output"), (dir_ / "model_int4-gptq.g32.pth").string());
  ASSERT_EQ(result.at("layers").size(), 3 * 5 + 1);
  for (const json& layer : result.at("layers")) {
    EXPECT_LT(layer.at("error"), layer.at("rounded_error")) << layer.at("name");
  }
  const auto again = quantize_json(flags + " --label _again_");
  EXPECT_EQ(again.at("layers"), result.at("layers")) << "nothing in it is random";
}

TEST_F(QuantizeApp, CalibratesOnTasks) {
  const std::string flags = "--mode int4-gptq --calibration_tasks piqa --data_dir " +
                            golden("eval").string() + " --calibration_seq_length ";
  // No request of piqa has 500 tokens: all are dropped, or padded.
  expect_error(flags + "500", 1, "or --pad_calibration_inputs");
  const json padded = quantize_json(flags + "500 --pad_calibration_inputs");
  const json cut = quantize_json(flags + "16");
  for (size_t i = 0; i < cut.at("layers").size(); ++i) {
    EXPECT_LT(padded.at("layers").at(i).at("error"), padded.at("layers").at(i).at("rounded_error"));
    EXPECT_NE(padded.at("layers").at(i).at("error"), cut.at("layers").at(i).at("error"));
  }
}

TEST_F(QuantizeApp, RefusesCalibrationTextsInOneLine) {
  const std::string flags = "--mode int4-gptq --calibration_file ";
  expect_error(flags + "/nowhere/text", 1, "/nowhere/text");
  expect_error(flags + dir_.path().string(), 1, "is a directory");
  expect_error(flags + write("empty.txt", ""), 1, "is empty");
  expect_error(flags + write("latin1.txt", "caf\xe9 noir"), 1, "not UTF-8: byte 3");
  expect_error(flags + write("short.txt", "A short text."), 1, "--calibration_seq_length 100");
  expect_error(flags + (dir_ / "text.txt").string() + " --calibration_tasks piqa", 2,
               "one of --calibration_file and --calibration_tasks");
  expect_error(flags + (dir_ / "text.txt").string() +
                   " --calibration_seq_length 4096 "
                   "--pad_calibration_inputs",
               1, "context of 2048");
  expect_error("--mode int4-gptq --calibration_tasks mmlu", 1, "Known tasks");
  expect_error("--mode int4-gptq --data_dir " + dir_.path().string(), 1, "scripts/eval_data.py");
}

TEST_F(QuantizeApp, RefusesOptionsInOneLine) {
  expect_error("--mode int4 --groupsize 96", 2, "--groupsize must be one of 32, 64, 128, 256");
  expect_error("--mode int4-gptq --blocksize 48", 1, "--blocksize 48 does not fit groups of 32");
  expect_error("--mode int4-gptq --percdamp 2", 2, "--percdamp");
  expect_error("--mode int8 --groupsize 64", 2, "--groupsize needs an int4 mode");
  expect_error("--mode int4 --act_order", 2, "--act_order needs --mode int4-gptq");
  fs::remove(dir_ / "model.pth");
  expect_error("", 1, (dir_ / "model.pth").string());
}

}  // namespace
}  // namespace gptfast
