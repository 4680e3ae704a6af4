#include "gptfast/server.h"

#include <c10/util/Exception.h>
#include <httplib.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <thread>

#include "server_answer.h"
#include "server_engine.h"
#include "server_exchange.h"
#include "server_request.h"

namespace gptfast {

using namespace server;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr int64_t kSpareThreads = 16;    // for /health and refusals while all others are answering
constexpr time_t kSocketTimeout = 10;    // seconds that a client may pause within a request
constexpr time_t kKeepAliveTimeout = 5;  // seconds that it may pause between two
constexpr size_t kKeepAliveRequests = 1'000'000;  // of one connection
constexpr const char* kRetryAfter = "1";          // seconds

/// Takes as long for a wrong key as for the right one.
bool same_key(const std::string& given, const std::string& expected) {
  unsigned difference = given.size() == expected.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^
                  static_cast<unsigned char>(expected[i % expected.size()]);
  }
  return difference == 0;
}

void set_json(httplib::Response& response, int status, const ordered_json& value) {
  response.status = status;
  response.set_content(dump(value), "application/json");
}

void set_error(httplib::Response& response, int status, const std::string& message) {
  if (status == 503) response.set_header("Retry-After", kRetryAfter);
  set_json(response, status, error_json(status, message));
}

/// The whole body, whatever the Content-Type says (curl's default is that of a form).
std::string read_body(const httplib::Request& request, const httplib::ContentReader& reader,
                      int64_t max_bytes) {
  std::string body;
  if (request.is_multipart_form_data()) {
    reader([](const httplib::MultipartFormData&) { return true; },
           [](const char*, size_t) { return true; });
    throw RequestError(415, "the body must be JSON, not a form");
  }
  bool too_large = false;
  const bool read = reader([&](const char* data, size_t size) {
    too_large = body.size() + size > static_cast<size_t>(max_bytes);
    if (!too_large) body.append(data, size);
    return !too_large;
  });
  if (too_large || (!read && request.get_header_value<uint64_t>("Content-Length") >
                                 static_cast<uint64_t>(max_bytes)))
    throw RequestError(413, "the body is larger than " + std::to_string(max_bytes) + " bytes");
  if (!read) throw RequestError(400, "the body could not be read");
  return body;
}

/// The spelling of a special token, or null.
ordered_json spelling(const Tokenizer& tokenizer, int32_t id) {
  if (id < 0) return nullptr;
  for (const char* usual : {"</s>", "<s>"}) {  // SentencePiece shows no control tokens
    if (tokenizer.token_id(usual) == id) return usual;
  }
  return to_valid_utf8(tokenizer.decode({id}));
}

}  // namespace

class Server::Impl {
 public:
  Impl(Transformer model, const Tokenizer& tokenizer, const ServerOptions& options)
      : tokenizer_(tokenizer),
        options_(options),
        engine_(std::move(model), options.parallel, options.ctx_size, options.max_queue) {
    TORCH_CHECK(options.max_body_bytes >= 1, "max_body_bytes must be at least 1, got ",
                options.max_body_bytes);
    configure();
    add_routes();
    port_ = options.port;
    const bool bound = options.port == 0 ? (port_ = http_.bind_to_any_port(options.host)) > 0
                                         : http_.bind_to_port(options.host, options.port);
    TORCH_CHECK(bound, "cannot listen on ", options.host, " port ", options.port,
                ": the port is taken, or this machine has no such address; choose others with "
                "--host and --port");
    // The HTTP library lets 5 connections wait to be accepted, and the kernel resets what waits
    // longer when many come at once.
    listen(listening_socket_, SOMAXCONN);
  }

  int port() const { return port_; }

  void run() {
    {
      const std::lock_guard lock(mutex_);
      if (draining_) return;
      running_ = true;
    }
    http_.listen_after_bind();
    running_ = false;
  }

