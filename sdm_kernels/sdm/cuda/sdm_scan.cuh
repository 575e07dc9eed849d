// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, scan: groups, decays and weights of the sorted entries.
//!
//! With x(entry) = g for the first write of a (token, slot) and 0 otherwise, L = the sum of x over
//! the entry's group up to the entry and total = the sum over the whole group:
//!
//!     weight = k exp(L) or q exp(L),   post = k exp(total - L) beta,   group_decay = exp(total)
//!
//! Sums are double, so that differences of L keep float precision; gates are clamped to +-kMaxGate
//! first (exp of it is 0 or infinity in double), which keeps that true for any gate. A chunk is cut
//! into tiles of kTile sorted entries, one block each, whatever the device:
//!
//!     tiles    the scan state of every tile by itself (left out when a chunk is one tile)
//!     scan     the states of the tiles before it -> L, the group of every entry, group records
//!     finish   everything that needs the total or, for a read, the last write it sees: both are
//!              found through the group record
//!
//! Combining states is a fixed tree over positions in the chunk: bits depend on the data alone, and
//! a slot that many tokens share costs no more than others. About 20 + 28 + 90 bytes a lane.
#pragma once

#include <cub/block/block_load.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr float kMaxGate = 1e4f;

struct SdmScanOp {
  __device__ SdmScanState operator()(const SdmScanState& a, const SdmScanState& b) const {
    return {
        b.head ? b.sum : a.sum + b.sum,
        a.with_writes + b.with_writes,
        a.without_writes + b.without_writes,
        a.head | b.head,
        b.head ? b.head_writes : a.head_writes
    };
  }
};

// value * exp(x) to float precision; the range of float is left only where the product leaves it.
__device__ __forceinline__ float times_exp(float value, double x) {
  if (!(fabs(x) < 80.0)) {  // NaN too
    return static_cast<float>(static_cast<double>(value) * exp(x));
  }
  const float high = static_cast<float>(x);
  const float low = static_cast<float>(x - static_cast<double>(high));
  return value * (expf(high) * (1.0f + low));
}

// The sorted entries of one chunk.
template <typename Key>
struct SortedChunk {
  const Key* keys;       // [n]
  const int32_t* lanes;  // [n]
  int32_t n;
  int32_t writes;  // C * W: write lanes are below
};

template <typename Key>
__device__ __forceinline__ SortedChunk<Key> sorted_chunk(const SdmPhase1Params& p, int64_t q) {
  const int64_t begin = q * p.records.n;
  return {
      static_cast<const Key*>(p.sorted_keys) + begin,
      p.sorted_lanes + begin,
      p.records.n,
      static_cast<int32_t>(p.in.dims.C * p.in.dims.W)
  };
}

// Scan state of one entry; `head`: the first of its slot. `previous` is the lane of the entry
// before.
__device__ __forceinline__ SdmScanState entry_state(
    const SdmPhase1Params& p,
    const ChunkPlace& place,
    bool used,
    bool head,
    int32_t lane,
    int32_t previous
) {
  SdmScanState state{0.0, 0, 0, head, 0};
  if (!used) {
    return state;  // closes the last group and counts as none
  }
  const LaneId id = split_lane(p.in.dims, lane);
  if (head) {
    state.head_writes = id.write;
    state.with_writes = id.write;
    state.without_writes = !id.write;
  }
  if (id.write && (head || split_lane(p.in.dims, previous).token != id.token)) {
    const FloatView& view = p.in.tokens.g;
    const int64_t at = token_offset(view, place, id.token);
    const float g = load_float(view, p.in.dims.gate_per_write ? at + id.a * view.stride[3] : at);
    state.sum = g > kMaxGate ? kMaxGate : (g < -kMaxGate ? -kMaxGate : g);  // NaN stays
  }
  return state;
}

template <typename Key>
struct ScanStorage {
  using LoadKeys = cub::BlockLoad<Key, kThreads, kItems, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
  using LoadLanes = cub::BlockLoad<int32_t, kThreads, kItems, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
  using Scan = cub::BlockScan<SdmScanState, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using StoreSums = cub::BlockStore<double, kThreads, kItems, cub::BLOCK_STORE_WARP_TRANSPOSE>;
  using StoreGroups = cub::BlockStore<int32_t, kThreads, kItems, cub::BLOCK_STORE_WARP_TRANSPOSE>;

