// Communication between GPUs. The kernels as several ranks on one GPU, each with a stream of its
// own; NCCL with one rank. Skipped without a CUDA device. tp_gpus_test.cpp is about two GPUs.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "cuda_test.h"
#include "test_util.h"
#ifdef GPTFAST_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "gptfast/decode_graph.h"
#include "gptfast/generate.h"
#include "gptfast/tp.h"
#include "ops/cuda/all_reduce.h"
#include "ops/cuda/step_ops.h"
#include "tp_socket.h"
#endif

namespace gptfast {
namespace {

#ifdef GPTFAST_CUDA

constexpr int64_t kCapacity = int64_t{kMaxStepRows} * 8192;

/// Ranks that share a GPU. Kernels of all ranks must be enqueued before the host waits for one.
struct Ranks {
  explicit Ranks(int count, int64_t capacity = kCapacity) {
    for (int r = 0; r < count; ++r) {
      streams.push_back(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
      mailboxes.push_back(at::zeros({2 * count * capacity}, ints().dtype(at::kLong)));
      counters.push_back(at::zeros({cuda::kPeerCounters + 1}, ints()));
    }
    for (int r = 0; r < count; ++r) {
      cuda::Peers p{.rank = r, .world_size = count, .capacity = capacity};
      for (int s = 0; s < count; ++s)
        p.mailbox[s] =
            reinterpret_cast<uint64_t*>(mailboxes[static_cast<size_t>(s)].data_ptr<int64_t>());
      p.rounds = reinterpret_cast<uint32_t*>(counters[static_cast<size_t>(r)].data_ptr<int32_t>());
      p.failed = p.rounds + cuda::kPeerCounters;
      p.limit_ns = 20'000'000'000;  // so that a bug is a failure
      peers.push_back(p);
    }
    c10::cuda::device_synchronize();
  }

  size_t size() const { return peers.size(); }
  cuda::Launch launch(size_t rank) const { return {.stream = streams[rank].stream()}; }
  /// `enqueue(rank)` for all ranks, each with its stream as the current one, then waits.
  void run(const std::function<void(size_t)>& enqueue) {
    c10::cuda::device_synchronize();
    for (size_t r = 0; r < size(); ++r) {
      const c10::cuda::CUDAStreamGuard guard(streams[r]);
      enqueue(r);
    }
    c10::cuda::device_synchronize();
    for (const Tensor& counter : counters)
      EXPECT_EQ(counter[cuda::kPeerCounters].item<int32_t>(), 0) << "a rank waited in vain";
  }
  void all_reduce(size_t rank, const Tensor& partial, const Tensor& x) {
    C10_CUDA_CHECK(cuda::all_reduce(launch(rank), peers[rank], partial.data_ptr<float>(),
                                    static_cast<int>(x.numel()), x.data_ptr<float>()));
  }

  std::vector<c10::cuda::CUDAStream> streams;
  std::vector<Tensor> mailboxes, counters;
  std::vector<cuda::Peers> peers;
};

using CudaTp = CudaTest;

/// Partial sums of every rank, and x + their sum in the order of the kernel.
struct Sums {
  Sums(size_t ranks, int64_t size) : x(at::randn({size}, floats())) {
    Tensor sum = at::zeros({size}, floats());
    for (size_t r = 0; r < ranks; ++r) {
      partials.push_back(at::randn({size}, floats()));
      sum = sum + partials.back();
    }
    expected = x + sum;
  }
  Tensor x, expected;
  std::vector<Tensor> partials;
};

TEST_F(CudaTp, EveryRankHasTheSameSumBitForBit) {
  for (const int count : {1, 2, 3, 8}) {
    Ranks ranks(count);
    for (const int64_t dim : {2, 62, 576, 4096, 8192}) {
      for (int64_t rows = 1; rows <= kMaxStepRows; ++rows) {
        const Sums sums(ranks.size(), rows * dim);
        std::vector<Tensor> x, partials;
        for (size_t r = 0; r < ranks.size(); ++r) {
          x.push_back(sums.x.clone());
          partials.push_back(sums.partials[r].clone());
        }
        ranks.run([&](size_t r) { ranks.all_reduce(r, partials[r], x[r]); });
        for (size_t r = 0; r < ranks.size(); ++r) {
          EXPECT_TRUE(x[r].equal(sums.expected))
              << "rank " << r << " of " << count << ", " << rows << " rows of " << dim
              << ": off by " << (x[r] - sums.expected).abs().max().item<float>() << " at "
              << (x[r] - sums.expected).abs().argmax().item<int64_t>();
          EXPECT_TRUE(partials[r].equal(at::zeros_like(partials[r])));
        }
        if (HasFailure()) return;
      }
    }
  }
}

/// The same sums again and again, in place: what a rank's buffers hold and how many numbers were
/// ever wrong.
struct Repeated {
  Repeated(const Ranks& ranks, const std::vector<Sums>& sums)
      : wrong(at::zeros({std::ssize(ranks.peers)}, ints().dtype(at::kLong))) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      x.emplace_back(), partials.emplace_back();
      for (const Sums& s : sums) {
        x[r].push_back(at::empty_like(s.x));
        partials[r].push_back(at::empty_like(s.x));
      }
    }
    // Once without a sum: the host must not wait for a kernel's code or for memory while a kernel
    // waits for its peer.
    Ranks alone(1);
    alone.run([&](size_t r) { alone.all_reduce(r, partials[0][0], x[0][0]); });
    for (size_t r = 0; r < ranks.size(); ++r) {
      for (size_t which = 0; which < sums.size(); ++which) {
        const c10::cuda::CUDAStreamGuard guard(ranks.streams[r]);
        set(sums, r, which);
        count(sums, r, which);
      }
    }
    c10::cuda::device_synchronize();
    wrong.zero_();
  }
  void set(const std::vector<Sums>& sums, size_t r, size_t which) {
    x[r][which].copy_(sums[which].x);
    partials[r][which].copy_(sums[which].partials[r]);
  }
  void count(const std::vector<Sums>& sums, size_t r, size_t which) {
    wrong[static_cast<int64_t>(r)].add_(x[r][which].ne(sums[which].expected).sum());
  }
  void enqueue(Ranks& ranks, const std::vector<Sums>& sums, size_t r, size_t which) {
    const c10::cuda::CUDAStreamGuard guard(ranks.streams[r]);
    set(sums, r, which);
    ranks.all_reduce(r, partials[r][which], x[r][which]);
    count(sums, r, which);
  }
  std::vector<std::vector<Tensor>> x, partials;
  Tensor wrong;
};

// Sizes change, no rank waits for the host between rounds, and each is behind at times.
TEST_F(CudaTp, RoundsThatFollowOneAnotherDoNotMix) {
  constexpr int kRounds = 2000;
  Ranks ranks(2);
  std::vector<Sums> sums;
  for (const int64_t size : {8192, 2, 4096 * 8, 576}) sums.emplace_back(2, size);
  Repeated repeated(ranks, sums);
  Tensor work = at::randn({512, 512}, floats()), more = at::empty_like(work);
  at::mm_out(more, work, work);
  for (int i = 0; i < kRounds; ++i) {
    for (size_t r = 0; r < 2; ++r) {
      if (i % 7 == static_cast<int>(r)) {
        const c10::cuda::CUDAStreamGuard guard(ranks.streams[r]);
        at::mm_out(more, work, work);
      }
      repeated.enqueue(ranks, sums, r, static_cast<size_t>(i) % sums.size());
    }
  }
  ranks.run([](size_t) {});
  EXPECT_EQ(repeated.wrong.sum().item<int64_t>(), 0) << repeated.wrong;
}

TEST_F(CudaTp, GraphsCanBeReplayed) {
  constexpr int kReplays = 300;
  for (const bool pdl : {false, true}) {
    Ranks ranks(2);
    const std::vector<int64_t> sizes = {8192, 576, 4096 * 8};
    std::vector<Sums> sums;
    for (const int64_t size : sizes) sums.emplace_back(2, size);
    Repeated repeated(ranks, sums);
    std::vector<cudaGraphExec_t> graphs(2);
    for (size_t r = 0; r < 2; ++r) {
      const c10::cuda::CUDAStreamGuard guard(ranks.streams[r]);
      const cudaStream_t stream = ranks.streams[r].stream();
      C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (size_t which = 0; which < sums.size(); ++which) {
        Tensor x = repeated.x[r][which], partial = repeated.partials[r][which];
        repeated.set(sums, r, which);
        C10_CUDA_CHECK(
            cuda::all_reduce({.stream = stream, .pdl = pdl && ops::cuda::overlap_kernels(kGpu)},
                             ranks.peers[r], partial.data_ptr<float>(), static_cast<int>(x.numel()),
                             x.data_ptr<float>()));
        // Twice in a row, the second time of zeros.
        C10_CUDA_CHECK(
            cuda::all_reduce({.stream = stream, .pdl = pdl && ops::cuda::overlap_kernels(kGpu)},
                             ranks.peers[r], partial.data_ptr<float>(), static_cast<int>(x.numel()),
                             x.data_ptr<float>()));
      }
      cudaGraph_t graph = nullptr;
      C10_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      C10_CUDA_CHECK(cudaGraphInstantiate(&graphs[r], graph, 0));
      cudaGraphDestroy(graph);
    }
    for (int i = 0; i < kReplays; ++i) {
      for (size_t r = 0; r < 2; ++r)
        C10_CUDA_CHECK(cudaGraphLaunch(graphs[r], ranks.streams[r].stream()));
      if (i % 50 != 49) continue;
      ranks.run([](size_t) {});
      for (size_t r = 0; r < 2; ++r) {
        for (size_t which = 0; which < sums.size(); ++which) {
          EXPECT_TRUE(repeated.x[r][which].equal(sums[which].expected))
              << "rank " << r << ", size " << sizes[which] << ", replay " << i << ", pdl " << pdl;
          repeated.x[r][which].zero_();
        }
      }
    }
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  }
}

/// A layer's output projection on every rank, and inputs for it.
struct Products {
  Products(size_t ranks, const ModelArgs& config, const FormatCase& format) {
    for (size_t r = 0; r < ranks; ++r) {
      models.push_back(random_model(config, format.scheme, format.precision, kGpu,
                                    /*seed=*/static_cast<int>(r)));
      in.push_back(at::randn({kMaxStepRows, config.n_head * config.head_dim}, floats()));
    }
  }
  const LinearImpl& w(size_t rank) const { return *models[rank]->layers[0]->attention->wo; }
  /// x + the ranks' products, in the order of the kernel.
  Tensor sum(int64_t rows, const Tensor& x) const {
    Tensor sum = at::zeros_like(x);
    for (size_t r = 0; r < models.size(); ++r) {
      Tensor part = at::zeros_like(x);
      ops::o_proj_residual(rows, in[r], w(r), part);
      sum = sum + part;
    }
    return x + sum;
  }
  std::vector<Transformer> models;
  std::vector<Tensor> in;
};

/// Several sums in a row: each rank's x afterwards is what the single products add up to, bit for
/// bit.
void expect_products_summed(int count, const ModelArgs& config, const FormatCase& format,
                            std::initializer_list<int64_t> row_counts) {
  Ranks ranks(count);
  const Products products(ranks.size(), config, format);
  for (const int64_t rows : row_counts) {
    Tensor expected = at::randn({rows, config.dim}, floats());
    std::vector<Tensor> x;
    for (size_t r = 0; r < ranks.size(); ++r) x.push_back(expected.clone());
    for (int again = 0; again < 3; ++again) expected = products.sum(rows, expected);
    ranks.run([&](size_t r) {
      for (int again = 0; again < 3; ++again) {
        ops::cuda::add_product(rows, products.in[r], products.w(r), ranks.peers[r], x[r]);
      }
    });
    for (size_t r = 0; r < ranks.size(); ++r) {
      EXPECT_TRUE(x[r].equal(expected))
          << "rank " << r << " of " << count << ", " << rows << " rows of " << config.dim << ", "
          << to_string(format.scheme.format) << ": off by "
          << (x[r] - expected).abs().max().item<float>() << " at "
          << (x[r] - expected).abs().argmax().item<int64_t>();
    }
  }
}

TEST_F(CudaTp, ProductsAreSummedAsTheyAreComputed) {
  for (const FormatCase& format : kFormats) {
    for (const int count : {1, 2, 3}) {
      expect_products_summed(count, odd_config(), format, {1, 2, 4, 5, 8});
      if (HasFailure()) return;
    }
  }
}

// A block on nearly every SM. Two ranks of one GPU find room for that with one row, if no kernel
// starts before its predecessor has ended.
TEST_F(CudaTp, ProductsOfManyBlocksAreSummed) {
  ModelArgs config = odd_config();
  config.n_head = config.n_local_heads = 16;
  config.head_dim = 128;
  config.dim = 2048;
  setenv("GPTFAST_PDL", "0", 1);
  for (const FormatCase& format : kFormats) expect_products_summed(2, config, format, {1});
  unsetenv("GPTFAST_PDL");
}

TEST_F(CudaTp, Rank0SamplesForAll) {
  constexpr int64_t kVocab = 1001;
  for (const int count : {1, 2, 3}) {
    for (const auto& [B, S] : {std::pair<int64_t, int64_t>{1, 1}, {1, 5}, {4, 2}, {8, 1}}) {
      Ranks ranks(count);
      const int64_t width = (kVocab + count - 1) / count;
      const Tensor logits = at::randn({kMaxStepRows, kVocab}, floats());
      const Tensor padded = at::constant_pad_nd(logits, {0, width * count - kVocab}, 1e9);
      Tensor gathered = at::full({kMaxStepRows, kVocab}, -7.0, floats());
      std::vector<Tensor> shards, tokens;
      for (int r = 0; r < count; ++r) {
        shards.push_back(padded.narrow(1, r * width, width).contiguous());
        tokens.push_back(at::full({kMaxStepRows}, r == 0 ? 5 : -1, ints()));
        if (r == 0) tokens[0].copy_(at::arange(100, 100 + kMaxStepRows, ints()));
      }
      ranks.run([&](size_t r) {
        for (int again = 0; again < 3; ++again) {
          C10_CUDA_CHECK(cuda::gather_logits(ranks.launch(r), ranks.peers[r],
                                             {.shard = shards[r].data_ptr<float>(),
                                              .width = static_cast<int>(width),
                                              .logits = gathered.data_ptr<float>(),
                                              .vocab = static_cast<int>(kVocab),
                                              .batch = static_cast<int>(B),
                                              .seq_len = static_cast<int>(S)}));
          C10_CUDA_CHECK(cuda::broadcast_tokens(ranks.launch(r), ranks.peers[r],
                                                tokens[r].data_ptr<int32_t>(),
                                                static_cast<int>(B)));
        }
      });
      for (int64_t row = 0; row < kMaxStepRows; ++row) {
        const bool sampled = row < B * S && row % S == S - 1;
        EXPECT_TRUE(gathered[row].equal(sampled ? logits[row] : at::full_like(logits[row], -7.0)))
            << count << " ranks, batch " << B << " of " << S << ", row " << row;
      }
      for (int r = 1; r < count; ++r)
        EXPECT_TRUE(tokens[static_cast<size_t>(r)].narrow(0, 0, B).equal(tokens[0].narrow(0, 0, B)))
            << tokens[static_cast<size_t>(r)];
    }
  }
}

TEST_F(CudaTp, ATestRoundEndsWithoutItsPeer) {
  Ranks ranks(2);
  ranks.peers[0].limit_ns = 50'000'000;
  const Tensor x = at::zeros({576}, floats()), partial = at::ones({576}, floats());
  ranks.all_reduce(0, partial, x);
  c10::cuda::device_synchronize();
  EXPECT_EQ(ranks.counters[0][cuda::kPeerCounters].item<int32_t>(), 1);
}

// ---- One rank, which NCCL takes as well.

std::shared_ptr<TensorParallel> one_rank(const char* intra_node) {
  const Fd probe = listen_on(/*port=*/0);
  RankInfo info;
  info.master_port = port_of(probe);
  info.listen_fd = dup(probe.get());
  setenv("ENABLE_INTRA_NODE_COMM", intra_node, 1);
  auto tp = TensorParallel::connect(info, kGpu,
                                    [](const std::string& message) { ADD_FAILURE() << message; });
  unsetenv("ENABLE_INTRA_NODE_COMM");
  return tp;
}

TEST_F(CudaTp, TheCapturedStepOfOneRankGivesTheTokensOfNone) {
  const ModelArgs config = ModelArgs::from_json_file(golden("tiny-gqa/config.json"));
  for (const WeightScheme scheme :
       {WeightScheme{WeightFormat::kBFloat16}, WeightScheme{WeightFormat::kInt8}}) {
    GenerateOptions options;
    options.max_new_tokens = 40;
    options.sampling = {.temperature = 0.8, .top_k = 50, .seed = 5};
    Transformer alone = random_model(config, scheme, at::kBFloat16, kGpu, /*seed=*/3);
    std::vector<std::vector<int32_t>> expected;
    for (const int64_t batch : {1, 4}) {
      options.batch_size = batch;
      for (const auto& row : generate(alone, {1, 2, 3}, options).rows)
        expected.push_back(row.tokens);
    }
    for (const char* path : {"0", "1"}) {
      const auto tp = one_rank(path);
      EXPECT_STREQ(tp->all_reduce_path(), *path == '0' ? "nccl" : "one-shot");
      Transformer model = random_model(config, scheme, at::kBFloat16, kGpu, /*seed=*/3, tp);
      ASSERT_TRUE(DecodeGraph::supported(*model));
      size_t row = 0;
      for (const int64_t batch : {1, 4}) {
        options.batch_size = batch;
        for (const auto& tokens : generate(model, {1, 2, 3}, options).rows)
          EXPECT_EQ(tokens.tokens, expected[row++]) << tp->all_reduce_path();
      }
      model = nullptr;
      tp->finish();
    }
  }
}

#else

TEST(CudaTp, Skipped) {
  GTEST_SKIP() << "built without CUDA";
}

#endif

}  // namespace
}  // namespace gptfast
