// SPDX-License-Identifier: Apache-2.0
//! @file Top-k of any number of factors of any width, k <= 1024: one block per row.
//!
//! The rule of docs/topk.md step by step. Everything that is ranked becomes a 64-bit word, all
//! different: key and column, key and payload, or id. The `want` largest words are found digit by
//! digit (8 bits a pass, ending at the digit that fits) without being stored, then gathered in
//! shared memory and sorted there. Scores are read once per pass; nothing is written but the
//! result.
#pragma once

#include <cmath>
#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_device.cuh"
#include "sdm_kernels/topk/cuda/topk_warp.cuh"

namespace sdm::topk {

constexpr int kBlockThreads = 256;
constexpr int kBlockPicks = static_cast<int>(kMaxTopk) / kBlockThreads;  // per thread

struct BlockShared {
  uint64_t words[kMaxTopk];
  int64_t ids[kMaxTopk];          // running list
  float list_scores[kMaxTopk];    // running list
  float factor_scores[kMaxTopk];  // list of the factor
  int32_t factor_cols[kMaxTopk];  // list of the factor
  uint32_t buckets[kNumBuckets];
  uint32_t num_gathered;
  int32_t digit;      // of the pass: the bucket that holds the want-th largest word
  int32_t num_above;  // words in the buckets above it
  int32_t num_here;   // words in it
};

__device__ __forceinline__ uint64_t column_word(int32_t key, int32_t column) {
  return static_cast<uint64_t>(static_cast<uint32_t>(key) ^ 0x80000000u) << 32 |
         static_cast<uint32_t>(column);
}

__device__ __forceinline__ int32_t word_key(uint64_t word) {
  return static_cast<int32_t>(static_cast<uint32_t>(word >> 32) ^ 0x80000000u);
}

// Finds the bucket, from the last one down, where the count reaches `want`. One warp.
__device__ __forceinline__ void find_digit(BlockShared& shared, int want, int lane) {
  constexpr int kPerLane = kNumBuckets / kWarp;
  const int last = kNumBuckets - 1 - lane * kPerLane;  // this lane: last, last - 1, ..
  int total = 0;
  for (int b = 0; b < kPerLane; ++b) {
    total += static_cast<int>(shared.buckets[last - b]);
  }
  const int upto = scan_lanes<kWarp>(total);
  int above = upto - total;
  if (above < want && upto >= want) {
    int bucket = last;
    int here = static_cast<int>(shared.buckets[bucket]);
    while (above + here < want) {
      above += here;
      --bucket;
      here = static_cast<int>(shared.buckets[bucket]);
    }
    shared.digit = bucket;
    shared.num_above = above;
    shared.num_here = here;
  }
}

// A word that exactly `want` of the words are not below. for_each(f) calls f on the words of this
// thread.
template <typename ForEach>
__device__ uint64_t select_word(const ForEach& for_each, int want, BlockShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t prefix = 0;
  uint64_t mask = 0;
  for (int shift = 56;; shift -= 8) {
    shared.buckets[thread] = 0;
    __syncthreads();  // the buckets are empty
    for_each([&](uint64_t word) {
      if ((word & mask) == prefix) {
        atomicAdd(shared.buckets + ((word >> shift) & 0xffu), 1u);
      }
    });
    __syncthreads();  // the counts are complete
    if (thread < kWarp) {
      find_digit(shared, want, thread);
    }
    __syncthreads();  // the digit is known
    prefix |= static_cast<uint64_t>(static_cast<uint32_t>(shared.digit)) << shift;
    mask |= uint64_t{0xff} << shift;
    want -= shared.num_above;
    if (shared.num_here == want || shift == 0) {
      return prefix;
    }
  }
}

// Sorts the first `count` of shared.words, descending; `payload` (may be null) moves along.
__device__ __forceinline__ void sort_block(BlockShared& shared, int count, float* payload) {
  int padded = 2;
  while (padded < count) {
    padded *= 2;
  }
  for (int at = count + static_cast<int>(threadIdx.x); at < padded; at += kBlockThreads) {
    shared.words[at] = 0;
  }
  for (int size = 2; size <= padded; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();  // the step before is complete
      for (int pair = static_cast<int>(threadIdx.x); pair < padded / 2; pair += kBlockThreads) {
        const int a = 2 * pair - (pair & (stride - 1));
        const int b = a + stride;
        const uint64_t word_a = shared.words[a];
        const uint64_t word_b = shared.words[b];
        if ((word_a < word_b) == ((a & size) == 0) && word_a != word_b) {
          shared.words[a] = word_b;
          shared.words[b] = word_a;
          if (payload != nullptr) {
            const float kept = payload[a];
            payload[a] = payload[b];
            payload[b] = kept;
          }
        }
      }
    }
  }
  __syncthreads();  // sorted
}

// Leaves the `want` largest of `total` words sorted in shared.words.
template <typename ForEach>
__device__ void rank_words(const ForEach& for_each, int64_t total, int want, BlockShared& shared) {
  const uint64_t cut = total <= want ? 0 : select_word(for_each, want, shared);
  if (threadIdx.x == 0) {
    shared.num_gathered = 0;
  }
  __syncthreads();  // nobody needs the old words any more; the count is zero
  for_each([&](uint64_t word) {
    if (word >= cut) {
      shared.words[atomicAdd(&shared.num_gathered, 1u)] = word;
    }
  });
  __syncthreads();  // all words are there; their order does not matter
  sort_block(shared, want, nullptr);
}

template <typename T>
__device__ void rank_columns(const T* scores, int32_t width, int want, BlockShared& shared) {
  rank_words(
      [&](auto f) {
        for (int64_t column = threadIdx.x; column < width; column += kBlockThreads) {
          f(column_word(order_key(to_f32(scores[column])), static_cast<int32_t>(column)));
        }
      },
      width,
      want,
      shared
  );
}

