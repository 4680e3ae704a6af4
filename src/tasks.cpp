// The tasks of evaluation: JSON lines -> the strings to score, formatted as lm-evaluation-harness
// 0.4 formats them (zero-shot).
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "eval_text.h"
#include "gptfast/eval.h"

namespace gptfast {

namespace {

using nlohmann::json;

/// A line that does not fit the task; load_task adds the file and the line.
struct BadLine : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string text_field(const json& doc, const char* name) {
  const auto field = doc.find(name);
  if (field == doc.end() || !field->is_string()) {
    throw BadLine("the field '" + std::string(name) + "' must be a string");
  }
  return field->get<std::string>();
}

std::vector<std::string> text_list(const json& doc, const char* name) {
  const auto field = doc.find(name);
  const auto is_text = [](const json& value) { return value.is_string(); };
  if (field == doc.end() || !field->is_array() || field->empty() ||
      !std::all_of(field->begin(), field->end(), is_text)) {
    throw BadLine("the field '" + std::string(name) + "' must be a list of strings");
  }
  return field->get<std::vector<std::string>>();
}

/// A label written as 3 or "3", at least 0 and below `count`.
int64_t label_field(const json& doc, const char* name, size_t count) {
  const auto field = doc.find(name);
  if (field != doc.end()) {
    for (size_t label = 0; label < count; ++label) {
      if (*field == label || *field == std::to_string(label)) {
        return static_cast<int64_t>(label);
      }
    }
  }
  throw BadLine("the field '" + std::string(name) +
                "' must be the number of the right choice, 0 to " + std::to_string(count - 1));
}

EvalItem choices_item(const std::string& context, const std::vector<std::string>& choices,
                      int64_t gold) {
  EvalItem item;
  item.gold = gold;
  for (const auto& choice : choices) {
    item.requests.push_back({context, " " + choice});
    item.lengths.push_back(code_points(choice));
  }
  return item;
}

EvalItem hellaswag_item(const json& doc) {
  const std::string context =
      hellaswag_preprocess(text_field(doc, "activity_label") + ": " + text_field(doc, "ctx_a") +
                           " " + capitalize(text_field(doc, "ctx_b")));
  auto endings = text_list(doc, "endings");
  for (auto& ending : endings) {
    ending = hellaswag_preprocess(ending);
  }
  return choices_item(context, endings, label_field(doc, "label", endings.size()));
}

EvalItem arc_item(const json& doc) {
  const auto choices = doc.find("choices");
  if (choices == doc.end() || !choices->is_object()) {
    throw BadLine("the field 'choices' must be an object of the lists 'text' and 'label'");
  }
  const auto texts = text_list(*choices, "text");
  const auto labels = text_list(*choices, "label");
  const auto gold = std::find(labels.begin(), labels.end(), text_field(doc, "answerKey"));
  if (texts.size() != labels.size() || gold == labels.end()) {
    throw BadLine(
        "'answerKey' must be one of choices.label, which must be as long as choices.text");
  }
  return choices_item("Question: " + text_field(doc, "question") + "\nAnswer:", texts,
                      gold - labels.begin());
}

EvalItem piqa_item(const json& doc) {
  return choices_item("Question: " + text_field(doc, "goal") + "\nAnswer:",
                      {text_field(doc, "sol1"), text_field(doc, "sol2")},
                      label_field(doc, "label", 2));
}

/// Two contexts, one continuation: the option stands in the sentence and what follows it is scored.
EvalItem winogrande_item(const json& doc) {
  const std::string sentence = text_field(doc, "sentence");
  const size_t blank = sentence.find('_');
  if (blank == std::string::npos) {
    throw BadLine("the field 'sentence' must hold a '_'");
  }
  const std::string answer = text_field(doc, "answer");
  if (answer != "1" && answer != "2") {
    throw BadLine("the field 'answer' must be \"1\" or \"2\"");
  }
  EvalItem item;
  item.gold = answer == "2" ? 1 : 0;
  for (const char* option : {"option1", "option2"}) {
    const std::string choice = sentence.substr(0, blank) + text_field(doc, option);
    item.requests.push_back(
        {choice, " " + std::string(strip(std::string_view(sentence).substr(blank + 1)))});
    item.lengths.push_back(code_points(choice));
  }
  return item;
}

/// The last word after the last space (U+0020 alone: line breaks stay where they are).
EvalItem lambada_item(const json& doc) {
  const std::string text = text_field(doc, "text");
  const size_t space = text.rfind(' ');
  EvalItem item;
  item.requests.push_back(space == std::string::npos
                              ? EvalRequest{"", " " + text}
                              : EvalRequest{text.substr(0, space), text.substr(space)});
  return item;
}

EvalItem wikitext_item(const json& doc) {
  const std::string page = text_field(doc, "page");
  EvalItem item;
  item.requests.push_back({"", wikitext_detokenize(page)});
  item.words = split_count(page);
  item.bytes = static_cast<int64_t>(page.size());
  return item;
}

struct TaskFormat {
  const char* name;
  TaskKind kind;
  bool acc_norm;
  int64_t version;
  const char* fields;
  EvalItem (*item)(const json& doc);
};

constexpr const char* kArcFields =
    R"({"question", "choices": {"text": [..], "label": [..]}, "answerKey"})";

constexpr std::array<TaskFormat, 7> kTasks = {{
    {"arc_challenge", TaskKind::kMultipleChoice, true, 1, kArcFields, arc_item},
    {"arc_easy", TaskKind::kMultipleChoice, true, 1, kArcFields, arc_item},
    {"hellaswag", TaskKind::kMultipleChoice, true, 1,
     R"({"activity_label", "ctx_a", "ctx_b", "endings": [..], "label"})", hellaswag_item},
    {"lambada_openai", TaskKind::kLastWord, false, 1, R"({"text"})", lambada_item},
    {"piqa", TaskKind::kMultipleChoice, true, 1, R"({"goal", "sol1", "sol2", "label"})", piqa_item},
    {"wikitext", TaskKind::kRolling, false, 2, R"({"page"})", wikitext_item},
    {"winogrande", TaskKind::kMultipleChoice, false, 1,
     R"({"sentence", "option1", "option2", "answer"})", winogrande_item},
}};

const TaskFormat& task_format(const std::string& name) {
  const auto* format = std::find_if(kTasks.begin(), kTasks.end(),
                                    [&](const TaskFormat& task) { return task.name == name; });
  if (format == kTasks.end()) {
    std::string known;
    for (const auto& task : kTasks) {
      known += (known.empty() ? "" : ", ") + std::string(task.name);
    }
    TORCH_CHECK(false, "Unknown task '", name, "'. Known tasks: ", known, ".");
  }
  return *format;
}

EvalItem read_item(const TaskFormat& format, const std::string& line) {
  const json doc = json::parse(line);
  if (!doc.is_object()) {
    throw BadLine("a JSON object is needed");
  }
  EvalItem item = format.item(doc);
  item.doc = line;
  return item;
}

}  // namespace

std::vector<std::string> eval_task_names() {
  std::vector<std::string> names;
  names.reserve(std::size(kTasks));
  for (const auto& task : kTasks) {
    names.emplace_back(task.name);
  }
  return names;
}

EvalTask load_task(const std::string& name, const std::filesystem::path& data_dir, int64_t limit) {
  const TaskFormat& format = task_format(name);
  const auto file = data_dir / (name + ".jsonl");
  std::ifstream stream(file);
  TORCH_CHECK(stream.is_open() && std::filesystem::is_regular_file(file), "The data of task '",
              name, "' is not at ", file.string(), ": a file with one object ", format.fields,
              " a line. Give its folder as --data_dir, or write it with ",
              "scripts/eval_data.py --data_dir ", data_dir.string(), " ", name,
              " (needs network).");
  EvalTask task{.name = name,
                .kind = format.kind,
                .acc_norm = format.acc_norm,
                .version = format.version,
                .items = {}};
  std::string line;
  for (int64_t number = 1;
       (limit < 0 || std::ssize(task.items) < limit) && std::getline(stream, line); ++number) {
    if (strip(line).empty()) {
      continue;
    }
    std::string error;
    try {
      task.items.push_back(read_item(format, line));
      continue;
    } catch (const json::exception& e) {
      error = e.what();
    } catch (const BadLine& e) {
      error = e.what();
    }
    TORCH_CHECK(false, file.string(), ":", number, ": not an item of task '", name, "' ",
                format.fields, ": ", error, ".");
  }
  TORCH_CHECK(!task.items.empty(), file.string(), " holds no item",
              limit == 0 ? " below the limit of 0." : ".");
  return task;
}

}  // namespace gptfast
