// Quantizes a checkpoint: quantize --checkpoint_path checkpoints/$MODEL_REPO/model.pth --mode int8
#include "gptfast/quantize.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "common.h"
#include "gptfast/eval.h"
#include "gptfast/gptq.h"
#include "gptfast/model.h"
#include "gptfast/tokenizer.h"

namespace gptfast::app {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

CommandLine command_line() {
  CommandLine line("quantize",
                   "Quantizes the linear layers of a checkpoint and writes the result beside it.");
  line.text("checkpoint_path", "the model to quantize",
            "checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth");
  line.choice("q,mode", "kind of quantization", "int8", {"int8", "int4", "int4-gptq"});
  line.choice("groupsize", "columns that share a scale; int4 only", "32",
              {"32", "64", "128", "256"});
  line.list("calibration_tasks", "int4-gptq: tasks of eval whose requests it calibrates on",
            {"wikitext"});
  line.text("data_dir", "int4-gptq: folder of the tasks' TASK.jsonl files", "data");
  line.text("calibration_file", "int4-gptq: text to calibrate on instead of tasks");
  line.integer("calibration_limit", "int4-gptq: at most this many samples", 1000, 1, 1'000'000);
  line.integer("calibration_seq_length", "int4-gptq: tokens of a sample", 100, 1, 1'000'000);
  line.flag("pad_calibration_inputs", "int4-gptq: pad shorter samples instead of dropping them");
  line.number("percdamp", "int4-gptq: share of the mean of the Hessian's diagonal added to it",
              0.01, 0, 1);
  line.integer("blocksize", "int4-gptq: columns corrected one by one", 128, 1, 1'000'000);
  line.flag("act_order", "int4-gptq: columns in order of decreasing activations");
  line.text("tokenizer_path",
            "of calibration and --report_text: tokenizer.model or tokenizer.json; else the one "
            "beside the checkpoint");
  line.flag("report", "print how far each layer's weights moved");
  line.text("report_text", "with --report: a text whose perplexity is measured before and after");
  line.text("label", "stands before the mode in the output's name", "_");
  line.text("device", "where the arithmetic runs: cpu, cuda or cuda:N; the file is the same",
            default_device());
  line.text("config", "name of a known model or a JSON file; default: found beside the checkpoint");
  line.integer("num_threads", "CPU threads; 0: LibTorch's default", 0, 0, 1024);
  line.flag("json", "print the result as JSON");
  line.flag("quiet", "no progress bar");
  return line;
}

json to_json(const QuantizedLayer& layer, bool calibrated) {
  json object = {{"name", layer.name},
                 {"scheme", to_string(layer.scheme.format)},
                 {"shape", {layer.out_features, layer.in_features}},
                 {"padded_k", layer.padded_k}};
  if (calibrated) {
    object["error"] = layer.error;
    object["rounded_error"] = layer.rounded_error;
  }
  return object;
}

std::unique_ptr<Tokenizer> load_tokenizer(const CommandLine& line) {
  const fs::path directory = fs::path(line.get_text("checkpoint_path")).parent_path();
  return Tokenizer::load(line.given("tokenizer_path") ? fs::path(line.get_text("tokenizer_path"))
                                                      : Tokenizer::find(directory));
}

CalibrationData calibration_from_flags(const CommandLine& line) {
  const auto tokenizer = load_tokenizer(line);
  const int64_t seq_length = line.get_integer("calibration_seq_length");
  const int64_t limit = line.get_integer("calibration_limit");
  const auto sequences =
      line.given("calibration_file")
          ? calibration_text(line.get_text("calibration_file"), *tokenizer, seq_length, limit)
          : calibration_inputs(*tokenizer, {.tasks = line.get_list("calibration_tasks"),
                                            .data_dir = line.get_text("data_dir"),
                                            .limit = limit,
                                            .seq_length = seq_length});
  return calibration_data(sequences, seq_length, line.get_flag("pad_calibration_inputs"));
}

std::vector<QuantizedLayer> run_mode(const CommandLine& line, const fs::path& input,
                                     const fs::path& output) {
  const std::string mode = line.get_text("mode");
  const int64_t groupsize = std::stoll(line.get_text("groupsize"));
  const at::Device device = parse_device(line.get_text("device"));
  if (mode != "int4-gptq") {
    Progress progress("quantizing", Progress::Unit::kBytes, line.get_flag("quiet"));
    return quantize(input, output,
                    {.format = mode == "int8" ? WeightFormat::kInt8 : WeightFormat::kInt4,
                     .groupsize = groupsize,
                     .config = line.get_text("config"),
                     .device = device,
                     .progress = progress.callback()});
  }
  Progress progress("calibrating", Progress::Unit::kItems, line.get_flag("quiet"));
  GptqRunOptions options{.gptq = {.groupsize = groupsize,
                                  .blocksize = line.get_integer("blocksize"),
                                  .percdamp = line.get_number("percdamp"),
                                  .act_order = line.get_flag("act_order")},
                         .config = line.get_text("config"),
                         .device = device,
                         .progress = progress.callback()};
  if (!line.get_flag("quiet")) {
    options.on_layer = [](const QuantizedLayer& layer) {
      fprintf(stderr, "\r\x1b[K%s: error %.4g, rounded to nearest %.4g\n", layer.name.c_str(),
              layer.error, layer.rounded_error);
    };
  }
  check_gptq_options(options.gptq);
  return quantize_gptq(input, output, calibration_from_flags(line), options);
}

/// What --report_text asks to measure. Read before the work starts: a mistake shows at once.
struct ReportText {
  std::string text;
  std::unique_ptr<Tokenizer> tokenizer;

