// serve: answers HTTP requests with a model.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "gptfast/ops.h"
#include "gptfast/server.h"
#include "model_flags.h"

namespace gptfast::app {
namespace {

std::array<int, 2> signal_pipe = {-1, -1};

/// A second signal ends the process at once: SA_RESETHAND.
void stop_on_signals() {
  TORCH_CHECK(pipe2(signal_pipe.data(), O_CLOEXEC) == 0, "cannot make a pipe");
  struct sigaction action = {};
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  action.sa_handler = [](int) {
    const char byte = 0;
    if (write(signal_pipe[1], &byte, 1) < 0) _exit(1);
  };
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

void wait_for_signal() {
  char byte = 0;
  while (read(signal_pipe[0], &byte, 1) < 0 && errno == EINTR) {
  }
}

CommandLine make_command_line() {
  const ServerOptions defaults;
  CommandLine flags("serve", "Answer HTTP requests with a model.");
  declare_model_flags(flags);
  flags.text("host", "address to listen on; 0.0.0.0 lets other machines in", defaults.host);
  flags.integer("port", "0: any free one", defaults.port, 0, 65535);
  flags.text("api_key", "ask for 'Authorization: Bearer KEY'; everybody may without");
  flags.text("model_name", "the name in answers; else the checkpoint's folder");
  flags.integer("parallel", "sequences computed at once", defaults.parallel, 1, kMaxStepRows);
  flags.integer("ctx_size", "tokens of a sequence; 0: the model's context", 0, 0, INT64_MAX);
  flags.integer("max_queue", "sequences that may wait; more are refused", defaults.max_queue, 1,
                1024);
  flags.integer("max_body_bytes", "largest body of a request", defaults.max_body_bytes, 1,
                int64_t{1} << 30);
  flags.choice("chat_template", "auto: the model's own", "auto",
               {"auto", "none", "llama2", "llama3", "mistral", "chatml"});
  return flags;
}

ServerOptions server_options(const CommandLine& flags, const Tokenizer& tokenizer) {
  const std::filesystem::path checkpoint =
      std::filesystem::absolute(flags.get_text("checkpoint_path"));
  return {.host = flags.get_text("host"),
          .port = static_cast<int>(flags.get_integer("port")),
          .model_name = flags.given("model_name") ? flags.get_text("model_name")
                                                  : checkpoint.parent_path().filename().string(),
          .api_key = flags.get_text("api_key"),
          .parallel = flags.get_integer("parallel"),
          .ctx_size = flags.get_integer("ctx_size"),
          .max_queue = flags.get_integer("max_queue"),
          .max_body_bytes = flags.get_integer("max_body_bytes"),
          .seed = flags.given("seed")
                      ? std::optional(static_cast<uint64_t>(flags.get_integer("seed")))
                      : std::nullopt,
          .chat_template = chat_template_from_string(flags.get_text("chat_template"), tokenizer)};
}

int serve_main(int argc, char** argv) {
  CommandLine flags = make_command_line();
  if (!flags.parse(argc, argv)) return 0;
  LoadedModel loaded = load_from_flags(flags);
  const Tokenizer& tokenizer = require_tokenizer(loaded, "a server");
  Server server(loaded.model, tokenizer, server_options(flags, tokenizer));
  stop_on_signals();
  std::thread http([&] { server.run(); });
  const bool json = flags.get_flag("json"), silent = json || flags.get_flag("quiet");
  if (json) {
    const nlohmann::ordered_json line = {{"host", flags.get_text("host")}, {"port", server.port()}};
    std::cout << line.dump() << std::endl;
  }
  if (!silent)
    std::cerr << "Listening on http://" << flags.get_text("host") << ":" << server.port()
              << std::endl;
  wait_for_signal();
  if (!silent) std::cerr << "Finishing the answers that are under way" << std::endl;
  server.stop();
  http.join();
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("serve", [&] { return gptfast::app::serve_main(argc, argv); });
}