  union {  // one live at a time, a barrier between
    typename LoadKeys::TempStorage load_keys;
    typename LoadLanes::TempStorage load_lanes;
    typename Scan::TempStorage scan;
    typename StoreSums::TempStorage store_sums;
    typename StoreGroups::TempStorage store_groups;
  };
};

// A thread's kItems consecutive entries of a tile, and their states; entries past n are neutral.
template <typename Key>
__device__ __forceinline__ void load_entries(
    const SdmPhase1Params& p,
    const ChunkPlace& place,
    const SortedChunk<Key>& chunk,
    int32_t tile,
    ScanStorage<Key>* storage,
    Key (&keys)[kItems],
    SdmScanState (&states)[kItems]
) {
  int32_t lanes[kItems];
  const int32_t base = tile * kTile;
  const int32_t count = min(chunk.n - base, kTile);
  typename ScanStorage<Key>::LoadKeys(storage->load_keys).Load(chunk.keys + base, keys, count, 0);
  __syncthreads();  // the union changes hands
  typename ScanStorage<Key>::LoadLanes(storage->load_lanes)
      .Load(chunk.lanes + base, lanes, count, 0);
  __syncthreads();  // the union changes hands

  const int32_t first = base + static_cast<int32_t>(threadIdx.x) * kItems;
  const bool inside = first > 0 && first < chunk.n;
  Key previous_key = inside ? chunk.keys[first - 1] : Key{0};
  int32_t previous_lane = inside ? chunk.lanes[first - 1] : 0;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    states[item] = SdmScanState{0.0, 0, 0, 0, 0};
    if (first + item < chunk.n) {
      const bool used = slot_of(keys[item], p.slot_bits) < p.in.dims.S;
      const bool head = first + item == 0 || keys[item] != previous_key;
      states[item] = entry_state(p, place, used, head, lanes[item], previous_lane);
    }
    previous_key = keys[item];
    previous_lane = lanes[item];
  }
}

__device__ __forceinline__ SdmScanState fold_states(const SdmScanState (&states)[kItems]) {
  SdmScanState total = states[0];
#pragma unroll
  for (int item = 1; item < kItems; ++item) {
    total = SdmScanOp()(total, states[item]);
  }
  return total;
}

// Grid: num_q * tiles blocks.
template <typename Key>
__global__ void __launch_bounds__(kThreads) sdm_scan_tiles_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ ScanStorage<Key> s_storage;
  const int64_t q = blockIdx.x / p.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % p.tiles);
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, q, &place)) {
    return;
  }
  Key keys[kItems];
  SdmScanState states[kItems];
  load_entries(p, place, sorted_chunk<Key>(p, q), tile, &s_storage, keys, states);
  SdmScanState scanned;
  SdmScanState total;
  typename ScanStorage<Key>::Scan(s_storage.scan)
      .InclusiveScan(fold_states(states), scanned, SdmScanOp(), total);
  if (threadIdx.x == 0) {
    p.tile_state[q * p.tiles + tile] = total;
  }
}

// The first index after `begin` where `holds` is false, at most n. It holds at `begin` and is never
// true again once false; the search doubles its steps, as most groups are short.
template <typename Predicate>
__device__ __forceinline__ int32_t find_end(int32_t begin, int32_t n, const Predicate& holds) {
  int32_t low = begin;
  int32_t step = 1;
  while (step < n - low && holds(low + step)) {
    low += step;
    step *= 2;
  }
  int32_t high = low + min(step, n - low);
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return high;
}

// {slot, first entry, writes, reads} of the group that begins at `first`.
template <typename Key>
__device__ __forceinline__ int4
group_record(const SortedChunk<Key>& chunk, Key key, int32_t slot, int32_t first) {
  int32_t mid = first;
  if (chunk.lanes[first] < chunk.writes) {
    mid = find_end(first, chunk.n, [&](int32_t e) {
      return chunk.keys[e] == key && chunk.lanes[e] < chunk.writes;
    });
  }
  const int32_t last = mid > first ? mid - 1 : first;
  const int32_t end = find_end(last, chunk.n, [&](int32_t e) { return chunk.keys[e] == key; });
  return make_int4(slot, first, mid - first, end - mid);
}

