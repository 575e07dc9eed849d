// SPDX-License-Identifier: Apache-2.0
//! @file Top-k of two factors with at most 1024 columns each, k <= 256: one warp per row.
//!
//! Per row: read n_0 + n_1 scores, write kk values and kk ids, all coalesced. For 256 + 256 columns
//! and k = 64 in float32:
//!   load     16 keys per lane, their maxima sorted: a sum that k pairs reach
//!   lists    the columns that can reach it (about 45 of 256), sorted
//!   sums     along the hyperbola of ranks (280), in registers
//!   cut      the k-th largest by counting in buckets; ties by rank
//!   order    ids with the places of their scores, sorted; values rounded once
//! Integer compares in fixed order throughout: the result depends on nothing but the row. bfloat16
//! keys are 16 bits: two a register, and exact words to sort together with their columns.
//!
//! A row is 1,700 instructions without a loop. The warps of a block go through them together.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_hyperbola.cuh"
#include "sdm_kernels/topk/cuda/topk_pair_list.cuh"
#include "sdm_kernels/topk/cuda/topk_warp.cuh"

namespace sdm::topk {

// The sums of this lane as keys, kLowestKey where the hyperbola of num_sums has no pair.
template <typename Traits, int kSums>
__device__ __forceinline__ void make_sums(
    const PairWarp<Traits>& shared,
    int num_sums,
    int32_t bound,
    const int (&counts)[2],
    int lane,
    int32_t (&keys)[kSums]
) {
  const uint32_t* table = hyperbola<Traits::kMaxSelected>();
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const uint32_t entry = __ldg(table + s * kWarp + lane);
    keys[s] =
        fast_key(__fadd_rn(at_first(shared.scores[0], entry), at_second(shared.scores[1], entry)));
  }
  constexpr int kLastLanes = Hyperbola<Traits::kMaxSelected>::kCount % kWarp;
  if (kLastLanes != 0 && lane >= kLastLanes) {
    keys[kSums - 1] = kLowestKey;  // behind the end of the table
  }
  // Fewer sums than the table is for; or ranks behind the lists would count as -inf.
  if (num_sums != Traits::kMaxSelected || bound == kNegInfKey) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const uint32_t entry = __ldg(table + s * kWarp + lane);
      if (entry >= pairs_end(num_sums) || pair_first(entry) >= counts[0] ||
          pair_second(entry) >= counts[1]) {
        keys[s] = kLowestKey;
      }
    }
  }
}

// The smallest payload of the `want` largest of `count` different ones; the others are kLowestKey.
template <int kSums, typename Payload>
__device__ __forceinline__ int32_t
least_tied(Payload payload, int count, int want, CutShared& search, int lane) {
  if (count > kWarp) {
    return warp_cut<kSums>(payload, want, 0, tie_payload(kMaxTopk - 1, 0), search, lane).value;
  }
  __syncwarp();  // the last readers of the memory are done
  if (lane == 0) {
    search.num_values = 0;
  }
  __syncwarp();  // nothing is in it
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const int32_t own = payload(s);
    if (own != kLowestKey) {
      search.values[atomicAdd(&search.num_values, 1u)] = own;
    }
  }
  __syncwarp();  // the payloads are there; their order does not matter
  return cut_few(search, count, want, lane).value;
}

// Leaves exactly num_sums keys that are not below the result.
template <typename Traits, int kSums>
__device__ __forceinline__ int32_t
cut_sums(PairWarp<Traits>& shared, int num_sums, int32_t bound, int lane, int32_t (&keys)[kSums]) {
  const int32_t most = fast_key(__fadd_rn(shared.scores[0][0], shared.scores[1][0]));
  const Cut cut =
      warp_cut<kSums>([&](int s) { return keys[s]; }, num_sums, bound, most, shared.search, lane);
  if (cut.num_ge == num_sums) {
    return cut.value;
  }
  // Among the sums equal to the cut the largest payloads win; they are all different.
  const uint32_t* table = hyperbola<Traits::kMaxSelected>();
  const auto payload = [&](int s) {
    const uint32_t entry = __ldg(table + s * kWarp + lane);
    return keys[s] == cut.value ? tie_payload(pair_first(entry), pair_second(entry)) : kLowestKey;
  };
  int above = 0;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    above += keys[s] > cut.value ? 1 : 0;
  }
  above = __reduce_add_sync(kFullMask, above);
  const int32_t least =
      least_tied<kSums>(payload, cut.num_ge - above, num_sums - above, shared.search, lane);
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const int32_t own = payload(s);
    keys[s] = own >= 0 && own < least ? kLowestKey : keys[s];
  }
  return cut.value;
}

