#include "gptfast/convert.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sentencepiece_processor.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "convert_fixture.h"
#include "gguf_builder.h"
#include "gptfast/checkpoint.h"
#include "gptfast/config.h"
#include "gptfast/tokenizer.h"
#include "mount.h"

namespace gptfast {
namespace {

using testing::GgufBuilder;
using Type = GgufBuilder::Type;

constexpr int64_t kDim = 64;
constexpr int64_t kHidden = 96;

// Values of a tensor, its bytes in a GGUF file and what they decode to.
struct Coded {
  std::string bytes = {};
  Tensor values;  // float32
};

std::string half_bytes(float value) {
  return GgufBuilder::raw(at::Half(value));
}

Coded encode(uint32_t type, const Tensor& wanted) {
  Coded coded{.values = wanted.clone()};
  const float* in = wanted.const_data_ptr<float>();
  float* out = coded.values.mutable_data_ptr<float>();
  const int64_t count = wanted.numel();
  if (type == Type::kF32) coded.bytes = std::string(reinterpret_cast<const char*>(in), count * 4);
  for (int64_t i = 0; i < count && (type == Type::kF16 || type == Type::kBF16); ++i) {
    coded.bytes += type == Type::kF16 ? half_bytes(in[i]) : GgufBuilder::raw(at::BFloat16(in[i]));
    out[i] = type == Type::kF16 ? static_cast<float>(at::Half(in[i]))
                                : static_cast<float>(at::BFloat16(in[i]));
  }
  if (type == Type::kF32 || type == Type::kF16 || type == Type::kBF16) return coded;
  for (int64_t b = 0; b < count; b += 32) {
    // A scale of each block with all bits of a half in use, one of them negative.
    const auto scale = static_cast<float>(
        at::Half((b % 64 == 0 ? 0.0123F : -0.0371F) + static_cast<float>(b) * 1e-5F));
    const auto minimum = static_cast<float>(at::Half(-0.21F));
    coded.bytes += half_bytes(scale);
    if (type == Type::kQ4_1) coded.bytes += half_bytes(minimum);
    std::vector<int> codes(32);
    for (int i = 0; i < 32; ++i) {
      codes[i] = type == Type::kQ8_0 ? static_cast<int>((b * 7 + i * 37) % 256) - 128
                                     : static_cast<int>((b + i * 5) % 16);
      const float code = type == Type::kQ4_0 ? codes[i] - 8 : codes[i];
      out[b + i] = type == Type::kQ4_1 ? scale * code + minimum : scale * code;
    }
    for (int i = 0; i < 32 && type == Type::kQ8_0; ++i) coded.bytes += static_cast<char>(codes[i]);
    for (int i = 0; i < 16 && type != Type::kQ8_0; ++i)
      coded.bytes += static_cast<char>(codes[i] | codes[i + 16] << 4);
  }
  return coded;
}

// A model of two layers whose matrices have the given type.
struct TinyGguf {
  GgufBuilder file;
  std::map<std::string, Tensor> values;

