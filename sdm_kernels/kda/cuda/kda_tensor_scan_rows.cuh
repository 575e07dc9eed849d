// SPDX-License-Identifier: Apache-2.0
//! @file The 64 rows of a chunk by the 16 value columns of a warp of a scan, between memory, where
//! columns are neighbours, and fragments of the transpose.
//!
//! As they lie: tile n, lane (g, t) holds row 8 n + g, columns 4 t to 4 t + 3. Transposed: rows 8 n
//! + 2 t and 8 n + 2 t + 1 of the columns column_of_row(g) in [n][0] and column_of_row(g + 8) in
//! [n][1].
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

namespace sdm::kda::cuda {

// The value column of fragment row g or g + 8 within the warp's 16: so that a transposed pair of
// 8 x 8 fragments gives each lane four neighbouring columns.
__device__ __forceinline__ int column_of_row(int row) {
  return 4 * (row % 8 / 2) + row % 2 + (row >= 8 ? 2 : 0);
}

// A chunk's rows as they lie. `from` is the lane's place in row g, `step` elements to the row 8
// further, `left` the rows from there on; `whole`: four columns can be loaded at once,
// as always without kAny.
template <bool kAny>
__device__ __forceinline__ void load_rows(
    uint32_t (&x)[8][2], const uint16_t* from, int64_t step, int left, bool whole
) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x[n][0] = 0;
    x[n][1] = 0;
  }
  if (!kAny || whole) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (8 * n < left) {
        load_pairs<2>(x[n], from, true);
      }
      from += step;
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // registers have no index: every turn writes one of them
        if (i == n && 8 * n < left) {
          load_pairs<2>(x[i], from, false);
        }
      }
      from += step;
    }
  }
}

// Asks for the 64 rows of a chunk to be brought into the second-level cache. `from` is the warp's
// place in row 0, `row` elements to the next row.
__device__ __forceinline__ void prefetch_rows(const uint16_t* from, int64_t row, int left) {
  const int lane = threadIdx.x % 32;
  if (lane < left) {
    prefetch_l2(from + lane * row);
  }
  if (lane + 32 < left) {
    prefetch_l2(from + (lane + 32) * row);
  }
}

__device__ __forceinline__ void copy_rows(uint32_t (&x)[8][2], const uint32_t (&from)[8][2]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x[n][0] = from[n][0];
    x[n][1] = from[n][1];
  }
}

__device__ __forceinline__ void transpose_rows(uint32_t (&x)[8][2]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x[n][0] = transpose_matrix(x[n][0]);
    x[n][1] = transpose_matrix(x[n][1]);
  }
}

// Stores transposed rows; the arguments are those of load_rows().
__device__ __forceinline__ void store_rows(
    uint16_t* to, const uint32_t (&x)[8][2], int64_t step, int left
) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint2 pair = make_uint2(transpose_matrix(x[n][0]), transpose_matrix(x[n][1]));
    if (8 * n < left) {
      *reinterpret_cast<uint2*>(to) = pair;
    }
    to += step;
  }
}

// Accumulators of a product with 64 columns, times factors of the rows g and g + 8, as pairs.
template <DType kType>
__device__ __forceinline__ void pack_rows(
    uint32_t (&x)[8][2], const float (&c)[8][4], float low, float high
) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x[n][0] = pack_pair<kType>(c[n][0] * low, c[n][1] * low);
    x[n][1] = pack_pair<kType>(c[n][2] * high, c[n][3] * high);
  }
}

// A operand of 16 columns of accumulator tiles 2 k and 2 k + 1.
__device__ __forceinline__ void pack_operand(
    uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]
) {
  a[0] = pack_f16(left[0], left[1]);
  a[1] = pack_f16(left[2], left[3]);
  a[2] = pack_f16(right[0], right[1]);
  a[3] = pack_f16(right[2], right[3]);
}

template <int kSteps, int kTiles>
__device__ __forceinline__ void pack_operands(
    uint32_t (&a)[kSteps][4], const float (&c)[kTiles][4]
) {
  static_assert(kTiles == 2 * kSteps);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    pack_operand(a[k], c[2 * k], c[2 * k + 1]);
  }
}

}  // namespace sdm::kda::cuda
