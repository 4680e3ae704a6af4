#include "gptfast/gptq.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace gptfast {

namespace {

constexpr double kDampStep = 10;  // factor by which a damping that proved too little is raised
constexpr double kMaxPercdamp = 10;

/// What the 16 codes of a group mean, for all elements of a tensor. float32 holding bfloat16
/// values.
struct Codebook {
  Tensor scales, zeros, least;  // least: of the values, code 0

  Codebook(const Tensor& bfloat16_scales, const Tensor& bfloat16_zeros)
      : scales(bfloat16_scales), zeros(bfloat16_zeros) {
    least = (zeros - scales * 8).to(at::kFloat);  // in bfloat16, as quantize_int4
    scales = scales.to(at::kFloat);
    zeros = zeros.to(at::kFloat);
  }
  Tensor quantize(const Tensor& column) const {
    return (column - least).div_(scales).round_().clamp_(0, 15);
  }
  /// Every step rounded to bfloat16, as the original computes it.
  Tensor dequantize(const Tensor& codes) const {
    const Tensor product = ((codes - 8) * scales).to(at::kBFloat16).to(at::kFloat);
    return (product + zeros).to(at::kBFloat16).to(at::kFloat);
  }
};

/// For the columns [N] of one group, with a table of the values.
struct ColumnCodebook : Codebook {
  Tensor values;  // [N, 16]

  ColumnCodebook(const Tensor& group_scales /* [N] */, const Tensor& group_zeros)
      : Codebook(group_scales, group_zeros) {
    const Codebook of_rows(group_scales.unsqueeze(1), group_zeros.unsqueeze(1));
    values = of_rows.dequantize(at::arange(16, scales.options()));
  }
  void dequantize_out(Tensor& out /* [N] */, const Tensor& codes /* [N] int64 */) const {
    Tensor column = out.unsqueeze(1);
    at::gather_out(column, values, /*dim=*/1, codes.unsqueeze(1));
  }
};

/// int4_group_params that takes a short last group.
GroupParams group_params(const Tensor& w, int64_t groupsize) {
  const int64_t whole = w.size(1) / groupsize * groupsize;
  if (whole == w.size(1)) return int4_group_params(w, groupsize);
  const GroupParams last = int4_group_params(w.slice(1, whole), w.size(1) - whole);
  if (whole == 0) return last;
  const GroupParams first = int4_group_params(w.slice(1, 0, whole), groupsize);
  return {.scales = at::cat({first.scales, last.scales}, 1),
          .zeros = at::cat({first.zeros, last.zeros}, 1)};
}

struct InverseFactor {
  Tensor upper;     // [K, K] float32, upper Cholesky factor of the damped Hessian's inverse
  double percdamp;  // share of the mean diagonal that was added
};

InverseFactor inverse_factor(const Tensor& hessian /* float64 */, double percdamp,
                             std::string_view name) {
  const double mean = hessian.diagonal().mean().item<double>();
  const auto factor = [&](double share) -> Tensor {
    Tensor damped = hessian.clone();
    damped.diagonal().add_(share * mean);
    const auto [lower, lower_info] = at::linalg_cholesky_ex(damped);
    if (lower_info.item<int64_t>() != 0) return {};
    const auto [upper, upper_info] =
        at::linalg_cholesky_ex(at::cholesky_inverse(lower), /*upper=*/true);
    if (upper_info.item<int64_t>() != 0) return {};
    return upper.to(at::kFloat);
  };
  for (double share = percdamp; share <= kMaxPercdamp; share = std::max(share * kDampStep, 1e-4)) {
    if (Tensor upper = factor(share); upper.defined()) return {.upper = upper, .percdamp = share};
  }
  TORCH_CHECK(false, name,
              ": the Hessian of the inputs is not positive definite even with --percdamp ",
              kMaxPercdamp, "; calibrate on more or other text");
}

/// trace((W - Q) H (W - Q)^T).
double output_error(const Tensor& difference, const Tensor& hessian) {
  return at::mm(difference, hessian.to(at::kFloat)).mul_(difference).sum().item<double>();
}

GptqWeight round_to_nearest(const Tensor& w, int64_t groupsize) {
  GptqWeight result;
  result.params = group_params(w, groupsize);
  const auto per_column = [&](const Tensor& t) {
    return t.repeat_interleave(groupsize, /*dim=*/1).narrow(1, 0, w.size(1));
  };
  const Codebook codebook(per_column(result.params.scales), per_column(result.params.zeros));
  const Tensor codes = codebook.quantize(w);
  result.codes = codes.to(at::kByte);
  result.dequantized = codebook.dequantize(codes);
  return result;
}

/// The column loop, on transposed weights so that a column is contiguous. `codebook_of(column)`
/// gives the codebook. On a GPU it takes as long as the launches of its small kernels.
template <typename CodebookOf>
void quantize_columns(Tensor& wt /* [K, N] */, const Tensor& upper, int64_t blocksize,
                      CodebookOf codebook_of, Tensor& codes_t, Tensor& dequantized_t /* [K, N] */) {
  const int64_t columns = wt.size(0);
  for (int64_t begin = 0; begin < columns; begin += blocksize) {
    const int64_t end = std::min(begin + blocksize, columns);
    Tensor block = wt.slice(0, begin, end).clone();
    Tensor errors = at::empty_like(block);
    for (int64_t i = 0; i < end - begin; ++i) {
      const Tensor column = block[i];
      const ColumnCodebook& codebook = codebook_of(begin + i);
      // Weights whose range overflows give NaN, which indexes no table.
      const Tensor codes = codebook.quantize(column).nan_to_num_(/*nan=*/0).to(at::kLong);
      Tensor dequantized = dequantized_t[begin + i];
      codebook.dequantize_out(dequantized, codes);
      const Tensor row =
          upper[begin + i].slice(0, begin + i, end);  // the factor's row from its diagonal on
      Tensor error = errors[i];
      at::sub_out(error, column, dequantized);
      error.div_(row[0]);
      block.slice(0, i).addr_(row, error, /*beta=*/1, /*alpha=*/-1);
      codes_t[begin + i].copy_(codes);
    }
    if (end < columns) {
      wt.slice(0, end).addmm_(upper.slice(0, begin, end).slice(1, end).t(), errors, /*beta=*/1,
                              /*alpha=*/-1);
    }
  }
}

}  // namespace

