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
//! Bytes an entry: a word and 8 in, 40 out, about 50 more a group and 4 by lane.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_scan.cuh"

namespace sdm::cuda {

// value * exp(x) to float precision; the range of float is left only where the product leaves it.
__device__ __forceinline__ float times_exp(float value, double x) {
  if (!(fabs(x) < 80.0)) {  // NaN too
    return static_cast<float>(static_cast<double>(value) * exp(x));
  }
  const float high = static_cast<float>(x);
  const float low = static_cast<float>(x - static_cast<double>(high));
  return value * (expf(high) * (1.0f + low));
}

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

__device__ __forceinline__ void carry_edges(
    const SdmTileState* states, int32_t tile, int32_t tiles, int32_t end, TileCarry* carry
) {
  int32_t first;
  carry->open_sum = open_sum(states, tile, &first);
  carry->open_head = first >= 0 ? states[first].last_head : 0;
  carry->open_writes = first >= 0 ? states[first].last_writes : 0;
  const SdmTileState& own = states[tile];
  double total = own.last_head >= 0 ? own.tail_sum : carry->open_sum + own.tail_sum;
  carry->next_bound = end;
  for (int32_t t = tile + 1; t < tiles; ++t) {
    total += states[t].lead_sum;
    if (states[t].first_bound >= 0) {
      carry->next_bound = states[t].first_bound;
      break;
    }
  }
  carry->total = total;
  carry->next_head = end;
  for (int32_t t = tile + 1; t < tiles; ++t) {
    if (states[t].first_head >= 0) {
      carry->next_head = states[t].first_head;
      break;
    }
  }
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

template <typename Word>
struct EntryStorage {
  TileBits bits;
  TileCarry carry;
  int32_t with_writes[kTileRows], without_writes[kTileRows];  // heads in the rows before
  float beta[kMaxChunk];
  float values[kTile];
  Word words[kTile + 1];  // the first is the one before the tile
  double sums[kTile];
};

// Heads in the rows before each row of the tile, by one warp.
template <typename Word>
__device__ __forceinline__ void count_heads(EntryStorage<Word>* s, int32_t entries) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int32_t with[2], without[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane * 2 + i;
    const int32_t rest = entries - row * 32;
    const uint32_t inside = rest >= 32 ? ~0u : rest <= 0 ? 0u : (1u << rest) - 1;
    with[i] = __popc(s->bits.writes[row + 1]);
    without[i] = __popc(s->bits.heads[row + 1] & inside & ~s->bits.writes[row + 1]);
  }
  int32_t with_sum = with[0] + with[1], without_sum = without[0] + without[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t a = __shfl_up_sync(kAllLanes, with_sum, offset);
    const int32_t b = __shfl_up_sync(kAllLanes, without_sum, offset);
    with_sum += lane >= offset ? a : 0;
    without_sum += lane >= offset ? b : 0;
  }
  s->with_writes[lane * 2 + 1] = with_sum - with[1];
  s->with_writes[lane * 2] = with_sum - with[1] - with[0];
  s->without_writes[lane * 2 + 1] = without_sum - without[1];
  s->without_writes[lane * 2] = without_sum - without[1] - without[0];
}

// A tile and its chunk, as the entries see them.
template <typename Word>
struct EntryTile {
  const SdmPhase1Params& p;
  const EntryStorage<Word>& s;
  const Word* words;
  const double* local_log;
  const SdmTileState* states;
  int32_t base;

  __device__ __forceinline__ int32_t lane_at(int32_t e) const {
    return lane_of(p, e >= base ? s.words[e - base + 1] : words[e]);
  }