// The state of the tiles before `tile`; all tiles' groups are counted in *count.
template <typename Key>
__device__ __forceinline__ SdmScanState carry_in(
    const SdmPhase1Params& p, int64_t q, int32_t tile, ScanStorage<Key>* storage, int2* count
) {
  SdmScanState carry{0.0, 0, 0, 0, 0};
  for (int32_t base = 0; base < p.tiles; base += kThreads) {
    const int32_t t = base + static_cast<int32_t>(threadIdx.x);
    SdmScanState state{0.0, 0, 0, 0, 0};
    if (t < p.tiles) {
      state = p.tile_state[q * p.tiles + t];
      atomicAdd(&count->x, state.with_writes);
      atomicAdd(&count->y, state.with_writes + state.without_writes);
      if (t >= tile) {
        state = SdmScanState{0.0, 0, 0, 0, 0};
      }
    }
    SdmScanState scanned;
    SdmScanState total;
    typename ScanStorage<Key>::Scan(storage->scan)
        .InclusiveScan(state, scanned, SdmScanOp(), total);
    carry = SdmScanOp()(carry, total);
    __syncthreads();  // the next round or user reuses the union; *count is complete after the last
  }
  return carry;
}

// Grid: num_q * tiles blocks.
template <typename Key>
__global__ void __launch_bounds__(kThreads) sdm_scan_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ ScanStorage<Key> s_storage;
  __shared__ int2 s_count;
  const int64_t q = blockIdx.x / p.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % p.tiles);
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, q, &place)) {
    return;
  }
  SdmScanState carry{0.0, 0, 0, 0, 0};
  if (p.tiles > 1) {
    if (threadIdx.x == 0) {
      s_count = make_int2(0, 0);
    }
    __syncthreads();  // s_count is zero before anyone adds
    carry = carry_in<Key>(p, q, tile, &s_storage, &s_count);
  }

  Key keys[kItems];
  SdmScanState states[kItems];
  const SortedChunk<Key> chunk = sorted_chunk<Key>(p, q);
  load_entries(p, place, chunk, tile, &s_storage, keys, states);
  const SdmScanState own = fold_states(states);
  SdmScanState state;
  typename ScanStorage<Key>::Scan(s_storage.scan).ExclusiveScan(own, state, carry, SdmScanOp());
  if (p.tiles == 1 && threadIdx.x == kThreads - 1) {
    const SdmScanState total = SdmScanOp()(state, own);
    s_count = make_int2(total.with_writes, total.with_writes + total.without_writes);
  }
  __syncthreads();  // the union changes hands; all wait for s_count
  if (tile == 0 && threadIdx.x == 0) {
    p.records.group_count[q] = s_count;
  }

  double sums[kItems];
  int32_t groups[kItems];
  const int32_t base = tile * kTile;
  const int32_t first = base + static_cast<int32_t>(threadIdx.x) * kItems;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    state = SdmScanOp()(state, states[item]);
    sums[item] = state.sum;
    groups[item] = state.head_writes ? state.with_writes - 1 : s_count.x + state.without_writes - 1;
    if (states[item].with_writes + states[item].without_writes > 0) {
      const int32_t slot = slot_of(keys[item], p.slot_bits);
      p.records.group[q * chunk.n + groups[item]] =
          group_record(chunk, keys[item], slot, first + item);
    }
  }
  const int32_t valid = min(chunk.n - base, kTile);
  const int64_t at = q * chunk.n + base;
  typename ScanStorage<Key>::StoreSums(s_storage.store_sums)
      .Store(p.records.log_decay + at, sums, valid);
  __syncthreads();  // the union changes hands
  typename ScanStorage<Key>::StoreGroups(s_storage.store_groups)
      .Store(p.group_of + at, groups, valid);
}

