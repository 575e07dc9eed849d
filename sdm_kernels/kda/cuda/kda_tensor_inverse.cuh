// SPDX-License-Identifier: Apache-2.0
//! @file Inverse of a 64 x 64 unit lower triangular matrix I + L in shared memory, by one block of
//! eight warps: substitution inside the 16 x 16 diagonal blocks, then pairwise merging,
//!   inv [[A, 0], [B, D]] = [[A', 0], [-D' B A', D']].
//!
//! Never the product form (I - L)(I + L^2)...: its terms cancel when keys repeat. The products of
//! the merges run on tensor cores in three tf32 terms, about as exact as float.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/mma.cuh"

namespace sdm::kda::cuda {

// Row pitch of the float matrices: rows start at 16 bytes, and four lanes beside eight rows fall
// into different banks.
constexpr int kInversePitch = 68;

// Floats of scratch that the merges need, per warp.
constexpr int kMergeScratch = 32 * 9;

// Column lane % 16 of the inverse of diagonal block `block`, by one warp.
__device__ __forceinline__ void invert_diagonal(const float* lower, float* inverse, int block) {
  const int lane = threadIdx.x % 32;
  const int column = lane % 16;
  const float* from = lower + block * 16 * (kInversePitch + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 piece = *reinterpret_cast<const float4*>(from + i * kInversePitch + m);
      row[m] = piece.x;
      row[m + 1] = piece.y;
      row[m + 2] = piece.z;
      row[m + 3] = piece.w;
    }
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) {
      sum -= row[m] * x[m];
    }
    x[i] = sum;
  }
  if (lane < 16) {
    float* to = inverse + block * 16 * (kInversePitch + 1) + column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      to[i * kInversePitch] = x[i];
    }
  }
}

// c += a b in three tf32 terms. The heads are cut, not rounded, which the tails make good; these
// are cut by the instruction itself.
__device__ __forceinline__ void mma_three_terms(
    float (&c)[4], const float (&a)[4], const float (&b)[2]
) {
  constexpr uint32_t kHead = 0xffffe000u;
  uint32_t a_head[4], a_tail[4], b_head[2], b_tail[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a_head[i] = __float_as_uint(a[i]) & kHead;
    a_tail[i] = __float_as_uint(a[i] - __uint_as_float(a_head[i]));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    b_head[i] = __float_as_uint(b[i]) & kHead;
    b_tail[i] = __float_as_uint(b[i] - __uint_as_float(b_head[i]));
  }
  sdm::cuda::mma_tf32(c, a_tail, b_head);
  sdm::cuda::mma_tf32(c, a_head, b_tail);
  sdm::cuda::mma_tf32(c, a_head, b_head);
}

// c += a b for a tile of 16 x 8 over k in [k_begin, k_end), all in shared memory.
__device__ __forceinline__ void tile_product(
    float (&c)[4], const float* a, const float* b, int b_pitch, int k_begin, int k_end
) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  for (int k = k_begin; k < k_end; k += 8) {
    const float* at = a + g * kInversePitch + k + t;
    const float fa[4] = {at[0], at[8 * kInversePitch], at[4], at[8 * kInversePitch + 4]};
    const float fb[2] = {b[(k + t) * b_pitch + g], b[(k + t + 4) * b_pitch + g]};
    mma_three_terms(c, fa, fb);
  }
}

// One 16 x 8 tile of -D' B A' where A' is the inverse of `size` rows at (corner, corner) and D'
// that of the rows behind it; `tile` counts tiles along the columns first. Scratch is the warp's
// own.
__device__ __forceinline__ void merge_tile(
    const float* lower, float* inverse, float* scratch, int corner, int size, int tile
) {
  constexpr int kPitch = 9;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int column = tile % (size / 8) * 8;
  const int row = tile / (size / 8) * 16;
  const float* b = lower + (corner + size) * kInversePitch + corner;
  const float* a_inverse = inverse + corner * (kInversePitch + 1) + column;
  const float* d_inverse = inverse + (corner + size) * (kInversePitch + 1) + row * kInversePitch;
  // B A', as many rows as the tile's rows of D' reach, and only where A' is not zero.
  for (int m = 0; m <= row; m += 16) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    tile_product(c, b + m * kInversePitch, a_inverse, kInversePitch, column, size);
    scratch[(m + g) * kPitch + 2 * t] = c[0];
    scratch[(m + g) * kPitch + 2 * t + 1] = c[1];
    scratch[(m + g + 8) * kPitch + 2 * t] = c[2];
    scratch[(m + g + 8) * kPitch + 2 * t + 1] = c[3];
  }
  __syncwarp();
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  tile_product(c, d_inverse, scratch, kPitch, 0, row + 16);
  float* to = inverse + (corner + size + row + g) * kInversePitch + corner + column + 2 * t;
  to[0] = -c[0];
  to[1] = -c[1];
  to[8 * kInversePitch] = -c[2];
  to[8 * kInversePitch + 1] = -c[3];
}

// `inverse` gets the lower triangle; what is above the diagonal blocks is not written. The block
// must have synchronised after the last write of `lower`, and does so before others read the
// answer.
__device__ __forceinline__ void invert_unit_lower(
    const float* lower, float* inverse, float* scratch
) {
  const int warp = threadIdx.x / 32;
  scratch += warp * kMergeScratch;
  if (warp < 4) {
    invert_diagonal(lower, inverse, warp);
  }
  __syncthreads();
  if (warp < 4) {
    merge_tile(lower, inverse, scratch, warp / 2 * 32, 16, warp % 2);
  }
  __syncthreads();
  merge_tile(lower, inverse, scratch, 0, 32, warp);
}

}  // namespace sdm::kda::cuda
