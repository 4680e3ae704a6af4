// Which part of each tensor of a checkpoint a rank holds.
#include <ATen/ATen.h>

#include <array>
#include <map>

#include "gptfast/checkpoint.h"
#include "gptfast/linear.h"
#include "gptfast/tp.h"
#include "int4_layout.h"
#include "load_model.h"

namespace gptfast {
namespace {

struct Range {
  int64_t begin = 0, size = 0;
};

/// A share of one linear layer [out_features, in_features].
struct LinearShare {
  std::vector<Range> rows;  ///< empty: all
  int64_t padding = 0;      ///< zero rows after these
  Range columns;            ///< size 0: all
};

Range part(int64_t total, int rank, int world_size) {
  return {.begin = total / world_size * rank, .size = total / world_size};
}

Range scaled(Range range, int64_t factor) {
  return {.begin = range.begin * factor, .size = range.size * factor};
}

/// Decides what a rank holds of each layer. Query heads are cut evenly; with fewer key/value heads
/// than ranks, neighbouring ranks hold the same one.
class Plan {
 public:
  Plan(const ModelArgs& config, int rank, int world_size)
      : config_(config), share_(shard_config(config, world_size)), rank_(rank), size_(world_size) {}

  /// nullopt: the whole layer.
  std::optional<LinearShare> share_of(const std::string& fqn) const {
    const int64_t dh = config_.head_dim, h = config_.n_head, hkv = config_.n_local_heads;
    const Range q = scaled(part(h, rank_, size_), dh);
    const Range kv = {.begin = hkv * rank_ / size_ * dh, .size = share_.n_local_heads * dh};
    const Range hidden = part(config_.intermediate_size, rank_, size_);
    if (fqn.ends_with(".wqkv")) {
      return rows({q, {h * dh + kv.begin, kv.size}, {(h + hkv) * dh + kv.begin, kv.size}});
    }
    if (fqn.ends_with(".wq")) return rows({q});
    if (fqn.ends_with(".wk") || fqn.ends_with(".wv")) return rows({kv});
    if (fqn.ends_with(".wo")) return columns(q);
    if (fqn.ends_with(".w1") || fqn.ends_with(".w3")) return rows({hidden});
    if (fqn.ends_with(".w2")) return columns(hidden);
    if (fqn == "output") return head();
    return std::nullopt;
  }

 private:
  static LinearShare rows(std::vector<Range> ranges) {
    return {.rows = std::move(ranges), .padding = 0, .columns = {}};
  }
  static LinearShare columns(Range range) { return {.rows = {}, .padding = 0, .columns = range}; }
  LinearShare head() const {
    const int64_t vocab = config_.vocab_size, each = (vocab + size_ - 1) / size_;
    const int64_t begin = std::min(each * rank_, vocab), size = std::min(each, vocab - begin);
    return {.rows = {{begin, size}}, .padding = each - size, .columns = {}};
  }

  const ModelArgs& config_;
  ModelArgs share_;
  int rank_, size_;
};

/// One dimension of a stored tensor that stands for rows or columns of the layer, `unit` of them an
/// index.
struct Axis {
  int64_t dim = -1;  ///< -1: the tensor has no such dimension
  int64_t unit = 1;

