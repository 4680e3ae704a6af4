// The HTTP server: a client talks to it over loopback, and what it says must be what generate()
// computes.
#include <gtest/gtest.h>
#include <httplib.h>
#include <signal.h>

#include <ctime>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "gptfast/generate.h"
#include "gptfast/server.h"
#include "server_answer.h"
#include "test_util.h"

namespace gptfast {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

const Tokenizer& tokenizer() {
  static const auto loaded = Tokenizer::load(golden("eval") / "tokenizer.model");
  return *loaded;
}

/// A server of the tiny model on a free port, for the life of this object.
class Running {
 public:
  explicit Running(ServerOptions options = {}) : server_(start(options)) {
    thread_ = std::thread([this] { server_.run(); });
  }
  ~Running() {
    server_.stop();
    thread_.join();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  int port() const { return server_.port(); }
  httplib::Client client() const {
    httplib::Client client("127.0.0.1", port());
    client.set_read_timeout(60);
    return client;
  }

  /// Status and JSON of a POST.
  std::pair<int, json> post(const std::string& path, const std::string& body) const {
    const auto result = client().Post(path, body, "application/json");
    if (!result) return {-1, {}};
    return {result->status, json::parse(result->body, nullptr, false)};
  }
  json ok(const std::string& path, const json& body) const {
    const auto [status, answer] = post(path, body.dump());
    EXPECT_EQ(status, 200) << answer.dump();
    return answer;
  }
  /// The events of a stream, "[DONE]" not among them.
  std::vector<json> stream(const std::string& path, json body) const {
    body["stream"] = true;
    const auto result = client().Post(path, body.dump(), "application/json");
    EXPECT_TRUE(result && result->status == 200);
    EXPECT_EQ(result->get_header_value("Content-Type"), "text/event-stream");
    std::vector<json> events;
    std::istringstream lines(result->body);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("data: {")) events.push_back(json::parse(line.substr(6)));
    }
    EXPECT_EQ(result->body.ends_with("data: [DONE]\n\n"), path != "/completion");
    return events;
  }

 private:
  static Server start(ServerOptions& options) {
    options.port = 0;
    return {tiny_model("tiny-gqa"), tokenizer(), options};
  }

  Server server_;
  std::thread thread_;
};

Ids ramp(int64_t length, int32_t step) {
  Ids ids;
  for (int64_t i = 0; i < length; ++i) ids.push_back(static_cast<int32_t>(3 + (i * step) % 500));
  return ids;
}

GenerateResult expected(const Ids& prompt, int64_t max_new_tokens) {
  static Transformer model = tiny_model("tiny-gqa");
  GenerateOptions options;
  options.max_new_tokens = max_new_tokens;
  options.sampling.temperature = 0;
  options.stop_tokens = tokenizer().stop_ids();
  options.return_logits = true;
  return generate(model, prompt, options);
}

/// The answer's text: what follows the prompt's.
std::string expected_text(const Ids& prompt, int64_t max_new_tokens) {
  StreamDecoder decoder(tokenizer());
  std::string text;
  for (const int32_t id : prompt) decoder.push(id);
  const GenerateResult result = expected(prompt, max_new_tokens);
  for (const int32_t id : result.rows[0].tokens) text += decoder.push(id);
  return text + decoder.finish();
}

