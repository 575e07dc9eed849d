// SPDX-License-Identifier: Apache-2.0
//! @file The warp kernel's shape: what a warp keeps of a row, and which lane has which columns.
//!
//! Lanes 0 .. 15 of a warp own factor 0, lanes 16 .. 31 own factor 1 ("half" 0 and 1), so that both
//! are sorted by the same instructions. `sub` is the lane within its half.
#pragma once

#include <cstdint>
#include <type_traits>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/topk/cuda/topk_warp.cuh"

namespace sdm::topk {

constexpr int kHalf = 16;

// kCols: columns per lane, so factors have at most 16 * kCols. kSelect: most slots selected.
template <typename Scalar, int kCols, int kSelect>
struct PairTraits {
  using scalar_t = Scalar;
  static constexpr int kColumns = kCols;
  static constexpr int kMaxSelected = kSelect;
  static constexpr int kMaxWidth = kHalf * kCols;
  static constexpr int kColumnBits = kCols == 16 ? 8 : kCols == 32 ? 9 : 10;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Scalar));  // columns per load
  // Keys of bfloat16 are 16 bits, two a register; with its column below it, one is a word to sort.
  static constexpr bool kPacked = std::is_same_v<Scalar, Bf16>;

  // Columns kept per factor. About 45 of 256 normal scores for kSelect = 64 and 30 for 32.
  static constexpr int kList = kSelect < 64 ? 64 : kSelect;
  static constexpr int kListRegs = kList / kHalf;
};

// The shared memory of a warp.
template <typename Traits>
struct alignas(16) PairWarp {
  // Before the lists are sorted: the kept columns as words (score and column).
  union {
    uint32_t kept[2][Traits::kList];
    float scores[2][Traits::kList];  // [half][rank]
  };

  int32_t columns[2][Traits::kList];  // [half][rank]

  // Before the first cut: the lane maxima of both factors, descending.
  union {
    CutShared search;
    float maxima[2][kWarp];
  };

  uint32_t picks[Traits::kMaxSelected];
};

// What a lane knows about its half; equal in all its lanes.
struct PairHalf {
  int32_t low;   // keys below it are dropped
  int32_t most;  // largest key
  int shift;     // of (key - low) in the words that are sorted: its highest bit comes to the top
  int count;     // columns kept
};

template <typename Traits>
__device__ __forceinline__ int column_of(int sub, int element) {
  constexpr int kVector = Traits::kVector;
  return sub * kVector + element / kVector * (kHalf * kVector) + element % kVector;
}

}  // namespace sdm::topk
