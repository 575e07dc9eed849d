// SPDX-License-Identifier: Apache-2.0
//! @file Accesses to rows that may lie behind the end of a sequence, without a branch, so that many
//! are in flight: loads give zeroes then, stores do nothing.
#pragma once

#include <cstdint>

namespace sdm::kda::cuda {

__device__ __forceinline__ uint4 load_or_zero(const uint16_t* from, bool live) {
  uint4 x;
  asm("{\n"
      ".reg .pred live;\n"
      "setp.ne.u32 live, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@live ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<uint32_t>(live)));
  return x;
}

__device__ __forceinline__ uint32_t load_pair_or_zero(const uint16_t* from, bool live) {
  uint32_t x;
  asm("{\n"
      ".reg .pred live;\n"
      "setp.ne.u32 live, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@live ld.global.u32 %0, [%1];\n"
      "}"
      : "=&r"(x)
      : "l"(from), "r"(static_cast<uint32_t>(live)));
  return x;
}

// The compiler may move other accesses across it, not barriers: nothing else reads the place before
// the next one.
__device__ __forceinline__ void store_pair_if(uint16_t* to, uint32_t x, bool live) {
  asm volatile(
      "{\n"
      ".reg .pred live;\n"
      "setp.ne.u32 live, %2, 0;\n"
      "@live st.global.u32 [%0], %1;\n"
      "}" ::"l"(to),
      "r"(x),
      "r"(static_cast<uint32_t>(live))
  );
}

__device__ __forceinline__ void store_two_pairs_if(uint16_t* to, uint2 x, bool live) {
  asm volatile(
      "{\n"
      ".reg .pred live;\n"
      "setp.ne.u32 live, %3, 0;\n"
      "@live st.global.v2.u32 [%0], {%1, %2};\n"
      "}" ::"l"(to),
      "r"(x.x),
      "r"(x.y),
      "r"(static_cast<uint32_t>(live))
  );
}

__device__ __forceinline__ void store_piece_if(uint16_t* to, uint4 x, bool live) {
  asm volatile(
      "{\n"
      ".reg .pred live;\n"
      "setp.ne.u32 live, %5, 0;\n"
      "@live st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "r"(x.x),
      "r"(x.y),
      "r"(x.z),
      "r"(x.w),
      "r"(static_cast<uint32_t>(live))
  );
}

// Products of both halves.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
  return z;
}

}  // namespace sdm::kda::cuda