// Writes the pairs of the sums >= cut to shared.picks.
template <typename Traits, int kSums>
__device__ __forceinline__ void pick_pairs(
    PairWarp<Traits>& shared, int32_t cut, int lane, const int32_t (&keys)[kSums]
) {
  const uint32_t* table = hyperbola<Traits::kMaxSelected>();
  int count = 0;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    add_if_ge(count, keys[s], cut, 1);
  }
  SharedWriter writer(shared.picks + (scan_lanes<kWarp>(count) - count));
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    writer.push_if_ge(__ldg(table + s * kWarp + lane), keys[s], cut);
  }
  __syncwarp();  // the picks are complete
}

// Stores the first `count` of kRun elements at `out`, as one vector where possible.
template <int kRun, typename Element>
__device__ __forceinline__ void store_run(
    Element* out, const Element (&elements)[kRun], int count, bool aligned
) {
  constexpr int kBytes = kRun * static_cast<int>(sizeof(Element));
  constexpr int kStep = kBytes < 16 ? kBytes : 16;
  if (aligned && count >= kRun) {
    constexpr int kPerStep = kStep / static_cast<int>(sizeof(Element));
#pragma unroll
    for (int at = 0; at < kRun; at += kPerStep) {
      struct alignas(kStep) Vector {
        Element elements[kPerStep];
      } vector;

#pragma unroll
      for (int e = 0; e < kPerStep; ++e) {
        vector.elements[e] = elements[at + e];
      }
      *reinterpret_cast<Vector*>(out + at) = vector;
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    if (r < count) {
      out[r] = elements[r];
    }
  }
}

// Sorts the picked slots by id and writes them.
template <typename Traits>
__device__ __forceinline__ void write_slots(
    PairWarp<Traits>& shared,
    const typename Traits::scalar_t* scores,
    const int (&widths)[2],
    int num_selected,
    bool has_neg_inf,
    bool aligned,
    int lane,
    typename Traits::scalar_t* values,
    int32_t* ids
) {
  using T = typename Traits::scalar_t;
  constexpr int kRun = Traits::kMaxSelected / kWarp;
  constexpr uint32_t kPlaceMask = 0xffu;  // kMaxSelected <= 256
  const int first = lane * kRun;
  uint32_t words[kRun];  // ~(id, place): descending words are ascending ids
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    const int place = first + r;
    words[r] = 0;
    if (place < num_selected) {
      const uint32_t entry = shared.picks[place];
      const int id =
          at_first(shared.columns[0], entry) * widths[1] + at_second(shared.columns[1], entry);
      words[r] = ~(static_cast<uint32_t>(id) << 8 | static_cast<uint32_t>(place));
      shared.picks[place] = float_bits(
          __fadd_rn(at_first(shared.scores[0], entry), at_second(shared.scores[1], entry))
      );
    }
  }
  sort_descending<kWarp>(words, lane);
  __syncwarp();  // the scores stand in shared.picks
  T run_values[kRun];
  int32_t run_ids[kRun];
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    const uint32_t word = ~words[r];
    const int id = static_cast<int>(word >> 8);
    float score = bits_float(shared.picks[word & kPlaceMask & (Traits::kMaxSelected - 1)]);
    if (has_neg_inf && first + r < num_selected) {  // NaN travelled as -inf
      const int row = id / widths[1];
      score = __fadd_rn(to_f32(scores[row]), to_f32(scores[widths[0] + (id - row * widths[1])]));
      score = isnan(score) ? bits_float(0x7fc00000u) : score;
    }
    run_ids[r] = id;
    run_values[r] = from_f32<T>(score);
  }
  const bool whole = aligned && num_selected % kRun == 0;
  store_run(values + first, run_values, num_selected - first, whole);
  store_run(ids + first, run_ids, num_selected - first, whole);
}

// The warps of a block go through a row's code together. Each has little use for an instruction,
// and all by themselves they spend half of their time waiting for instructions.
__device__ __forceinline__ void keep_pace() {
  __syncthreads();
}

