#include "int4_layout.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "gptfast/config.h"

namespace gptfast {

namespace {

// Share of groups that must hold both ends of the code. Measured on files of the original: 94.5 to
// 100 % in the right layout, 52 to 55 % in a wrong one, for every group size.
constexpr double kBothEndsShare = 0.75;
// Rows that the share is taken from, spread over the weight: hundreds of groups of even a narrow
// one. (512 took 5 ms a layer of Llama-2-7B, more than to upload it.)
constexpr int64_t kSampledRows = 64;

constexpr std::array<Int4Layout, 3> kCpuLayouts = {Int4Layout::kCpuAvx512, Int4Layout::kCpuAvx2,
                                                   Int4Layout::kCpu};

bool is_cuda_shape(const Tensor& weight) {
  if (weight.scalar_type() != at::kInt || weight.dim() != 4 || weight.size(2) != 32) return false;
  const int64_t inner = 2 * weight.size(3);
  return inner == 2 || inner == 4 || inner == 8;
}

bool is_cpu_shape(const Tensor& weight) {
  return weight.scalar_type() == at::kByte && weight.dim() == 2;
}

bool is_canonical_shape(const Tensor& weight) {
  return weight.scalar_type() == at::kByte && weight.dim() == 3 && weight.size(2) == 1;
}

int64_t out_features(const Tensor& weight) {
  return is_cuda_shape(weight) ? weight.size(0) * 8 : weight.size(0);
}

std::string shape_and_dtype(const Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

// A lane of the tensor core's B operand holds 8 codes of one row: columns k0, k0+1, k0+8, k0+9 of
// two neighbouring k tiles, where k0 = 2 * (lane % 4). The four even columns fill the lower half of
// the word, the odd ones the upper half. In terms of canonical bytes (even column in the low
// nibble) byte i of the four has its nibbles at bits 4 i and 16 + 4 i.
struct CudaWord {
  int64_t row,
      byte;  // canonical position of the word's first byte; the others follow at +4, +8, +12
};
constexpr int64_t kBytesApart = 4;

CudaWord cuda_word(int64_t n_tile, int64_t k_super_tile, int64_t lane, int64_t pair,
                   int64_t inner) {
  return {.row = n_tile * 8 + lane / 4, .byte = (k_super_tile * inner + 2 * pair) * 8 + lane % 4};
}

// Calls body(word, position) for every word of the CUDA layout, in file order.
template <typename Body>
void for_each_cuda_word(int64_t n, int64_t kp, int64_t inner, Body body) {
  const int64_t pairs = inner / 2;
  int64_t index = 0;
  for (int64_t n_tile = 0; n_tile < n / 8; ++n_tile) {
    for (int64_t k_super_tile = 0; k_super_tile < kp / (inner * 16); ++k_super_tile) {
      for (int64_t lane = 0; lane < 32; ++lane) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
          body(index++, cuda_word(n_tile, k_super_tile, lane, pair, inner));
        }
      }
    }
  }
}

// unpack_cuda() on a GPU: the four bytes of a word lie a row of lanes apart.
Tensor unpack_cuda_on_device(const Tensor& weight) {
  const int64_t n_tiles = weight.size(0), super_tiles = weight.size(1), pairs = weight.size(3);
  const Tensor words = weight.view({n_tiles, super_tiles, /*row=*/8, /*lane % 4=*/4, pairs})
                           .permute({0, 2, 1, 4, 3});
  std::vector<Tensor> bytes;
  for (int64_t i = 0; i < 4; ++i) {
    const Tensor even = words.bitwise_right_shift(4 * i).bitwise_and(15);
    const Tensor odd = words.bitwise_right_shift(12 + 4 * i).bitwise_and(15 << 4);
    bytes.push_back(even.bitwise_or(odd).to(at::kByte));
  }
  return at::stack(bytes, /*dim=*/4).view({n_tiles * 8, super_tiles * pairs * 16});
}

Tensor unpack_cuda(const Tensor& weight) {
  if (weight.is_cuda()) return unpack_cuda_on_device(weight);
  const int64_t inner = 2 * weight.size(3);
  const int64_t n = weight.size(0) * 8;
  const int64_t kp = weight.size(1) * inner * 16;
  Tensor q = at::empty({n, kp / 2}, at::kByte);
  const auto* words = reinterpret_cast<const uint32_t*>(weight.const_data_ptr<int32_t>());
  auto* bytes = q.mutable_data_ptr<uint8_t>();
  for_each_cuda_word(n, kp, inner, [&](int64_t index, const CudaWord& at) {
    uint8_t* out = bytes + at.row * (kp / 2) + at.byte;
    for (int64_t i = 0; i < 4; ++i) {
      const uint32_t even = (words[index] >> (4 * i)) & 15U;
      const uint32_t odd = (words[index] >> (16 + 4 * i)) & 15U;
      out[i * kBytesApart] = static_cast<uint8_t>(even | odd << 4);
    }
  });
  return q;
}

// The CPU kernels keep a block of rows together: for each column, half as many bytes as the block
// has rows. A full block pairs rows half a block apart where the instruction set likes that; the
// last, smaller block always pairs neighbours.
Tensor unpack_cpu(const Tensor& weight, int64_t n, int64_t kp, Int4Layout layout) {
  const int64_t block = layout == Int4Layout::kCpuAvx512 ? 64 : 32;
  Tensor q = at::zeros({n, kp / 2}, at::kByte);
  const auto* packed = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* bytes = q.mutable_data_ptr<uint8_t>();
  for (int64_t first = 0; first < n; first += block) {
    const int64_t rows = std::min(block, n - first);
    const bool halves = rows == block && layout != Int4Layout::kCpu;
    for (int64_t j = 0; j < rows / 2; ++j) {
      uint8_t* low_row = bytes + (first + (halves ? j : 2 * j)) * (kp / 2);
      uint8_t* high_row = bytes + (first + (halves ? j + rows / 2 : 2 * j + 1)) * (kp / 2);
      for (int64_t k = 0; k < kp; ++k) {
        const uint8_t both = packed[first * (kp / 2) + k * (rows / 2) + j];
        const int64_t shift = 4 * (k % 2);
        low_row[k / 2] = static_cast<uint8_t>(low_row[k / 2] | (both & 15) << shift);
        high_row[k / 2] = static_cast<uint8_t>(high_row[k / 2] | (both >> 4) << shift);
      }
    }
  }
  return q;
}

Tensor unpack(const Tensor& weight, Int4Layout layout) {
  if (is_canonical_shape(weight)) return weight.squeeze(2);
  if (layout == Int4Layout::kCuda) return unpack_cuda(weight);
  return unpack_cpu(weight.cpu(), out_features(weight), int4_padded_features(weight), layout);
}

// What the groups of a weight say about a guessed layout.
struct Evidence {
  double both_ends = 1;    // share of the groups that hold both code 0 and code 15
  double mean_offset = 0;  // mean square of a group's dequantized mean, in units of its scale
};

// Looks at the groups of true columns; one that is part padding counts only when there is no whole
// one. Groups of one repeated code (constant or zero weights) look the same in every layout and do
// not count.
Evidence examine(const Tensor& q, const Tensor& scales_and_zeros, int64_t in_features,
                 int64_t groupsize) {
  const int64_t groups = std::max<int64_t>(in_features / groupsize, 1);
  const int64_t group_bytes = std::min(groupsize, in_features) / 2;
  const int64_t row_step = std::max<int64_t>(q.size(0) / kSampledRows, 1);
  const auto sample = [&](const Tensor& t, int64_t dim) {
    return t.slice(dim, 0, std::nullopt, row_step).cpu().contiguous();
  };
  const Tensor codes_of_rows = sample(q, 0);
  const Tensor affine = sample(scales_and_zeros, 1).to(at::kFloat);  // [Kp / g, rows, 2]
  const int64_t rows = codes_of_rows.size(0);
  const auto* affine_data = affine.const_data_ptr<float>();
  const auto* bytes = codes_of_rows.const_data_ptr<uint8_t>();
  int64_t counted = 0;
  int64_t both_ends = 0;
  double squares = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* codes = bytes + row * q.size(1) + group * groupsize / 2;
      uint32_t seen = 0;  // bit c: code c occurs
      int64_t sum = 0;
      for (int64_t i = 0; i < group_bytes; ++i) {
        seen |= 1U << (codes[i] & 15) | 1U << (codes[i] >> 4);
        sum += (codes[i] & 15) + (codes[i] >> 4);
      }
      if ((seen & (seen - 1)) == 0) continue;
      ++counted;
      if ((seen & 1U) != 0 && (seen >> 15) != 0) ++both_ends;
      const float* scale_and_zero = affine_data + (group * rows + row) * 2;
      const double mean_code = static_cast<double>(sum) / static_cast<double>(2 * group_bytes);
      const double mean = mean_code - 8 + scale_and_zero[1] / scale_and_zero[0];
      squares += mean * mean;
    }
  }
  if (counted == 0) return {};
  const auto count = static_cast<double>(counted);
  return {.both_ends = static_cast<double>(both_ends) / count, .mean_offset = squares / count};
}

