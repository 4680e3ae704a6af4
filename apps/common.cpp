#include "common.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cxxopts.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

namespace gptfast::app {

namespace {

std::string one_line(std::string text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

int fail(const std::string& program, const std::string& message, int status) {
  std::cout.flush();
  std::cerr << program << ": " << one_line(message) << std::endl;
  return status;
}

std::vector<std::string> split(const std::string& text, char delimiter) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, delimiter);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

std::string join(const std::vector<std::string>& parts, const std::string& delimiter) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : delimiter) + part;
  return text;
}

template <typename T>
std::optional<T> parse_number(const std::string& text) {
  T number{};
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(begin, end, number);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return number;
}

std::optional<bool> parse_boolean(const std::string& text) {
  if (text == "true" || text == "True" || text == "1") return true;
  if (text == "false" || text == "False" || text == "0") return false;
  return std::nullopt;
}

// Levenshtein's distance.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string to_text(double number) {
  std::ostringstream stream;
  stream << number;
  return stream.str();
}

}  // namespace

int run(const std::string& program, const std::function<int()>& body) {
  try {
    const int status = body();
    std::cout.flush();
    if (!std::cout) return fail(program, "cannot write to stdout", 1);
    return status;
  } catch (const UsageError& error) {
    return fail(program, std::string(error.what()) + " (see --help)", 2);
  } catch (const c10::Error& error) {
    return fail(program, error.what_without_backtrace(), 1);
  } catch (const std::bad_alloc&) {
    return fail(program, "out of memory", 1);
  } catch (const std::exception& error) {
    return fail(program, error.what(), 1);
  }
}

CommandLine::CommandLine(std::string program, std::string description)
    : program_(std::move(program)), description_(std::move(description)) {
  flag("help", "print this text and exit");
  flag("version", "print the version and exit");
}

void CommandLine::declare(const std::string& name, Option option) {
  const size_t comma = name.find(',');
  option.short_name = comma == std::string::npos ? '\0' : name[0];
  option.name = comma == std::string::npos ? name : name.substr(comma + 1);
  TORCH_INTERNAL_ASSERT(lookup("--" + option.name) == nullptr,
                        "flag declared twice: ", option.name);
  options_.push_back(std::move(option));
}

void CommandLine::flag(const std::string& name, const std::string& help, bool otherwise) {
  declare(name, {.kind = Kind::kFlag, .help = help, .otherwise = otherwise ? "true" : "false"});
}

void CommandLine::text(const std::string& name, const std::string& help,
                       const std::string& otherwise) {
  declare(name, {.kind = Kind::kText, .help = help, .otherwise = otherwise});
}

void CommandLine::integer(const std::string& name, const std::string& help, int64_t otherwise,
                          int64_t low, int64_t high) {
  declare(name, {.kind = Kind::kInteger,
                 .help = help,
                 .otherwise = std::to_string(otherwise),
                 .first = low,
                 .last = high});
}

void CommandLine::number(const std::string& name, const std::string& help, double otherwise,
                         double low, double high) {
  declare(name, {.kind = Kind::kNumber,
                 .help = help,
                 .otherwise = to_text(otherwise),
                 .low = low,
                 .high = high});
}

void CommandLine::choice(const std::string& name, const std::string& help,
                         const std::string& otherwise, const std::vector<std::string>& values) {
  declare(name, {.kind = Kind::kChoice, .help = help, .otherwise = otherwise, .values = values});
}

void CommandLine::list(const std::string& name, const std::string& help,
                       const std::vector<std::string>& otherwise) {
  declare(name, {.kind = Kind::kList, .help = help, .otherwise = join(otherwise, ",")});
}

void CommandLine::positional(const std::string& name, const std::string& help,
                             const std::vector<std::string>& instead) {
  declare(name, {.kind = Kind::kPositional, .help = help, .values = instead});
}

const CommandLine::Option* CommandLine::lookup(const std::string& word) const {
  for (const Option& option : options_) {
    if (option.kind == Kind::kPositional) continue;
    if (word == "--" + option.name) return &option;
    if (option.short_name != '\0' && word == std::string("-") + option.short_name) return &option;
  }
  return nullptr;
}

void CommandLine::unknown_flag(const std::string& word) const {
  std::string nearest;
  size_t smallest = SIZE_MAX;
  for (const Option& option : options_) {
    if (option.kind == Kind::kPositional) continue;
    const std::string candidate = "--" + option.name;
    // A cut-off name is nearer than any misspelt one.
    const size_t distance =
        candidate.starts_with(word) && word.size() > 2 ? 0 : edit_distance(word, candidate);
    if (distance < smallest) {
      smallest = distance;
      nearest = candidate;
    }
  }
  throw UsageError("unknown flag '" + word + "', the nearest known one is " + nearest);
}

