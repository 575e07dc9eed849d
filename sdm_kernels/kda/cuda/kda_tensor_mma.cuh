// SPDX-License-Identifier: Apache-2.0
//! @file Instructions that the tensor path of Kimi delta attention is made of (sm_80 and later):
//! 16-bit matrix products, moves of 8 x 8 matrices, asynchronous copies, fast exponentials.
//!
//! Fragments, with g = lane / 4 and t = lane % 4: an 8 x 8 matrix of 16-bit elements has elements
//! [g][2t] (low half) and [g][2t + 1] in one register. A (16 x 16): rows 0-7 and 8-15 of columns
//! 0-7, then of columns 8-15. B (16 x 8), given as its transpose [n][k]: k 0-7, then k 8-15. C (16
//! x 8, float): [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1], so that two C make one A.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/async_copy.cuh"

namespace sdm::kda::cuda {

__device__ __forceinline__ void mma_f16(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices; lane l gives the row l % 8 of matrix l / 8 (16 bytes, aligned).
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix held by the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Products of both halves.
__device__ __forceinline__ uint32_t multiply_f16(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// The larger magnitudes of both halves; NaN loses.
__device__ __forceinline__ uint32_t largest_f16(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("{\n"
      ".reg .b32 a, b;\n"
      "abs.f16x2 a, %1;\n"
      "abs.f16x2 b, %2;\n"
      "max.f16x2 %0, a, b;\n"
      "}"
      : "=r"(z)
      : "r"(x), "r"(y));
  return z;
}

__device__ __forceinline__ uint32_t largest_bf16(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("{\n"
      ".reg .b32 a, b;\n"
      "abs.bf16x2 a, %1;\n"
      "abs.bf16x2 b, %2;\n"
      "max.bf16x2 %0, a, b;\n"
      "}"
      : "=r"(z)
      : "r"(x), "r"(y));
  return z;
}

__device__ __forceinline__ float2 unpack_f16(uint32_t x) {
  float2 y;
  asm("{\n"
      ".reg .f16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(y.x), "=f"(y.y)
      : "r"(x));
  return y;
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A barrier of some warps of the block, kThreads in all; barrier 0 is that of __syncthreads().
template <int kBarrier, int kThreads>
__device__ __forceinline__ void synchronise() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Of two neighbouring warps of at most eight. The number of a barrier should be known to the
// compiler, else it counts all sixteen as used.
__device__ __forceinline__ void synchronise_pair(int pair) {
  switch (pair) {
    case 0:
      return synchronise<1, 64>();
    case 1:
      return synchronise<2, 64>();
    case 2:
      return synchronise<3, 64>();
    default:
      return synchronise<4, 64>();
  }
}

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

using sdm::cuda::close_copies;
using sdm::cuda::start_copy;
using sdm::cuda::wait_for_copies;

}  // namespace sdm::kda::cuda
