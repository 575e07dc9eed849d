// SPDX-License-Identifier: Apache-2.0
//! @file Powers of two that bring the largest magnitude of a block into the range of fp16, for
//! operands of the backward: gradients may be of any size.
//!
//! A block is stored as fp16 numbers times its unit. A sum over blocks of different units takes the
//! largest of them, and the other operand is multiplied by unit / largest, which is at most 1.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

namespace sdm::kda::cuda {

constexpr unsigned kWarpMask = 0xffffffffu;

struct KdaUnit {
  float unit;     // value = stored * unit
  float inverse;  // stored = value * inverse
};

// Of a power of two, as units are.
__device__ __forceinline__ float inverse_power(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// Of a block whose largest magnitude has these bits: stored numbers are below 2^14.
__device__ __forceinline__ KdaUnit unit_of(uint32_t largest) {
  const uint32_t power = largest & 0x7f800000u;
  const float unit = __uint_as_float((power > (14u << 23) ? power : 14u << 23) - (13u << 23));
  return {unit, inverse_power(unit)};
}

__device__ __forceinline__ uint32_t magnitude(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}

template <int kTiles>
__device__ __forceinline__ uint32_t largest_of(const float (&c)[kTiles][4]) {
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      largest = fmaxf(largest, fabsf(c[n][x]));
    }
  }
  return __float_as_uint(largest);
}

// Unit of a block that the warp holds.
template <int kTiles>
__device__ __forceinline__ KdaUnit unit_of_warp(const float (&c)[kTiles][4]) {
  return unit_of(__reduce_max_sync(kWarpMask, largest_of(c)));
}

// unit / largest unit, a power of two that is at most 1, in both halves.
__device__ __forceinline__ uint32_t share_pair(float unit, float top) {
  const float share = unit * inverse_power(top);
  return pack_f16(share, share);
}

__device__ __forceinline__ uint32_t multiply_pair(uint32_t x, uint32_t factor) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor));
  return y;
}

__device__ __forceinline__ void multiply_fragment(uint32_t (&a)[4], uint32_t factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = multiply_pair(a[i], factor);
  }
}

}  // namespace sdm::kda::cuda
