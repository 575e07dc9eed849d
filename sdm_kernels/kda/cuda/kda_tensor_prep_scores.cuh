// SPDX-License-Identifier: Apache-2.0
//! @file Shared memory of the preparation, and its products: the norms of the raw rows, and the
//! scores of every level of the tree of row blocks (kda_tensor_prep_kernel.cuh).
//!
//! A warp owns a region of 24 operand rows, which it fills four times: with raw rows; with the
//! operands of levels 0 and 1, which lie inside its 8 rows; with another warp, with those of levels
//! 2 and 3 inside their 16 rows; with those of levels 4 and 5, which all warps multiply. Operands
//! of a product are 8 keys, 8 queries, 8 columns.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_inverse.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_rows.cuh"

namespace sdm::kda::cuda {

template <int kK>
struct PrepShared {
  // Rows are padded so that ldmatrix meets no bank twice.
  static constexpr int kRowBytes = kK * 2 + 16;
  static constexpr int kRegionBytes = 24 * kRowBytes;
  static constexpr int kQueries = 8 * kRowBytes;
  static constexpr int kColumns = 16 * kRowBytes;
  // Bytes.
  static constexpr int kScores = 8 * kRegionBytes;  // fp16 panel
  // For invert_unit_lower().
  static constexpr int kFarHeads = kScores + kPanelBytes;
  static constexpr int kFarTails = kFarHeads + FarTile::kBytes;
  static constexpr int kDiagonal = kFarTails + FarTile::kBytes;
  static constexpr int kTotals = kDiagonal + 64 * kDiagonalPitch * 4;  // float [8][K]: of 8 rows
  static constexpr int kBeta = kTotals + 8 * kK * 4;                   // float [64]
  static constexpr int kQueryNorm = kBeta + 256;                       // float [64]
  static constexpr int kKeyNorm = kQueryNorm + 256;                    // float [64]
  static constexpr int kBytes = kKeyNorm + 256;
  static_assert(2 * (kBytes + 1024) <= 164 * 1024, "two blocks a multiprocessor of sm_80");
  // Over the regions, once everything has been multiplied.
  static constexpr int kInverse = 0;  // fp16 panel: heads
  static constexpr int kTails = kPanelBytes;
  static_assert(kTails + kPanelBytes <= kScores);
};

// Where the lane's rows of the operands are for ldmatrix, from their first; 32 bytes a step of 16
// channels.
template <int kK>
struct OperandLanes {
  using Shared = PrepShared<kK>;
  int rows16;  // 16 rows, one step: A
  int rows8;   // 8 rows, two steps: columns
  int apart;   // 8 rows and 8 of the next region, one step: columns

  __device__ __forceinline__ OperandLanes() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    rows16 = lane % 16 * Shared::kRowBytes + lane / 16 * 16;
    rows8 = lane % 8 * Shared::kRowBytes + lane / 8 * 16;
    apart = lane % 8 * Shared::kRowBytes + lane / 8 % 2 * 16 + lane / 16 * Shared::kRegionBytes;
  }
};

// c += A B with 8 columns.
template <int kSteps>
__device__ __forceinline__ void multiply_eight(float (&c)[4], uint32_t a_from, uint32_t b_from) {
#pragma unroll
  for (int s = 0; s < kSteps; s += 2) {
    uint32_t a[4], b[4];
    load_matrices(b, b_from + s * 32);
    load_matrices(a, a_from + s * 32);
    mma_f16(c, a, b[0], b[1]);
    load_matrices(a, a_from + s * 32 + 32);
    mma_f16(c, a, b[2], b[3]);
  }
}

