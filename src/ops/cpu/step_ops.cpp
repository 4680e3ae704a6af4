#include "ops/cpu/step_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "gptfast/model.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/thread_pool.h"

namespace gptfast::ops::cpu {

using gptfast::cpu::Dtype;
using gptfast::cpu::Format;
using gptfast::cpu::Kernels;
using gptfast::cpu::kernels;
using gptfast::cpu::kRowTile;
using gptfast::cpu::Range;
using gptfast::cpu::ThreadPool;
using gptfast::cpu::Weight;

static_assert(gptfast::cpu::kMaxRows == kMaxStepRows && gptfast::cpu::kSplit == kAttentionSplit);

namespace {

// Pieces of a stage's rows for each thread: enough that a thread held up by another process leaves
// little for the others to wait for, few enough that the memory streams stay long.
constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kMaxPieceBytes = 256 << 10;
constexpr int64_t kMinPieceBytes = 16 << 10;

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    default:
      TORCH_CHECK(false, "the CPU kernels take float32, bfloat16 and float16, got a tensor of ",
                  tensor.scalar_type());
  }
}

int64_t bytes_per_row(const Weight& weight) {
  switch (weight.format) {
    case Format::kFloat32:
      return weight.k * 4;
    case Format::kInt8:
      return weight.k;
    case Format::kInt4:
      return weight.k / 2 + 4 * weight.k / weight.groupsize;
    default:
      return weight.k * 2;
  }
}

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

int64_t piece_rows(const Weight& weight, int threads) {
  const int64_t row_bytes = std::max<int64_t>(1, bytes_per_row(weight));
  const int64_t rows = std::clamp(weight.n / (threads * kPiecesPerThread),
                                  kMinPieceBytes / row_bytes, kMaxPieceBytes / row_bytes);
  return round_up(std::max<int64_t>(rows, 1), kRowTile);
}

/// Starts to read the first weights while the activations are prepared.
void prefetch_start(const Weight& weight, int64_t row) {
  constexpr int64_t kBytes = 4096;  // what a core can have under way at once, about
  const auto* start = static_cast<const std::byte*>(weight.data) + row * bytes_per_row(weight);
  for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(start + line);
}

/// The row of a buffer for activation row m of a projection.
int64_t place(const int64_t* places, int64_t m) {
  return places == nullptr ? m : places[m];
}

/// Activations [rows, k] that a projection reads, through a norm if there is one.
struct Input {
  const float* x;
  int64_t rows;
  int64_t k;
  const void* norm_weight;  // [k], null: no norm
  Dtype norm_dtype;
  float eps;
  const int64_t* places;  // [rows], null: the first rows of x

  const float* row(int64_t m) const { return x + place(places, m) * k; }
};

Input input_of(const Tensor& x, int64_t rows, const Weight& weight,
               const Tensor* norm_weight = nullptr, double eps = 0,
               const int64_t* places = nullptr) {
  TORCH_CHECK(x.is_contiguous() && x.size(-1) * (x.dim() == 3 ? x.size(1) : 1) == weight.k &&
                  rows <= x.size(0),
              "activations of shape ", x.sizes(), " do not fit ", rows, " rows of a layer with ",
              weight.k, " inputs");
  return {.x = x.const_data_ptr<float>(),
          .rows = rows,
          .k = weight.k,
          .norm_weight = norm_weight != nullptr ? norm_weight->const_data_ptr() : nullptr,
          .norm_dtype = norm_weight != nullptr ? dtype_of(*norm_weight) : Dtype::kFloat32,
          .eps = static_cast<float>(eps),
          .places = places};
}

/// What a thread computed of a stage: rows `range` of each of the weights, for every activation
/// row.
class Products {
 public:
  Products(float* data, int64_t stride, int64_t rows) : data_(data), stride_(stride), rows_(rows) {}
  /// weight w, activation row m: one value for each row of the range.
  float* operator()(int64_t w, int64_t m) const { return data_ + (w * rows_ + m) * stride_; }

 private:
  float* data_;
  int64_t stride_, rows_;
};

/// Writes what gemv with `weight` reads of the input to `out`.
void prepare_rows(const Input& input, const Weight& weight, std::byte* out) {
  const Kernels& kernel = kernels();
  const size_t stride = kernel.activation_bytes(weight.format, input.k, weight.groupsize);
  for (int64_t m = 0; m < input.rows; ++m, out += stride) {
    kernel.prepare(weight.format,
                   {.x = input.row(m),
                    .norm_weight = input.norm_weight,
                    .norm_dtype = input.norm_dtype,
                    .eps = input.eps,
                    .k = input.k,
                    .groupsize = weight.groupsize,
                    .perm = weight.perm},
                   out);
  }
}

