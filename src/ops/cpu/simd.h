// Vectors of floats and integers for the kernels, in the width of the instruction set that this
// file is compiled for. Arithmetic is that of GCC's and Clang's vector extensions; only what they
// cannot say is spelled with intrinsics.
#pragma once

#include <string.h>

#include "ops/cpu/kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gptfast::cpu::GPTFAST_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Float = float __attribute__((vector_size(kLanes * 4)));
using Int = int32_t __attribute__((vector_size(kLanes * 4)));
using Uint = uint32_t __attribute__((vector_size(kLanes * 4)));
using Half = uint16_t __attribute__((vector_size(kLanes * 2)));  // 16-bit floats, still encoded
using Short = int16_t __attribute__((vector_size(kLanes * 2)));
using Byte = int8_t __attribute__((vector_size(kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The hardware's prefetchers alone leave a core's stream at 75 to 85 % of a plain read's when the
// loop does arithmetic, and break down when it reads several rows at once. Asking two pages ahead
// gives 88 to 95 %, and doubles the speed of several rows (Zen 5, one thread, 44 GB/s; 2 and 4 KB
// gave 77 to 94 %).
constexpr int64_t kPrefetchBytes = 8192;

/// Asks for the cache line that a kernel of kRows adjacent rows of `row_bytes` reads some time
/// after the one at `p`. Past the end of the weights this does nothing.
template <int kRows>
inline void prefetch_ahead(const void* p, int64_t row_bytes) {
  constexpr int kFirstLevel = 3;
  constexpr int kSecondLevel = 2;
  const auto line =
      reinterpret_cast<uintptr_t>(p);  // a number, as the sum may lie outside any object
  const int64_t tile = kRows * row_bytes;
  // NOLINTBEGIN(performance-no-int-to-ptr)
  if (kRows > 1 && tile > kPrefetchBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(line + tile), /*rw=*/0, kSecondLevel);
  } else {
    __builtin_prefetch(reinterpret_cast<const void*>(line + kPrefetchBytes), /*rw=*/0, kFirstLevel);
  }
  // NOLINTEND(performance-no-int-to-ptr)
}

template <class Vector, class T>
inline Vector load_as(const T* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <class Vector, class T>
inline void store_as(T* p, Vector v) {
  memcpy(p, &v, sizeof(v));
}

inline Float splat(float x) {
  return x - Float{};
}

inline Float multiply_add(Float a, Float b, Float c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Float max(Float a, Float b) {
  return a > b ? a : b;
}
inline Float abs(Float a) {
  return (Float)((Uint)a & 0x7fffffffu);
}

/// Sum of the lanes, in a fixed order.
inline float sum(Float v) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
  const __m256 half = v;
#endif
#if defined(__AVX2__)
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

inline int32_t sum(Int v) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)v),
                                        _mm512_extracti32x8_epi32((__m512i)v, 1));
#elif defined(__AVX2__)
  const __m256i half = (__m256i)v;
#endif
#if defined(__AVX2__)
  __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  quarter = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/// Lanes that fit the narrower type.
inline Byte narrow_to_bytes(Int v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i shorts =
      _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  return (Byte)_mm_cvtsi128_si64(_mm_packs_epi16(shorts, shorts));
#else
  return __builtin_convertvector(v, Byte);
#endif
}
inline Short narrow_to_shorts(Int v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Short)_mm_packs_epi32(_mm256_castsi256_si128((__m256i)v),
                                _mm256_extracti128_si256((__m256i)v, 1));
#else
  return __builtin_convertvector(v, Short);
#endif
}

/// Of 2 kLanes floats at p: those at even places and those at odd ones.
inline void split_pairs(const float* p, Float& even, Float& odd) {
  const Float a = load_as<Float>(p);
  const Float b = load_as<Float>(p + kLanes);
#if defined(__AVX512F__)
  const __m512i index = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  even = _mm512_permutex2var_ps(a, index, b);
  odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b);
