// SPDX-License-Identifier: Apache-2.0
//! @file Products of a chunk's triangular matrices with its token rows, in place in shared memory.
//!
//! x[i] = sum over k of m[i][k] x[k] (or of m[k][i] x[k]) for m lower triangular [Cp, Cp] in global
//! memory (read through L1 and L2: every slice of a stream reads the same one) and x [Cp,
//! kTokenStride] in shared memory. Tensor cores in tf32 (mma.cuh); k runs upwards in every row, so
//! a row's bits depend on nothing but the matrix and the column. Tasks of 16 rows by 16 columns are
//! dealt to the warps; a warp keeps its results in registers until all have read x.
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
  static constexpr int kTaskTiles = 2;  // column tiles of 8 in a task
  static constexpr int kTasksPerBlock = kSliceColumns<S> / (8 * kTaskTiles);
  static constexpr int kTasksPerWarp = kMaxChunk / 16 * kTasksPerBlock / kLoopWarps;
  static constexpr int kStride = kTokenStride<S>;

  float acc[kTasksPerWarp][kTaskTiles][4];

  // Row blocks [first_block, end_block) of the result.
  template <bool kTransposed>
  __device__ __forceinline__ void run(
      const float* __restrict__ m, int Cp, const float* x, int first_block, int end_block
  ) {
    const int warp = threadIdx.x / 32;
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const int num_tasks = (end_block - first_block) * kTasksPerBlock;
#pragma unroll
    for (int j = 0; j < kTasksPerWarp; ++j) {
#pragma unroll
      for (int tile = 0; tile < kTaskTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[j][tile][i] = 0.0f;
        }
      }
      const int task = warp + j * kLoopWarps;
      if (task >= num_tasks) {
        continue;
      }
      const int block = first_block + task / kTasksPerBlock;
      const int column = task % kTasksPerBlock * 8 * kTaskTiles + g;
      const int k_begin = kTransposed ? block * 16 : 0;
      const int k_end = kTransposed ? Cp : (block + 1) * 16;
#pragma unroll 2
      for (int k = k_begin; k < k_end; k += 8) {
        float a[4];
        if constexpr (kTransposed) {
          const float* p = m + static_cast<int64_t>(k + t) * Cp + block * 16 + g;
          a[0] = __ldg(p);
          a[1] = __ldg(p + 8);
          a[2] = __ldg(p + 4 * Cp);
          a[3] = __ldg(p + 4 * Cp + 8);
        } else {
          const float* p = m + static_cast<int64_t>(block * 16 + g) * Cp + k + t;
          a[0] = __ldg(p);
          a[1] = __ldg(p + 8 * Cp);
          a[2] = __ldg(p + 4);
          a[3] = __ldg(p + 8 * Cp + 4);
        }
#pragma unroll
        for (int tile = 0; tile < kTaskTiles; ++tile) {
          const float* q = x + (k + t) * kStride + column + tile * 8;
          const float b[2] = {q[0], q[4 * kStride]};
          mma_f32<kTerms>(acc[j][tile], a, b);
        }
      }
    }
  }

  // y[row][column] = or += the results.
  template <bool kAdd>
  __device__ __forceinline__ void put(float* y, int first_block, int end_block) const {
    const int warp = threadIdx.x / 32;
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const int num_tasks = (end_block - first_block) * kTasksPerBlock;
#pragma unroll
    for (int j = 0; j < kTasksPerWarp; ++j) {
      const int task = warp + j * kLoopWarps;
      if (task >= num_tasks) {
        continue;
      }
      const int block = first_block + task / kTasksPerBlock;
      const int column = task % kTasksPerBlock * 8 * kTaskTiles + 2 * t;
#pragma unroll
      for (int tile = 0; tile < kTaskTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2* p = reinterpret_cast<float2*>(
              y + (block * 16 + half * 8 + g) * kStride + column + tile * 8
          );
          float2 value = make_float2(acc[j][tile][2 * half], acc[j][tile][2 * half + 1]);
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