bool read_the_same_rows(const Weight& a, const Weight& b) {
  return a.format == b.format && a.groupsize == b.groupsize && a.perm == b.perm;
}

/// Every stage with weights: products of `input` with pieces of the weights (one, or two of one
/// shape), each piece handed to `epilogue(range, products)` on the thread that made it.
template <class Epilogue>
void project(const Input& input, std::span<const Weight> weights, const Epilogue& epilogue) {
  const Kernels& kernel = kernels();
  ThreadPool& pool = ThreadPool::get();
  const int64_t n = weights[0].n;
  const int64_t piece = piece_rows(weights[0], pool.size());
  const size_t product_bytes = weights.size() * input.rows * piece * sizeof(float);
  // Behind the products lie the prepared rows of each weight, or those that both read.
  std::array<size_t, 2> start{};
  size_t bytes = product_bytes;
  for (size_t w = 0; w < weights.size(); ++w) {
    if (w > 0 && read_the_same_rows(weights[w], weights[0])) {
      start[w] = start[0];
      continue;
    }
    start[w] = bytes;
    bytes += input.rows * kernel.activation_bytes(weights[w].format, input.k, weights[w].groupsize);
  }
  pool.run([&](int thread) noexcept {
    Range range{};
    if (!pool.next(thread, n, piece, range)) return;
    for (const Weight& weight : weights) prefetch_start(weight, range.begin);
    std::byte* memory = pool.scratch(thread, bytes);
    for (size_t w = 0; w < weights.size(); ++w) {
      if (w == 0 || start[w] != start[0]) prepare_rows(input, weights[w], memory + start[w]);
    }
    const Products products(reinterpret_cast<float*>(memory), piece, input.rows);
    do {
      for (size_t w = 0; w < weights.size(); ++w) {
        kernel.gemv(weights[w], range.begin, range.end, memory + start[w],
                    static_cast<int>(input.rows), products(static_cast<int64_t>(w), 0), piece);
      }
      epilogue(range, products);
    } while (pool.next(thread, n, piece, range));
  });
}

/// Where each row of a step stands.
struct Rows {
  explicit Rows(const StepRows& rows)
      : count(rows.rows()),
        seq_len(rows.seq_len()),
        pos(rows.pos.const_data_ptr<int32_t>()),
        slot(rows.slot.const_data_ptr<int32_t>()) {}
  int64_t position(int64_t r) const { return pos[r / seq_len] + r % seq_len; }
  int64_t cache_slot(int64_t r) const { return slot[r / seq_len]; }

  /// Kernels index the caches with these numbers, so a wrong one must not get through.
  void check(const Tensor& cache) const {
    for (int64_t r = 0; r < count; ++r) {
      TORCH_CHECK(position(r) >= 0 && position(r) < cache.size(2) && cache_slot(r) >= 0 &&
                      cache_slot(r) < cache.size(0),
                  "row ", r, " stands at position ", position(r), " of slot ", cache_slot(r),
                  ", but the cache has ", cache.size(0), " slots of ", cache.size(2), " positions");
    }
  }

  int64_t count;
  int64_t seq_len;
  const int32_t* pos;
  const int32_t* slot;
};

/// One KV cache [slots, Hkv, T, Dh].
struct Cache {
  explicit Cache(const Tensor& tensor)
      : data(static_cast<std::byte*>(tensor.data_ptr())),
        dtype(dtype_of(tensor)),
        heads(tensor.size(1)),
        length(tensor.size(2)),
        head_dim(tensor.size(3)),
        item(tensor.element_size()) {
    TORCH_CHECK(tensor.is_contiguous(), "a KV cache must be contiguous");
  }
  std::byte* at(int64_t slot, int64_t head, int64_t pos) const {
    return data + ((slot * heads + head) * length + pos) * head_dim * item;
  }

  std::byte* data;
  Dtype dtype;
  int64_t heads, length, head_dim, item;
};

/// Rotates interleaved pairs x[0..n) of a head, of which x[0] is column `first`, by cis [Dh/2, 2].
void rotate(float* x, int64_t n, int64_t first, const float* cis) {
  for (int64_t i = 0; i < n; i += 2) {
    const float cos = cis[first + i];
    const float sin = cis[first + i + 1];
    const float re = x[i];
    const float im = x[i + 1];
    x[i] = re * cos - im * sin;
    x[i + 1] = im * cos + re * sin;
  }
}

}  // namespace