void CommandLine::check(const Option& option, const std::string& value) const {
  const auto refuse = [&](const std::string& expected) {
    throw UsageError("--" + option.name + " must be " + expected + ", not '" + value + "'");
  };
  if (option.kind == Kind::kFlag && !parse_boolean(value)) refuse("True or False");
  if (option.kind == Kind::kChoice &&
      std::find(option.values.begin(), option.values.end(), value) == option.values.end()) {
    refuse("one of " + join(option.values, ", "));
  }
  if (option.kind == Kind::kInteger) {
    const auto number = parse_number<int64_t>(value);
    if (!number || *number < option.first || *number > option.last) {
      refuse("an integer from " + std::to_string(option.first) + " to " +
             std::to_string(option.last));
    }
  }
  if (option.kind == Kind::kNumber) {
    const auto number = parse_number<double>(value);
    if (!number || !(*number >= option.low && *number <= option.high)) {
      refuse("a number from " + to_text(option.low) + " to " + to_text(option.high));
    }
  }
}

// The value of `option`, whose flag is words[position]; moves `position` to the last word that
// belongs to it.
std::string CommandLine::value_of(const Option& option, const std::vector<std::string>& words,
                                  size_t& position) const {
  const bool has_next = position + 1 < words.size();
  if (option.kind == Kind::kFlag) {
    const bool next_is_value = has_next && words[position + 1] != "1" &&
                               words[position + 1] != "0" && parse_boolean(words[position + 1]);
    return next_is_value ? words[++position] : "true";
  }
  if (!has_next || lookup(words[position + 1]) != nullptr)
    throw UsageError("--" + option.name + " needs a value");
  std::string value = words[++position];
  if (option.kind == Kind::kList) {
    while (position + 1 < words.size() && !words[position + 1].starts_with('-'))
      value += "," + words[++position];
  }
  return value;
}

bool CommandLine::parse(int argc, const char* const* argv) {
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.starts_with('-') || word == "-") {
      const auto it = std::find_if(options_.begin(), options_.end(),
                                   [](const Option& o) { return o.kind == Kind::kPositional; });
      if (it == options_.end() || given(it->name))
        throw UsageError("unexpected word '" + word + "'");
      values_[it->name] = word;
      continue;
    }
    const size_t equals = word.starts_with("--") ? word.find('=') : std::string::npos;
    const std::string flag_word = word.substr(0, equals);
    const Option* option = lookup(flag_word);
    if (option == nullptr) unknown_flag(flag_word);
    const std::string value =
        equals == std::string::npos ? value_of(*option, words, i) : word.substr(equals + 1);
    check(*option, value);
    values_[option->name] = value;
  }
  if (get_flag("help")) {
    print_help();
    return false;
  }
  if (get_flag("version")) {
    std::cout << "gptfast " << GPTFAST_VERSION << std::endl;
    return false;
  }
  check_required();
  return true;
}

void CommandLine::check_required() const {
  for (const Option& option : options_) {
    if (option.kind != Kind::kPositional || given(option.name)) continue;
    const bool replaced = std::any_of(option.values.begin(), option.values.end(),
                                      [&](const auto& name) { return given(name); });
    if (!replaced) throw UsageError(option.name + " is missing");
  }
}

std::vector<std::pair<std::string, std::string>> CommandLine::values() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Option& option : options_) all.emplace_back(option.name, value(option.name));
  return all;
}

void CommandLine::print_help() const {
  cxxopts::Options help(program_, description_);
  std::string usage = "[flags]";
  for (const Option& option : options_) {
    if (option.kind == Kind::kPositional) {
      usage.insert(0, option.name + " ");
      continue;
    }
    const std::string names = option.short_name == '\0'
                                  ? option.name
                                  : std::string(1, option.short_name) + "," + option.name;
    std::string text = option.help;
    if (option.kind == Kind::kChoice) text += " (" + join(option.values, ", ") + ")";
    if (option.kind == Kind::kFlag) {
      help.add_options()(names, text);
    } else {
      const auto value = cxxopts::value<std::string>();
      help.add_options()(names, text,
                         option.otherwise.empty() ? value : value->default_value(option.otherwise));
    }
  }
  help.custom_help(usage);
  std::cout << help.help() << std::flush;
}

const CommandLine::Option& CommandLine::find(const std::string& name) const {
  for (const Option& option : options_) {
    if (option.name == name) return option;
  }
  TORCH_INTERNAL_ASSERT(false, "undeclared flag ", name);
}

std::string CommandLine::value(const std::string& name) const {
  const auto it = values_.find(name);
  return it == values_.end() ? find(name).otherwise : it->second;
}

bool CommandLine::get_flag(const std::string& name) const {
  return *parse_boolean(value(name));
}
std::string CommandLine::get_text(const std::string& name) const {
  return value(name);
}
int64_t CommandLine::get_integer(const std::string& name) const {
  return *parse_number<int64_t>(value(name));
}
double CommandLine::get_number(const std::string& name) const {
  return *parse_number<double>(value(name));
}
std::vector<std::string> CommandLine::get_list(const std::string& name) const {
  return split(value(name), ',');
}