  explicit TinyGguf(uint32_t type, bool with_head = true, int64_t vocabulary = 300) {
    at::manual_seed(type);
    file.string("general.architecture", "llama");
    file.integer("llama.block_count", 2);
    file.integer("llama.context_length", 128);
    file.integer("llama.embedding_length", kDim);
    file.integer("llama.feed_forward_length", kHidden);
    file.integer("llama.attention.head_count", 4);
    file.integer("llama.attention.head_count_kv", 2);
    file.number("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    file.number("llama.rope.freq_base", 50000);
    add("token_embd.weight", {vocabulary, kDim}, type);
    for (const std::string layer : {"blk.0.", "blk.1."}) {
      add(layer + "attn_norm.weight", {kDim}, Type::kF32);
      add(layer + "attn_q.weight", {kDim, kDim}, type);
      add(layer + "attn_k.weight", {kDim / 2, kDim}, type);
      add(layer + "attn_v.weight", {kDim / 2, kDim}, type);
      add(layer + "attn_output.weight", {kDim, kDim}, type);
      add(layer + "ffn_norm.weight", {kDim}, Type::kF32);
      add(layer + "ffn_gate.weight", {kHidden, kDim}, type);
      add(layer + "ffn_up.weight", {kHidden, kDim}, type);
      add(layer + "ffn_down.weight", {kDim, kHidden}, type);
    }
    add("output_norm.weight", {kDim}, Type::kF32);
    if (with_head) add("output.weight", {vocabulary, kDim}, type);
  }

  void add(const std::string& name, const std::vector<int64_t>& shape, uint32_t type) {
    const Coded coded = encode(type, at::randn(shape));
    values[name] = coded.values;
    file.tensor({name, {shape.rbegin(), shape.rend()}, type, coded.bytes});
  }
};

// Byte-level BPE: the 256 bytes, a few merges, two control tokens and fillers up to 300.
void add_bpe_tokenizer(GgufBuilder& file, const std::string& pre = "smollm") {
  std::vector<std::string> tokens;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    const uint32_t c = printable ? byte : next++;
    tokens.push_back(c < 0x80 ? std::string(1, static_cast<char>(c))
                              : std::string{static_cast<char>(0xC0 | c >> 6),
                                            static_cast<char>(0x80 | (c & 0x3F))});
  }
  tokens.insert(tokens.end(), {"he", "ll", "hell", "hello"});
  std::vector<int32_t> types(tokens.size(), 1);
  tokens.insert(tokens.end(), {"<|start|>", "<|end|>"});
  types.insert(types.end(), {3, 3});
  while (tokens.size() < 300) {
    tokens.push_back("filler" + std::to_string(tokens.size()));
    types.push_back(5);
  }
  file.string("tokenizer.ggml.model", "gpt2");
  file.string("tokenizer.ggml.pre", pre);
  file.strings("tokenizer.ggml.tokens", tokens);
  file.list("tokenizer.ggml.token_type", 5, types);
  file.strings("tokenizer.ggml.merges", {"h e", "l l", "he ll", "hell o"});
  file.integer("tokenizer.ggml.bos_token_id", 260);
  file.integer("tokenizer.ggml.eos_token_id", 261);
  file.boolean("tokenizer.ggml.add_bos_token", true);
  file.string("tokenizer.chat_template", "{{ '<|im_start|>' }}");
}

class GgufTest : public ConvertFixture {
 protected:
  // The error of converting `bytes`; checks that nothing is left behind.
  std::string error(const std::string& bytes) {
    const auto input = write("bad/in.gguf", bytes);
    const std::string message =
        error_of([&] { convert(input, directory_ / "bad/out/model.pth", {}); });
    std::error_code ignored;
    EXPECT_TRUE(!fs::exists(directory_ / "bad/out") || fs::is_empty(directory_ / "bad/out"))
        << message;
    fs::remove_all(directory_ / "bad", ignored);
    return message;
  }
};

TEST_F(GgufTest, EveryTensorType) {
  for (const uint32_t type :
       {Type::kF32, Type::kF16, Type::kBF16, Type::kQ8_0, Type::kQ4_0, Type::kQ4_1}) {
    TinyGguf tiny(type);
    add_bpe_tokenizer(tiny.file);
    const auto input = write("in.gguf", tiny.file.build());
    ConvertOptions options;
    options.dtype = at::kFloat;
    convert(input, directory_ / "out/model.pth", options);
    const StateDict tensors = load_checkpoint(directory_ / "out/model.pth");
    const auto& v = tiny.values;
    EXPECT_EQ(tensors.size(), 17);
    EXPECT_TRUE(at::equal(tensors.at("tok_embeddings.weight"), v.at("token_embd.weight"))) << type;
    EXPECT_TRUE(at::equal(tensors.at("output.weight"), v.at("output.weight"))) << type;
    EXPECT_TRUE(at::equal(tensors.at("norm.weight"), v.at("output_norm.weight")));
    EXPECT_TRUE(at::equal(tensors.at("layers.1.attention.wqkv.weight"),
                          at::cat({v.at("blk.1.attn_q.weight"), v.at("blk.1.attn_k.weight"),
                                   v.at("blk.1.attn_v.weight")})));
    EXPECT_TRUE(
        at::equal(tensors.at("layers.0.attention.wo.weight"), v.at("blk.0.attn_output.weight")));
    EXPECT_TRUE(
        at::equal(tensors.at("layers.0.feed_forward.w1.weight"), v.at("blk.0.ffn_gate.weight")));
    EXPECT_TRUE(
        at::equal(tensors.at("layers.0.feed_forward.w3.weight"), v.at("blk.0.ffn_up.weight")));
    EXPECT_TRUE(
        at::equal(tensors.at("layers.0.feed_forward.w2.weight"), v.at("blk.0.ffn_down.weight")));
    EXPECT_TRUE(
        at::equal(tensors.at("layers.1.attention_norm.weight"), v.at("blk.1.attn_norm.weight")));
    EXPECT_TRUE(at::equal(tensors.at("layers.1.ffn_norm.weight"), v.at("blk.1.ffn_norm.weight")));
    // The default: that of the source, bfloat16 for a quantized one.
    convert(input, directory_ / "out/model.pth", {});
    const StateDict again = load_checkpoint(directory_ / "out/model.pth");
    const auto dtype = type == Type::kF32   ? at::kFloat
                       : type == Type::kF16 ? at::kHalf
                                            : at::kBFloat16;
    for (const auto& [name, tensor] : again) {
      EXPECT_EQ(tensor.scalar_type(), dtype) << name;
      EXPECT_TRUE(at::equal(tensor, tensors.at(name).to(dtype))) << name;
    }
  }
}

TEST_F(GgufTest, ConfigAndTiedHead) {
  TinyGguf tiny(Type::kF32, /*with_head=*/false);
  add_bpe_tokenizer(tiny.file);
  convert(write("in.gguf", tiny.file.build()), directory_ / "out/model.pth", {});
  const StateDict tensors = load_checkpoint(directory_ / "out/model.pth");
  // The original's loader wants a head: the same bytes under a second name.
  EXPECT_EQ(tensors.at("output.weight").data_ptr(), tensors.at("tok_embeddings.weight").data_ptr());
  ModelArgs expected{.block_size = 128,
                     .vocab_size = 300,
                     .n_layer = 2,
                     .n_head = 4,
                     .dim = kDim,
                     .intermediate_size = kHidden,
                     .n_local_heads = 2,
                     .rope_base = 50000,
                     .tie_word_embeddings = true};
  expected.finalize();
  EXPECT_EQ(find_config(directory_ / "out/model.pth", "", tensors), expected);
  // So does what is made from a file that has both names.
  convert(directory_ / "out/model.pth", directory_ / "out/again.pth", {});
  const StateDict again = load_checkpoint(directory_ / "out/again.pth");
  EXPECT_EQ(again.at("output.weight").data_ptr(), again.at("tok_embeddings.weight").data_ptr());
}

TEST_F(GgufTest, BpeTokenizer) {
  TinyGguf tiny(Type::kF32);
  add_bpe_tokenizer(tiny.file);
  convert(write("in.gguf", tiny.file.build()), directory_ / "out/model.pth", {});
  const auto tokenizer = Tokenizer::load(Tokenizer::find(directory_ / "out"));
  EXPECT_EQ(tokenizer->kind(), "bpe");
  EXPECT_EQ(tokenizer->vocab_size(), 300);
  EXPECT_EQ(tokenizer->encode("hello")[0], 259);
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("hello 12 \xC3\xA9\n")), "hello 12 \xC3\xA9\n");
  EXPECT_EQ(tokenizer->encode("<|end|>", /*parse_special=*/true), std::vector<int32_t>{261});
  EXPECT_EQ(tokenizer->bos_id(), 260);
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->stop_ids(), std::vector<int32_t>{261});
  EXPECT_EQ(tokenizer->chat_template(), "chatml");
}

