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
__device__ __forceinline__ void store_half_if(uint16_t* to, uint32_t x, bool live) {
  asm volatile(
      "{\n"
      ".reg .pred live;\n"
      ".reg .b16 low;\n"
      "setp.ne.u32 live, %2, 0;\n"
      "cvt.u16.u32 low, %1;\n"
      "@live st.global.b16 [%0], low;\n"
      "}" ::"l"(to),
      "r"(x),
      "r"(static_cast<uint32_t>(live))
  );
}

// Both halves of a register to shared memory.
__device__ __forceinline__ void store_halves(uint32_t low_to, uint32_t high_to, uint32_t x) {
  asm volatile(
      "{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "st.shared.b16 [%0], low;\n"
      "st.shared.b16 [%1], high;\n"
      "}" ::"r"(low_to),
      "r"(high_to),
      "r"(x)
      : "memory"
  );
}

}  // namespace sdm::kda::cuda