std::string default_device() {
#ifdef GPTFAST_CUDA
  if (at::hasCUDA()) return "cuda";
#endif
  return "cpu";
}

at::Device parse_device(const std::string& text) {
  if (text == "cpu") return at::kCPU;
  const auto index =
      text.starts_with("cuda:") ? parse_number<int>(text.substr(5)) : std::optional<int>(0);
  if (!(text == "cuda" || text.starts_with("cuda:")) || !index || *index < 0 || *index > 127) {
    throw UsageError("--device must be cpu, cuda or cuda:N, not '" + text + "'");
  }
  if (default_device() == "cpu") {
#ifdef GPTFAST_CUDA
    throw UsageError("--device " + text + ": this machine has no CUDA device");
#else
    throw UsageError("--device " + text + ": built without CUDA (cmake -DGPTFAST_CUDA=ON)");
#endif
  }
  const auto count = static_cast<int>(at::getNumGPUs());
  if (*index >= count) {
    throw UsageError("--device " + text + ": this machine has " + std::to_string(count) +
                     " CUDA device(s), cuda:0 to cuda:" + std::to_string(count - 1));
  }
  return {at::kCUDA, static_cast<at::DeviceIndex>(*index)};
}

at::ScalarType parse_dtype(const std::string& flag, const std::string& text) {
  if (text == "bfloat16" || text == "bf16") return at::kBFloat16;
  if (text == "float16" || text == "fp16") return at::kHalf;
  if (text == "float32" || text == "fp32") return at::kFloat;
  throw UsageError("--" + flag + " must be bfloat16, float16 or float32, not '" + text + "'");
}

std::string read_file(const std::string& flag, const std::string& path) {
  TORCH_CHECK(!std::filesystem::is_directory(path), "--", flag, ": '", path,
              "' is a directory; expected a file");
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "--", flag, ": cannot read '", path, "'");
  return {std::istreambuf_iterator<char>(file), {}};
}

namespace {

std::string scaled(double amount, Progress::Unit unit) {
  char buffer[32];
  if (unit == Progress::Unit::kItems) {
    std::snprintf(buffer, sizeof buffer, amount < 10 ? "%.1f" : "%.0f", amount);
  } else {
    const bool large = amount >= 1e9;
    std::snprintf(buffer, sizeof buffer, large ? "%.1f GB" : "%.0f MB",
                  amount / (large ? 1e9 : 1e6));
  }
  return buffer;
}

std::string time_left(double seconds) {
  const auto whole = std::llround(std::min(seconds, 3.6e8));
  char buffer[64];
  if (whole >= 3600) {
    std::snprintf(buffer, sizeof buffer, "%lld:%02lld:%02lld left", whole / 3600, whole / 60 % 60,
                  whole % 60);
  } else {
    std::snprintf(buffer, sizeof buffer, "%lld:%02lld left", whole / 60, whole % 60);
  }
  return buffer;
}

}  // namespace

std::string progress_text(int64_t done, int64_t total, double seconds, Progress::Unit unit) {
  constexpr int kBarWidth = 24;
  const double share =
      total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0)
                : 0.0;
  const double rate = static_cast<double>(done) / std::max(seconds, 1e-9);
  const int filled = static_cast<int>(share * kBarWidth);
  const std::string amount = unit == Progress::Unit::kItems
                                 ? std::to_string(done) + "/" + std::to_string(total)
                                 : scaled(static_cast<double>(done), unit) + "/" +
                                       scaled(static_cast<double>(total), unit);
  std::string text = "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] " +
                     std::to_string(static_cast<int>(share * 100)) + "% " + amount + ", " +
                     scaled(rate, unit) + "/s";
  if (rate > 0) text += ", " + time_left(static_cast<double>(total - done) / rate);
  return text;
}

Progress::Progress(std::string what, Unit unit, bool quiet)
    : what_(std::move(what)),
      unit_(unit),
      enabled_(!quiet && isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_(start_) {}

Progress::~Progress() {
  if (shown_) std::cerr << "\r\x1b[K" << std::flush;
}

void Progress::update(int64_t done, int64_t total) {
  using Seconds = std::chrono::duration<double>;
  constexpr Seconds kShowAfter{2.0};  // shorter work shows no bar
  constexpr Seconds kRefresh{0.1};    // fast enough for the eye
  if (!enabled_ || done <= 0) return;
  const auto now = Clock::now();
  const Seconds elapsed = now - start_;
  const Seconds expected =
      elapsed * (static_cast<double>(std::max(total, done)) / static_cast<double>(done));
  const bool long_enough =
      elapsed > kShowAfter || (elapsed > kShowAfter / 4 && expected > kShowAfter);
  if (!long_enough || (shown_ && now - last_ < kRefresh && done < total)) return;
  std::cerr << '\r' << what_ << ' ' << progress_text(done, total, elapsed.count(), unit_)
            << "\x1b[K" << std::flush;
  shown_ = true;
  last_ = now;
}

}  // namespace gptfast::app
