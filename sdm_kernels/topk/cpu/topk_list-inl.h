// SPDX-License-Identifier: Apache-2.0
//! @file From the raw columns of one factor to its list: the best min(k, n_f) columns in descending
//! order, larger column first among equals, less those that provably reach no selected slot.
//!
//! The lane maxima are the maxima over the columns c with equal c modulo num_maxima. The r-th
//! largest of them is not above the r-th largest column, so they bound the sums from below.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

// Writes the keys of all columns, padded to a multiple of kLanes, and the lane maxima.
template <int kMaxima, typename T>
inline void load_keys_maxima(const T* scores, int64_t width, int32_t* keys, int32_t* maxima) {
  constexpr int kGroups = kMaxima / kLanes;
  VecI best[kGroups];
  for (VecI& group : best) {
    group = broadcast(kLowestKey);
  }
  int64_t column = 0;
  for (; column + kMaxima <= width; column += kMaxima) {
    for (int group = 0; group < kGroups; ++group) {
      const VecI key = order_keys(load(scores + column + group * kLanes));
      store(keys + column + group * kLanes, key);
      best[group] = max(best[group], key);
    }
  }
  for (int group = 0; group < kGroups; ++group) {
    store(maxima + group * kLanes, best[group]);
  }
  for (int lane = 0; column < width; ++column, ++lane) {
    keys[column] = order_key(to_f32(scores[column]));
    maxima[lane] = std::max(maxima[lane], keys[column]);
  }
  pad_keys(keys + width);
}

template <typename T>
inline void load_keys(
    const T* scores, int64_t width, int64_t num_maxima, int32_t* keys, int32_t* maxima
) {
  if (num_maxima == 16) {
    load_keys_maxima<16>(scores, width, keys, maxima);
  } else if (num_maxima == 32) {
    load_keys_maxima<32>(scores, width, keys, maxima);
  } else {
    load_keys_maxima<64>(scores, width, keys, maxima);
  }
}

// Scores that bound the ranks of a list from below, descending; the first is its maximum.
struct Estimate {
  float scores[kTopkMaxMaxima];
  int32_t length;
};

inline void sort_maxima(
    const int32_t* maxima, int64_t num_maxima, int64_t width, int32_t* ranks, Estimate* estimate
) {
  count_ranks(maxima, num_maxima, ranks);
  for (int64_t lane = 0; lane < num_maxima; ++lane) {
    estimate->scores[ranks[lane]] = key_score(maxima[lane]);
  }
  estimate->length = static_cast<int32_t>(std::min(num_maxima, width));
}

// A key that the c-th largest sum of the stage is not below.
inline int32_t sum_bound(
    const TopkStage& stage,
    const float* list,
    int32_t list_len,
    const float* factor,
    int32_t factor_len
) {
  int32_t bound = kNegInfKey;
  for (const auto& pair : stage.bounds) {
    if (pair.first < list_len && pair.second < factor_len) {
      bound = std::max(bound, order_key(list[pair.first] + factor[pair.second]));
    }
  }
  return bound;
}

// Scores with a key below the result give sums below `bound` with every partner, of which
// `best_partner` is the largest. Exact arithmetic would be bound - best_partner; the margin covers
// the rounding of the float sum and of this difference.
inline int32_t column_bound(int32_t bound, float best_partner) {
  const double sum = key_score(bound);
  const double partner = best_partner;
  if (!(std::fabs(sum) < INFINITY) || !(std::fabs(partner) < INFINITY)) {
    return kNegInfKey;
  }
  const double margin = std::fabs(sum) * 0x1p-23 + std::fabs(partner) * 0x1p-50 + 0x1p-148;
  const int32_t key = order_key(static_cast<float>(sum - partner - margin));
  return std::max(key - 1, kNegInfKey);
}

