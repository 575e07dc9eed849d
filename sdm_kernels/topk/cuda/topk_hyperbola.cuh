// SPDX-License-Identifier: Apache-2.0
//! @file The pairs of ranks (i, j) with (i + 1) * (j + 1) <= c: candidates of the warp kernel.
//!
//! One table per upper limit of c, in row order: lanes next to each other then read scores that are
//! next to each other. An entry is 4 * i | 4 * j << 10 | ((i + 1) * (j + 1) - 1) << 20, so that
//! ranks are offsets in bytes and a smaller c takes the entries below c << 20.
#pragma once

#include <cstdint>

#include "sdm_kernels/topk/cuda/topk_device.cuh"

namespace sdm::topk {

constexpr int count_pairs(int limit) {
  int count = 0;
  for (int i = 1; i <= limit; ++i) {
    count += limit / i;
  }
  return count;
}

constexpr uint32_t kNoPair = 0xfff00000u;

template <int kLimit>
struct Hyperbola {
  // Per lane; entries behind the last pair are beyond every c.
  static constexpr int kCount = count_pairs(kLimit);
  static constexpr int kPerLane = (kCount + kWarp - 1) / kWarp;

  uint32_t entries[kPerLane * kWarp];
};

template <int kLimit>
constexpr Hyperbola<kLimit> make_hyperbola() {
  Hyperbola<kLimit> table{};
  int at = 0;
  for (int i = 1; i <= kLimit; ++i) {
    for (int j = 1; i * j <= kLimit; ++j) {
      table.entries[at++] = static_cast<uint32_t>((i - 1) << 2 | (j - 1) << 12 | (i * j - 1) << 20);
    }
  }
  for (; at < Hyperbola<kLimit>::kPerLane * kWarp; ++at) {
    table.entries[at] = kNoPair;
  }
  return table;
}

const __device__ Hyperbola<32> g_hyperbola_32 = make_hyperbola<32>();
const __device__ Hyperbola<64> g_hyperbola_64 = make_hyperbola<64>();
const __device__ Hyperbola<128> g_hyperbola_128 = make_hyperbola<128>();
const __device__ Hyperbola<256> g_hyperbola_256 = make_hyperbola<256>();

template <int kLimit>
const __device__ __forceinline__ uint32_t* hyperbola() {
  if constexpr (kLimit == 32) {
    return g_hyperbola_32.entries;
  } else if constexpr (kLimit == 64) {
    return g_hyperbola_64.entries;
  } else if constexpr (kLimit == 128) {
    return g_hyperbola_128.entries;
  } else {
    static_assert(kLimit == 256);
    return g_hyperbola_256.entries;
  }
}

__device__ __forceinline__ int pair_first(uint32_t entry) {
  return static_cast<int>((entry >> 2) & 0xffu);
}

__device__ __forceinline__ int pair_second(uint32_t entry) {
  return static_cast<int>((entry >> 12) & 0xffu);
}

// What comes before every entry with more than `num_sums` pairs up to it.
__device__ __forceinline__ uint32_t pairs_end(int num_sums) {
  return static_cast<uint32_t>(num_sums) << 20;
}

// The elements of two lists at the ranks of an entry.
template <typename Element>
__device__ __forceinline__ Element at_first(const Element* list, uint32_t entry) {
  static_assert(sizeof(Element) == 4);
  return *reinterpret_cast<const Element*>(reinterpret_cast<const char*>(list) + (entry & 0x3fcu));
}

template <typename Element>
__device__ __forceinline__ Element at_second(const Element* list, uint32_t entry) {
  static_assert(sizeof(Element) == 4);
  return *reinterpret_cast<const Element*>(
      reinterpret_cast<const char*>(list) + (entry >> 10 & 0x3fcu)
  );
}

}  // namespace sdm::topk
