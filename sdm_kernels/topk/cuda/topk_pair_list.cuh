// SPDX-License-Identifier: Apache-2.0
//! @file First half of the warp kernel: from the raw columns of two factors to their lists, the
//! best columns in descending order, less those that provably reach no selected slot.
//!
//! Lanes 0 .. 15 of a warp own factor 0, lanes 16 .. 31 own factor 1 ("half" 0 and 1), so that both
//! are sorted by the same instructions. `sub` is the lane within its half.
#pragma once

#include <cmath>
#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_pair_packed.cuh"
#include "sdm_kernels/topk/cuda/topk_pair_traits.cuh"
#include "sdm_kernels/topk/cuda/topk_warp.cuh"

namespace sdm::topk {

// Keys of the columns of this lane; kLowestKey behind the last column.
template <typename Traits>
__device__ __forceinline__ void load_columns(
    const typename Traits::scalar_t* factor,
    int width,
    bool aligned,
    int sub,
    int32_t (&keys)[Traits::kColumns]
) {
  using T = typename Traits::scalar_t;
  constexpr int kVector = Traits::kVector;
  if (aligned) {
#pragma unroll
    for (int e = 0; e < Traits::kColumns; e += kVector) {
      const int column = column_of<Traits>(sub, e);

      union {
        uint4 bits;
        T scores[kVector];
      } vector;

      const bool inside = column < width;  // then so is the whole vector
      vector.bits = make_uint4(0, 0, 0, 0);
      if (inside) {
        vector.bits = __ldg(reinterpret_cast<const uint4*>(factor + column));
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        keys[e + v] = inside ? fast_key(to_f32(vector.scores[v])) : kLowestKey;
      }
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < Traits::kColumns; ++e) {
    const int column = column_of<Traits>(sub, e);
    keys[e] = column < width ? fast_key(to_f32(factor[column])) : kLowestKey;
  }
}

// The best two columns of every lane, sorted in each half; NaN where there is no column.
template <int kCols>
__device__ __forceinline__ float2 lane_maxima(const int32_t (&keys)[kCols], int lane) {
  int32_t best[2] = {keys[0], keys[1]};
#pragma unroll
  for (int e = 2; e < kCols; e += 2) {
    best[0] = max(best[0], keys[e]);
    best[1] = max(best[1], keys[e + 1]);
  }
  sort_descending<kHalf>(best, lane);
  return make_float2(key_score(best[0]), key_score(best[1]));
}

template <int kCount>
__device__ __forceinline__ float2 lane_maxima(const uint32_t (&keys)[kCount], int lane) {
  uint32_t both = keys[0];
#pragma unroll
  for (int e = 1; e < kCount; ++e) {
    both = larger_keys(both, keys[e]);
  }
  int32_t best[2] = {static_cast<int32_t>(both << 16), static_cast<int32_t>(both & kKeyMask)};
  sort_descending<kHalf>(best, lane);
  return make_float2(
      word_score(static_cast<uint32_t>(best[0])), word_score(static_cast<uint32_t>(best[1]))
  );
}

// A key that the c-th largest sum is not below: of the lane maxima (two per lane) sorted, any two
// of ranks r and q with r * q >= c are not above the columns of those ranks.
template <typename Traits>
__device__ __forceinline__ int32_t
sum_bound(float2 best, int num_sums, PairWarp<Traits>& shared, int lane) {
  reinterpret_cast<float2*>(&shared.maxima[0][0])[lane] = best;
  __syncwarp();  // the maxima are written
  // Rank lane + 1 of factor 0 with the smallest rank of factor 1 that makes c pairs.
  const float quotient =
      __fdividef(static_cast<float>(num_sums + lane) + 0.5f, static_cast<float>(lane + 1));
  const int rank = static_cast<int>(quotient);
  int32_t bound = kNegInfKey;
  if (rank <= kWarp) {
    bound = fast_key(__fadd_rn(shared.maxima[0][lane], shared.maxima[1][rank - 1]));
  }
  return __reduce_max_sync(kFullMask, bound);
}

// Scores with a key below the result give sums below `bound` with every partner, of which
// `best_partner` is the largest. The margin covers the rounding of the sum and of this difference.
__device__ __forceinline__ int32_t column_bound(int32_t bound, float best_partner) {
  const float sum = key_score(bound);
  const float difference = __fsub_rn(sum, best_partner);
  if (!(fabsf(difference) <= 3.4028235e38f)) {
    return kNegInfKey;
  }
  const float margin = fabsf(sum) * 0x1p-22f + fabsf(difference) * 0x1p-22f + 0x1p-146f;
  return max(fast_key(__fsub_rn(difference, margin)) - 1, kNegInfKey);
}

// The word that stands for a column while its factor is sorted: the key above `low`, shifted to the
// top, and the column in the place of the lowest bits. Exact if shift >= kColumnBits.
template <typename Traits>
__device__ __forceinline__ uint32_t sort_word(int32_t key, const PairHalf& half, int column) {
  if constexpr (Traits::kPacked) {
    return (static_cast<uint32_t>(key) & kKeyMask) | static_cast<uint32_t>(column);
  }
  constexpr uint32_t kColumnMask = (1u << Traits::kColumnBits) - 1u;
  // (key - low) << shift as one multiplication and addition.
  const uint32_t scale = 1u << half.shift;
  const uint32_t above =
      static_cast<uint32_t>(key) * scale - static_cast<uint32_t>(half.low) * scale;
  return (above & ~kColumnMask) | static_cast<uint32_t>(column);
}

// A factor of which too many columns reach the bound (equal scores, infinities, heavy tails): keeps
// its best `want` exactly. The whole warp works on one factor.
template <typename Traits>
__device__ __noinline__ void keep_best(
    const typename Traits::scalar_t* factor,
    int width,
    int want,
    PairHalf half,
    uint32_t* kept,
    CutShared& search,
    int lane
) {
  constexpr int kRegs = Traits::kMaxWidth / kWarp;
  int32_t keys[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    const int column = lane + r * kWarp;
    keys[r] = column < width ? fast_key(to_f32(factor[column])) : kLowestKey;
  }
  const Cut cut =
      warp_cut<kRegs>([&](int r) { return keys[r]; }, want, half.low, half.most, search, lane);
  int32_t first_tied = 0;  // of the columns with the key of the cut, those from here on
  if (cut.num_ge > want) {
    int above = 0;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      above += keys[r] > cut.value ? 1 : 0;
    }
    above = __reduce_add_sync(kFullMask, above);
    first_tied = warp_cut<kRegs>(
                     [&](int r) { return keys[r] == cut.value ? lane + r * kWarp : kLowestKey; },
                     want - above,
                     0,
                     width - 1,
                     search,
                     lane
    )
                     .value;
  }
  int count = 0;
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    const int column = lane + r * kWarp;
    const bool keep =
        keys[r] >= cut.value && (cut.num_ge == want || keys[r] > cut.value || column >= first_tied);
    keys[r] = keep ? keys[r] : kLowestKey;
    count += keep ? 1 : 0;
  }
  int at = scan_lanes<kWarp>(count) - count;
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    if (keys[r] != kLowestKey) {
      kept[at++] = sort_word<Traits>(keys[r], half, lane + r * kWarp);
    }
  }
}

