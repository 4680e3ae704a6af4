// The eval program: what it prints and writes, and one line of error for every mistake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "test_util.h"

namespace gptfast {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int status = -1;
  std::string out;
  std::string err;
};

std::string read_all(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

class EvalApp : public ::testing::Test {
 protected:
  /// A folder with the tiny model and a tokenizer.
  EvalApp() {
    namespace fs = std::filesystem;
    fs::copy(golden("tiny-gqa") / "model.fp32.pth", dir_ / "model.pth");
    fs::copy(golden("tiny-gqa") / "config.json", dir_ / "config.json");
    fs::copy(golden("eval") / "tokenizer.model", dir_ / "tokenizer.model");
  }

  Outcome eval(const std::string& arguments) const {
    return eval_text("--data_dir " + golden("eval").string() + " " + arguments);
  }

  Outcome eval_text(const std::string& arguments) const {
    const std::string err = (dir_ / "stderr").string();
    // One LibTorch thread: on so small a model more would only wait for each other.
    return execute("OMP_NUM_THREADS=1 " + std::string(GPTFAST_BIN) + "/eval --checkpoint_path " +
                       (dir_ / "model.pth").string() + " --device cpu --precision float32 " +
                       arguments + " 2>" + err,
                   err);
  }

  static Outcome execute(const std::string& command, const std::string& err) {
    Outcome run;
    FILE* pipe = popen(command.c_str(), "r");
    std::array<char, 4096> buffer{};
    while (const size_t size = fread(buffer.data(), 1, buffer.size(), pipe)) {
      run.out.append(buffer.data(), size);
    }
    run.status = WEXITSTATUS(pclose(pipe));
    run.err = read_all(err);
    return run;
  }

  TempDir dir_;
};

/// One line that starts with the program's name.
void expect_error(const Outcome& run, int status, const std::string& part) {
  EXPECT_EQ(run.status, status) << run.err;
  EXPECT_EQ(run.out, "");
  const size_t at = run.err.find("eval: ");
  ASSERT_NE(at, std::string::npos) << run.err;
  EXPECT_EQ(run.err.find('\n', at), run.err.size() - 1) << run.err;
  EXPECT_THAT(run.err, HasSubstr(part));
}

TEST_F(EvalApp, PrintsJsonAndWritesSamples) {
  const Outcome run = eval("--tasks piqa,lambada_openai wikitext --json --log_samples " +
                           (dir_ / "samples.jsonl").string());
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 1);
  const json output = json::parse(run.out);
  EXPECT_EQ(output["n_samples"], json({{"piqa", 3}, {"lambada_openai", 3}, {"wikitext", 1}}));
  EXPECT_TRUE(output["results"]["piqa"]["acc_norm_stderr,none"].is_number());
  EXPECT_TRUE(output["results"]["lambada_openai"]["perplexity_stderr,none"].is_number());
  EXPECT_EQ(output["results"]["wikitext"]["word_perplexity_stderr,none"], "N/A");
  std::ifstream samples(dir_ / "samples.jsonl");
  std::vector<json> lines;
  for (std::string line; std::getline(samples, line);) lines.push_back(json::parse(line));
  ASSERT_EQ(lines.size(), 7U);
  EXPECT_EQ(lines[1]["task"], "piqa");
  EXPECT_EQ(lines[1]["doc_id"], 1);
  EXPECT_EQ(lines[1]["doc"]["goal"], "dresser");
  EXPECT_EQ(lines[1]["target"], 1);
  EXPECT_EQ(lines[1]["arguments"][1][0], "Question: dresser\nAnswer:");
  double acc = 0;
  for (int i = 0; i < 3; ++i) {
    const bool second = lines[i]["resps"][1][0] > lines[i]["resps"][0][0];
    EXPECT_EQ(lines[i]["acc"], second == (lines[i]["target"] == 1) ? 1.0 : 0.0);
    acc += lines[i]["acc"].get<double>() / 3;
  }
  EXPECT_NEAR(output["results"]["piqa"]["acc,none"], acc, 1e-12);
}

