// An HTTP server for a model: OpenAI's completions and chat, llama.cpp's /completion, several
// requests at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "gptfast/chat.h"
#include "gptfast/model.h"
#include "gptfast/tokenizer.h"

namespace gptfast {

struct ServerOptions {
  std::string host = "127.0.0.1";      ///< address to bind; other machines reach only what is bound
  int port = 8080;                     ///< 0: any free one
  std::string model_name = "gptfast";  ///< what /v1/models and the answers say
  std::string api_key;                 ///< "": none is asked for
  int64_t parallel = 1;                ///< sequences that are computed at once
  int64_t ctx_size = 0;                ///< tokens of a sequence; 0: the model's
  int64_t max_queue = 256;             ///< sequences that may wait for a slot
  int64_t max_body_bytes = 8 << 20;    ///< of a request
  std::optional<uint64_t> seed;        ///< of requests that name none; else each draws its own
  ChatTemplate chat_template = ChatTemplate::kNone;  ///< of /v1/chat/completions
};

/// Serves one model until stop(). Requests are answered by threads of their own; one thread
/// computes for all of them.
class Server {
 public:
  /// Allocates the caches and binds the port. `tokenizer` must outlive the server. Throws when an
  /// option is out of range or the port cannot be bound.
  Server(Transformer model, const Tokenizer& tokenizer, const ServerOptions& options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// The port that was bound.
  int port() const;
  /// Answers requests; returns after stop().
  void run();
  /// New requests are refused (503), those that were accepted are answered to their end, then run()
  /// returns. Waits for that. From any thread but those of the requests.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gptfast