// How many of this lane's columns reach the bound.
template <typename Traits>
__device__ __forceinline__ int count_columns(
    const int32_t (&keys)[Traits::kColumns], const PairHalf& half
) {
  int count = 0;
#pragma unroll
  for (int e = 0; e < Traits::kColumns; ++e) {
    add_if_ge(count, keys[e], half.low, 1);
  }
  return count;
}

// Writes them.
template <typename Traits>
__device__ __forceinline__ void write_columns(
    const int32_t (&keys)[Traits::kColumns], const PairHalf& half, int sub, uint32_t* to
) {
  SharedWriter writer(to);
#pragma unroll
  for (int e = 0; e < Traits::kColumns; ++e) {
    const uint32_t word = sort_word<Traits>(keys[e], half, column_of<Traits>(sub, e));
    writer.push_if_ge(word, keys[e], half.low);
  }
}

template <typename Traits>
__device__ __forceinline__ int count_columns(
    const uint32_t (&keys)[Traits::kColumns / 2], const PairHalf& half
) {
  const int32_t low = packed_bound(half.low);
  int count = 0;
#pragma unroll
  for (int e = 0; e < Traits::kColumns / 2; ++e) {
    add_if_ge(count, static_cast<int32_t>(keys[e] << 16), low, 1);
    add_if_ge(count, static_cast<int32_t>(keys[e]), low, 1);  // the lower half decides nothing
  }
  return count;
}

