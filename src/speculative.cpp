#include "gptfast/speculative.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "gptfast/generate.h"
#include "gptfast/tp.h"
#include "philox.h"

namespace gptfast {
namespace {

/// Draws an index of a distribution by argmax(p / e), the noise being that of `stream` at position
/// pos.
int32_t sample_probs(const Tensor& probs /* [V] */, uint64_t seed, int64_t pos,
                     NoiseStream stream) {
  const float* p = probs.const_data_ptr<float>();
  int64_t best = 0;
  float best_key = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < probs.numel(); ++i) {
    if (p[i] <= 0) continue;
    const float key = std::log(p[i]) + gumbel_noise(seed, static_cast<uint32_t>(pos),
                                                    static_cast<uint32_t>(i), stream);
    if (key > best_key) {
      best_key = key;
      best = i;
    }
  }
  return static_cast<int32_t>(best);
}

Tensor row_probs(const Tensor& logits, const SamplingOptions& sampling) {
  return logits_to_probs(logits, sampling.temperature, sampling.top_k).to(at::kCPU).contiguous();
}

int32_t sample_logits(const Tensor& row, const SamplingOptions& sampling, int64_t pos) {
  const Tensor host = row.to(at::kCPU).contiguous();
  return sample_row(host.const_data_ptr<float>(), host.numel(), sampling.temperature,
                    sampling.top_k, sampling.seed, pos);
}

/// The distribution to draw from after a rejection: the part of p that the draft's q did not offer.
Tensor residual(const Tensor& p, const Tensor& q) {
  const Tensor rest = (p - q).clamp_min(0);
  // All zero only when p <= q everywhere, that is p == q up to rounding: then p itself is the right
  // distribution.
  return rest.sum().item<float>() > 0 ? rest : p;
}

}  // namespace

void check_draft_model(const TransformerImpl& draft, const TransformerImpl& target,
                       int64_t max_seq_length) {
  TORCH_CHECK(draft.config.vocab_size == target.config.vocab_size,
              "the draft model's vocabulary has ", draft.config.vocab_size,
              " tokens and the model's ", target.config.vocab_size,
              "; a draft must share its model's tokenizer");
  TORCH_CHECK(max_seq_length <= draft.config.block_size, "a text of up to ", max_seq_length,
              " tokens does not fit the draft model's context of ", draft.config.block_size,
              "; ask for fewer tokens");
}

DraftModel::DraftModel(Transformer& draft, std::span<const int32_t> prompt, int64_t max_seq_length)
    : draft_(draft), cached_(static_cast<int64_t>(prompt.size())) {
  draft->setup_caches(/*max_batch_size=*/1, max_seq_length);
  prefill(draft, {prompt.begin(), prompt.end()}, /*start_pos=*/0);
}

Draft DraftModel::draft(std::span<const int32_t> text, int64_t k, const SamplingOptions& sampling) {
  Draft result;
  std::vector<int32_t>
      unseen(text.begin() + cached_,
             text.end());  // the last token, and one more after a fully accepted draft
  std::vector<Tensor> probs;
  for (int64_t i = 0; i < k; ++i) {
    const Tensor logits = verify(draft_, unseen, cached_)[static_cast<int64_t>(unseen.size()) - 1];
    cached_ += static_cast<int64_t>(unseen.size());
    int32_t token = sample_logits(logits, sampling, cached_ - 1);
    if (draft_->tp() != nullptr) token = draft_->tp()->broadcast({token})[0];
    if (token < 0) break;  // a draft whose logits are NaN proposes nothing more
    if (sampling.temperature > 0) probs.push_back(row_probs(logits, sampling));
    result.tokens.push_back(token);
    unseen = {token};
  }
  if (!probs.empty()) result.probs = at::stack(probs);
  return result;
}

std::vector<int32_t> lookup_draft(std::span<const int32_t> text, int64_t k) {
  const auto size = static_cast<int64_t>(text.size());
  for (int64_t n = std::min(kLookupNgram, size - 1); n >= 1; --n) {
    const auto suffix = text.last(static_cast<size_t>(n));
    for (int64_t end = size - 1; end >= n;
         --end) {  // the latest occurrence that ends before the text does
      if (!std::ranges::equal(text.subspan(static_cast<size_t>(end - n), static_cast<size_t>(n)),
                              suffix))
        continue;
      const auto follow =
          text.subspan(static_cast<size_t>(end), static_cast<size_t>(std::min(k, size - end)));
      return {follow.begin(), follow.end()};
    }
  }
  return {};
}

Tensor verify(Transformer& model, std::span<const int32_t> tokens, int64_t pos) {
  const auto count = static_cast<int64_t>(tokens.size());
  const auto ints = at::TensorOptions(model->device()).dtype(at::kInt);
  const Tensor ids = at::tensor(std::vector<int32_t>(tokens.begin(), tokens.end()), at::kInt)
                         .to(model->device())
                         .unsqueeze(0);
  if (model->reference()) {
    return model->forward(ids, at::arange(pos, pos + count, ints.dtype(at::kLong)))
        .squeeze(0)
        .to(at::kFloat);
  }
  const SamplingParams greedy =
      make_sampling_params({.temperature = 0}, /*batch_size=*/1, model->device());
  std::vector<Tensor> logits;
  for (int64_t begin = 0; begin < count; begin += kMaxStepRows) {
    const int64_t rows = std::min(kMaxStepRows, count - begin);
    model->step(ids.narrow(1, begin, rows).contiguous(), at::full({1}, pos + begin, ints),
                at::zeros({1}, ints), greedy);
    logits.push_back(model->step_logits(rows).clone());
  }
  return at::cat(logits);
}

std::vector<int32_t> accept(const Draft& draft, const Tensor& logits,
                            const SamplingOptions& sampling, int64_t pos) {
  std::vector<int32_t> accepted;
  for (size_t i = 0; i < draft.tokens.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    const int32_t token = draft.tokens[i];
    if (sampling.temperature == 0) {  // one-hot distributions: accept the argmax, else take it
      accepted.push_back(sample_logits(logits[row], sampling, pos + row));
      if (accepted.back() != token) return accepted;
      continue;
    }
    const Tensor p = row_probs(logits[row], sampling);
    const Tensor q =
        draft.probs.defined()
            ? draft.probs[row]
            : at::one_hot(at::scalar_tensor(token, at::kLong), p.numel()).to(at::kFloat);
    const float chance = p[token].item<float>() / q[token].item<float>();
    if (std::isnan(chance)) return {-1};
    if (uniform_noise(sampling.seed, static_cast<uint32_t>(pos + row), 0, NoiseStream::kAccept) <
        chance) {
      accepted.push_back(token);
      continue;
    }
    accepted.push_back(
        sample_probs(residual(p, q), sampling.seed, pos + row, NoiseStream::kResidual));
    return accepted;
  }
  const auto last = static_cast<int64_t>(draft.tokens.size());
  accepted.push_back(sample_logits(logits[last], sampling, pos + last));
  return accepted;
}

}  // namespace gptfast
