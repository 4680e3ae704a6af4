// ModelArgs from and to JSON: Hugging Face's config.json, Meta's params.json, and the fields of
// ModelArgs themselves.
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "gptfast/config.h"
#include "json_file.h"

namespace gptfast {

namespace {

using nlohmann::json;

RopeScaling read_rope_scaling(const JsonFields& fields) {
  return {.factor = fields.number("factor"),
          .low_freq_factor = fields.number("low_freq_factor"),
          .high_freq_factor = fields.number("high_freq_factor"),
          .original_max_position_embeddings = fields.integer({"original_max_position_embeddings"})};
}

// transformers 4 writes rope_theta and rope_scaling, transformers 5 both together as
// rope_parameters.
void read_hf_rope(const JsonFields& fields, double default_base, ModelArgs& args) {
  args.rope_base = fields.number_or("rope_theta", default_base);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!fields.has(key)) continue;
    const json& object = fields.object.at(key);
    TORCH_CHECK(object.is_object(), fields.source, ": field '", key, "' must be an object");
    const JsonFields rope{object, fields.source + ": " + key};
    args.rope_base = rope.number_or("rope_theta", args.rope_base);
    TORCH_CHECK(rope.number_or("partial_rotary_factor", 1) == 1, rope.source,
                ": partial_rotary_factor is not supported for this architecture");
    const std::string type = rope.string_or("rope_type", rope.string_or("type", "default"));
    if (type == "llama3") {
      args.rope_scaling = read_rope_scaling(rope);
    } else {
      TORCH_CHECK(type == "default", rope.source, ": the RoPE scaling '", type,
                  "' is not supported (known: default, llama3)");
    }
  }
}

// Options of these architectures that change the computation and that no supported model uses.
void refuse_hf_variants(const JsonFields& fields) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    TORCH_CHECK(!fields.boolean_or(key, false), fields.source, ": ", key,
                " is true, which is not supported for this architecture");
  }
  const std::string activation = fields.string_or("hidden_act", "silu");
  TORCH_CHECK(activation == "silu", fields.source, ": hidden_act is '", activation,
              "', this architecture is supported with 'silu' only");
}

std::string hf_model_type(const JsonFields& fields) {
  constexpr std::array<std::pair<const char*, const char*>, 3> kArchitectures = {
      {{"LlamaForCausalLM", "llama"},
       {"MistralForCausalLM", "mistral"},
       {"MixtralForCausalLM", "mixtral"}}};
  std::string architecture = fields.string_or("model_type", "");
  if (fields.has("architectures")) {
    const json& list = fields.object.at("architectures");
    TORCH_CHECK(list.is_array() && !list.empty() && list[0].is_string(), fields.source,
                ": 'architectures' must be a list of names");
    architecture = list[0].get<std::string>();
  }
  TORCH_CHECK(!architecture.empty(), fields.source,
              ": names no architecture: the field 'architectures' is missing");
  for (const auto& [name, type] : kArchitectures) {
    if (architecture == name || architecture == type) return type;
  }
  TORCH_CHECK(false, fields.source, ": the architecture '", architecture,
              "' is not supported (known: LlamaForCausalLM, MistralForCausalLM, "
              "MixtralForCausalLM)");
}

ModelArgs read_hf_config(const JsonFields& fields) {
  const std::string type = hf_model_type(fields);
  refuse_hf_variants(fields);
  ModelArgs args;
  args.block_size = fields.integer({"max_position_embeddings"});
  args.vocab_size = fields.integer({"vocab_size"});
  args.n_layer = fields.integer({"num_hidden_layers"});
  args.n_head = fields.integer({"num_attention_heads"});
  args.dim = fields.integer({"hidden_size"});
  args.intermediate_size = fields.integer({"intermediate_size"});
  // Configurations older than grouped queries have no such field; the class defaults of the newer
  // two are 8.
  args.n_local_heads = fields.integer_or("num_key_value_heads", type == "llama" ? args.n_head : 8);
  args.head_dim = fields.integer_or("head_dim", 0);
  args.norm_eps = fields.number_or("rms_norm_eps", type == "mixtral" ? 1e-5 : 1e-6);
  args.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  if (type != "llama") args.sliding_window = fields.integer_or("sliding_window", 0);
  if (type == "mixtral") {
    args.num_experts = fields.integer({"num_local_experts"});
    args.num_activated_experts = fields.integer({"num_experts_per_tok"});
  }
  read_hf_rope(fields, type == "mixtral" ? 1e6 : 1e4, args);
  return args;
}