TEST(Serve, SmallEndpoints) {
  const Running server({.model_name = "tiny"});
  auto client = server.client();
  EXPECT_EQ(client.Get("/health")->body, R"({"status":"ok"})");
  const json models = json::parse(client.Get("/v1/models")->body);
  EXPECT_EQ(models["data"][0]["id"], "tiny");
  const json info = json::parse(client.Get("/tokenizer_info")->body);
  EXPECT_EQ(info["eos_token"], "</s>");
  EXPECT_EQ(info["bos_token"], "<s>");
  const Ids ids = tokenizer().encode("hello there");
  EXPECT_EQ(server.ok("/tokenize",
                      {{"prompt", "hello there"}, {"add_special_tokens", false}})["tokens"],
            ids);
  EXPECT_EQ(server.ok("/tokenize", {{"content", "hello there"}})["tokens"], ids);
  Ids with_bos = ids;
  with_bos.insert(with_bos.begin(), tokenizer().bos_id());
  EXPECT_EQ(server.ok("/tokenize", {{"content", "hello there"}, {"add_special", true}})["tokens"],
            with_bos);
  EXPECT_EQ(server.ok("/detokenize", {{"tokens", ids}})["prompt"], "hello there");
}

TEST(Serve, GreedyCompletionsAreThoseOfGenerate) {
  const Running server;
  std::set<json> reasons;
  for (const int64_t length : {3, 40, 300}) {  // one step, one piece, two pieces
    const Ids prompt = ramp(length, 7);
    const GeneratedRow row = expected(prompt, 20).rows[0];
    const bool eos = row.finish_reason == FinishReason::kStop;
    json request = {{"prompt", prompt}, {"temperature", 0}, {"max_tokens", 20}};
    const json answer = server.ok("/v1/completions", request);
    EXPECT_EQ(answer["choices"][0]["text"], expected_text(prompt, 20)) << length;
    EXPECT_EQ(answer["choices"][0]["finish_reason"], eos ? "stop" : "length");
    EXPECT_EQ(answer["usage"]["prompt_tokens"], length);
    EXPECT_EQ(answer["usage"]["completion_tokens"], row.tokens.size());
    reasons.insert(answer["choices"][0]["finish_reason"]);
    request.erase("max_tokens");
    request["n_predict"] = 20;
    const json llama = server.ok("/completion", request);
    EXPECT_EQ(llama["content"], expected_text(prompt, 20));
    EXPECT_EQ(llama["stop_type"], eos ? "eos" : "limit");
    EXPECT_EQ(llama["tokens_predicted"], row.tokens.size());
    request["ignore_eos"] = true;
    EXPECT_EQ(server.ok("/completion", request)["tokens_predicted"], 20);
  }
  EXPECT_EQ(reasons.size(), 2U);  // both ends were seen
}

TEST(Serve, PromptsOfEveryForm) {
  const Running server({.parallel = 3});
  const auto texts = [&](const json& prompt) {
    std::vector<std::string> found;
    const json answer =
        server.ok("/v1/completions", {{"prompt", prompt}, {"temperature", 0}, {"max_tokens", 5}});
    for (size_t i = 0; i < answer["choices"].size(); ++i) {
      EXPECT_EQ(answer["choices"][i]["index"], i);
      found.push_back(answer["choices"][i]["text"]);
    }
    return found;
  };
  Ids hello = tokenizer().encode("hello");
  hello.insert(hello.begin(), tokenizer().bos_id());  // the tokenizer's rule, for texts alone
  const Ids other = ramp(9, 11);
  const std::string a = expected_text(hello, 5), b = expected_text(other, 5);
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts("hello"), Texts{a});
  EXPECT_EQ(texts({"hello", "hello"}), (Texts{a, a}));
  EXPECT_EQ(texts(other), Texts{b});
  EXPECT_EQ(texts({other, hello, other, other}), (Texts{b, a, b, b}));
}

/// The request of lm-evaluation-harness.
json score(const Running& server, const json& prompt, int64_t max_tokens = 1) {
  return server.ok("/v1/completions", {{"model", "m"},
                                       {"prompt", prompt},
                                       {"temperature", 0},
                                       {"max_tokens", max_tokens},
                                       {"logprobs", 1},
                                       {"seed", 1234},
                                       {"echo", true}})["choices"][0]["logprobs"];
}

