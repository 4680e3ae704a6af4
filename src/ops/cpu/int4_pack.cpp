// Packs canonical int4 weights for the CPU kernels; the layout is described at Int4Header.
#include <ATen/ATen.h>

#include <cstring>

#include "ops/cpu/huge_pages.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/step_ops.h"
#include "ops/cpu/thread_pool.h"

namespace gptfast::ops::cpu {
namespace {

using gptfast::cpu::kBlock;
using gptfast::cpu::kInt4HeaderBytes;
using gptfast::cpu::kRowTile;

/// The canonical weight as plain pointers.
struct Source {
  const uint8_t* q;         // [n, row_bytes]
  const std::byte* scales;  // [n, groups]
  const std::byte* zeros;
  int64_t item;  // bytes of a scale
  int64_t n, k, groupsize, groups, row_bytes;

  uint8_t code(int64_t row, int64_t column) const {
    if (row >= n || column >= k) return 0;
    const uint8_t pair = q[row * row_bytes + column / 2];
    return column % 2 == 0 ? pair & 15 : pair >> 4;
  }
};

std::byte* pack_scales(const Source& source, const std::byte* from, int64_t first_row,
                       int64_t group, std::byte* out) {
  for (int64_t r = 0; r < kRowTile; ++r, out += source.item) {
    if (first_row + r >= source.n) {
      std::memset(out, 0, source.item);
    } else {
      std::memcpy(out, from + ((first_row + r) * source.groups + group) * source.item, source.item);
    }
  }
  return out;
}

std::byte* pack_block(const Source& source, int64_t first_row, int64_t first_column,
                      std::byte* out) {
  for (int64_t j = 0; j < 4; ++j) {
    for (int64_t r = 0; r < kRowTile; ++r) {
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t column = first_column + 8 * j + i;
        const uint8_t low = source.code(first_row + r, column);
        const uint8_t high = source.code(first_row + r, column + 4);
        *out++ = static_cast<std::byte>(low | high << 4);
      }
    }
  }
  return out;
}

void pack_tile(const Source& source, int64_t tile, std::byte* out) {
  const int64_t row = tile * kRowTile;
  for (int64_t g = 0; g < source.groups; ++g) {
    out = pack_scales(source, source.scales, row, g, out);
    out = pack_scales(source, source.zeros, row, g, out);
    const int64_t end = std::min(source.k, (g + 1) * source.groupsize);
    for (int64_t column = g * source.groupsize; column < end; column += kBlock)
      out = pack_block(source, row, column, out);
  }
}

/// True if every value survives bfloat16, as it does in files, which store bfloat16.
bool fits_bfloat16(const Tensor& t) {
  return t.scalar_type() == at::kBFloat16 || at::equal(t.to(at::kBFloat16).to(t.scalar_type()), t);
}

}  // namespace

Tensor pack_int4(const Int4Weight& weight) {
  const int64_t n = weight.q.size(0);
  const int64_t k = weight.in_features;
  TORCH_CHECK(weight.groupsize >= kBlock && weight.groupsize % kBlock == 0,
              "the int4 kernels take groups of a multiple of ", kBlock, " columns, got groupsize ",
              weight.groupsize);
  const bool narrow = fits_bfloat16(weight.scales) && fits_bfloat16(weight.zeros);
  const at::ScalarType dtype = narrow ? at::kBFloat16 : at::kFloat;
  const Tensor q = weight.q.contiguous();
  const Tensor scales = weight.scales.to(dtype).contiguous();
  const Tensor zeros = weight.zeros.to(dtype).contiguous();
  const Source source{.q = q.const_data_ptr<uint8_t>(),
                      .scales = static_cast<const std::byte*>(scales.const_data_ptr()),
                      .zeros = static_cast<const std::byte*>(zeros.const_data_ptr()),
                      .item = scales.element_size(),
                      .n = n,
                      .k = k,
                      .groupsize = weight.groupsize,
                      .groups = (k + weight.groupsize - 1) / weight.groupsize,
                      .row_bytes = q.size(1)};
  TORCH_CHECK(source.row_bytes == (k + 1) / 2 &&
                  scales.sizes() == at::IntArrayRef({n, source.groups}) &&
                  zeros.sizes() == scales.sizes(),
              "int4 weight of ", n, " x ", k, ": codes ", q.sizes(), ", scales ", scales.sizes(),
              ", zeros ", zeros.sizes(), ", expected [", n, ", ", (k + 1) / 2, "] and twice [", n,
              ", ", source.groups, "]");
  const int64_t tiles = (n + kRowTile - 1) / kRowTile;
  const int64_t tile_bytes = gptfast::cpu::Int4Shape(k, weight.groupsize, source.item).tile_bytes;
  Tensor packed = gptfast::cpu::empty_in_huge_pages(kInt4HeaderBytes + tiles * tile_bytes);
  auto* out = static_cast<std::byte*>(packed.data_ptr());
  std::memset(out, 0, kInt4HeaderBytes);
  const gptfast::cpu::Int4Header header{.float32_scales = narrow ? 0 : 1};
  std::memcpy(out, &header, sizeof(header));
  auto& pool = gptfast::cpu::ThreadPool::get();
  pool.run([&](int thread) noexcept {
    for (gptfast::cpu::Range range{}; pool.next(thread, tiles, 1, range);) {
      pack_tile(source, range.begin, out + kInt4HeaderBytes + range.begin * tile_bytes);
    }
  });
  return packed;
}

}  // namespace gptfast::ops::cpu