template <typename Traits>
__device__ __forceinline__ void select_row(
    const DeviceFwdParams& params, int64_t row, PairWarp<Traits>& shared, int lane
) {
  using T = typename Traits::scalar_t;
  constexpr int kSums = Hyperbola<Traits::kMaxSelected>::kPerLane;
  const int widths[2] = {params.widths[0], params.widths[1]};
  const int num_selected = params.num_selected;
  const T* scores = static_cast<const T*>(params.scores) + params.rows.offset(row);
  const int own = lane / kHalf;
  const T* factor = scores + (own == 0 ? 0 : widths[0]);

  constexpr int kKeys = Traits::kPacked ? Traits::kColumns / 2 : Traits::kColumns;
  std::conditional_t<Traits::kPacked, uint32_t, int32_t> columns[kKeys];
  const int width = own == 0 ? widths[0] : widths[1];
  if constexpr (Traits::kPacked) {
    load_packed<Traits>(factor, width, params.aligned, lane % kHalf, columns);
  } else {
    load_columns<Traits>(factor, width, params.aligned, lane % kHalf, columns);
  }
  keep_pace();
  const int32_t bound = sum_bound<Traits>(lane_maxima(columns, lane), num_selected, shared, lane);
  keep_pace();
  PairHalf half;
  half.low = column_bound(bound, shared.maxima[1 - own][0]);
  half.most = fast_key(shared.maxima[own][0]);
  half.shift = 0;
  if constexpr (!Traits::kPacked) {
    const uint32_t range = static_cast<uint32_t>(half.most) - static_cast<uint32_t>(half.low);
    half.shift = min(31, __clz(static_cast<int>(range)));
  }
  __syncwarp();  // the maxima have been read: the buckets may replace them
  keep_columns<Traits>(columns, scores, widths, num_selected, half, shared, lane);
  const int counts[2] = {
      __shfl_sync(kFullMask, half.count, 0), __shfl_sync(kFullMask, half.count, kHalf)
  };
  keep_pace();  // and the kept columns are written
  if constexpr (Traits::kListRegs > 2) {
    constexpr int kFew = Traits::kListRegs / 2;
    if (max(counts[0], counts[1]) <= kFew * kHalf) {
      sort_lists<Traits, kFew>(factor, half, shared, lane);
    } else {
      sort_lists<Traits, Traits::kListRegs>(factor, half, shared, lane);
    }
  } else {
    sort_lists<Traits, Traits::kListRegs>(factor, half, shared, lane);
  }
  int32_t keys[kSums];
  keep_pace();
  make_sums<Traits>(shared, num_selected, bound, counts, lane, keys);
  keep_pace();
  const int32_t cut = cut_sums<Traits>(shared, num_selected, bound, lane, keys);
  keep_pace();
  pick_pairs<Traits>(shared, cut, lane, keys);
  keep_pace();
  write_slots<Traits>(
      shared,
      scores,
      widths,
      num_selected,
      cut <= kNegInfKey,
      params.aligned,
      lane,
      static_cast<T*>(params.values) + row * num_selected,
      static_cast<int32_t*>(params.indices) + row * num_selected
  );
}

// Rows of a block, a warp each. Small ones get by with the 64 registers that 32 warps leave them.
template <typename Traits>
__host__ __device__ constexpr int pair_warps() {
  return Traits::kMaxSelected > 128 ? 4 : 8;
}

// Blocks of a multiprocessor.
template <typename Traits>
__host__ __device__ constexpr int pair_blocks() {
  return (Traits::kColumns <= 32 && Traits::kMaxSelected <= 64 ? 32 : 16) / pair_warps<Traits>();
}

template <typename Traits>
__global__ void __launch_bounds__(
    pair_warps<Traits>() * kWarp, pair_blocks<Traits>()
) topk_pair_kernel(const __grid_constant__ DeviceFwdParams params) {
  constexpr int kWarps = pair_warps<Traits>();
  __shared__ PairWarp<Traits> shared[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t row = params.first_row + static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  // behind the last row the last one once more: the same values in the same places
  select_row<Traits>(
      params,
      row < params.num_rows ? row : params.num_rows - 1,
      shared[warp],
      static_cast<int>(threadIdx.x) % kWarp
  );
}

}  // namespace sdm::topk
