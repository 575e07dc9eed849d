// SPDX-License-Identifier: Apache-2.0
//! @file What the forward and backward chunk loops share: their parameters, the split of the work,
//! and the update of the written rows.
//!
//! A work item is one (stream, slice of 128 bytes of columns); columns never mix, so an item walks
//! all chunks of the window without regard to the others. With fewer items than multiprocessors,
//! group_blocks blocks share an item: tokens and slots are divided among them, token rows exchanged
//! through global memory (group_barrier.cuh). No sum is divided, so the division leaves no trace in
//! the result.
#pragma once

#include <cstddef>

#include "sdm_kernels/cuda/group_barrier.cuh"
#include "sdm_kernels/cuda/row_ring.cuh"
#include "sdm_kernels/sdm/cuda/sdm_product.cuh"

namespace sdm::cuda {

constexpr int kRowGroups = kLoopThreads / kRowLanes;  // rows that a block works on at a time

// Row pieces that a thread keeps in flight: 64 KB a multiprocessor, twice what bandwidth times
// latency asks for.
constexpr int kRingDepth = 8;
using Ring = RowRing<kRingDepth, kLoopThreads>;

// What belongs to a row in flight, or to the lanes of rounds to come: shared by the eight lanes of
// a row. Registers would do, were there more than six scoreboards: a load into a register that is
// still in flight makes the use of older ones wait for it.
struct RowNote {
  int4 head;    // head_post or head_weight of the row's group
  float decay;  // of the group
  int begin;    // its first entry (backward)
  int pad[2];
};

constexpr int kNoteBytes = kRingDepth * kRowGroups * static_cast<int>(sizeof(RowNote));
constexpr int kRecordRounds = 3;  // rounds of lane records at hand: in use, next, arriving
static_assert(kRecordRounds * kRowGroups * kRingDepth * 8 <= kNoteBytes);

// The notes lie behind the ring.
__device__ __forceinline__ RowNote* loop_notes(float* ring) {
  return reinterpret_cast<RowNote*>(reinterpret_cast<char*>(ring) + Ring::kBytes);
}

template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
  }
}

// Starts the fetch of a lane's part of a row into a slot of the ring; a row that is not `valid`
// reads as zeros.
template <typename S, bool kAligned>
__device__ __forceinline__ void fetch_lane(
    const Ring& ring, int slot, const S* lane, int count, bool valid
) {
  if constexpr (kAligned) {
    ring.issue(slot, lane, valid && count > 0);
  } else {
    Piece<S> piece;
    if (valid) {
      piece = load_lane<S, kAligned>(lane, count);
    }
    ring.put(slot, piece.raw);
  }
}

template <typename S>
__device__ __forceinline__ Piece<S> fetched_piece(const Ring& ring, int slot) {
  Piece<S> piece;
  piece.raw = ring.get(slot);
  return piece;
}

struct SdmLoopParams {
  SdmDims dims;
  SdmWindow window;
  int64_t first_k, end_k;        // the part of the window to walk
  const SdmSequence* sequences;  // [N]
  SdmRecords records;
  FloatView v;              // forward
  BankView bank;            // forward: advanced in place; backward: at the end, read
  void* out;                // forward: [B, T, H, D] in v's dtype
  float* errors;            // [B, T, H, D]; forward: written unless null; otherwise read
  SdmSaved saved;           // rows or checkpoints of the forward
  void* replay_rows;        // replay: [N * H][window][rows of a chunk][D]
  FloatView d_out;          // backward
  const int2* source_rows;  // backward: SdmSources::row
  BankView grad;            // backward: gradient of the bank
  void* d_v;                // backward: [B, T, H, D] in d_out's dtype
  SdmDots dots;             // backward
  float* exchange;          // [items][2][Cp][kSliceColumns]
  unsigned* counters;       // [items], zero at launch
  int group_blocks;
  int64_t num_slices;
  bool token_vectors;  // v and out (or d_out and d_v) rows are on 16-byte boundaries
};

struct LoopItem {
  int64_t item, stream, slice, head;
  const SdmSequence* sequence;
  int rank;

  __device__ __forceinline__ explicit LoopItem(const SdmLoopParams& p) {
    item = blockIdx.x / p.group_blocks;
    rank = static_cast<int>(blockIdx.x % p.group_blocks);
    stream = item / p.num_slices;
    slice = item % p.num_slices;
    head = stream % p.dims.H;
    sequence = p.sequences + stream / p.dims.H;
  }

  __device__ __forceinline__ int64_t record(const SdmLoopParams& p, int64_t k) const {
    return (stream / p.dims.H * p.window.chunks + k) * p.dims.H + head;
  }
};

