// The tasks of evaluation: Python's string functions, the strings of every task, bad data files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "eval_text.h"
#include "gptfast/eval.h"
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

TEST(EvalTask, FormatsEveryTaskAsTheHarness) {
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
        EXPECT_EQ(task.items[i].requests[choice].context, expected["requests"][choice]["ctx"]);
        EXPECT_EQ(task.items[i].requests[choice].continuation,
                  expected["requests"][choice]["cont"]);
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

TEST(EvalTask, CountsWikiTextBeforeDetokenizing) {
  const json expected = golden_json("formats.json")["wikitext"][0];
  const EvalItem item = load_task("wikitext", golden("eval")).items.at(0);
  EXPECT_EQ(item.requests.at(0).continuation, expected["detokenized"]);
  EXPECT_EQ(item.words, expected["words"]);
  EXPECT_EQ(item.bytes, expected["bytes"]);
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