  // L of write e, which is in the group that begins at `begin`.
  __device__ __forceinline__ double log_at(int32_t begin, int32_t e) const {
    if (e >= base) {
      return begin < base ? s.carry.open_sum + s.sums[e - base] : s.sums[e - base];
    }
    const int32_t tile = e / kTile;
    int32_t first;
    return begin < tile * kTile ? open_sum(states, tile, &first) + local_log[e] : local_log[e];
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

// The records of entry e.
template <typename Word>
__device__ __forceinline__ void finish_entry(const EntryTile<Word>& tile, int64_t q, int32_t e) {
  const SdmPhase1Params& p = tile.p;
  const EntryStorage<Word>& s = tile.s;
  const SdmRecords& records = p.records;
  const int64_t chunk_at = q * records.n;
  const int32_t i = e - tile.base;
  const Word word = s.words[i + 1];
  const int32_t lane = lane_of(p, word);
  const LaneId id = split_lane(p, lane);
  const float value = s.values[i];

  const int32_t head = last_bit(s.bits.heads, i);
  const int32_t begin = head >= 0 ? tile.base + head : s.carry.open_head;
  const bool with_writes = head >= 0 ? has_bit(s.bits.writes, head) : s.carry.open_writes != 0;
  const uint32_t up_to = ~0u >> (31 - i % 32);
  const uint32_t writes = s.bits.writes[i / 32 + 1], heads = s.bits.heads[i / 32 + 1];
  const int32_t group =
      with_writes ? s.carry.with_before + s.with_writes[i / 32] + __popc(writes & up_to) - 1
                  : s.carry.with_all + s.carry.without_before + s.without_writes[i / 32] +
                        __popc(heads & ~writes & up_to) - 1;

  // writes of earlier tokens (a write pairs with those), of tokens up to its own (a read)
  const int32_t W = static_cast<int32_t>(p.in.dims.W);
  const int32_t bound_lane = (id.write ? id.token : id.token + 1) * W;
  int32_t stop = e;
  if (!with_writes) {
    stop = begin;
  } else if (e > begin && lane_of(p, s.words[i]) >= bound_lane) {
    stop = tile.find_lane(begin, e - 1, bound_lane);
  }
  int32_t row = id.token;
  double log_decay = 0.0, total = 0.0;
  float post = 0.0f;
  int32_t bound = e;  // of a write: the first entry after the group's writes
  if (id.write) {
    const int32_t next = next_bit(s.bits.bounds, i + 1);
    bound = next >= 0 ? tile.base + next : s.carry.next_bound;
    log_decay = tile.log_at(begin, e);
    total = next >= 0 ? tile.log_at(begin, bound - 1) : s.carry.total;
    post = times_exp(value, total - log_decay) * s.beta[id.token];
    row |= stop == e ? kOwnerBit : 0;
  } else {
    log_decay = stop > begin ? tile.log_at(begin, stop - 1) : 0.0;
    row += static_cast<int32_t>(p.in.dims.C);
  }
  const float weight = times_exp(value, log_decay);
  records.entry[chunk_at + e] = make_int4(row, __float_as_int(weight), __float_as_int(post), lane);
  records.log_decay[chunk_at + e] = log_decay;
  static_cast<Word*>(p.link)[chunk_at + lane] =
      static_cast<Word>(e) | static_cast<Word>(stop - begin) << kLinkBits<Word>;
  if (p.gram) {
    const uint32_t back = static_cast<uint32_t>(e - begin);
    const SdmPair pair{value, static_cast<uint32_t>(id.token) | back << kPairTokenBits, log_decay};
    *reinterpret_cast<uint4*>(p.pair + chunk_at + e) = *reinterpret_cast<const uint4*>(&pair);
  }
  if (e - begin >= 2) {
    return;
  }
  int32_t post_flags = 0, weight_flags = 0;
  if (e == begin) {
    const int32_t next = next_bit(s.bits.heads, i + 1);
    const int32_t members = (next >= 0 ? tile.base + next : s.carry.next_head) - e;
    const int32_t own_writes = bound - e;
    const auto flags = [](int32_t count) {
      return (count > 1 ? kSecondBit : 0) | (count > 2 ? kMoreBit : 0);
    };
    post_flags = flags(own_writes);
    weight_flags = flags(members);
    records.group[chunk_at + group] =
        make_int4(slot_of(p, word), e, own_writes, members - own_writes);
    records.group_decay[chunk_at + group] = own_writes > 0 ? times_exp(1.0f, total) : 1.0f;
  }
  const int64_t at = (chunk_at + group) * 2 + (e - begin);
  const int32_t plain = row & kRowMask;
  reinterpret_cast<int2*>(records.head_post)[at] =
      make_int2(plain | post_flags, __float_as_int(post));
  reinterpret_cast<int2*>(records.head_weight)[at] =
      make_int2(plain | weight_flags | (id.write ? kOwnerBit : 0), __float_as_int(weight));
}

// Grid: num_q * tiles blocks.
template <typename Word>
__global__ void __launch_bounds__(kThreads, 4) sdm_entries_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  constexpr int kItems = kTile / kThreads;
  __shared__ __align__(16) EntryStorage<Word> s;
  const TilePlace at = tile_place(p.tiles);
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, at.q, &place)) {
    return;
  }
  const int32_t end = p.num_entries[at.q];
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
      base
  };
  Word word[kItems], before[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int32_t e = base + (warp * kItems + item) * 32 + lane;
    load_row(tile.words, e, end, &word[item], &before[item]);
  }
  if (thread == 0) {
    s.bits.clear_ends();
    s.words[0] = before[0];
  }
  RawFloat raw[kItems];
  unsigned written = 0;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int row = warp * kItems + item;
    const int32_t e = base + row * 32 + lane;
    const EntryKind kind = entry_kind(p, word[item], before[item], e, end);
    const FloatView& view = kind.id.write ? p.in.tokens.write_val : p.in.tokens.read_val;
    const int high = high_half(view);
    raw[item] = {0, 0};
    if (e < end) {
      const char* from = element_at(
          view, token_offset(view, place, kind.id.token) + kind.id.a * view.stride[3], 2 + high
      );
      raw[item].high = __ldg(reinterpret_cast<const unsigned short*>(from + high));
      if (high != 0) {  // narrow values are one load
        raw[item].low = __ldg(reinterpret_cast<const unsigned short*>(from));
      }
    }
    written |= kind.id.write ? 1u << item : 0u;
    const unsigned heads = __ballot_sync(kAllLanes, kind.head);
    const unsigned bounds = __ballot_sync(kAllLanes, kind.bound);
    const unsigned writes = __ballot_sync(kAllLanes, kind.head && e < end && kind.id.write);
    if (lane == 0) {
      s.bits.set_row(row, heads, bounds, writes);
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
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int i = (warp * kItems + item) * 32 + lane;
    const FloatView& view =
        (written >> item & 1u) != 0 ? p.in.tokens.write_val : p.in.tokens.read_val;
    s.values[i] = raw_value(view, raw[item]);
    s.sums[i] = local[item];
  }
  const int32_t tiles = (end + kTile - 1) / kTile;
  if (warp == 0) {
    carry_counts(tile.states, at.tile, tiles, &s.carry);
  } else if (thread == 32) {
    carry_edges(tile.states, at.tile, tiles, end, &s.carry);
  }
  __syncthreads();  // bits, words and carry are there
  if (warp == 0) {
    count_heads(&s, end - base);
  }
  if (at.tile == 0 && thread == 0) {
    p.records.group_count[at.q] = make_int2(s.carry.with_all, s.carry.all);
  }
  __syncthreads();  // heads are counted
#pragma unroll 2
  for (int item = 0; item < kItems; ++item) {
    const int32_t e = base + (warp * kItems + item) * 32 + lane;
    if (e < end) {
      finish_entry(tile, at.q, e);
    }
  }
}

}  // namespace sdm::cuda