// The two CPU layouts of 32 rows differ by a permutation of rows alone, which leaves the codes of a
// group together: what tells them apart is whether a row's codes fit its scales, that is whether
// the weights of a group average to about zero.
Tensor unpack_auto(const Tensor& weight, const Tensor& scales_and_zeros, int64_t in_features,
                   int64_t groupsize, std::string_view name) {
  double best_share = 0;
  if (is_cuda_shape(weight)) {
    Tensor q = unpack_cuda(weight);
    best_share = examine(q, scales_and_zeros, in_features, groupsize).both_ends;
    if (best_share >= kBothEndsShare) return q;
  }
  Tensor best;
  double best_offset = 0;
  if (out_features(weight) % 16 == 0) {  // the CPU operators take no other
    for (const Int4Layout layout : kCpuLayouts) {
      Tensor q = unpack(weight, layout);
      const Evidence evidence = examine(q, scales_and_zeros, in_features, groupsize);
      best_share = std::max(best_share, evidence.both_ends);
      if (evidence.both_ends >= kBothEndsShare &&
          (!best.defined() || evidence.mean_offset < best_offset)) {
        best = q;
        best_offset = evidence.mean_offset;
      }
    }
  }
  TORCH_CHECK(best.defined(), name, ": the layout of this int4 weight (", shape_and_dtype(weight),
              ") cannot be told: in the best of the known layouts only ",
              static_cast<int>(best_share * 100),
              " % of the groups use both ends of the code, 75 % expected. If you know on what it "
              "was "
              "quantized, say so with --int4_layout {cuda,cpu-avx512,cpu-avx2,cpu}.");
  return best;
}

}  // namespace

