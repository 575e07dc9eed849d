// SPDX-License-Identifier: Apache-2.0
//! @file The way through the touched slots of a chunk that the update and the backward walk share.
//!
//! A block has all tokens of kWide neighbouring slices in shared memory and a share of the slots.
//! Eight lanes take a slot and slice; kWide groups of a warp take one slot together, so that its
//! row is touched in runs of kWide * 128 bytes. Rows come through a ring of asynchronous copies,
//! and what else belongs to a row in flight lies in shared memory too: registers would do, were
//! there more than six scoreboards, but a load into a register that is still in flight makes the
//! use of older ones wait for it.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"

namespace sdm::cuda {

constexpr int kSlotThreads = 512;
constexpr int kSlotGroups = kSlotThreads / kRowLanes;
using SlotRing = RowRing<kRingDepth, kSlotThreads>;

// Row stride of token rows in shared memory, in floats.
template <typename S, int kWide>
constexpr int kTokenStride = kSliceColumns<S> * kWide + 4;

// kMore: entries of the group beyond the first two that its note has.
template <int kMore>
struct RowNote {
  int4 head;   // head_post or head_weight of the row's group
  int4 group;  // {slot, first entry, writes, reads}
  float decay;
  int source;        // backward: where the bank's row is kept
  int2 more[kMore];  // {row, post or weight} of the entries after the first two
};

// Shared memory: token rows, ring, a note for each slot in flight.
// Shape: slots in flight and what their notes hold, of the kernel.
template <typename S, int kWide, typename Shape>
constexpr int64_t slots_smem(int64_t token_rows) {
  return token_rows * kTokenStride<S, kWide> * static_cast<int64_t>(sizeof(float)) +
         SlotRing::kBytes +
         Shape::kAhead * (kSlotGroups / kWide) *
             static_cast<int64_t>(sizeof(RowNote<Shape::kMore>));
}

// Which slots and slice a block or group of lanes has.
struct SlotShare {
  int64_t stream, slice;
  int part;

  template <int kWide>
  __device__ __forceinline__ static SlotShare of(const SdmChunkParams& p) {
    const int64_t wide_slices = ceil_div(p.num_slices, kWide);
    SlotShare share;
    share.part = static_cast<int>(blockIdx.x % p.parts);
    share.slice = blockIdx.x / p.parts % wide_slices * kWide +
                  static_cast<int>(threadIdx.x) / kRowLanes % kWide;
    share.stream = blockIdx.x / (p.parts * wide_slices);
    return share;
  }

  // This block's part of `count` groups.
  __device__ __forceinline__ int begin(const SdmChunkParams& p, int count) const {
    return static_cast<int>(static_cast<int64_t>(count) * part / p.parts);
  }

  __device__ __forceinline__ int end(const SdmChunkParams& p, int count) const {
    return static_cast<int>(static_cast<int64_t>(count) * (part + 1) / p.parts);
  }
};

// Token rows of this lane's slice of a view into shared memory: rows [0, num_tokens).
template <typename S, int kWide, typename RowOf>
__device__ __forceinline__ void load_tokens(
    const FloatView& from,
    const RowOf& row_of,
    int num_tokens,
    const LaneColumns& at,
    bool vectors,
    float* to
) {
  const int group = static_cast<int>(threadIdx.x) / kRowLanes;
  float* mine = to + group % kWide * kSliceColumns<S>;
#pragma unroll 4
  for (int i = group / kWide; i < num_tokens; i += kSlotGroups / kWide) {
    float row[kVec<S>];
    load_token_columns<S>(from, row_of(i), at, vectors, row);
    store_token<S>(mine + i * kTokenStride<S, kWide>, row);
  }
}

// Starts the copies of a group's note, once for the groups of lanes that share a slot. Six of eight
// lanes take part, each with a pointer of its own, so that the address costs one multiplication.
// kPost: entries of the update (row and post), otherwise of the walk (row and weight).
template <int kWide, int kMore, bool kPost>
class NoteReader {
 public:
  __device__ __forceinline__
  NoteReader(void* notes, const int4* heads, const float* decays, const int4* entries)
      : note_(static_cast<RowNote<kMore>*>(notes) + threadIdx.x / kRowLanes / kWide) {
    const bool leads = threadIdx.x / kRowLanes % kWide == 0;
    lane_ = leads ? static_cast<int>(threadIdx.x) % kRowLanes : kRowLanes;
    from_ = lane_ == 0   ? reinterpret_cast<const char*>(heads)
            : lane_ == 1 ? reinterpret_cast<const char*>(decays)
                         : reinterpret_cast<const char*>(entries + (lane_ - 2));
    bytes_ = lane_ == 1 ? sizeof(float) : sizeof(int4);
  }

