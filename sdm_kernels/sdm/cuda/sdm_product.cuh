// SPDX-License-Identifier: Apache-2.0
//! @file Products of a chunk's triangular matrices with its token rows, in place in shared memory.
//!
//! x[i] = sum over k of m[i][k] x[k], or of m[k][i] x[k], for m lower triangular [Cp, Cp] in global
//! memory (every block of a stream reads the same one, through L2) and x [Cp, kProductStride] in
//! shared memory. Tensor cores in tf32 (mma.cuh); k runs upwards by 16 in every row and in one
//! order inside, so a row's bits depend on nothing but the matrix and the column.
//!
//! A warp's task is 16 rows by up to 32 columns. Tasks are dealt so that a warp with many blocks of
//! k in its first task has few in its second. Loads of m run four blocks of 16 k ahead: a product
//! waits for L2, its arithmetic is a tenth of the time.
//!
//! Lanes take m in pieces of 16 bytes (transposed: 8): the k (or rows of the result) of a piece are
//! given to matrix fragments as they come, which only renames the fragments' k (or rows).
//!
//! A warp keeps its results in registers until all have read x.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/mma.cuh"

namespace sdm::cuda {

constexpr int kSolveThreads = 512;
constexpr int kSolveWarps = kSolveThreads / 32;
constexpr int kMaxRowBlocks = 16;  // of 16 rows: chunks of 256 tokens

// In floats: 4 more than the columns, so that of the loads of x, rows four apart, at most two meet
// in a bank.
template <int kColumns>
constexpr int kProductStride = kColumns + 4;

template <int kTerms, int kColumns>
class Product {
 public:
  // Rows [0, 16 * row_blocks) of the result; m and x are zero beyond.
  template <bool kTransposed>
  __device__ __forceinline__ void run(
      const float* __restrict__ m, int Cp, const float* x, int row_blocks
  ) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < kTasks; ++j) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc_[j][n][i] = 0.0f;
        }
      }
      const int task = task_of(j);
      if (task >= row_blocks * kParts) {
        continue;
      }
      const int row = task / kParts * 16;
      const int k_begin = kTransposed ? row : 0;
      const int steps = kTransposed ? row_blocks - row / 16 : row / 16 + 1;
      const float* column = x + (k_begin + 4 * t) * kStride + task % kParts * kTiles * 8 + g;
      const float* a =
          kTransposed ? m + (k_begin + 4 * t) * Cp + row + 2 * g : m + (row + g) * Cp + 4 * t;
      Blocks here, there;
      here.template load<kTransposed>(a, Cp, 0, steps);
      for (int step = 0; step < steps; step += 2 * kAhead) {
        there.template load<kTransposed>(a, Cp, step + kAhead, steps);
        multiply<kTransposed>(here, column, step, steps, acc_[j]);
        here.template load<kTransposed>(a, Cp, step + 2 * kAhead, steps);
        multiply<kTransposed>(there, column, step + kAhead, steps, acc_[j]);
      }
    }
  }

  // y[row][column] = or += the results.
  template <bool kTransposed, bool kAdd>
  __device__ __forceinline__ void put(float* y, int row_blocks) const {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < kTasks; ++j) {
      const int task = task_of(j);
      if (task >= row_blocks * kParts) {
        continue;
      }
      const int row = task / kParts * 16;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int column = (task % kParts * kTiles + n) * 8 + 2 * t;
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const int i = row + (kTransposed ? 2 * g + low : 8 * low + g);
          float2* p = reinterpret_cast<float2*>(y + i * kStride + column);
          float2 value = make_float2(acc_[j][n][2 * low], acc_[j][n][2 * low + 1]);
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

 private:
  static constexpr int kTiles = kColumns >= 32 ? 4 : kColumns / 8;  // of 8 columns in a task
  static constexpr int kParts = kColumns / (8 * kTiles);
  static constexpr int kTasks = kMaxRowBlocks * kParts / kSolveWarps;  // of a warp
  static constexpr int kAhead = 4;                                     // blocks of 16 k in a load
  static constexpr int kStride = kProductStride<kColumns>;

  // What a lane holds of kAhead blocks of m.
  struct Blocks {
    float x[kAhead][8];

    template <bool kTransposed>
    __device__ __forceinline__ void load(const float* a, int Cp, int step, int steps) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (step + i >= steps) {
          continue;
        }
        if constexpr (kTransposed) {
          // rows k + 4t + e of m, columns row + 2g, row + 2g + 1
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 two =
                __ldg(reinterpret_cast<const float2*>(a + ((step + i) * 16 + e) * Cp));
            x[i][2 * e] = two.x;
            x[i][2 * e + 1] = two.y;
          }
        } else {
          // rows row + g and row + g + 8 of m, columns k + 4t .. + 3
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float4 four =
                __ldg(reinterpret_cast<const float4*>(a + half * 8 * Cp + (step + i) * 16));
            x[i][half] = four.x;
            x[i][2 + half] = four.y;
            x[i][4 + half] = four.z;
            x[i][6 + half] = four.w;
          }
        }
      }
    }
  };

  // Tasks in the order of their rows: the lower half from the front, the rest from the back.
  __device__ __forceinline__ static int task_of(int j) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return j % 2 == 0 ? j * kSolveWarps + warp : (j + 1) * kSolveWarps - 1 - warp;
  }

  template <bool kTransposed>
  __device__ __forceinline__ static void multiply(
      const Blocks& a, const float* column, int step, int steps, float (&acc)[kTiles][4]
  ) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (step + i >= steps) {
        continue;
      }
      const float a0[4] = {a.x[i][0], a.x[i][1], a.x[i][2], a.x[i][3]};
      const float a1[4] = {a.x[i][4], a.x[i][5], a.x[i][6], a.x[i][7]};
      const float* rows = column + (step + i) * 16 * kStride;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        // rows k + 4t + e of x
        const float b0[2] = {rows[n * 8], rows[kStride + n * 8]};
        const float b1[2] = {rows[2 * kStride + n * 8], rows[3 * kStride + n * 8]};
        mma_f32<kTerms>(acc[n], a0, b0);
        mma_f32<kTerms>(acc[n], a1, b1);
      }
    }
  }

  // [task][column tile][fragment]
  float acc_[kTasks][kTiles][4];
};

}  // namespace sdm::cuda