// Keeps the columns with key >= bound in column order; returns their number.
inline int64_t keep_columns(const TopkFactor& factor, int64_t width, int32_t bound) {
  const VecI below = broadcast(bound - 1);
  int64_t kept = 0;
  int64_t column = 0;
  // Four vectors between branches: a branch for each would be taken at random in a narrow factor,
  // and in a wide one most groups have nothing to keep.
  constexpr int kGroup = 4;
  VecI columns = iota();
  for (; column + kGroup * kLanes <= width; column += kGroup * kLanes) {
    VecI keys[kGroup];
    uint32_t masks[kGroup];
    uint32_t any = 0;
    for (int v = 0; v < kGroup; ++v) {
      keys[v] = load(factor.keys + column + v * kLanes);
      masks[v] = mask_gt(keys[v], below);
      any |= masks[v];
    }
    if (any != 0) {
      for (int v = 0; v < kGroup; ++v) {
        compress_store(factor.columns + kept, columns + v * kLanes, masks[v]);
        compress_store(factor.keys + kept, keys[v], masks[v]);
        kept += popcount(masks[v]);
      }
    }
    columns += kGroup * kLanes;
  }
  for (; column < width; column += kLanes) {
    const VecI key = load(factor.keys + column);
    const uint32_t mask = mask_gt(key, below);
    compress_store(factor.columns + kept, columns, mask);
    compress_store(factor.keys + kept, key, mask);
    kept += popcount(mask);
    columns += kLanes;
  }
  pad_keys(factor.keys + kept);
  return kept;
}

// Drops all but the best `want` of `num` kept columns; all keys are >= low and <= most.
inline void keep_best(
    const TopkFactor& factor, int64_t num, int64_t want, int32_t low, int32_t most
) {
  const Threshold threshold =
      find_threshold(factor.keys, round_up(num, kLanes), want, low, num, most);
  int64_t surplus = threshold.num_ge - want;  // equal keys to drop: those with the lowest columns
  int64_t kept = 0;
  for (int64_t pos = 0; pos < num; ++pos) {
    const int32_t key = factor.keys[pos];
    const int32_t column = factor.columns[pos];
    const bool drop = key == threshold.key && surplus > 0;
    surplus -= drop;
    factor.keys[kept] = key;
    factor.columns[kept] = column;
    kept += key >= threshold.key && !drop;
  }
  pad_keys(factor.keys + kept);
}

// Sorts `num` kept columns into `scores` and `ids`.
template <typename Id, typename Scratch>
inline void sort_columns(
    const TopkFactor& factor, int64_t num, Scratch& scratch, float* scores, Id* ids
) {
  if (num <= kMaxCounted) {
    count_ranks(factor.keys, num, scratch.ranks);
    for (int64_t pos = 0; pos < num; ++pos) {
      const int32_t rank = scratch.ranks[pos];
      scores[rank] = key_score(factor.keys[pos]);
      ids[rank] = factor.columns[pos];
    }
  } else {
    // Ascending and stable in column order is, read backwards, the order wanted.
    for (int64_t pos = 0; pos < num; ++pos) {
      const uint32_t unsigned_key = static_cast<uint32_t>(factor.keys[pos]) ^ 0x80000000u;
      scratch.radix[0][pos] =
          uint64_t{unsigned_key} << 32 | static_cast<uint32_t>(factor.columns[pos]);
    }
    const uint64_t* sorted = radix_sort(scratch.radix[0], scratch.radix[1], num);
    for (int64_t rank = 0; rank < num; ++rank) {
      const uint64_t word = sorted[num - 1 - rank];
      scores[rank] =
          key_score(static_cast<int32_t>(static_cast<uint32_t>(word >> 32) ^ 0x80000000u));
      ids[rank] = static_cast<Id>(word & 0xffffffffu);
    }
  }
}

// The list of a factor whose keys are loaded: `want` scores and ids.
template <typename Id, typename Scratch>
inline void make_list(
    const TopkFactor& factor,
    int64_t width,
    int32_t want,
    int32_t bound,
    float most,
    Scratch& scratch,
    float* scores,
    Id* ids
) {
  int64_t num = keep_columns(factor, width, bound);
  if (num > want + kTopkListSlack) {
    keep_best(factor, num, want, bound, order_key(most));
    num = want;
  }
  sort_columns(factor, num, scratch, scores, ids);
  // Dropped columns count as -inf: with anything, less than the bound that they could not reach.
  for (int64_t rank = std::min<int64_t>(num, want); rank < want + kLanes; rank += kLanes) {
    store(scores + rank, broadcast(-INFINITY));
  }
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