void embed(const StepRows& rows, const Tensor& table, Tensor& x) {
  const int64_t dim = table.size(1);
  const Dtype dtype = dtype_of(table);
  const auto* data = static_cast<const std::byte*>(table.const_data_ptr());
  const auto* tokens = rows.tokens.const_data_ptr<int32_t>();
  auto* out = x.data_ptr<float>();
  for (int64_t r = 0; r < rows.rows(); ++r, out += dim) {
    if (tokens[r] < 0 || tokens[r] >= table.size(0)) {
      std::fill_n(out, dim, std::numeric_limits<float>::quiet_NaN());
    } else {
      kernels().to_float(data + tokens[r] * dim * table.element_size(), dtype, dim, out);
    }
  }
}

void rms_qkv_rope_append(const StepRows& step_rows, const Tensor& x, const Tensor& norm_weight,
                         double eps, const LinearImpl& wqkv, const Tensor& freqs_cis, Tensor& q,
                         Tensor& k_cache, Tensor& v_cache) {
  const Rows rows(step_rows);
  rows.check(k_cache);
  const Cache k(k_cache);
  const Cache v(v_cache);
  const int64_t H = q.size(1);
  const int64_t Dh = q.size(2);
  const std::array weights = {weight_of(wqkv)};
  const auto* cis = freqs_cis.const_data_ptr<float>();
  auto* queries = q.data_ptr<float>();
  const auto place = [&](int64_t r, int64_t head, int64_t column, int64_t n, float* values) {
    if (head < H + k.heads) rotate(values, n, column, cis + rows.position(r) * Dh);
    if (head < H) {
      std::memcpy(queries + (r * H + head) * Dh + column, values, n * sizeof(float));
      return;
    }
    const Cache& cache = head < H + k.heads ? k : v;
    const int64_t cache_head = (head - H) % k.heads;
    std::byte* out =
        cache.at(rows.cache_slot(r), cache_head, rows.position(r)) + column * cache.item;
    kernels().from_float(values, n, cache.dtype, out);
  };
  project(input_of(x, rows.count, weights[0], &norm_weight, eps), weights,
          [&](const Range& range, const Products& products) {
            for (int64_t r = 0; r < rows.count; ++r) {
              for (int64_t n = range.begin; n < range.end;) {  // in runs that stay within a head
                const int64_t end = std::min(range.end, (n / Dh + 1) * Dh);
                place(r, n / Dh, n % Dh, end - n, products(0, r) + (n - range.begin));
                n = end;
              }
            }
          });
}

void attention_decode(const StepRows& step_rows, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, Tensor& partials, Tensor& y) {
  const Rows rows(step_rows);
  rows.check(k_cache);
  const Kernels& kernel = kernels();
  ThreadPool& pool = ThreadPool::get();
  const Cache k(k_cache);
  const Cache v(v_cache);
  const int64_t H = q.size(1);
  const int64_t Dh = q.size(2);
  const int64_t group = H / k.heads;
  const int64_t split_stride = Dh + 2;
  const int64_t head_stride = partials.size(2) * split_stride;
  const auto* queries = q.const_data_ptr<float>();
  auto* parts = partials.data_ptr<float>();
  auto* out = y.data_ptr<float>();
  const auto splits_of = [&](int64_t r) { return rows.position(r) / kAttentionSplit + 1; };
  int64_t most_splits = 0;
  for (int64_t r = 0; r < rows.count; ++r) most_splits = std::max(most_splits, splits_of(r));

  // An item is a row, a split, and query heads that share a key/value head: all of them, unless
  // that keeps threads idle.
  const int64_t whole_items = rows.count * k.heads * most_splits;
  const int64_t shares =
      std::clamp<int64_t>((2 * pool.size() + whole_items - 1) / whole_items, 1, group);
  const int64_t share_heads = (group + shares - 1) / shares;
  const auto attend = [&](int64_t item, float* scratch) noexcept {
    const int64_t share = item % shares;
    const int64_t split = item / shares % most_splits;
    const int64_t kv_head = item / shares / most_splits % k.heads;
    const int64_t r = item / shares / most_splits / k.heads;
    const int64_t heads = std::min(share_heads, group - share * share_heads);
    if (split >= splits_of(r) || heads <= 0) return;
    const int64_t head = r * H + kv_head * group + share * share_heads;
    const int64_t begin = split * kAttentionSplit;
    kernel.attend({.q = queries + head * Dh,
                   .k = k.at(rows.cache_slot(r), kv_head, begin),
                   .v = v.at(rows.cache_slot(r), kv_head, begin),
                   .dtype = k.dtype,
                   .heads = heads,
                   .head_dim = Dh,
                   .length = std::min(kAttentionSplit, rows.position(r) + 1 - begin),
                   .scale = 1 / std::sqrt(static_cast<float>(Dh)),
                   .partial = parts + head * head_stride + split * split_stride,
                   .partial_stride = head_stride,
                   .scratch = scratch});
    if (most_splits > 1) return;
    for (int64_t h = head; h < head + heads; ++h)
      kernel.merge(parts + h * head_stride, 1, split_stride, Dh, out + h * Dh);
  };
  pool.run([&](int thread) noexcept {
    auto* scratch = reinterpret_cast<float*>(
        pool.scratch(thread, gptfast::cpu::attend_scratch_floats(Dh) * sizeof(float)));
    for (Range range{}; pool.next(thread, whole_items * shares, 1, range);)
      attend(range.begin, scratch);
  });
  if (most_splits == 1) return;
  pool.run([&](int thread) noexcept {
    for (Range range{}; pool.next(thread, rows.count * H, 1, range);) {
      const int64_t head = range.begin;
      kernel.merge(parts + head * head_stride, splits_of(head / H), split_stride, Dh,
                   out + head * Dh);
    }
  });
}

