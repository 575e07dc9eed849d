// SPDX-License-Identifier: Apache-2.0
//! @file Products of a group of four warps, 16 rows each, with both operands in shared memory: what
//! the token stage of the tensor backward multiplies without changing it, with the instructions of
//! sm_90a (kda_tensor_products.cuh). Tiles are KdaTile of 64 and more columns.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"

namespace sdm::kda::cuda {

#if KDA_WARPGROUP_PRODUCTS

// What threads wrote to shared memory is there for the products behind the next barrier.
__device__ __forceinline__ void publish_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define KDA_TILE(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])

// c = or += a b, 64 x 16 x 16.
template <int kAdd>
__device__ __forceinline__ void multiply_group(float (&c)[2][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, %10, 1, 1, 0, 0;"
      : KDA_TILE(c[0]), KDA_TILE(c[1])
      : "l"(a), "l"(b), "n"(kAdd)
  );
}

// 64 x 64 x 16.
template <int kAdd>
__device__ __forceinline__ void multiply_group(float (&c)[4][2][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, %34, 1, 1, 0, 0;"
      : KDA_TILE(c[0][0]),
        KDA_TILE(c[0][1]),
        KDA_TILE(c[1][0]),
        KDA_TILE(c[1][1]),
        KDA_TILE(c[2][0]),
        KDA_TILE(c[2][1]),
        KDA_TILE(c[3][0]),
        KDA_TILE(c[3][1])
      : "l"(a), "l"(b), "n"(kAdd)
  );
}

#undef KDA_TILE

// c = a b^T over kCols columns of both: 64 rows of a, as many rows of b as c has columns. kPanel:
// bytes between the panels of b.
template <int kCols, int kPanel, typename Result>
__device__ __forceinline__ void start_group_product(Result& c, uint32_t a, uint32_t b) {
  const PanelPlace from_a = PanelPlace::at(a), from_b = PanelPlace::at(b);
#pragma unroll
  for (int i = 0; i < kCols / 16; ++i) {
    const uint64_t at_a = matrix_descriptor(from_a + (i / 4 * 64 * 128 + i % 4 * 32));
    const uint64_t at_b = matrix_descriptor(from_b + (i / 4 * kPanel + i % 4 * 32));
    if (i == 0) {
      multiply_group<0>(c, at_a, at_b);
    } else {
      multiply_group<1>(c, at_a, at_b);
    }
  }
}

#else

__device__ __forceinline__ void publish_operands() {}

#endif

}  // namespace sdm::kda::cuda