const char* to_string(Int4Layout layout) {
  switch (layout) {
    case Int4Layout::kAuto:
      return "auto";
    case Int4Layout::kCuda:
      return "cuda";
    case Int4Layout::kCpuAvx512:
      return "cpu-avx512";
    case Int4Layout::kCpuAvx2:
      return "cpu-avx2";
    case Int4Layout::kCpu:
      return "cpu";
  }
  TORCH_INTERNAL_ASSERT(false);
}

Int4Layout int4_layout_from_string(std::string_view name) {
  for (const Int4Layout layout : {Int4Layout::kAuto, Int4Layout::kCuda, Int4Layout::kCpuAvx512,
                                  Int4Layout::kCpuAvx2, Int4Layout::kCpu}) {
    if (name == to_string(layout)) return layout;
  }
  TORCH_CHECK(false, "unknown int4 layout '", name,
              "': expected auto, cuda, cpu-avx512, cpu-avx2 or cpu");
}

Tensor canonical_int4(const Tensor& q) {
  return q.unsqueeze(2);
}

int64_t int4_padded_features(const Tensor& weight) {
  if (is_cuda_shape(weight)) return weight.size(1) * weight.size(3) * 2 * 16;
  if (is_cpu_shape(weight) || is_canonical_shape(weight)) return weight.size(1) * 2;
  return 0;
}