  bool cuts(Range range) const { return range.begin % unit == 0 && range.size % unit == 0; }
  Tensor narrow(const Tensor& tensor, Range range) const {
    return tensor.narrow(dim, range.begin / unit, range.size / unit);
  }
};

/// The share of a stored tensor: a view where it is contiguous.
Tensor cut(const Tensor& tensor, const LinearShare& share, Axis row, Axis column) {
  Tensor taken = tensor;
  if (share.columns.size > 0 && column.dim >= 0) taken = column.narrow(taken, share.columns);
  if (!share.rows.empty() && row.dim >= 0) {
    std::vector<Tensor> pieces;
    for (const Range range : share.rows) pieces.push_back(row.narrow(taken, range));
    if (share.padding > 0) {
      std::vector<int64_t> shape = taken.sizes().vec();
      shape[static_cast<size_t>(row.dim)] = share.padding / row.unit;
      pieces.push_back(at::zeros(shape, taken.options()));
    }
    taken = pieces.size() == 1 ? pieces[0] : at::cat(pieces, row.dim);
  }
  taken = taken.contiguous();
  if (taken.storage().data() != tensor.storage().data()) release_pages(tensor);
  return taken;
}

int64_t groupsize_of(const Tensor& weight, const Tensor& scales_and_zeros) {
  return int4_padded_features(weight) / scales_and_zeros.size(0);
}

/// The tensor `name` belongs to the layer `fqn` when it is the layer's name and `suffix`.
std::optional<std::string> layer_of(const std::string& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) return std::nullopt;
  return name.substr(0, name.size() - suffix.size());
}

int64_t in_features_of(const std::string& fqn, const ModelArgs& config) {
  if (fqn.ends_with(".wo")) return config.n_head * config.head_dim;
  return fqn.ends_with(".w2") ? config.intermediate_size : config.dim;
}

/// Whether the int4 weights lie in tiles of 8 rows and 16 * inner columns (Int4Layout::kCuda),
/// which can be cut between tiles. Where nobody says so, the contents of one weight tell.
bool holds_tiles(const StateDict& tensors, const ModelArgs& config, Int4Layout layout) {
  if (layout != Int4Layout::kAuto) return layout == Int4Layout::kCuda;
  for (const auto& [name, scales_and_zeros] : tensors) {
    const auto fqn = layer_of(name, ".scales_and_zeros");
    if (!fqn) continue;
    const Tensor& weight = tensors.at(*fqn + ".weight");
    if (weight.dim() != 4) return false;
    const auto codes = [&, &scales = scales_and_zeros](Int4Layout guess) {
      return unpack_int4(weight, scales, in_features_of(*fqn, config), guess, *fqn).q;
    };
    return codes(Int4Layout::kAuto).equal(codes(Int4Layout::kCuda));
  }
  return false;
}

/// Groups of an int4 layer must not be cut apart, nor inputs that the layer reorders.
void check_groups(const StateDict& tensors, const Plan& plan, int world_size) {
  for (const auto& [name, scales_and_zeros] : tensors) {
    const auto fqn = layer_of(name, ".scales_and_zeros");
    const auto share = fqn ? plan.share_of(*fqn) : std::nullopt;
    if (!share || share->columns.size == 0) continue;
    TORCH_CHECK(!tensors.contains(*fqn + ".perm"), "'", *fqn,
                "' was quantized in activation order, which cannot be divided among ranks; "
                "quantize again without act_order, or use one rank");
    const int64_t groupsize = groupsize_of(tensors.at(*fqn + ".weight"), scales_and_zeros);
    TORCH_CHECK(share->columns.size % groupsize == 0, "'", *fqn, "' has ",
                share->columns.size * world_size, " columns, ", share->columns.size, " on each of ",
                world_size, " ranks, which its int4 group size ", groupsize,
                " does not divide; use fewer ranks or a checkpoint of a smaller group size");
  }
}

/// Cuts the tensors of linear layers.
class Cutter {
 public:
  Cutter(const StateDict& tensors, const ModelArgs& config, const Plan& plan, Int4Layout layout,
         bool tiles)
      : tensors_(tensors), config_(config), plan_(plan), layout_(layout), tiles_(tiles) {}

  Tensor share_of(const std::string& name, const Tensor& tensor) const {
    for (const std::string_view suffix : {".weight", ".scales", ".scales_and_zeros"}) {
      const auto fqn = layer_of(name, suffix);
      const auto share = fqn ? plan_.share_of(*fqn) : std::nullopt;
      if (!share) continue;
      if (suffix == ".scales") return cut(tensor, *share, {.dim = 0}, {});
      const Tensor* scales_and_zeros = tensors_.find(*fqn + ".scales_and_zeros");
      if (scales_and_zeros == nullptr) return cut(tensor, *share, {.dim = 0}, {.dim = 1});
      if (suffix == ".weight") return cut_int4(*fqn, tensor, *scales_and_zeros, *share);
      const int64_t groupsize = groupsize_of(tensors_.at(*fqn + ".weight"), tensor);
      return cut(tensor, *share, {.dim = 1}, {.dim = 0, .unit = groupsize});
    }
    return tensor;
  }