TEST_F(EvalApp, PrintsTheTable) {
  const Outcome run = eval("--tasks arc_easy --limit 2 --quiet");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_THAT(run.out, HasSubstr("|Tasks   |Version|Filter|n-shot|"));
  EXPECT_THAT(run.out, HasSubstr("|arc_easy|      1|none  |     0|acc            |\u2191  |"));
  EXPECT_THAT(run.out, HasSubstr("|        |       |none  |     0|acc_norm       |\u2191  |"));
}

TEST_F(EvalApp, LimitAndBatchSizeDoNotChangeScores) {
  const auto acc = [&](const std::string& arguments) {
    const Outcome run = eval("--tasks hellaswag --json --bos original " + arguments);
    EXPECT_EQ(run.status, 0) << run.err;
    return json::parse(run.out)["results"]["hellaswag"];
  };
  EXPECT_EQ(acc("--batch_size 1"), acc("--batch_size 64"));
  EXPECT_EQ(acc("--limit 3"), acc(""));
}

TEST_F(EvalApp, ScoresATextFile) {
  std::ofstream(dir_ / "text.txt") << "In the beginning God created the heaven and the earth.";
  const Outcome run =
      eval_text("--perplexity " + (dir_ / "text.txt").string() + " --window 16 --stride 8 --json");
  ASSERT_EQ(run.status, 0) << run.err;
  const json figures = json::parse(run.out)["results"][(dir_ / "text.txt").string()];
  EXPECT_NEAR(figures["perplexity"], std::exp(figures["nll"].get<double>()),
              1e-6 * figures["perplexity"].get<double>());
  EXPECT_GT(figures["tokens"], 10);
  EXPECT_EQ(figures["window"], 16);
  expect_error(eval_text("--quiet --perplexity " + (dir_ / "text.txt").string() +
                         " --window 8 --stride 9"),
               1, "stride");
  expect_error(eval_text("--perplexity " + (dir_ / "none.txt").string()), 1, "cannot read");
  expect_error(eval_text("--perplexity x --tasks piqa"), 2,
               "--tasks does not go with --perplexity");
  expect_error(eval_text("--window 8"), 2, "--window needs --perplexity");
}

TEST_F(EvalApp, RefusesBadInputInOneLine) {
  expect_error(eval("--tasks mmlu"), 1, "Known tasks: arc_challenge, arc_easy, hellaswag");
  expect_error(eval("--tasks piqa --data_dir " + dir_.path().string()), 1, "scripts/eval_data.py");
  std::ofstream(dir_ / "piqa.jsonl") << "{\"goal\": 1}\n";
  expect_error(eval("--tasks piqa --data_dir " + dir_.path().string()), 1, "piqa.jsonl:1: ");
  std::ofstream(dir_ / "wikitext.jsonl") << R"({"page": ""})"
                                            "\n";
  expect_error(eval("--tasks wikitext --quiet --data_dir " + dir_.path().string()), 1,
               "no text to score");
  expect_error(eval("--tasks piqa --limit 0"), 2, "--limit");
  expect_error(eval("--tasks piqa --quiet --max_seq_length 4096"), 1, "model's context of 2048");
  expect_error(eval("--tasks piqa --quiet --max_seq_length 8"), 1, "longest input of 8");
  expect_error(eval("--tasks piqa --log_samples " + (dir_ / "no" / "samples.jsonl").string()), 1,
               "samples.jsonl");
}

TEST_F(EvalApp, TruncatesALongContextOnTheLeft) {
  // lambada_openai's first context is longer than 192 tokens here; the harness cuts it, too.
  const Outcome run = eval("--tasks lambada_openai --json --max_seq_length 64");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_TRUE(json::parse(run.out)["results"]["lambada_openai"]["perplexity,none"].is_number());
}

TEST_F(EvalApp, NeedsATokenizer) {
  std::filesystem::remove(dir_ / "tokenizer.model");
  expect_error(eval("--tasks piqa --quiet"), 1, "--tokenizer_path");
}

TEST_F(EvalApp, LeavesNoSamplesBehindWhenItFails) {
  expect_error(eval("--tasks piqa --quiet --max_seq_length 8 --log_samples " +
                    (dir_ / "samples.jsonl").string()),
               1, "longest input");
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("samples")));
  }
}

}  // namespace
}  // namespace gptfast
