// Quantizes a checkpoint: quantize --checkpoint_path checkpoints/$MODEL_REPO/model.pth --mode int8
#include "gptfast/quantize.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "common.h"
#include "gptfast/gptq.h"
#include "gptfast/tokenizer.h"

namespace gptfast::app {
namespace {

using nlohmann::json;

CommandLine command_line() {
  CommandLine line("quantize",
                   "Quantizes the linear layers of a checkpoint and writes the result beside it.");
  line.text("checkpoint_path", "the model to quantize",
            "checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth");
  line.choice("q,mode", "kind of quantization", "int8", {"int8", "int4", "int4-gptq"});
  line.choice("groupsize", "columns that share a scale; int4 only", "32",
              {"32", "64", "128", "256"});
  line.text("calibration_file", "text that int4-gptq calibrates on");
  line.integer("calibration_limit", "int4-gptq: at most this many samples", 1000, 1, 1'000'000);
  line.integer("calibration_seq_length", "int4-gptq: tokens of a sample", 100, 1, 1'000'000);
  line.flag("pad_calibration_inputs", "int4-gptq: pad shorter samples instead of dropping them");
  line.number("percdamp", "int4-gptq: share of the mean of the Hessian's diagonal added to it",
              0.01, 0, 1);
  line.integer("blocksize", "int4-gptq: columns corrected one by one", 128, 1, 1'000'000);
  line.flag("act_order", "int4-gptq: columns in order of decreasing activations");
  line.text("tokenizer_path",
            "int4-gptq: tokenizer.model or tokenizer.json; else the one beside the checkpoint");
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

CalibrationData calibration_from_flags(const CommandLine& line) {
  if (!line.given("calibration_file"))
    throw UsageError("--mode int4-gptq needs --calibration_file");
  const std::filesystem::path directory =
      std::filesystem::path(line.get_text("checkpoint_path")).parent_path();
  const auto tokenizer = Tokenizer::load(
      line.given("tokenizer_path") ? std::filesystem::path(line.get_text("tokenizer_path"))
                                   : Tokenizer::find(directory));
  const int64_t seq_length = line.get_integer("calibration_seq_length");
  return calibration_data(calibration_text(line.get_text("calibration_file"), *tokenizer,
                                           seq_length, line.get_integer("calibration_limit")),
                          seq_length, line.get_flag("pad_calibration_inputs"));
}

std::vector<QuantizedLayer> run_mode(const CommandLine& line, const std::filesystem::path& input,
                                     const std::filesystem::path& output) {
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

int quantize_main(int argc, char** argv) {
  CommandLine line = command_line();
  if (!line.parse(argc, argv)) return 0;
  if (line.get_integer("num_threads") > 0)
    at::set_num_threads(static_cast<int>(line.get_integer("num_threads")));

  const std::string mode = line.get_text("mode");
  const int64_t groupsize = std::stoll(line.get_text("groupsize"));
  const std::filesystem::path input = line.get_text("checkpoint_path");
  const std::filesystem::path output =
      quantized_path(input, mode, groupsize, line.get_text("label"));

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
    std::cout << result.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
  } else {
    std::cout << "Wrote " << output.string() << ": " << layers.size() << " layers, "
              << std::filesystem::file_size(output) / 1000000 << " MB, "
              << static_cast<int64_t>(seconds.count() * 10) / 10.0 << " s" << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("quantize", [&] { return gptfast::app::quantize_main(argc, argv); });
}
