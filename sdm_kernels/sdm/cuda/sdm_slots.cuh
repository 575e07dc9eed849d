// SPDX-License-Identifier: Apache-2.0
//! @file The way through the touched slots of a chunk that the update and the backward walk share.
//!
//! A block has all tokens of kWide neighbouring slices in shared memory and a share of the slots.
//! Eight lanes take a slot, a lane 16 bytes of each slice: a row is touched in runs of
//! kWide * 128 bytes, and what a slot costs beside its columns is paid once for all of them. Rows
//! come through a ring of asynchronous copies, and what else belongs to a row in flight lies in
//! shared memory too: registers would do, were there more than six scoreboards, but a load into a
//! register that is still in flight makes the use of older ones wait for it.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_token_rows.cuh"

namespace sdm::cuda {

// What differs between the two kernels is their shape:
//   kThreads  of a block;
//   kAhead    most slots in flight a lane, of up to 8 pieces of 16 bytes in all;
//   kRows     of a slot that are fetched;
//   kMore     entries of the slot beyond the first two that its note has;
//   kWidest   most slices a block;
//   kHalves   TokenRows.
template <typename S, typename Shape, int kWide>
using SlotTokens = TokenRows<S, kWide, Shape::kHalves>;

// Slots in flight a lane.
template <typename Shape, int kWide>
constexpr int kSlotsAhead =
    Shape::kAhead * Shape::kRows * kWide <= kRingDepth ? Shape::kAhead
                                                       : kRingDepth / (Shape::kRows * kWide);

template <typename Shape, int kWide>
using SlotRing = RowRing<kSlotsAhead<Shape, kWide> * Shape::kRows * kWide, Shape::kThreads>;

// Slots that a block works on at a time.
template <typename Shape>
constexpr int kSlotsAtOnce = Shape::kThreads / kRowLanes;

template <int kMore>
struct RowNote {
  int4 head;   // head_post or head_weight of the row's group
  int4 group;  // {slot, first entry, writes, reads}
  float decay;
  int source;        // lossy rows: the saved one that has the bank's, or -1; log: 0 for no row
  int2 more[kMore];  // {row, post or weight} of the entries after the first two
};

// What is known of a group before its rows are fetched.
struct SlotPlace {
  int4 group;  // {slot, first entry, writes, reads}
  float decay;
  int code;  // sdm_sources.h
};

constexpr int kPlaceWords = 6;

// Shared memory: token rows, ring, for each slot in flight a note and the place of the one after
// it.
template <typename S, int kWide, typename Shape>
constexpr int64_t slots_smem(int64_t token_rows) {
  constexpr int64_t kSlots = kSlotsAhead<Shape, kWide> * kSlotsAtOnce<Shape>;
  return SlotTokens<S, Shape, kWide>::bytes(token_rows) + SlotRing<Shape, kWide>::kBytes +
         kSlots * (int64_t{sizeof(RowNote<Shape::kMore>)} + kPlaceWords * int64_t{sizeof(int)});
}

// The bank of a stream.
struct StreamBank {
  const void* rows;
  int64_t stride;
};

template <typename S>
__device__ __forceinline__ StreamBank
stream_bank(const BankView& bank, int64_t sequence, int64_t head) {
  const S* rows =
      static_cast<const S*>(bank.data) + sequence * bank.stride[0] + head * bank.stride[1];
  return {rows, bank.stride[2]};
}

// Replay: at the start of the window, a checkpoint unless that is the first.
template <typename S>
__device__ __forceinline__ StreamBank bank_at_start(const SdmChunkParams& p, const StreamChunk& c) {
  if (p.window.first_chunk == 0) {
    return stream_bank<S>(p.bank, c.sequence, c.head);
  }
  const int64_t index =
      p.sequences[c.sequence].first_checkpoint + p.window.first_chunk / p.saved.segment_chunks - 1;
  const int64_t rows = (index * p.dims.H + c.head) * p.dims.S;
  return {static_cast<const S*>(p.saved.rows) + rows * p.dims.D, p.dims.D};
}

// Which slots and slices a block has.
struct SlotShare {
  int64_t stream, slice;  // the first slice
  int part;

