// SPDX-License-Identifier: Apache-2.0
//! @file Products of a group of four warps, 16 rows each, with a panel of 64 x 64 in shared memory
//! (kda_tensor_records.cuh): c [16, 64] += a [16, 16] b [16, 64] per warp, a and c in registers.
//!
//! Two ways to the same fragments. With the instructions of sm_90a the four warps multiply together
//! and read the panel once; the products run while the warps go on. Else each warp uses mma.sync,
//! and everything is done when the function returns. For the first way's sake:
//!   begin_products() after the last change of a or c, then products, then end_products(), and
//!   wait_products<n>() until at most n such groups are running, before a or c is touched.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDA_WARPGROUP_PRODUCTS 1
#else
#define KDA_WARPGROUP_PRODUCTS 0
#endif

namespace sdm::kda::cuda {

// Where a matrix starts in shared memory, as the products name it: the low word of its descriptor,
// or its address. One place of a record is made from the address, the others by one addition each,
// where a descriptor from an address takes four operations that wait for each other.
struct PanelPlace {
  uint32_t word;

  __device__ __forceinline__ static PanelPlace at(uint32_t address) {
    return {KDA_WARPGROUP_PRODUCTS ? ((address & 0x3ffffu) >> 4) | (1u << 16) : address};
  }

  __device__ __forceinline__ PanelPlace operator+(int bytes) const {
    return {word + (KDA_WARPGROUP_PRODUCTS ? bytes / 16 : bytes)};
  }
};

#if KDA_WARPGROUP_PRODUCTS

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kRunning>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kRunning) : "memory");
}

template <int kRows>
__device__ __forceinline__ void settle(float (&x)[kRows][4]) {
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("" : "+f"(x[n][i])::"memory");
    }
  }
}

template <int kRows>
__device__ __forceinline__ void settle(uint32_t (&x)[kRows][4]) {
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("" : "+r"(x[n][i])::"memory");
    }
  }
}

// Descriptor of a matrix with the 128-byte swizzle whose groups of 8 rows of 128 bytes follow each
// other: the stride between groups is 1024 bytes, and no other stride is used for 64 columns.
__device__ __forceinline__ uint64_t matrix_descriptor(PanelPlace place) {
  constexpr uint32_t kHigh = (1u << 30) | (1024 >> 4);
  return (uint64_t{kHigh} << 32) | place.word;
}

#define KDA_TILE(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])

// Tiles kTile to kTile + 7 of c; kTransposed: b is stored with its columns along the rows; kAdd 0:
// c is replaced.
template <int kTransposed, int kTile, int kAdd, int kTiles>
__device__ __forceinline__ void multiply_64(
    float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b
) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, %38, 1, 1, %37;"
      : KDA_TILE(c, kTile),
        KDA_TILE(c, kTile + 1),
        KDA_TILE(c, kTile + 2),
        KDA_TILE(c, kTile + 3),
        KDA_TILE(c, kTile + 4),
        KDA_TILE(c, kTile + 5),
        KDA_TILE(c, kTile + 6),
        KDA_TILE(c, kTile + 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed), "n"(kAdd)
  );
}

// The same for bfloat16.
template <int kTransposed, int kTile, int kTiles>
__device__ __forceinline__ void multiply_bf16_64(
    float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b
) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
      : KDA_TILE(c, kTile),
        KDA_TILE(c, kTile + 1),
        KDA_TILE(c, kTile + 2),
        KDA_TILE(c, kTile + 3),
        KDA_TILE(c, kTile + 4),
        KDA_TILE(c, kTile + 5),
        KDA_TILE(c, kTile + 6),
        KDA_TILE(c, kTile + 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed)
  );
}

#undef KDA_TILE

// Tiles kTile to kTile + 7 of c += a b for bfloat16: b[k][n] = panel[16 step + k][n], or with kRows
// panel[n][16 step + k].
template <bool kRows, int kTile, int kTiles>
__device__ __forceinline__ void add_bf16_product(
    float (&c)[kTiles][4], const uint32_t (&a)[4], PanelPlace panel, int step
) {
  multiply_bf16_64<kRows ? 0 : 1, kTile>(
      c, a, matrix_descriptor(panel + step * (kRows ? 32 : 2048))
  );
}

// b[k][n] = panel[n][16 kStep + k]. Where n < 16 kFirst that is zero: this way multiplies all of
// it, because accumulators that are used in parts cannot stay where the instruction wants them.
template <int kStep, int kFirst = 0, bool kFresh = false>
__device__ __forceinline__ void add_product(
    float (&c)[8][4], const uint32_t (&a)[4], PanelPlace panel
) {
  multiply_64<0, 0, kFresh ? 0 : 1>(c, a, matrix_descriptor(panel + kStep * 32));
}

// b[k][n] = panel[16 kStep + k][n]; c is tiles kTile to kTile + 7. Where n >= 16 kEnd b is zero.
template <int kStep, int kTile, int kEnd = 4, bool kFresh = false, int kTiles>
__device__ __forceinline__ void add_row_product(
    float (&c)[kTiles][4], const uint32_t (&a)[4], PanelPlace panel
) {
  multiply_64<1, kTile, kFresh ? 0 : 1>(c, a, matrix_descriptor(panel + kStep * 2048));
}