bool same_shape(const ModelArgs& a, const ModelArgs& b) {
  return a.n_layer == b.n_layer && a.n_head == b.n_head && a.dim == b.dim &&
         a.intermediate_size == b.intermediate_size && a.n_local_heads == b.n_local_heads &&
         a.head_dim == b.head_dim && (a.vocab_size == b.vocab_size || a.vocab_size == -1) &&
         a.rope_base == b.rope_base && a.norm_eps == b.norm_eps && a.num_experts == b.num_experts &&
         a.rope_scaling.has_value() == b.rope_scaling.has_value();
}

// params.json does not say how long the context is, nor by how much 3.1 and 3.2 scale the
// frequencies: the released model of the same shape does. Rows with a family's name come after the
// original's bare ones, hence the search from the end.
void complete_from_table(ModelArgs& args) {
  const auto names = known_model_names();
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    const ModelArgs row = ModelArgs::from_name(*name);
    if (!same_shape(args, row)) continue;
    args.block_size = row.block_size;
    args.rope_scaling = row.rope_scaling;
    args.tie_word_embeddings = row.tie_word_embeddings;
    args.sliding_window = row.sliding_window;
    return;
  }
}

// The width of the MLP as Meta's model.py derives it.
int64_t meta_hidden_dim(const JsonFields& fields, int64_t dim) {
  if (fields.has("hidden_dim")) return fields.integer({"hidden_dim"});
  TORCH_CHECK(dim > 0 && dim < (int64_t{1} << 24), fields.source, ": field 'dim' is ", dim);
  const double multiplier = fields.number_or("ffn_dim_multiplier", 1.0);
  const int64_t multiple_of = fields.integer_or("multiple_of", 256);
  TORCH_CHECK(multiple_of > 0 && multiple_of < (1 << 24), fields.source,
              ": field 'multiple_of' is ", multiple_of);
  TORCH_CHECK(multiplier > 0 && multiplier < 1000, fields.source,
              ": field 'ffn_dim_multiplier' is ", multiplier);
  const int64_t two_thirds = 2 * 4 * dim / 3;  // rounded down before it is multiplied, as there
  return find_multiple(static_cast<int64_t>(multiplier * static_cast<double>(two_thirds)),
                       multiple_of);
}

ModelArgs read_meta_params(const JsonFields& fields) {
  TORCH_CHECK(!fields.has("quantization_args"), fields.source,
              ": quantized Meta checkpoints (quantization_args) are not supported");
  ModelArgs args;
  args.dim = fields.integer({"dim"});
  args.n_layer = fields.integer({"n_layers"});
  args.n_head = fields.integer({"n_heads"});
  args.n_local_heads = fields.integer_or("n_kv_heads", -1);
  args.head_dim = fields.integer_or("head_dim", 0);
  args.vocab_size = fields.integer_or("vocab_size", -1);
  args.intermediate_size = meta_hidden_dim(fields, args.dim);
  args.norm_eps = fields.number_or("norm_eps", 1e-5);
  args.rope_base = fields.number_or("rope_theta", 10000);
  args.sliding_window = fields.integer_or("sliding_window", 0);
  if (fields.has("moe")) {
    TORCH_CHECK(fields.object.at("moe").is_object(), fields.source,
                ": field 'moe' must be an object");
    const JsonFields moe{fields.object.at("moe"), fields.source + ": moe"};
    args.num_experts = moe.integer({"num_experts"});
    args.num_activated_experts = moe.integer({"num_experts_per_tok"});
  }
  if (fields.boolean_or("use_scaled_rope", false)) args.rope_scaling = RopeScaling{};
  args.finalize();
  if (fields.has("max_seq_len")) {
    args.block_size = fields.integer({"max_seq_len"});
  } else {
    complete_from_table(args);
  }
  return args;
}