 private:
  /// In the file's layout where its tiles can be cut, else canonical.
  Tensor cut_int4(const std::string& fqn, const Tensor& weight, const Tensor& scales_and_zeros,
                  const LinearShare& share) const {
    const Axis row = {.dim = 0, .unit = 8};
    const Axis column = {.dim = 1, .unit = tiles_ ? weight.size(3) * 2 * 16 : 1};
    bool fits = tiles_ && share.padding % row.unit == 0 && column.cuts(share.columns);
    for (const Range range : share.rows) fits = fits && row.cuts(range);
    if (fits) return cut(weight, share, row, column);
    const Int4Weight whole =
        unpack_int4(weight, scales_and_zeros, in_features_of(fqn, config_), layout_, fqn);
    release_pages(weight);
    const Tensor q = cut(whole.q, share, {.dim = 0}, {.dim = 1, .unit = 2});
    if (share.columns.size > 0) return canonical_int4(q);
    // Whole rows keep the padding that their scales and zeros have in the file.
    const int64_t padding = int4_padded_features(weight) / 2 - q.size(1);
    return canonical_int4(at::constant_pad_nd(q, {0, padding}));
  }

  const StateDict& tensors_;
  const ModelArgs& config_;
  const Plan& plan_;
  Int4Layout layout_;
  bool tiles_;  // holds_tiles()
};

/// The experts of a layer are stored together: each is cut like a dense layer, "....w1" into
/// `share` with all that belongs to it.
void cut_experts(const StateDict& tensors, const std::string& fqn, const ModelArgs& config,
                 const Plan& plan, int world_size, Int4Layout layout, bool tiles,
                 StateDict& share) {
  std::map<std::string, std::vector<Tensor>> parts;
  for (int64_t e = 0; e < tensors.at(fqn).size(0); ++e) {
    const std::string expert_fqn = c10::str("expert ", e, " of ", fqn);
    const StateDict expert = expert_tensors(tensors, fqn, e, expert_fqn);
    check_groups(expert, plan, world_size);
    const Cutter cutter(expert, config, plan, layout, tiles);
    for (const auto& [name, tensor] : expert)
      parts[name.substr(expert_fqn.size() + 1)].push_back(cutter.share_of(name, tensor));
  }
  for (const auto& [kind, of_experts] : parts) {
    share.set(kind == "weight" ? fqn : expert_companion(fqn, kind), at::stack(of_experts));
    for (const Tensor& tensor : of_experts) release_pages(tensor);
  }
}

}  // namespace

ModelArgs shard_config(const ModelArgs& config, int world_size) {
  const auto divides = [&](const char* what, int64_t number) {
    TORCH_CHECK(number % world_size == 0, "the model's ", number, " ", what,
                " cannot be divided among ", world_size,
                " ranks; choose a number of ranks that divides it");
  };
  divides("attention heads (n_head)", config.n_head);
  divides("hidden features (intermediate_size)", config.intermediate_size);
  if (config.n_local_heads >= world_size) {
    divides("key/value heads (n_local_heads)", config.n_local_heads);
  } else {
    TORCH_CHECK(world_size % config.n_local_heads == 0, "the model's ", config.n_local_heads,
                " key/value heads (n_local_heads) cannot be spread evenly over ", world_size,
                " ranks; choose a number of ranks that is a multiple or a divisor of it");
  }
  ModelArgs share = config;
  share.n_head /= world_size;
  share.n_local_heads = std::max<int64_t>(config.n_local_heads / world_size, 1);
  share.intermediate_size /= world_size;
  return share;
}

StateDict shard_state_dict(const StateDict& tensors, const ModelArgs& config, int rank,
                           int world_size, Int4Layout int4_layout) {
  const Plan plan(config, rank, world_size);
  check_groups(tensors, plan, world_size);
  const bool tiles = holds_tiles(tensors, config, int4_layout);
  const Cutter cutter(tensors, config, plan, int4_layout, tiles);
  StateDict share;
  for (const auto& [name, tensor] : tensors) {
    if (is_expert_weight(name)) {
      cut_experts(tensors, name, config, plan, world_size, int4_layout, tiles, share);
    } else if (name.find(".cond_ffn.") == std::string::npos) {
      share.set(name, cutter.share_of(name, tensor));
    }
  }
  return share;
}

}  // namespace gptfast
