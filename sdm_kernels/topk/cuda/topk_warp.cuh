// SPDX-License-Identifier: Apache-2.0
//! @file Sorting and selecting within a warp, on words in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_device.cuh"

namespace sdm::topk {

// order_key in fewer instructions: the maximum turns NaN into -inf and leaves all else alone.
__device__ __forceinline__ int32_t fast_key(float score) {
  const uint32_t bits = float_bits(fmaxf(score, -INFINITY));
  const int32_t sign = static_cast<int32_t>(bits) >> 31;
  return static_cast<int32_t>(bits ^ (static_cast<uint32_t>(sign) & 0x7fffffffu));
}

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

// Adds `step` to `sum` if a >= b: two instructions, where the compiler makes three of the plain
// way.
__device__ __forceinline__ void add_if_ge(int& sum, int32_t a, int32_t b, int step) {
#ifdef __CUDA_ARCH__
  asm("{.reg .pred p; setp.ge.s32 p, %1, %2; @p add.s32 %0, %0, %3;}"
      : "+r"(sum)
      : "r"(a), "r"(b), "r"(step));
#else
  sum += a >= b ? step : 0;
#endif
}

// Sum over the lanes up to this one, in groups of kLanes lanes.
template <int kLanes>
__device__ __forceinline__ int scan_lanes(int count) {
#pragma unroll
  for (int delta = 1; delta < kLanes; delta *= 2) {
#ifdef __CUDA_ARCH__
    // The shuffle itself says whether there is a lane to add.
    asm volatile(
        "{.reg .pred p; .reg .s32 other; shfl.sync.up.b32 other|p, %0, %1, %2, 0xffffffff; "
        "@p add.s32 %0, %0, other;}"
        : "+r"(count)
        : "r"(delta), "r"((kWarp - kLanes) << 8)
    );
#else
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int other = __shfl_up_sync(kFullMask, count, delta, kLanes);
    count += lane >= delta ? other : 0;
#endif
  }
  return count;
}

// Appends words to shared memory, each lane at a place of its own.
class SharedWriter {
 public:
  __device__ __forceinline__ explicit SharedWriter(uint32_t* at)
#ifdef __CUDA_ARCH__
      : at_(static_cast<uint32_t>(__cvta_generic_to_shared(at))){}
#else
      : at_(at) {
  }
#endif

        __device__ __forceinline__ void push_if_ge(uint32_t word, int32_t a, int32_t b) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "{.reg .pred p; setp.ge.s32 p, %2, %3; @p st.shared.u32 [%0], %1; @p add.u32 %0, %0, 4;}"
        : "+r"(at_)
        : "r"(word), "r"(a), "r"(b)
        : "memory"
    );
#else
    if (a >= b) {
      *at_++ = word;
    }
#endif
  }

 private:
#ifdef __CUDA_ARCH__
  uint32_t at_;
#else
  uint32_t* at_;
#endif
};

constexpr int kNumBuckets = 256;
constexpr int kBucketBits = 8;

// The shared memory of a search: one bucket more, for what is outside, then room for 32 values.
struct alignas(16) CutShared {
  uint32_t buckets[kNumBuckets];
  uint32_t outside;
  uint32_t num_values;
  int32_t values[kWarp];
};

struct Cut {
  int32_t value;  // at least `want` values are not below it
  int num_ge;     // how many; if more than `want`, fewer than `want` values are above it
};

// Where the count over the buckets, added to num_above, reaches `want`.
struct Bucket {
  int place;
  int before;  // values in buckets before it, and above all buckets
  int here;    // values in it
};

__device__ __forceinline__ Bucket
find_bucket(const CutShared& shared, int want, int num_above, int lane) {
  constexpr int kPerLane = kNumBuckets / kWarp;
  const uint4* mine = reinterpret_cast<const uint4*>(shared.buckets) + 2 * lane;
  const uint4 first = mine[0];
  const uint4 second = mine[1];
  const int total = static_cast<int>(
      first.x + first.y + first.z + first.w + second.x + second.y + second.z + second.w
  );
  // First the lane whose buckets reach it, then the bucket of that lane.
  const int upto = num_above + scan_lanes<kWarp>(total);
  const int holder = __ffs(static_cast<int>(__ballot_sync(kFullMask, upto >= want))) - 1;
  const int before = __shfl_sync(kFullMask, upto - total, holder);
  const int own = static_cast<int>(shared.buckets[holder * kPerLane + lane % kPerLane]);
  const int own_upto = before + scan_lanes<kPerLane>(own);
  const int index = __ffs(static_cast<int>(__ballot_sync(kFullMask, own_upto >= want))) - 1;
  Bucket bucket;
  bucket.place = holder * kPerLane + index;
  bucket.here = __shfl_sync(kFullMask, own, index);
  bucket.before = __shfl_sync(kFullMask, own_upto, index) - bucket.here;
  return bucket;
}

