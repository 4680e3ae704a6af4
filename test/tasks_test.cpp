// The tasks of evaluation: Python's string functions, the strings of every task, bad data files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "eval_text.h"
#include "gptfast/eval.h"
#include "gptfast/tokenizer.h"
#include "sha256.h"
#include "smollm2_tokenizer.h"
#include "test_util.h"

namespace gptfast {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json golden_json(const std::string& name) {
  std::ifstream stream(golden("eval") / name);
  return json::parse(stream);
}

// ---- Text

TEST(EvalText, FollowsPythonStrings) {
  EXPECT_EQ(strip("\u00a0\x1c a b\u3000\n"), "a b");
  EXPECT_EQ(rstrip(" a\u2003\u2028"), " a");
  EXPECT_EQ(strip(" \t\u0085"), "");
  EXPECT_EQ(code_points("na\u00efve \U0001f600"), 7);
  EXPECT_EQ(replace_all("aaa", "aa", "b"), "ba");
  EXPECT_EQ(split_count(" a  b\u00a0\nc "), 5);
  EXPECT_EQ(split_count(""), 1);
}

TEST(EvalText, CapitalizesAsPython) {
  EXPECT_EQ(capitalize(""), "");
  EXPECT_EQ(capitalize("the LADY"), "The lady");
  EXPECT_EQ(capitalize("\u00e9COLE \u00c9T\u00c9"), "\u00c9cole \u00e9t\u00e9");
  EXPECT_EQ(capitalize("\u00dfA"), "Ssa");       // one character becomes two
  EXPECT_EQ(capitalize("\u01c6A"), "\u01c5a");   // title case, not upper case
  EXPECT_EQ(capitalize("a\u0130"), "Ai\u0307");  // lower case of two characters
  EXPECT_EQ(capitalize("\u039f\u03a3. \u03a3\u03a3 \u03a3"),
            "\u039f\u03c2. \u03c3\u03c2 \u03c3");  // final sigma
  EXPECT_EQ(capitalize("\ufb01X"), "Fix");
}

TEST(EvalText, CleansHellaSwag) {
  EXPECT_EQ(hellaswag_preprocess(" a [title] b [step] c "), "a. b c");
  EXPECT_EQ(hellaswag_preprocess("[substeps] Many    x"),
            " Many  x");                                          // not stripped again, one pass
  EXPECT_EQ(hellaswag_preprocess("[a\nb] [c] [d"), "[a\nb] [d");  // a bracket ends on its line
}

TEST(EvalText, DetokenizesWikiText) {
  EXPECT_EQ(wikitext_detokenize(
                " = T = \n \n 1 @,@ 000 @.@ 5 ( a ) \" q \" , the dogs ' x 's . \n"),
            " = T =\n\n1,000.5 (a) \"q\", the dogs'x's.\n");
  EXPECT_EQ(wikitext_detokenize("= = a = = = = b"), "== a ==== b");
  EXPECT_EQ(wikitext_detokenize("/' 5/ 9 \u00b0 C ( a ( b ) c ) {  } N N [ x"),
            "/'[0-9]/ 9\u00b0C (a ( b) c ) {} 1 N [ x");
}

// ---- Tasks

/// The tokenizer that formats.json was made with.
const Tokenizer& smollm2() {
  static const auto tokenizer = [] {
    const TempDir dir;
    std::ofstream(dir / "tokenizer.json") << smollm2_json();
    std::ofstream(dir / "tokenizer_config.json")
        << R"({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})";
    return Tokenizer::load(dir / "tokenizer.json");
  }();
  return *tokenizer;
}

TEST(EvalTask, HasTheHarnesssStringsAndTokens) {
  const json formats = golden_json("formats.json");
  for (const std::string name :
       {"hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "lambada_openai"}) {
    const EvalTask task = load_task(name, golden("eval"));
    ASSERT_EQ(task.items.size(), formats[name].size()) << name;
    for (size_t i = 0; i < task.items.size(); ++i) {
      const json& expected = formats[name][i];
      if (task.kind == TaskKind::kMultipleChoice) {
        EXPECT_EQ(task.items[i].gold, expected["gold"]) << name << " " << i;
      }
      ASSERT_EQ(task.items[i].requests.size(), expected["requests"].size()) << name << " " << i;
      for (size_t choice = 0; choice < expected["requests"].size(); ++choice) {
        const EvalRequest& request = task.items[i].requests[choice];
        const json& golden_request = expected["requests"][choice];
        EXPECT_EQ(request.context, golden_request["ctx"]);
        EXPECT_EQ(request.continuation, golden_request["cont"]);
        const TokenRequest tokens = encode_request(smollm2(), request, BosRule::kHarness);
        EXPECT_EQ(json(tokens.tokens), golden_request["ids"]) << request.context;
        EXPECT_EQ(tokens.num_context, golden_request["ctx_len"]) << request.context;
      }
    }
  }
}

TEST(EvalTask, CleansEveryHardHellaSwagRow) {
  const json expected = golden_json("formats.json")["hellaswag_hard"];
  const EvalTask task = load_task("hellaswag", golden("eval") / "hard");
  ASSERT_EQ(task.items.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    for (size_t choice = 0; choice < 4; ++choice) {
      const EvalItem& item = task.items[i];
      const auto ending = expected[i]["endings"][choice].get<std::string>();
      EXPECT_EQ(item.requests[choice].context, expected[i]["query"]);
      EXPECT_EQ(item.requests[choice].continuation, ending);
      EXPECT_EQ(item.lengths[choice], code_points(ending) - 1);
    }
  }
}

TEST(EvalTask, HasTheHarnesssWikiTextPages) {
  const json formats = golden_json("formats.json")["wikitext"];
  std::vector<EvalItem> items = load_task("wikitext", golden("eval")).items;
  const auto more = load_task("wikitext", golden("eval") / "hard").items;
  items.insert(items.end(), more.begin(), more.end());
  ASSERT_EQ(items.size(), formats.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const json& expected = formats[i];
    const std::string& text = items[i].requests.at(0).continuation;
    Sha256 hash;
    hash.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    EXPECT_EQ(hash.hex_digest(), expected["detok_sha256"]) << i;
    EXPECT_EQ(items[i].words, expected["words"]);  // of the page before it is detokenized
    EXPECT_EQ(items[i].bytes, expected["bytes"]);
    const auto ids = smollm2().encode(text, /*parse_special=*/true);
    const std::vector<int32_t> head = expected["ids_head"];
    const std::vector<int32_t> tail = expected["ids_tail"];
    ASSERT_EQ(ids.size(), expected["n_tokens"]) << i;
    EXPECT_TRUE(std::equal(head.begin(), head.end(), ids.begin())) << i;
    EXPECT_TRUE(std::equal(tail.rbegin(), tail.rend(), ids.rbegin())) << i;
    for (const auto& [length, windows] : expected["windows_ctxlen_contlen"].items()) {
      std::vector<int32_t> predicted;
      const auto requests = rolling_windows(ids, /*prefix=*/1, std::stoll(length));
      ASSERT_EQ(requests.size(), windows.size());
      for (size_t w = 0; w < requests.size(); ++w) {
        const auto& [tokens, num_context] = requests[w];
        EXPECT_EQ(num_context, windows[w][0]);
        EXPECT_EQ(std::ssize(tokens) - num_context, windows[w][1]);
        predicted.insert(predicted.end(), tokens.begin() + num_context, tokens.end());
      }
      EXPECT_EQ(predicted, ids) << "each token is predicted once, in order";
      EXPECT_EQ(requests[0].tokens[0], 1);
    }
  }
  EXPECT_TRUE(rolling_windows({}, 1, 8).empty());
}

TEST(EvalTask, TakesTheFirstItemsUpToTheLimit) {
  EXPECT_EQ(load_task("piqa", golden("eval"), 2).items.size(), 2U);
  EXPECT_EQ(load_task("piqa", golden("eval"), 99).items.size(), 3U);
}

TEST(EvalTask, RefusesAnUnknownNameWithTheList) {
  EXPECT_EQ(error_of([] { load_task("mmlu", "."); }),
            "Unknown task 'mmlu'. Known tasks: arc_challenge, arc_easy, hellaswag, lambada_openai, "
            "piqa, wikitext, winogrande.");
}

TEST(EvalTask, SaysHowToGetMissingData) {
  const TempDir dir;
  const std::string error = error_of([&] { load_task("piqa", dir.path()); });
  EXPECT_THAT(error, HasSubstr((dir / "piqa.jsonl").string()));
  EXPECT_THAT(error, HasSubstr(R"({"goal", "sol1", "sol2", "label"})"));
  EXPECT_THAT(error, HasSubstr("scripts/eval_data.py"));
  std::filesystem::create_directory(dir / "piqa.jsonl");
  EXPECT_THAT(error_of([&] { load_task("piqa", dir.path()); }), HasSubstr("is not at"));
}

TEST(EvalTask, NamesTheLineThatIsMalformed) {
  struct Case {
    std::string task, line, error;
  };
  const std::vector<Case> cases = {
      {"piqa", "{\"goal\": ", "parse error"},
      {"piqa", "[1]", "a JSON object"},
      {"piqa", "{\"goal\": \"\xff\"}", "UTF-8"},
      {"piqa", R"({"goal": "g", "sol1": "a", "sol2": 2, "label": 0})", "'sol2'"},
      {"piqa", R"({"goal": "g", "sol1": "a", "sol2": "b", "label": 2})", "'label'"},
      {"piqa", R"({"goal": "g", "sol1": "a", "sol2": "b"})", "'label'"},
      {"hellaswag",
       R"({"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": [], "label": "0"})",
       "'endings'"},
      {"hellaswag",
       R"({"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d"], "label": ""})",
       "'label'"},
      {"arc_easy",
       R"({"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"})",
       "'answerKey'"},
      {"arc_easy", R"({"question": "q", "choices": ["a"], "answerKey": "A"})", "'choices'"},
      {"winogrande", R"({"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"})",
       "'_'"},
      {"winogrande", R"({"sentence": "a _", "option1": "a", "option2": "b", "answer": "3"})",
       "'answer'"},
      {"lambada_openai", R"({"page": "x"})", "'text'"},
      {"wikitext", R"({"page": ["x"]})", "'page'"},
  };
  for (const Case& c : cases) {
    const TempDir dir;
    std::ofstream(dir / (c.task + ".jsonl")) << "\n" << c.line << "\n";
    const std::string error = error_of([&] { load_task(c.task, dir.path()); });
    EXPECT_THAT(error, HasSubstr((dir / (c.task + ".jsonl")).string() + ":2:")) << c.line;
    EXPECT_THAT(error, HasSubstr(c.error)) << c.line;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

TEST(EvalTask, RefusesAFileWithoutItems) {
  const TempDir dir;
  std::ofstream(dir / "piqa.jsonl") << "\n \n";
  EXPECT_THAT(error_of([&] { load_task("piqa", dir.path()); }), HasSubstr("holds no item"));
}

}  // namespace
}  // namespace gptfast