  void stop() {
    {
      std::unique_lock lock(mutex_);
      draining_ = true;
      if (!running_) return;
      idle_.wait(lock, [&] { return active_ == 0; });
    }
    // Before it accepts, the HTTP library would not notice.
    while (running_ && !http_.is_running())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    http_.stop();
  }

 private:
  using Handler = void (Impl::*)(const json& body, httplib::Response& response);

  void configure() {
    const auto threads =
        static_cast<size_t>(options_.parallel + options_.max_queue + kSpareThreads);
    http_.new_task_queue = [threads] { return new httplib::ThreadPool(threads); };
    http_.set_socket_options([this](socket_t socket) {
      listening_socket_ = socket;
      const int on = 1;  // not SO_REUSEPORT, with which two servers would share a port unnoticed
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    });
    http_.set_tcp_nodelay(true);
    http_.set_payload_max_length(static_cast<size_t>(options_.max_body_bytes));
    http_.set_read_timeout(kSocketTimeout);
    http_.set_write_timeout(kSocketTimeout);
    http_.set_keep_alive_timeout(kKeepAliveTimeout);
    http_.set_keep_alive_max_count(kKeepAliveRequests);
    http_.set_pre_routing_handler([this](const auto& request, auto& response) {
      if (!options_.api_key.empty() && request.path != "/health" &&
          !same_key(request.get_header_value("Authorization"), "Bearer " + options_.api_key)) {
        set_error(response, 401, "the request needs the header 'Authorization: Bearer KEY'");
        return httplib::Server::HandlerResponse::Handled;
      }
      return httplib::Server::HandlerResponse::Unhandled;
    });
    http_.set_error_handler([](const auto& request, auto& response) {
      if (!response.body.empty()) return;
      set_error(response, response.status,
                response.status == 404 ? "there is no " + request.method + " " + request.path
                                       : "the request could not be read");
    });
    http_.set_exception_handler([](const auto&, auto& response, const std::exception_ptr&) {
      set_error(response, 500, "the server failed to answer this request");
    });
  }

  void add_routes() {
    http_.Get("/health", [](const auto&, auto& response) {
      set_json(response, 200, {{"status", "ok"}});
    });
    http_.Get("/v1/models", [this](const auto&, auto& response) {
      const ordered_json model = {{"id", options_.model_name},
                                  {"object", "model"},
                                  {"created", started_},
                                  {"owned_by", "gptfast"},
                                  {"max_model_len", engine_.ctx_size()}};
      set_json(response, 200, {{"object", "list"}, {"data", ordered_json::array({model})}});
    });
    http_.Get("/tokenizer_info", [this](const auto&, auto& response) {
      set_json(response, 200,
               {{"tokenizer_class", tokenizer_.kind()},
                {"bos_token", spelling(tokenizer_, tokenizer_.bos_id())},
                {"eos_token", spelling(tokenizer_, tokenizer_.eos_id())}});
    });
    post("/tokenize", &Impl::tokenize);
    post("/detokenize", &Impl::detokenize);
    post("/v1/completions", &Impl::complete<Api::kCompletions>);
    post("/v1/chat/completions", &Impl::complete<Api::kChat>);
    post("/completion", &Impl::complete<Api::kLlamaCpp>);
  }

  void post(const char* path, Handler handler) {
    http_.Post(path, [this, handler](const httplib::Request& request, httplib::Response& response,
                                     const httplib::ContentReader& reader) {
      try {
        const std::string body = read_body(request, reader, options_.max_body_bytes);
        (this->*handler)(parse_body(body), response);
      } catch (const RequestError& e) {
        set_error(response, e.status, e.what());
      } catch (const c10::Error& e) {  // of the tokenizer, which did not like a text or an id
        set_error(response, 400, e.what_without_backtrace());
      }
    });
  }

  void tokenize(const json& body, httplib::Response& response) {
    const auto ids = parse_tokenize(body, tokenizer_);
    set_json(response, 200,
             {{"tokens", ids}, {"count", ids.size()}, {"max_model_len", engine_.ctx_size()}});
  }

