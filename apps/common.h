// What all programs share: the command line, the outermost error handler and the progress bar.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gptfast::app {

/// A mistake in the command line: one line on stderr, exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Runs the body of a program and returns its exit status. An exception becomes one line on stderr:
/// 2 for a UsageError, 1 for anything else, also when stdout could not be written. Use: `int
/// main(int argc, char** argv) { return run("generate", [&] {...}); }`
int run(const std::string& program, const std::function<int()>& body);

/// A command line in the style of Python's argparse, which the flags of gpt-fast are written for:
///   --name value, --name=value, -q value; booleans as --name, --name True or --name=false; lists
///   as --name a b or --name a,b.
/// A value may start with a dash (--temperature -1 is a range error, not an unknown flag) unless it
/// is itself a known flag. Declare flags, call parse(), read values. Names are given without
/// dashes, as "name" or "q,name" with a short form.
class CommandLine {
 public:
  CommandLine(std::string program, std::string description);

  void flag(const std::string& name, const std::string& help, bool otherwise = false);
  void text(const std::string& name, const std::string& help, const std::string& otherwise = "");
  void integer(const std::string& name, const std::string& help, int64_t otherwise, int64_t low,
               int64_t high);
  void number(const std::string& name, const std::string& help, double otherwise, double low,
              double high);
  void choice(const std::string& name, const std::string& help, const std::string& otherwise,
              const std::vector<std::string>& values);
  void list(const std::string& name, const std::string& help,
            const std::vector<std::string>& otherwise = {});
  /// The one word without a flag, such as the input of convert; required unless a flag in `instead`
  /// is given.
  void positional(const std::string& name, const std::string& help,
                  const std::vector<std::string>& instead = {});

  /// False when --help or --version was asked for and has been printed. Checks every value, so that
  /// the getters cannot fail. Throws UsageError: unknown flag (with the nearest known one), missing
  /// or bad value, number out of range.
  bool parse(int argc, const char* const* argv);

  bool given(const std::string& name) const { return values_.contains(name); }
  bool get_flag(const std::string& name) const;
  std::string get_text(const std::string& name) const;  ///< also of a choice and of the positional
  int64_t get_integer(const std::string& name) const;
  double get_number(const std::string& name) const;
  std::vector<std::string> get_list(const std::string& name) const;
  /// Every flag with its value, given or default, in the order of declaration.
  std::vector<std::pair<std::string, std::string>> values() const;

 private:
  enum class Kind { kFlag, kText, kInteger, kNumber, kChoice, kList, kPositional };
  struct Option {
    Kind kind = Kind::kFlag;
    std::string help = {};
    std::string otherwise = {};  // the default as text; a list is joined with ','
    double low = 0;              // of a number
    double high = 0;
    int64_t first = 0;  // of an integer
    int64_t last = 0;
    std::vector<std::string> values = {};  // of a choice; of the positional: flags that replace it
    std::string name = {};
    char short_name = '\0';  // '\0': none
  };

  void declare(const std::string& name, Option option);
  const Option& find(const std::string& name) const;
  const Option* lookup(const std::string& word) const;
  [[noreturn]] void unknown_flag(const std::string& word) const;
  void check(const Option& option, const std::string& value) const;
  std::string value_of(const Option& option, const std::vector<std::string>& words,
                       size_t& position) const;
  void check_required() const;
  void print_help() const;
  std::string value(const std::string& name) const;

  std::string program_;
  std::string description_;
  std::vector<Option> options_;
  std::map<std::string, std::string> values_;  // what was given
};

/// "cpu", "cuda" or "cuda:N". Throws UsageError for anything else and for a device that this build
/// or machine does not have.
at::Device parse_device(const std::string& text);
/// "cuda" where this build and machine have it, else "cpu": the default of --device.
std::string default_device();
/// "bfloat16", "float16" or "float32" (also bf16, fp16, fp32). Throws UsageError.
at::ScalarType parse_dtype(const std::string& flag, const std::string& text);

/// The bytes of the file that --`flag` names.
std::string read_file(const std::string& flag, const std::string& path);

/// A progress bar on stderr with rate and time left. It shows itself only for work that takes
/// longer than two seconds, and never when stderr is no terminal or `quiet`. The destructor clears
/// the line.
class Progress {
 public:
  enum class Unit { kBytes, kItems };
  Progress(std::string what, Unit unit, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(int64_t done, int64_t total);
  /// For LoadOptions::progress and the like; valid as long as this object.
  std::function<void(int64_t, int64_t)> callback() {
    return [this](int64_t done, int64_t total) { update(done, total); };
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::string what_;
  Unit unit_;
  bool enabled_;
  bool shown_ = false;
  Clock::time_point start_;
  Clock::time_point last_;
};

/// The text after the name of a progress bar: " 42% 1.2/2.9 GB, 310 MB/s, 5 s left". `seconds` is
/// the time since the start.
std::string progress_text(int64_t done, int64_t total, double seconds, Progress::Unit unit);

}  // namespace gptfast::app
