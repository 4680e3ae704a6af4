// Calibration: runs the blocks of a model in order and quantizes each layer on the inputs that it
// sees.
#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>

#include "gptfast/checkpoint.h"
#include "gptfast/gptq.h"
#include "gptfast/model.h"
#include "gptfast/tokenizer.h"
#include "int4_layout.h"
#include "spans.h"

namespace gptfast {

CalibrationData calibration_data(const std::vector<std::vector<int32_t>>& sequences,
                                 int64_t seq_length, bool pad) {
  TORCH_CHECK(seq_length >= 1, "--calibration_seq_length must be at least 1, not ", seq_length);
  std::vector<Tensor> rows;
  std::vector<int64_t> lengths;
  size_t longest = 0;
  for (const std::vector<int32_t>& sequence : sequences) {
    const auto length = std::min<int64_t>(static_cast<int64_t>(sequence.size()), seq_length);
    longest = std::max(longest, sequence.size());
    if (length == 0 || (length < seq_length && !pad)) continue;
    const Tensor ids = at::tensor(at::ArrayRef(sequence.data(), length), at::kLong);
    rows.push_back(at::constant_pad_nd(ids, {0, seq_length - length}));
    lengths.push_back(length);
  }
  TORCH_CHECK(!rows.empty(), "no calibration sample has --calibration_seq_length ", seq_length,
              " tokens (the longest of ", sequences.size(), " has ", longest,
              "); give more text, a smaller length, or --pad_calibration_inputs");
  return {.ids = at::stack(rows), .lengths = at::tensor(lengths, at::kLong)};
}

std::vector<std::vector<int32_t>> calibration_text(const std::filesystem::path& file,
                                                   const Tokenizer& tokenizer, int64_t seq_length,
                                                   int64_t limit) {
  TORCH_CHECK(!std::filesystem::is_directory(file), "the calibration text '", file.string(),
              "' is a directory; expected a file");
  std::ifstream in(file, std::ios::binary);
  TORCH_CHECK(in.good(), "cannot read the calibration text '", file.string(), "'");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  TORCH_CHECK(!text.empty(), "the calibration text '", file.string(), "' is empty");
  const std::string valid = to_valid_utf8(text);
  TORCH_CHECK(valid == text, "the calibration text '", file.string(), "' is not UTF-8: byte ",
              std::mismatch(text.begin(), text.end(), valid.begin(), valid.end()).first -
                  text.begin(),
              " is invalid");
  const std::vector<int32_t> ids = tokenizer.encode(text);
  const bool bos = tokenizer.add_bos() && tokenizer.bos_id() >= 0 && seq_length > 1;
  const auto step = static_cast<size_t>(seq_length - (bos ? 1 : 0));
  std::vector<std::vector<int32_t>> sequences;
  for (size_t begin = 0; begin < ids.size() && std::ssize(sequences) < limit; begin += step) {
    std::vector<int32_t> sequence(bos ? 1 : 0, tokenizer.bos_id());
    const size_t end = std::min(begin + step, ids.size());
    sequence.insert(sequence.end(), ids.begin() + static_cast<std::ptrdiff_t>(begin),
                    ids.begin() + static_cast<std::ptrdiff_t>(end));
    sequences.push_back(std::move(sequence));
  }
  return sequences;
}

namespace {

// Tokens that run through a block at once: enough for the matrix products to be at full speed on a
// CPU and on an H200, few enough for the activations inside a block to stay small beside its
// weights.
constexpr int64_t kTokensPerPass = 4096;

struct NamedLinear {
  std::string fqn;
  LinearImpl* linear;
};

/// One calibrated run over a model, writing each layer as it is done.
class Calibration {
 public:
  Calibration(Transformer model, const CalibrationData& data, CheckpointWriter& writer,
              const GptqRunOptions& options);

  std::vector<QuantizedLayer> run();

 private:
  using Forward = std::function<Tensor(const Tensor& x)>;  // [B, L, D] -> [B, L, D]

  void run_block(int64_t index);
  /// Quantizes `layers`, which see the same input, when `forward` reaches them; `later` are those
  /// that it reaches after them.
  void quantize_stage(const std::vector<NamedLinear>& layers, const std::vector<NamedLinear>& later,
                      const Forward& forward);
  Tensor hessian_of(const std::vector<NamedLinear>& layers, const std::vector<NamedLinear>& later,
                    const Forward& forward);
  void quantize_layer(const NamedLinear& layer, const Tensor& hessian);
  /// x = forward(x) for all samples.
  void update(const Forward& forward);
  void write(const std::string& fqn, const Tensor& tensor) {
    writer_.add(fqn, tensor.to(at::kBFloat16));
  }
  void report(QuantizedLayer layer);