  void detokenize(const json& body, httplib::Response& response) {
    const std::string text = to_valid_utf8(tokenizer_.decode(parse_detokenize(body, tokenizer_)));
    set_json(response, 200, {{"prompt", text}, {"content", text}});
  }

  template <Api api>
  void complete(const json& body, httplib::Response& response) {
    const CompletionRequest request =
        parse_completion(body, api, tokenizer_, options_.chat_template,
                         {.vocab_size = engine_.vocab_size(),
                          .max_prompt = engine_.max_prompt(),
                          .max_sequences = engine_.max_queue(),
                          .seed = options_.seed});
    start_answer();
    const std::shared_ptr<void> finished(nullptr, [this](void*) { finish_answer(); });
    auto exchange = std::make_shared<Exchange>(tokenizer_, request, make_sequences(request),
                                               options_.model_name);
    if (!engine_.submit(exchange->sequences()))
      throw RequestError(503, "too many requests are waiting; try again");
    // Everything goes out as chunks: only while it writes does the HTTP library tell whether the
    // client is still there.
    response.set_chunked_content_provider(
        request.stream ? "text/event-stream" : "application/json",
        [exchange](size_t, httplib::DataSink& sink) {
          return exchange->provide([&](const std::string&
                                           text) { return sink.write(text.data(), text.size()); },
                                   sink.is_writable, sink.done);
        },
        [exchange, finished](bool) { exchange->cancel(); });
  }

  std::vector<std::shared_ptr<Sequence>> make_sequences(const CompletionRequest& request) const {
    std::vector<std::shared_ptr<Sequence>> sequences;
    const auto channel = std::make_shared<Channel>();
    std::vector<int32_t> stop;
    if (!request.ignore_eos) {
      stop = tokenizer_.stop_ids();
      for (const int32_t id : turn_end_ids(tokenizer_, options_.chat_template)) stop.push_back(id);
    }
    for (const auto& prompt : request.prompts) {
      for (int64_t i = 0; i < request.n; ++i) {
        auto sequence = std::make_shared<Sequence>();
        const int64_t room = engine_.room(static_cast<int64_t>(prompt.size()));
        const bool all = request.max_tokens < 0 || request.max_tokens > room;
        sequence->prompt = prompt;
        sequence->max_tokens = all ? room : request.max_tokens;
        sequence->at_max_tokens = all ? FinishReason::kContext : FinishReason::kLength;
        sequence->sampling = request.sampling;
        sequence->sampling.seed += static_cast<uint64_t>(i);
        sequence->stop_tokens = stop;
        sequence->logprobs = request.logprobs;
        sequence->prompt_logprobs = request.echo && request.logprobs >= 0;
        sequence->number = sequences.size();
        sequence->channel = channel;
        sequences.push_back(std::move(sequence));
      }
    }
    return sequences;
  }

  void start_answer() {
    const std::lock_guard lock(mutex_);
    if (draining_) throw RequestError(503, "the server is shutting down");
    ++active_;
  }

  void finish_answer() {
    const std::lock_guard lock(mutex_);
    if (--active_ == 0) idle_.notify_all();
  }

  const Tokenizer& tokenizer_;
  const ServerOptions options_;
  const int64_t started_ = std::time(nullptr);
  Engine engine_;
  httplib::Server http_;
  int port_ = 0;
  socket_t listening_socket_ = -1;
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t active_ = 0;  // answers that are not yet written to their end
  bool draining_ = false;
  std::atomic<bool> running_ = false;
};

Server::Server(Transformer model, const Tokenizer& tokenizer, const ServerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), tokenizer, options)) {}
Server::~Server() = default;
int Server::port() const {
  return impl_->port();
}
void Server::run() {
  impl_->run();
}
void Server::stop() {
  impl_->stop();
}

}  // namespace gptfast
