// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, gram: the records by lane, and the products of the entries that share a slot.
//!
//!     A[i,j]  = sum over pairs (write of token i, write of token j, one slot), j <  i
//!     QK[i,j] = sum over pairs (read of token i, write of token j, one slot),  j <= i
//!               of value_i * value_j * exp(L_i - L_j)
//!
//! stored times beta[j]. L is double, so the difference keeps its bits; the factor is at most
//! float.
//!
//! A warp owns a token and keeps its two rows of C sums in shared memory. Its lanes take 128
//! entries of the token at a time, find them in sorted order through their places, and write what
//! later stages want by lane. The pairs of entries with few earlier writes are listed, so that all
//! lanes have one; then those with many go one by one, the whole warp over the writes. Terms that
//! meet in one column at one step are added in lane order, so the order of a sum follows from the
//! data alone. Bytes: 24 in, 12 out a lane, 32 a pair, 8 Cp^2 a chunk out.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr int kGramWarps = 8;
constexpr int kShortSpan = 8;  // most writes of an entry whose pairs are listed
constexpr int kGramItems = 32 * kShortSpan;

// Times 32 lanes whose loads are started together.
constexpr int gram_batch(int64_t lanes) {
  return lanes <= 32 ? 1 : lanes <= 64 ? 2 : 4;
}

// later * earlier * exp(x); a decay of zero erases whatever was there.
__device__ __forceinline__ float pair_term(float later, float earlier, double x) {
  if (!(fabs(x) < 80.0)) {  // NaN too
    const double decay = exp(x);
    return decay == 0.0 ? 0.0f
                        : static_cast<float>(
                              static_cast<double>(later) * static_cast<double>(earlier) * decay
                          );
  }
  const float high = static_cast<float>(x);
  const float low = static_cast<float>(x - static_cast<double>(high));
  return later * (expf(high) * (1.0f + low)) * earlier;
}

// A warp's memory.
struct alignas(16) GramWarp {
  float rows[2 * kMaxChunk];   // of A, of QK
  uint32_t items[kGramItems];  // place of the later entry | number of the write | whether it reads
};

constexpr int kItemStep = kPairsBit, kItemRead = kPairsBit + 3;
static_assert(kShortSpan <= 8);

// s_rows[column] += term for all active lanes, equal columns in lane order. All lanes call it.
__device__ __forceinline__ void add_terms(float* s_rows, bool active, int column, float term) {
  static_assert(2 * kMaxChunk == 1 << 9);
  const unsigned lane = threadIdx.x % 32;
  const unsigned peers =
      match_bits<9>(static_cast<unsigned>(column), __ballot_sync(kAllLanes, active));
  const int rank = active ? __popc(peers & ((1u << lane) - 1)) : -1;
  for (int round = 0; __any_sync(kAllLanes, rank >= round); ++round) {
    if (rank == round) {
      s_rows[column] += term;
    }
    __syncwarp();  // the next lane of the same column, or the next call, reads the sum
  }
}

__device__ __forceinline__ SdmPair load_pair(const SdmPair* at) {
  const uint4 raw = *reinterpret_cast<const uint4*>(at);
  SdmPair pair;
  *reinterpret_cast<uint4*>(&pair) = raw;
  return pair;
}

// Earlier writes of an entry, if its pairs are listed.
__device__ __forceinline__ int short_length(int32_t link) {
  const int length = link >> kPairsBit;
  return link >= 0 && length <= kShortSpan ? length : 0;
}

__device__ __forceinline__ int token_of(const SdmPair& pair) {
  return static_cast<int>(pair.info & ((1u << kPairTokenBits) - 1));
}