#else

__device__ __forceinline__ void begin_products() {}

__device__ __forceinline__ void end_products() {}

template <int kRunning>
__device__ __forceinline__ void wait_products() {}

template <typename T, int kRows>
__device__ __forceinline__ void settle(T (&)[kRows][4]) {}

template <int kTile, int kTiles>
__device__ __forceinline__ void clear_tiles(float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = kTile; n < kTile + 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[n][i] = 0.0f;
    }
  }
}

template <int kStep, int kFirst = 0, bool kFresh = false>
__device__ __forceinline__ void add_product(
    float (&c)[8][4], const uint32_t (&a)[4], PanelPlace panel
) {
  // Rows of the panel as the n of the product: lane l gives row l % 8 of matrix l / 8, the matrices
  // being k 0-7 and 8-15 of n 0-7, then of n 8-15.
  const int lane = threadIdx.x % 32;
  const uint32_t at = (lane / 16 * 8 + lane % 8) * 128 + (((lane / 8 & 1) ^ (lane & 7)) << 4);
  if constexpr (kFresh) {
    clear_tiles<0>(c);
  }
#pragma unroll
  for (int n = kFirst; n < 4; ++n) {
    uint32_t b[4];
    load_matrices(b, panel.word + n * 2048 + (at ^ (kStep * 32)));
    mma_f16(c[2 * n], a, b[0], b[1]);
    mma_f16(c[2 * n + 1], a, b[2], b[3]);
  }
}

template <int kStep, int kTile, int kEnd = 4, bool kFresh = false, int kTiles>
__device__ __forceinline__ void add_row_product(
    float (&c)[kTiles][4], const uint32_t (&a)[4], PanelPlace panel
) {
  // Rows of the panel as the k of the product, transposed on the way.
  const int lane = threadIdx.x % 32;
  const uint32_t at = (lane / 8 % 2 * 8 + lane % 8) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
  if constexpr (kFresh) {
    clear_tiles<kTile>(c);
  }
#pragma unroll
  for (int n = 0; n < kEnd; ++n) {
    uint32_t b[4];
    load_matrices_transposed(b, panel.word + kStep * 2048 + (at ^ (n * 32)));
    mma_f16(c[kTile + 2 * n], a, b[0], b[1]);
    mma_f16(c[kTile + 2 * n + 1], a, b[2], b[3]);
  }
}

template <bool kRows, int kTile, int kTiles>
__device__ __forceinline__ void add_bf16_product(
    float (&c)[kTiles][4], const uint32_t (&a)[4], PanelPlace panel, int step
) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint32_t b[4];
    if constexpr (kRows) {
      const uint32_t at = (lane / 16 * 8 + lane % 8) * 128 + (((lane / 8 & 1) ^ (lane & 7)) << 4);
      load_matrices(b, panel.word + n * 2048 + (at ^ (step * 32)));
    } else {
      const uint32_t at = (lane / 8 % 2 * 8 + lane % 8) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
      load_matrices_transposed(b, panel.word + step * 2048 + (at ^ (n * 32)));
    }
    mma_bf16(c[kTile + 2 * n], a, b[0], b[1]);
    mma_bf16(c[kTile + 2 * n + 1], a, b[2], b[3]);
  }
}

#endif

// c += a b^T, or with kFresh c = a b^T, over the 64 columns of a panel, of which row n has
// n / 16 * 16 + 16 that count.
template <bool kFresh = false>
__device__ __forceinline__ void add_triangular_product(
    float (&c)[8][4], const uint32_t (&a)[4][4], PanelPlace panel
) {
  add_product<0, 0, kFresh>(c, a[0], panel);
  add_product<1, 1>(c, a[1], panel);
  add_product<2, 2>(c, a[2], panel);
  add_product<3, 3>(c, a[3], panel);
}

// The same over all columns of one panel.
template <bool kFresh = false>
__device__ __forceinline__ void add_panel_product(
    float (&c)[8][4], const uint32_t (*a)[4], PanelPlace panel
) {
  add_product<0, 0, kFresh>(c, a[0], panel);
  add_product<1>(c, a[1], panel);
  add_product<2>(c, a[2], panel);
  add_product<3>(c, a[3], panel);
}

// Tiles kTile to kTile + 7 of c += a b over the rows of one panel.
template <int kTile, int kTiles>
__device__ __forceinline__ void add_panel_rows_product(
    float (&c)[kTiles][4], const uint32_t (&a)[4][4], PanelPlace panel
) {
  add_row_product<0, kTile>(c, a[0], panel);
  add_row_product<1, kTile>(c, a[1], panel);
  add_row_product<2, kTile>(c, a[2], panel);
  add_row_product<3, kTile>(c, a[3], panel);
}

// c = a b over the rows of one panel, of which row k has k / 16 * 16 + 16 that count.
__device__ __forceinline__ void triangular_rows_product(
    float (&c)[8][4], const uint32_t (&a)[4][4], PanelPlace panel
) {
  add_row_product<0, 0, 1, true>(c, a[0], panel);
  add_row_product<1, 0, 2>(c, a[1], panel);
  add_row_product<2, 0, 3>(c, a[2], panel);
  add_row_product<3, 0>(c, a[3], panel);
}

}  // namespace sdm::kda::cuda
