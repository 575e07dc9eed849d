// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, solve: X = (I + A diag(beta))^-1, unit lower triangular, in full float.
//!
//! Forward substitution on the columns of the identity, in blocks of 16 rows:
//!
//!     X[I, panel] = (I + L[I, I])^-1 (E[I, panel] - sum over K < I of L[I, K] X[K, panel])
//!
//! with L = A diag(beta). Panels of 32 columns are independent: a block of four warps owns one and
//! keeps its rows of X in shared memory, so that a few chunks still fill the device. The rows of L
//! of a step are copied while the step before runs. The warps deal the K of the sum among
//! themselves, 4 x 4 sums a thread, while a fifth inverts the diagonal block; then each adds the
//! four partial sums of its four rows in order, and multiplies.
//!
//! Rows and columns from the chunk's number of tokens on are zero, the diagonal included.
//! C^3 / 6 multiply-adds a chunk; about C^3 / 24 bytes of L from L2, 4 Cp^2 bytes out.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/cuda/async_copy.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr int kPanel = 32;
constexpr int kRows = 16;  // divides Cp
constexpr int kSolveWarps = 4;
constexpr int kSolveThreads = kSolveWarps * 32 + 32;  // a warp for the diagonal block
constexpr int kInverseStride = kRows + 4;

// In floats: rows of 32 lanes' worth of banks and four more.
__host__ __device__ constexpr int32_t solve_stride(int32_t Cp) {
  return (Cp + 31) / 32 * 32 + 4;
}

// Two stages of rows of L, X from the panel's first row on, partial sums, a block's inverse.
__host__ __device__ constexpr int64_t solve_smem(int32_t Cp) {
  return (2 * kRows * solve_stride(Cp) + Cp * kPanel + kSolveWarps * kRows * kPanel +
          kRows * kInverseStride) *
         static_cast<int64_t>(sizeof(float));
}

struct SolveStorage {
  float* l;        // [2][kRows][solve_stride] from the panel's first column on
  float* x;        // [][kPanel]
  float* partial;  // [kSolveWarps][kRows][kPanel]; the first one then has the right hand side
  float* inverse;  // [kRows][kInverseStride] of the diagonal block

  __device__ __forceinline__ SolveStorage(float* memory, int32_t Cp)
      : l(memory),
        x(l + 2 * kRows * solve_stride(Cp)),
        partial(x + Cp * kPanel),
        inverse(partial + kSolveWarps * kRows * kPanel) {}
};

// Starts the copy of L[row0 .. row0 + kRows, first .. row0 + kRows].
__device__ __forceinline__ void start_rows(
    const float* L, int32_t Cp, int32_t first, int32_t row0, float* to
) {
  const int row = static_cast<int>(threadIdx.x) / 8, lane = static_cast<int>(threadIdx.x) % 8;
  const float* from = L + (row0 + row) * Cp + first;
  for (int32_t k = lane * 4; k < row0 + kRows - first; k += 32) {
    start_copy<16>(to + row * solve_stride(Cp) + k, from + k);
  }
}