TEST(Serve, EchoScoresThePrompt) {
  const Running server;
  for (const int64_t length : {1, 5, 40, 300}) {
    const Ids prompt = ramp(length, 13);
    const GenerateResult result = expected(prompt, 1);
    Ids tokens = prompt;
    tokens.push_back(result.rows[0].tokens[0]);
    const Tensor logprobs = at::log_softmax(result.logits, -1);  // [length, V]
    const json scores = score(server, json::array({prompt}));
    for (const char* list : {"tokens", "token_logprobs", "top_logprobs", "text_offset"})
      ASSERT_EQ(scores[list].size(), length + 1) << list;
    EXPECT_TRUE(scores["token_logprobs"][0].is_null());
    for (int64_t i = 0; i < length; ++i) {
      const int32_t token = tokens[static_cast<size_t>(i) + 1];
      const double logprob = scores["token_logprobs"][i + 1];
      EXPECT_NEAR(logprob, logprobs[i][token].item<double>(), 1e-4) << i;
      double best = -1e9;
      for (const auto& [text, value] : scores["top_logprobs"][i + 1].items())
        best = std::max(best, value.get<double>());
      EXPECT_EQ(logprob == best, logprobs[i].argmax().item<int64_t>() == token) << i;
    }
    const json without = score(server, prompt, 0);
    EXPECT_EQ(without["token_logprobs"].size(), length);
    EXPECT_EQ(without["token_logprobs"].back(), scores["token_logprobs"][length - 1]);
  }
}

TEST(Serve, EchoesThePromptsText) {
  const Running server;
  const json answer =
      server.ok("/v1/completions",
                {{"prompt", "hello there"}, {"temperature", 0}, {"max_tokens", 0}, {"echo", true}});
  EXPECT_EQ(answer["choices"][0]["text"], "hello there");
}

TEST(Serve, AFullContextLeavesRoomForOneToken) {
  const Running server({.ctx_size = 32});
  EXPECT_EQ(score(server, ramp(32, 5))["token_logprobs"].size(), 33U);
  EXPECT_EQ(score(server, ramp(33, 5))["token_logprobs"].size(), 34U);
  const auto [status, answer] =
      server.post("/v1/completions", json{{"prompt", ramp(34, 5)}}.dump());
  EXPECT_EQ(status, 400);
  EXPECT_NE(answer["error"]["message"].get<std::string>().find("34 tokens"), std::string::npos);
  const json cut = server.ok("/completion", {{"prompt", ramp(30, 5)}, {"temperature", 0}});
  EXPECT_EQ(cut["tokens_predicted"], 2);
}

TEST(Serve, StreamsAreTheSameText) {
  const Running server({.parallel = 2, .chat_template = ChatTemplate::kMistral});
  json request = {{"prompt", {ramp(12, 3), ramp(20, 9)}},
                  {"max_tokens", 30},
                  {"seed", 5},
                  {"n", 2},
                  {"temperature", 0.9},
                  {"top_k", 50},
                  {"stream_options", {{"include_usage", true}}}};
  const json whole = server.ok("/v1/completions", request);
  std::vector<std::string> texts(4);
  const auto events = server.stream("/v1/completions", request);
  for (const json& event : events) {
    for (const json& choice : event["choices"])
      texts.at(choice["index"].get<size_t>()) += choice["text"].get<std::string>();
  }
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i], whole["choices"][i]["text"]) << i;
  EXPECT_NE(texts[0], texts[1]);  // each with a seed of its own
  EXPECT_EQ(events.back()["usage"], whole["usage"]);

  request = {{"prompt", ramp(12, 3)}, {"n_predict", 30}, {"seed", 5}};
  std::string text;
  for (const json& event : server.stream("/completion", request)) text += event["content"];
  EXPECT_EQ(text, server.ok("/completion", request)["content"]);

  request = {{"messages", {{{"role", "user"}, {"content", "hi"}}}},
             {"max_tokens", 30},
             {"seed", 5}};
  text.clear();
  for (const json& event : server.stream("/v1/chat/completions", request))
    text += event["choices"][0]["delta"]["content"];
  const json chat = server.ok("/v1/chat/completions", request);
  EXPECT_EQ(text, chat["choices"][0]["message"]["content"]);
  EXPECT_EQ(chat["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(chat["usage"]["prompt_tokens"],
            encode_turn(tokenizer(), ChatTemplate::kMistral, "hi", true).size());
}