int64_t int4_groupsize(const Tensor& weight, const Tensor& scales_and_zeros, int64_t in_features,
                       std::string_view name) {
  const int64_t kp = int4_padded_features(weight);
  TORCH_CHECK(kp > 0, name, ": ", shape_and_dtype(weight),
              " is no int4 weight; expected int32 [N/8, K/(inner*16), 32, inner/2] or uint8 [N, "
              "K/2]");
  TORCH_CHECK(kp == in_features || kp == find_multiple(in_features, 1024), name,
              ": the weight has ", kp, " columns, but the layer has ", in_features,
              " input features, or ", find_multiple(in_features, 1024), " when padded");
  TORCH_CHECK(scales_and_zeros.dim() == 3 && scales_and_zeros.size(1) == out_features(weight) &&
                  scales_and_zeros.size(2) == 2 &&
                  (scales_and_zeros.scalar_type() == at::kBFloat16 ||
                   scales_and_zeros.scalar_type() == at::kFloat),
              name, ": scales_and_zeros is ", shape_and_dtype(scales_and_zeros),
              "; expected bfloat16 or float32 [groups, ", out_features(weight), ", 2]");
  const int64_t groups = scales_and_zeros.size(0);
  for (const int64_t groupsize : {32, 64, 128, 256}) {
    if (groups * groupsize == kp) return groupsize;
  }
  TORCH_CHECK(false, name, ": ", groups, " groups for ", kp,
              " columns fit no group size; expected groups of 32, 64, 128 or 256 columns");
}

Int4Weight unpack_int4(const Tensor& weight, const Tensor& scales_and_zeros, int64_t in_features,
                       Int4Layout layout, std::string_view name) {
  const int64_t groupsize = int4_groupsize(weight, scales_and_zeros, in_features, name);
  const Tensor packed = weight.contiguous();
  const bool canonical = is_canonical_shape(packed);
  TORCH_CHECK(layout != Int4Layout::kCuda || is_cuda_shape(packed) || canonical, name, ": ",
              shape_and_dtype(packed),
              " cannot be in the cuda layout, which is int32 of 4 dimensions");
  TORCH_CHECK(layout == Int4Layout::kAuto || layout == Int4Layout::kCuda ||
                  out_features(packed) % 16 == 0 || canonical,
              name, ": ", out_features(packed), " rows cannot be in the layout ", to_string(layout),
              ", which needs a multiple of 16");
  const Tensor q = layout == Int4Layout::kAuto && !canonical
                       ? unpack_auto(packed, scales_and_zeros, in_features, groupsize, name)
                       : unpack(packed, layout);
  const int64_t groups = (in_features + groupsize - 1) / groupsize;
  const Tensor both = scales_and_zeros.narrow(0, 0, groups).permute({2, 1, 0});  // [2, N, groups]
  return {.q = q.narrow(1, 0, (in_features + 1) / 2).contiguous(),
          .scales = both[0].contiguous(),
          .zeros = both[1].contiguous(),
          .in_features = in_features,
          .groupsize = groupsize};
}

Tensor pack_int4_cuda(const Tensor& q, int64_t inner) {
  TORCH_CHECK(q.scalar_type() == at::kByte && q.dim() == 2 && q.size(0) % 8 == 0 &&
                  q.size(1) % (inner * 8) == 0,
              "pack_int4_cuda: ", shape_and_dtype(q),
              "; expected uint8 [N, K/2] with N a multiple of 8 and K of ", inner * 16);
  const Tensor codes = q.cpu().contiguous();
  const int64_t n = q.size(0);
  const int64_t kp = q.size(1) * 2;
  Tensor packed = at::empty({n / 8, kp / (inner * 16), 32, inner / 2}, at::kInt);
  const auto* bytes = codes.const_data_ptr<uint8_t>();
  auto* words = reinterpret_cast<uint32_t*>(packed.mutable_data_ptr<int32_t>());
  for_each_cuda_word(n, kp, inner, [&](int64_t index, const CudaWord& at) {
    const uint8_t* in = bytes + at.row * (kp / 2) + at.byte;
    uint32_t word = 0;
    for (int64_t i = 0; i < 4; ++i) {
      const uint32_t byte = in[i * kBytesApart];
      word |= (byte & 15U) << (4 * i) | (byte >> 4) << (16 + 4 * i);
    }
    words[index] = word;
  });
  return packed;
}

Tensor pack_scales_and_zeros(const Tensor& scales, const Tensor& zeros) {
  TORCH_CHECK(scales.sizes() == zeros.sizes() && scales.dim() == 2 &&
                  scales.scalar_type() == zeros.scalar_type(),
              "pack_scales_and_zeros: scales ", shape_and_dtype(scales), " and zeros ",
              shape_and_dtype(zeros), " differ");
  return at::stack({scales.t(), zeros.t()}, /*dim=*/2);
}

}  // namespace gptfast