// The vocabulary of a SentencePiece model as llama.cpp's convert_hf_to_gguf.py writes it: with
// `recent`, tokens that tokenizer_config.json lists are control tokens, the unknown one too; behind
// the model's pieces come two added tokens and unused ones.
void add_vocabulary_of(GgufBuilder& file, const fs::path& model, bool recent) {
  sentencepiece::SentencePieceProcessor sp;
  ASSERT_TRUE(sp.Load(model.string()).ok());
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;
  const auto add = [&](const std::string& token, int32_t type, float score) {
    tokens.push_back(token);
    types.push_back(type);
    scores.push_back(score);
  };
  for (int id = 0; id < sp.GetPieceSize(); ++id) {
    const bool listed = sp.IsControl(id) || sp.IsUnknown(id);
    const int32_t type = listed                         ? (recent || sp.IsControl(id) ? 3 : 2)
                         : sp.IsByte(id)                ? 6
                         : sp.IdToPiece(id) == "<tool>" ? 4
                                                        : 1;
    add(sp.IdToPiece(id), type, listed && recent ? -1000.0F : sp.GetScore(id));
  }
  add("<|im_end|>", recent ? 3 : 4, -1000);
  add("  two spaces", 4, -1000);
  while (tokens.size() < 480) add("[PAD" + std::to_string(tokens.size()) + "]", 5, -10000);
  file.string("tokenizer.ggml.model", "llama");
  file.string("tokenizer.ggml.pre", "default");
  file.strings("tokenizer.ggml.tokens", tokens);
  file.list("tokenizer.ggml.token_type", 5, types);
  file.list("tokenizer.ggml.scores", 6, scores);
  file.integer("tokenizer.ggml.bos_token_id", 1);
  file.integer("tokenizer.ggml.eos_token_id", 2);
  if (recent) file.integer("tokenizer.ggml.unknown_token_id", 0);
}

