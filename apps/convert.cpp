// Converts checkpoints of other formats to model.pth, and shows what is in one
// (scripts/convert_hf_checkpoint.py).
#include "gptfast/convert.h"

#include <filesystem>
#include <iostream>

#include "common.h"
#include "gptfast/inspect.h"

namespace gptfast::app {
namespace {

namespace fs = std::filesystem;

CommandLine command_line() {
  CommandLine line("convert",
                   "Converts a checkpoint to gpt-fast's model.pth and puts config.json and the "
                   "tokenizer beside it.");
  line.positional("INPUT",
                  "a directory of Hugging Face or Meta, or a .gguf, .safetensors, .pth, .pt or "
                  ".bin file",
                  {"checkpoint_dir", "inspect"});
  line.text("checkpoint_dir", "the same as INPUT, by the original's name");
  line.text("output", "the file to write; default: model.pth beside the input");
  line.choice("dtype", "of the weights; default: that of the input, bfloat16 for a quantized one",
              "", {"float32", "bfloat16", "float16"});
  line.choice("gptq_zeros",
              "how a GPTQ file that does not say stores zeros: v1 minus one, v2 as they are", "",
              {"", "v1", "v2"});
  line.choice("scales",
              "dtype of the scales of imported int4 weights; bfloat16 is what the Python original "
              "loads",
              "float32", {"float32", "bfloat16"});
  line.text("config", "the model: a known name or a JSON file; default: what the input says");
  line.text("inspect", "list the tensors of this .pth file instead of converting");
  line.flag("hash", "with --inspect: the SHA-256 of each tensor");
  line.flag("json", "with --inspect: as JSON");
  line.flag("quiet", "no progress bar, no messages");
  return line;
}

fs::path default_output(const fs::path& input) {
  return fs::is_directory(input) ? input / "model.pth" : input.parent_path() / "model.pth";
}

int convert_main(int argc, const char* const* argv) {
  CommandLine line = command_line();
  if (!line.parse(argc, argv)) return 0;
  if (line.given("inspect")) {
    if (line.given("INPUT") || line.given("checkpoint_dir") || line.given("output")) {
      throw UsageError("--inspect does not convert: give it alone");
    }
    inspect(line.get_text("inspect"), line.get_flag("hash"), line.get_flag("json"), std::cout);
    return 0;
  }
  for (const char* name : {"hash", "json"}) {
    if (line.get_flag(name)) throw UsageError("--" + std::string(name) + " needs --inspect");
  }
  if (line.given("INPUT") && line.given("checkpoint_dir"))
    throw UsageError("give INPUT or --checkpoint_dir, not both");
  const fs::path input = line.get_text(line.given("INPUT") ? "INPUT" : "checkpoint_dir");
  const fs::path output =
      line.given("output") ? fs::path(line.get_text("output")) : default_output(input);
  Progress progress("converting", Progress::Unit::kBytes, line.get_flag("quiet"));
  ConvertOptions options;
  options.config = line.get_text("config");
  options.gptq_zeros = line.get_text("gptq_zeros");
  options.scales = parse_dtype("scales", line.get_text("scales"));
  options.progress = progress.callback();
  if (!line.get_flag("quiet"))
    options.note = [](const std::string& text) { std::cerr << "note: " << text << std::endl; };
  if (line.given("dtype")) options.dtype = parse_dtype("dtype", line.get_text("dtype"));
  convert(input, output, options);
  if (!line.get_flag("quiet")) std::cerr << "wrote " << output.string() << std::endl;
  return 0;
}

}  // namespace
}  // namespace gptfast::app

int main(int argc, char** argv) {
  return gptfast::app::run("convert", [&] { return gptfast::app::convert_main(argc, argv); });
}
