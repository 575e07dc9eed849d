// SPDX-License-Identifier: Apache-2.0
//! @file Shared memory of the preparation, and its products: the norms of the raw rows, and the
//! scores of every level of the tree of row blocks (kda_tensor_prep_kernel.cuh).
//!
//! A warp owns a region of 40 operand rows, which it fills three times: with raw rows; with the
//! operands of levels 0 to 2, which lie inside its 8 rows; with those of levels 3 to 5, which all
//! warps multiply. The A operand of a product always has 8 keys, then 8 queries.
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
  static constexpr int kRegionBytes = 40 * kRowBytes;
  // First rows within a region.
  static constexpr int kRaw = 0;     // 8 queries, 8 keys as they came
  static constexpr int kNear = 16;   // level 0: 4 keys, 4 queries; level 1: the same; 4 + 4 columns
  static constexpr int kFours = 0;   // level 2: 4 keys, 4 queries, 4 columns
  static constexpr int kEights = 0;  // level 3: 8 keys, 8 queries of odd warps, 8 columns of even
  static constexpr int kFar = 16;  // levels 4 (regions 0-3), 5 (4-7): 8 keys, 8 queries, 8 columns
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
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks a multiprocessor");
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
  int rows16;     // 16 rows, one step: A
  int rows8;      // 8 rows, two steps
  int columns16;  // 16 rows, one step: two blocks of columns
  int apart;      // 8 rows, and 8 of the next region

  __device__ __forceinline__ OperandLanes() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    rows16 = lane % 16 * Shared::kRowBytes + lane / 16 * 16;
    rows8 = lane % 8 * Shared::kRowBytes + lane / 8 * 16;
    const int columns = lane % 8 * Shared::kRowBytes + lane / 8 % 2 * 16;
    columns16 = columns + lane / 16 * 8 * Shared::kRowBytes;
    apart = columns + lane / 16 * Shared::kRegionBytes;
  }
};

// c[0] += A B of 8 rows as columns.
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

// The same of 16 columns.
template <int kSteps>
__device__ __forceinline__ void multiply_sixteen(
    float (&c)[2][4], uint32_t a_from, uint32_t b_from
) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t a[4], b[4];
    load_matrices(a, a_from + s * 32);
    load_matrices(b, b_from + s * 32);
    mma_f16(c[0], a, b[0], b[1]);
    mma_f16(c[1], a, b[2], b[3]);
  }
}

// Products of 8 raw queries and 8 raw keys: with the queries and with the keys.
template <DType kType, int kSteps>
__device__ __forceinline__ void multiply_raw(
    float (&with_q)[4], float (&with_k)[4], uint32_t rows, uint32_t columns
) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    with_q[i] = 0.0f;
    with_k[i] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t a[4], b[4];
    load_matrices(a, rows + s * 32);
    load_matrices(b, columns + s * 32);
    if constexpr (kType == DType::kBf16) {
      mma_bf16(with_q, a, b[0], b[1]);
      mma_bf16(with_k, a, b[2], b[3]);
    } else {
      mma_f16(with_q, a, b[0], b[1]);
      mma_f16(with_k, a, b[2], b[3]);
    }
  }
}

// Levels 0 and 1 (`near`) and 2 (`fours`) inside the warp's 8 rows. Of near, rows and columns of
// different levels have no meaning; of fours only the first 8 rows and 4 columns have.
template <int kSteps>
__device__ __forceinline__ void multiply_near(
    float (&near)[4],
    float (&fours)[4],
    uint32_t near_rows,
    uint32_t near_columns,
    uint32_t fours_rows,
    uint32_t fours_columns
) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    near[i] = 0.0f;
    fours[i] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < kSteps; s += 2) {
    uint32_t a[4], b[4], f[4], n[4];
    load_matrices(b, near_columns + s * 32);
    load_matrices(n, fours_columns + s * 32);
    load_matrices(a, near_rows + s * 32);
    load_matrices(f, fours_rows + s * 32);
    mma_f16(near, a, b[0], b[1]);
    mma_f16(fours, f, n[0], n[1]);
    load_matrices(a, near_rows + s * 32 + 32);
    load_matrices(f, fours_rows + s * 32 + 32);
    mma_f16(near, a, b[2], b[3]);
    mma_f16(fours, f, n[2], n[3]);
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

  // Inside the 8 rows from `row0` on: what multiply_near() has made.
  __device__ __forceinline__ void put_near(
      int row0, const float (&near)[4], const float (&fours)[4]
  ) const {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
    const bool keys = g < 4;
    const int upper = g % 4;  // number of the row among those of its level
    if (t == upper / 2) {
      const float x = upper % 2 != 0 ? near[1] : near[0];
      const int row = row0 + 2 * upper + 1;
      const int col = row0 + 2 * upper;
      if (keys) {
        diagonal[row * kDiagonalPitch + col % 16] = x;
      } else {
        scores[panel_offset(row, col)] = static_cast<uint16_t>(pack_f16(x, 0.0f));
      }
    }
    const bool four = t < 2;
    if (four || t - 2 == upper / 2) {
      const int row = row0 + (four ? 4 + upper : upper / 2 * 4 + 2 + upper % 2);
      const int col = row0 + (four ? 2 * t : upper / 2 * 4);
      const float x = four ? fours[0] : near[2];
      const float y = four ? fours[1] : near[3];
      if (keys) {
        put_keys(row, col, x, y);
      } else {
        put_queries(row, col, x, y);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