  template <int kWide>
  __device__ __forceinline__ static SlotShare of(const SdmChunkParams& p) {
    const int wide_slices = quotient(p.num_slices + kWide - 1, kWide);
    SlotShare share;
    const int shared = quotient(blockIdx.x, p.parts);
    share.part = static_cast<int>(blockIdx.x) - shared * p.parts;
    share.slice = remainder(shared, wide_slices) * kWide;
    share.stream = quotient(shared, wide_slices);
    return share;
  }

  // A lane's columns of each slice.
  template <typename S, int kWide>
  __device__ __forceinline__ void columns(int64_t D, LaneColumns (&at)[kWide]) const {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      at[i] = lane_columns<S>(slice + i, D);
    }
  }
};

// A lane's part of a row in kWide slices.
template <typename S, bool kAligned, int kWide, typename Ring>
__device__ __forceinline__ void fetch_slices(
    const Ring& ring, int slot, const S* lane, const LaneColumns (&at)[kWide], bool valid
) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    fetch_lane<S, kAligned>(ring, slot + i, lane + i * kSliceColumns<S>, at[i].count, valid);
  }
}

// Starts the copies of a slot's note: the entries, by a lane each with a pointer of its own, so
// that the address costs one multiplication; what is at hand is stored. kPost: entries of the
// update (row and post), otherwise of the walk (row and weight).
template <typename Shape, int kWide, bool kPost>
class NoteReader {
  static constexpr int kMore = Shape::kMore;

 public:
  __device__ __forceinline__ NoteReader(void* notes, const int4* heads, const int4* entries)
      : note_(static_cast<RowNote<kMore>*>(notes) + threadIdx.x / kRowLanes),
        lane_(static_cast<int>(threadIdx.x) % kRowLanes) {
    from_ = lane_ < 2 ? reinterpret_cast<const char*>(heads) + lane_ * sizeof(int2)
                      : reinterpret_cast<const char*>(entries + lane_);
    to_ = lane_ < 2 ? reinterpret_cast<int2*>(&note_->head) + lane_ : note_->more + (lane_ - 2);
  }

  // `valid`: there are entries to fetch.
  __device__ __forceinline__ void start(
      int j, int g, bool valid, const SlotPlace& place, int source
  ) const {
    const int4 group = place.group;
    RowNote<kMore>* note = note_ + j * kSlotsAtOnce<Shape>;
    if (lane_ == 0) {
      note->group = group;
    }
    if (lane_ == 1) {
      note->decay = place.decay;
      note->source = source;
    }
    const uint32_t index = static_cast<uint32_t>(lane_ < 2 ? g : group.y);
    const char* from = from_ + static_cast<uint64_t>(index) * sizeof(int4);
    char* to = reinterpret_cast<char*>(to_) + j * kSlotsAtOnce<Shape> * sizeof(RowNote<kMore>);
    if (valid && lane_ < 2 + kMore && (lane_ < 2 || lane_ < group.z + group.w)) {
      if constexpr (kPost) {
        if (lane_ >= 2) {  // row and post are not neighbours
          start_copy<4>(to, from);
          start_copy<4>(to + sizeof(int), from + offsetof(int4, z));
          return;
        }
      }
      start_copy<8>(to, from);
    }
  }

  __device__ __forceinline__ auto note(int j) const -> const RowNote<kMore>& {
    return note_[j * kSlotsAtOnce<Shape>];
  }

 private:
  RowNote<kMore>* note_;
  const char* from_;
  int2* to_;
  int lane_;
};