// The row of a token in a contiguous [B, T, H, D] tensor.
__device__ __forceinline__ int64_t
token_row(const SdmDims& dims, const ChunkPlace& place, int64_t i) {
  return ((place.batch * dims.T + place.token + i) * dims.H + place.head) * dims.D;
}

__device__ __forceinline__ int64_t
view_row(const FloatView& view, const ChunkPlace& place, int64_t i) {
  return place.batch * view.stride[0] + (place.token + i) * view.stride[1] +
         place.head * view.stride[2];
}

// Brings rows [0, Cp) of token rows together in every block of an item: each wrote rows
// [own_begin, own_end) of x. `plane` tells apart two exchanges between the same barriers.
template <typename S>
__device__ __forceinline__ void exchange_rows(
    const SdmLoopParams& p,
    const LoopItem& it,
    float* x,
    int own_begin,
    int own_end,
    int plane,
    unsigned* round
) {
  if (p.group_blocks == 1) {
    __syncthreads();
    return;
  }
  constexpr int kColumns = kSliceColumns<S>;
  const int Cp = p.records.Cp;
  float* shared_rows = p.exchange + (it.item * 2 + plane) * Cp * kColumns;
  __syncthreads();
  for (int at = threadIdx.x * 4; at < (own_end - own_begin) * kColumns; at += kLoopThreads * 4) {
    const int row = own_begin + at / kColumns;
    const float4 four = *reinterpret_cast<const float4*>(x + row * kTokenStride<S> + at % kColumns);
    *reinterpret_cast<float4*>(shared_rows + row * kColumns + at % kColumns) = four;
  }
  group_barrier(p.counters + it.item, p.group_blocks, ++*round);
  for (int at = threadIdx.x * 4; at < Cp * kColumns; at += kLoopThreads * 4) {
    const int row = at / kColumns;
    if (row < own_begin || row >= own_end) {
      const float4 four =
          __ldcg(reinterpret_cast<const float4*>(shared_rows + row * kColumns + at % kColumns));
      *reinterpret_cast<float4*>(x + row * kTokenStride<S> + at % kColumns) = four;
    }
  }
  __syncthreads();
}

// All blocks of the item have finished with the bank rows of this chunk.
__device__ __forceinline__ void finish_rows(
    const SdmLoopParams& p, const LoopItem& it, unsigned* round
) {
  if (p.group_blocks == 1) {
    __syncthreads();
  } else {
    group_barrier(p.counters + it.item, p.group_blocks, ++*round);
  }
}

// Rows of the chunk's tokens that this block owns; whole blocks of 16.
__device__ __forceinline__ void own_rows(const SdmLoopParams& p, int rank, int* begin, int* end) {
  const int blocks = p.records.Cp / 16;
  const int per_block = (blocks + p.group_blocks - 1) / p.group_blocks;
  *begin = min(rank * per_block, blocks) * 16;
  *end = min((rank + 1) * per_block, blocks) * 16;
}

// Starts the copies of a group's note. Three of the eight lanes take part, each with a pointer of
// its own, so that the address costs all of them one multiplication.
class NoteReader {
 public:
  __device__ __forceinline__
  NoteReader(RowNote* notes, const int4* heads, const float* decays, const int4* groups)
      : note_(notes + threadIdx.x / kRowLanes) {
    const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
    from_ = lane == 0   ? reinterpret_cast<const char*>(heads)
            : lane == 1 ? reinterpret_cast<const char*>(decays)
                        : reinterpret_cast<const char*>(groups) + offsetof(int4, y);
    bytes_ = lane == 1 ? sizeof(float) : sizeof(int4);
    to_ = lane == 1 ? offsetof(RowNote, decay) : offsetof(RowNote, begin);
  }

  __device__ __forceinline__ void start(int j, int g, bool valid) const {
    const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
    const char* from = from_ + static_cast<uint64_t>(static_cast<uint32_t>(g)) * bytes_;
    RowNote* note = note_ + j * kRowGroups;
    if (valid && lane == 0) {
      copy_async<16>(&note->head, from);
    }
    if (valid && (lane == 1 || lane == 2)) {
      copy_async<4>(reinterpret_cast<char*>(note) + to_, from);
    }
  }

  __device__ const __forceinline__ RowNote& note(int j) const { return note_[j * kRowGroups]; }

 private:
  RowNote* note_;
  const char* from_;
  uint32_t bytes_;
  uint32_t to_;
};

