// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, scan: the sums of the gates over the sorted entries of every tile by itself.
//!
//! With x(entry) = g for the first write of a (token, slot) and 0 otherwise, L = the sum of x over
//! the entry's group up to the entry. Sums are double, so that differences of L keep float
//! precision; gates are clamped to +-kMaxGate first (exp of it is 0 or infinity in double), which
//! keeps that true for any gate. A chunk is cut into tiles of kTile sorted entries, one block each,
//! whatever the device: bits depend on the data alone. What a group has in other tiles is added by
//! the next stage (sdm_entries.cuh), which finds it in the tiles' states.
//!
//! Bytes an entry: a word in, 8 out; the gates of a chunk stay in the caches.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr float kMaxGate = 1e4f;

// A row's bits that name entries of the chunk. `rest`: entries from the row's first one on.
__device__ __forceinline__ uint32_t bits_inside(int32_t rest) {
  return rest >= 32 ? ~0u : rest <= 0 ? 0u : (1u << rest) - 1;
}

// Bits of the tile's entries, one word for each 32, and a row without any before and after them.
struct TileBits {
  uint32_t heads[kTileRows + 2];
  uint32_t bounds[kTileRows + 2];
  uint32_t writes[kTileRows + 2];  // heads that are writes

  __device__ __forceinline__ void clear_ends() {
    heads[0] = heads[kTileRows + 1] = 0;
    bounds[0] = bounds[kTileRows + 1] = 0;
    writes[0] = writes[kTileRows + 1] = 0;
  }

  __device__ __forceinline__ void set_row(int row, uint32_t head, uint32_t bound, uint32_t write) {
    heads[row + 1] = head;
    bounds[row + 1] = bound;
    writes[row + 1] = write;
  }
};

// The first set bit of the tile at or after position i, -1 if there is none. Almost always in the
// row or the next one.
__device__ __forceinline__ int32_t next_bit(const uint32_t* bits, int32_t i) {
  int32_t row = i / 32;
  if (row >= kTileRows) {
    return -1;
  }
  const uint64_t two = static_cast<uint64_t>(bits[row + 2]) << 32 | bits[row + 1];
  const uint64_t rest = two >> (i % 32);
  if (rest != 0) {
    return i + __ffsll(static_cast<long long>(rest)) - 1;
  }
  for (row += 2; row < kTileRows; ++row) {
    if (bits[row + 1] != 0) {
      return row * 32 + __ffs(static_cast<int>(bits[row + 1])) - 1;
    }
  }
  return -1;
}

// The last set bit of the tile at or before position i, -1 if there is none.
__device__ __forceinline__ int32_t last_bit(const uint32_t* bits, int32_t i) {
  int32_t row = i / 32;
  const uint64_t two = static_cast<uint64_t>(bits[row + 1]) << 32 | bits[row];
  const uint64_t rest = two & (~uint64_t{0} >> (31 - i % 32));
  if (rest != 0) {
    return row * 32 + 31 - __clzll(static_cast<long long>(rest));
  }
  for (row -= 2; row >= 0; --row) {
    if (bits[row + 1] != 0) {
      return row * 32 + 31 - __clz(static_cast<int>(bits[row + 1]));
    }
  }
  return -1;
}

// Whether bit i of the tile is set.
__device__ __forceinline__ bool has_bit(const uint32_t* bits, int32_t i) {
  return (bits[i / 32 + 1] >> (i % 32) & 1u) != 0;
}

// A run of entries: the sum since its last head, or of all of it.
struct ScanRun {
  double sum;
  int head;
};

__device__ __forceinline__ ScanRun join_runs(const ScanRun& a, const ScanRun& b) {
  return {b.head ? b.sum : a.sum + b.sum, a.head | b.head};
}

// A warp's runs before each lane's, joined; lane 0 has an empty one.
__device__ __forceinline__ ScanRun warp_runs_before(ScanRun run, ScanRun* all) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const ScanRun before{
        __shfl_up_sync(kAllLanes, run.sum, offset), __shfl_up_sync(kAllLanes, run.head, offset)
    };
    run = lane >= offset ? join_runs(before, run) : run;
  }
  *all = {__shfl_sync(kAllLanes, run.sum, 31), __shfl_sync(kAllLanes, run.head, 31)};
  const ScanRun before{
      __shfl_up_sync(kAllLanes, run.sum, 1), __shfl_up_sync(kAllLanes, run.head, 1)
  };
  return lane > 0 ? before : ScanRun{0.0, 0};
}

// A double every eight is left out: eight a thread then touch different banks.
__device__ __forceinline__ int padded(int i) {
  return i + i / 8;
}

struct ScanStorage {
  TileBits bits;
  ScanRun runs[kWarps];
  int32_t heads[kWarps], heads_with_writes[kWarps];
  float gates[kTile];
  double sums[kTile + kTile / 8];
};