template <typename Traits>
__device__ __forceinline__ void write_columns(
    const uint32_t (&keys)[Traits::kColumns / 2], const PairHalf& half, int sub, uint32_t* to
) {
  const int32_t low = packed_bound(half.low);
  SharedWriter writer(to);
#pragma unroll
  for (int e = 0; e < Traits::kColumns; e += 2) {
    const uint32_t column = static_cast<uint32_t>(column_of<Traits>(sub, e));
    const uint32_t first = packed_word<false>(keys[e / 2], column);
    const uint32_t second = packed_word<true>(keys[e / 2], column + 1);
    writer.push_if_ge(first, static_cast<int32_t>(first), low);
    writer.push_if_ge(second, static_cast<int32_t>(second), low);
  }
}

// Puts the columns that reach the bound of their half into shared.kept, in any order.
template <typename Traits, typename Keys>
__device__ __forceinline__ void keep_columns(
    const Keys& keys,
    const typename Traits::scalar_t* scores,
    const int (&widths)[2],
    int num_selected,
    PairHalf& half,
    PairWarp<Traits>& shared,
    int lane
) {
  const int sub = lane % kHalf;
  const int count = count_columns<Traits>(keys, half);
  const int upto = scan_lanes<kHalf>(count);
  half.count = __shfl_sync(kFullMask, upto, kHalf - 1, kHalf);
  const bool overflows = half.count > Traits::kList;
  if (!overflows) {
    write_columns<Traits>(keys, half, sub, shared.kept[lane / kHalf] + (upto - count));
  }
  const uint32_t overflowing = __ballot_sync(kFullMask, overflows);
  if (overflowing != 0) {
    for (int h = 0; h < 2; ++h) {
      if ((overflowing >> (h * kHalf) & 1u) == 0) {
        continue;
      }
      const int want = min(num_selected, widths[h]);
      PairHalf its;
      its.low = __shfl_sync(kFullMask, half.low, h * kHalf);
      its.most = __shfl_sync(kFullMask, half.most, h * kHalf);
      its.shift = __shfl_sync(kFullMask, half.shift, h * kHalf);
      its.count = want;
      keep_best<Traits>(
          scores + (h == 0 ? 0 : widths[0]),
          widths[h],
          want,
          its,
          shared.kept[h],
          shared.search,
          lane
      );
      if (lane / kHalf == h) {
        half.count = want;
      }
    }
  }
}

// True if rank r + 1 has to come before rank r.
__device__ __forceinline__ bool out_of_order(
    int32_t key, int32_t column, int32_t next_key, int32_t next_column
) {
  return next_key > key || (next_key == key && next_column > column);
}

// Words leave out the lowest bits of keys, so neighbours may be out of order; a few exchanges of
// neighbours put that right.
template <int kRegs>
__device__ __noinline__ void repair_order(
    int32_t (&keys)[kRegs], int32_t (&columns)[kRegs], int lane
) {
  for (bool odd = true, clean = false;; odd = !odd) {
    bool moved = false;
    if (odd) {
      const int32_t next_key = __shfl_down_sync(kFullMask, keys[0], 1, kHalf);
      const int32_t next_column = __shfl_down_sync(kFullMask, columns[0], 1, kHalf);
      const int32_t last_key = __shfl_up_sync(kFullMask, keys[kRegs - 1], 1, kHalf);
      const int32_t last_column = __shfl_up_sync(kFullMask, columns[kRegs - 1], 1, kHalf);
      const bool has_next = lane % kHalf != kHalf - 1;
      const bool has_last = lane % kHalf != 0;
      const bool down =
          has_next && out_of_order(keys[kRegs - 1], columns[kRegs - 1], next_key, next_column);
      const bool up = has_last && out_of_order(last_key, last_column, keys[0], columns[0]);
      if (down) {
        keys[kRegs - 1] = next_key;
        columns[kRegs - 1] = next_column;
      }
      if (up) {
        keys[0] = last_key;
        columns[0] = last_column;
      }
      moved = down || up;
    }
#pragma unroll
    for (int r = 0; r + 1 < kRegs; ++r) {
      if ((r % 2 == 1) == odd && out_of_order(keys[r], columns[r], keys[r + 1], columns[r + 1])) {
        const int32_t key = keys[r];
        const int32_t column = columns[r];
        keys[r] = keys[r + 1];
        columns[r] = columns[r + 1];
        keys[r + 1] = key;
        columns[r + 1] = column;
        moved = true;
      }
    }
    const bool quiet = __ballot_sync(kFullMask, moved) == 0;
    if (quiet && clean) {
      return;  // neither an odd nor an even step found anything
    }
    clean = quiet;
  }
}

