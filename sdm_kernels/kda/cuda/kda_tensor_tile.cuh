// SPDX-License-Identifier: Apache-2.0
//! @file fp16 matrices in shared memory, swizzled in 16-byte pieces, and fragments of them.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

namespace sdm::kda::cuda {

// kRows x kCols; panels of 64 columns as in a record, or rows of 32 columns.
template <int kRows, int kCols>
struct KdaTile {
  static_assert(kCols == 32 || kCols % 64 == 0);
  static constexpr int kBytes = kRows * kCols * 2;

  // Byte offset of an element.
  __device__ __forceinline__ static int at(int row, int col) {
    if constexpr (kCols == 32) {
      const int piece = (row & 1) * 4 + (((col >> 3) & 3) ^ ((row >> 1) & 3));
      return ((row >> 1) * 64 + piece * 8 + (col & 7)) * 2;
    } else {
      const int piece = ((col >> 3) & 7) ^ (row & 7);
      return ((col >> 6) * kRows * 64 + row * 64 + piece * 8 + (col & 7)) * 2;
    }
  }

  // A[i, k] = tile[row + i, col + k], 16 x 16.
  __device__ __forceinline__ static void load_a(uint32_t (&a)[4], uint32_t tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrices(a, tile + static_cast<uint32_t>(at(row + lane % 16, col + lane / 16 * 8)));
  }

  // A[i, k] = tile[row + k, col + i].
  __device__ __forceinline__ static void load_a_transposed(
      uint32_t (&a)[4], uint32_t tile, int row, int col
  ) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int r = row + lane / 16 * 8 + lane % 8;
    load_matrices_transposed(a, tile + static_cast<uint32_t>(at(r, col + lane / 8 % 2 * 8)));
  }

  // B[k, n] = tile[row + k, col + n], 16 x 16: two fragments, b[0..1] and b[2..3].
  __device__ __forceinline__ static void load_b(uint32_t (&b)[4], uint32_t tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrices_transposed(
        b, tile + static_cast<uint32_t>(at(row + lane % 16, col + lane / 16 * 8))
    );
  }

  // B[k, n] = tile[row + n, col + k].
  __device__ __forceinline__ static void load_b_transposed(
      uint32_t (&b)[4], uint32_t tile, int row, int col
  ) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int r = row + lane / 16 * 8 + lane % 8;
    load_matrices(b, tile + static_cast<uint32_t>(at(r, col + lane / 8 % 2 * 8)));
  }

  // Stores a 16 x 8 result times `factor`.
  __device__ __forceinline__ static void store_c(
      char* tile, int row, int col, const float (&c)[4], float factor
  ) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int r = row + lane / 4, k = col + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(tile + at(r, k)) = pack_f16(c[0] * factor, c[1] * factor);
    *reinterpret_cast<uint32_t*>(tile + at(r + 8, k)) = pack_f16(c[2] * factor, c[3] * factor);
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
