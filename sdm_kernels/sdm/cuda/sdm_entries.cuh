// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, entries: the records of the sorted entries and of their groups.
//!
//! With L and total the gates of the entry's group up to the entry and in all (sdm_scan.cuh):
//!
//!     weight = k exp(L) or q exp(L),   post = k exp(total - L) beta,   group_decay = exp(total)
//!
//! A block makes a tile of sorted entries. Groups begin and end where bits of the tile say so; what
//! a group has in other tiles is in their states. A read takes L from the last write that it sees,
//! which is searched for among the words: in shared memory, but for groups longer than the tile.
//! Bytes an entry: a word, 8 and the weight in, 36 out, 52 more a group.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_entry_rows.cuh"

namespace sdm::cuda {

// Out of line: few values need it, and its code is long.
__device__ __noinline__ float times_exp_wide(float value, double x) {
  return static_cast<float>(static_cast<double>(value) * exp(x));
}

// value * exp(x) to float precision; the range of float is left only where the product leaves it.
__device__ __forceinline__ float times_exp(float value, double x) {
  const float high = static_cast<float>(x);
  if (!(fabsf(high) < 80.0f)) {  // NaN too
    return times_exp_wide(value, x);
  }
  const float low = static_cast<float>(x - static_cast<double>(high));
  return value * (expf(high) * (1.0f + low));
}

// L of write e of an earlier tile; out of line, as few groups need it.
__device__ __noinline__ double log_before(
    const SdmTileState* states, const double* local_log, int32_t begin, int32_t e
) {
  const int32_t tile = e / kTile;
  int32_t first;
  return begin < tile * kTile ? open_sum(states, tile, &first) + local_log[e] : local_log[e];
}

// A tile and its chunk, as the entries see them.
template <typename Word>
struct EntryTile {
  const SdmPhase1Params& p;
  const EntryStorage<Word>& s;
  const Word* words;
  const double* local_log;
  const SdmTileState* states;
  int32_t base, end;

  __device__ __forceinline__ int32_t lane_at(int32_t e) const {
    return lane_of(p, e >= base ? s.words[e - base + 1] : words[e]);
  }

  // L of write e, which is in the group that begins at `begin`.
  __device__ __forceinline__ double log_at(int32_t begin, int32_t e) const {
    if (e >= base) {
      return begin < base ? s.carry.open_sum + s.sums[e - base] : s.sums[e - base];
    }
    return log_before(states, local_log, begin, e);
  }

