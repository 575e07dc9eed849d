// SPDX-License-Identifier: Apache-2.0
//! @file Keys of bfloat16 scores in the warp kernel: 16 bits, two a register.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_pair_traits.cuh"
#include "sdm_kernels/topk/cuda/topk_warp.cuh"

namespace sdm::topk {

constexpr uint32_t kKeyMask = 0xffff0000u;

// Two bfloat16 scores as they lie in memory, as two keys of 16 bits: the upper halves of what
// order_key gives.
__device__ __forceinline__ uint32_t pack_keys(uint32_t scores) {
#ifdef __CUDA_ARCH__
  uint32_t numbers, signs;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(numbers) : "r"(scores), "r"(0xff80ff80u));  // NaN is -inf
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(numbers));
  return numbers ^ (signs & 0x7fff7fffu);
#else
  const uint32_t low = static_cast<uint32_t>(order_key(bits_float(scores << 16)));
  const uint32_t high = static_cast<uint32_t>(order_key(bits_float(scores & kKeyMask)));
  return low >> 16 | (high & kKeyMask);
#endif
}

// The larger keys of either half.
__device__ __forceinline__ uint32_t larger_keys(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vmaxs2(a, b);
#else
  const int32_t low = larger(static_cast<int32_t>(a << 16), static_cast<int32_t>(b << 16));
  const int32_t high = larger(static_cast<int32_t>(a), static_cast<int32_t>(b));
  return static_cast<uint32_t>(low) >> 16 | (static_cast<uint32_t>(high) & kKeyMask);
#endif
}

// Word of the key in the upper (or lower) half of `keys`.
template <bool kUpper>
__device__ __forceinline__ uint32_t packed_word(uint32_t keys, uint32_t column) {
#ifdef __CUDA_ARCH__
  return __byte_perm(column, keys, kUpper ? 0x7610 : 0x5410);
#else
  return (kUpper ? keys & kKeyMask : keys << 16) | column;
#endif
}

// The score of a word's key.
__device__ __forceinline__ float word_score(uint32_t word) {
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(word) >> 31);
  return bits_float((word ^ (sign & 0x7fffffffu)) & kKeyMask);
}

// The packed form of load_columns: key e in the half e % 2 of keys[e / 2].
template <typename Traits>
__device__ __forceinline__ void load_packed(
    const Bf16* factor, int width, bool aligned, int sub, uint32_t (&keys)[Traits::kColumns / 2]
) {
  constexpr int kVector = Traits::kVector;
  constexpr uint32_t kNone = 0x80008000u;  // below every key
  if (aligned) {
#pragma unroll
    for (int e = 0; e < Traits::kColumns; e += kVector) {
      const int column = column_of<Traits>(sub, e);
      const bool inside = column < width;  // then so is the whole vector
      uint4 four = make_uint4(0, 0, 0, 0);
      if (inside) {
        four = __ldg(reinterpret_cast<const uint4*>(factor + column));
      }
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        keys[e / 2 + i] = inside ? pack_keys(words[i]) : kNone;
      }
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < Traits::kColumns; e += 2) {
    const int column = column_of<Traits>(sub, e);
    const uint32_t low = column < width ? factor[column].bits : 0u;
    const uint32_t high = column + 1 < width ? factor[column + 1].bits : 0u;
    const uint32_t both = pack_keys(low | high << 16);
    keys[e / 2] = ((column < width ? both : kNone) & 0xffffu) |
                  ((column + 1 < width ? both : kNone) & kKeyMask);
  }
}

// The bound for keys of 16 bits, in the upper half. Of a key that is not negative the lower half is
// zero, of a negative one it is ones.
__device__ __forceinline__ int32_t packed_bound(int32_t low) {
  return static_cast<int32_t>(static_cast<uint32_t>(low + (low >= 0 ? 0xffff : 0)) & kKeyMask);
}

}  // namespace sdm::topk
