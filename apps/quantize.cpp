// Quantizes a checkpoint: quantize --checkpoint_path checkpoints/$MODEL_REPO/model.pth --mode int8
#include "gptfast/quantize.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "common.h"

namespace gptfast::app {
namespace {

using nlohmann::json;

CommandLine command_line() {
  CommandLine line("quantize",
                   "Quantizes the linear layers of a checkpoint and writes the result beside it.");
  line.text("checkpoint_path", "the model to quantize",
            "checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth");
  line.choice("q,mode", "kind of quantization", "int8", {"int8", "int4"});
  line.choice("groupsize", "columns that share a scale; int4 only", "32",
              {"32", "64", "128", "256"});
  line.text("label", "stands before the mode in the output's name", "_");
  line.text("device", "where the arithmetic runs: cpu, cuda or cuda:N; the file is the same",
            default_device());
  line.text("config", "name of a known model or a JSON file; default: found beside the checkpoint");
  line.integer("num_threads", "CPU threads; 0: LibTorch's default", 0, 0, 1024);
  line.flag("json", "print the result as JSON");
  line.flag("quiet", "no progress bar");
  return line;
}

json to_json(const QuantizedLayer& layer) {
  return {{"name", layer.name},
          {"scheme", to_string(layer.scheme.format)},
          {"shape", {layer.out_features, layer.in_features}},
          {"padded_k", layer.padded_k}};
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
  Progress progress("quantizing", Progress::Unit::kBytes, line.get_flag("quiet"));
  const QuantizeOptions options{
      .format = mode == "int8" ? WeightFormat::kInt8 : WeightFormat::kInt4,
      .groupsize = groupsize,
      .config = line.get_text("config"),
      .device = parse_device(line.get_text("device")),
      .progress = progress.callback(),
  };

  const auto start = std::chrono::steady_clock::now();
  const std::vector<QuantizedLayer> layers = quantize(input, output, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

  json listed = json::array();
  for (const QuantizedLayer& layer : layers) {
    listed.push_back(to_json(layer));
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
