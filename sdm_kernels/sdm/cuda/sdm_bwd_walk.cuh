// SPDX-License-Identifier: Apache-2.0
//! @file Backward, last stage of a chunk: every touched slot once.
//!
//! The gradient of the bank goes from the chunk's end to its start, and the dots <dv, M>, <dy, M>,
//! <G, M> are taken with the bank's row as it was at the chunk's start, read where it is kept
//! (sdm_sources.h). The gradient is kept in the bank's type: a touched row is rounded once a chunk.
//! Bytes per chunk and stream: two rows read and one stored for every touched slot; 4.4 TB/s in
//! pieces of 512 bytes, 3.7 in pieces of 128 on an H200.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_save.cuh"
#include "sdm_kernels/sdm/cuda/sdm_slots.cuh"

namespace sdm::cuda {

// Sums of four values over eight lanes: v[0] of lanes 0 and 1, v[1] of lanes 2 and 3, and so on.
__device__ __forceinline__ float four_sums(const float (&v)[4], int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  const bool high = (lane & 4) != 0, odd = (lane & 2) != 0;
  const float a = (high ? v[2] : v[0]) + __shfl_xor_sync(kAll, high ? v[0] : v[2], 4);
  const float b = (high ? v[3] : v[1]) + __shfl_xor_sync(kAll, high ? v[1] : v[3], 4);
  const float c = (odd ? b : a) + __shfl_xor_sync(kAll, odd ? a : b, 2);
  return c + __shfl_xor_sync(kAll, c, 1);
}

struct WalkShape {
  static constexpr int kAhead = kRingDepth / 2;  // slots in flight, two rows each
  static constexpr int kMore = 3;
};

struct Place {
  int4 group;  // {slot, first entry, writes, reads}
  int source;  // SdmSources
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
__global__ void __launch_bounds__(kSlotThreads, 1) sdm_bwd_walk_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  const SlotShare share = SlotShare::of<kWide>(p);
  const StreamChunk c(p, share.stream);
  if (!c.exists) {
    return;
  }
  const SdmRecords& r = p.records;
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  const LaneColumns at = lane_columns<S>(share.slice, p.dims.D);
  // rows of dv, behind them those of dy
  {
    const auto dv_row = [&](int i) { return (c.q * p.dims.C + i) * p.dims.D; };
    load_tokens<S, kWide>(float_rows(p.dots.d_v), dv_row, num_tokens, at, kAligned, smem);
    const auto dy_row = [&](int i) { return view_row(p.d_out, c.place, i); };
    load_tokens<S, kWide>(
        p.d_out, dy_row, num_tokens, at, p.token_vectors, smem + r.Cp * kTokenStride<S, kWide>
    );
  }
  __syncthreads();  // both are complete

  const float* x = smem + threadIdx.x / kRowLanes % kWide * kSliceColumns<S>;
  char* end_of_rows = reinterpret_cast<char*>(smem + 2 * r.Cp * kTokenStride<S, kWide>);
  const SlotRing ring(end_of_rows);
  const int4* groups = r.group + c.q * r.n;
  const int* sources = p.source_rows + c.q * r.n;
  const int4* entries = r.entry + c.q * r.n;
  const bool inside = share.slice < p.num_slices;
  const int64_t plane = ((inside ? share.slice : 0) * r.num_q + c.q) * r.n;
  float* dot_row = p.dots.row + plane;
  float* dot_decay = p.dots.decay + plane;
  const int written = r.group_count[c.q].x;
  const int count = r.group_count[c.q].y;
  const int64_t row_bytes = walk_row_bytes<S>(p.saved.mode, p.dims.D);
  const SdmSaved saved = walk_rows(p, c, row_bytes);
  const S* bank = static_cast<const S*>(p.bank.data) + c.sequence * p.bank.stride[0] +
                  c.head * p.bank.stride[1];
  S* grad =
      static_cast<S*>(p.grad.data) + c.sequence * p.grad.stride[0] + c.head * p.grad.stride[1];
  const LaneRows<S, kAligned> grads(grad, p.grad.stride[2], at);
  const LaneRows<S, kAligned> at_end(bank, p.bank.stride[2], at);
  const LaneRows<S, kAligned> kept(kExact ? saved.rows : nullptr, p.dims.D, at);
  const NoteReader<kWide, WalkShape::kMore, false> reader(
      end_of_rows + SlotRing::kBytes, r.head_weight + c.q * r.n, r.group_decay + c.q * r.n, entries
  );
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  // rows of dy follow those of dv; entries count them from C
  const int C = static_cast<int>(p.dims.C);
  const int behind = r.Cp - C;
  // lane 0 stores <G, M>, lanes 2 and 4 the dots of the first two entries
  float* lane_dots = lane == 0 ? dot_decay : dot_row + lane / 4;