// Goes through groups [begin, end), eight lanes every 64th, with kAhead of them in flight a lane.
//   load(g)                  the place of a group's rows: global loads, used a round later;
//   fetch(j, g, valid, place) starts the copies into ring and note slot j;
//   work(j, g, valid, place)  uses them. Whole warps go round together, so that it may shuffle.
template <int kAhead, typename Load, typename Fetch, typename Work>
__device__ __forceinline__ void for_groups(
    int begin, int end, const Load& load, const Fetch& fetch, const Work& work
) {
  using Place = decltype(load(0));
  constexpr int kRound = kRowGroups * kAhead;
  const int row_group = static_cast<int>(threadIdx.x) / kRowLanes;
  Place place[kAhead], next[kAhead], after[kAhead];
  const auto load_round = [&](Place(&to)[kAhead], int first) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int g = first + j * kRowGroups;
      to[j] = load(g < end ? g : 0);
    }
  };
  const auto start = [&](int j, int g) {
    place[j] = next[j];
    fetch(j, g, g < end, place[j]);
    Ring::close();
  };
  int own = begin + row_group;
  load_round(next, own);
  load_round(after, own + kRound);
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    start(j, own + j * kRowGroups);
  }
  for (int base = begin + row_group / 4 * 4; base < end; base += kRound) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      next[j] = after[j];
    }
    load_round(after, own + 2 * kRound);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int g = own + j * kRowGroups;
      Ring::wait<kAhead - 1>();
      __syncwarp();  // the notes that other lanes fetched
      work(j, g, g < end, place[j]);
      __syncwarp();  // the note may be overwritten
      start(j, g + kRound);
    }
    own += kRound;
  }
  Ring::wait<0>();  // nothing is left in flight for the next user of the ring
}

// M[slot] = decay * M[slot] + sum over writes of post * e[token] for this block's share of the
// written slots; the old rows go to rows [first_row, ...) of `saved_rows` unless that is null, and
// the rest of the chunk's `reserved` rows is zeroed.
template <typename S, bool kAligned>
__device__ __forceinline__ void update_rows(
    const SdmLoopParams& p,
    const LoopItem& it,
    const Ring& ring,
    RowNote* notes,
    int64_t q,
    S* bank,
    const float* errors,
    S* saved_rows,
    int64_t first_row,
    int64_t reserved
) {
  const SdmRecords& r = p.records;
  const int4* groups = r.group + q * r.n;
  const int4* entries = r.entry + q * r.n;
  const int count = r.group_count[q].x;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const LaneRows<S, kAligned> rows(bank, p.bank.stride[2], at);
  const LaneRows<S, kAligned> kept(saved_rows + first_row * p.dims.D, p.dims.D, at);
  const NoteReader reader(notes, r.head_post + q * r.n, r.group_decay + q * r.n, groups);
  const int begin = static_cast<int>(static_cast<int64_t>(count) * it.rank / p.group_blocks);
  const int end = static_cast<int>(static_cast<int64_t>(count) * (it.rank + 1) / p.group_blocks);
  for_groups<kRingDepth>(
      begin,
      end,
      [&](int g) { return __ldg(&groups[g].x); },
      [&](int j, int g, bool valid, int slot) {
        fetch_lane<S, kAligned>(ring, j, rows.at(slot), at.count, valid);
        reader.start(j, g, valid);
      },
      [&](int j, int g, bool valid, int slot) {
        if (!valid) {
          return;
        }
        const Piece<S> row = fetched_piece<S>(ring, j);
        const RowNote& note = reader.note(j);
        const int4 head = note.head;
        const float decay = note.decay;
        if (saved_rows != nullptr) {
          store_lane<S, kAligned>(kept.at(g), at.count, row);
        }
        float x[kVec<S>];
        unpack(row, x);
#pragma unroll
        for (int i = 0; i < kVec<S>; ++i) {
          x[i] *= decay;
        }
        const auto add = [&](int token, int post_bits) {
          float error[kVec<S>];
          load_token<S>(errors + (token & kRowMask) * kTokenStride<S>, error);
          const float post = __int_as_float(post_bits);
#pragma unroll
          for (int i = 0; i < kVec<S>; ++i) {
            x[i] = fmaf(post, error[i], x[i]);
          }
        };
        add(head.x, head.y);
        if ((head.x & kSecondBit) != 0) {
          add(head.z, head.w);
        }
        if ((head.x & kMoreBit) != 0) {
          const int4 group = __ldg(groups + g);
#pragma unroll 1
          for (int k = 2; k < group.z; ++k) {
            const int4 e = __ldg(entries + group.y + k);
            add(e.x, e.z);
          }
        }
        store_lane<S, kAligned>(rows.at(slot), at.count, pack<S>(x));
      }
  );
  if (saved_rows != nullptr && it.rank == 0) {
    for (int64_t g = count + threadIdx.x / kRowLanes; g < reserved; g += kRowGroups) {
      store_lane<S, kAligned>(kept.at(static_cast<int>(g)), at.count, Piece<S>());
    }
  }
}

}  // namespace sdm::cuda
