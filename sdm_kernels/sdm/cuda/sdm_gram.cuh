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
//! A warp owns a token and keeps its row of C sums in shared memory. Its lanes take 32 entries of
//! the token at a time, find them in sorted order through `link`, and write what later stages want
//! by lane, so that only one word a lane is ever written out of order. Entries with few earlier
//! writes are walked side by side, one lane each; then those with many, one by one with the whole
//! warp over the writes. Terms that meet in one column at one step are added in lane order, so the
//! order of a sum follows from the data alone.
//! Bytes: 4 and the id and 16 in, 16 out a lane, 16 an entry with earlier writes, 16 a pair, 8 Cp^2
//! a chunk out.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr int kGramWarps = 8;
constexpr int kShortSpan = 8;  // writes that a lane walks alone
constexpr int kGramBatch = 4;  // times 32 lanes whose loads are started together

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

// s_row[column] += term for all active lanes, equal columns in lane order. All lanes call it.
__device__ __forceinline__ void add_terms(float* s_row, bool active, int column, float term) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned peers =
      match_bits<8>(static_cast<unsigned>(column), __ballot_sync(kAllLanes, active));
  const int rank = active ? __popc(peers & ((1u << lane) - 1)) : -1;
  for (int round = 0; __any_sync(kAllLanes, rank >= round); ++round) {
    if (rank == round) {
      s_row[column] += term;
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

__device__ __forceinline__ int token_of(const SdmPair& pair) {
  return static_cast<int>(pair.info & ((1u << kPairTokenBits) - 1));
}

// Adds the pairs of a warp's 32 entries to the row: entry `position` pairs with the `length` first
// writes of its group.
__device__ __forceinline__ void add_pairs(
    const SdmPair* pairs, int32_t position, int32_t length, float* s_row
) {
  if (!__any_sync(kAllLanes, length > 0)) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  SdmPair own{0.0f, 0, 0.0};
  if (length > 0) {
    own = load_pair(pairs + position);
  }
  const int32_t begin = position - static_cast<int32_t>(own.info >> kPairTokenBits);
  const int32_t alone = length <= kShortSpan ? length : 0;
  for (int32_t step = 0; __any_sync(kAllLanes, step < alone); ++step) {
    float term = 0.0f;
    int column = 0;
    if (step < alone) {
      const SdmPair earlier = load_pair(pairs + begin + step);
      column = token_of(earlier);
      term = pair_term(own.value, earlier.value, own.log_decay - earlier.log_decay);
    }
    add_terms(s_row, step < alone, column, term);
  }
  unsigned rest = __ballot_sync(kAllLanes, length > kShortSpan);
  while (rest != 0) {
    const int owner = __ffs(static_cast<int>(rest)) - 1;
    rest &= rest - 1;
    const int32_t first = __shfl_sync(kAllLanes, begin, owner);
    const int32_t count = __shfl_sync(kAllLanes, length, owner);
    const double later_log = __shfl_sync(kAllLanes, own.log_decay, owner);
    const float later_value = __shfl_sync(kAllLanes, own.value, owner);
    for (int32_t step = 0; step < count; step += 32) {
      const bool active = step + lane < count;
      float term = 0.0f;
      int column = 0;
      if (active) {
        const SdmPair earlier = load_pair(pairs + first + step + lane);
        column = token_of(earlier);
        term = pair_term(later_value, earlier.value, later_log - earlier.log_decay);
      }
      add_terms(s_row, active, column, term);
    }
  }
}

// The records by lane of a token's writes or reads, and their pairs.
template <typename Word, bool kGram>
__device__ __forceinline__ void lane_records(
    const SdmPhase1Params& p,
    const ChunkPlace& place,
    int64_t q,
    int32_t token,
    bool write,
    float* s_row
) {
  const SdmDims& dims = p.in.dims;
  const int32_t C = static_cast<int32_t>(dims.C), W = static_cast<int32_t>(dims.W);
  const int32_t count = write ? W : static_cast<int32_t>(dims.R);
  const int32_t first = write ? token * W : C * W + token * count;
  const int64_t chunk_at = q * p.records.n;
  const Word* link = static_cast<const Word*>(p.link) + chunk_at + first;
  const int4* entries = p.records.entry + chunk_at;
  int2* lanes = p.records.lane + chunk_at + first;
  int2* posts = p.records.write_post + q * C * W + first;
  int32_t* positions = p.records.position + chunk_at + first;
  const IndexView& ids = write ? p.in.tokens.write_idx : p.in.tokens.read_idx;
  const int high = high_half(ids);
  const bool live = token < place.num_tokens;
  const int64_t ids_at = live ? token_offset(ids, place, token) : 0;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t base = 0; base < count; base += 32 * kGramBatch) {
    int32_t position[kGramBatch], length[kGramBatch];
    RawId id[kGramBatch];
#pragma unroll
    for (int k = 0; k < kGramBatch; ++k) {
      const int32_t a = base + k * 32 + lane;
      Word found = ~Word{0};
      id[k] = {0, 0};
      if (a < count) {
        found = link[a];
        if (live) {
          id[k] = load_id(element_at(ids, ids_at + a * ids.stride[3], 4 + high), high);
        }
      }
      const bool used = found != ~Word{0};
      position[k] = used ? static_cast<int32_t>(found & ((Word{1} << kLinkBits<Word>)-1)) : -1;
      length[k] = used ? static_cast<int32_t>(found >> kLinkBits<Word>) : 0;
    }
    int4 entry[kGramBatch];
#pragma unroll
    for (int k = 0; k < kGramBatch; ++k) {
      entry[k] = make_int4(0, 0, 0, 0);
      if (position[k] >= 0) {
        entry[k] = entries[position[k]];
      }
    }
#pragma unroll
    for (int k = 0; k < kGramBatch; ++k) {
      const int32_t a = base + k * 32 + lane;
      if (a < count) {
        const int32_t slot = position[k] >= 0 ? static_cast<int32_t>(id[k].low) : -1;
        lanes[a] = make_int2(slot, entry[k].y);
        positions[a] = position[k];
        if (write) {
          posts[a] = make_int2(slot, entry[k].z);
        }
      }
    }
    if constexpr (kGram) {
#pragma unroll 1
      for (int k = 0; k < kGramBatch; ++k) {
        // by constants only, so that the arrays stay in registers
        int32_t own_position = position[0], own_length = length[0];
#pragma unroll
        for (int j = 1; j < kGramBatch; ++j) {
          own_position = j == k ? position[j] : own_position;
          own_length = j == k ? length[j] : own_length;
        }
        add_pairs(p.pair + chunk_at, own_position, own_length, s_row);
      }
    }
  }
}

// out[j] = s_row[j] * beta[j] for j < num_columns and 0 up to Cp; clears the row.
__device__ __forceinline__ void store_gram_row(
    const float* beta, int32_t num_columns, int32_t Cp, float* s_row, float* out
) {
  for (int32_t j = static_cast<int32_t>(threadIdx.x % 32); j < Cp; j += 32) {
    const float sum = s_row[j];
    // no common slot: zero, even where beta is not finite
    out[j] = j < num_columns && sum != 0.0f ? sum * beta[j] : 0.0f;
    s_row[j] = 0.0f;
  }
  __syncwarp();  // the row is clear before other lanes add to it
}

// Grid: num_q * Cp / kGramWarps blocks.
template <typename Word, bool kGram>
__global__ void __launch_bounds__(kGramWarps * 32) sdm_gram_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ float s_rows[kGramWarps][kMaxChunk];
  const SdmDims& dims = p.in.dims;
  const int32_t Cp = p.records.Cp;
  const int32_t blocks = Cp / kGramWarps;
  const int64_t q = blockIdx.x / blocks;
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t i = static_cast<int32_t>(blockIdx.x % blocks) * kGramWarps + warp;
  ChunkPlace place;
  if (!find_chunk(dims, p.in.sequences, p.window, q, &place)) {
    return;
  }
  float* s_row = s_rows[warp];
  if constexpr (kGram) {
    for (int32_t j = static_cast<int32_t>(threadIdx.x % 32); j < Cp; j += 32) {
      s_row[j] = 0.0f;
    }
    __syncwarp();  // the row is clear before other lanes add to it
  }
  const int64_t row_at = (q * Cp + i) * Cp;
  const float* beta = p.records.beta + q * dims.C;
  const bool live = i < place.num_tokens;
  if (i < dims.C) {
    lane_records<Word, kGram>(p, place, q, i, true, s_row);
  }
  if constexpr (kGram) {
    store_gram_row(beta, live ? i : 0, Cp, s_row, p.scaled_a + row_at);
  }
  if (i < dims.C) {
    lane_records<Word, kGram>(p, place, q, i, false, s_row);
  }
  if constexpr (kGram) {
    store_gram_row(beta, live ? i + 1 : 0, Cp, s_row, p.records.qk + row_at);
  }
}

}  // namespace sdm::cuda
