// Single instructions of the GPU that have no C++ spelling, and scalar types that are known only at
// run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/kernels.h"

namespace gptfast::cuda {

constexpr int kWarp = 32;

// ---- Programmatic dependent launch (PDL). A kernel of a step lets its successor start at once;
// the successor requests weights, which no kernel writes, and then waits until its predecessor has
// completed and its writes are visible. Below sm_90 there is neither, and launches carry no PDL
// attribute.

__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Every kernel of a step runs this before it touches what another kernel writes, on every path.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Asynchronous copies global -> shared, 16 bytes a lane.

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Weights are read once a step: they leave L2 first, so that activations and caches stay.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Copies 16 bytes, or writes zeros when `valid` is false.
__device__ inline void copy_async16(uint32_t dst, const void* src, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ inline void copy_async16(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}

/// Copies 16 bytes that every block reads: no hint. (With a hint that it made in an unrolled loop,
/// nvcc 13.0 addressed the copies by an invalid pair of uniform registers.)
__device__ inline void copy_async16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

/// Copies 16 bytes without a hint, or writes zeros when `valid` is false.
__device__ inline void copy_async16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// Copies 8 bytes.
__device__ inline void copy_async8(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}

__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `Pending` of this thread's youngest groups are in flight.
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ inline uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ inline uint2 load_shared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ inline float2 load_shared_float2(uint32_t address) {
  const uint2 v = load_shared8(address);
  return {__uint_as_float(v.x), __uint_as_float(v.y)};
}

__device__ inline uint32_t load_shared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

/// Stores if `valid`. A branch would keep what computes `v` from overlapping with what follows.
__device__ inline void store_shared4(uint32_t address, uint32_t v, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.u32 [%0], %1; }" ::"r"(address),
               "r"(v), "r"(static_cast<uint32_t>(valid))
               : "memory");
}

__device__ inline void store_shared8(uint32_t address, uint2 v, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.shared.v2.u32 [%0], {%1,%2}; }" ::"r"(
                   address),
               "r"(v.x), "r"(v.y), "r"(static_cast<uint32_t>(valid))
               : "memory");
}

__device__ inline void store_shared2(uint32_t address, uint16_t v, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.u16 [%0], %1; }" ::"r"(address),
               "h"(v), "r"(static_cast<uint32_t>(valid))
               : "memory");
}

/// atomicInc() that orders what the block wrote before a barrier ahead of it, and what the blocks
/// that came before wrote ahead of what follows.
__device__ inline unsigned count_arrival(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// ---- Tensor core products, accumulated in place. Lane = 4 * g + t. a: rows g and g + 8 of a
// 16-row tile of weights; b: column g; d: rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2t
// and 2t + 1. The order of k within a product is free as long as a and b agree; formats.cuh uses
// that to read operands 16 bytes at a time.

template <typename T>
__device__ inline void mma_k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                               uint32_t b0, uint32_t b1);

template <>
__device__ inline void mma_k16<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_k16<__half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// 8 bfloat16 columns: k = 2t, 2t + 1.
__device__ inline void mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ inline void mma_k32_int8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// The same with d = c + a b where every element of c is the bits `c`.
__device__ inline void mma_k32_int8_from(int (&d)[4], int c, uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c));
}

// ---- 8 x 8 matrices of 16-bit elements. Lane 4 * g + t holds elements 2t and 2t + 1 of row g in a
// register: a quarter of operand a above, half of b transposed.

/// Four matrices from shared memory; lanes 8 i .. 8 i + 7 pass the addresses of the rows of matrix
/// i, 16 bytes each.
__device__ inline uint4 load_matrices(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

/// The same with every matrix transposed.
__device__ inline uint4 load_matrices_transposed(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ inline uint32_t transpose_matrix(uint32_t v) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(v));
  return transposed;
}

// ---- Scalars whose type is a launch argument: norm weights, caches and tables have the model's
// dtype.

__device__ inline float load_scalar(const void* p, int64_t i, Scalar type) {
  if (type == Scalar::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  }
  if (type == Scalar::kFloat16) {
    return __half2float(static_cast<const __half*>(p)[i]);
  }
  return static_cast<const float*>(p)[i];
}

/// Elements i .. i + 3; i is a multiple of 4.
__device__ inline float4 load_scalar4(const void* p, int64_t i, Scalar type) {
  if (type == Scalar::kFloat32) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
  }
  const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + i);
  if (type == Scalar::kBFloat16) {
    return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000U),
            __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000U)};
  }
  const float2 lo = __half22float2(reinterpret_cast<const __half2&>(v.x));
  const float2 hi = __half22float2(reinterpret_cast<const __half2&>(v.y));
  return {lo.x, lo.y, hi.x, hi.y};
}

__device__ inline void store_scalar(void* p, int64_t i, Scalar type, float value) {
  if (type == Scalar::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(value);
  } else if (type == Scalar::kFloat16) {
    static_cast<__half*>(p)[i] = __float2half_rn(value);
  } else {
    static_cast<float*>(p)[i] = value;
  }
}

/// The larger, or NaN if one is.
__device__ inline float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

/// 1 / v within a unit in the last place, v and the result being normal.
__device__ inline float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(0xffffffffU, v, offset);
  }
  return v;
}

}  // namespace gptfast::cuda
