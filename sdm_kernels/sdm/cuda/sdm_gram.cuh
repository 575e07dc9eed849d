// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, gram: products of the entries that share a slot.
//!
//!     A[i,j]  = sum over pairs (write of token i, write of token j, one slot), j <  i
//!     QK[i,j] = sum over pairs (read of token i, write of token j, one slot),  j <= i
//!               of value_i * value_j * exp(L_i - L_j)
//!
//! stored times beta[j]. L is double, so the difference keeps its bits; the factor is at most
//! float.
//!
//! A warp owns a token and keeps its row of C sums in shared memory. Its lanes take 32 entries of
//! the token at a time. Entries with few earlier writes are walked side by side, one lane each;
//! then those with many, one by one with the whole warp over the writes. Terms that meet in one
//! column at one step are added in lane order, so the order of a sum follows from the data alone.
//! Bytes: 12 an entry, 16 a pair, 8 Cp^2 a chunk out.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr int kGramWarps = 8;
constexpr int kShortSpan = 8;  // writes that a lane walks alone
constexpr unsigned kAllLanes = 0xffffffffu;

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
  // idle lanes get columns of their own, which no active lane has
  const unsigned peers = __match_any_sync(kAllLanes, active ? column : -1 - static_cast<int>(lane));
  const int rank = active ? __popc(peers & ((1u << lane) - 1)) : -1;
  for (int round = 0; __any_sync(kAllLanes, rank >= round); ++round) {
    if (rank == round) {
      s_row[column] += term;
    }
    __syncwarp();  // the next lane of the same column, or the next call, reads the sum
  }
}

// Adds the pairs of `count` lanes of a chunk, from lane number `first` on, to the row.
__device__ __forceinline__ void gram_row(
    const SdmPhase1Params& p, int64_t chunk_at, int32_t first, int32_t count, float* s_row
) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const double* log_decay = p.records.log_decay + chunk_at;
  const float2* pair = p.pair + chunk_at;
  for (int32_t base = 0; base < count; base += 32) {
    int2 span = make_int2(0, 0);
    if (base + lane < count) {
      span = p.span[chunk_at + first + base + lane];
    }
    const int32_t length = span.y - span.x;
    if (!__any_sync(kAllLanes, length > 0)) {
      continue;
    }
    double own_log = 0.0;
    float own_value = 0.0f;
    if (length > 0) {
      const int32_t position = p.records.position[chunk_at + first + base + lane];
      own_log = log_decay[position];
      own_value = pair[position].x;
    }
    const int32_t alone = length <= kShortSpan ? length : 0;
    for (int32_t step = 0; __any_sync(kAllLanes, step < alone); ++step) {
      float term = 0.0f;
      int column = 0;
      if (step < alone) {
        const float2 earlier = pair[span.x + step];
        column = __float_as_int(earlier.y);
        term = pair_term(own_value, earlier.x, own_log - log_decay[span.x + step]);
      }
      add_terms(s_row, step < alone, column, term);
    }
    unsigned rest = __ballot_sync(kAllLanes, length > kShortSpan);
    while (rest != 0) {
      const int owner = __ffs(static_cast<int>(rest)) - 1;
      rest &= rest - 1;
      const int32_t begin = __shfl_sync(kAllLanes, span.x, owner);
      const int32_t end = __shfl_sync(kAllLanes, span.y, owner);
      const double later_log = __shfl_sync(kAllLanes, own_log, owner);
      const float later_value = __shfl_sync(kAllLanes, own_value, owner);
      for (int32_t e = begin; e < end; e += 32) {
        const bool active = e + lane < end;
        float term = 0.0f;
        int column = 0;
        if (active) {
          const float2 earlier = pair[e + lane];
          column = __float_as_int(earlier.y);
          term = pair_term(later_value, earlier.x, later_log - log_decay[e + lane]);
        }
        add_terms(s_row, active, column, term);
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
  for (int32_t j = static_cast<int32_t>(threadIdx.x % 32); j < Cp; j += 32) {
    s_row[j] = 0.0f;
  }
  __syncwarp();  // the row is clear before other lanes add to it

  const int32_t C = static_cast<int32_t>(dims.C);
  const int32_t W = static_cast<int32_t>(dims.W);
  const int32_t R = static_cast<int32_t>(dims.R);
  const int64_t chunk_at = q * p.records.n;
  const int64_t row_at = (q * Cp + i) * Cp;
  const float* beta = p.records.beta + q * C;
  const bool live = i < place.num_tokens;
  if (live) {
    gram_row(p, chunk_at, i * W, W, s_row);
  }
  store_gram_row(beta, live ? i : 0, Cp, s_row, p.scaled_a + row_at);
  if (live) {
    gram_row(p, chunk_at, C * W + i * R, R, s_row);
  }
  store_gram_row(beta, live ? i + 1 : 0, Cp, s_row, p.records.qk + row_at);
}

}  // namespace sdm::cuda