TEST_F(GgufTest, ASentencePieceModelKeepsItsIds) {
  const fs::path model = fs::path(GPTFAST_GOLDEN) / "tokenizers/small_sp_bpe.model";
  const auto golden =
      nlohmann::json::parse(read(fs::path(GPTFAST_GOLDEN) / "tokenizers/small_sp_bpe.json"));
  for (const bool recent : {false, true}) {
    TinyGguf tiny(Type::kF32, /*with_head=*/true, /*vocabulary=*/480);
    add_vocabulary_of(tiny.file, model, recent);
    convert(write("in.gguf", tiny.file.build()), directory_ / "out/model.pth", {});
    const auto tokenizer = Tokenizer::load(Tokenizer::find(directory_ / "out"));
    EXPECT_EQ(tokenizer->vocab_size(), 480);
    for (const auto& row : golden["strings"]) {
      const auto text = row["text"].get<std::string>();
      EXPECT_EQ(tokenizer->encode(text), row["ids"].get<std::vector<int32_t>>()) << text;
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), row["decoded"]) << text;
    }
    EXPECT_EQ(tokenizer->encode("<|im_end|>", /*parse_special=*/true), std::vector<int32_t>{450});
    EXPECT_EQ(tokenizer->decode(tokenizer->encode("x  two spaces")), "x  two spaces");
    EXPECT_NE(tokenizer->token_id("\u2581\u2581two\u2581spaces"), -1);
  }
}

TEST_F(GgufTest, MixtureOfExperts) {
  TinyGguf tiny(Type::kF16);
  add_bpe_tokenizer(tiny.file);
  tiny.file.integer("llama.expert_count", 3);
  tiny.file.integer("llama.expert_used_count", 2);
  auto& tensors = tiny.file.tensors;
  std::erase_if(tensors, [](const auto& t) {
    return contains(t.name, ".ffn_") && !contains(t.name, "norm");
  });
  for (const std::string layer : {"blk.0.", "blk.1."}) {
    tiny.add(layer + "ffn_gate_inp.weight", {3, kDim}, Type::kF32);
    tiny.add(layer + "ffn_gate_exps.weight", {3, kHidden, kDim}, Type::kF16);
    tiny.add(layer + "ffn_down_exps.weight", {3, kDim, kHidden}, Type::kF16);
    tiny.add(layer + "ffn_up_exps.weight", {3, kHidden, kDim}, Type::kF16);
  }
  convert(write("in.gguf", tiny.file.build()), directory_ / "out/model.pth", {});
  const StateDict converted = load_checkpoint(directory_ / "out/model.pth");
  const std::string moe = "layers.1.block_sparse_moe.";
  for (const auto& [ours, theirs] :
       std::map<std::string, std::string>{{"gate.weight", "ffn_gate_inp.weight"},
                                          {"cond_ffn.w1", "ffn_gate_exps.weight"},
                                          {"cond_ffn.w2", "ffn_down_exps.weight"},
                                          {"cond_ffn.w3", "ffn_up_exps.weight"}}) {
    EXPECT_TRUE(
        at::equal(converted.at(moe + ours), tiny.values.at("blk.1." + theirs).to(at::kHalf)))
        << ours;
  }
  const ModelArgs args = ModelArgs::from_json_file(directory_ / "out/config.json");
  EXPECT_EQ(args.num_experts, 3);
  EXPECT_EQ(args.num_activated_experts, 2);
}

