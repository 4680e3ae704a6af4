// From a StateDict (or from random numbers) to a Transformer on a device.
#include "load_model.h"

#include <ATen/ATen.h>
#include <malloc.h>

#include <array>
#include <cmath>
#include <map>
#include <string_view>

#include "gptfast/model.h"
#include "gptfast/tp.h"
#include "int4_layout.h"
#include "ops/cpu/huge_pages.h"
#ifdef GPTFAST_CUDA
#include "ops/cuda/step_ops.h"
#include "ops/cuda/upload.h"
#endif

namespace gptfast {
namespace {

/// Everything a checkpoint may hold that is computed, not learned.
bool is_derived(const std::string& name) {
  return name == "rope.freqs" || name == "freqs_cis" || name == "causal_mask";
}

}  // namespace

StateDict normalize(const StateDict& tensors, const ModelArgs& config) {
  StateDict kept;
  for (const auto& [name, tensor] : tensors) {
    if (!is_derived(name)) kept.set(name, tensor);
  }
  if (config.tie_word_embeddings && !kept.contains("output.weight")) {
    kept.set("output.weight", kept.at("tok_embeddings.weight"));
  }
  return kept;
}

StateDict fuse_qkv(const StateDict& tensors) {
  StateDict fused;
  for (const auto& [name, tensor] : tensors) {
    const size_t at = name.rfind(".wq.weight");
    if (at != std::string::npos && name.ends_with(".wq.weight")) {
      const std::string prefix = name.substr(0, at);
      const std::array parts = {tensor, tensors.at(prefix + ".wk.weight"),
                                tensors.at(prefix + ".wv.weight")};
      fused.set(prefix + ".wqkv.weight", at::cat(parts));
      for (const Tensor& part : parts) release_pages(part);
    } else if (!name.ends_with(".wk.weight") && !name.ends_with(".wv.weight")) {
      fused.set(name, tensor);
    }
  }
  return fused;
}

bool is_expert_weight(const std::string& name) {
  constexpr std::string_view kStem = ".cond_ffn.w";
  return name.size() > kStem.size() + 1 &&
         std::string_view(name).substr(name.size() - kStem.size() - 1, kStem.size()) == kStem;
}

std::string expert_companion(const std::string& fqn, const std::string& kind) {
  return fqn.substr(0, fqn.size() - 2) + kind + fqn.back();
}

StateDict expert_tensors(const StateDict& tensors, const std::string& fqn, int64_t e,
                         const std::string& expert_fqn) {
  const Tensor& weight = tensors.at(fqn);
  StateDict expert;
  expert.set(expert_fqn + ".weight", weight[e]);
  for (const char* kind : {"scales", "scales_and_zeros"}) {
    const std::string name = expert_companion(fqn, kind);
    const Tensor* of_all = tensors.find(name);
    if (of_all == nullptr) continue;
    TORCH_CHECK(of_all->dim() > 1 && of_all->size(0) == weight.size(0), "tensor '", name,
                "' has shape ", of_all->sizes(), ", expected ", weight.size(0),
                " experts in its first dimension as in '", fqn, "'");
    expert.set(expert_fqn + "." + kind, (*of_all)[e]);
  }
  return expert;
}

namespace {

/// Puts `value` where a module registered a placeholder: the member handle and the registry share
/// one TensorImpl.
void assign(Tensor& registered, const Tensor& value) {
  registered.set_data(value);
}

/// Throws unless the kernels run on `device` and it has memory for weights of `bytes`. Of a CPU
/// nothing is asked: its weights stay mapped from the file.
void check_fits([[maybe_unused]] at::Device device, [[maybe_unused]] int64_t bytes) {
#ifdef GPTFAST_CUDA
  if (!device.is_cuda()) return;
  ops::cuda::check_device(device);
  ops::cuda::check_memory(device, bytes, "the weights");
#endif
}

/// Moves every tensor of `tensors` into the module of the same name.
void load_state_dict(TransformerImpl& model, StateDict tensors, const LoadOptions& options) {
#ifdef GPTFAST_CUDA
  std::optional<cuda::Uploader> uploader;
  std::vector<Tensor> sent;  // the uploader still reads these
#endif
  std::map<const c10::TensorImpl*, Tensor> mapped;  // int4 words by what they are registered as
  int64_t total = 0, done = 0;                      // as they will be on the device
  for (const auto& [name, tensor] : tensors) {
    const auto width = tensor.is_floating_point() ? c10::elementSize(options.precision)
                                                  : static_cast<size_t>(tensor.element_size());
    total += tensor.numel() * static_cast<int64_t>(width);
  }
  check_fits(options.device, total);
#ifdef GPTFAST_CUDA
  if (options.device.is_cuda()) uploader.emplace(options.device);
#endif
  const auto load = [&](const std::string& name, Tensor& registered) {
    const Tensor source = tensors.take(name);
    Tensor value = source;
    const bool is_file_int4 = value.scalar_type() == at::kInt || value.scalar_type() == at::kByte ||
                              name.find(".scales_and_zeros") != std::string::npos;
    if (value.is_floating_point() && !is_file_int4) value = value.to(options.precision);
    if (is_file_int4 && options.device.is_cuda())
      mapped.emplace(registered.unsafeGetTensorImpl(), source);
#ifdef GPTFAST_CUDA
    if (uploader && value.is_same(source) && source.is_contiguous()) {
      sent.push_back(source);
      value = uploader->upload(source);
    }
#endif
    value = value.to(options.device);
    assign(registered, value.contiguous());
    const bool reading = value.is_cuda() && value.scalar_type() == source.scalar_type();
    if (registered.storage().data() != source.storage().data() && !reading) release_pages(source);
    done += static_cast<int64_t>(value.nbytes());
    if (options.progress) options.progress(std::min(done, total), total);
  };
  for (auto& parameter : model.named_parameters()) load(parameter.key(), parameter.value());
  for (auto& buffer : model.named_buffers()) load(buffer.key(), buffer.value());
#ifdef GPTFAST_CUDA
  if (uploader) uploader->finish();
  for (const Tensor& source : sent) release_pages(source);
#endif
  for (const auto& module : model.modules()) {
    if (auto* cond_ffn = module->as<ConditionalFeedForwardImpl>()) cond_ffn->bind();
  }
  // A GPU takes the file's int4 words to pack them: what remains of them is mapped from the file.
  const auto keep_mapped = [&](Tensor& registered) {
    const auto found = mapped.find(registered.unsafeGetTensorImpl());
    if (found != mapped.end() && registered.is_cuda()) assign(registered, found->second);
  };
  // The words of a rank's share may be memory of its own, unlike the pages of a file.
  const bool drop_words = options.tp != nullptr && !options.reference && options.device.is_cpu() &&
                          std::string_view(ops::path(options.device)) != "reference";
  const auto prepare = [&](LinearImpl& linear) {
    linear.prepare(options.device);
    if (drop_words) linear.drop_words();
    for (Tensor* part : {&linear.weight, &linear.scales_and_zeros, &linear.perm})
      keep_mapped(*part);
  };
  for (const auto& module : model.modules()) {
    if (auto* linear = module->as<LinearImpl>()) prepare(*linear);
    auto* cond_ffn = module->as<ConditionalFeedForwardImpl>();
    if (cond_ffn == nullptr) continue;
    for (FeedForward& expert : cond_ffn->experts) {
      for (LinearImpl* layer : {expert->w1.get(), expert->w2.get(), expert->w3.get()})
        prepare(*layer);
    }
    cond_ffn->prepare(options.device);
    if (drop_words) cond_ffn->drop_words();
    for (ExpertWeights& w : cond_ffn->weights) {
      for (Tensor* part : {&w.weight, &w.scales_and_zeros}) keep_mapped(*part);
    }
    if (options.device.is_cuda()) cond_ffn->bind();
  }
}

/// The file's name only has to agree with what is inside.
void check_file_name(const std::filesystem::path& file, WeightScheme scheme) {
  const std::string name = file.filename().string();
  for (const WeightFormat claimed : {WeightFormat::kInt8, WeightFormat::kInt4}) {
    TORCH_CHECK(name.find(to_string(claimed)) == std::string::npos || scheme.format == claimed, "'",
                file.string(), "' is named ", to_string(claimed), " but holds ",
                to_string(scheme.format), " weights; rename it or name the right file");
  }
  const std::string group = ".g" + std::to_string(scheme.groupsize) + ".";
  TORCH_CHECK(scheme.format != WeightFormat::kInt4 || name.find(".g") == std::string::npos ||
                  name.find(group) != std::string::npos || name.find("int4") == std::string::npos,
              "'", file.string(), "' holds int4 weights of group size ", scheme.groupsize,
              ", which its name contradicts");
}

/// While it lives, freed tensors go back to the system at once. glibc would keep as much as was
/// ever cut and converted, in every rank of a host.
class ReturnFreedMemory {
 public:
  ReturnFreedMemory() { mallopt(M_MMAP_THRESHOLD, 1 << 20); }
  ~ReturnFreedMemory() { mallopt(M_MMAP_THRESHOLD, 32 << 20); }  // where glibc's own rule ends
  ReturnFreedMemory(const ReturnFreedMemory&) = delete;
  ReturnFreedMemory& operator=(const ReturnFreedMemory&) = delete;
};

/// What the user says, else what the file's record says; kAuto when neither does.
Int4Layout find_int4_layout(const std::map<std::string, std::string>& records,
                            const std::string& override_layout) {
  const Int4Layout layout = int4_layout_from_string(override_layout);
  const auto record = records.find(kInt4LayoutRecord);
  if (layout != Int4Layout::kAuto || record == records.end()) return layout;
  return int4_layout_from_string(record->second);
}

}  // namespace

Transformer load_model(const std::filesystem::path& checkpoint_path, const LoadOptions& options) {
  std::optional<ReturnFreedMemory> return_freed_memory;
  if (options.tp) return_freed_memory.emplace();
  std::map<std::string, std::string> records;
  StateDict tensors = load_checkpoint(checkpoint_path, &records);
  const Int4Layout int4_layout = find_int4_layout(records, options.int4_layout);
  ModelArgs config = find_config(checkpoint_path, options.config, tensors);
  tensors = normalize(tensors, config);
  check_config(config, tensors);
  if (options.tp) {
    const int ranks = options.tp->world_size();
    tensors = shard_state_dict(tensors, config, options.tp->rank(), ranks, int4_layout);
    config = shard_config(config, ranks);
  }
  tensors = fuse_qkv(tensors);

  const SchemeOf scheme = [&](const std::string& fqn) {
    const bool from_hidden = fqn.ends_with(".w2"), from_heads = fqn.ends_with(".wo");
    const int64_t in_features = from_hidden
                                    ? config.intermediate_size
                                    : (from_heads ? config.n_head * config.head_dim : config.dim);
    WeightScheme found = weight_scheme(tensors, fqn, in_features);
    if (found.format < WeightFormat::kInt8) found.format = floating_format(options.precision, fqn);
    if (found.format == WeightFormat::kInt4) found.layout = int4_layout;
    return found;
  };
  check_file_name(checkpoint_path, scheme("layers.0.attention.wqkv"));
  Transformer model(config, scheme, options.tp);
  model->set_reference(options.reference);
  load_state_dict(*model, std::move(tensors), options);
  return model;
}

namespace {

/// An expert's tensor is there already, as a view.
/// Weights on the CPU lie in huge pages, as those of a mapped file do.
void allocate(Tensor& registered, at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (registered.numel() != 0) return;
  if (!options.device().is_cpu()) return assign(registered, at::empty(sizes, options));
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  assign(registered, cpu::empty_in_huge_pages(bytes).view(dtype).view(sizes));
}

/// N(0, 1) / sqrt(K) in the layer's scheme, straight in the quantized form: no float copy of a
/// large model is ever made.
void randomize(LinearImpl& linear, at::ScalarType precision, at::Device device) {
  const int64_t N = linear.out_features, K = linear.in_features;
  const double std = 1 / std::sqrt(static_cast<double>(K));
  switch (linear.scheme.format) {
    case WeightFormat::kInt8: {
      constexpr double kUniformStd = 73.6;  // of integers drawn evenly from [-127, 127]
      allocate(linear.weight, {N, K}, at::TensorOptions(device).dtype(at::kChar));
      linear.weight.random_(-127, 128);
      allocate(linear.scales, {N}, at::TensorOptions(device).dtype(precision));
      linear.scales.fill_(std / kUniformStd);
      break;
    }
    case WeightFormat::kInt4: {
      constexpr double kUniformStd = 4.61;  // of integers drawn evenly from [0, 15]
      const int64_t g = linear.scheme.groupsize,
                    Kp = K % g == 0 && K % 128 == 0 ? K : find_multiple(K, 1024);
      const Tensor scale = at::full({Kp / g, N, 1}, std / kUniformStd, at::kBFloat16);
      assign(linear.weight,
             pack_int4_cuda(at::randint(0, 256, {N, Kp / 2}, at::kByte), /*inner=*/8));
      assign(linear.scales_and_zeros,
             at::cat({scale, scale * 0.5}, /*dim=*/-1));  // the codes' mean is 7.5, not 8
      linear.scheme.layout = Int4Layout::kCuda;
      break;
    }
    default:
      allocate(linear.weight, {N, K}, at::TensorOptions(device).dtype(precision));
      linear.weight.normal_(0, std);
  }
  linear.prepare(device);
}

const LinearImpl& expert_layer(const FeedForward& expert, size_t index) {
  return *std::array{expert->w1.get(), expert->w2.get(), expert->w3.get()}[index];
}

/// The tensors of all experts of a layer, of which each expert's are views, so that a large model
/// is never there twice. int4 words are stacked later: a device holds no copy of them.
void allocate_experts(ConditionalFeedForwardImpl& cond_ffn, at::ScalarType precision,
                      at::Device device) {
  const auto E = std::ssize(cond_ffn.experts);
  for (size_t i = 0; i < cond_ffn.weights.size(); ++i) {
    const LinearImpl& layer = expert_layer(cond_ffn.experts[0], i);
    const int64_t N = layer.out_features, K = layer.in_features;
    const WeightFormat format = layer.scheme.format;
    const auto options = at::TensorOptions(device).dtype(precision);
    const bool int8 = format == WeightFormat::kInt8;
    allocate(cond_ffn.weights[i].weight, {E, N, K}, int8 ? options.dtype(at::kChar) : options);
    if (int8) allocate(cond_ffn.weights[i].scales, {E, N}, options);
  }
  cond_ffn.bind();
}

/// From the experts' own int4 words to those of the whole layer; repeated ones stay one.
void stack_experts(ConditionalFeedForwardImpl& cond_ffn) {
  const auto stack = [](Tensor& of_all, const std::vector<Tensor>& of_experts) {
    if (!of_experts.front().is_alias_of(of_experts.back()))
      return assign(of_all, at::stack(of_experts));
    std::vector<int64_t> sizes = of_experts[0].sizes().vec();
    sizes.insert(sizes.begin(), std::ssize(of_experts));
    assign(of_all, of_experts[0].expand(sizes));
  };
  for (size_t i = 0; i < cond_ffn.weights.size(); ++i) {
    std::vector<Tensor> weight, scales_and_zeros;
    for (const FeedForward& expert : cond_ffn.experts) {
      const LinearImpl& layer = expert_layer(expert, i);
      weight.push_back(layer.weight);
      scales_and_zeros.push_back(layer.scales_and_zeros);
    }
    stack(cond_ffn.weights[i].weight, weight);
    stack(cond_ffn.weights[i].scales_and_zeros, scales_and_zeros);
  }
  cond_ffn.bind();
}

}  // namespace

Transformer random_model(const ModelArgs& whole, WeightScheme scheme, at::ScalarType precision,
                         at::Device device, uint64_t seed, std::shared_ptr<TensorParallel> tp) {
  const ModelArgs config = tp ? shard_config(whole, tp->world_size()) : whole;
  at::manual_seed(seed);  // the same on every rank: so is the embedding
  if (scheme.format < WeightFormat::kInt8) scheme.format = floating_format(precision, "random");
  // As quantize writes it: a layer whose rows do not come in eights stays unquantized, and so does
  // a router.
  const auto scheme_of = [&](const std::string& fqn) {
    const bool odd_head =
        fqn == "output" && scheme.format == WeightFormat::kInt4 && config.vocab_size % 8 != 0;
    return odd_head || fqn.ends_with(".gate") ? WeightScheme{floating_format(precision, fqn)}
                                              : scheme;
  };
  Transformer model(config, scheme_of, std::move(tp));
  int64_t bytes =
      config.vocab_size * config.dim * static_cast<int64_t>(c10::elementSize(precision));
  for (const auto& [name, linear] : named_linears(*model)) bytes += linear->kernel_bytes();
  check_fits(device, bytes);
  const auto options = at::TensorOptions(device).dtype(precision);
  for (const auto& module : model->modules()) {
    auto* cond_ffn = module->as<ConditionalFeedForwardImpl>();
    if (cond_ffn != nullptr && scheme.format != WeightFormat::kInt4)
      allocate_experts(*cond_ffn, precision, device);
  }
  // int4 words are drawn and packed on the host: on a GPU, layers of one shape repeat the first
  // one's values.
  std::map<std::pair<int64_t, int64_t>, const LinearImpl*> int4_layers;
  for (const auto& [name, linear] : named_linears(*model)) {
    const LinearImpl*& first = int4_layers[{linear->out_features, linear->in_features}];
    const bool repeat = device.is_cuda() && linear->scheme.format == WeightFormat::kInt4;
    if (repeat && first != nullptr) {
      linear->copy_from(*first);
    } else {
      randomize(*linear, precision, device);
      first = linear;
    }
  }
  for (const auto& module : model->modules()) {
    if (auto* cond_ffn = module->as<ConditionalFeedForwardImpl>()) {
      if (scheme.format == WeightFormat::kInt4) stack_experts(*cond_ffn);
      cond_ffn->prepare(device);
    }
    if (auto* norm = module->as<RMSNormImpl>())
      assign(norm->weight, at::ones({config.dim}, options));
    if (auto* embedding = module->as<EmbeddingImpl>()) {
      assign(embedding->weight, at::empty({config.vocab_size, config.dim}, options).normal_());
    }
  }
  return model;
}

}  // namespace gptfast