  /// In windows of the model's context, at most 2048 tokens.
  double perplexity(Transformer& model) const {
    const int64_t window = std::min<int64_t>(model->config.block_size, 2048);
    return text_perplexity(model, *tokenizer, text, window, /*stride=*/window, {}).perplexity;
  }
};

std::optional<ReportText> report_text(const CommandLine& line) {
  if (!line.given("report_text")) return std::nullopt;
  ReportText report{.text = read_file("report_text", line.get_text("report_text")),
                    .tokenizer = load_tokenizer(line)};
  const size_t tokens = report.tokenizer->encode(report.text).size();
  TORCH_CHECK(tokens >= 2, "--report_text: '", line.get_text("report_text"), "' has ", tokens,
              " tokens; a perplexity needs at least 2");
  return report;
}

json report(const CommandLine& line, const fs::path& input, const fs::path& output,
            const std::optional<ReportText>& text) {
  const LoadOptions options{.config = line.get_text("config"),
                            .device = parse_device(line.get_text("device"))};
  Transformer before = load_model(input, options);
  Transformer after = load_model(output, options);
  json layers = json::array();
  for (const LayerChange& change : compare_layers(*before, *after)) {
    layers.push_back({{"name", change.name},
                      {"scheme", to_string(change.scheme.format)},
                      {"max_error", change.max_error},
                      {"mean_error", change.mean_error},
                      {"signal_noise_db", change.signal_noise},
                      {"bytes", change.bytes}});
  }
  json result = {{"layers", layers}};
  if (text) {
    result["perplexity_before"] = text->perplexity(before);
    result["perplexity_after"] = text->perplexity(after);
  }
  return result;
}

void print_report(const json& report) {
  printf("%-32s %-9s %10s %10s %8s %12s\n", "layer", "scheme", "max error", "mean error", "dB",
         "bytes");
  for (const json& layer : report["layers"]) {
    printf("%-32s %-9s %10.3g %10.3g %8.1f %12lld\n", layer["name"].get<std::string>().c_str(),
           layer["scheme"].get<std::string>().c_str(), layer["max_error"].get<double>(),
           layer["mean_error"].get<double>(), layer["signal_noise_db"].get<double>(),
           layer["bytes"].get<long long>());
  }
  if (report.contains("perplexity_before")) {
    printf("perplexity: %.4f before, %.4f after\n", report["perplexity_before"].get<double>(),
           report["perplexity_after"].get<double>());
  }
}

/// Throws UsageError for flags that would change nothing.
void check_mode(const CommandLine& line, const std::string& mode) {
  if (mode == "int8" && line.given("groupsize")) throw UsageError("--groupsize needs an int4 mode");
  if (mode == "int4-gptq") return;
  for (const char* flag :
       {"calibration_tasks", "calibration_file", "calibration_limit", "calibration_seq_length",
        "pad_calibration_inputs", "percdamp", "blocksize", "act_order", "data_dir"}) {
    if (line.given(flag)) throw UsageError("--" + std::string(flag) + " needs --mode int4-gptq");
  }
}

int quantize_main(int argc, char** argv) {
  CommandLine line = command_line();
  if (!line.parse(argc, argv)) return 0;
  if (line.get_integer("num_threads") > 0)
    at::set_num_threads(static_cast<int>(line.get_integer("num_threads")));

  if (line.given("calibration_file") && line.given("calibration_tasks"))
    throw UsageError("give one of --calibration_file and --calibration_tasks");
  if (line.given("report_text") && !line.get_flag("report"))
    throw UsageError("--report_text needs --report");
  const std::string mode = line.get_text("mode");
  check_mode(line, mode);
  const int64_t groupsize = std::stoll(line.get_text("groupsize"));
  const fs::path input = line.get_text("checkpoint_path");
  const fs::path output = quantized_path(input, mode, groupsize, line.get_text("label"));

  const std::optional<ReportText> text = report_text(line);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<QuantizedLayer> layers = run_mode(line, input, output);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

  json listed = json::array();
  for (const QuantizedLayer& layer : layers) {
    listed.push_back(to_json(layer, mode == "int4-gptq"));
    if (!layer.note.empty()) std::cerr << layer.note << std::endl;
  }
  if (line.get_flag("json")) {
    json result = {{"mode", mode},
                   {"groupsize", mode == "int8" ? json() : json(groupsize)},
                   {"output", output.string()},
                   {"seconds", seconds.count()},
                   {"layers", listed}};
    if (line.get_flag("report")) result["report"] = report(line, input, output, text);
    std::cout << result.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
  } else {
    std::cout << "Wrote " << output.string() << ": " << layers.size() << " layers, "
              << fs::file_size(output) / 1000000 << " MB, "
              << static_cast<int64_t>(seconds.count() * 10) / 10.0 << " s" << std::endl;
    if (line.get_flag("report")) print_report(report(line, input, output, text));
  }
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("quantize", [&] { return gptfast::app::quantize_main(argc, argv); });
}