namespace {

/// out = input weight^T [rows, n].
void project_to(const Input& input, const Weight& weight, Tensor& out) {
  auto* data = out.data_ptr<float>();
  project(input, std::span(&weight, 1), [&](const Range& range, const Products& products) {
    for (int64_t m = 0; m < input.rows; ++m) {
      std::memcpy(data + m * weight.n + range.begin, products(0, m),
                  (range.end - range.begin) * sizeof(float));
    }
  });
}

/// x += input weight^T.
void project_residual(const Tensor& input, int64_t rows, const LinearImpl& linear, Tensor& x) {
  const std::array weights = {weight_of(linear)};
  auto* out = x.data_ptr<float>();
  project(input_of(input, rows, weights[0]), weights,
          [&](const Range& range, const Products& products) {
            for (int64_t r = 0; r < rows; ++r) {
              float* row = out + r * weights[0].n;
              const float* add = products(0, r) - range.begin;
              for (int64_t n = range.begin; n < range.end; ++n) row[n] += add[n];
            }
          });
}

}  // namespace

void o_proj_residual(int64_t rows, const Tensor& y, const LinearImpl& wo, Tensor& x) {
  project_residual(y, rows, wo, x);
}

namespace {

/// Row `place` of h for each activation row = silu(w1 input) * (w3 input).
void gate_up_silu(const Input& input, std::span<const Weight, 2> weights, Tensor& h,
                  const int64_t* places) {
  auto* out = h.data_ptr<float>();
  project(input, weights, [&](const Range& range, const Products& products) {
    for (int64_t m = 0; m < input.rows; ++m) {
      kernels().silu_mul(products(0, m), products(1, m), range.end - range.begin,
                         out + place(places, m) * weights[0].n + range.begin);
    }
  });
}

}  // namespace

void rms_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& w1, const LinearImpl& w3, Tensor& h) {
  const std::array weights = {weight_of(w1), weight_of(w3)};
  gate_up_silu(input_of(x, rows, weights[0], &norm_weight, eps), weights, h, /*places=*/nullptr);
}

void down_proj_residual(int64_t rows, const Tensor& h, const LinearImpl& w2, Tensor& x) {
  project_residual(h, rows, w2, x);
}

