// SPDX-License-Identifier: Apache-2.0
//! @file Orders of short lists: by counting, for each element, those before it (quadratic, but all
//! vector compares), and above kMaxCounted elements by a stable radix sort.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

// About where the two methods take the same time.
constexpr int64_t kMaxCounted = 256;

// ranks[p] = place of keys[p] in descending order, the later position first among equal keys.
// keys are padded to a multiple of kLanes with kLowestKey; ranks of the padding are meaningless.
inline void count_ranks(const int32_t* keys, int64_t num, int32_t* ranks) {
  const int32_t size = static_cast<int32_t>(num);
  for (int32_t block = 0; block < size; block += kLanes) {
    const VecI key = load(keys + block);
    const VecI position = iota() + block;
    VecI rank = {};
    for (int32_t other = 0; other < block; ++other) {
      rank -= broadcast(keys[other]) > key;
    }
    const int32_t block_end = std::min(block + kLanes, size);
    for (int32_t other = block; other < block_end; ++other) {
      const VecI other_key = broadcast(keys[other]);
      rank -= (other_key > key) | ((other_key == key) & (broadcast(other) > position));
    }
    for (int32_t other = block_end; other < size; ++other) {
      rank -= broadcast(keys[other]) >= key;
    }
    store(ranks + block, rank);
  }
}

// ranks[p] = place of ids[p] in ascending order; ids are distinct.
inline void count_id_ranks(const int32_t* ids, int64_t num, int32_t* ranks) {
  for (int64_t block = 0; block < num; block += 2 * kLanes) {
    const VecI id[2] = {load(ids + block), load(ids + block + kLanes)};
    VecI rank[2] = {};
    for (int64_t other = 0; other < num; ++other) {
      const VecI other_id = broadcast(ids[other]);
      rank[0] -= other_id < id[0];
      rank[1] -= other_id < id[1];
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
