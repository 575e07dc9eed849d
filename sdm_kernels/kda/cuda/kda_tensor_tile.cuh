// SPDX-License-Identifier: Apache-2.0
//! @file fp16 matrices in shared memory, swizzled in 16-byte pieces, and fragments of them.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

namespace sdm::kda::cuda {

// kRows x kCols; panels of 64 columns as in a record, or rows of 32 columns. Fragments begin at
// rows that are multiples of 8 and columns that are multiples of 16, so that the column only flips
// bits of the offset that a lane has anyway.
template <int kRows, int kCols>
struct KdaTile {
  static_assert(kCols == 32 || kCols % 64 == 0);
  static constexpr int kBytes = kRows * kCols * 2;
  static constexpr int kRowBytes = kCols == 32 ? 64 : 128;

  // Byte offset of an element.
  __device__ __forceinline__ static constexpr int at(int row, int col) {
    if constexpr (kCols == 32) {
      return row * 64 + (((col >> 3) ^ ((row >> 1) & 3)) << 4) + (col & 7) * 2;
    } else {
      const int piece = ((col >> 3) & 7) ^ (row & 7);
      return (col >> 6) * kRows * 128 + row * 128 + (piece << 4) + (col & 7) * 2;
    }
  }

  // The same of lane's row and column inside a fragment that begins at (row, col).
  __device__ __forceinline__ static uint32_t address(uint32_t tile, int row, int col, int lane) {
    const int panel = kCols == 32 ? 0 : (col >> 6) * kRows * 128;
    const int flip = (kCols == 32 ? col : col & 63) * 2;
    return tile + static_cast<uint32_t>(panel + row * kRowBytes) +
           static_cast<uint32_t>(lane ^ flip);
  }

  // Row lane % 16, column lane / 16 * 8.
  __device__ __forceinline__ static int lane_direct() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return at(lane % 16, lane / 16 * 8);
  }

  // Row lane / 16 * 8 + lane % 8, column lane / 8 % 2 * 8.
  __device__ __forceinline__ static int lane_crossed() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
  }

  // A[i, k] = tile[row + i, col + k], 16 x 16.
  __device__ __forceinline__ static void load_a(uint32_t (&a)[4], uint32_t tile, int row, int col) {
    load_matrices(a, address(tile, row, col, lane_direct()));
  }

  // A[i, k] = tile[row + k, col + i].
  __device__ __forceinline__ static void load_a_transposed(
      uint32_t (&a)[4], uint32_t tile, int row, int col
  ) {
    load_matrices_transposed(a, address(tile, row, col, lane_crossed()));
  }

  // B[k, n] = tile[row + k, col + n], 16 x 16: two fragments, b[0..1] and b[2..3].
  __device__ __forceinline__ static void load_b(uint32_t (&b)[4], uint32_t tile, int row, int col) {
    load_matrices_transposed(b, address(tile, row, col, lane_direct()));
  }

  // B[k, n] = tile[row + n, col + k].
  __device__ __forceinline__ static void load_b_transposed(
      uint32_t (&b)[4], uint32_t tile, int row, int col
  ) {
    load_matrices(b, address(tile, row, col, lane_crossed()));
  }

  // Stores a 16 x 8 result times `factor`; `col` is a multiple of 8.
  __device__ __forceinline__ static void store_c(
      char* tile, int row, int col, const float (&c)[4], float factor
  ) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    char* to = tile + address(0, row, col, at(lane / 4, lane % 4 * 2));
    *reinterpret_cast<uint32_t*>(to) = pack_f16(c[0] * factor, c[1] * factor);
    *reinterpret_cast<uint32_t*>(to + 8 * kRowBytes) = pack_f16(c[2] * factor, c[3] * factor);
  }
};

// c[n] += a * b for the kTiles 16 x 8 results next to each other; b holds two fragments a piece.
template <int kTiles>
__device__ __forceinline__ void multiply_add(
    float (&c)[kTiles][4], const uint32_t (&a)[4], const uint32_t (&b)[kTiles / 2][4]
) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    mma_f16(c[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      c[n][x] = 0.0f;
    }
  }
}

}  // namespace sdm::kda::cuda