void check_gptq_options(const GptqOptions& options) {
  const int64_t g = options.groupsize;
  const int64_t b = options.blocksize;
  TORCH_CHECK(g == 32 || g == 64 || g == 128 || g == 256,
              "int4 groups have 32, 64, 128 or 256 columns, not ", g);
  TORCH_CHECK(b >= 1 && (b % g == 0 || g % b == 0), "--blocksize ", b, " does not fit groups of ",
              g, " columns: one must be a multiple of the other");
  TORCH_CHECK(options.percdamp >= 0 && options.percdamp <= 1,
              "--percdamp is a share from 0 to 1, not ", options.percdamp);
}

GptqWeight gptq_quantize(const Tensor& w, const Tensor& hessian, const GptqOptions& options,
                         std::string_view name) {
  check_gptq_options(options);
  const int64_t columns = w.size(1);
  TORCH_CHECK(w.dim() == 2 && hessian.dim() == 2 && hessian.size(0) == columns &&
                  hessian.size(1) == columns,
              "GPTQ: a weight of shape ", w.sizes(), " and a Hessian of ", hessian.sizes());
  TORCH_CHECK(at::isfinite(hessian).all().item<bool>(), name,
              ": the inputs hold NaN or infinite values; calibrate on other text, or check "
              "the model");
  const Tensor h = hessian.to(w.device(), at::kDouble);
  const Tensor original = w.to(at::kFloat);
  TORCH_CHECK(at::isfinite(original).all().item<bool>(), name,
              ": the weight holds NaN or infinite values: it cannot be quantized");
  const Tensor dead = h.diagonal() == 0;
  GptqWeight rounded = round_to_nearest(original, options.groupsize);
  rounded.calibrated = !dead.all().item<bool>();
  if (!rounded.calibrated) return rounded;

  Tensor damped = h + at::diag(dead.to(h.scalar_type()));
  Tensor start = original.masked_fill(dead, 0);
  Tensor order;  // order[i]: the column that is quantized i-th; undefined: from left to right
  if (options.act_order) {
    order = damped.diagonal().argsort(/*stable=*/true, /*dim=*/0, /*descending=*/true);
    damped = damped.index_select(0, order).index_select(1, order);
  }
  const InverseFactor inverse = inverse_factor(damped, options.percdamp, name);

  GptqWeight result;
  result.percdamp = inverse.percdamp;
  Tensor wt = (order.defined() ? start.index_select(1, order) : start).t().contiguous();
  Tensor codes_t = at::empty(wt.sizes(), wt.options().dtype(at::kByte));
  Tensor dequantized_t = at::empty_like(wt);
  std::vector<ColumnCodebook> codebooks;
  if (options.act_order) {
    result.params = group_params(start, options.groupsize);
    for (int64_t g = 0; g < result.params.scales.size(1); ++g)
      codebooks.emplace_back(result.params.scales.select(1, g), result.params.zeros.select(1, g));
    const Tensor groups = order.cpu().floor_divide(options.groupsize);
    const auto* group = groups.const_data_ptr<int64_t>();
    quantize_columns(
        wt, inverse.upper, options.blocksize,
        [&](int64_t i) -> const ColumnCodebook& { return codebooks[group[i]]; }, codes_t,
        dequantized_t);
    const Tensor back = order.argsort();
    codes_t = codes_t.index_select(0, back);
    dequantized_t = dequantized_t.index_select(0, back);
  } else {
    std::vector<Tensor> scales;
    std::vector<Tensor> zeros;
    quantize_columns(
        wt, inverse.upper, options.blocksize,
        [&](int64_t i) -> const ColumnCodebook& {
          if (i % options.groupsize == 0) {
            const Tensor group = wt.slice(0, i, std::min(i + options.groupsize, columns)).t();
            const GroupParams params = int4_group_params(group.contiguous(), group.size(1));
            codebooks.emplace_back(params.scales.select(1, 0), params.zeros.select(1, 0));
            scales.push_back(params.scales);
            zeros.push_back(params.zeros);
          }
          return codebooks.back();
        },
        codes_t, dequantized_t);
    result.params = {.scales = at::cat(scales, 1), .zeros = at::cat(zeros, 1)};
  }
  result.codes = codes_t.t().contiguous();
  result.dequantized = dequantized_t.t().contiguous();
  result.error = output_error(original - result.dequantized, h);
  result.rounded_error = output_error(original - rounded.dequantized, h);
  return result;
}

}  // namespace gptfast