// The first entry of [begin, end) of a group whose row is not below `bound`; rows ascend in it.
__device__ __forceinline__ int32_t
find_row(const int4* entries, int32_t begin, int32_t end, int32_t bound) {
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if ((entries[middle].x & ~kOwnerBit) < bound) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Adds the pairs of kCount entries of every lane that have at most kShortSpan each, as their links
// say; reads: bit k is set where entry k is one. All pairs fit the list.
template <int kCount>
__device__ __forceinline__ void add_short(
    const SdmPair* pairs, const int32_t (&link)[kCount], unsigned reads, GramWarp* s
) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int count = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    count += short_length(link[k]);
  }
  int upto = count;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(kAllLanes, upto, offset);
    upto += lane >= offset ? before : 0;
  }
  const int total = __shfl_sync(kAllLanes, upto, 31);
  uint32_t* item = s->items + (upto - count);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t own = static_cast<uint32_t>(link[k] & ((1 << kPairsBit) - 1)) | (reads >> k & 1u)
                                                                                       << kItemRead;
    for (int step = 0; step < short_length(link[k]); ++step) {
      *item++ = own | static_cast<uint32_t>(step) << kItemStep;
    }
  }
  __syncwarp();  // the list is complete
  for (int first = 0; first < total; first += 32) {
    const bool active = first + lane < total;
    int column = 0;
    float term = 0.0f;
    if (active) {
      const uint32_t own_item = s->items[first + lane];
      const int32_t position = static_cast<int32_t>(own_item & ((1u << kPairsBit) - 1));
      const SdmPair own = load_pair(pairs + position);
      const int32_t begin = position - static_cast<int32_t>(own.info >> kPairTokenBits);
      const SdmPair earlier =
          load_pair(pairs + begin + static_cast<int32_t>(own_item >> kItemStep & 7u));
      column = token_of(earlier) + static_cast<int>(own_item >> kItemRead) * kMaxChunk;
      term = pair_term(own.value, earlier.value, own.log_decay - earlier.log_decay);
    }
    add_terms(s->rows, active, column, term);
  }
  __syncwarp();  // the list has been read
}

// Adds the pairs of one entry by all lanes.
__device__ __forceinline__ void add_long(
    const SdmPair* pairs, const int4* entries, int32_t link, bool read, GramWarp* s
) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int32_t position = link & ((1 << kPairsBit) - 1);
  const SdmPair own = load_pair(pairs + position);
  const int32_t begin = position - static_cast<int32_t>(own.info >> kPairTokenBits);
  int32_t length = link >> kPairsBit;
  if (length == kManyPairs) {
    length = find_row(entries, begin, position, token_of(own) + (read ? 1 : 0)) - begin;
  }
  for (int32_t step = 0; step < length; step += 32) {
    const bool active = step + lane < length;
    float term = 0.0f;
    int column = 0;
    if (active) {
      const SdmPair earlier = load_pair(pairs + begin + step + lane);
      column = token_of(earlier) + (read ? kMaxChunk : 0);
      term = pair_term(own.value, earlier.value, own.log_decay - earlier.log_decay);
    }
    add_terms(s->rows, active, column, term);
  }
}

// The records by lane of a token, and the pairs of its entries.
template <bool kGram, int kGramBatch>
__device__ __forceinline__ void token_records(
    const SdmPhase1Params& p, int64_t q, int32_t token, GramWarp* s
) {
  const SdmDims& dims = p.in.dims;
  const int32_t C = static_cast<int32_t>(dims.C), W = static_cast<int32_t>(dims.W),
                R = static_cast<int32_t>(dims.R);
  const int64_t chunk_at = q * p.records.n;
  const int32_t* slots = p.slots + chunk_at;
  const int4* entries = p.records.entry + chunk_at;
  int2* lanes = p.records.lane + chunk_at;
  int2* posts = p.records.write_post + q * C * W;
  const int32_t* positions = p.records.position + chunk_at;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t base = 0; base < W + R; base += 32 * kGramBatch) {
    int32_t slot[kGramBatch], link[kGramBatch];
    unsigned reads = 0;
#pragma unroll
    for (int k = 0; k < kGramBatch; ++k) {
      const int32_t a = base + k * 32 + lane;
      slot[k] = link[k] = -1;
      if (a < W + R) {
        const int32_t at = a < W ? token * W + a : C * W + token * R + (a - W);
        slot[k] = slots[at];
        link[k] = positions[at];
      }
    }
    int4 entry[kGramBatch];
#pragma unroll
    for (int k = 0; k < kGramBatch; ++k) {
      entry[k] = make_int4(0, 0, 0, 0);
      if (link[k] >= 0) {
        entry[k] = entries[link[k]];
      }
    }
#pragma unroll
    for (int k = 0; k < kGramBatch; ++k) {
      const int32_t a = base + k * 32 + lane;
      const int32_t at = a < W ? token * W + a : C * W + token * R + (a - W);
      reads |= a < W ? 0u : 1u << k;
      if (a < W + R) {
        lanes[at] = make_int2(slot[k], entry[k].y);
        if (a < W) {
          posts[at] = make_int2(slot[k], entry[k].z);
        }
      }
      link[k] |= link[k] < 0 ? 0 : entry[k].w & ~kLaneMask;
    }
    if constexpr (kGram) {
      const SdmPair* pairs = p.records.pair + chunk_at;
      int count = 0;
      unsigned longer = 0;
#pragma unroll
      for (int k = 0; k < kGramBatch; ++k) {
        count += short_length(link[k]);
        longer |= link[k] >> kPairsBit > kShortSpan ? 1u << k : 0u;
      }
      int total = count;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(kAllLanes, total, offset);
      }
      if (total <= kGramItems) {
        add_short(pairs, link, reads, s);
      } else {
#pragma unroll
        for (int k = 0; k < kGramBatch; ++k) {
          const int32_t own[1] = {link[k]};
          add_short(pairs, own, reads >> k, s);
        }
      }
      if (__any_sync(kAllLanes, longer != 0)) {
#pragma unroll
        for (int k = 0; k < kGramBatch; ++k) {
          unsigned rest = __ballot_sync(kAllLanes, (longer >> k & 1u) != 0);
          while (rest != 0) {
            const int owner = __ffs(static_cast<int>(rest)) - 1;
            rest &= rest - 1;
            add_long(
                pairs,
                entries,
                __shfl_sync(kAllLanes, link[k], owner),
                __shfl_sync(kAllLanes, reads, owner) >> k & 1u,
                s
            );
          }
        }
      }
    }
  }
}