TEST(Serve, StopStringsEndTheText) {
  const Running server;
  const Ids prompt = ramp(12, 3);
  const std::string text = expected_text(prompt, 40);
  ASSERT_GT(text.size(), 12U);
  const std::string stop = text.substr(text.size() / 2, 3);
  const json request = {{"prompt", prompt}, {"temperature", 0}, {"max_tokens", 40}, {"stop", stop}};
  const json choice = server.ok("/v1/completions", request)["choices"][0];
  EXPECT_EQ(choice["text"], text.substr(0, text.find(stop)));
  EXPECT_EQ(choice["finish_reason"], "stop");
  std::string streamed;
  for (const json& event : server.stream("/v1/completions", request))
    streamed += event["choices"][0]["text"];
  EXPECT_EQ(streamed, choice["text"]);
}

TEST(Serve, ManyAtOnceGetWhatEachGetsAlone) {
  const Running server({.parallel = 4});
  std::vector<std::future<std::string>> answers;
  const auto prompt = [](int i) { return ramp(2 + i * 29, 3 + 2 * i); };
  answers.reserve(12);
  for (int i = 0; i < 12; ++i) {
    answers.push_back(std::async(std::launch::async, [&, i] {
      const json request = {{"prompt", prompt(i)}, {"temperature", 0}, {"max_tokens", 10 + 3 * i}};
      return server.ok("/v1/completions", request)["choices"][0]["text"].get<std::string>();
    }));
  }
  for (int i = 0; i < 12; ++i)
    EXPECT_EQ(answers[static_cast<size_t>(i)].get(), expected_text(prompt(i), 10 + 3 * i)) << i;
}

TEST(Serve, BadRequestsGetAMessage) {
  const Running server({.max_queue = 8, .max_body_bytes = 20000});
  const auto expect = [&](const std::string& path, const std::string& body, int status,
                          const std::string& part) {
    const auto [found, answer] = server.post(path, body);
    EXPECT_EQ(found, status) << body;
    ASSERT_TRUE(answer.contains("error")) << body;
    EXPECT_NE(answer["error"]["message"].get<std::string>().find(part), std::string::npos)
        << answer.dump();
  };
  const std::string path = "/v1/completions";
  expect(path, "", 400, "not valid JSON");
  expect(path, "{\"prompt\": \"a", 400, "not valid JSON");
  expect(path, std::string(10000, '['), 400, "not valid JSON");
  expect(path, "[1]", 400, "must be a JSON object");
  expect(path, "{}", 400, "'prompt' is missing");
  expect(path, R"({"prompt": 5})", 400, "'prompt' must be");
  expect(path, R"({"prompt": []})", 400, "empty");
  expect(path, R"({"prompt": [[]]})", 400, "empty");
  expect(path, R"({"prompt": [1, "a"]})", 400, "token ids");
  expect(path, R"({"prompt": [1.5]})", 400, "token ids");
  expect(path, R"({"prompt": [-1]})", 400, "token ids");
  expect(path, R"({"prompt": [512]})", 400, "token ids from 0 to 511");
  expect(path, R"({"prompt": [{}, {}]})", 400, "'prompt' must be");
  expect(path, R"({"prompt": "a", "max_tokens": -1})", 400, "'max_tokens'");
  expect(path, R"({"prompt": "a", "max_tokens": "9"})", 400, "'max_tokens'");
  expect(path, R"({"prompt": "a", "max_tokens": 18446744073709551615})", 400, "'max_tokens'");
  expect(path, R"({"prompt": "a", "temperature": 1e999})", 400, "not valid JSON");
  expect(path, R"({"prompt": "a", "temperature": -1})", 400, "'temperature'");
  expect(path, R"({"prompt": "a", "stream": "yes"})", 400, "'stream'");
  expect(path, R"({"prompt": "a", "stop": [""]})", 400, "'stop'");
  expect(path, R"({"prompt": "a", "stop": {"a": "b"}})", 400, "'stop'");
  expect(path, R"({"prompt": "a", "top_p": 0.5})", 400, "not supported");
  expect(path, R"({"prompt": "a", "n": 9})", 400, "more than 8");
  expect(path, R"({"prompt": "a", "tempreature": 1})", 400, "unknown field 'tempreature'");
  expect(path, json{{"prompt", ramp(2050, 3)}}.dump(), 400, "2050 tokens");
  expect(path, json{{"prompt", std::string(30000, 'a')}}.dump(), 413, "larger than 20000 bytes");
  expect("/v1/chat/completions", R"({"messages": [{"role": "user", "content": "a"}]})", 400,
         "--chat_template");
  expect("/v1/chat/completions", R"({"messages": [{"role": "user"}]})", 400, "'content'");
  expect("/v1/chat/completions", R"({"messages": []})", 400, "'messages'");
  expect("/detokenize", R"({"tokens": [99999]})", 400, "token ids");
  expect("/tokenize", "{}", 400, "'prompt'");
  expect("/v1/nothing", "{}", 404, "/v1/nothing");
  EXPECT_EQ(server.client().Get("/health")->status, 200);
}

