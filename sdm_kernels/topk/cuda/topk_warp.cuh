// SPDX-License-Identifier: Apache-2.0
//! @file Sorting and selecting within a warp, on words in registers.
#pragma once

#include <cstdint>

#include "sdm_kernels/topk/cuda/topk_device.cuh"

namespace sdm::topk {

template <typename Word>
__device__ __forceinline__ Word larger(Word a, Word b) {
  return a > b ? a : b;
}

template <typename Word>
__device__ __forceinline__ Word smaller(Word a, Word b) {
  return a < b ? a : b;
}

// One compare-exchange of all words with the lane `lane ^ kXor`; kFlip pairs register r with
// register kRegs - 1 - r. The lane whose bit kBit is 0 keeps the larger words.
template <int kXor, int kBit, bool kFlip, typename Word, int kRegs>
__device__ __forceinline__ void exchange_lanes(Word (&words)[kRegs], int lane) {
  const bool keeps_larger = (lane & kBit) == 0;
  Word others[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    others[r] = __shfl_xor_sync(kFullMask, words[kFlip ? kRegs - 1 - r : r], kXor);
  }
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    words[r] = keeps_larger ? larger(words[r], others[r]) : smaller(words[r], others[r]);
  }
}

// Steps of a merge at distances kStride, kStride / 2, .. 1 of places (place = lane * kRegs + r).
template <int kStride, typename Word, int kRegs>
__device__ __forceinline__ void merge_steps(Word (&words)[kRegs], int lane) {
  if constexpr (kStride >= kRegs) {
    exchange_lanes<kStride / kRegs, kStride / kRegs, false>(words, lane);
  } else if constexpr (kStride > 0) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      if ((r & kStride) == 0) {
        const Word a = words[r];
        const Word b = words[r | kStride];
        words[r] = larger(a, b);
        words[r | kStride] = smaller(a, b);
      }
    }
  }
  if constexpr (kStride > 1) {
    merge_steps<kStride / 2>(words, lane);
  }
}

// Merges sorted runs of kSize / 2 places into runs of kSize, then goes on until kCount.
template <int kSize, int kCount, typename Word, int kRegs>
__device__ __forceinline__ void sort_steps(Word (&words)[kRegs], int lane) {
  // The first step of a merge pairs place p with its mirror image, so that all steps of all merges
  // order the same way.
  if constexpr (kSize <= kRegs) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      if ((r & (kSize / 2)) == 0) {
        const int mirror = r ^ (kSize - 1);
        const Word a = words[r];
        const Word b = words[mirror];
        words[r] = larger(a, b);
        words[mirror] = smaller(a, b);
      }
    }
  } else {
    constexpr int kLanes = kSize / kRegs;
    exchange_lanes<kLanes - 1, kLanes / 2, true>(words, lane);
  }
  if constexpr (kSize > 2) {
    merge_steps<kSize / 4>(words, lane);
  }
  if constexpr (kSize < kCount) {
    sort_steps<kSize * 2, kCount>(words, lane);
  }
}

// Sorts, descending, the kLanes * kRegs words of each group of kLanes lanes: afterwards register r
// of lane l of a group has the word of rank l * kRegs + r.
template <int kLanes, typename Word, int kRegs>
__device__ __forceinline__ void sort_descending(Word (&words)[kRegs], int lane) {
  sort_steps<2, kLanes * kRegs>(words, lane);
}

// Sum over the lanes up to this one, in groups of kLanes lanes.
template <int kLanes>
__device__ __forceinline__ int scan_lanes(int count, int lane) {
#pragma unroll
  for (int delta = 1; delta < kLanes; delta *= 2) {
    const int other = __shfl_up_sync(kFullMask, count, delta, kLanes);
    count += (lane & (kLanes - 1)) >= delta ? other : 0;
  }
  return count;
}

constexpr int kNumBuckets = 256;

struct Cut {
  int32_t value;  // at least `want` values are not below it
  int num_ge;     // how many; if more than `want`, fewer than `want` values are above it
};

