#include "ops/reference.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "gptfast/model.h"

namespace gptfast::ops::reference {
namespace {

/// Cache slot and position of each row, on the host.
struct HostRows {
  explicit HostRows(const StepRows& rows)
      : seq_len(rows.seq_len()), pos(rows.pos.to(at::kCPU)), slot(rows.slot.to(at::kCPU)) {}
  int64_t position(int64_t r) const {
    return pos.const_data_ptr<int32_t>()[r / seq_len] + r % seq_len;
  }
  int64_t cache_slot(int64_t r) const { return slot.const_data_ptr<int32_t>()[r / seq_len]; }

  int64_t seq_len;
  Tensor pos, slot;
};

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return x * at::rsqrt(at::mean(x * x, /*dim=*/-1, /*keepdim=*/true) + eps) * weight.to(at::kFloat);
}

/// Each row by a product of its own: a matrix product's order of summation may depend on the number
/// of rows.
Tensor rowwise_linear(const Tensor& x /* [M, K] */, const LinearImpl& linear) {
  const Tensor weight = linear.dequantize().to(x.device());  // int4 files stay on the host
  std::vector<Tensor> rows;
  for (int64_t r = 0; r < x.size(0); ++r) rows.push_back(at::linear(x.narrow(0, r, 1), weight));
  return at::cat(rows);
}

}  // namespace

void embed(const StepRows& rows, const Tensor& table, Tensor& x) {
  const Tensor ids = rows.tokens.flatten().to(at::kLong);
  const Tensor valid = ids.ge(0).logical_and(ids.lt(table.size(0))).unsqueeze(1);
  const Tensor found = at::embedding(table, ids.clamp(0, table.size(0) - 1)).to(at::kFloat);
  x.narrow(0, 0, rows.rows())
      .copy_(at::where(valid, found, std::numeric_limits<float>::quiet_NaN()));
}

void rms_qkv_rope_append(const StepRows& rows, const Tensor& x, const Tensor& norm_weight,
                         double eps, const LinearImpl& wqkv, const Tensor& freqs_cis, Tensor& q,
                         Tensor& k_cache, Tensor& v_cache) {
  const HostRows host(rows);
  const int64_t M = rows.rows(), H = q.size(1), Hkv = k_cache.size(1), Dh = q.size(2);
  const Tensor qkv =
      rowwise_linear(rms_norm(x.narrow(0, 0, M), norm_weight, eps), wqkv);  // [M, (H + 2 Hkv) Dh]
  for (int64_t r = 0; r < M; ++r) {
    const int64_t pos = host.position(r), slot = host.cache_slot(r);
    const Tensor cos = freqs_cis[pos].select(-1, 0), sin = freqs_cis[pos].select(-1, 1);  // [Dh/2]
    const auto rotate = [&](const Tensor& heads) {                                        // [h, Dh]
      const Tensor pairs = heads.reshape({heads.size(0), Dh / 2, 2});
      const Tensor re = pairs.select(-1, 0), im = pairs.select(-1, 1);
      return at::stack({re * cos - im * sin, im * cos + re * sin}, /*dim=*/-1)
          .flatten(/*start_dim=*/1);
    };
    const auto parts = qkv[r].split_with_sizes({H * Dh, Hkv * Dh, Hkv * Dh});
    q[r].copy_(rotate(parts[0].view({H, Dh})));
    k_cache[slot].select(1, pos).copy_(rotate(parts[1].view({Hkv, Dh})));
    v_cache[slot].select(1, pos).copy_(parts[2].view({Hkv, Dh}));
  }
}

void attention_decode(const StepRows& rows, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& y) {
  const HostRows host(rows);
  const int64_t H = q.size(1), Hkv = k_cache.size(1), Dh = q.size(2);
  for (int64_t r = 0; r < rows.rows(); ++r) {
    const auto used = [&](const Tensor& cache) {  // [Hkv, pos + 1, Dh]
      return cache[host.cache_slot(r)].narrow(1, 0, host.position(r) + 1).to(at::kFloat);
    };
    const Tensor heads = q[r].view({Hkv, H / Hkv, Dh});
    const Tensor scores =
        at::matmul(heads, used(k_cache).transpose(1, 2)) / std::sqrt(static_cast<double>(Dh));
    y[r].copy_(at::matmul(at::softmax(scores, -1), used(v_cache)).flatten());
  }
}

