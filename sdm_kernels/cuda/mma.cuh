// SPDX-License-Identifier: Apache-2.0
//! @file Warp matrix multiply-add on tensor cores in tf32 (sm_80 and later), with one or three
//! terms.
//!
//! One term rounds both operands to tf32 (11 significant bits): right for 16-bit banks, whose rows
//! have 8 or 11. Three terms split each operand into a tf32 head and tail and add head*head,
//! head*tail and tail*head: about 21 bits, for float32 banks. Sums are float either way.
#pragma once

#include <cstdint>

namespace sdm::cuda {

// A 16 x 8 (row-major), B 8 x 8, C 16 x 8 as fragments of one warp. With g = lane / 4, t = lane %
// 4:
//   a[0] = A[g][t], a[1] = A[g + 8][t], a[2] = A[g][t + 4], a[3] = A[g + 8][t + 4]
//   b[0] = B[t][g], b[1] = B[t + 4][g]
//   c[0] = C[g][2t], c[1] = C[g][2t + 1], c[2] = C[g + 8][2t], c[3] = C[g + 8][2t + 1]
__device__ __forceinline__ void mma_tf32(
    float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]
) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

template <int kCount>
__device__ __forceinline__ void split_tf32(
    const float (&x)[kCount], uint32_t (&head)[kCount], uint32_t (&tail)[kCount]
) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    head[i] = to_tf32(x[i]);
    tail[i] = to_tf32(x[i] - __uint_as_float(head[i]));
  }
}

// c += a * b with kTerms = 1 or 3.
template <int kTerms>
__device__ __forceinline__ void mma_f32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  if constexpr (kTerms == 1) {
    uint32_t ah[4], bh[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ah[i] = to_tf32(a[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bh[i] = to_tf32(b[i]);
    }
    mma_tf32(c, ah, bh);
  } else {
    uint32_t ah[4], at[4], bh[2], bt[2];
    split_tf32(a, ah, at);
    split_tf32(b, bh, bt);
    mma_tf32(c, at, bh);
    mma_tf32(c, ah, bt);
    mma_tf32(c, ah, bh);
  }
}

}  // namespace sdm::cuda