// The cut for the `want` largest of the values value(0 .. kRegs - 1) of all lanes. At least `want`
// values are >= low, none is > high. Every round counts values in 256 buckets and goes on in the
// bucket that holds the cut, which is 8 bits narrower: at most four rounds.
// buckets: kNumBuckets words of shared memory of this warp, 16-byte aligned.
template <int kRegs, typename Value>
__device__ __forceinline__ Cut
warp_cut(Value value, int want, int32_t low, int32_t high, uint32_t* buckets, int lane) {
  constexpr int kPerLane = kNumBuckets / kWarp;
  int num_above = 0;
  for (;;) {
    const uint32_t range = static_cast<uint32_t>(high) - static_cast<uint32_t>(low);
    const int shift = max(0, 32 - __clz(static_cast<int>(range)) - 8);  // 2^8 buckets
    uint4* mine = reinterpret_cast<uint4*>(buckets) + 2 * lane;
    __syncwarp();  // the last readers of the memory are done
    mine[0] = make_uint4(0, 0, 0, 0);
    mine[1] = make_uint4(0, 0, 0, 0);
    __syncwarp();  // the buckets are empty
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const int32_t v = value(r);
      // Unsigned distances from the top: high - v, one compare for both ends.
      const uint32_t below = static_cast<uint32_t>(high) - static_cast<uint32_t>(v);
      if (below <= range) {
        atomicAdd(buckets + (below >> shift), 1u);
      }
    }
    __syncwarp();  // the counts are complete
    const uint4 first = mine[0];
    const uint4 second = mine[1];
    const int counts[kPerLane] = {
        static_cast<int>(first.x),
        static_cast<int>(first.y),
        static_cast<int>(first.z),
        static_cast<int>(first.w),
        static_cast<int>(second.x),
        static_cast<int>(second.y),
        static_cast<int>(second.z),
        static_cast<int>(second.w)
    };
    int total = 0;
#pragma unroll
    for (int b = 0; b < kPerLane; ++b) {
      total += counts[b];
    }
    const int upto = num_above + scan_lanes<kWarp>(total, lane);
    const int holder = __ffs(static_cast<int>(__ballot_sync(kFullMask, upto >= want))) - 1;
    int bucket = 0;  // of this lane's buckets the first that reaches `want`
    int before = upto - total;
#pragma unroll
    for (int b = 0; b < kPerLane - 1; ++b) {
      const bool passed = bucket == b && before + counts[b] < want;
      before += passed ? counts[b] : 0;
      bucket += passed ? 1 : 0;
    }
    int here = counts[0];
#pragma unroll
    for (int b = 1; b < kPerLane; ++b) {
      here = bucket == b ? counts[b] : here;
    }
    bucket = __shfl_sync(kFullMask, bucket + kPerLane * lane, holder);
    before = __shfl_sync(kFullMask, before, holder);
    here = __shfl_sync(kFullMask, here, holder);
    // The bucket covers [high - bucket_high, high - bucket_low] in distances from the top.
    const uint32_t nearest = static_cast<uint32_t>(bucket) << shift;
    const uint32_t furthest = min(range, nearest + ((1u << shift) - 1u));
    if (before + here == want || shift == 0) {
      return {static_cast<int32_t>(static_cast<uint32_t>(high) - furthest), before + here};
    }
    // Go on between the values that the bucket holds.
    const uint32_t top = static_cast<uint32_t>(high);
    int32_t least = INT32_MAX;
    int32_t most = INT32_MIN;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const int32_t v = value(r);
      const uint32_t below = top - static_cast<uint32_t>(v);
      if (below >= nearest && below <= furthest) {
        least = min(least, v);
        most = max(most, v);
      }
    }
    low = __reduce_min_sync(kFullMask, least);
    high = __reduce_max_sync(kFullMask, most);
    num_above = before;
    if (low == high) {
      return {low, before + here};
    }
  }
}

}  // namespace sdm::topk