TEST(Serve, AKeyKeepsOthersOut) {
  const Running server({.api_key = "secret"});
  auto client = server.client();
  EXPECT_EQ(client.Get("/health")->status, 200);
  EXPECT_EQ(client.Get("/v1/models")->status, 401);
  for (const char* key : {"", "Bearer ", "Bearer secre", "Bearer secrets", "secret"})
    EXPECT_EQ(client.Get("/v1/models", {{"Authorization", key}})->status, 401) << key;
  EXPECT_EQ(client.Get("/v1/models", {{"Authorization", "Bearer secret"}})->status, 200);
}

/// `n` answers of 2040 tokens, to the end of the context.
json long_request(int n = 1) {
  return {{"prompt", ramp(8, 3)},
          {"temperature", 0},
          {"ignore_eos", true},
          {"max_tokens", 2040},
          {"n", n}};
}

/// A long stream whose first event is there.
class LongStream {
 public:
  explicit LongStream(int port, int n = 1) {
    thread_ = std::thread([this, port, n] {
      httplib::Client client("127.0.0.1", port);
      client.set_read_timeout(60);
      httplib::Request request;
      request.method = "POST";
      request.path = "/v1/completions";
      json body = long_request(n);
      body["stream"] = true;
      body["stream_options"] = {{"include_usage", true}};
      request.body = body.dump();
      request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
        text_.append(data, size);
        if (!std::exchange(began_, true)) begin_.set_value();
        return !leave_;
      };
      client.send(request);
      if (!began_) begin_.set_value();
    });
    begin_.get_future().wait();
  }
  ~LongStream() { end(); }
  void leave() { leave_ = true; }
  std::string end() {
    if (thread_.joinable()) thread_.join();
    return text_;
  }

 private:
  std::promise<void> begin_;
  bool began_ = false;
  std::atomic<bool> leave_ = false;
  std::string text_;
  std::thread thread_;
};

TEST(Serve, AFullQueueIsRefused) {
  const Running server({.parallel = 1, .max_queue = 8});
  LongStream running(server.port(), /*n=*/8);  // its first token is there: seven answers wait
  const auto result =
      server.client().Post("/v1/completions", long_request(8).dump(), "application/json");
  ASSERT_TRUE(result) << httplib::to_string(result.error());
  EXPECT_EQ(result->status, 503) << result->body;
  EXPECT_EQ(result->get_header_value("Retry-After"), "1");
  running.leave();
}