  __device__ __forceinline__ void start(
      int j, int g, bool valid, const int4& group, int source
  ) const {
    RowNote<kMore>* note = note_ + j * (kSlotGroups / kWide);
    const uint32_t index = static_cast<uint32_t>(lane_ < 2 ? g : group.y);
    const char* from = from_ + static_cast<uint64_t>(index) * bytes_;
    if (lane_ == 2) {
      note->group = group;
    }
    if (lane_ == 3) {
      note->source = source;
    }
    if (!valid) {
      return;
    }
    if (lane_ == 0) {
      copy_async<16>(&note->head, from);
    } else if (lane_ == 1) {
      copy_async<4>(&note->decay, from);
    } else if (lane_ >= 4 && lane_ < 4 + kMore && lane_ - 2 < group.z + group.w) {
      int2* to = note->more + (lane_ - 4);
      if constexpr (kPost) {
        copy_async<4>(&to->x, from);
        copy_async<4>(&to->y, from + offsetof(int4, z));
      } else {
        copy_async<8>(to, from);
      }
    }
  }

  __device__ __forceinline__ auto note(int j) const -> const RowNote<kMore>& {
    return note_[j * (kSlotGroups / kWide)];
  }

 private:
  RowNote<kMore>* note_;
  const char* from_;
  uint32_t bytes_;
  int lane_;  // beyond the group for those that do not lead
};

// Goes through groups [begin, end), with kAhead of them in flight a lane.
//   load(g)                   the place of a group's rows: global loads, used after the next work;
//   fetch(j, g, valid, place) starts the copies into ring and note slot j;
//   work(j, g, valid)         uses them. Whole warps go round together, so that it may shuffle.
template <int kAhead, int kWide, typename Load, typename Fetch, typename Work>
__device__ __forceinline__ void for_groups(
    int begin, int end, const Load& load, const Fetch& fetch, const Work& work
) {
  using Place = decltype(load(0));
  constexpr int kStep = kSlotGroups / kWide;
  constexpr int kRound = kStep * kAhead;
  const int group = static_cast<int>(threadIdx.x) / kRowLanes;
  Place next[kAhead];
  const auto load_round = [&](int first) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int g = first + j * kStep;
      next[j] = load(g < end ? g : 0);
    }
  };
  const auto start = [&](int j, int g) {
    fetch(j, g, g < end, next[j]);
    SlotRing::close();
  };
  int own = begin + group / kWide;
  load_round(own);
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    start(j, own + j * kStep);
  }
  load_round(own + kRound);
  for (int base = begin + group / 4 * 4 / kWide; base < end; base += kRound) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int g = own + j * kStep;
      SlotRing::wait<kAhead - 1>();
      __syncwarp();  // the notes that other lanes fetched
      work(j, g, g < end);
      __syncwarp();  // the note may be overwritten
      start(j, g + kRound);
    }
    own += kRound;
    load_round(own + kRound);  // all at once: loads that trickle in wait for each other
  }
  SlotRing::wait<0>();
}

}  // namespace sdm::cuda