// The first index of [begin, end) whose lane is not below `bound`; lanes ascend inside a group.
__device__ __forceinline__ int32_t
find_lane(const int32_t* lanes, int32_t begin, int32_t end, int32_t bound) {
  if (begin == end || lanes[end - 1] < bound) {
    return end;
  }
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if (lanes[middle] < bound) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Everything of sorted entry e that the scan left open.
template <typename Key>
__device__ __forceinline__ void finish_entry(
    const SdmPhase1Params& p,
    const ChunkPlace& place,
    const SortedChunk<Key>& chunk,
    int64_t q,
    int32_t e
) {
  const SdmDims& dims = p.in.dims;
  const SdmRecords& records = p.records;
  const int64_t chunk_at = q * chunk.n;
  const int32_t slot = slot_of(chunk.keys[e], p.slot_bits);
  const int32_t lane = chunk.lanes[e];
  if (slot >= dims.S) {
    records.lane[chunk_at + lane] = make_int2(-1, 0);
    records.position[chunk_at + lane] = -1;
    if (lane < dims.C * dims.W) {
      records.write_post[q * dims.C * dims.W + lane] = make_int2(-1, 0);
    }
    if (p.gram) {
      p.span[chunk_at + lane] = make_int2(0, 0);
    }
    return;
  }
  const LaneId id = split_lane(dims, lane);
  const FloatView& view = id.write ? p.in.tokens.write_val : p.in.tokens.read_val;
  const float value = load_float(view, token_offset(view, place, id.token) + id.a * view.stride[3]);
  const int4 group = records.group[chunk_at + p.group_of[chunk_at + e]];
  const int32_t mid = group.y + group.z;
  const int32_t W = static_cast<int32_t>(dims.W);
  // writes of earlier tokens (a write pairs with those), of tokens up to its own (a read)
  const int32_t end = id.write ? find_lane(chunk.lanes, group.y, e, id.token * W)
                               : find_lane(chunk.lanes, group.y, mid, (id.token + 1) * W);
  int32_t row = id.token;
  double log_decay;
  float post = 0.0f;
  if (id.write) {
    log_decay = records.log_decay[chunk_at + e];
    const double total = records.log_decay[chunk_at + mid - 1];
    post = times_exp(value, total - log_decay) * records.beta[q * dims.C + id.token];
    row |= end == e ? kOwnerBit : 0;
  } else {
    // the scan gave a read the sum over all writes; only entries of reads are stored here, only
    // those of writes are loaded
    log_decay = end > group.y ? records.log_decay[chunk_at + end - 1] : 0.0;
    records.log_decay[chunk_at + e] = log_decay;
    row += static_cast<int32_t>(dims.C);
  }
  const float weight = times_exp(value, log_decay);
  if (e - group.y < 2) {
    const int64_t head = (chunk_at + p.group_of[chunk_at + e]) * 2 + (e - group.y);
    const auto flags = [](int32_t count) {
      return (count > 1 ? kSecondBit : 0) | (count > 2 ? kMoreBit : 0);
    };
    const int32_t plain = row & kRowMask;
    const bool first = e == group.y;
    reinterpret_cast<int2*>(records.head_post)[head] =
        make_int2(plain | (first ? flags(group.z) : 0), __float_as_int(post));
    reinterpret_cast<int2*>(records.head_weight)[head] = make_int2(
        plain | (first ? flags(group.z + group.w) : 0) | (id.write ? kOwnerBit : 0),
        __float_as_int(weight)
    );
  }
  records.entry[chunk_at + e] = make_int4(row, __float_as_int(weight), __float_as_int(post), lane);
  records.lane[chunk_at + lane] = make_int2(slot, __float_as_int(weight));
  if (lane < dims.C * dims.W) {
    records.write_post[q * dims.C * dims.W + lane] = make_int2(slot, __float_as_int(post));
  }
  records.position[chunk_at + lane] = e;
  if (p.gram) {
    p.span[chunk_at + lane] = make_int2(group.y, end);
    p.pair[chunk_at + e] = make_float2(value, __int_as_float(id.token));
  }
}

// Grid: num_q * tiles blocks.
template <typename Key>
__global__ void __launch_bounds__(kThreads) sdm_finish_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  const int64_t q = blockIdx.x / p.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % p.tiles);
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, q, &place)) {
    return;
  }
  const SortedChunk<Key> chunk = sorted_chunk<Key>(p, q);
  const int64_t at = q * chunk.n;
  const int32_t num_groups = p.records.group_count[q].y;
#pragma unroll 4
  for (int item = 0; item < kItems; ++item) {
    const int32_t e = tile * kTile + item * kThreads + static_cast<int32_t>(threadIdx.x);
    if (e < chunk.n) {
      finish_entry(p, place, chunk, q, e);
    }
    if (e < num_groups) {  // e as the index of a group
      const int4 group = p.records.group[at + e];
      const int32_t last = group.y + group.z - 1;
      p.records.group_decay[at + e] =
          group.z > 0 ? times_exp(1.0f, p.records.log_decay[at + last]) : 1.0f;
    }
  }
}

}  // namespace sdm::cuda
