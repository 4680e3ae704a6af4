// The kernels between the steps of a speculative round (speculative_graph.h). Conventions of
// kernels.h; semantics and random numbers of speculative.cpp.
#pragma once

#include "ops/cuda/kernels.h"

namespace gptfast::cuda {

/// What a round reads and writes of the text's state; one object on the device.
struct RoundState {
  int64_t seed;
  float temperature;
  int32_t top_k;
  int32_t pos;      ///< of the text's last token, which is in no cache yet
  int32_t end;      ///< tokens that the text may have at most
  int32_t round;    ///< rounds since the start
  int32_t drafted;  ///< tokens of this round's draft that may be accepted; -1: the text has its end
};

/// The largest logit of a row and the sum of exp((logit - max) / temperature) over the top_k.
struct RowStats {
  float max;
  float pivot;     ///< logits below it have no probability
  float sum;       ///< not set at temperature 0
  int32_t argmax;  ///< -1: the row holds NaN
};

struct RoundArgs {
  RoundState* state = nullptr;
  int32_t* text = nullptr;       ///< [at least state->end] all tokens
  int k = 0;                     ///< drafted tokens of a round
  int32_t* tokens = nullptr;     ///< [k + 1] of the verification: the text's last one, the draft
  int32_t* positions = nullptr;  ///< [k / rows_of_step + 1] of the verification's steps
  int rows_of_step = 0;
  int32_t* first_tokens = nullptr;  ///< [2] the text's last two, which the draft's first step feeds
  int32_t* draft_token = nullptr;   ///< [1] what its next step feeds
  int32_t* draft_pos = nullptr;     ///< [1] position of the first token of its next step
};

/// Inputs of a round's steps. With `lookup` the draft too: the tokens that followed the latest
/// earlier occurrence of the text's longest suffix of up to `ngram` tokens.
cudaError_t begin_round(const Launch& launch, const RoundArgs& args, bool lookup, int ngram);

/// After step `index` of the draft: `next` [1] becomes token `index` of the draft, the row
/// `logits` [vocab] is kept in `kept` [vocab] unless the temperature is 0.
cudaError_t keep_draft(const Launch& launch, const RoundArgs& args, int index, const int32_t* next,
                       const float* logits, float* kept, int vocab);

struct AcceptArgs {
  RoundArgs round;
  const float* logits = nullptr;        ///< [k + 1, vocab] of the verification
  const float* draft_logits = nullptr;  ///< [k, vocab]; null: every drafted token was certain
  int vocab = 0;
  RowStats* stats = nullptr;        ///< [2 k + 1] scratch
  const int32_t* forced = nullptr;  ///< [forced_rounds] drafts to accept, for benchmarks
  int forced_rounds = 0;            ///< 0: accept what should be
  int32_t* history = nullptr;       ///< [history_rounds, k + 2] host memory: a count and the tokens
  int history_rounds = 0;
};
/// Accepts drafted tokens and draws the one after them (accept() of speculative.h); they join the
/// text, and the state moves on. A text that has its end gets no more.
cudaError_t accept_round(const Launch& launch, const AcceptArgs& args);

}  // namespace gptfast::cuda