namespace {

/// Softmax of scores [E] in place, its A largest and their shares of their sum. NaN or not, the
/// indices are A different experts.
void choose_experts(std::span<float> scores, std::span<int32_t> index, float* weight) {
  const float greatest = *std::max_element(scores.begin(), scores.end());
  float total = 0;
  for (float& score : scores) total += score = std::exp(score - greatest);
  for (float& score : scores) score /= total;
  float chosen = 0;
  for (size_t a = 0; a < index.size(); ++a) {
    const std::span<int32_t> before = index.first(a);
    int32_t best = -1;
    for (int32_t e = 0; e < std::ssize(scores); ++e) {
      if ((best < 0 || scores[e] > scores[best]) &&
          std::find(before.begin(), before.end(), e) == before.end())
        best = e;
    }
    index[a] = best;
    weight[a] = scores[best];
    chosen += weight[a];
  }
  for (size_t a = 0; a < index.size(); ++a) weight[a] /= chosen;
}

/// Calls body(expert, choices) for each expert that a row chose, in order, with the numbers r * A +
/// a of these choices.
template <class Body>
void for_each_expert(int64_t rows, const ConditionalFeedForwardImpl& cond_ffn,
                     const StepExperts& experts, const Body& body) {
  const auto* index = experts.index.const_data_ptr<int32_t>();
  const int64_t count = rows * experts.index.size(1);
  for (size_t e = 0; e < cond_ffn.experts.size(); ++e) {
    std::array<int64_t, kMaxStepRows> choices{};  // a row's experts are different ones
    size_t n = 0;
    for (int64_t choice = 0; choice < count && n < choices.size(); ++choice) {
      if (index[choice] == static_cast<int32_t>(e)) choices[n++] = choice;
    }
    if (n > 0) body(*cond_ffn.experts[e], std::span<const int64_t>(choices.data(), n));
  }
}

void route(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
           const LinearImpl& gate, StepExperts& experts) {
  const Weight weight = weight_of(gate);
  project_to(input_of(x, rows, weight, &norm_weight, eps), weight, experts.scores);
  const int64_t A = experts.index.size(1);
  for (int64_t r = 0; r < rows; ++r) {
    choose_experts({experts.scores.data_ptr<float>() + r * weight.n, static_cast<size_t>(weight.n)},
                   {experts.index.data_ptr<int32_t>() + r * A, static_cast<size_t>(A)},
                   experts.weight.data_ptr<float>() + r * A);
  }
}

}  // namespace

void moe_gate_up_silu(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                      const LinearImpl& gate, const ConditionalFeedForwardImpl& cond_ffn,
                      StepExperts& experts, Tensor& h) {
  route(rows, x, norm_weight, eps, gate, experts);
  const int64_t A = experts.index.size(1);
  for_each_expert(rows, cond_ffn, experts,
                  [&](const FeedForwardImpl& expert, std::span<const int64_t> choices) {
                    const std::array weights = {weight_of(*expert.w1), weight_of(*expert.w3)};
                    std::array<int64_t, kMaxStepRows> of_x{};
                    for (size_t m = 0; m < choices.size(); ++m) of_x[m] = choices[m] / A;
                    gate_up_silu(input_of(x, std::ssize(choices), weights[0], &norm_weight, eps,
                                          of_x.data()),
                                 weights, h, choices.data());
                  });
}

void moe_down_proj_residual(int64_t rows, const Tensor& h,
                            const ConditionalFeedForwardImpl& cond_ffn, const StepExperts& experts,
                            Tensor& x) {
  const int64_t A = experts.index.size(1);
  const auto* share = experts.weight.const_data_ptr<float>();
  auto* out = x.data_ptr<float>();
  const auto down = [&](const FeedForwardImpl& expert, std::span<const int64_t> choices) {
    const Weight weight = weight_of(*expert.w2);
    const Input input = input_of(h, std::ssize(choices), weight, /*norm_weight=*/nullptr, /*eps=*/0,
                                 choices.data());
    project(input, std::span(&weight, 1), [&](const Range& range, const Products& products) {
      for (int64_t m = 0; m < input.rows; ++m) {
        const int64_t choice = choices[static_cast<size_t>(m)];
        float* row = out + choice / A * weight.n;
        const float* add = products(0, m) - range.begin;
        for (int64_t n = range.begin; n < range.end; ++n) row[n] += share[choice] * add[n];
      }
    });
  };
  for_each_expert(rows, cond_ffn, experts, down);
}

void rms_lm_head(int64_t rows, const Tensor& x, const Tensor& norm_weight, double eps,
                 const LinearImpl& output, Tensor& logits) {
  const Weight weight = weight_of(output);
  project_to(input_of(x, rows, weight, &norm_weight, eps), weight, logits);
}

void sample(const StepRows& step_rows, const Tensor& logits, const SamplingParams& params,
            Tensor& next) {
  const Rows rows(step_rows);
  const int64_t V = logits.size(1);
  const auto* values = logits.const_data_ptr<float>();
  const auto* temperature = params.temperature.const_data_ptr<float>();
  const auto* top_k = params.top_k.const_data_ptr<int32_t>();
  const auto* seed = params.seed.const_data_ptr<int64_t>();
  auto* out = next.data_ptr<int32_t>();
  for (int64_t b = 0; b < rows.count / rows.seq_len; ++b) {
    const int64_t last = (b + 1) * rows.seq_len - 1;
    out[b] = sample_row(values + last * V, V, temperature[b], top_k[b],
                        static_cast<uint64_t>(seed[b]), rows.position(last));
  }
}

}  // namespace gptfast::ops::cpu