#elif defined(__AVX2__)
  const __m256 low = _mm256_permute2f128_ps(a, b, 0x20);
  const __m256 high = _mm256_permute2f128_ps(a, b, 0x31);
  even = _mm256_shuffle_ps(low, high, 0x88);
  odd = _mm256_shuffle_ps(low, high, 0xdd);
#else
  even = Float{a[0], a[2], b[0], b[2]};
  odd = Float{a[1], a[3], b[1], b[3]};
#endif
}

/// The largest lane; lanes must not be negative.
inline float max_lane(Float v) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
  const __m256 half = v;
#endif
#if defined(__AVX2__)
  __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
#else
  const float a = v[0] > v[2] ? v[0] : v[2];
  const float b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  uint32_t out = sign | ((magnitude << 13) +
                         (112u << 23));  // a normal number: only the exponent's bias differs
  if (magnitude >= 0x7c00u) out = sign | 0x7f800000u | (magnitude << 13);  // infinity, NaN
  float result;
  memcpy(&result, &out, 4);
  if (magnitude < 0x0400u) {  // zero or subnormal: a multiple of 2^-24
    result = static_cast<float>(magnitude) * 0x1p-24f;
    if (sign != 0) result = -result;
  }
  return result;
}

inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or more
  if (bits < 0x38800000u) {  // below the least normal: adding 0.5 rounds to a multiple of 2^-24
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return sign | (bits - 0x3f000000u);
  }
  return sign | ((bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

/// To nearest, ties to even; a NaN stays one.
inline Half round_to_bfloat16(Float x) {
  const Uint bits = (Uint)x;
  const Uint rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : Uint{} + 0x7fc0u, Half);
}

// ---- load: kLanes consecutive values as floats.
inline Float load(const float* p) {
  return load_as<Float>(p);
}
inline Float load(const BFloat16* p) {
  return (Float)(__builtin_convertvector(load_as<Half>(p), Uint) << 16);
}
inline Float load(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(load_as<__m128i>(p));
#else
  Float v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}
inline void store(float* p, Float v) {
  store_as(p, v);
}

/// The first `count` < kLanes values, then zeros.
template <class T>
inline Float load_first(const T* p, int64_t count) {
  T padded[kLanes] = {};
  memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
inline void store_first(float* p, Float v, int64_t count) {
  memcpy(p, &v, count * sizeof(float));
}

/// Nearest integers of |x| < 2^22, ties to even.
inline Float round(Float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the sum has no fraction bits
  return (x + kMagic) - kMagic;
}

/// e^x to 1 ulp or so; below -87 about 1e-38, above 88 about 1e38, so never 0 nor infinity.
inline Float exp(Float x) {
  x = x > -87.0f ? x : splat(-87.0f) + (x - x);  // x - x keeps NaN
  x = x < 88.0f ? x : splat(88.0f) + (x - x);
  const Float n = round(x * 1.44269504f);
  Float r = multiply_add(n, splat(-0.693359375f), x);  // ln 2 in two parts, the first one exact
  r = multiply_add(n, splat(2.12194440e-4f), r);
  // Taylor coefficients; |r| <= ln(2) / 2 leaves a relative error of 2^-26 after the 7th power.
  Float p = splat(1.0f / 5040);
  p = multiply_add(p, r, splat(1.0f / 720));
  p = multiply_add(p, r, splat(1.0f / 120));
  p = multiply_add(p, r, splat(1.0f / 24));
  p = multiply_add(p, r, splat(1.0f / 6));
  p = multiply_add(p, r, splat(0.5f));
  p = multiply_add(p, r, splat(1.0f));
  p = multiply_add(p, r, splat(1.0f));
  return p * (Float)((__builtin_convertvector(n, Int) + 127) << 23);
}

}  // namespace gptfast::cpu::GPTFAST_ISA