// Sorts the kept words of a half, at most 16 * kRegs: scores and columns of this lane's ranks.
template <typename Traits, int kRegs>
__device__ __forceinline__ void sort_exact(
    const typename Traits::scalar_t* factor,
    const PairHalf& half,
    const uint32_t* kept,
    int lane,
    float (&scores)[kRegs],
    int32_t (&columns)[kRegs]
) {
  const int first = lane % kHalf * kRegs;
  uint32_t words[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    words[r] = first + r < half.count ? kept[first + r] : 0u;
  }
  sort_descending<kHalf>(words, lane);
  int32_t keys[kRegs];
  constexpr uint32_t kColumnMask = (1u << Traits::kColumnBits) - 1u;
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    columns[r] = static_cast<int32_t>(words[r] & kColumnMask);
    keys[r] = static_cast<int32_t>(static_cast<uint32_t>(half.low) + (words[r] >> half.shift));
  }
  if (__any_sync(kFullMask, half.shift < Traits::kColumnBits)) {
    bool wrong = false;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const bool real = first + r < half.count;
      columns[r] = real ? columns[r] : 0;
      keys[r] = real ? fast_key(to_f32(factor[columns[r]])) : kLowestKey;
      if (r > 0) {
        wrong = wrong || keys[r] > keys[r - 1];
      }
    }
    const int32_t next = __shfl_down_sync(kFullMask, keys[0], 1, kHalf);
    wrong = wrong || (lane % kHalf != kHalf - 1 && next > keys[kRegs - 1]);
    if (__any_sync(kFullMask, wrong)) {
      // Copies: the arrays of the usual way stay in registers.
      int32_t spare_keys[kRegs];
      int32_t spare_columns[kRegs];
#pragma unroll
      for (int r = 0; r < kRegs; ++r) {
        spare_keys[r] = keys[r];
        spare_columns[r] = columns[r];
      }
      repair_order(spare_keys, spare_columns, lane);
#pragma unroll
      for (int r = 0; r < kRegs; ++r) {
        keys[r] = spare_keys[r];
        columns[r] = spare_columns[r];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    scores[r] = key_score(keys[r]);
  }
}

template <typename Traits, int kRegs>
__device__ __forceinline__ void sort_packed(
    const PairHalf& half,
    const uint32_t* kept,
    int lane,
    float (&scores)[kRegs],
    int32_t (&columns)[kRegs]
) {
  const int first = lane % kHalf * kRegs;
  int32_t words[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    words[r] = first + r < half.count ? static_cast<int32_t>(kept[first + r]) : INT32_MIN;
  }
  sort_descending<kHalf>(words, lane);
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    columns[r] = words[r] & 0xffff;
    scores[r] = word_score(static_cast<uint32_t>(words[r]));
  }
}

// Sorts the kept columns, at most 16 * kRegs of each factor, and writes the lists. Ranks from
// half.count on get -inf: whatever they are paired with is below the bound.
template <typename Traits, int kRegs>
__device__ __forceinline__ void sort_lists(
    const typename Traits::scalar_t* factor,
    const PairHalf& half,
    PairWarp<Traits>& shared,
    int lane
) {
  const int own = lane / kHalf;
  const int first = lane % kHalf * kRegs;
  float list_scores[kRegs];
  int32_t columns[kRegs];
  if constexpr (Traits::kPacked) {
    sort_packed<Traits>(half, shared.kept[own], lane, list_scores, columns);
  } else {
    sort_exact<Traits>(factor, half, shared.kept[own], lane, list_scores, columns);
  }
  __syncwarp();  // everybody has read the words that the scores replace
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    shared.scores[own][first + r] = first + r < half.count ? list_scores[r] : -INFINITY;
    shared.columns[own][first + r] = columns[r];
  }
#pragma unroll
  for (int rank = kRegs * kHalf + lane % kHalf; rank < Traits::kList; rank += kHalf) {
    shared.scores[own][rank] = -INFINITY;
  }
  __syncwarp();  // the lists are complete
}

}  // namespace sdm::topk