TEST_F(GgufTest, LlamaRopeScaling) {
  // Divisors of head_dim 16 and base 50000 as Llama 3.1 computes them (factor 8, 1, 4, 8192).
  const auto with_divisors = [](const Tensor& divisors) {
    TinyGguf tiny(Type::kF32);
    add_bpe_tokenizer(tiny.file);
    tiny.file.tensor({"rope_freqs.weight",
                      {8},
                      Type::kF32,
                      std::string(static_cast<const char*>(divisors.const_data_ptr()), 32)});
    return tiny.file.build();
  };
  const auto wavelengths = 2 * M_PI * at::pow(50000.0, at::arange(0, 16, 2, at::kDouble) / 16);
  const auto smooth = (8192 / wavelengths - 1) / 3;
  const auto divisors =
      at::where(wavelengths < 2048, 1.0,
                at::where(wavelengths > 8192, 8.0, 1 / ((1 - smooth) / 8 + smooth)))
          .to(at::kFloat);
  convert(write("in.gguf", with_divisors(divisors)), directory_ / "out/model.pth", {});
  EXPECT_EQ(ModelArgs::from_json_file(directory_ / "out/config.json").rope_scaling, RopeScaling{});
  EXPECT_TRUE(contains(error(with_divisors(divisors * 1.1)), "rope_freqs.weight"));
}

TEST_F(GgufTest, FilesOfTheSourceStay) {
  TinyGguf tiny(Type::kF32);
  add_bpe_tokenizer(tiny.file);
  const auto input = write("model/in.gguf", tiny.file.build());
  write("model/tokenizer.json", "the user's own");
  write("elsewhere/tokenizer.json", "of an older conversion");
  convert(input, directory_ / "model/model.pth", {});
  convert(input, directory_ / "elsewhere/model.pth", {});
  EXPECT_EQ(read(directory_ / "model/tokenizer.json"), "the user's own");
  EXPECT_TRUE(contains(read(directory_ / "elsewhere/tokenizer.json"), "ByteLevel"));
}

TEST_F(GgufTest, CutShortAnywhere) {
  TinyGguf tiny(Type::kQ4_1);
  add_bpe_tokenizer(tiny.file);
  const std::string whole = tiny.file.build();
  const size_t header = whole.size() - 40000;
  for (size_t size = 0; size < whole.size(); size += size < header ? 193 : 8001) {
    const std::string message = error(whole.substr(0, size));
    EXPECT_TRUE(contains(message, "in.gguf")) << size;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  EXPECT_NE(error(whole.substr(0, whole.size() - 1)), "");
  EXPECT_EQ(error_of([&] { convert(write("in.gguf", whole), directory_ / "out/model.pth", {}); }),
            "");
}

// Every byte of the header changed, one at a time: an error or a model, never a crash.
TEST_F(GgufTest, DamagedAnywhere) {
  TinyGguf tiny(Type::kQ8_0);
  const std::string whole = tiny.file.build();
  const std::string header = whole.substr(0, 2000);
  for (size_t at = 0; at < header.size(); at += 13) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (at % 2 == 0 ? 0x80 : 0xFF));
    const auto input = write("in.gguf", damaged);
    error_of([&] { convert(input, directory_ / "out/model.pth", {}); });
  }
}

