// SPDX-License-Identifier: Apache-2.0
//! @file Forward and replay, last stage of a chunk: the written rows of the bank.
//!
//! M[slot] = decay * M[slot] + sum over writes of post * e[token], one rounding, one store. The
//! forward works in the bank, and with save="rows" keeps the old rows first. A replay has no bank
//! of its own: it reads a row where it is (sdm_sources.h), appends it to a log, and leaves out
//! those that nobody reads. Bytes per chunk and stream: every written row read and stored, in the
//! forward stored once more where it is kept; 4.3 TB/s in pieces of 512 bytes, 3.5 in pieces of 128
//! on an H200.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_slots.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sources.h"

namespace sdm::cuda {

struct UpdateShape {
  static constexpr int kThreads = 512;
  static constexpr int kAhead = 4;
  static constexpr int kRows = 1;
  static constexpr int kMore = 1;
  static constexpr int kWidest = 2;
  static constexpr bool kHalves = false;
};

// Where the rows of a chunk are kept: old ones by the forward, new ones by a replay.
struct KeptRows {
  void* rows;  // null: not kept
  int64_t first_row;
  int64_t reserved;  // of them, the rest is zeroed; 0: left
};

__device__ __forceinline__ KeptRows kept_rows(const SdmChunkParams& p, const StreamChunk& c) {
  const int64_t most = rows_of_chunk(p.dims, p.dims.C);
  if (p.replay_rows != nullptr) {
    return {p.replay_rows, (c.stream * (p.window.chunks - 1) + p.k) * most, 0};
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
__global__ void __launch_bounds__(UpdateShape::kThreads, 1) sdm_update_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  const SlotShare share = SlotShare::of<kWide>(p);
  const StreamChunk c(p, share.stream);
  // nobody reads what the last chunk leaves
  if (!c.exists || (kReplay && is_last_chunk(p.sequences[c.sequence], p.window, p.k))) {
    wait_for_previous();
    return;
  }
  const SdmRecords& r = p.records;
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  LaneColumns at[kWide];
  share.columns<S>(p.dims.D, at);
  using Tokens = SlotTokens<S, UpdateShape, kWide>;
  const Tokens errors(smem, r.Cp);
  char* behind = reinterpret_cast<char*>(smem) + Tokens::bytes(r.Cp);
  using Ring = SlotRing<UpdateShape, kWide>;
  const Ring ring(behind);
  const int4* groups = r.group + c.q * r.n;
  const int4* entries = r.entry + c.q * r.n;
  const int count = r.group_count[c.q].x;
  const StreamBank bank = kReplay ? bank_at_start<S>(p, c)
                                  : stream_bank<S>(p.bank, p.sequences[c.sequence].bank, c.head);
  const LaneRows<S, kAligned> rows(bank.rows, bank.stride, at[0]);
  const KeptRows keep = kept_rows(p, c);
  const LaneRows<S, kAligned> kept(
      static_cast<const S*>(keep.rows) + keep.first_row * p.dims.D, p.dims.D, at[0]
  );
  const LaneRows<S, kAligned> log(p.replay_rows, p.dims.D, at[0]);
  const int* codes = kReplay ? p.source_rows + c.q * r.n : nullptr;
  const float* decays = r.group_decay + c.q * r.n;
  const NoteReader<UpdateShape, kWide, true> reader(
      behind + Ring::kBytes, r.head_post + c.q * r.n, entries
  );
  const auto wanted = [&](int i, const SlotPlace& place) {
    return i < count && (!kReplay || (place.code & kReadLaterBit) != 0);
  };
  // the gather ends with high slots: L2 has them
  const auto group_at = [&](int i) { return count - 1 - i; };
  const PlaceReader<UpdateShape> places(
      behind + Ring::kBytes +
          kSlotsAhead<UpdateShape, kWide> * kSlotsAtOnce<UpdateShape> *
              sizeof(RowNote<UpdateShape::kMore>),
      groups,
      decays,
      codes
  );
  for_groups<UpdateShape, kWide>(
      share.part,
      p.parts,
      count,
      places,
      group_at,
      [&](int j, int i, const SlotPlace& place) {
        const int source = kReplay ? source_row(place.code) : -1;
        const S* from = source >= 0 ? log.at(source) : rows.at(place.group.x);
        fetch_slices<S, kAligned>(ring, j * kWide, from, at, wanted(i, place));
      },
      [&](int j, int i, const SlotPlace& place) {
        SlotPlace writes = place;
        writes.group.w = 0;
        reader.start(j, group_at(i), wanted(i, place), writes, wanted(i, place));
      },
      [&]() {
        const auto fill = [&](const float* from, const auto& row_of) {
          errors.template fill<UpdateShape::kThreads>(
              float_rows(from), row_of, num_tokens, at, kAligned, 0
          );
        };
        if constexpr (kReplay) {
          fill(p.errors, [&](int i) { return token_row(p.dims, c.place, i); });
        } else {
          fill(p.x, [&](int i) { return c.scratch(p) + i * p.dims.D; });
        }
        __syncthreads();  // errors are complete
      },
      [&](int j, int i, const auto& refill) {
        const auto& note = reader.note(j);
        const bool live = i < count && note.source != 0;
        Piece<S> row[kWide];
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          row[w] = fetched_piece<S>(ring, j * kWide + w);
        }
        const int4 head = note.head;
        const float decay = note.decay;
        const int4 group = note.group;
        refill();
        if (!live) {
          return;
        }
        if (!kReplay && keep.rows != nullptr) {
          S* to = kept.at(group_at(i));
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
            store_lane<S, kAligned>(to + w * kSliceColumns<S>, at[w].count, row[w]);
          }
        }
        float x[kWide][kVec<S>];
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          unpack(row[w], x[w]);
#pragma unroll
          for (int c = 0; c < kVec<S>; ++c) {
            x[w][c] *= decay;
          }
        }
        const auto add = [&](int token, int post_bits) {
          token &= kRowMask;
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
            float error[kVec<S>];
            errors.load(token, w, error);
            const float post = __int_as_float(post_bits) * errors.scale(token, w);
#pragma unroll
            for (int c = 0; c < kVec<S>; ++c) {
              x[w][c] = fmaf(post, error[c], x[w][c]);
            }
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
        S* to = kReplay ? kept.at(group_at(i)) : rows.at(group.x);
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          store_lane<S, kAligned>(to + w * kSliceColumns<S>, at[w].count, pack<S>(x[w]));
        }
      }
  );
  if (!kReplay && keep.rows != nullptr && share.part == 0) {
    for (int64_t g = count + threadIdx.x / kRowLanes; g < keep.reserved;
         g += kSlotsAtOnce<UpdateShape>) {
      S* to = kept.at(static_cast<int>(g));
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        store_lane<S, kAligned>(to + w * kSliceColumns<S>, at[w].count, Piece<S>());
      }
    }
  }
}

}  // namespace sdm::cuda