// The best num_sums sums of the running list (length n) and the list of a factor (length m). The
// pairs of ranks are walked in runs: rows i < root, and for i >= root columns j < root, one warp
// each (root = floor of the square root of num_sums).
__device__ __forceinline__ void rank_sums(int n, int m, int num_sums, BlockShared& shared) {
  int root = 1;
  while ((root + 1) * (root + 1) <= num_sums) {
    ++root;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  rank_words(
      [&](auto f) {
        for (int run = warp; run < 2 * root; run += kBlockThreads / kWarp) {
          const bool by_row = run < root;
          const int fixed = by_row ? run : run - root;
          if (fixed >= (by_row ? n : m)) {
            continue;
          }
          const int end = min(num_sums / (fixed + 1), by_row ? m : n);
          for (int other = (by_row ? 0 : root) + lane; other < end; other += kWarp) {
            const int i = by_row ? fixed : other;
            const int j = by_row ? other : fixed;
            const float sum = __fadd_rn(shared.list_scores[i], shared.factor_scores[j]);
            f(column_word(order_key(sum), tie_payload(i, j)));
          }
        }
      },
      INT64_MAX,  // there may be more pairs than num_sums
      num_sums,
      shared
  );
}

// The score of a slot by its definition, from the raw scores; one NaN for all NaNs.
template <typename T>
__device__ float slot_score(const DeviceFwdParams& params, const T* scores, int64_t id) {
  int64_t divisor = 1;
  for (int f = 1; f < params.num_factors; ++f) {
    divisor *= params.widths[f];
  }
  int64_t offset = params.widths[0];
  float sum = to_f32(scores[id / divisor]);
  for (int f = 1; f < params.num_factors; ++f) {
    id %= divisor;
    divisor /= params.widths[f];
    sum = f == 1 ? sum : to_f32(from_f32<T>(sum));
    sum = __fadd_rn(sum, to_f32(scores[offset + id / divisor]));
    offset += params.widths[f];
  }
  return isnan(sum) ? bits_float(0x7fc00000u) : sum;
}

template <typename T>
__device__ void select_row_block(const DeviceFwdParams& params, int64_t row, BlockShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int k = params.num_selected;
  const T* scores = static_cast<const T*>(params.scores) + params.rows.offset(row);

  int n = min(k, params.widths[0]);
  rank_columns(scores, params.widths[0], n, shared);
  for (int rank = thread; rank < n; rank += kBlockThreads) {
    const uint64_t word = shared.words[rank];
    shared.list_scores[rank] = key_score(word_key(word));
    shared.ids[rank] = static_cast<int64_t>(word & 0xffffffffu);
  }
  int64_t offset = params.widths[0];
  for (int f = 1; f < params.num_factors; ++f) {
    const int32_t width = params.widths[f];
    const bool last = f + 1 == params.num_factors;
    const int m = min(k, width);
    __syncthreads();  // the words are free
    rank_columns(scores + offset, width, m, shared);
    for (int rank = thread; rank < m; rank += kBlockThreads) {
      const uint64_t word = shared.words[rank];
      shared.factor_scores[rank] = key_score(word_key(word));
      shared.factor_cols[rank] = static_cast<int32_t>(word & 0xffffffffu);
    }
    __syncthreads();  // both lists are complete, the words are free
    const int num_sums = min(k, n * m);
    rank_sums(n, m, num_sums, shared);
    int64_t ids[kBlockPicks];
#pragma unroll
    for (int p = 0; p < kBlockPicks; ++p) {
      const int rank = thread + p * kBlockThreads;
      if (rank < num_sums) {
        const int32_t payload = static_cast<int32_t>(shared.words[rank] & 0xffffffffu);
        ids[p] = shared.ids[payload_first(payload)] * width +
                 shared.factor_cols[payload_second(payload)];
      }
    }
    __syncthreads();  // everybody has read the old list
#pragma unroll
    for (int p = 0; p < kBlockPicks; ++p) {
      const int rank = thread + p * kBlockThreads;
      if (rank < num_sums) {
        const float score = key_score(word_key(shared.words[rank]));
        shared.ids[rank] = ids[p];
        shared.list_scores[rank] = last ? score : to_f32(from_f32<T>(score));
      }
    }
    n = num_sums;
    offset += width;
  }
  __syncthreads();  // the list is complete, the words are free
  for (int rank = thread; rank < n; rank += kBlockThreads) {
    shared.words[rank] = ~static_cast<uint64_t>(shared.ids[rank]);
  }
  sort_block(shared, n, shared.list_scores);
  T* values = static_cast<T*>(params.values) + row * k;
  for (int place = thread; place < n; place += kBlockThreads) {
    const int64_t id = static_cast<int64_t>(~shared.words[place]);
    if (params.num_factors == 1) {
      values[place] = scores[id];
    } else {
      const float score = shared.list_scores[place];
      // NaN travelled as -inf.
      values[place] = from_f32<T>(score == -INFINITY ? slot_score(params, scores, id) : score);
    }
    if (params.wide_ids) {
      static_cast<int64_t*>(params.indices)[row * k + place] = id;
    } else {
      static_cast<int32_t*>(params.indices)[row * k + place] = static_cast<int32_t>(id);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads) topk_block_kernel(
    const __grid_constant__ DeviceFwdParams params
) {
  __shared__ BlockShared shared;
  for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    select_row_block<T>(params, row, shared);
    __syncthreads();  // the next row reuses everything
  }
}

}  // namespace sdm::topk
