// Sharding, and ranks as threads of this process. tp_process_test.cpp runs ranks as processes.
#include "gptfast/tp.h"

#include <c10/util/irange.h>

#include <condition_variable>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "gptfast/linear.h"
#include "int4_layout.h"
#include "sha256.h"
#include "test_util.h"
#include "tp_socket.h"

namespace gptfast {
namespace {

ModelArgs tiny_args() {
  ModelArgs args;
  args.block_size = 64;
  args.vocab_size = 10;
  args.n_layer = 1;
  args.n_head = 8;
  args.n_local_heads = 2;
  args.dim = 64;
  args.intermediate_size = 96;
  args.finalize();
  return args;
}

ModelArgs golden_args(const std::string& name) {
  ModelArgs args = ModelArgs::from_json_file(golden(name) / "config.json");
  args.finalize();
  return args;
}

// ---- Sharding

std::string sha256_of(const Tensor& tensor) {
  const Tensor bytes = tensor.contiguous();
  Sha256 hash;
  hash.update({static_cast<const uint8_t*>(bytes.const_data_ptr()), bytes.nbytes()});
  return hash.hex_digest();
}

// The original cuts the fp32 copy of a bfloat16 file.
StateDict rounded_checkpoint(const std::string& name) {
  StateDict rounded;
  for (const auto& [key, tensor] : load_checkpoint(golden(name) / "model.fp32.pth"))
    rounded.set(key, tensor.to(at::kBFloat16).to(at::kFloat));
  return rounded;
}

TEST(Shard, EqualsTheOriginals) {
  const auto expected = nlohmann::json::parse(std::ifstream(golden("tp") / "shards.json"));
  ASSERT_EQ(expected.size(), 3U);
  for (const auto& [name, ranks] : expected.items()) {
    const std::string model = name.substr(0, name.find('.'));
    const ModelArgs args = golden_args(model);
    const StateDict whole = rounded_checkpoint(model);
    const auto world_size = static_cast<int>(ranks.size());
    for (int rank = 0; rank < world_size; ++rank) {
      const StateDict share = shard_state_dict(whole, args, rank, world_size, Int4Layout::kAuto);
      for (const auto& [key, sha256] : ranks[static_cast<size_t>(rank)].items())
        EXPECT_EQ(sha256_of(share.at(key)), sha256) << name << " rank " << rank << ' ' << key;
    }
  }
}

TEST(Shard, HeadIsPaddedWhereRanksDoNotDivideTheVocabulary) {
  const ModelArgs args = tiny_args();
  StateDict whole;
  whole.set("output.weight", at::randn({10, 64}));
  std::vector<Tensor> parts;
  for (int rank = 0; rank < 4; ++rank) {
    parts.push_back(shard_state_dict(whole, args, rank, 4, Int4Layout::kAuto).at("output.weight"));
    EXPECT_EQ(parts.back().size(0), 3);
  }
  const Tensor together = at::cat(parts);
  EXPECT_TRUE(together.narrow(0, 0, 10).equal(whole.at("output.weight")));
  EXPECT_EQ(together.narrow(0, 10, 2).abs().max().item<float>(), 0);
}

TEST(Shard, EveryExpertIsCutInside) {
  const ModelArgs args = tiny_args();
  const std::string prefix = "layers.0.block_sparse_moe.cond_ffn.";
  StateDict whole;
  whole.set(prefix + "w1", at::randn({3, 96, 64}));
  whole.set(prefix + "w2", at::randn({3, 64, 96}));
  whole.set(prefix + "scales1", at::randn({3, 96}));
  whole.set(prefix + "scales2", at::randn({3, 64}));
  whole.set("layers.0.block_sparse_moe.gate.weight", at::randn({3, 64}));
  const StateDict share =
      shard_state_dict(whole, args, /*rank=*/1, /*world_size=*/2, Int4Layout::kAuto);
  const auto expect = [&](const std::string& name, const Tensor& expected) {
    EXPECT_TRUE(share.at(name).equal(expected)) << name;
  };
  expect(prefix + "w1", whole.at(prefix + "w1").narrow(1, 48, 48));
  expect(prefix + "w2", whole.at(prefix + "w2").narrow(2, 48, 48));
  expect(prefix + "scales1", whole.at(prefix + "scales1").narrow(1, 48, 48));
  expect(prefix + "scales2", whole.at(prefix + "scales2"));
  const std::string gate = "layers.0.block_sparse_moe.gate.weight";
  expect(gate, whole.at(gate));
}

// The values that a layer of `tensors` computes with.
Tensor dequantized(const StateDict& tensors, const std::string& fqn, int64_t in_features,
                   Int4Layout layout = Int4Layout::kAuto) {
  LinearImpl linear(in_features, /*out_features=*/0, weight_scheme(tensors, fqn, in_features));
  linear.scheme.layout = layout;
  linear.weight = tensors.at(fqn + ".weight");
  if (const Tensor* scales = tensors.find(fqn + ".scales")) linear.scales = *scales;
  if (const Tensor* both = tensors.find(fqn + ".scales_and_zeros")) linear.scales_and_zeros = *both;
  return linear.dequantize();
}

void expect_quantized_shares(const std::string& file, const std::string& model, int world_size) {
  const ModelArgs args = golden_args(model), cut = shard_config(args, world_size);
  const StateDict whole = load_checkpoint(golden("quantize") / file);
  const int64_t heads = args.n_head * args.head_dim, dim = args.dim,
                hidden = args.intermediate_size;
  for (int rank = 0; rank < world_size; ++rank) {
    SCOPED_TRACE(c10::str(file, " rank ", rank, " of ", world_size));
    const StateDict share = shard_state_dict(whole, args, rank, world_size, Int4Layout::kAuto);
    const auto part = [&](const Tensor& t, int64_t d) { return t.chunk(world_size, d)[rank]; };
    const std::string attention = "layers.0.attention.", ffn = "layers.0.feed_forward.";
    const auto qkv = dequantized(whole, attention + "wqkv", dim)
                         .split_with_sizes({heads, args.n_local_heads * args.head_dim,
                                            args.n_local_heads * args.head_dim});
    const int64_t kv = args.n_local_heads * rank / world_size * args.head_dim,
                  kv_size = cut.n_local_heads * args.head_dim;
    EXPECT_TRUE(dequantized(share, attention + "wqkv", dim)
                    .equal(at::cat({part(qkv[0], 0), qkv[1].narrow(0, kv, kv_size),
                                    qkv[2].narrow(0, kv, kv_size)})));
    EXPECT_TRUE(dequantized(share, attention + "wo", heads / world_size)
                    .equal(part(dequantized(whole, attention + "wo", heads), 1)));
    EXPECT_TRUE(
        dequantized(share, ffn + "w1", dim).equal(part(dequantized(whole, ffn + "w1", dim), 0)));
    EXPECT_TRUE(dequantized(share, ffn + "w2", hidden / world_size)
                    .equal(part(dequantized(whole, ffn + "w2", hidden), 1)));
    EXPECT_TRUE(
        dequantized(share, "output", dim).equal(part(dequantized(whole, "output", dim), 0)));
  }
}

TEST(Shard, Int8) {
  expect_quantized_shares("tiny-mha.int8.pth", "tiny-mha", 2);
  expect_quantized_shares("tiny-mha.int8.pth", "tiny-mha", 4);
}

TEST(Shard, Int4WithSharedKeyValueHeads) {
  expect_quantized_shares("tiny-gqa.int4.g32.pth", "tiny-gqa", 2);
  expect_quantized_shares("tiny-gqa.int4.g32.pth", "tiny-gqa", 4);
  expect_quantized_shares("tiny-gqa.int4.g32.pth", "tiny-gqa", 8);
}

// Files pad int4 columns to a multiple of 1024. Here no rank's rows (12 of w1) fill whole tiles,
// nor its columns (32 of w2).
TEST(Shard, Int4WithPaddedColumns) {
  constexpr auto kLayout = Int4Layout::kCuda;
  const std::string ffn = "layers.0.feed_forward.";
  at::manual_seed(3);
  StateDict whole;
  const auto add = [&](const std::string& fqn, int64_t rows, int64_t groupsize) {
    whole.set(fqn + ".weight",
              pack_int4_cuda(at::randint(0, 256, {rows, 512}, at::kByte), /*inner=*/8));
    whole.set(fqn + ".scales_and_zeros", at::randn({1024 / groupsize, rows, 2}));
  };
  const auto expect_parts = [&](const std::string& fqn, const ModelArgs& args, int ranks,
                                int64_t in_features, int64_t in_share, int64_t dim) {
    const Tensor expected = dequantized(whole, fqn, in_features, kLayout);
    for (int rank = 0; rank < ranks; ++rank) {
      const StateDict share = shard_state_dict(whole, args, rank, ranks, kLayout);
      EXPECT_TRUE(
          dequantized(share, fqn, in_share, kLayout).equal(expected.chunk(ranks, dim)[rank]))
          << fqn << " rank " << rank;
    }
  };
  ModelArgs args = tiny_args();
  for (const int64_t groupsize : {32, 64, 128}) {
    add(ffn + "w1", 96, groupsize);
    expect_parts(ffn + "w1", args, 8, 64, 64, 0);
  }
  args.intermediate_size = 128;
  add(ffn + "w2", 64, 32);
  whole.set(ffn + "w1.weight", at::zeros({128, 64}));
  whole.take(ffn + "w1.scales_and_zeros");
  expect_parts(ffn + "w2", args, 4, 128, 32, 1);
}

TEST(Shard, RefusesWithNumbers) {
  ModelArgs args = tiny_args();
  const auto refusal = [&](int ranks) { return error_of([&] { shard_config(args, ranks); }); };
  EXPECT_EQ(refusal(3),
            "the model's 8 attention heads (n_head) cannot be divided among 3 ranks; choose a "
            "number of ranks that divides it");
  args.intermediate_size = 97;
  EXPECT_NE(refusal(2).find("97 hidden features (intermediate_size)"), std::string::npos);
  args.intermediate_size = 96;
  args.n_head = 12;
  args.n_local_heads = 3;
  EXPECT_NE(refusal(2).find("3 key/value heads (n_local_heads) cannot be divided among 2"),
            std::string::npos);
  EXPECT_NE(refusal(4).find("3 key/value heads (n_local_heads) cannot be spread evenly over 4"),
            std::string::npos);
}

TEST(Shard, RefusesToCutGroups) {
  ModelArgs args = tiny_args();  // w2 has 96 columns
  StateDict whole;
  whole.set("layers.0.feed_forward.w2.weight", at::zeros({64, 512}, at::kByte));  // padded to 1024
  whole.set("layers.0.feed_forward.w2.scales_and_zeros", at::ones({32, 64, 2}));
  EXPECT_EQ(error_of([&] { shard_state_dict(whole, args, 0, 2, Int4Layout::kAuto); }),
            "'layers.0.feed_forward.w2' has 96 columns, 48 on each of 2 ranks, which its int4 "
            "group size 32 does not divide; use fewer ranks or a checkpoint of a smaller group "
            "size");
  whole.set("layers.0.feed_forward.w2.perm", at::arange(96, at::kInt));
  EXPECT_NE(error_of([&] {
              shard_state_dict(whole, args, 0, 2, Int4Layout::kAuto);
            }).find("'layers.0.feed_forward.w2' was quantized in activation order"),
            std::string::npos);
}

// ---- Ranks as threads

int free_port() {
  return port_of(listen_on(0));
}

// Runs body(tp) on `world_size` ranks. What a rank throws is returned by rank.
template <typename Body>
std::vector<std::string> run_ranks(int world_size, Body body) {
  RankInfo info;
  info.world_size = info.local_world_size = world_size;
  info.master_port = free_port();
  std::vector<std::string> errors(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    info.rank = info.local_rank = rank;
    threads.emplace_back([&errors, body, info] {
      try {
        const auto tp = TensorParallel::connect(info, at::kCPU, [](const std::string&) {});
        body(*tp);
        tp->finish();
      } catch (const c10::Error& e) {
        errors[static_cast<size_t>(info.rank)] = e.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST(TensorParallel, Collectives) {
  expect_no_errors(run_ranks(3, [](TensorParallel& tp) {
    const int rank = tp.rank();
    Tensor x = at::full({2, 5}, 1.0 + rank);
    tp.all_reduce(x);
    EXPECT_TRUE(x.equal(at::full({2, 5}, 6.0F)));
    Tensor residual = at::full({4}, 10.0F);
    tp.sum_into(residual, [&](Tensor& sum) { sum.add_(rank); });
    EXPECT_TRUE(residual.equal(at::full({4}, 13.0F)));
    Tensor token = at::full({1}, rank == 0 ? 42 : 7, at::kInt);
    tp.broadcast(token);
    EXPECT_EQ(token.item<int32_t>(), 42);
    const std::vector<int32_t> list = {3, 1, 2};
    EXPECT_EQ(tp.broadcast(rank == 0 ? list : std::vector<int32_t>{}), list);
    const Tensor shard = at::arange(8).view({2, 4}) + 100 * rank;  // V = 10: two are padding
    const Tensor logits = tp.gather_logits(shard, /*vocab_size=*/10);
    EXPECT_TRUE(logits[1].equal(at::tensor({4, 5, 6, 7, 104, 105, 106, 107, 204, 205})));
  }));
}

// Every kind of row, among them one whose largest logits tie across ranks and one with a NaN.
TEST(TensorParallel, SamplesWhatOneRankSamples) {
  constexpr int64_t kVocab = 1001, kRows = 6;
  at::manual_seed(1);
  const Tensor logits = at::randn({kRows, kVocab});
  logits[1].index_fill_(0, at::tensor({900, 333, 334}, at::kLong), 9.0);
  const SamplingParams params = {.temperature = at::tensor({0.0F, 0.0F, 0.8F, 1.0F, 2.0F, 0.5F}),
                                 .top_k = at::tensor({200, 0, 5, 200, 40, 1}, at::kInt),
                                 .seed = at::arange(kRows)};
  SamplingParams all_tokens = params;
  all_tokens.top_k = at::zeros({kRows}, at::kInt);
  const StepRows rows = {.tokens = at::zeros({kRows, 1}, at::kInt),
                         .pos = at::arange(kRows, at::kInt),
                         .slot = at::arange(kRows, at::kInt)};
  for (const SamplingParams& p : {params, all_tokens}) {
    Tensor expected = at::empty({kRows}, at::kInt);
    ops::sample(rows, logits, p, expected);
    expect_no_errors(run_ranks(4, [&](TensorParallel& tp) {
      const int64_t width = tp.head_rows(kVocab), begin = width * tp.rank();
      const Tensor shard = at::zeros({kMaxStepRows, width});
      const int64_t mine = std::min(width, kVocab - begin);
      shard.narrow(0, 0, kRows).narrow(1, 0, mine).copy_(logits.narrow(1, begin, mine));
      Tensor gathered = at::empty({4, kMaxStepRows, width}),
             scratch = at::empty({kMaxStepRows, kVocab}),
             next = at::empty({kMaxStepRows}, at::kInt);
      tp.sample(rows, shard, p, gathered, scratch, next);
      EXPECT_TRUE(next.narrow(0, 0, kRows).equal(expected)) << next << expected;
      shard[3][5].fill_(tp.rank() == 2 ? NAN : 0.0);
      tp.sample(rows, shard, p, gathered, scratch, next);
      EXPECT_EQ(next[3].item<int32_t>(), -1);
    }));
  }
}

TEST(TensorParallel, RanksMustAgree) {
  const auto errors = run_ranks(3, [](TensorParallel& tp) {
    tp.check_agreement({{"the checkpoint", "5 bytes"}, {"--top_k", "200"}});
    tp.check_agreement({{"the checkpoint", "5 bytes"}, {"--top_k", tp.rank() == 2 ? "7" : "200"}});
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_TRUE(
        error.starts_with("the ranks disagree on --top_k: rank 0 has '200', rank 2 has '7' "
                          "(hashes of all settings "))
        << error;
  }
}

TEST(TensorParallel, ALostRankIsNoticed) {
  RankInfo info;
  info.world_size = info.local_world_size = 2;
  info.master_port = free_port();
  std::mutex mutex;
  std::condition_variable changed;
  std::string lost;
  std::thread other([info]() mutable {
    info.rank = info.local_rank = 1;
    TensorParallel::connect(info, at::kCPU, [](const std::string&) {});  // leaves without finish()
  });
  const auto tp = TensorParallel::connect(info, at::kCPU, [&](const std::string& message) {
    const std::lock_guard lock(mutex);
    lost = message;
    changed.notify_all();
  });
  other.join();
  std::unique_lock lock(mutex);
  EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(10), [&] { return !lost.empty(); }));
  EXPECT_EQ(lost, "rank 1 ended before its work was done");
  Tensor x = at::ones({1});
  EXPECT_NE(error_of([&] { tp->all_reduce(x); }).find("the connection between the ranks broke"),
            std::string::npos);
}

TEST(TensorParallel, PortInUse) {
  const Fd taken = listen_on(0);
  RankInfo info;
  info.world_size = 2;
  info.master_port = port_of(taken);
  EXPECT_EQ(error_of([&] { TensorParallel::connect(info, at::kCPU, {}); }),
            c10::str("rank 0 of 2 cannot meet the others: rank 0 cannot listen on port ",
                     info.master_port, ": Address already in use; set MASTER_PORT to a free port"));
}

// ---- The environment

class Environment : public testing::Test {
 protected:
  ~Environment() override {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"})
      unsetenv(name);
  }
  static void set(const char* name, const char* value) { setenv(name, value, /*overwrite=*/1); }
};

TEST_F(Environment, IsTorchruns) {
  EXPECT_FALSE(rank_from_environment());
  set("WORLD_SIZE", "8");
  set("RANK", "5");
  set("LOCAL_RANK", "1");
  set("LOCAL_WORLD_SIZE", "4");
  set("MASTER_PORT", "1234");
  const auto info = rank_from_environment();
  ASSERT_TRUE(info);
  EXPECT_EQ(info->rank, 5);
  EXPECT_EQ(info->world_size, 8);
  EXPECT_EQ(info->local_rank, 1);
  EXPECT_EQ(info->master_port, 1234);
}

TEST_F(Environment, MistakesAreNamed) {
  set("WORLD_SIZE", "2");
  EXPECT_NE(error_of([] { rank_from_environment(); }).find("WORLD_SIZE=2 but no RANK"),
            std::string::npos);
  set("RANK", "2");
  EXPECT_EQ(error_of([] { rank_from_environment(); }),
            "the environment has RANK='2', expected a number from 0 to 1");
  set("RANK", "zero");
  EXPECT_EQ(error_of([] { rank_from_environment(); }),
            "the environment has RANK='zero', expected a number from 0 to 1");
}

TEST(DeviceOfRank, MoreRanksThanGpusAreRefused) {
  RankInfo info;
  info.rank = info.local_rank = 1000;
  EXPECT_EQ(device_of_rank(info, at::kCPU), at::Device(at::kCPU));
  setenv("CUDA_VISIBLE_DEVICES", "3,1", /*overwrite=*/1);
  const std::string error = error_of([&] { device_of_rank(info, at::kCUDA); });
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_TRUE(error.starts_with("rank 1000 is number 1001 on its host, which shows ")) << error;
  EXPECT_TRUE(error.ends_with("GPUs (CUDA_VISIBLE_DEVICES=3,1); start at most one rank per GPU"))
      << error;
}

}  // namespace
}  // namespace gptfast
