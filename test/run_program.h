// Runs the project's programs as a user would.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace gptfast {

struct ProgramResult {
  int status = -1;
  std::string out;  // stdout, or what a redirection in the command sends there
};

/// Runs a shell command line with the programs' folder at the head of PATH.
inline ProgramResult run_program(const std::string& command) {
  ProgramResult result;
  FILE* pipe = popen(("PATH=" GPTFAST_BIN ":$PATH; " + command).c_str(), "r");
  std::array<char, 4096> buffer{};
  for (size_t n = 0; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    result.out.append(buffer.data(), n);
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

/// The command fails with `status`, one line on stderr that holds `part`, and nothing on stdout.
inline void expect_failure(const std::string& command, int status, const std::string& part) {
  const ProgramResult result = run_program(command + " 2>&1 >/dev/null");
  EXPECT_EQ(result.status, status) << command << "\n" << result.out;
  EXPECT_NE(result.out.find(part), std::string::npos) << command << "\n" << result.out;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1) << command << "\n"
                                                                       << result.out;
  EXPECT_EQ(run_program(command + " 2>/dev/null").out, "") << command;
}

}  // namespace gptfast
