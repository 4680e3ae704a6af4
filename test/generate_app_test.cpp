// The generate program: its JSON, its flags, and one line for every mistake.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "gptfast/chat.h"
#include "gptfast/generate.h"
#include "run_program.h"
#include "test_util.h"

namespace gptfast {
namespace {

using nlohmann::json;

const std::string kModel = golden("tiny-gqa/model.fp32.pth").string();
const std::string kRun =
    "generate --checkpoint_path " + kModel +
    " --device cpu --precision float32 --temperature 0 --quiet --num_threads 1 ";

/// The prompt of the golden data as a flag.
std::string golden_prompt() {
  const Tensor ids = load_checkpoint(golden("tiny-gqa/golden.fp32.pth")).at("prompt_ids");
  std::string flag = "--prompt_ids ";
  for (int64_t i = 0; i < ids.numel(); ++i)
    flag += (i > 0 ? "," : "") + std::to_string(ids[i].item<int64_t>());
  return flag + " ";
}

std::vector<json> json_lines(const std::string& flags) {
  const ProgramResult result = run_program(kRun + flags + " --json 2>/dev/null");
  EXPECT_EQ(result.status, 0) << flags;
  std::vector<json> lines;
  std::istringstream stream(result.out);
  for (std::string line; std::getline(stream, line);) lines.push_back(json::parse(line));
  return lines;
}

TEST(GenerateProgram, JsonHasEveryField) {
  const auto lines =
      json_lines(golden_prompt() + "--num_samples 2 --batch_size 2 --max_new_tokens 8");
  ASSERT_EQ(lines.size(), 4U);
  const Tensor expected = load_checkpoint(golden("tiny-gqa/golden.fp32.pth")).at("decode_tokens");
  int64_t bytes = 0;  // all but the embedding
  for (const auto& [name, tensor] : load_checkpoint(kModel)) {
    if (name != "tok_embeddings.weight") bytes += static_cast<int64_t>(tensor.nbytes());
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    const json& line = lines[i];
    EXPECT_EQ(line.at("sample"), i / 2);
    EXPECT_EQ(line.at("row"), i % 2);
    EXPECT_EQ(line.at("prompt_ids").size(), 24U);
    EXPECT_EQ(line.at("new_tokens"), 8);
    EXPECT_EQ(line.at("finish_reason"), "length");
    for (size_t t = 0; t < 8; ++t)
      EXPECT_EQ(line.at("token_ids").at(t), expected[static_cast<int64_t>(t)].item<int64_t>());
    for (const char* figure : {"seconds", "prefill_seconds", "tokens_per_sec",
                               "decode_tokens_per_sec", "bandwidth_gb_s"}) {
      EXPECT_GT(line.at(figure).get<double>(), 0) << figure;
    }
    EXPECT_EQ(line.at("model_bytes"), bytes);
    EXPECT_TRUE(line.at("text").is_string());
    EXPECT_TRUE(line.at("accept_counts").is_array());
    EXPECT_NE(std::string("cuda avx512_bf16 avx512 avx2 portable")
                  .find(line.at("path").get<std::string>()),
              std::string::npos);
  }
}

TEST(GenerateProgram, TheReferencePathSaysSoAndAgrees) {
  const std::string flags = golden_prompt() + "--num_samples 1 --max_new_tokens 8";
  const json fast = json_lines(flags).at(0), reference = json_lines(flags + " --reference").at(0);
  EXPECT_EQ(reference.at("path"), "reference");
  EXPECT_EQ(reference.at("token_ids"), fast.at("token_ids"));
}

TEST(GenerateProgram, SpeculationGivesTheSameText) {
  const std::string draft = golden("tiny-draft/model.fp32.pth").string(),
                    flags = golden_prompt() + "--num_samples 1 --max_new_tokens 20 ";
  const json plain = json_lines(flags).at(0),
             drafted = json_lines(flags + "--draft_checkpoint_path " + draft).at(0);
  EXPECT_EQ(drafted.at("token_ids"), plain.at("token_ids"));
  EXPECT_EQ(drafted.at("accept_counts").size(), 6U);
  EXPECT_EQ(json_lines(flags + "--draft lookup --speculate_k 3").at(0).at("token_ids"),
            plain.at("token_ids"));
  const ProgramResult words =
      run_program(kRun + flags + "--draft_checkpoint_path " + draft + " 2>/dev/null");
  EXPECT_NE(words.out.find("Mean Accepted: "), std::string::npos);
}

TEST(GenerateProgram, ZeroTokensAndSyntheticPrompts) {
  EXPECT_EQ(json_lines("--prompt_ids 5,6,7 --num_samples 1 --max_new_tokens 0")
                .at(0)
                .at("prompt_ids"),
            (json{5, 6, 7}));
  EXPECT_EQ(json_lines("--prompt 40 --num_samples 1 --max_new_tokens 1")
                .at(0)
                .at("prompt_ids")
                .size(),
            40U);
}

TEST(GenerateProgram, WritesLogitsForPython) {
  const TempDir dir;
  const std::string file = (dir / "logits.pth").string();
  json_lines(golden_prompt() + "--num_samples 1 --max_new_tokens 4 --logits_out " + file);
  const StateDict out = load_checkpoint(file),
                  g = load_checkpoint(golden("tiny-gqa/golden.fp32.pth"));
  EXPECT_EQ(out.at("tokens").numel(), 27);
  EXPECT_LT(relative_difference(out.at("logits").narrow(0, 0, 24), g.at("prefill_logits")), 1e-5);
}

/// How often each named range occurs in a Chrome trace.
std::map<std::string, int> ranges_of(const std::string& file) {
  std::map<std::string, int> ranges;
  const json trace = json::parse(std::ifstream(file));
  for (const json& event : trace.at("traceEvents")) ++ranges[event.value("name", "")];
  return ranges;
}

TEST(GenerateProgram, ProfilesTheLastSample) {
  const TempDir dir;
  const std::string name = (dir / "trace").string();
  const std::string run =
      kRun + "--prompt_ids 1,2,3 --num_samples 2 --max_new_tokens 4 --profile " + name;
  const ProgramResult alone = run_program(run + " 2>&1 >/dev/null");
  EXPECT_EQ(alone.status, 0);
  EXPECT_EQ(alone.out, "") << "nothing about drivers";
  const auto ranges = ranges_of(name + ".json");
  for (const char* op : {"rms_qkv_rope_append", "attention_decode", "o_proj_residual",
                         "rms_gate_up_silu", "down_proj_residual"}) {
    EXPECT_EQ(ranges.at(std::string("gptfast::") + op), 4 * 3) << "four steps of three layers";
  }
  EXPECT_EQ(ranges.at("gptfast::rms_lm_head"), 4);
  EXPECT_EQ(run_program(run + " --tensor_parallel 2 2>&1 >/dev/null").status, 0);
  for (const char* rank : {"_rank_0.json", "_rank_1.json"})
    EXPECT_EQ(ranges_of(name + rank).at("gptfast::attention_decode"), 4 * 3) << rank;
}

/// A chat over a pipe: a model with a tokenizer and a context of `context` tokens beside it.
ProgramResult chat(const TempDir& dir, int64_t context, const std::string& lines) {
  std::filesystem::copy(kModel, dir / "model.pth", std::filesystem::copy_options::skip_existing);
  std::filesystem::copy(golden("tokenizers/small_sp_bpe.model"), dir / "tokenizer.model",
                        std::filesystem::copy_options::skip_existing);
  json added;  // the model has 512 rows, the tokenizer 450 pieces
  for (int id = 450; id < 512; ++id) added["<" + std::to_string(id) + ">"] = id;
  std::ofstream(dir / "added_tokens.json") << added;
  json config = json::parse(std::ifstream(golden("tiny-gqa/config.json")));
  config["block_size"] = context;
  std::ofstream(dir / "config.json") << config;
  std::ofstream(dir / "lines") << lines;
  return run_program(
      "generate --interactive --device cpu --precision float32 --temperature 0 --num_threads 1 "
      "--max_new_tokens 12 --chat_template mistral --checkpoint_path " +
      (dir / "model.pth").string() + " <" + (dir / "lines").string() + " 2>" +
      (dir / "err").string());
}

// What the program says equals the whole conversation, each time computed anew.
TEST(GenerateProgram, ChatsOverAPipe) {
  const TempDir dir;
  const ProgramResult result = chat(dir, 2048, "Hello \u00e9!\n\n   \nAnd then?\r\nAgain");
  EXPECT_EQ(result.status, 0);
  const auto tokenizer = Tokenizer::load(dir / "tokenizer.model");
  Transformer model = tiny_model("tiny-gqa");
  GenerateOptions options;
  options.max_new_tokens = 12;
  options.sampling.temperature = 0;
  options.stop_tokens = tokenizer->stop_ids();
  std::vector<int32_t> ids;
  std::string expected;
  for (const char* message : {"Hello \u00e9!", "And then?", "Again"}) {
    const auto turn =
        encode_turn(*tokenizer, ChatTemplate::kMistral, message, /*first=*/ids.empty());
    ids.insert(ids.end(), turn.begin(), turn.end());
    const auto answer = generate(model, ids, options).rows[0].tokens;
    ASSERT_EQ(answer.size(), 12U);
    ids.insert(ids.end(), answer.begin(), answer.end());
    expected += tokenizer->decode(answer) + "\n";
  }
  EXPECT_EQ(result.out, expected);
}

TEST(GenerateProgram, AChatEndsWithItsContext) {
  const TempDir dir;
  const auto err = [&] {
    std::stringstream text;
    text << std::ifstream(dir / "err").rdbuf();
    return text.str();
  };
  const std::string lengthy(200, 'x');
  ProgramResult result = chat(dir, 48, lengthy + "\nhi\nhi\nhi\nhi\nhi\n");
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(err().find("of the context of 48 are left. Make it shorter."), std::string::npos)
      << err();
  EXPECT_NE(err().find("Start again for a new conversation."), std::string::npos) << err();
  const auto answers = std::count(result.out.begin(), result.out.end(), '\n');
  EXPECT_TRUE(answers >= 1 && answers < 5) << result.out;
}

TEST(GenerateProgram, PrintsTheOriginalsFigures) {
  const std::string out =
      run_program(kRun +
                  "--prompt_ids 1,2,3 --num_samples 1 --max_new_tokens 3 --compile True 2>&1")
          .out;
  for (const char* part : {"Time for inference 1: ", " tokens/sec", "Bandwidth achieved: ",
                           "FLOPS achieved: ", "==========", "Batch Size: 1", "Prompt Length: 3",
                           "Generated tokens: 3", "Average tokens/sec: ", "Memory used: "}) {
    EXPECT_NE(out.find(part), std::string::npos) << part << "\n" << out;
  }
}

TEST(GenerateProgram, OneLineForEveryMistake) {
  const std::string run = "generate --checkpoint_path ",
                    ids = " --prompt_ids 1,2 --num_samples 1 --max_new_tokens 2 ";
  const TempDir dir;
  const auto file = [&](const std::string& name, const std::string& bytes) {
    std::ofstream(dir / name, std::ios::binary) << bytes;
    return (dir / name).string();
  };
  expect_failure(run + "/nowhere/model.pth" + ids, 1, "/nowhere/model.pth");
  expect_failure(run + dir.path().string() + ids, 1, "directory");
  expect_failure(run + file("empty.pth", "") + ids, 1, "empty");
  expect_failure(run + file("page.pth", "<!DOCTYPE html><html></html>") + ids, 1, "HTML");
  expect_failure(run +
                     file("lfs.pth",
                          "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n") +
                     ids,
                 1, "LFS");
  expect_failure(run + kModel + " --config 7B" + ids, 1, "vocab");
  expect_failure(run + "''" + ids, 2, "--checkpoint_path is empty");
  expect_failure(run + kModel + ids + "--logits_out /nowhere/x.pth", 1, "/nowhere/x.pth");
  expect_failure(run + kModel + ids + "--profile /nowhere/x", 1, "/nowhere/x.json");
  // What only a loaded model can tell comes behind the line on loading.
  const std::string quiet = "generate --quiet --checkpoint_path ";
  expect_failure(quiet + kModel + " --prompt_ids 1,600 --max_new_tokens 1", 1,
                 "600 is outside the model's vocabulary of 512");
  expect_failure(run + kModel + " --prompt_ids 1,x", 1, "is not a list of token ids");
  expect_failure(quiet + kModel + " --prompt words", 1, "needs a tokenizer");
  expect_failure(quiet + kModel + " --prompt 5000", 1, "holds 2048");
  expect_failure(run + kModel + " --prompt 99999999999999999999", 1, "far too many");
  expect_failure(run + kModel + " --prompt_file /nowhere.txt", 1, "/nowhere.txt");
  expect_failure(run + kModel + " --prompt_file " + dir.path().string(), 1, "is a directory");
  expect_failure(run + kModel + ids + "--tokenizer_path " + file("tokenizer.model", "nonsense"), 1,
                 "tokenizer.model");
  expect_failure(quiet + kModel + ids + "--draft_checkpoint_path " +
                     golden("tiny-mha/model.fp32.pth").string(),
                 1, "vocabulary has 300");
  expect_failure("generate --checkpoint_pth x", 2, "--checkpoint_path");
  for (const char* flag : {"--num_samples 0",     "--num_samples -1",
                           "--max_new_tokens -1", "--max_new_tokens 99999999999",
                           "--batch_size 0",      "--batch_size 9",
                           "--top_k -1",          "--temperature -0.1",
                           "--temperature nan",   "--speculate_k 0",
                           "--speculate_k 65",    "--num_threads -1",
                           "--seed -1",           "--precision int3",
                           "--device tpu",        "--chat_template x",
                           "--draft x",           "--json maybe",
                           "--num_samples",       "stray"}) {
    expect_failure(run + kModel + " " + flag, 2, "generate: ");
  }
  expect_failure(run + kModel + " --interactive --max_new_tokens 0", 2, "--max_new_tokens");
  expect_failure(run + kModel + ids + "--prompt x", 2, "one of --prompt");
  expect_failure(run + kModel + ids + "--batch_size 2 --draft lookup", 2, "--batch_size 1");
}

TEST(GenerateProgram, OneLineWithoutTheNamedGpu) {
  const std::string run =
      "generate --quiet --checkpoint_path " + kModel + " --prompt_ids 1,2 --device ";
  if (at::hasCUDA()) {
    expect_failure(run + "cuda:99", 2, "CUDA device(s), cuda:0 to cuda:");
    return;
  }
#ifdef GPTFAST_CUDA
  expect_failure(run + "cuda", 2, "this machine has no CUDA device");
#else
  expect_failure(run + "cuda", 2, "built without CUDA");
#endif
}

TEST(GenerateProgram, OnAGpuTheSeedGivesTheTokensAndTheTraceHasTheKernels) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const TempDir dir;
  const std::string trace = (dir / "trace").string();
  const std::string run =
      "generate --quiet --json --device cuda --prompt_ids 1,2,3,4,5,6,7,8,9,10 --max_new_tokens 30 "
      "--num_samples 1 --seed 5 --checkpoint_path " +
      kModel;
  const ProgramResult first = run_program(run + " 2>/dev/null"),
                      second = run_program(run + " --profile " + trace + " 2>/dev/null");
  ASSERT_EQ(first.status, 0);
  ASSERT_EQ(second.status, 0);
  const json line = json::parse(first.out);
  EXPECT_EQ(line.at("path"), "cuda");
  EXPECT_EQ(line.at("token_ids").size(), 30U);
  EXPECT_EQ(line.at("token_ids"), json::parse(second.out).at("token_ids"));
  std::set<std::string> kernels;  // of the prompt, and of the captured step
  const json events = json::parse(std::ifstream(trace + ".json"));
  for (const json& event : events.at("traceEvents")) {
    if (event.value("cat", "") != "kernel") continue;
    for (const char* name : {"rope_append_kernel", "attention_kernel"}) {
      if (event.value("name", "").find(name) != std::string::npos) kernels.insert(name);
    }
  }
  EXPECT_EQ(kernels.size(), 2U);
}

TEST(GenerateProgram, NanWeightsAreNamed) {
  const TempDir dir;
  StateDict tensors = load_checkpoint(kModel);
  tensors.set("norm.weight", at::full({256}, std::numeric_limits<float>::quiet_NaN()));
  save_checkpoint(dir / "model.pth", tensors);
  std::filesystem::copy(golden("tiny-gqa/config.json"), dir / "config.json");
  expect_failure("generate --device cpu --quiet --json --prompt_ids 1,2 --checkpoint_path " +
                     (dir / "model.pth").string(),
                 1, "NaN at position 1");
}

TEST(GenerateProgram, MissingAndExtraTensorsAreListed) {
  const TempDir dir;
  StateDict tensors = load_checkpoint(kModel);
  tensors.take("layers.1.ffn_norm.weight");
  tensors.set("surplus.weight", at::ones({3}));
  save_checkpoint(dir / "model.pth", tensors);
  std::filesystem::copy(golden("tiny-gqa/config.json"), dir / "config.json");
  const std::string command =
      "generate --quiet --prompt_ids 1,2 --checkpoint_path " + (dir / "model.pth").string();
  expect_failure(command, 1, "layers.1.ffn_norm.weight");
  expect_failure(command, 1, "surplus.weight");
}

}  // namespace
}  // namespace gptfast
