// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, entries: what the tiles of a chunk, and the rows of 32 entries of a tile, take
//! from each other.
//!
//! A tile finds in the states of its neighbours (sdm_scan.cuh) which group is open at its start and
//! where the one open at its end goes on; a row finds the same in the bits of the others.
#pragma once

#include <climits>

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_scan.cuh"

namespace sdm::cuda {

constexpr int kWarpEntries = kTile / kWarps;

// What a tile takes from the others of its chunk.
struct TileCarry {
  double open_sum;                 // gates, before the tile, of the group that is open at its start
  double total;                    // all gates of the group that is open at its end
  int32_t open_head, open_writes;  // first entry of the group open at the start; 1: it is a write
  int32_t next_head, next_bound;   // the first ones after the tile
  int32_t with_before, without_before;  // groups with writes, of reads only, before the tile
  int32_t with_all, all;                // in the chunk
};

// The sum of a group's gates in the tiles before `tile`, of which it fills all but the first, whose
// number is returned in *first (-1: none). Always added from the first on.
__device__ __forceinline__ double open_sum(
    const SdmTileState* states, int32_t tile, int32_t* first
) {
  int32_t t = tile - 1;
  while (t >= 0 && states[t].last_head < 0) {
    --t;
  }
  *first = t;
  double sum = 0.0;
  if (t >= 0) {
    sum = states[t].tail_sum;
    for (++t; t < tile; ++t) {
      sum += states[t].tail_sum;
    }
  }
  return sum;
}

// By one thread. The tiles next to it are loaded together, as they nearly always tell all.
__device__ __forceinline__ void carry_edges(
    const SdmTileState* states, int32_t tile, int32_t tiles, int32_t end, TileCarry* carry
) {
  const SdmTileState before = states[tile > 0 ? tile - 1 : 0], own = states[tile],
                     after = states[tile + 1 < tiles ? tile + 1 : tile];
  int32_t first = tile - 1;
  if (tile > 0 && before.last_head < 0) {
    carry->open_sum = open_sum(states, tile, &first);
    carry->open_head = first >= 0 ? states[first].last_head : 0;
    carry->open_writes = first >= 0 ? states[first].last_writes : 0;
  } else {
    carry->open_sum = tile > 0 ? before.tail_sum : 0.0;
    carry->open_head = tile > 0 ? before.last_head : 0;
    carry->open_writes = tile > 0 ? before.last_writes : 0;
  }
  double total = own.last_head >= 0 ? own.tail_sum : carry->open_sum + own.tail_sum;
  carry->next_bound = end;
  carry->next_head = end;
  if (tile + 1 < tiles) {
    total += after.lead_sum;
    carry->next_bound = after.first_bound;
    carry->next_head = after.first_head;
    if (after.first_bound < 0) {
      carry->next_bound = end;
      for (int32_t t = tile + 2; t < tiles; ++t) {
        total += states[t].lead_sum;
        if (states[t].first_bound >= 0) {
          carry->next_bound = states[t].first_bound;
          break;
        }
      }
    }
    if (after.first_head < 0) {
      carry->next_head = end;
      for (int32_t t = tile + 2; t < tiles; ++t) {
        if (states[t].first_head >= 0) {
          carry->next_head = states[t].first_head;
          break;
        }
      }
    }
  }
  carry->total = total;
}

// By one warp.
__device__ __forceinline__ void carry_counts(
    const SdmTileState* states, int32_t tile, int32_t tiles, TileCarry* carry
) {
  int32_t with_before = 0, without_before = 0, with_all = 0, all = 0;
  for (int32_t t = static_cast<int32_t>(threadIdx.x % 32); t < tiles; t += 32) {
    const int32_t with = states[t].with_writes, without = states[t].without_writes;
    with_before += t < tile ? with : 0;
    without_before += t < tile ? without : 0;
    with_all += with;
    all += with + without;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    with_before += __shfl_xor_sync(kAllLanes, with_before, offset);
    without_before += __shfl_xor_sync(kAllLanes, without_before, offset);
    with_all += __shfl_xor_sync(kAllLanes, with_all, offset);
    all += __shfl_xor_sync(kAllLanes, all, offset);
  }
  if (threadIdx.x % 32 == 0) {
    carry->with_before = with_before;
    carry->without_before = without_before;
    carry->with_all = with_all;
    carry->all = all;
  }
}

// A row of 32 entries. Positions count from the chunk's first entry.
struct alignas(16) EntryRow {
  uint32_t heads, bounds, writes;  // bits; writes: heads that are writes
  int32_t open, open_writes;       // first entry of the group open at its start; 1: it is a write
  int32_t next_head, next_bound;   // the first ones after the row
  int32_t with, without;           // numbers of the first group that begins in it, of either kind
};

template <typename Word>
struct EntryStorage {
  EntryRow rows[kTileRows];
  TileCarry carry;
  float beta[kMaxChunk];
  float values[kTile];
  Word words[kTile + 1];  // the first is the one before the tile
  double sums[kTile];
};

// What rows take from each other, by one warp: two rows a lane.
template <typename Word>
__device__ __forceinline__ void link_rows(EntryStorage<Word>* s, int32_t base, int32_t end) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const TileCarry& carry = s->carry;
  EntryRow* rows = s->rows + lane * 2;
  int32_t with[2], without[2], last[2], next_head[2], next_bound[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t first = base + (lane * 2 + i) * 32;
    const uint32_t heads = rows[i].heads & bits_inside(end - first);
    with[i] = __popc(rows[i].writes);
    without[i] = __popc(heads) - with[i];
    // twice the last head, plus 1 if it is a write
    const int32_t place = 31 - __clz(static_cast<int>(heads));
    last[i] =
        heads == 0 ? -1 : (first + place) * 2 + static_cast<int32_t>(rows[i].writes >> place & 1u);
    next_head[i] =
        rows[i].heads == 0 ? INT32_MAX : first + __ffs(static_cast<int>(rows[i].heads)) - 1;
    next_bound[i] =
        rows[i].bounds == 0 ? INT32_MAX : first + __ffs(static_cast<int>(rows[i].bounds)) - 1;
  }
  int32_t with_sum = with[0] + with[1], without_sum = without[0] + without[1];
  int32_t last_max = max(last[0], last[1]);
  int32_t head_min = min(next_head[0], next_head[1]), bound_min = min(next_bound[0], next_bound[1]);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t a = __shfl_up_sync(kAllLanes, with_sum, offset);
    const int32_t b = __shfl_up_sync(kAllLanes, without_sum, offset);
    const int32_t c = __shfl_up_sync(kAllLanes, last_max, offset);
    const int32_t d = __shfl_down_sync(kAllLanes, head_min, offset);
    const int32_t e = __shfl_down_sync(kAllLanes, bound_min, offset);
    with_sum += lane >= offset ? a : 0;
    without_sum += lane >= offset ? b : 0;
    last_max = lane >= offset ? max(last_max, c) : last_max;
    head_min = lane + offset < 32 ? min(head_min, d) : head_min;
    bound_min = lane + offset < 32 ? min(bound_min, e) : bound_min;
  }
  int32_t before = __shfl_up_sync(kAllLanes, last_max, 1);
  int32_t head_after = __shfl_down_sync(kAllLanes, head_min, 1);
  int32_t bound_after = __shfl_down_sync(kAllLanes, bound_min, 1);
  const int32_t open = carry.open_head * 2 + carry.open_writes;
  before = lane > 0 && before >= 0 ? before : open;
  head_after = lane < 31 && head_after != INT32_MAX ? head_after : carry.next_head;
  bound_after = lane < 31 && bound_after != INT32_MAX ? bound_after : carry.next_bound;
  const int32_t opens[2] = {before, last[0] >= 0 ? last[0] : before};
  const int32_t heads_after[2] = {
      next_head[1] != INT32_MAX ? next_head[1] : head_after, head_after
  };
  const int32_t bounds_after[2] = {
      next_bound[1] != INT32_MAX ? next_bound[1] : bound_after, bound_after
  };
  const int32_t first_with = carry.with_before + with_sum - with[1];
  const int32_t first_without = carry.with_all + carry.without_before + without_sum - without[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows[i].open = opens[i] / 2;
    rows[i].open_writes = opens[i] % 2;
    rows[i].next_head = min(heads_after[i], end);
    rows[i].next_bound = min(bounds_after[i], end);
    rows[i].with = i == 0 ? first_with - with[0] : first_with;
    rows[i].without = i == 0 ? first_without - without[0] : first_without;
  }
}

}  // namespace sdm::cuda