// Places of groups, by eight lanes: copied two rounds ahead, since the rows that they lead to have
// to be started a round ahead.
template <typename Shape>
class PlaceReader {
 public:
  // codes: null where there are none
  __device__ __forceinline__
  PlaceReader(void* places, const int4* groups, const float* decays, const int* codes)
      : groups_(groups),
        decays_(decays),
        codes_(codes),
        place_(static_cast<int*>(places) + threadIdx.x / kRowLanes * kPlaceWords),
        lane_(static_cast<int>(threadIdx.x) % kRowLanes) {
    const bool of_group = lane_ < 4;
    from_ = of_group     ? reinterpret_cast<const char*>(groups) + lane_ * sizeof(int)
            : lane_ == 4 ? reinterpret_cast<const char*>(decays)
                         : reinterpret_cast<const char*>(codes);
    bytes_ = of_group ? sizeof(int4) : sizeof(int);
    copies_ = lane_ < 5 || (lane_ == 5 && codes != nullptr);
  }

  // At once, from global memory.
  __device__ __forceinline__ SlotPlace load(int g) const {
    return {__ldg(groups_ + g), __ldg(decays_ + g), codes_ == nullptr ? 0 : __ldg(codes_ + g)};
  }

  __device__ __forceinline__ void start(int j, int g) const {
    if (copies_) {
      start_copy<4>(
          place_ + j * kStride + lane_,
          from_ + static_cast<uint64_t>(static_cast<uint32_t>(g)) * bytes_
      );
    }
  }

  __device__ __forceinline__ SlotPlace get(int j) const {
    const int2* words = reinterpret_cast<const int2*>(place_ + j * kStride);
    const int2 a = words[0], b = words[1], c = words[2];
    return {make_int4(a.x, a.y, b.x, b.y), __int_as_float(c.x), c.y};
  }

 private:
  static constexpr int kStride = kSlotsAtOnce<Shape> * kPlaceWords;
  const int4* groups_;
  const float* decays_;
  const int* codes_;
  int* place_;
  const char* from_;
  uint32_t bytes_;
  int lane_;
  bool copies_;
};

// Goes through this block's share of `count` groups. Blocks that share them take turns, so that all
// sweep the bank together.
//
// order(i): the group that comes i-th.
// fetch(j, i, place): starts the copies of its rows into ring slot j; nothing where i >= count.
// take(j, i, place): starts those of its note.
// before(): runs once, with the first copies under way.
// work(j, i, refill): uses rows and note, and calls refill() as soon as it has the rows.
//
// Whole warps go round together, so that work() may shuffle.
template <
    typename Shape,
    int kWide,
    typename Order,
    typename Fetch,
    typename Take,
    typename Before,
    typename Work>
__device__ __forceinline__ void for_groups(
    int part,
    int parts,
    int count,
    const PlaceReader<Shape>& places,
    const Order& order,
    const Fetch& fetch,
    const Take& take,
    const Before& before,
    const Work& work
) {
  using Ring = SlotRing<Shape, kWide>;
  constexpr int kAhead = kSlotsAhead<Shape, kWide>, kAtOnce = kSlotsAtOnce<Shape>;
  const int step = kAtOnce * parts, round = step * kAhead;
  const int group = static_cast<int>(threadIdx.x) / kRowLanes;
  const auto group_at = [&](int i) { return i < count ? order(i) : 0; };
  int own = part * kAtOnce + group;
  {
    SlotPlace first[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      first[j] = places.load(group_at(own + j * step));
      places.start(j, group_at(own + round + j * step));
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      // arrived before the wait
      asm volatile("" ::"r"(first[j].group.x), "r"(first[j].code), "f"(first[j].decay));
    }
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      fetch(j, own + j * step, first[j]);
      take(j, own + j * step, first[j]);
      Ring::close();
    }
  }
  before();
  for (int base = part * kAtOnce + group / 4 * 4; base < count; base += round) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = own + j * step, following = i + round;
      Ring::template wait<kAhead - 1>();
      __syncwarp();  // what other lanes fetched
      const SlotPlace place = places.get(j);
      work(j, i, [&]() { fetch(j, following, place); });
      __syncwarp();  // note and place may be overwritten
      take(j, following, place);
      places.start(j, group_at(following + round));
      Ring::close();
    }
    own += round;
  }
  Ring::template wait<0>();
}

}  // namespace sdm::cuda