// Grid: num_q * tiles blocks.
template <typename Word>
__global__ void __launch_bounds__(kThreads) sdm_scan_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  constexpr int kItems = kTile / kThreads;
  __shared__ __align__(16) ScanStorage s;
  const TilePlace at = tile_place(p.tiles);
  wait_for_previous();
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, at.q, &place)) {
    return;
  }
  const int32_t end = p.records.entry_count[at.q];
  const int32_t base = at.tile * kTile;
  if (base >= end) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const Word* words = static_cast<const Word*>(p.sorted) + at.q * p.records.n;
  const ChunkView gates(p.in.tokens.g, place, 2);

  if (thread == 0) {
    s.bits.clear_ends();
  }
  // rows of a warp: 32 entries at a time, consecutive
  Word word[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int32_t e = base + (warp * kItems + item) * 32 + lane;
    word[item] = e < end ? words[e] : Word{0};
  }
  const int32_t warp_first = base + warp * kItems * 32;
  Word last = warp_first > 0 && warp_first < end ? words[warp_first - 1] : Word{0};
  RawFloat raw[kItems];
  unsigned owners = 0;
  int heads = 0, with_writes = 0;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int row = warp * kItems + item;
    const int32_t e = base + row * 32 + lane;
    Word before = __shfl_up_sync(kAllLanes, word[item], 1);
    before = lane > 0 ? before : last;
    last = __shfl_sync(kAllLanes, word[item], 31);
    const LaneId id = split_lane(p, lane_of(p, word[item]));
    const LaneId id_before = split_lane(p, lane_of(p, before));
    // past the end everything is a head
    const bool head = e >= end || e == 0 || slot_of(p, word[item]) != slot_of(p, before);
    const bool bound = head || (!id.write && id_before.write);
    // a write, the first of its token and slot
    const bool owner = e < end && id.write && (head || id_before.token != id.token);
    raw[item] = {0, 0};
    if (owner) {
      owners |= 1u << item;
      raw[item] = load_narrow(
          gates.first + id.token * gates.token_stride +
              (p.in.dims.gate_per_write ? id.a * gates.lane_stride : 0),
          gates.high
      );
    }
    const unsigned head_bits = __ballot_sync(kAllLanes, head);
    const unsigned bound_bits = __ballot_sync(kAllLanes, bound);
    const unsigned writes = __ballot_sync(kAllLanes, head && e < end && id.write);
    heads += __popc(head_bits & bits_inside(end - (e - lane)));
    with_writes += __popc(writes);
    if (lane == 0) {
      s.bits.set_row(row, head_bits, bound_bits, writes);
    }
  }
  if (lane == 0) {
    s.heads[warp] = heads;
    s.heads_with_writes[warp] = with_writes;
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const float g = owners >> item & 1u ? raw_value(p.in.tokens.g, raw[item]) : 0.0f;
    // NaN stays
    s.gates[(warp * kItems + item) * 32 + lane] =
        g > kMaxGate ? kMaxGate : (g < -kMaxGate ? -kMaxGate : g);
  }
  __syncthreads();  // gates and bits are there

  // now eight consecutive entries a thread
  const unsigned own_heads = s.bits.heads[thread / 4 + 1] >> (thread % 4 * 8) & 0xffu;
  double sums[kItems];
  ScanRun run{0.0, 0};
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int head = static_cast<int>(own_heads >> item & 1u);
    run = join_runs(run, {static_cast<double>(s.gates[thread * kItems + item]), head});
    sums[item] = run.sum;
  }
  ScanRun all;
  ScanRun carry = warp_runs_before(run, &all);
  if (lane == 0) {
    s.runs[warp] = all;
  }
  __syncthreads();  // the warps' runs are there
  ScanRun warps{0.0, 0};
  for (int w = 0; w < warp; ++w) {
    warps = join_runs(warps, s.runs[w]);
  }
  carry = join_runs(warps, carry);
  bool open = true;  // no head so far
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    open = open && (own_heads >> item & 1u) == 0;
    s.sums[padded(thread * kItems + item)] = open ? carry.sum + sums[item] : sums[item];
  }
  __syncthreads();  // the sums are there
  double* local = p.local_log + at.q * p.records.n + base;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int i = item * kThreads + thread;
    if (base + i < end) {
      local[i] = s.sums[padded(i)];
    }
  }
  if (thread == 0) {
    const int32_t first = next_bit(s.bits.heads, 0);
    const int32_t bound = next_bit(s.bits.bounds, 0);
    const int32_t last = last_bit(s.bits.heads, min(end - base, kTile) - 1);
    SdmTileState state;
    const int32_t lead = first < 0 ? kTile : first;
    state.lead_sum = lead > 0 ? s.sums[padded(lead - 1)] : 0.0;
    state.tail_sum = s.sums[padded(min(end - base, kTile) - 1)];
    state.with_writes = 0;
    state.without_writes = 0;
    for (int w = 0; w < kWarps; ++w) {
      state.with_writes += s.heads_with_writes[w];
      state.without_writes += s.heads[w] - s.heads_with_writes[w];
    }
    state.first_head = first < 0 ? -1 : base + first;
    state.first_bound = bound < 0 ? -1 : base + bound;
    state.last_head = last < 0 ? -1 : base + last;
    state.last_writes = last >= 0 && has_bit(s.bits.writes, last);
    p.tile_state[at.q * p.tiles + at.tile] = state;
  }
}

}  // namespace sdm::cuda
