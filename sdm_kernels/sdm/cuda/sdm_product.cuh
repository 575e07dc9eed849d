// SPDX-License-Identifier: Apache-2.0
//! @file Products of a chunk's triangular matrices with its token rows, in place in shared memory.
//!
//! x[i] = sum over k of m[i][k] x[k], or of m[k][i] x[k], for m lower triangular [Cp, Cp] in global
//! memory (every slice of a stream reads the same one, through L2) and x [Cp, kTokenStride] in
//! shared memory. Tensor cores in tf32 (mma.cuh); k runs upwards by 16 in every row and in one
//! order inside, so a row's bits depend on nothing but the matrix and the column.
//!
//! A product of small tiles is bound by the lines that its loads touch, not by arithmetic. So lanes
//! take 16 bytes of m at a time: the four k (or, transposed, the four rows of the result) are given
//! to matrix fragments as they come, which only renames the fragments' k (or rows). Four lanes then
//! want rows of x that are four apart; token_row_at() stores them side by side, in different banks.
//!
//! Tasks of 32 rows by 8 columns are dealt to the warps; a warp keeps its results in registers
//! until all have read x.
#pragma once

#include "sdm_kernels/cuda/mma.cuh"
#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

constexpr int kLoopThreads = 512;
constexpr int kLoopWarps = kLoopThreads / 32;
constexpr int kMaxChunk = 256;

template <typename S>
struct Product {
  static constexpr int kTerms = sizeof(S) == 4 ? 3 : 1;
  static constexpr int kColumnTasks = kSliceColumns<S> / 8;
  static constexpr int kTasksPerWarp = kMaxChunk / 32 * kColumnTasks / kLoopWarps;
  static constexpr int kStride = kTokenStride<S>;

  // [task][block of 16 rows][fragment]
  float acc[kTasksPerWarp][2][4];

  // Row blocks [first_block, end_block) of 16 of the result.
  template <bool kTransposed>
  __device__ __forceinline__ void run(
      const float* __restrict__ m, int Cp, const float* x, int first_block, int end_block
  ) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    const int num_tasks = (end_block - first_block + 1) / 2 * kColumnTasks;
#pragma unroll
    for (int j = 0; j < kTasksPerWarp; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[j][half][i] = 0.0f;
        }
      }
      const int task = warp + j * kLoopWarps;
      if (task >= num_tasks) {
        continue;
      }
      int row = (first_block + task / kColumnTasks * 2) * 16;
      // opaque, or the addresses of all tasks are computed up front and spilled
      asm volatile("" : "+r"(row));
      const float* column = x + task % kColumnTasks * 8 + g;
      const int k_begin = kTransposed ? row : 0;
      const int k_end = kTransposed ? Cp : min(row + 32, Cp);
#pragma unroll 2
      for (int k = k_begin; k < k_end; k += 16) {
        float4 a[4];
        if constexpr (kTransposed) {
          // columns row + 4g .. + 3 of m, rows k + 4t + e
          const bool inside = row + 4 * g < Cp;
          const float* p = m + (k + 4 * t) * Cp + (inside ? row + 4 * g : 0);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            a[e] = __ldg(reinterpret_cast<const float4*>(p + e * Cp));
            if (!inside) {
              a[e] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
          }
        } else {
          // rows row + g + 8e of m, columns k + 4t .. + 3
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = row + g + 8 * e;
            const float* p = m + (i < Cp ? i : 0) * Cp + k + 4 * t;
            a[e] = __ldg(reinterpret_cast<const float4*>(p));
          }
        }
        // rows k + 4t + e of x, stored side by side
        float b[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          b[e] = column[(k + e * 4 + t) * kStride];
        }
        const float first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
        if constexpr (kTransposed) {
          const float a0[4] = {a[0].x, a[0].y, a[1].x, a[1].y};
          const float a1[4] = {a[0].z, a[0].w, a[1].z, a[1].w};
          const float a2[4] = {a[2].x, a[2].y, a[3].x, a[3].y};
          const float a3[4] = {a[2].z, a[2].w, a[3].z, a[3].w};
          mma_f32<kTerms>(acc[j][0], a0, first);
          mma_f32<kTerms>(acc[j][1], a1, first);
          mma_f32<kTerms>(acc[j][0], a2, second);
          mma_f32<kTerms>(acc[j][1], a3, second);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float4 &low = a[2 * half], &high = a[2 * half + 1];
            const float a0[4] = {low.x, high.x, low.y, high.y};
            const float a1[4] = {low.z, high.z, low.w, high.w};
            mma_f32<kTerms>(acc[j][half], a0, first);
            mma_f32<kTerms>(acc[j][half], a1, second);
          }
        }
      }
    }
  }

  // y[row][column] = or += the results.
  template <bool kTransposed, bool kAdd>
  __device__ __forceinline__ void put(float* y, int Cp, int first_block, int end_block) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    const int num_tasks = (end_block - first_block + 1) / 2 * kColumnTasks;
    const int end_row = min(end_block * 16, Cp);
#pragma unroll
    for (int j = 0; j < kTasksPerWarp; ++j) {
      const int task = warp + j * kLoopWarps;
      if (task >= num_tasks) {
        continue;
      }
      const int row = (first_block + task / kColumnTasks * 2) * 16;
      const int column = task % kColumnTasks * 8 + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const int i = row + (kTransposed ? 4 * g + 2 * half + low : 16 * half + 8 * low + g);
          if (i >= end_row) {
            continue;
          }
          float2* p = reinterpret_cast<float2*>(y + token_row_at(i) * kStride + column);
          float2 value = make_float2(acc[j][half][2 * low], acc[j][half][2 * low + 1]);
          if constexpr (kAdd) {
            const float2 old = *p;
            value.x += old.x;
            value.y += old.y;
          }
          *p = value;
        }
      }
    }
  }
};

}  // namespace sdm::cuda