  Transformer model_;
  CheckpointWriter& writer_;
  const GptqRunOptions& options_;
  Tensor counted_;  // [samples, L, 1] float32: 1 for a token, 0 for padding
  Tensor x_;        // [samples, L, D] float32: input of the next block
  int64_t batch_;
  ForwardContext context_;
  std::vector<QuantizedLayer> layers_;
  std::set<std::string> written_;
};

Calibration::Calibration(Transformer model, const CalibrationData& data, CheckpointWriter& writer,
                         const GptqRunOptions& options)
    : model_(std::move(model)), writer_(writer), options_(options) {
  const ModelArgs& config = model_->config;
  const int64_t length = data.ids.size(1);
  TORCH_CHECK(length <= config.block_size, "--calibration_seq_length ", length,
              " exceeds the model's context of ", config.block_size, " tokens");
  const int64_t greatest = data.ids.max().item<int64_t>();
  TORCH_CHECK(greatest < config.vocab_size, "calibration token ", greatest,
              " is outside the vocabulary of ", config.vocab_size);
  batch_ = std::clamp<int64_t>(kTokensPerPass / length, 1, data.ids.size(0));
  const Tensor positions = at::arange(length);
  counted_ = (positions.unsqueeze(0) < data.lengths.unsqueeze(1))
                 .unsqueeze(2)
                 .to(options.device, at::kFloat);
  x_ = model_->tok_embeddings->forward(data.ids).to(options.device, at::kFloat);
  context_ = {.freqs_cis = precompute_freqs_cis(length, config.head_dim, config.rope_base,
                                                at::kBFloat16, config.rope_scaling)
                               .to(options.device),
              .spans = {span_of_prompt(positions.to(options.device), /*first_slot=*/0)},
              .tp = nullptr};
}

std::vector<QuantizedLayer> Calibration::run() {
  write("tok_embeddings.weight", model_->tok_embeddings->weight);
  for (int64_t i = 0; i < model_->config.n_layer; ++i) run_block(i);
  model_->norm->to(options_.device, at::kFloat);
  model_->output->to(options_.device, at::kFloat);
  write("norm.weight", model_->norm->weight);
  const NamedLinear output{"output", model_->output.get()};
  quantize_stage({output}, {}, [&](const Tensor& x) {
    return model_->output->forward(model_->norm->forward(x));
  });
  return std::move(layers_);
}

void Calibration::run_block(int64_t index) {
  TransformerBlock& block = model_->layers[index];
  AttentionImpl& attention = *block->attention;
  FeedForwardImpl& ffn = *block->feed_forward;
  block->to(options_.device, at::kFloat);
  const auto cache = [&] {
    return at::zeros({batch_, attention.n_local_heads, x_.size(1), attention.head_dim},
                     x_.options());
  };
  attention.kv_cache = {.k_cache = cache(), .v_cache = cache()};

  const std::string prefix = "layers." + std::to_string(index) + ".";
  const NamedLinear wqkv{prefix + "attention.wqkv", attention.wqkv.get()};
  const NamedLinear wo{prefix + "attention.wo", attention.wo.get()};
  const NamedLinear w1{prefix + "feed_forward.w1", ffn.w1.get()};
  const NamedLinear w3{prefix + "feed_forward.w3", ffn.w3.get()};
  const NamedLinear w2{prefix + "feed_forward.w2", ffn.w2.get()};
  const Forward attend = [&](const Tensor& x) {
    return x + attention.forward(block->attention_norm->forward(x), context_);
  };
  const Forward feed = [&](const Tensor& x) {
    return x + ffn.forward(block->ffn_norm->forward(x));
  };
  quantize_stage({wqkv}, {wo}, attend);
  quantize_stage({wo}, {}, attend);
  update(attend);
  quantize_stage({w1, w3}, {w2}, feed);
  quantize_stage({w2}, {}, feed);
  update(feed);

  for (const auto& parameter : block->named_parameters()) {
    if (!written_.contains(prefix + parameter.key()))
      write(prefix + parameter.key(), parameter.value());
  }
  attention.kv_cache = {};
  for (Tensor& parameter : block->parameters()) parameter.set_data(at::empty({0}));
  for (const NamedLinear& layer : {wqkv, wo, w1, w3, w2}) layer.linear->substitute = {};
}

void Calibration::update(const Forward& forward) {
  for (int64_t i = 0; i < x_.size(0); i += batch_) {
    Tensor rows = x_.slice(0, i, i + batch_);
    rows.copy_(forward(rows));
  }
}

Tensor Calibration::hessian_of(const std::vector<NamedLinear>& layers,
                               const std::vector<NamedLinear>& later, const Forward& forward) {
  const int64_t columns = layers[0].linear->in_features;
  Tensor sum = at::zeros({columns, columns}, x_.options().dtype(at::kDouble));
  Tensor counted;  // of the batch
  // What comes after the watched layers does not matter: zeros go on through the block.
  const auto zeros_for = [](const LinearImpl& linear) -> Forward {
    return [n = linear.out_features](const Tensor& x) {
      std::vector<int64_t> shape = x.sizes().vec();
      shape.back() = n;
      return at::zeros({1}, x.options()).expand(shape);  // of the head's size in no memory
    };
  };
  for (const auto* group : {&layers, &later}) {
    for (const NamedLinear& layer : *group) layer.linear->substitute = zeros_for(*layer.linear);
  }
  layers[0].linear->substitute = [&, zeros = zeros_for(*layers[0].linear)](const Tensor& x) {
    const Tensor rows = (x * counted).reshape({-1, columns});
    sum.add_(at::mm(rows.t(), rows));
    return zeros(x);
  };
  for (int64_t i = 0; i < x_.size(0); i += batch_) {
    counted = counted_.slice(0, i, i + batch_);
    forward(x_.slice(0, i, i + batch_));
  }
  return sum.mul_(2.0 / static_cast<double>(x_.size(0)));
}

void Calibration::quantize_stage(const std::vector<NamedLinear>& layers,
                                 const std::vector<NamedLinear>& later, const Forward& forward) {
  const Tensor hessian = hessian_of(layers, later, forward);
  for (const NamedLinear& layer : layers) quantize_layer(layer, hessian);
}

void Calibration::quantize_layer(const NamedLinear& layer, const Tensor& hessian) {
  const auto& [fqn, linear] = layer;
  const Tensor w = linear->weight;  // [N, K] float32
  QuantizedLayer done{.name = fqn,
                      .scheme = {.format = WeightFormat::kBFloat16},
                      .out_features = w.size(0),
                      .in_features = w.size(1),
                      .padded_k = w.size(1)};
  if (w.size(0) % 8 != 0) {
    write(fqn + ".weight", w);
    linear->substitute = {};
    done.note = unpacked_rows_note(fqn, w.size(0));
    report(std::move(done));
    return;
  }
  const GptqWeight quantized = gptq_quantize(w, hessian, options_.gptq, fqn);
  const auto [packed, scales_and_zeros] = int4_file_tensors({.q = pack_nibbles(quantized.codes),
                                                             .scales = quantized.params.scales,
                                                             .zeros = quantized.params.zeros,
                                                             .in_features = w.size(1),
                                                             .groupsize = options_.gptq.groupsize});
  writer_.add(fqn + ".weight", packed);
  writer_.add(fqn + ".scales_and_zeros", scales_and_zeros);
  linear->substitute = [weight = quantized.dequantized](const Tensor& x) {
    return at::linear(x, weight);
  };
  done.scheme = {.format = WeightFormat::kInt4, .groupsize = options_.gptq.groupsize};
  done.padded_k = int4_padded_features(packed);
  done.error = quantized.error;
  done.rounded_error = quantized.rounded_error;
  if (!quantized.calibrated) done.note = fqn + " saw no input: rounded to nearest";
  if (quantized.percdamp > options_.gptq.percdamp) {
    done.note = c10::str(fqn, ": --percdamp raised to ", quantized.percdamp,
                         ", the Hessian of the inputs was not positive definite");
  }
  report(std::move(done));
}

void Calibration::report(QuantizedLayer layer) {
  written_.insert(layer.name + ".weight");
  layers_.push_back(std::move(layer));
  if (options_.on_layer) options_.on_layer(layers_.back());
  constexpr int64_t kLayersPerBlock = 5;
  if (options_.progress) {
    options_.progress(std::ssize(layers_), model_->config.n_layer * kLayersPerBlock + 1);
  }
}

}  // namespace

std::vector<QuantizedLayer> quantize_gptq(const std::filesystem::path& checkpoint_path,
                                          const std::filesystem::path& output,
                                          const CalibrationData& data,
                                          const GptqRunOptions& options) {
  check_gptq_options(options.gptq);
  Transformer model = load_model(checkpoint_path, {.config = options.config, .reference = true});
  TORCH_CHECK(model->output->scheme.format < WeightFormat::kInt8 &&
                  model->layers[0]->attention->wqkv->scheme.format < WeightFormat::kInt8,
              "'", checkpoint_path.string(),
              "' is quantized already; quantize the model.pth that it was made from");
  TORCH_CHECK(model->config.num_experts == 0, "'", checkpoint_path.string(),
              "' is a mixture of experts, which int4-gptq cannot calibrate; use --mode int4 or "
              "int8");
  CheckpointWriter writer(output);
  writer.set_record(kInt4LayoutRecord, to_string(Int4Layout::kCuda));
  std::vector<QuantizedLayer> layers = Calibration(model, data, writer, options).run();
  writer.finish();
  return layers;
}

}  // namespace gptfast
