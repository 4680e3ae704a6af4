#include "common.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <iostream>

namespace gptfast::app {
namespace {

CommandLine example() {
  CommandLine line("example", "An example.");
  line.text("checkpoint_path", "the model");
  line.text("prompt", "the prompt", "Hello, my name is");
  line.flag("compile", "accepted");
  line.flag("pad", "a boolean", true);
  line.integer("top_k", "the best", 200, 0, 1000);
  line.integer("seed", "seed", 1234, 0, INT64_MAX);
  line.number("temperature", "randomness", 0.8, 0, 100);
  line.choice("q,mode", "how", "int8", {"int8", "int4"});
  line.list("tasks", "what", {"wikitext"});
  return line;
}

CommandLine parsed(const std::vector<const char*>& words) {
  CommandLine line = example();
  std::vector<const char*> argv = {"example"};
  argv.insert(argv.end(), words.begin(), words.end());
  EXPECT_TRUE(line.parse(static_cast<int>(argv.size()), argv.data()));
  return line;
}

std::string usage_error(const std::vector<const char*>& words) {
  try {
    parsed(words);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

using Words = std::vector<std::string>;

TEST(CommandLine, Defaults) {
  const CommandLine line = parsed({});
  EXPECT_EQ(line.get_text("prompt"), "Hello, my name is");
  EXPECT_FALSE(line.get_flag("compile"));
  EXPECT_TRUE(line.get_flag("pad"));
  EXPECT_EQ(line.get_integer("top_k"), 200);
  EXPECT_EQ(line.get_number("temperature"), 0.8);
  EXPECT_EQ(line.get_list("tasks"), Words{"wikitext"});
  EXPECT_FALSE(line.given("prompt"));
}

TEST(CommandLine, Spellings) {
  EXPECT_EQ(parsed({"--prompt", "- a list"}).get_text("prompt"), "- a list");
  EXPECT_EQ(parsed({"--prompt", ""}).get_text("prompt"), "");
  EXPECT_EQ(parsed({"--prompt=a=b"}).get_text("prompt"), "a=b");
  EXPECT_EQ(parsed({"-q", "int4"}).get_text("mode"), "int4");
  EXPECT_EQ(parsed({"--mode", "int4"}).get_text("mode"), "int4");
  EXPECT_EQ(parsed({"--top_k", "0", "--top_k", "7"}).get_integer("top_k"), 7);
  EXPECT_EQ(parsed({"--seed", "9223372036854775807"}).get_integer("seed"), INT64_MAX);
  EXPECT_EQ(parsed({"--temperature", "1e-5"}).get_number("temperature"), 1e-5);
  EXPECT_TRUE(parsed({"--top_k", "5"}).given("top_k"));
}

TEST(CommandLine, Booleans) {
  EXPECT_TRUE(parsed({"--compile"}).get_flag("compile"));
  EXPECT_TRUE(parsed({"--compile", "True"}).get_flag("compile"));
  EXPECT_FALSE(parsed({"--pad", "False"}).get_flag("pad"));
  EXPECT_FALSE(parsed({"--pad=false"}).get_flag("pad"));
  EXPECT_TRUE(contains(usage_error({"--pad=maybe"}), "True or False"));
  EXPECT_TRUE(contains(usage_error({"--compile", "maybe"}), "unexpected word 'maybe'"));
}

TEST(CommandLine, Lists) {
  EXPECT_EQ(parsed({"--tasks", "a", "b", "--compile"}).get_list("tasks"), (Words{"a", "b"}));
  EXPECT_EQ(parsed({"--tasks", "a,b"}).get_list("tasks"), (Words{"a", "b"}));
  EXPECT_EQ(parsed({"--tasks=a,b"}).get_list("tasks"), (Words{"a", "b"}));
}

TEST(CommandLine, Refusals) {
  EXPECT_TRUE(contains(usage_error({"--promt", "x"}), "--promt")) << usage_error({"--promt", "x"});
  EXPECT_TRUE(contains(usage_error({"--promt", "x"}), "--prompt"));
  EXPECT_TRUE(contains(usage_error({"--checkpoint-path=x"}), "--checkpoint_path"));
  EXPECT_TRUE(contains(usage_error({"--temp", "1"}), "--temperature"));
  EXPECT_TRUE(contains(usage_error({"-x"}), "unknown flag '-x'"));
  EXPECT_TRUE(contains(usage_error({"stray"}), "unexpected word 'stray'"));
  EXPECT_TRUE(contains(usage_error({"--prompt"}), "--prompt needs a value"));
  EXPECT_TRUE(contains(usage_error({"--prompt", "--compile"}), "--prompt needs a value"));
  EXPECT_TRUE(contains(usage_error({"--mode", "int3"}), "int8, int4"));
  for (const char* bad :
       {"-1", "1001", "x", "", "1.5", "99999999999999999999", "1e3", "0x10", " 1"}) {
    EXPECT_TRUE(contains(usage_error({"--top_k", bad}), "from 0 to 1000")) << bad;
  }
  for (const char* bad : {"-0.1", "101", "nan", "inf", "-inf", "1,5", "", "1e999"}) {
    EXPECT_TRUE(contains(usage_error({"--temperature", bad}), "from 0 to 100")) << bad;
  }
}

TEST(CommandLine, Positional) {
  const auto parse = [](std::vector<const char*> argv) {
    CommandLine line("example", "");
    line.positional("INPUT", "what to read", {"checkpoint_dir"});
    line.text("checkpoint_dir", "the original's name for it");
    argv.insert(argv.begin(), "example");
    line.parse(static_cast<int>(argv.size()), argv.data());
    return line;
  };
  EXPECT_EQ(parse({"in.gguf"}).get_text("INPUT"), "in.gguf");
  EXPECT_EQ(parse({"--checkpoint_dir", "d"}).get_text("checkpoint_dir"), "d");
  EXPECT_THROW(parse({}), UsageError);
  EXPECT_THROW(parse({"a", "b"}), UsageError);
}

TEST(CommandLine, HelpAndVersion) {
  for (const char* word : {"--help", "--version"}) {
    testing::internal::CaptureStdout();
    CommandLine line = example();
    const char* argv[] = {"example", word};
    EXPECT_FALSE(line.parse(2, argv));
    const std::string text = testing::internal::GetCapturedStdout();
    EXPECT_TRUE(contains(text, word == std::string("--help") ? "--top_k" : "gptfast ")) << text;
  }
}

TEST(Run, StatusAndOneLine) {
  const auto outcome = [](const std::function<int()>& body) {
    testing::internal::CaptureStderr();
    const int status = run("example", body);
    return std::make_pair(status, testing::internal::GetCapturedStderr());
  };
  EXPECT_EQ(outcome([] { return 0; }), std::make_pair(0, std::string()));
  EXPECT_EQ(outcome([]() -> int { throw UsageError("bad flag"); }),
            std::make_pair(2, std::string("example: bad flag (see --help)\n")));
  EXPECT_EQ(outcome([]() -> int { TORCH_CHECK(false, "first\nsecond"); }),
            std::make_pair(1, std::string("example: first second\n")));
  EXPECT_EQ(outcome([]() -> int { throw std::bad_alloc(); }),
            std::make_pair(1, std::string("example: out of memory\n")));
  EXPECT_EQ(outcome([]() -> int { throw std::runtime_error("no"); }),
            std::make_pair(1, std::string("example: no\n")));
}

TEST(Parse, DeviceAndDtype) {
  EXPECT_EQ(parse_device("cpu"), at::Device(at::kCPU));
  for (const char* bad : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:999", "cpu:0", ""})
    EXPECT_THROW(parse_device(bad), UsageError) << bad;
  EXPECT_EQ(parse_dtype("precision", "bf16"), at::kBFloat16);
  EXPECT_THROW(parse_dtype("precision", "int8"), UsageError);
}

TEST(Progress, Text) {
  EXPECT_EQ(progress_text(500'000'000, 2'000'000'000, 5, Progress::Unit::kBytes),
            "[######..................] 25% 500 MB/2.0 GB, 100 MB/s, 0:15 left");
  EXPECT_EQ(progress_text(3, 3, 1, Progress::Unit::kItems),
            "[########################] 100% 3/3, 3.0/s, 0:00 left");
  EXPECT_EQ(progress_text(0, 0, 0, Progress::Unit::kItems),
            "[........................] 0% 0/0, 0.0/s");
}

// Not a terminal here, so nothing may be written.
TEST(Progress, SilentWithoutTerminal) {
  testing::internal::CaptureStderr();
  {
    Progress progress("loading", Progress::Unit::kBytes, /*quiet=*/false);
    progress.update(1, 100);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace gptfast::app
