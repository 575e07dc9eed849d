// SPDX-License-Identifier: Apache-2.0
//! @file The want-th largest of many keys, by counting passes.
//!
//! Regula falsi on the key range with a bisection now and then; as soon as the window holds few
//! keys they are fetched and ranked. The work is a handful of vector compares per key, without a
//! branch that depends on a single key.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

// Keys that may be left in the window when it is ranked directly.
constexpr int64_t kMaxWindow = 32;

struct Threshold {
  int32_t key;     // the want-th largest
  int64_t num_ge;  // keys >= key, at least `want`
};

// The smallest and the largest of the keys in [low, high).
inline std::pair<int32_t, int32_t> window_range(
    const int32_t* keys, int64_t padded, int32_t low, int32_t high
) {
  int32_t least = high;
  int32_t most = low;
  for (int64_t pos = 0; pos < padded; ++pos) {
    const bool inside = keys[pos] >= low && keys[pos] < high;
    least = inside && keys[pos] < least ? keys[pos] : least;
    most = inside && keys[pos] > most ? keys[pos] : most;
  }
  return {least, most};
}

// The threshold for `want` given that num_hi < want keys are >= high, and that at most kMaxWindow
// keys, enough to reach `want`, lie in [low, high).
inline Threshold rank_window(
    const int32_t* keys, int64_t padded, int32_t low, int32_t high, int64_t num_hi, int64_t want
) {
  int32_t window[kMaxWindow + 2 * kTopkMaxLanes];
  int32_t ranks[kMaxWindow + 2 * kTopkMaxLanes];
  const VecI below = broadcast(low - 1);
  const VecI above = broadcast(high);
  int64_t size = 0;
  for (int64_t pos = 0; pos < padded; pos += kLanes) {
    const VecI key = load(keys + pos);
    const uint32_t mask = mask_bits((key > below) & (above > key));
    compress_store(window + size, key, mask);
    size += popcount(mask);
  }
  pad_keys(window + size);
  count_ranks(window, size, ranks);
  int64_t pos = 0;
  while (pos + 1 < size && ranks[pos] != want - num_hi - 1) {
    ++pos;
  }
  return {window[pos], num_hi + count_ge(window, round_up(size, kLanes), window[pos])};
}

// keys: padded to a multiple of kLanes with kLowestKey. low: a key > kLowestKey with
// num_low >= want keys not below it. most: no key is above it.
inline Threshold find_threshold(
    const int32_t* keys, int64_t padded, int64_t want, int32_t low, int64_t num_low, int32_t most
) {
  int64_t lo = low;
  int64_t hi = int64_t{most} + 1;  // fewer than `want` keys are >= hi
  int64_t num_hi = 0;
  for (int step = 0; num_low != want && hi - lo > 1; ++step) {
    if (num_low - num_hi <= kMaxWindow) {
      return rank_window(
          keys, padded, static_cast<int32_t>(lo), static_cast<int32_t>(hi), num_hi, want
      );
    }
    if (step >= 8) {  // few distinct keys far apart: step on keys that exist
      const auto range =
          window_range(keys, padded, static_cast<int32_t>(lo), static_cast<int32_t>(hi));
      lo = range.first;
      hi = int64_t{range.second} + 1;
      if (hi - lo <= 1) {
        break;
      }
    }
    const int64_t gap = hi - lo;
    const double share =
        static_cast<double>(num_low - want) / static_cast<double>(num_low - num_hi);
    int64_t advance =
        step % 3 == 2 ? gap / 2 : static_cast<int64_t>(static_cast<double>(gap) * share);
    advance = std::min(std::max<int64_t>(advance, 1), gap - 1);
    const int64_t middle = lo + advance;
    const int64_t num_ge = count_ge(keys, padded, static_cast<int32_t>(middle));
    if (num_ge >= want) {
      lo = middle;
      num_low = num_ge;
    } else {
      hi = middle;
      num_hi = num_ge;
    }
  }
  return {static_cast<int32_t>(lo), num_low};
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
