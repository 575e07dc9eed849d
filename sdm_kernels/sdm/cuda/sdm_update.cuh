// SPDX-License-Identifier: Apache-2.0
//! @file Forward and replay, last stage of a chunk: the written rows of the bank.
//!
//! M[slot] = decay * M[slot] + sum over writes of post * e[token], one rounding, one store: in the
//! bank or, for save="rows" and for a replay, at the end of a log, after a row that is read where
//! it is (sdm_sources.h). Rows that nobody reads are left out of a log. Bytes per chunk and stream:
//! every written row read and stored; 4.3 TB/s in pieces of 512 bytes, 3.5 in pieces of 128 on an
//! H200.
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

// A log, as codes count its rows, and where the rows of a chunk begin.
template <typename S>
struct LogPlace {
  S* rows;
  int first_row;

  __device__ __forceinline__ LogPlace(const SdmChunkParams& p, const StreamChunk& c) {
    const int64_t most = rows_of_chunk(p.dims, p.dims.C);
    if (p.replay_rows != nullptr) {
      rows = static_cast<S*>(p.replay_rows);
      first_row = static_cast<int>((c.stream * (p.window.chunks - 1) + p.k) * most);
    } else {
      rows = log_rows<S>(p, c);
      first_row =
          static_cast<int>(p.sequences[c.sequence].first_row + (p.window.first_chunk + p.k) * most);
    }
  }
};

// kLog: rows go to a log, and errors come from those that the forward saves, if it does.
template <typename S, bool kAligned, int kWide, bool kLog>
__global__ void __launch_bounds__(UpdateShape::kThreads, 1) sdm_update_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  const SlotShare share = SlotShare::of<kWide>(p);
  const StreamChunk c(p, share.stream);
  const bool replay = kLog && p.replay_rows != nullptr;
  // nobody reads what the last chunk leaves
  if (!c.exists || (replay && is_last_chunk(p.sequences[c.sequence], p.window, p.k))) {
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
  const StreamBank bank = replay ? bank_at_start<S>(p, c)
                                 : stream_bank<S>(p.bank, p.sequences[c.sequence].bank, c.head);
  const LaneRows<S, kAligned> rows(bank.rows, bank.stride, at[0]);
  const LogPlace<S> log_place(p, c);
  const LaneRows<S, kAligned> log(kLog ? log_place.rows : nullptr, p.dims.D, at[0]);
  const int* codes = kLog ? p.source_rows + c.q * r.n : nullptr;
  const float* decays = r.group_decay + c.q * r.n;
  const NoteReader<UpdateShape, kWide, true> reader(
      behind + Ring::kBytes, r.head_post + c.q * r.n, entries
  );
  const auto wanted = [&](int i, const SlotPlace& place) {
    return i < count && (!kLog || (place.code & kReadLaterBit) != 0);
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
        const int source = kLog ? source_row(place.code) : -1;
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
        if (kLog && p.errors != nullptr) {
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
        S* to = !kLog           ? rows.at(group.x)
                : p.log.by_slot ? log.at(group.x)
                                : log.at(log_place.first_row + group_at(i));
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          store_lane<S, kAligned>(to + w * kSliceColumns<S>, at[w].count, pack<S>(x[w]));
        }
      }
  );
}

}  // namespace sdm::cuda
