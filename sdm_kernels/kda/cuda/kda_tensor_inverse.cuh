// SPDX-License-Identifier: Apache-2.0
//! @file Inverse of a 64 x 64 unit lower triangular matrix I + diag(beta) F, by one block of
//! threads: substitution inside the 16 x 16 diagonal blocks, then pairwise merging,
//!   inv [[A, 0], [B, D]] = [[A', 0], [-D' B A', D']].
//!
//! Never the product form (I - L)(I + L^2)...: its terms cancel when keys repeat. The merges run on
//! tensor cores with every operand as a sum of two fp16 numbers, head and tail, about as exact as
//! float. What the answer is stored in, fp16, is its head.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_tile.cuh"

namespace sdm::kda::cuda {

// Floats from row to row of the diagonal blocks of F: [64][pitch], row i has columns i / 16 * 16
// on.
constexpr int kDiagonalPitch = 20;

// The rest, L = diag(beta) F: rows 16 to 63 of columns 0 to 31, and rows 48 to 63 of columns 32 to
// 47 in the free place at rows 16 to 31, columns 16 to 31.
using FarTile = KdaTile<48, 32>;
using InverseTile = KdaTile<64, 64>;

// Addresses of the two terms of a matrix in shared memory.
struct TwoTerms {
  uint32_t head, tail;
};

// x = head + tail, pairs of fp16.
__device__ __forceinline__ void split_pair(uint32_t& head, uint32_t& tail, float x, float y) {
  head = pack_f16(x, y);
  const float2 rounded = unpack_f16(head);
  tail = pack_f16(x - rounded.x, y - rounded.y);
}

struct SplitFragment {
  uint32_t head[4], tail[4];

  // Of 16 x 16 sums, as the A operand of the next product, with the other sign.
  __device__ __forceinline__ static SplitFragment negative(const float (&c)[2][4]) {
    SplitFragment a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = c[i / 2] + i % 2 * 2;
      split_pair(a.head[i], a.tail[i], -pair[0], -pair[1]);
    }
    return a;
  }
};

template <typename Tile>
__device__ __forceinline__ void load_split_a(SplitFragment& a, TwoTerms from, int row, int col) {
  Tile::load_a(a.head, from.head, row, col);
  Tile::load_a(a.tail, from.tail, row, col);
}

// c += a b with b[k][n] = tile[row + k][col + n].
template <typename Tile>
__device__ __forceinline__ void add_split_product(
    float (&c)[2][4], const SplitFragment& a, TwoTerms from, int row, int col
) {
  uint32_t head[4], tail[4];
  Tile::load_b(head, from.head, row, col);
  Tile::load_b(tail, from.tail, row, col);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma_f16(c[n], a.tail, head[2 * n], head[2 * n + 1]);
    mma_f16(c[n], a.head, tail[2 * n], tail[2 * n + 1]);
    mma_f16(c[n], a.head, head[2 * n], head[2 * n + 1]);
  }
}

// Where the inverse goes: both terms to shared memory, the head also to the record.
struct InverseOutput {
  unsigned char* heads;
  unsigned char* tails;
  char* record;

  __device__ __forceinline__ TwoTerms terms() const {
    return {shared_address(heads), shared_address(tails)};
  }

  // A block of 16 x 16 as sums. Only to the record if nothing else is made of it.
  template <bool kLast>
  __device__ __forceinline__ void store(int row, int col, const float (&c)[2][4]) const {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = InverseTile::at(row + i % 2 * 8 + g, col + i / 2 * 8 + 2 * t);
      uint32_t head, tail;
      split_pair(head, tail, c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
      *reinterpret_cast<uint32_t*>(record + at) = head;
      if (!kLast) {
        *reinterpret_cast<uint32_t*>(heads + at) = head;
        *reinterpret_cast<uint32_t*>(tails + at) = tail;
      }
    }
  }
};

// A row of the inverse of a diagonal block.
struct DiagonalRow {
  uint32_t head[8], tail[8];

  // Row lane % 16 of block `block`.
  __device__ __forceinline__ DiagonalRow(const float* diagonal, const float* beta, int block) {
    const int row = threadIdx.x % 16;
    const float* from = diagonal + block * 16 * kDiagonalPitch;
    // x (I + L) = row of I, from the last column on.
    float x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      x[j] = j == row ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int m = 15; m > 0; --m) {
      const float scaled = x[m] * beta[block * 16 + m];
#pragma unroll
      for (int j = 0; j < m; j += 4) {
        const float4 y = *reinterpret_cast<const float4*>(from + m * kDiagonalPitch + j);
        const float factor[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j + i < m) {
            x[j + i] -= scaled * factor[i];
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      split_pair(head[j], tail[j], x[2 * j], x[2 * j + 1]);
    }
  }

  __device__ __forceinline__ void store(const InverseOutput& out, int block) const {
    const int row = block * 16 + threadIdx.x % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const int at = InverseTile::at(row, block * 16 + 2 * j);
      const uint4 x = make_uint4(head[j], head[j + 1], head[j + 2], head[j + 3]);
      *reinterpret_cast<uint4*>(out.record + at) = x;
      *reinterpret_cast<uint4*>(out.heads + at) = x;
      *reinterpret_cast<uint4*>(out.tails + at) =
          make_uint4(tail[j], tail[j + 1], tail[j + 2], tail[j + 3]);
    }
  }
};

// From the diagonal blocks at rows `corner` and `corner` + 16: the block left of the second. By one
// warp; `far_col` is the place of L's block in the first rows of FarTile.
__device__ __forceinline__ void merge_sixteen(
    TwoTerms far, const InverseOutput& out, int corner, int far_col
) {
  SplitFragment a;
  float c[2][4] = {};
  load_split_a<InverseTile>(a, out.terms(), corner + 16, corner + 16);
  add_split_product<FarTile>(c, a, far, 0, far_col);
  a = SplitFragment::negative(c);
  float d[2][4] = {};
  add_split_product<InverseTile>(d, a, out.terms(), corner, corner);
  out.store<false>(corner + 16, corner, d);
}

// From the inverses of rows 0 to 31 and 32 to 63: block `block` (0 to 3) of the 32 x 32 left of the
// second, by one warp.
__device__ __forceinline__ void merge_thirty_two(
    TwoTerms far, const InverseOutput& out, int block
) {
  const int row = 32 + block / 2 * 16;
  const int column = block % 2;
  float d[2][4] = {};
#pragma unroll 1
  for (int k = column; k < 2; ++k) {
    float c[2][4] = {};
    SplitFragment a;
#pragma unroll 1
    for (int m = 32; m <= row; m += 16) {
      load_split_a<InverseTile>(a, out.terms(), row, m);
      add_split_product<FarTile>(c, a, far, m - 16, k * 16);
    }
    a = SplitFragment::negative(c);
    add_split_product<InverseTile>(d, a, out.terms(), k * 16, column * 16);
  }
  out.store<true>(row, column * 16, d);
}

}  // namespace sdm::kda::cuda
