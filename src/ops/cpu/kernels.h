// What the CPU kernels offer to the ops. The same source is compiled once per instruction set
// (kernels_*.cpp) and chosen at run time; a kernel knows pointers and sizes, not Tensors, and runs
// on one thread.
//
// This header is included by files that are compiled for newer instruction sets, so it must not
// pull in inline functions of the standard library or LibTorch: the linker might keep their AVX-512
// copies for everybody.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace gptfast::cpu {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };
enum class Format { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

constexpr int kMaxRows = 8;  ///< rows of a step
constexpr int64_t kRowTile =
    16;  ///< weight rows are handed out in multiples of this; rows of an int4 tile
constexpr int64_t kBlock = 32;   ///< columns that share a scale of a quantized activation
constexpr int64_t kSplit = 256;  ///< cache positions of one partial softmax
constexpr int64_t kInt4HeaderBytes = 64;
constexpr int64_t kInt4BlockBytes = kRowTile * kBlock / 2;  // codes of 16 rows and 32 columns
constexpr int64_t kMaxPanelRows = 32;   ///< weight rows of a panel of matmul, at most
constexpr int64_t kPanelColumns = 512;  ///< 64 KB of float32 weights stay in the second-level cache

constexpr int kPackedRows = 12;        ///< activation rows of a block that pack_rows makes
constexpr int64_t kPanelPairs = 2048;  ///< pairs of columns of a bfloat16 panel: 256 KB of a
                                       ///< second-level cache of 1 MB
constexpr int64_t kPromptSplit = 128;  ///< cache positions that a prompt's scores are kept for

/// One weight matrix [n, k]; data as WeightView says.
struct Weight {
  Format format;
  int64_t n;
  int64_t k;
  int64_t groupsize;  // int4 only
  const void* data;
  const float* scales;  // int8 only, [n]
  const int32_t* perm;  // int4 only, [k]: column i belongs to input perm[i]; null: in order
};

/// First bytes of a packed int4 weight. Then, for each tile of 16 rows, for each group of columns:
///   scales [16], zeros [16] (bfloat16, or float32 where bfloat16 would round), then for each block
///   of 32 columns 4 x 64 bytes: byte 4 r + i of vector j holds column 8 j + i of row r in its low
///   nibble and column 8 j + 4 + i in its high one.
/// So a thread reads one contiguous stream, and a vector register is 16 rows times 4 columns, as
/// dot-product instructions want. Missing rows have scale and zero 0; missing columns meet
/// activations that are 0.
struct Int4Header {
  int64_t float32_scales;
};

/// Sizes within a packed int4 weight.
struct Int4Shape {
  constexpr Int4Shape(int64_t k, int64_t groupsize, int64_t scale_bytes)
      : groups((k + groupsize - 1) / groupsize),
        group_bytes(2 * kRowTile * scale_bytes),
        tile_bytes(groups * group_bytes + (k + kBlock - 1) / kBlock * kInt4BlockBytes) {}
  int64_t groups;
  int64_t group_bytes;  // scales and zeros of 16 rows
  int64_t tile_bytes;
};

/// Where the rows of activations go that `prepare` makes for a weight format, and how it makes
/// them.
struct PrepareArgs {
  const float* x;           // [k]
  const void* norm_weight;  // [k]; null: no norm
  Dtype norm_dtype;
  float eps;
  int64_t k;
  int64_t groupsize;    // int4 only
  const int32_t* perm;  // of the weight
};

/// One (row, key/value head, split) of attention: `heads` query heads against cache positions [0,
/// length).
struct AttendArgs {
  const float* q;  // [heads, head_dim]
  const void* k;   // [length, head_dim]
  const void* v;   // [length, head_dim]
  Dtype dtype;     // of k and v
  int64_t heads;
  int64_t head_dim;
  int64_t length;  // 1 .. kSplit
  float scale;     // of the scores
  float* partial;  // head h: output [head_dim] (not normalized), maximum, sum at partial + h *
                   // partial_stride
  int64_t partial_stride;
  float* scratch;  // attend_scratch_floats(head_dim)
};

constexpr int64_t attend_scratch_floats(int64_t head_dim) {
  constexpr int64_t kHeadBlock = 4;
  constexpr int64_t kMaxLanes = 16;
  return kHeadBlock * (kSplit + head_dim + 2 * kMaxLanes);
}

/// `tokens` of a prompt times the `heads` query heads that share a key/value head, in bfloat16.
struct PromptAttendArgs {
  const uint16_t* q;   // [tokens, heads, head_dim], tokens `token_stride` apart
  const uint16_t* k;   // [positions, head_dim]
  const uint16_t* v;   // the same
  const int64_t* pos;  // [tokens]; a token sees positions 0 ... its own
  int64_t tokens, heads;
  int64_t head_dim;  // a multiple of kBlock
  int64_t token_stride;
  float scale;    // of the scores
  uint16_t* out;  // as q
  void* scratch;  // attend_prompt_bytes of it, 64-byte aligned
};

/// What CPUs with AVX512_BF16 have for prompts, beside the kernels of their instruction set.
struct PromptKernels {
  /// x [rows, k], k a multiple of kBlock, for matmul: [block of kPackedRows rows][pair of
  /// columns][row], packed_bytes(rows, k) of memory.
  void (*pack_rows)(const uint16_t* x, int64_t rows, int64_t k, uint32_t* packed);
  /// out[m * n + i] = dot(weight row i, x[m]) in bfloat16 for i in [begin, end), the sums in
  /// float32, int4 weights rounded to bfloat16. `begin` is a multiple of kMaxPanelRows; formats
  /// bfloat16, int8 and int4. sums: kMaxPanelRows floats for each of the rows up to a multiple of
  /// kPackedRows; panel: kPanelPairs * kMaxPanelRows dwords.
  void (*matmul)(const Weight& weight, int64_t begin, int64_t end, const uint32_t* packed,
                 int64_t rows, uint16_t* out, float* sums, uint32_t* panel);
  size_t (*attend_prompt_bytes)(const PromptAttendArgs& args);
  void (*attend_prompt)(const PromptAttendArgs& args);
};

/// Rows as pack_rows pads them.
constexpr int64_t packed_rows(int64_t rows) {
  return (rows + kPackedRows - 1) / kPackedRows * kPackedRows;
}
/// With what the last store of pack_rows writes behind its rows.
constexpr int64_t packed_bytes(int64_t rows, int64_t k) {
  return packed_rows(rows) * k * 2 + 64;
}

/// The kernels of one instruction set.
struct Kernels {
  const char* name;
  /// Bytes of one prepared activation row of k columns, a multiple of 64.
  size_t (*activation_bytes)(Format format, int64_t k, int64_t groupsize);
  /// Writes the activation row that gemv of `format` reads: x, or rms_norm(x), in that format's
  /// order and precision. `out` is 64-byte aligned.
  void (*prepare)(Format format, const PrepareArgs& args, void* out);
  /// out[m * out_stride + (n - begin)] = dot(weight row n, activation row m) for n in [begin, end).
  /// `begin` is a multiple of kRowTile; activation rows are activation_bytes apart. out may be
  /// written up to the next multiple of kRowTile.
  void (*gemv)(const Weight& weight, int64_t begin, int64_t end, const void* activations, int rows,
               float* out, int64_t out_stride);
  /// out[m * out_stride + n] = dot(weight row n, x[m]) for n in [begin, end) and any number of
  /// float32 rows x [rows, k], with float32 products. `panel`: kPanelColumns * kMaxPanelRows
  /// floats.
  void (*matmul)(const Weight& weight, int64_t begin, int64_t end, const float* x, int64_t rows,
                 float* out, int64_t out_stride, float* panel);
  void (*attend)(const AttendArgs& args);
  /// h[i] = silu(gate[i]) * up[i].
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* h);
  /// y[d] = sum_s partial[s][d] * exp(max_s - max) / total over the splits, in order.
  void (*merge)(const float* partials, int64_t splits, int64_t stride, int64_t head_dim, float* y);
  /// out[i] = in[i] converted, n values of `dtype`.
  void (*to_float)(const void* in, Dtype dtype, int64_t n, float* out);
  void (*from_float)(const float* in, int64_t n, Dtype dtype, void* out);
  const PromptKernels* prompt;  ///< null if this instruction set has none
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// The kernels for this CPU, capped by the environment's GPTFAST_CPU (see ops::path). Throws
/// c10::Error on an unknown value.
const Kernels& kernels();

/// Null unless this CPU, capped like kernels(), has the bfloat16 instructions.
const PromptKernels* prompt_kernels();

/// What was chosen: "avx512_bf16" (the kernels of AVX-512 and those of prompts), "avx512", "avx2"
/// or "portable".
const char* path();

}  // namespace gptfast::cpu
