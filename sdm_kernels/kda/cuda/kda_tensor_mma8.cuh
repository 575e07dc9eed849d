// SPDX-License-Identifier: Apache-2.0
//! @file The 16-bit matrix product of half the depth (kda_tensor_mma.cuh has the fragments).
#pragma once

#include <cstdint>

namespace sdm::kda::cuda {

// c += A B with A 16 x 8 (a0: rows 0-7, a1: rows 8-15) and B 8 x 8.
__device__ __forceinline__ void mma_f16_8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace sdm::kda::cuda