TEST_F(GgufTest, HostileHeaders) {
  const auto changed = [](auto change) {
    TinyGguf tiny(Type::kQ8_0);
    add_bpe_tokenizer(tiny.file);
    change(tiny.file);
    return tiny.file.build();
  };
  using B = GgufBuilder;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {changed([](B& f) { f.version = 1; }), "version 1"},
      {changed([](B& f) { f.version = 0x03000000; }), "little-endian"},
      {changed([](B& f) { f.tensor_count = UINT64_MAX; }), "tensors"},
      {changed([](B& f) { f.tensor_count = uint64_t{1} << 61; }), "tensors"},
      {changed([](B& f) { f.metadata_count = UINT64_MAX; }), "metadata entries"},
      {changed([](B& f) { f.entry("x", 8, B::raw(UINT64_MAX)); }), "cut short"},
      {changed([](B& f) { f.entry("x", 9, B::raw(uint32_t{4}) + B::raw(UINT64_MAX)); }),
       "array items"},
      {changed([](B& f) { f.entry("x", 9, B::raw(uint32_t{9}) + B::raw(uint64_t{1})); }),
       "array of arrays"},
      {changed([](B& f) { f.entry("x", 99, ""); }), "unknown type 99"},
      {changed([](B& f) { f.string("general.architecture", "qwen2"); }), "twice"},
      {changed([](B& f) { f.integer("general.alignment", 0); }), "alignment"},
      {changed([](B& f) { f.integer("general.alignment", 48); }), "alignment"},
      {changed([](B& f) {
         f.tensors[0].dims = {64, UINT64_MAX};
       }),
       "dimension"},
      {changed([](B& f) {
         f.tensors[0].dims = {1u << 30, 1u << 30, 1u << 30, 1u << 30};
       }),
       "token_embd.weight"},
      {changed([](B& f) {
         f.tensors[0].dims = {64, 0};
       }),
       "dimension of 0"},
      {changed([](B& f) { f.tensors[0].dims = {}; }), "0 dimensions"},
      {changed([](B& f) {
         f.tensors[0].dims = {1, 1, 1, 1, 1};
       }),
       "5 dimensions"},
      {changed([](B& f) {
         f.tensors[0].dims = {33, 100};
       }),
       "multiple of 32"},
      {changed([](B& f) {
         f.tensors[0].dims = {64, 4000000};
       }),
       "does not fit"},
      {changed([](B& f) { f.tensors[0].type = 12; }), "type number 12"},
      {changed([](B& f) { f.tensors.erase(f.tensors.begin() + 2); }),
       "missing tensors: layers.0.attention.wq.weight"},
      {changed([](B& f) { f.tensors[3].name = "blk.0.attn_q.bias"; }), "blk.0.attn_q.bias"},
      {changed([](B& f) { f.tensors[3].name = f.tensors[2].name; }), "two tensors"},
      {changed([](B& f) { f.integer("llama.expert_count", 8); }), "num_activated_experts"},
      {changed([](B& f) { f.string("llama.rope.scaling.type", "yarn"); }), "yarn"},
      {changed([](B& f) { f.integer("llama.rope.dimension_count", 8); }), "rotates 8"},
  };
  for (const auto& [bytes, expected] : cases) {
    const std::string message = error(bytes);
    EXPECT_TRUE(contains(message, expected)) << expected << " not in: " << message;
  }
}

TEST_F(GgufTest, WrongModels) {
  const auto message = [&](const std::string& replaced, const std::string& by) {
    TinyGguf tiny(Type::kF16);
    add_bpe_tokenizer(tiny.file);
    std::string bytes = tiny.file.build();
    const size_t at = bytes.find(replaced);
    return error(bytes.replace(at, by.size(), by));
  };
  EXPECT_TRUE(contains(message("llama", "qwen2"), "'qwen2' is not supported (known: llama)"));
  EXPECT_TRUE(
      contains(message("llama.block_count", "llama.block_cOunt"), "llama.block_count is missing"));
  EXPECT_TRUE(contains(message("smollm", "weirdo"), "weirdo"));
  EXPECT_TRUE(contains(message("gpt2", "bert"), "'bert' is not supported (known: gpt2, llama)"));
  EXPECT_TRUE(contains(message("h e", "\xFF e"), "UTF-8"));
  TinyGguf no_tokenizer(Type::kF32);
  EXPECT_TRUE(contains(error(no_tokenizer.file.build()), "tokenizer.ggml.model is missing"));
}