// partial[warp] = this warp's share of the sum over K of L[row0.., K] X[K, panel]. `count`: rows of
// X so far.
__device__ __forceinline__ void solve_partial(
    const SolveStorage& s, const float* l_rows, int32_t stride, int32_t count
) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int row = static_cast<int>(threadIdx.x % 32) / 8;  // and every fourth from it on
  const int column = static_cast<int>(threadIdx.x % 8) * 4;
  float acc[4][4] = {};
  for (int32_t k0 = warp * kRows; k0 < count; k0 += kSolveWarps * kRows) {
#pragma unroll
    for (int kk = 0; kk < kRows; kk += 4) {
      float4 l[4];
      float4 x[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        l[r] = *reinterpret_cast<const float4*>(l_rows + (row + 4 * r) * stride + k0 + kk);
        x[r] = *reinterpret_cast<const float4*>(s.x + (k0 + kk + r) * kPanel + column);
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
    *reinterpret_cast<float4*>(s.partial + (warp * kRows + row + 4 * r) * kPanel + column) =
        make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  }
}

// inverse = (I + L[I, I])^-1 by a warp, a column a lane.
__device__ __forceinline__ void invert_block(
    const float* diagonal, int32_t stride, float* inverse
) {
  const int column = static_cast<int>(threadIdx.x % 32);
  if (column >= kRows) {
    return;
  }
  float x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    x[r] = r == column ? 1.0f : 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int r = k + 1; r < kRows; ++r) {
      x[r] = fmaf(-diagonal[r * stride + k], x[k], x[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    inverse[r * kInverseStride + column] = x[r];
  }
}

// Grid: num_q * ceil(Cp / kPanel) blocks.
__global__ void __launch_bounds__(kSolveThreads) sdm_solve_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  extern __shared__ __align__(16) float solve_memory[];
  const int32_t Cp = p.records.Cp;
  const int32_t stride = solve_stride(Cp);
  // the first panels, which have most rows, come first
  const int64_t q = blockIdx.x % p.records.num_q;
  const int32_t first = static_cast<int32_t>(blockIdx.x / p.records.num_q) * kPanel;
  wait_for_previous();
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, q, &place)) {
    return;
  }
  const SolveStorage s(solve_memory, Cp);
  const float* L = p.scaled_a + q * Cp * Cp;
  float* out = p.records.inverse + q * Cp * Cp + first;
  const int32_t width = min(kPanel, Cp - first);
  const int32_t num_tokens = static_cast<int32_t>(place.num_tokens);
  const int32_t end = (num_tokens + kRows - 1) / kRows * kRows;  // rows that hold anything
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, column = tid % 32;
  const bool sums = warp < kSolveWarps;
  if (sums && first < end) {
    start_rows(L, Cp, first, first, s.l);
  }
  close_copies();
  if (tid % 8 * 4 < width) {
    for (int32_t row = max(first, end) + tid / 8; row < Cp; row += kSolveThreads / 8) {
      *reinterpret_cast<float4*>(out + static_cast<int64_t>(row) * Cp + tid % 8 * 4) =
          make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  int stage = 0;
  for (int32_t row0 = first; row0 < end; row0 += kRows) {
    const float* l_rows = s.l + stage * kRows * stride;
    stage ^= 1;
    wait_for_copies<0>();
    __syncthreads();  // the rows of L are there, and the last ones of X; nobody reads older ones
    if (sums && row0 + kRows < end) {
      start_rows(L, Cp, first, row0 + kRows, s.l + stage * kRows * stride);
    }
    close_copies();
    if (sums) {
      solve_partial(s, l_rows, stride, row0 - first);
    } else {
      invert_block(l_rows + (row0 - first), stride, s.inverse);
    }
    __syncthreads();           // partial sums and the inverse are there
    const int own = warp * 4;  // the first of the warp's rows
    if (sums) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = own + i;
        const bool one = row0 + r == first + column && first + column < num_tokens;
        float sum = s.partial[r * kPanel + column];
#pragma unroll
        for (int w = 1; w < kSolveWarps; ++w) {
          sum += s.partial[(w * kRows + r) * kPanel + column];
        }
        s.partial[r * kPanel + column] = (one ? 1.0f : 0.0f) - sum;
      }
    }
    __syncthreads();  // the right hand side is there
    if (sums) {
      float x[4] = {};
      for (int k0 = 0; k0 <= own; k0 += 4) {
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          y[k] = s.partial[(k0 + k) * kPanel + column];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 four =
              *reinterpret_cast<const float4*>(s.inverse + (own + i) * kInverseStride + k0);
          const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (k0 < own || k <= i) {
              x[i] = fmaf(factor[k], y[k], x[i]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t row = row0 + own + i;
        s.x[(row - first) * kPanel + column] = x[i];
        if (column < width) {
          out[static_cast<int64_t>(row) * Cp + column] = x[i];
        }
      }
    }
  }
}

}  // namespace sdm::cuda
