// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, solve: X = (I + A diag(beta))^-1, unit lower triangular, in full float.
//!
//! Forward substitution on the columns of the identity, in blocks of 16 rows:
//!
//!     X[I, panel] = (I + L[I, I])^-1 (E[I, panel] - sum over K < I of L[I, K] X[K, panel])
//!
//! with L = A diag(beta). Panels of 32 columns are independent: a block of four warps owns one and
//! keeps its rows of X in shared memory, so that a few chunks still fill the device. The warps deal
//! the K of the sum among themselves, 4 x 4 sums a thread; the first warp adds the four partial
//! sums in order and substitutes, one column a lane.
//!
//! Rows and columns from the chunk's number of tokens on are zero, the diagonal included.
//! C^3 / 6 multiply-adds a chunk; about C^3 / 24 bytes of L from L2, 4 Cp^2 bytes out.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr int kPanel = 32;
constexpr int kRows = 16;  // divides Cp
constexpr int kSolveWarps = 4;

struct SolveStorage {
  alignas(16) float x[kMaxChunk][kPanel];  // rows from the panel's first column on
  alignas(16) float partial[kSolveWarps][kRows][kPanel];
  alignas(16) float diagonal[kRows][kRows];
};

// partial[warp] = this warp's share of the sum over K of L[row0.., K] X[K, panel].
__device__ __forceinline__ void solve_partial(
    const float* L, int32_t Cp, int32_t first, int32_t row0, SolveStorage* s
) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int row = static_cast<int>(threadIdx.x % 32) / 8 * 4;
  const int column = static_cast<int>(threadIdx.x % 8) * 4;
  float acc[4][4] = {};
  for (int32_t k0 = first + warp * kRows; k0 < row0; k0 += kSolveWarps * kRows) {
#pragma unroll
    for (int kk = 0; kk < kRows; kk += 4) {
      float4 l[4];
      float4 x[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        l[r] = *reinterpret_cast<const float4*>(L + (row0 + row + r) * Cp + k0 + kk);
        x[r] = *reinterpret_cast<const float4*>(&s->x[k0 - first + kk + r][column]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float factor[4] = {l[r].x, l[r].y, l[r].z, l[r].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          acc[r][0] = fmaf(factor[k], x[k].x, acc[r][0]);
          acc[r][1] = fmaf(factor[k], x[k].y, acc[r][1]);
          acc[r][2] = fmaf(factor[k], x[k].z, acc[r][2]);
          acc[r][3] = fmaf(factor[k], x[k].w, acc[r][3]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    *reinterpret_cast<float4*>(&s->partial[warp][row + r][column]) =
        make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  }
}

// Grid: num_q * ceil(Cp / kPanel) blocks.
__global__ void __launch_bounds__(kSolveWarps * 32) sdm_solve_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ SolveStorage s;
  const int32_t Cp = p.records.Cp;
  const int32_t panels = (Cp + kPanel - 1) / kPanel;
  const int64_t q = blockIdx.x / panels;
  const int32_t first = static_cast<int32_t>(blockIdx.x % panels) * kPanel;
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, q, &place)) {
    return;
  }
  const float* L = p.scaled_a + q * Cp * Cp;
  float* out = p.records.inverse + q * Cp * Cp + first;
  const int32_t width = min(kPanel, Cp - first);
  const int32_t num_tokens = static_cast<int32_t>(place.num_tokens);
  const int32_t end = (num_tokens + kRows - 1) / kRows * kRows;  // rows that hold anything

  const int tid = static_cast<int>(threadIdx.x);
  const int column = tid % kPanel;
  for (int32_t row = tid / kPanel; row < Cp; row += kSolveWarps) {
    if ((row < first || row >= end) && column < width) {
      out[static_cast<int64_t>(row) * Cp + column] = 0.0f;
    }
  }
  for (int32_t row0 = first; row0 < end; row0 += kRows) {
    solve_partial(L, Cp, first, row0, &s);
    if (tid < kRows * kRows / 4) {
      const int r = tid / 4;
      const int c = tid % 4 * 4;
      *reinterpret_cast<float4*>(&s.diagonal[r][c]) =
          *reinterpret_cast<const float4*>(L + (row0 + r) * Cp + row0 + c);
    }
    __syncthreads();  // the first warp waits for all partial sums and the diagonal block
    if (tid < kPanel) {
      float x[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool one = row0 + r == first + column && first + column < num_tokens;
        float sum = s.partial[0][r][column];
#pragma unroll
        for (int w = 1; w < kSolveWarps; ++w) {
          sum += s.partial[w][r][column];
        }
        x[r] = (one ? 1.0f : 0.0f) - sum;
#pragma unroll
        for (int k = 0; k < r; ++k) {
          x[r] = fmaf(-s.diagonal[r][k], x[k], x[r]);
        }
        s.x[row0 - first + r][column] = x[r];
        if (column < width) {
          out[static_cast<int64_t>(row0 + r) * Cp + column] = x[r];
        }
      }
    }
    __syncthreads();  // all warps wait for the new rows of X, the first for its sums to be reused
  }
}

}  // namespace sdm::cuda