// out[j] = s_row[j] * beta[j] for j < num_columns and 0 up to `end`.
__device__ __forceinline__ void store_gram_row(
    const float* s_beta, int32_t num_columns, int32_t end, const float* s_row, float* out
) {
  for (int32_t j = static_cast<int32_t>(threadIdx.x % 32) * 4; j < end; j += 128) {
    const float4 sum = *reinterpret_cast<const float4*>(s_row + j);
    const float4 beta = *reinterpret_cast<const float4*>(s_beta + j);
    // no common slot: zero, even where beta is not finite
    *reinterpret_cast<float4*>(out + j) = make_float4(
        j < num_columns && sum.x != 0.0f ? sum.x * beta.x : 0.0f,
        j + 1 < num_columns && sum.y != 0.0f ? sum.y * beta.y : 0.0f,
        j + 2 < num_columns && sum.z != 0.0f ? sum.z * beta.z : 0.0f,
        j + 3 < num_columns && sum.w != 0.0f ? sum.w * beta.w : 0.0f
    );
  }
}

struct GramBlock {
  GramWarp warps[kGramWarps];
  alignas(16) float beta[kMaxChunk];
  int64_t q;
  int32_t first, num_tokens;
  bool found;
};

// Grid: num_q * Cp / kGramWarps blocks.
template <bool kGram, int kGramBatch>
__global__ void __launch_bounds__(kGramWarps * 32) sdm_gram_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ GramBlock s;
  const SdmDims& dims = p.in.dims;
  const int32_t Cp = p.records.Cp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  GramWarp* own = s.warps + warp;
  wait_for_previous();
  if (threadIdx.x == 0) {  // for all: the divisions are long
    const uint32_t blocks = static_cast<uint32_t>(Cp / kGramWarps);
    const uint32_t q = blockIdx.x / blocks;
    ChunkPlace place{0, 0, 0, 0};
    s.q = q;
    s.first = static_cast<int32_t>(blockIdx.x - q * blocks) * kGramWarps;
    s.found = find_chunk(dims, p.in.sequences, p.window, q, &place);
    s.num_tokens = static_cast<int32_t>(place.num_tokens);
  }
  if constexpr (kGram) {
    for (int32_t j = lane * 4; j < 2 * kMaxChunk; j += 128) {
      *reinterpret_cast<float4*>(own->rows + j) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __syncthreads();  // the chunk is known; the rows are clear before other lanes add to them
  if (!s.found) {
    return;
  }
  const int64_t q = s.q;
  const int32_t i = s.first + warp;
  if constexpr (kGram) {
    const int32_t j = static_cast<int32_t>(threadIdx.x);
    static_assert(kMaxChunk == kGramWarps * 32);
    s.beta[j] = j < dims.C ? p.records.beta[q * dims.C + j] : 0.0f;
  }
  if (i < dims.C) {
    token_records<kGram, kGramBatch>(p, q, i, own);
  }
  if constexpr (kGram) {
    __syncthreads();  // beta is there
    const int64_t row_at = (q * Cp + i) * Cp;
    const bool live = i < s.num_tokens;
    const int32_t end = i / 16 * 16 + 16;
    store_gram_row(s.beta, live ? i : 0, end, own->rows, p.scaled_a + row_at);
    store_gram_row(s.beta, live ? i + 1 : 0, end, own->rows + kMaxChunk, p.records.qk + row_at);
  }
}

}  // namespace sdm::cuda