// In processor time, which does not pass while the machine is busy elsewhere.
TEST(Serve, AClientThatLeavesFreesItsSlot) {
  constexpr int kAnswers = 64;
  const Running server({.parallel = 1, .max_queue = kAnswers});
  const auto ticks = [](const auto& body) {
    const std::clock_t start = std::clock();
    body();
    return static_cast<double>(std::clock() - start);
  };
  const double one = ticks([&] { server.ok("/v1/completions", long_request()); });
  LongStream running(server.port(), kAnswers);
  running.leave();
  const json brief = {{"prompt", "a"}, {"temperature", 0}, {"n_predict", 1}};
  EXPECT_LT(ticks([&] { server.ok("/completion", brief); }), one * kAnswers / 2);
}

TEST(Serve, StopLetsAnswersFinish) {
  std::unique_ptr<LongStream> stream;
  {
    const Running server;
    stream = std::make_unique<LongStream>(server.port());
  }  // stops the server
  const std::string text = stream->end();
  EXPECT_TRUE(text.ends_with("data: [DONE]\n\n"));
  EXPECT_NE(text.find("\"completion_tokens\":2040"), std::string::npos)
      << text.substr(text.size() - 300);
}

TEST(Serve, TheProgramEndsOnSigterm) {
  const TempDir dir;
  const std::string out = (dir / "out").string();
  std::filesystem::copy(golden("tiny-gqa") / "model.fp32.pth", dir / "model.pth");
  std::filesystem::copy(golden("tiny-gqa") / "config.json", dir / "config.json");
  std::filesystem::copy(golden("eval") / "tokenizer.model", dir / "tokenizer.model");
  const std::string checkpoint = (dir / "model.pth").string();
  const pid_t child = fork();
  if (child == 0) {
    if (freopen(out.c_str(), "w", stdout) == nullptr) _exit(127);
    execl(GPTFAST_BIN "/serve", "serve", "--checkpoint_path", checkpoint.c_str(), "--precision",
          "float32", "--port", "0", "--json", "--device", "cpu", nullptr);
    _exit(127);
  }
  json line;
  for (int i = 0; i < 1200 && !line.is_object(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::ifstream file(out);
    line = json::parse(file, nullptr, false);
  }
  ASSERT_TRUE(line.is_object()) << "the server did not say its port";
  LongStream stream(line["port"]);
  kill(child, SIGTERM);
  EXPECT_NE(stream.end().find("\"completion_tokens\":2040"), std::string::npos);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Serve, OptionsAreChecked) {
  const auto error = [](ServerOptions options) {
    return error_of([&] { Server(tiny_model("tiny-gqa"), tokenizer(), options); });
  };
  EXPECT_NE(error({.port = 0, .parallel = 9}).find("parallel"), std::string::npos);
  EXPECT_NE(error({.port = 0, .ctx_size = 4096}).find("2048"), std::string::npos);
  EXPECT_NE(error({.host = "203.0.113.1", .port = 1}).find("203.0.113.1"), std::string::npos);
  const Running server;
  EXPECT_NE(error({.port = server.port()}).find("taken"), std::string::npos);
}

TEST(StopFilter, HoldsBackWhatMayBecomeAStop) {
  server::StopFilter filter({"</end>", "<stop>"});
  EXPECT_EQ(filter.push("a<"), "a");
  EXPECT_EQ(filter.push("/en"), "");
  EXPECT_EQ(filter.push("x<st"), "</enx");
  EXPECT_EQ(filter.push("op>rest"), "");
  EXPECT_TRUE(filter.stopped());
  EXPECT_EQ(filter.met(), "<stop>");
  EXPECT_EQ(filter.push("more") + filter.finish(), "");
  server::StopFilter open({"<stop>"});
  EXPECT_EQ(open.push("b<sto"), "b");
  EXPECT_EQ(open.finish(), "<sto");
}

TEST(Chat, ConversationsAreMadeOfTurns) {
  const Tokenizer& t = tokenizer();
  for (const auto chat : {ChatTemplate::kMistral, ChatTemplate::kLlama2}) {
    Ids ids = encode_turn(t, chat, "one", true);
    EXPECT_EQ(encode_chat(t, chat, {{"user", "one"}}), ids);
    const Ids answer = t.encode(chat == ChatTemplate::kLlama2 ? "two " : "two"),
              next = encode_turn(t, chat, "three", false);
    ids.insert(ids.end(), answer.begin(), answer.end());
    ids.insert(ids.end(), next.begin(), next.end());
    EXPECT_EQ(encode_chat(t, chat, {{"user", "one"}, {"assistant", "two"}, {"user", "three"}}),
              ids);
  }
  EXPECT_EQ(encode_chat(t, ChatTemplate::kMistral, {{"system", "be"}, {"user", "one"}}),
            encode_turn(t, ChatTemplate::kMistral, "be\n\none", true));
  EXPECT_EQ(encode_chat(t, ChatTemplate::kLlama2, {{"system", "be"}, {"user", "one"}}),
            encode_turn(t, ChatTemplate::kLlama2, "<<SYS>>\nbe\n<</SYS>>\n\none", true));
  EXPECT_NE(error_of([&] {
              encode_chat(t, ChatTemplate::kMistral, {{"assistant", "a"}});
            }).find("expected 'user'"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              encode_chat(t, ChatTemplate::kMistral, {{"user", "a"}, {"assistant", "b"}});
            }).find("last message"),
            std::string::npos);
}

