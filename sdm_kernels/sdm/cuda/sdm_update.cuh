// SPDX-License-Identifier: Apache-2.0
//! @file Forward and replay, last stage of a chunk: the written rows of the bank.
//!
//! M[slot] = decay * M[slot] + sum over writes of post * e[token], one rounding, one store. With
//! save="rows" and in a replay the old rows are kept first. Bytes per chunk and stream: every
//! written row read and stored, and stored once more where it is kept; 4.3 TB/s in pieces of 512
//! bytes, 3.5 in pieces of 128 on an H200.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_slots.cuh"

namespace sdm::cuda {

// Slots in flight; their notes leave room on cards with 99 KB of shared memory a block.
struct UpdateShape {
  static constexpr int kAhead = kRingDepth;
  static constexpr int kMore = 1;
};

// Where the rows of a chunk are kept.
struct KeptRows {
  void* rows;  // null: not kept
  int64_t first_row;
  int64_t reserved;  // of them, the rest is zeroed; 0: left
};

__device__ __forceinline__ KeptRows kept_rows(const SdmChunkParams& p, const StreamChunk& c) {
  const int64_t most = rows_of_chunk(p.dims, p.dims.C);
  if (p.replay_rows != nullptr) {
    return {p.replay_rows, (c.stream * p.window.chunks + p.k) * most, 0};
  }
  if (p.saved.mode != SdmSave::kRows) {
    return {nullptr, 0, 0};
  }
  const int64_t first = c.head * p.saved.rows_per_head + p.sequences[c.sequence].first_row +
                        (p.window.first_chunk + p.k) * most;
  return {p.saved.rows, first, rows_of_chunk(p.dims, c.place.num_tokens)};
}

// kReplay: errors come from those that the forward saved.
template <typename S, bool kAligned, int kWide, bool kReplay>
__global__ void __launch_bounds__(kSlotThreads, 1) sdm_update_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  const SlotShare share = SlotShare::of<kWide>(p);
  const StreamChunk c(p, share.stream);
  // a replay stops before the last chunk, whose rows the walk then finds in the bank
  if (!c.exists || (kReplay && is_last_chunk(p.sequences[c.sequence], p.window, p.k))) {
    return;
  }
  const SdmRecords& r = p.records;
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  const LaneColumns at = lane_columns<S>(share.slice, p.dims.D);
  if constexpr (kReplay) {
    const auto row_of = [&](int i) { return token_row(p.dims, c.place, i); };
    load_tokens<S, kWide>(float_rows(p.errors), row_of, num_tokens, at, kAligned, smem);
  } else {
    const auto row_of = [&](int i) { return c.scratch(p) + i * p.dims.D; };
    load_tokens<S, kWide>(float_rows(p.x), row_of, num_tokens, at, kAligned, smem);
  }
  __syncthreads();  // errors are complete

  const float* errors = smem + threadIdx.x / kRowLanes % kWide * kSliceColumns<S>;
  char* behind = reinterpret_cast<char*>(smem + r.Cp * kTokenStride<S, kWide>);
  const SlotRing ring(behind);
  const int4* groups = r.group + c.q * r.n;
  const int4* entries = r.entry + c.q * r.n;
  const int count = r.group_count[c.q].x;
  // a replay has banks of its own for the sequences of its group
  const int64_t bank_row = kReplay ? c.sequence : p.sequences[c.sequence].bank;
  S* bank = static_cast<S*>(p.bank.data) + bank_row * p.bank.stride[0] + c.head * p.bank.stride[1];
  const LaneRows<S, kAligned> rows(bank, p.bank.stride[2], at);
  const KeptRows keep = kept_rows(p, c);
  const LaneRows<S, kAligned> kept(
      static_cast<const S*>(keep.rows) + keep.first_row * p.dims.D, p.dims.D, at
  );
  const NoteReader<kWide, UpdateShape::kMore, true> reader(
      behind + SlotRing::kBytes, r.head_post + c.q * r.n, r.group_decay + c.q * r.n, entries
  );
  for_groups<UpdateShape::kAhead, kWide>(
      share.begin(p, count),
      share.end(p, count),
      [&](int g) { return __ldg(groups + g); },
      [&](int j, int g, bool valid, const int4& group) {
        fetch_lane<S, kAligned>(ring, j, rows.at(group.x), at.count, valid);
        reader.start(j, g, valid, make_int4(group.x, group.y, group.z, 0), 0);
      },
      [&](int j, int g, bool valid) {
        if (!valid) {
          return;
        }
        const Piece<S> row = fetched_piece<S>(ring, j);
        const auto& note = reader.note(j);
        const int4 head = note.head;
        const float decay = note.decay;
        const int4 group = note.group;
        if (keep.rows != nullptr) {
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
          load_token<S>(errors + (token & kRowMask) * kTokenStride<S, kWide>, error);
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
#pragma unroll 1
          for (int k = 2; k < group.z; ++k) {
            int2 entry;
            if (k < 2 + UpdateShape::kMore) {
              entry = note.more[k - 2];
            } else {
              const int4 e = __ldg(entries + group.y + k);
              entry = make_int2(e.x, e.z);
            }
            add(entry.x, entry.y);
          }
        }
        store_lane<S, kAligned>(rows.at(group.x), at.count, pack<S>(x));
      }
  );
  if (keep.rows != nullptr && share.part == 0) {
    for (int64_t g = count + threadIdx.x / kRowLanes / kWide; g < keep.reserved;
         g += kSlotGroups / kWide) {
      store_lane<S, kAligned>(kept.at(static_cast<int>(g)), at.count, Piece<S>());
    }
  }
}

}  // namespace sdm::cuda
