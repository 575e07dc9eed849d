// SPDX-License-Identifier: Apache-2.0
//! @file Backward, last stage of a chunk: every touched slot once.
//!
//! The gradient of the bank goes from the chunk's end to its start, and the dots <dv, M>, <dy, M>,
//! <G, M> are taken with the bank's row as it was at the chunk's start, read where it is kept
//! (sdm_sources.h). The gradient is kept in the bank's type: a touched row is rounded once a chunk.
//! Bytes per chunk and stream: two rows read and one stored for every touched slot, one read where
//! no later chunk touches it; 4.4 TB/s in pieces of 512 bytes, 3.7 in pieces of 128 on an H200.
//! Long rows of 16-bit banks are walked by sdm_bwd_rows.cuh.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_save.cuh"
#include "sdm_kernels/sdm/cuda/sdm_slots.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sources.h"

namespace sdm::cuda {

struct WalkShape {
  static constexpr int kThreads = 512;
  static constexpr int kAhead = 4;
  static constexpr int kRows = 2;
  static constexpr int kMore = 3;
  static constexpr int kWidest = 2;
  static constexpr bool kHalves = true;
};

// Saved rows as the walk reads them: replayed, or the head's own.
__device__ __forceinline__ SdmSaved
walk_rows(const SdmChunkParams& p, const StreamChunk& c, int64_t row_bytes) {
  SdmSaved saved = p.saved;
  if (saved.mode == SdmSave::kReplay) {
    saved.mode = SdmSave::kRows;
    saved.rows = p.replay_rows;
    return saved;
  }
  const int64_t first = c.head * saved.rows_per_head;
  saved.rows = static_cast<char*>(saved.rows) + first * row_bytes;
  if (saved.scales != nullptr) {
    saved.scales += first;
  }
  return saved;
}

template <typename S>
__device__ __forceinline__ int64_t walk_row_bytes(SdmSave mode, int64_t D) {
  switch (mode) {
    case SdmSave::kBf16:
      return D * 2;
    case SdmSave::kFp8:
      return D;
    case SdmSave::kInt4:
      return ceil_div(D, 2);
    default:
      return D * static_cast<int64_t>(sizeof(S));
  }
}

// kExact: rows were saved as they are, or are replayed.
template <typename S, bool kAligned, int kWide, bool kExact>
__global__ void __launch_bounds__(WalkShape::kThreads, 1) sdm_bwd_walk_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  const SlotShare share = SlotShare::of<kWide>(p);
  const StreamChunk c(p, share.stream);
  if (!c.exists) {
    wait_for_previous();
    return;
  }
  const SdmRecords& r = p.records;
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  LaneColumns at[kWide];
  share.columns<S>(p.dims.D, at);
  using Tokens = SlotTokens<S, WalkShape, kWide>;
  const Tokens tokens(smem, 2 * r.Cp);  // dv, behind them dy
  char* end_of_rows = reinterpret_cast<char*>(smem) + Tokens::bytes(2 * r.Cp);
  using Ring = SlotRing<WalkShape, kWide>;
  const Ring ring(end_of_rows);
  const int4* groups = r.group + c.q * r.n;
  const int* codes = p.source_rows + c.q * r.n;
  const int4* entries = r.entry + c.q * r.n;
  const int written = r.group_count[c.q].x;
  const int count = r.group_count[c.q].y;
  const int64_t row_bytes = walk_row_bytes<S>(p.saved.mode, p.dims.D);
  const SdmSaved saved = walk_rows(p, c, row_bytes);
  const StreamBank bank = p.saved.mode == SdmSave::kReplay
                              ? bank_at_start<S>(p, c)
                              : stream_bank<S>(p.bank, c.sequence, c.head);
  S* grad =
      static_cast<S*>(p.grad.data) + c.sequence * p.grad.stride[0] + c.head * p.grad.stride[1];
  const LaneRows<S, kAligned> grads(grad, p.grad.stride[2], at[0]);
  const LaneRows<S, kAligned> not_kept(bank.rows, bank.stride, at[0]);
  const LaneRows<S, kAligned> kept(kExact ? saved.rows : nullptr, p.dims.D, at[0]);
  const float* decays = r.group_decay + c.q * r.n;
  const NoteReader<WalkShape, kWide, false> reader(
      end_of_rows + Ring::kBytes, r.head_weight + c.q * r.n, entries
  );
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  // rows of dy follow those of dv; entries count them from C
  const int C = static_cast<int>(p.dims.C);
  const int behind = r.Cp - C;
  // Dots lie in the lanes as transpose_sum() leaves them: <G, M> of each slice, then those of the
  // first two entries.
  constexpr int kDots = 4 * kWide;
  const int my_dot = lane * kDots / kRowLanes / kWide, my_slice = lane * kDots / kRowLanes % kWide;
  const auto plane = [&](int slice) {
    const bool inside = share.slice + slice < p.num_slices;
    return ((inside ? share.slice + slice : 0) * r.num_q + c.q) * r.n;
  };
  const bool stores = lane * kDots % kRowLanes == 0 && share.slice + my_slice < p.num_slices;
  float* lane_dots =
      my_dot == 0 ? p.dots.decay + plane(my_slice) : p.dots.row + plane(my_slice) + my_dot - 1;
  // one dot of each slice
  const int its_slice = lane * kWide / kRowLanes;
  const bool stores_one = lane * kWide % kRowLanes == 0 && share.slice + its_slice < p.num_slices;
  float* one_dot = p.dots.row + plane(its_slice);