  // The first entry of [begin, end) whose lane is not below `bound`; lanes ascend inside a group.
  __device__ __forceinline__ int32_t find_lane(int32_t begin, int32_t end, int32_t bound) const {
    if (begin == end || lane_at(end - 1) < bound) {
      return end;
    }
    while (begin < end) {
      const int32_t middle = begin + (end - begin) / 2;
      if (lane_at(middle) < bound) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
};

// What a head tells of its group's first two entries.
struct HeadPart {
  int32_t row;  // token of a write, C + token of a read
  int32_t write_bit;
  float weight, post;

  __device__ __forceinline__ HeadPart from_lane(int lane) const {
    return {
        __shfl_sync(kAllLanes, row, lane),
        __shfl_sync(kAllLanes, write_bit, lane),
        __shfl_sync(kAllLanes, weight, lane),
        __shfl_sync(kAllLanes, post, lane)
    };
  }
};

// An entry's place in its group, and the group's.
struct EntryPlace {
  int32_t back;  // entries of the group before it
  int32_t group;
  int32_t own_writes, members;  // of a head
  double total;                 // of a head: all gates of the group
  int32_t slot;
};

// The records of sorted entry e, but for those of its group.
template <typename Word>
__device__ __forceinline__ void finish_entry(
    const EntryTile<Word>& tile,
    int64_t chunk_at,
    const EntryRow& in_row,
    int32_t e,
    HeadPart* part,
    EntryPlace* place_in
) {
  const SdmPhase1Params& p = tile.p;
  const EntryStorage<Word>& s = tile.s;
  const SdmRecords& records = p.records;
  const int32_t i = e - tile.base, row_first = e - i % 32;
  const Word word = s.words[i + 1];
  const int32_t lane = lane_of(p, word);
  const LaneId id = split_lane(p, lane);
  const float value = s.values[i];

  const uint32_t up_to = ~0u >> (31 - i % 32);
  const uint32_t heads = in_row.heads & up_to;
  const int32_t place = 31 - __clz(static_cast<int>(heads));
  const int32_t begin = heads != 0 ? row_first + place : in_row.open;
  const bool with_writes =
      heads != 0 ? (in_row.writes >> place & 1u) != 0 : in_row.open_writes != 0;
  const int32_t group = with_writes ? in_row.with + __popc(in_row.writes & up_to) - 1
                                    : in_row.without + __popc(heads & ~in_row.writes) - 1;

  // writes of earlier tokens (a write pairs with those), of tokens up to its own (a read)
  const int32_t W = static_cast<int32_t>(p.in.dims.W);
  const int32_t bound_lane = (id.write ? id.token : id.token + 1) * W;
  int32_t stop = with_writes ? e : begin;
  if (stop > begin && lane_of(p, s.words[i]) >= bound_lane) {
    stop = tile.find_lane(begin, e - 1, bound_lane);
  }
  double log_decay = 0.0, total = 0.0;
  float post = 0.0f;
  int32_t bound = e;  // of a write: the first entry after the group's writes
  const int32_t last = id.write ? e : stop - 1;  // the last write that it sees
  if (last >= begin) {
    log_decay = tile.log_at(begin, last);
  }
  if (id.write) {
    const uint32_t bounds = in_row.bounds & ~up_to;
    bound = bounds != 0 ? row_first + __ffs(static_cast<int>(bounds)) - 1 : in_row.next_bound;
    total = bound <= tile.base + kTile ? tile.log_at(begin, bound - 1) : s.carry.total;
    post = times_exp(value, total - log_decay) * s.beta[id.token];
  }
  const int32_t row = id.token + (id.write ? 0 : static_cast<int32_t>(p.in.dims.C));
  const float weight = times_exp(value, log_decay);
  const int64_t at = chunk_at + e;
  const uint32_t back = static_cast<uint32_t>(e - begin);
  records.entry[at] = make_int4(
      row | (id.write && stop == e ? kOwnerBit : 0),
      __float_as_int(weight),
      __float_as_int(post),
      lane | min(stop - begin, kManyPairs) << kPairsBit
  );
  const SdmPair pair{value, static_cast<uint32_t>(id.token) | back << kPairTokenBits, log_decay};
  *reinterpret_cast<int4*>(records.pair + at) = *reinterpret_cast<const int4*>(&pair);
  records.entry_group[at] = group;
  const uint32_t later = in_row.heads & ~up_to;
  const int32_t next =
      later != 0 ? row_first + __ffs(static_cast<int>(later)) - 1 : in_row.next_head;
  *part = {row, id.write ? kOwnerBit : 0, weight, post};
  *place_in = {e - begin, group, bound - e, min(next, tile.end) - e, total, slot_of(p, word)};
}

// The records of a group by its head e, written whole where its second entry is of the same warp:
// a sector that leaves L2 in part costs a read.
__device__ __forceinline__ void finish_group(
    const SdmRecords& records,
    int64_t chunk_at,
    int32_t e,
    const EntryPlace& place,
    const HeadPart& own,
    const HeadPart& second
) {
  const auto flags = [](int32_t count) {
    return (count > 1 ? kSecondBit : 0) | (count > 2 ? kMoreBit : 0);
  };
  const int64_t at = chunk_at + place.group;
  const int32_t post_row = own.row | flags(place.own_writes);
  const int32_t weight_row = own.row | flags(place.members) | own.write_bit;
  records.group[at] = make_int4(place.slot, e, place.own_writes, place.members - place.own_writes);
  records.group_decay[at] = place.own_writes > 0 ? times_exp(1.0f, place.total) : 1.0f;
  if ((e + 1) % kWarpEntries != 0) {
    const bool two = place.members > 1;
    records.head_post[at] = make_int4(
        post_row,
        __float_as_int(own.post),
        two ? second.row : 0,
        two ? __float_as_int(second.post) : 0
    );
    records.head_weight[at] = make_int4(
        weight_row,
        __float_as_int(own.weight),
        two ? second.row | second.write_bit : 0,
        two ? __float_as_int(second.weight) : 0
    );
  } else {
    reinterpret_cast<int2*>(records.head_post)[at * 2] =
        make_int2(post_row, __float_as_int(own.post));
    reinterpret_cast<int2*>(records.head_weight)[at * 2] =
        make_int2(weight_row, __float_as_int(own.weight));
  }
}

// The half of a group's records that is its second entry's, where the head is another warp's.
__device__ __forceinline__ void finish_second(
    const SdmRecords& records, int64_t chunk_at, const EntryPlace& place, const HeadPart& own
) {
  const int64_t at = (chunk_at + place.group) * 2 + 1;
  reinterpret_cast<int2*>(records.head_post)[at] = make_int2(own.row, __float_as_int(own.post));
  reinterpret_cast<int2*>(records.head_weight)[at] =
      make_int2(own.row | own.write_bit, __float_as_int(own.weight));
}

// Grid: num_q * tiles blocks.
template <typename Word>
__global__ void __launch_bounds__(kThreads, 3) sdm_entries_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  constexpr int kItems = kWarpEntries / 32;
  __shared__ __align__(16) EntryStorage<Word> s;
  const TilePlace at = tile_place(p.tiles);
  wait_for_previous();
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, at.q, &place)) {
    return;
  }
  const int32_t end = p.records.entry_count[at.q];
  const int32_t base = at.tile * kTile;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (base >= end) {
    if (at.tile == 0 && thread == 0) {
      p.records.group_count[at.q] = make_int2(0, 0);
    }
    return;
  }
  const int64_t chunk_at = at.q * p.records.n;
  const EntryTile<Word> tile{
      p,
      s,
      static_cast<const Word*>(p.sorted) + chunk_at,
      p.local_log + chunk_at,
      p.tile_state + at.q * p.tiles,
      base,
      end
  };
  Word word[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int32_t e = base + (warp * kItems + item) * 32 + lane;
    word[item] = e < end ? tile.words[e] : Word{0};
  }
  const int32_t warp_first = base + warp * kItems * 32;
  Word last = warp_first > 0 && warp_first < end ? tile.words[warp_first - 1] : Word{0};
  if (thread == 0) {
    s.words[0] = last;
  }
  const int32_t writes = static_cast<int32_t>(p.in.dims.C * p.in.dims.W);
  const ChunkView write_values(p.in.tokens.write_val, place, 2);
  const ChunkView read_values(p.in.tokens.read_val, place, 2);
  RawFloat raw[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int row = warp * kItems + item;
    const int32_t e = base + row * 32 + lane;
    Word before = __shfl_up_sync(kAllLanes, word[item], 1);
    before = lane > 0 ? before : last;
    last = __shfl_sync(kAllLanes, word[item], 31);
    const LaneId id = split_lane(p, lane_of(p, word[item]));
    raw[item] = {0, 0};
    if (e < end) {
      raw[item] = load_narrow(
          lane_element(write_values, read_values, id),
          id.write ? write_values.high : read_values.high
      );
    }
    const bool head = e >= end || e == 0 || slot_of(p, word[item]) != slot_of(p, before);
    const bool bound = head || (!id.write && lane_of(p, before) < writes);
    const unsigned heads = __ballot_sync(kAllLanes, head);
    const unsigned bounds = __ballot_sync(kAllLanes, bound);
    const unsigned write_heads = __ballot_sync(kAllLanes, head && e < end && id.write);
    if (lane == 0) {
      s.rows[row].heads = heads;
      s.rows[row].bounds = bounds;
      s.rows[row].writes = write_heads;
    }
    s.words[row * 32 + lane + 1] = word[item];
  }
  double local[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int32_t e = base + (warp * kItems + item) * 32 + lane;
    local[item] = e < end ? tile.local_log[e] : 0.0;
  }
  for (int32_t i = thread; i < p.in.dims.C; i += kThreads) {
    s.beta[i] = p.records.beta[at.q * p.in.dims.C + i];
  }
  const int32_t tiles = (end + kTile - 1) / kTile;
  if (warp == 0) {
    carry_counts(tile.states, at.tile, tiles, &s.carry);
  } else if (thread == 32) {
    carry_edges(tile.states, at.tile, tiles, end, &s.carry);
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int i = (warp * kItems + item) * 32 + lane;
    const bool write = lane_of(p, word[item]) < writes;
    s.values[i] = raw_value(
        raw[item],
        write ? write_values.high : read_values.high,
        (write ? p.in.tokens.write_val : p.in.tokens.read_val).dtype == DType::kF16
    );
    s.sums[i] = local[item];
  }
  __syncthreads();  // bits, words and carry are there
  if (warp == 0) {
    link_rows(&s, base, end);
  }
  if (at.tile == 0 && thread == 0) {
    p.records.group_count[at.q] = make_int2(s.carry.with_all, s.carry.all);
  }
  __syncthreads();                   // rows know each other
  HeadPart after{0, 0, 0.0f, 0.0f};  // the first entry of the row after
#pragma unroll 1
  for (int item = kItems - 1; item >= 0; --item) {
    const int row = warp * kItems + item;
    const int32_t e = base + row * 32 + lane;
    HeadPart own{0, 0, 0.0f, 0.0f};
    EntryPlace in_group{-1, 0, 0, 0, 0.0, 0};
    if (e < end) {
      finish_entry(tile, chunk_at, s.rows[row], e, &own, &in_group);
    }
    __syncwarp();  // all lanes tell each other
    HeadPart second = own.from_lane((lane + 1) % 32);
    if (lane == 31) {
      second = after;
    }
    after = own.from_lane(0);
    if (in_group.back == 0) {
      finish_group(p.records, chunk_at, e, in_group, own, second);
    } else if (in_group.back == 1 && e % kWarpEntries == 0) {
      finish_second(p.records, chunk_at, in_group, own);
    }
  }
}

}  // namespace sdm::cuda