// c[i][n] += A_i B_n for 16 rows at each of a_from and the 8 columns at b_from, 8 in the region
// behind, and so on; kColumns / 2 such pairs of regions.
template <int kSteps, int kRows, int kColumns>
__device__ __forceinline__ void multiply_far(
    float (&c)[kRows][kColumns][4], uint32_t a_from, uint32_t b_from, int region
) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t b[kColumns / 2][4];
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) {
      load_matrices(b[n], b_from + 2 * n * region + s * 32);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t a[4];
      load_matrices(a, a_from + i * region + s * 32);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        mma_f16(c[i][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

// Products of 8 raw queries and 8 raw keys: with the queries and with the keys.
template <DType kType, int kSteps>
__device__ __forceinline__ void multiply_raw(
    float (&with_q)[4], float (&with_k)[4], uint32_t from
) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    with_q[i] = 0.0f;
    with_k[i] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t a[4];
    load_matrices(a, from + s * 32);
    if constexpr (kType == DType::kBf16) {
      mma_bf16(with_q, a, a[0], a[2]);
      mma_bf16(with_k, a, a[1], a[3]);
    } else {
      mma_f16(with_q, a, a[0], a[2]);
      mma_f16(with_k, a, a[1], a[3]);
    }
  }
}

// Where scores go: those of queries into the panel, those of keys (far ones times beta) to the
// inverse.
struct ScoreOutput {
  uint16_t* scores;
  float* diagonal;
  unsigned char* far_heads;
  unsigned char* far_tails;
  const float* beta;

  // Neighbouring columns, the first even; c[0..1] of keys, c[2..3] of queries.
  __device__ __forceinline__ void put(int row, int col, const float (&c)[4]) const {
    put_keys(row, col, c[0], c[1]);
    put_queries(row, col, c[2], c[3]);
  }

  // The same outside of the diagonal blocks of 16; (far_row, far_col) is the place in FarTile.
  __device__ __forceinline__ void put_far(
      int row, int col, int far_row, int far_col, const float (&c)[4]
  ) const {
    const float b = beta[row];
    const int at = FarTile::at(far_row, far_col);
    split_pair(
        *reinterpret_cast<uint32_t*>(far_heads + at),
        *reinterpret_cast<uint32_t*>(far_tails + at),
        b * c[0],
        b * c[1]
    );
    put_queries(row, col, c[2], c[3]);
  }

  __device__ __forceinline__ void put_keys(int row, int col, float x, float y) const {
    *reinterpret_cast<float2*>(diagonal + row * kDiagonalPitch + col % 16) = make_float2(x, y);
  }

  __device__ __forceinline__ void put_queries(int row, int col, float x, float y) const {
    *reinterpret_cast<uint32_t*>(scores + panel_offset(row, col)) = pack_f16(x, y);
  }

  // Levels 0 and 1 inside the 8 rows from `row0` on: the first 8 rows of the product are 4 keys and
  // 4 queries of level 0, its first 4 columns are of level 0, the rest of level 1.
  __device__ __forceinline__ void put_near(int row0, const float (&c)[4]) const {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
    const bool keys = g < 4;
    const int upper = g % 4;  // number of the row among those of its level
    if (t == upper / 2) {
      const float x = upper % 2 != 0 ? c[1] : c[0];
      const int row = row0 + 2 * upper + 1;
      const int col = row0 + 2 * upper;
      if (keys) {
        diagonal[row * kDiagonalPitch + col % 16] = x;
      } else {
        scores[panel_offset(row, col)] = static_cast<uint16_t>(pack_f16(x, 0.0f));
      }
    } else if (t - 2 == upper / 2) {
      const int col = row0 + upper / 2 * 4;
      put_either(keys, col + 2 + upper % 2, col, c[2], c[3]);
    }
  }

  // Level 2 inside the 16 rows from `row0` on: the first 8 rows of the product are 4 keys and 4
  // queries of the first 8 rows, its first 4 columns are of these.
  __device__ __forceinline__ void put_fours(int row0, const float (&c)[4]) const {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
    const bool first = t < 2;
    const int begin = row0 + (first ? 0 : 8);
    put_either(
        g < 4, begin + 4 + g % 4, begin + t % 2 * 2, first ? c[0] : c[2], first ? c[1] : c[3]
    );
  }

  __device__ __forceinline__ void put_either(bool keys, int row, int col, float x, float y) const {
    if (keys) {
      put_keys(row, col, x, y);
    } else {
      put_queries(row, col, x, y);
    }
  }
};

}  // namespace sdm::kda::cuda