  for_groups<WalkShape::kAhead, kWide>(
      share.begin(p, count),
      share.end(p, count),
      [&](int g) { return Place{__ldg(groups + g), __ldg(sources + g)}; },
      [&](int j, int g, bool valid, const Place& place) {
        const int slot = place.group.x, source = place.source;
        fetch_lane<S, kAligned>(ring, 2 * j, grads.at(slot), at.count, valid);
        if (kExact || source < 0) {
          const S* from = kExact && source >= 0 ? kept.at(source) : at_end.at(slot);
          fetch_lane<S, kAligned>(ring, 2 * j + 1, from, at.count, valid);
        }
        reader.start(j, g, valid, place.group, source);
      },
      [&](int j, int g, bool valid) {
        const auto& note = reader.note(j);
        const int4 head = valid ? note.head : make_int4(C, 0, 0, 0);
        const int4 group = note.group;
        const float decay = note.decay;
        float grad_x[kVec<S>], m[kVec<S>];
        unpack(fetched_piece<S>(ring, 2 * j), grad_x);
        Piece<S> m_row = fetched_piece<S>(ring, 2 * j + 1);
        if constexpr (!kExact) {
          if (valid && note.source >= 0) {
            m_row = load_saved_piece<S, kAligned>(saved, row_bytes, note.source, at);
          }
        }
        unpack(m_row, m);
        // <G, M>, and the dots of the first two entries
        float dots[4] = {};
#pragma unroll
        for (int c = 0; c < kVec<S>; ++c) {
          dots[0] = fmaf(grad_x[c], m[c], dots[0]);
          grad_x[c] *= decay;
        }
        // a write takes dv with its weight turned round, a read dy
        const auto add = [&](bool write, int row, float weight, float* dot) {
          float token[kVec<S>];
          load_token<S>(x + (row + (write ? 0 : behind)) * kTokenStride<S, kWide>, token);
          const float signed_weight = write ? -weight : weight;
#pragma unroll
          for (int c = 0; c < kVec<S>; ++c) {
            grad_x[c] = fmaf(signed_weight, token[c], grad_x[c]);
            *dot = fmaf(token[c], m[c], *dot);
          }
        };
        const bool second = (head.x & kSecondBit) != 0;
        add((head.x & kOwnerBit) != 0, head.x & kRowMask, __int_as_float(head.y), &dots[1]);
        if (second) {
          add((head.z & kOwnerBit) != 0, head.z & kRowMask, __int_as_float(head.w), &dots[2]);
        }
        const float sum = four_sums(dots, lane);
        if (valid && inside && (lane == 2 || (lane == 0 && g < written) || (lane == 4 && second))) {
          lane_dots[lane == 0 ? g : group.y] = sum;
        }
        const int count_here = (head.x & kMoreBit) != 0 ? group.z + group.w : 0;
#pragma unroll 1
        for (int k = 2; __any_sync(0xffffffffu, k < count_here); ++k) {
          float one[4] = {};
          if (k < count_here) {
            int2 entry;
            if (k < 2 + WalkShape::kMore) {
              entry = note.more[k - 2];
            } else {
              const int4 e = __ldg(entries + group.y + k);
              entry = make_int2(e.x, e.y);
            }
            add(k < group.z, entry.x & kRowMask, __int_as_float(entry.y), &one[0]);
          }
          const float total = four_sums(one, lane);
          if (inside && lane == 0 && k < count_here) {
            dot_row[group.y + k] = total;
          }
        }
        if (valid) {
          store_lane<S, kAligned>(grads.at(group.x), at.count, pack<S>(grad_x));
        }
      }
  );
}

}  // namespace sdm::cuda
