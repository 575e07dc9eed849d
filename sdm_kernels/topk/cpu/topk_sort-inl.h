// SPDX-License-Identifier: Apache-2.0
//! @file Orders of short lists: by counting, for each element, those before it (quadratic, but all
//! vector compares), and above kMaxCounted elements by a stable radix sort.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

// About where the two methods take the same time.
constexpr int64_t kMaxCounted = 256;

// Adds to rank[b] the number of keys[begin .. end) that are greater than bound[b].
inline void count_greater(
    const int32_t* keys, int32_t begin, int32_t end, const VecI (&bound)[2], VecI (&rank)[2]
) {
  for (int32_t block = begin; block < end; block += 2 * kLanes) {
    for (int32_t other = block; other < block + 2 * kLanes; ++other) {
      const VecI key = broadcast(keys[other]);
      rank[0] = count_gt(rank[0], key, bound[0]);
      rank[1] = count_gt(rank[1], key, bound[1]);
    }
  }
}

// ranks[p] = place of keys[p] in descending order, the later position first among equal keys.
// keys are padded by pad_keys; ranks of the padding, up to a multiple of 2 * kLanes, are
// meaningless. All trip counts are multiples of that, so that lists of similar length branch alike.
inline void count_ranks(const int32_t* keys, int64_t num, int32_t* ranks) {
  const int32_t padded = static_cast<int32_t>(round_up(num, 2 * kLanes));
  for (int32_t block = 0; block < padded; block += 2 * kLanes) {
    const VecI key[2] = {load(keys + block), load(keys + block + kLanes)};
    // Later positions precede at equal keys: key - 1 is what they have to exceed.
    const VecI key_less[2] = {less_one(key[0]), less_one(key[1])};
    VecI rank[2] = {};
    count_greater(keys, 0, block, key, rank);
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const VecI other = broadcast(keys[block + lane]);
      rank[0] = count_gt(rank[0], other, select(iota() < lane, key_less[0], key[0]));
      rank[1] = count_gt(rank[1], other, key[1]);
    }
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const VecI other = broadcast(keys[block + kLanes + lane]);
      rank[0] = count_gt(rank[0], other, key_less[0]);
      rank[1] = count_gt(rank[1], other, select(iota() < lane, key_less[1], key[1]));
    }
    count_greater(keys, block + 2 * kLanes, padded, key_less, rank);
    store(ranks + block, rank[0]);
    store(ranks + block + kLanes, rank[1]);
  }
}

// ranks[p] = place of ids[p] in ascending order; ids are distinct.
inline void count_id_ranks(const int32_t* ids, int64_t num, int32_t* ranks) {
  for (int64_t block = 0; block < num; block += 2 * kLanes) {
    const VecI id[2] = {load(ids + block), load(ids + block + kLanes)};
    VecI rank[2] = {};
    for (int64_t other = 0; other < num; ++other) {
      const VecI other_id = broadcast(ids[other]);
      rank[0] = count_gt(rank[0], id[0], other_id);
      rank[1] = count_gt(rank[1], id[1], other_id);
    }
    store(ranks + block, rank[0]);
    store(ranks + block + kLanes, rank[1]);
  }
}

// Sorts words by their upper 32 bits, ascending and stable; returns the buffer that holds the
// result.
inline uint64_t* radix_sort(uint64_t* words, uint64_t* spare, int64_t num) {
  constexpr int kBits = 8;
  constexpr int kDigits = 4;
  uint32_t counts[kDigits][1 << kBits] = {};
  for (int64_t i = 0; i < num; ++i) {
    for (int digit = 0; digit < kDigits; ++digit) {
      ++counts[digit][(words[i] >> (32 + digit * kBits)) & 0xff];
    }
  }
  for (int digit = 0; digit < kDigits; ++digit) {
    const int shift = 32 + digit * kBits;
    if (counts[digit][(words[0] >> shift) & 0xff] == num) {
      continue;  // one value only
    }
    uint32_t start = 0;
    for (uint32_t& count : counts[digit]) {
      const uint32_t here = count;
      count = start;
      start += here;
    }
    for (int64_t i = 0; i < num; ++i) {
      spare[counts[digit][(words[i] >> shift) & 0xff]++] = words[i];
    }
    std::swap(words, spare);
  }
  return words;
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