/// The whole conversation spelled out, as the model's own template would.
void expect_spelled(const Tokenizer& t, ChatTemplate chat, const std::string& spelled) {
  EXPECT_EQ(encode_chat(t, chat,
                        {{"system", "be"},
                         {"user", "one"},
                         {"assistant", "two"},
                         {"user", "three"}}),
            t.encode(spelled, /*parse_special=*/true));
  // What a message says is text.
  const std::string marker = chat == ChatTemplate::kChatml ? "<|im_end|>" : "<|eot_id|>";
  const Ids ids = encode_chat(t, chat, {{"user", "a" + marker + "b"}});
  EXPECT_EQ(std::count(ids.begin(), ids.end(), t.token_id(marker)), 1);
  EXPECT_NE(t.decode(ids).find("a" + marker + "b"), std::string::npos);
}

TEST(Chat, Llama3IsSpelledAsItsTemplateDoes) {
  const auto t = Tokenizer::load(golden("tokenizers") / "small.tiktoken");
  expect_spelled(*t, ChatTemplate::kLlama3,
                 "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe<|eot_id|>"
                 "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
                 "<|start_header_id|>assistant<|end_header_id|>\n\ntwo<|eot_id|>"
                 "<|start_header_id|>user<|end_header_id|>\n\nthree<|eot_id|>"
                 "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

TEST(Chat, ChatmlIsSpelledAsItsTemplateDoes) {
  json vocab = json::object(), added = json::array();
  std::ifstream first(golden("tokenizers") / "smollm2_first_tokens.txt");  // markers, then bytes
  for (std::string token; std::getline(first, token);) {
    const size_t id = vocab.size();
    if (id < 17) added.push_back({{"id", id}, {"content", token}, {"special", true}});
    vocab.emplace(token, id);
  }
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const TempDir dir;
  std::ofstream(dir / "tokenizer.json")
      << json{{"added_tokens", added},
              {"pre_tokenizer", bytes},
              {"decoder", bytes},
              {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}}};
  const auto t = Tokenizer::load(dir / "tokenizer.json");
  expect_spelled(*t, ChatTemplate::kChatml,
                 "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
                 "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
                 "<|im_start|>assistant\n");
}

}  // namespace
}  // namespace gptfast