TEST_F(GgufTest, ConfigOverride) {
  TinyGguf tiny(Type::kF32);
  add_bpe_tokenizer(tiny.file);
  const auto input = write("in.gguf", tiny.file.build());
  ConvertOptions options;
  options.config = "stories15M";
  EXPECT_TRUE(
      contains(error_of([&] { convert(input, directory_ / "out/model.pth", options); }), "300"));
  EXPECT_FALSE(fs::exists(directory_ / "out/model.pth"));
}

// The program itself: exit status, one line, nothing left when the disk is full.
TEST_F(GgufTest, CommandLine) {
  TinyGguf tiny(Type::kF32);
  add_bpe_tokenizer(tiny.file);
  write("in.gguf", tiny.file.build());
  EXPECT_EQ(shell(R"("$BIN/convert" in.gguf --output out/model.pth --dtype bfloat16 2>err)"), 0);
  EXPECT_TRUE(contains(read(directory_ / "err"), "out/model.pth"));
  EXPECT_EQ(shell(R"("$BIN/convert" --inspect out/model.pth >list 2>err)"), 0);
  EXPECT_TRUE(contains(read(directory_ / "list"), "layers.1.attention.wqkv.weight"));
  for (const auto& [command, status, expected] :
       std::vector<std::tuple<std::string, int, std::string>>{
           {"convert none.gguf", 1, "none.gguf"},
           {"convert", 2, "INPUT is missing"},
           {"convert in.gguf --dtype int8", 2, "bfloat16"},
           {"convert in.gguf --outptu x", 2, "--output"},
           {"convert in.gguf --hash", 2, "--inspect"},
           {"convert in.gguf --config none", 1, "unknown model"},
           {"convert in.gguf --output /proc/none/model.pth", 1, "/proc/none"},
       }) {
    EXPECT_EQ(shell("\"$BIN\"/" + command + " >out.txt 2>err"), status) << command;
    const std::string text = read(directory_ / "err");
    EXPECT_TRUE(contains(text, expected)) << command << ": " << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  }
}

// On disks of every size up to the one that suffices, so that each write fails once.
TEST_F(GgufTest, DiskFull) {
  TinyGguf tiny(Type::kF32);
  add_bpe_tokenizer(tiny.file);
  const auto input = write("in.gguf", tiny.file.build());
  const fs::path folder = directory_ / "small";
  fs::create_directory(folder);
  constexpr int kMostPages = 1000;
  int pages = 0;
  for (std::string message = "not tried"; !message.empty();) {
    ASSERT_LT(++pages, kMostPages);
    const Mount disk(folder, 0, ("size=" + std::to_string(pages * ::getpagesize())).c_str());
    if (!disk.mounted) GTEST_SKIP() << "only root can mount a small disk";
    message = error_of([&] { convert(input, folder / "model.pth", {}); });
    EXPECT_EQ(message.empty(), fs::exists(folder / "model.pth"));
    if (message.empty()) continue;
    EXPECT_TRUE(contains(message, "cannot be written: No space left on device")) << message;
    EXPECT_TRUE(fs::is_empty(folder)) << pages << " pages: " << message;
  }
  EXPECT_GT(pages, 50);
  const Mount disk(folder, 0, "size=64k");
  EXPECT_EQ(shell(R"("$BIN/convert" in.gguf --output small/model.pth >out.txt 2>err)"), 1);
  EXPECT_EQ(read(directory_ / "err"),
            "convert: small/model.pth: cannot be written: No space left on device\n");
  EXPECT_EQ(read(directory_ / "out.txt"), "");
  EXPECT_TRUE(fs::is_empty(folder));
}

// The same without root: files may not grow beyond 64 KiB.
TEST_F(GgufTest, FilesMayNotGrow) {
  TinyGguf tiny(Type::kF32);
  add_bpe_tokenizer(tiny.file);
  write("in.gguf", tiny.file.build());
  EXPECT_EQ(
      shell(
          R"(mkdir full; trap '' XFSZ; ulimit -f 64; "$BIN/convert" in.gguf --output full/model.pth 2>err)"),
      1);
  EXPECT_EQ(read(directory_ / "err"),
            "convert: full/model.pth: cannot be written: File too large\n");
  EXPECT_TRUE(fs::is_empty(directory_ / "full"));
}

}  // namespace
}  // namespace gptfast