void o_proj_residual(int64_t rows, const Tensor& y, const LinearImpl& wo, Tensor& x) {
  x.narrow(0, 0, rows).add_(rowwise_linear(y.narrow(0, 0, rows), wo));
}

void rms_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& w1, const LinearImpl& w3, Tensor& h) {
  const Tensor n = rms_norm(x.narrow(0, 0, rows), norm_weight, eps);
  h.narrow(0, 0, rows).copy_(at::silu(rowwise_linear(n, w1)) * rowwise_linear(n, w3));
}

void down_proj_residual(int64_t rows, const Tensor& h, const LinearImpl& w2, Tensor& x) {
  x.narrow(0, 0, rows).add_(rowwise_linear(h.narrow(0, 0, rows), w2));
}

// A mixture is made of the dense ops, so that a device without kernels of its own for it runs its
// dense ones.

namespace {

void choose_experts(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                    const LinearImpl& gate, StepExperts& experts) {
  ops::rms_lm_head(rows, x, norm_weight, eps, gate, experts.scores);
  const int64_t A = experts.index.size(1);
  const Tensor scores = at::softmax(experts.scores.narrow(0, 0, rows), /*dim=*/-1);  // [M, E]
  const auto [sorted, order] = scores.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const Tensor largest = sorted.narrow(1, 0, A);
  experts.index.narrow(0, 0, rows).copy_(order.narrow(1, 0, A));
  experts.weight.narrow(0, 0, rows).copy_(largest / largest.sum(/*dim=*/-1, /*keepdim=*/true));
}

/// Calls body(row, choice, expert) for each row's experts, choice = row * A + a.
template <class Body>
void for_each_choice(int64_t rows, const ConditionalFeedForwardImpl& cond_ffn,
                     const StepExperts& experts, const Body& body) {
  const int64_t A = experts.index.size(1);
  const Tensor on_host = experts.index.cpu();
  const auto* index = on_host.const_data_ptr<int32_t>();
  for (int64_t choice = 0; choice < rows * A; ++choice) {
    body(choice / A, choice, *cond_ffn.experts[static_cast<size_t>(index[choice])]);
  }
}

}  // namespace

void moe_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& gate, const ConditionalFeedForwardImpl& cond_ffn,
                      StepExperts& experts, Tensor& h) {
  choose_experts(rows, x, norm_weight, eps, gate, experts);
  for_each_choice(rows, cond_ffn, experts, [&](int64_t row, int64_t choice, const auto& expert) {
    Tensor out = h.narrow(0, choice, 1);
    ops::rms_gate_up_silu(1, x.narrow(0, row, 1), norm_weight, eps, *expert.w1, *expert.w3, out);
  });
}

void moe_down_proj_residual(int64_t rows, const Tensor& h,
                            const ConditionalFeedForwardImpl& cond_ffn, const StepExperts& experts,
                            Tensor& x) {
  const Tensor weighted = h.narrow(0, 0, rows * experts.index.size(1)) *
                          experts.weight.narrow(0, 0, rows).reshape({-1, 1});
  for_each_choice(rows, cond_ffn, experts, [&](int64_t row, int64_t choice, const auto& expert) {
    Tensor out = x.narrow(0, row, 1);
    ops::down_proj_residual(1, weighted.narrow(0, choice, 1), *expert.w2, out);
  });
}

void rms_lm_head(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                 const LinearImpl& output, Tensor& logits) {
  logits.narrow(0, 0, rows)
      .copy_(rowwise_linear(rms_norm(x.narrow(0, 0, rows), norm_weight, eps), output));
}

void sample(const StepRows& rows, const Tensor& logits, const SamplingParams& params,
            Tensor& next) {
  const HostRows host(rows);
  const int64_t S = rows.seq_len(), V = logits.size(1);
  const Tensor host_logits = logits.narrow(0, 0, rows.rows()).to(at::kCPU);
  const Tensor temperature = params.temperature.to(at::kCPU), top_k = params.top_k.to(at::kCPU),
               seed = params.seed.to(at::kCPU);
  for (int64_t b = 0; b < rows.pos.numel(); ++b) {
    const int64_t last = b * S + S - 1;
    next[b].fill_(sample_row(host_logits.const_data_ptr<float>() + last * V, V,
                             temperature.const_data_ptr<float>()[b],
                             top_k.const_data_ptr<int32_t>()[b], seed.const_data_ptr<int64_t>()[b],
                             host.position(last)));
  }
}

}  // namespace gptfast::ops::reference