// The cut among at most 32 values in shared.values, of which `want` are wanted.
__device__ __forceinline__ Cut cut_few(const CutShared& shared, int count, int want, int lane) {
  const int32_t own = lane < count ? shared.values[lane] : INT32_MIN;
  int num_ge = 0;
  int num_gt = 0;
  for (int other = 0; other < count; ++other) {
    const int32_t value = shared.values[other];
    num_ge += value >= own ? 1 : 0;
    num_gt += value > own ? 1 : 0;
  }
  const bool is_cut = lane < count && num_gt < want && num_ge >= want;
  const int holder = __ffs(static_cast<int>(__ballot_sync(kFullMask, is_cut))) - 1;
  return {__shfl_sync(kFullMask, own, holder), __shfl_sync(kFullMask, num_ge, holder)};
}

// The cut for the `want` largest of the values value(0 .. kRegs - 1) of all lanes. At least `want`
// values are >= low, none is > high; what is no value is kLowestKey. Values are counted in 256
// buckets of equal width; if the bucket that holds the cut has at most 32 values they are compared
// with each other, otherwise the search goes on between the smallest and the largest of them, 8
// bits less: at most four rounds.
template <int kRegs, typename Value>
__device__ __forceinline__ Cut
warp_cut(Value value, int want, int32_t low, int32_t high, CutShared& shared, int lane) {
  int num_above = 0;
  for (;;) {
    const uint32_t top = static_cast<uint32_t>(high);
    const uint32_t range = top - static_cast<uint32_t>(low);
    const int shift = max(0, kWarp - kBucketBits - __clz(static_cast<int>(range)));
    uint4* mine = reinterpret_cast<uint4*>(shared.buckets) + 2 * lane;
    __syncwarp();  // the last readers of the memory are done
    mine[0] = make_uint4(0, 0, 0, 0);
    mine[1] = make_uint4(0, 0, 0, 0);
    if (lane == 0) {
      shared.num_values = 0;
    }
    __syncwarp();  // the buckets are empty
    // Distances from the top: bucket 0 has the largest values. Values below `low` are either in the
    // last bucket, as if it had been chosen to end there, or outside.
    const bool plain = num_above == 0 && range < (1u << 30);
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const uint32_t below = top - static_cast<uint32_t>(value(r));
      uint32_t place = min(below >> shift, static_cast<uint32_t>(kNumBuckets));
      if (!plain) {
        place = below <= range ? place : kNumBuckets;
      }
      atomicAdd(shared.buckets + place, 1u);
    }
    __syncwarp();  // the counts are complete
    const Bucket bucket = find_bucket(shared, want, num_above, lane);
    const uint32_t nearest = static_cast<uint32_t>(bucket.place) << shift;
    uint32_t width = (1u << shift) - 1u;
    if (!plain) {
      width = min(width, range - nearest);
    }
    const int num_ge = bucket.before + bucket.here;
    if (num_ge == want || shift == 0) {
      return {static_cast<int32_t>(top - nearest - width), num_ge};
    }
    if (bucket.here <= kWarp) {
#pragma unroll
      for (int r = 0; r < kRegs; ++r) {
        const int32_t v = value(r);
        if (top - static_cast<uint32_t>(v) - nearest <= width) {
          shared.values[atomicAdd(&shared.num_values, 1u)] = v;
        }
      }
      __syncwarp();  // the values are there; their order does not matter
      const Cut cut = cut_few(shared, bucket.here, want - bucket.before, lane);
      return {cut.value, bucket.before + cut.num_ge};
    }
    int32_t least = INT32_MAX;
    int32_t most = INT32_MIN;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const int32_t v = value(r);
      if (top - static_cast<uint32_t>(v) - nearest <= width) {
        least = min(least, v);
        most = max(most, v);
      }
    }
    low = __reduce_min_sync(kFullMask, least);
    high = __reduce_max_sync(kFullMask, most);
    num_above = bucket.before;
    if (low == high) {
      return {low, num_ge};
    }
  }
}

}  // namespace sdm::topk