ModelArgs read_model_args(const JsonFields& fields) {
  constexpr std::array<std::string_view, 15> kKnown =
      {"block_size",     "vocab_size",   "n_layer",
       "n_head",         "dim",          "intermediate_size",
       "n_local_heads",  "head_dim",     "rope_base",
       "norm_eps",       "rope_scaling", "tie_word_embeddings",
       "sliding_window", "num_experts",  "num_activated_experts"};
  for (const auto& [key, value] : fields.object.items()) {
    TORCH_CHECK(std::find(kKnown.begin(), kKnown.end(), key) != kKnown.end(), fields.source,
                ": unknown field '", key, "' of ModelArgs");
  }
  ModelArgs args;
  args.block_size = fields.integer_or("block_size", args.block_size);
  args.vocab_size = fields.integer_or("vocab_size", args.vocab_size);
  args.n_layer = fields.integer_or("n_layer", args.n_layer);
  args.n_head = fields.integer_or("n_head", args.n_head);
  args.dim = fields.integer_or("dim", args.dim);
  args.intermediate_size = fields.integer_or("intermediate_size", args.intermediate_size);
  args.n_local_heads = fields.integer_or("n_local_heads", args.n_local_heads);
  args.head_dim = fields.integer_or("head_dim", args.head_dim);
  args.rope_base = fields.number_or("rope_base", args.rope_base);
  args.norm_eps = fields.number_or("norm_eps", args.norm_eps);
  args.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", args.tie_word_embeddings);
  args.sliding_window = fields.integer_or("sliding_window", args.sliding_window);
  args.num_experts = fields.integer_or("num_experts", args.num_experts);
  args.num_activated_experts =
      fields.integer_or("num_activated_experts", args.num_activated_experts);
  if (fields.has("rope_scaling")) {
    const json& scaling = fields.object.at("rope_scaling");
    TORCH_CHECK(scaling.is_object(), fields.source, ": field 'rope_scaling' must be an object");
    args.rope_scaling = read_rope_scaling({scaling, fields.source + ": rope_scaling"});
  }
  return args;
}

}  // namespace

ModelArgs model_args_from_json(const json& object, const std::string& source) {
  const JsonFields fields{object, source};
  ModelArgs args;
  if (fields.has("model_type") || fields.has("architectures") || fields.has("hidden_size")) {
    args = read_hf_config(fields);
  } else if (fields.has("n_layers")) {
    args = read_meta_params(fields);
  } else {
    TORCH_CHECK(fields.has("n_layer") || fields.has("dim"), source,
                ": is no model configuration: neither a Hugging Face config.json (model_type), a "
                "Meta params.json (n_layers) nor "
                "the fields of ModelArgs (n_layer, dim, ...)");
    args = read_model_args(fields);
  }
  try {
    args.finalize();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, source, ": ", error.what_without_backtrace());
  }
  return args;
}

ModelArgs ModelArgs::from_json_file(const std::filesystem::path& file) {
  return model_args_from_json(read_json_object(file), file.string());
}

std::string to_config_json(const ModelArgs& config) {
  const bool moe = config.num_experts > 0;
  const bool mistral = config.sliding_window > 0;
  nlohmann::ordered_json object;
  object["architectures"] = {moe       ? "MixtralForCausalLM"
                             : mistral ? "MistralForCausalLM"
                                       : "LlamaForCausalLM"};
  object["model_type"] = moe ? "mixtral" : mistral ? "mistral" : "llama";
  object["hidden_act"] = "silu";
  object["hidden_size"] = config.dim;
  object["intermediate_size"] = config.intermediate_size;
  object["num_hidden_layers"] = config.n_layer;
  object["num_attention_heads"] = config.n_head;
  object["num_key_value_heads"] = config.n_local_heads;
  object["head_dim"] = config.head_dim;
  object["vocab_size"] = config.vocab_size;
  object["max_position_embeddings"] = config.block_size;
  object["rms_norm_eps"] = config.norm_eps;
  object["rope_theta"] = config.rope_base;
  object["rope_scaling"] = nullptr;
  if (const auto& scaling = config.rope_scaling) {
    object["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", scaling->factor},
                              {"low_freq_factor", scaling->low_freq_factor},
                              {"high_freq_factor", scaling->high_freq_factor},
                              {"original_max_position_embeddings",
                               scaling->original_max_position_embeddings}};
  }
  object["tie_word_embeddings"] = config.tie_word_embeddings;
  if (mistral) object["sliding_window"] = config.sliding_window;
  if (moe) {
    object["num_local_experts"] = config.num_experts;
    object["num_experts_per_tok"] = config.num_activated_experts;
  }
  return object.dump(2) + "\n";
}

}  // namespace gptfast