  // downwards: the gather of gradients ended with high slots, the next begins with low ones
  const auto group_at = [&](int i) { return (i < written ? written : written + count) - 1 - i; };
  const PlaceReader<WalkShape> places(
      end_of_rows + Ring::kBytes +
          kSlotsAhead<WalkShape, kWide> * kSlotsAtOnce<WalkShape> *
              sizeof(RowNote<WalkShape::kMore>),
      groups,
      decays,
      codes
  );
  for_groups<WalkShape, kWide>(
      share.part,
      p.parts,
      count,
      places,
      group_at,
      [&](int j, int i, const SlotPlace& place) {
        const int slot = place.group.x, source = source_row(place.code);
        const bool zero = (place.code & kUntouchedBit) != 0;
        const int at_ring = j * 2 * kWide;
        fetch_slices<S, kAligned>(ring, at_ring, grads.at(slot), at, i < count && !zero);
        if (kExact || source < 0) {
          const S* from = kExact && source >= 0 ? kept.at(source) : not_kept.at(slot);
          fetch_slices<S, kAligned>(ring, at_ring + kWide, from, at, i < count);
        }
      },
      [&](int j, int i, const SlotPlace& place) {
        reader.start(j, group_at(i), i < count, place, source_row(place.code));
      },
      [&]() {
        tokens.template fill<WalkShape::kThreads>(
            float_rows(p.dots.d_v),
            [&](int i) { return (c.q * p.dims.C + i) * p.dims.D; },
            num_tokens,
            at,
            kAligned,
            0
        );
        tokens.template fill<WalkShape::kThreads>(
            p.d_out,
            [&](int i) { return view_row(p.d_out, c.place, i); },
            num_tokens,
            at,
            p.token_vectors,
            r.Cp
        );
        __syncthreads();  // both are complete
      },
      [&](int j, int i, const auto& refill) {
        const bool valid = i < count;
        const auto& note = reader.note(j);
        const int4 head = valid ? note.head : make_int4(C, 0, 0, 0);
        const int4 group = note.group;
        const float decay = note.decay;
        Piece<S> g_row[kWide], m_row[kWide];
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          g_row[w] = fetched_piece<S>(ring, j * 2 * kWide + w);
          m_row[w] = fetched_piece<S>(ring, j * 2 * kWide + kWide + w);
          if constexpr (!kExact) {
            if (valid && note.source >= 0) {
              m_row[w] = load_saved_piece<S, kAligned>(saved, row_bytes, note.source, at[w]);
            }
          }
        }
        refill();
        float grad_x[kWide][kVec<S>], m[kWide][kVec<S>];
        float dots[kDots] = {};
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          unpack(g_row[w], grad_x[w]);
          unpack(m_row[w], m[w]);
#pragma unroll
          for (int c = 0; c < kVec<S>; ++c) {
            dots[w] = fmaf(grad_x[w][c], m[w][c], dots[w]);
            grad_x[w][c] *= decay;
          }
        }
        // a write takes dv with its weight turned round, a read dy
        const auto add = [&](bool write, int row, float weight, float* dot) {
          row += write ? 0 : behind;
          const float signed_weight = write ? -weight : weight;
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
            float token[kVec<S>];
            tokens.load(row, w, token);
            const float scale = tokens.scale(row, w), factor = signed_weight * scale;
            float part = 0.0f;
#pragma unroll
            for (int c = 0; c < kVec<S>; ++c) {
              grad_x[w][c] = fmaf(factor, token[c], grad_x[w][c]);
              part = fmaf(token[c], m[w][c], part);
            }
            dot[w] = part * scale;
          }
        };
        const bool second = (head.x & kSecondBit) != 0;
        add((head.x & kOwnerBit) != 0, head.x & kRowMask, __int_as_float(head.y), dots + kWide);
        if (second) {
          add(
              (head.z & kOwnerBit) != 0, head.z & kRowMask, __int_as_float(head.w), dots + 2 * kWide
          );
        }
        const float sum = transpose_sum(dots, lane);
        if (valid && stores &&
            (my_dot == 1 || (my_dot == 0 && group.z > 0) || (my_dot == 2 && second))) {
          lane_dots[my_dot == 0 ? group_at(i) : group.y] = sum;
        }
        const int count_here = (head.x & kMoreBit) != 0 ? group.z + group.w : 0;
#pragma unroll 1
        for (int k = 2; __any_sync(0xffffffffu, k < count_here); ++k) {
          float one[kWide] = {};
          if (k < count_here) {
            int2 entry;
            if (k < 2 + WalkShape::kMore) {
              entry = note.more[k - 2];
            } else {
              const int4 e = __ldg(entries + group.y + k);
              entry = make_int2(e.x, e.y);
            }
            add(k < group.z, entry.x & kRowMask, __int_as_float(entry.y), one);
          }
          const float total = transpose_sum(one, lane);
          if (stores_one && k < count_here) {
            one_dot[group.y + k] = total;
          }
        }
        if (valid) {
          S* to = grads.at(group.x);
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
            store_lane<S, kAligned>(to + w * kSliceColumns<S>, at[w].count, pack<S>(grad_x[w]));
          }
        }
      }
  );
}

}  // namespace sdm::cuda
