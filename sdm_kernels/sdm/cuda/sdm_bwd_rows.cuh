// SPDX-License-Identifier: Apache-2.0
//! @file Backward, last stage of a chunk, where rows are long: sdm_bwd_walk.cuh by whole rows.
//!
//! A warp takes a slot and up to 1024 columns of it, so that a row is touched in one run of 2 KB.
//! All that it reads comes as rows: those of the bank and of its gradient from memory, those of the
//! slot's tokens from L2 (sdm_token_record.cuh). They pass one after the other through a ring of
//! asynchronous copies of the warp's own, so that the copies in flight do not depend on how many
//! entries a slot has, and nothing is shared but L2. What belongs to a slot beside its rows comes
//! ahead of them, by four slots at a time.
//!
//! Bytes per chunk and stream: those of sdm_bwd_walk.cuh, and a row from L2 for every entry.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_bwd_walk.cuh"
#include "sdm_kernels/sdm/cuda/sdm_token_record.cuh"

namespace sdm::cuda {

// kPieces: of 16 bytes a lane and row.
template <int kPieces>
struct RowWalk {
  static constexpr int kWarps = kPieces > 2 ? 16 : kPieces > 1 ? 24 : 32;  // most of a block
  static constexpr int kDepth = 6;                                         // rows in flight a warp
  static constexpr int kRowBytes = kPieces * 512;
  static constexpr int kTogether = 4;  // slots whose notes come together
  static constexpr int kNotes = 4 * kTogether;
  static constexpr int kMore = 4;  // entries of a note beyond the first two

  struct alignas(16) Note {
    int4 group;  // {slot, first entry, writes, reads}
    int4 head;   // head_weight
    float decay;
    int code;  // sdm_sources.h
    int2 more[kMore];
  };

  static constexpr int kScaleBytes = 128;
  static constexpr int64_t kWarpBytes =
      kDepth * (kRowBytes + kScaleBytes) + kNotes * int64_t{sizeof(Note)};
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

template <typename S, int kPieces>
__global__ void __launch_bounds__(RowWalk<kPieces>::kWarps * 32, 1) sdm_bwd_rows_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) char rows_smem[];
  using Walk = RowWalk<kPieces>;
  using Note = typename Walk::Note;
  constexpr int kDepth = Walk::kDepth, kRowBytes = Walk::kRowBytes;
  const RowTiles cut(p.dims.D);
  const int part = static_cast<int>(blockIdx.x % p.parts);
  const int tile = static_cast<int>(blockIdx.x / p.parts % cut.tiles);
  const StreamChunk c(p, blockIdx.x / (static_cast<unsigned>(p.parts) * cut.tiles));
  if (!c.exists) {
    wait_for_previous();
    return;
  }
  const SdmRecords& r = p.records;
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  char* const memory = rows_smem + warp * Walk::kWarpBytes;
  char* const ring = memory + lane * 16;
  char* const scale_ring = memory + kDepth * kRowBytes + lane * 4;
  Note* const notes = reinterpret_cast<Note*>(memory + kDepth * (kRowBytes + Walk::kScaleBytes));

  // pieces of this lane
  const int64_t first_piece = static_cast<int64_t>(tile) * cut.pieces + lane;
  const int64_t end_piece = min(static_cast<int64_t>(tile + 1) * cut.pieces, p.dims.D / 8);
  const int own =
      first_piece < end_piece ? static_cast<int>((end_piece - first_piece + 31) / 32) : 0;
  const LaneColumns at = {first_piece * 8, 8};
  const int64_t row_bytes = p.dims.D * 2;
  const SdmSaved saved = walk_rows(p, c, row_bytes);
  const StreamBank bank = p.saved.mode == SdmSave::kReplay
                              ? bank_at_start<S>(p, c)
                              : stream_bank<S>(p.bank, c.sequence, c.head);
  S* grad =
      static_cast<S*>(p.grad.data) + c.sequence * p.grad.stride[0] + c.head * p.grad.stride[1];
  const LaneRows<S, true> grads(grad, p.grad.stride[2], at);
  const LaneRows<S, true> not_kept(bank.rows, bank.stride, at);
  const LaneRows<S, true> kept(saved.rows, p.dims.D, at);
  const TokenRecord record(p, c.stream);
  const LaneRows<S, true> tokens(record.halves, p.dims.D, at);
  const uint8_t* scales = record.scales + tile * 128 + lane * 4;
  const uint32_t own_scales = own < 4 ? (1u << 8 * own) - 1 : ~0u;  // the others are not written
  const int4* groups = r.group + c.q * r.n;
  const int4* heads = r.head_weight + c.q * r.n;
  const int4* entries = r.entry + c.q * r.n;
  const float* decays = r.group_decay + c.q * r.n;
  const int* codes = p.source_rows + c.q * r.n;
  const int written = r.group_count[c.q].x;
  const int count = r.group_count[c.q].y;
  const int64_t plane = (tile * r.num_q + c.q) * r.n;
  float* row_dots = p.dots.row + plane;
  float* decay_dots = p.dots.decay + plane;
  // rows of dy lie behind those of dv; entries count them from C
  const int C = static_cast<int>(p.dims.C), behind = r.Cp - C;

  // This warp's slots are first, first + step, ...: all warps sweep the bank together. Downwards:
  // the gather of gradients ended with high slots, the next begins with low ones.
  const int first = part * warps + warp, step = p.parts * warps;
  const int slots = first < count ? (count - first + step - 1) / step : 0;
  const auto group_at = [&](int s) {
    const int i = first + s * step;
    return (i < written ? written : written + count) - 1 - i;
  };

  constexpr int kTogether = Walk::kTogether, kMore = Walk::kMore;
  // A lane copies one field of a slot's note.
  const auto load_notes = [&](int batch) {
    const int s = batch * kTogether + lane / 4, field = lane % 4;
    if (lane < 4 * kTogether && s < slots) {
      Note* note = notes + s % Walk::kNotes;
      const int g = group_at(s);
      if (field == 0) {
        start_copy<16>(&note->group, groups + g);
      } else if (field == 1) {
        start_copy<16>(&note->head, heads + g);
      } else if (field == 2) {
        start_copy<4>(&note->decay, decays + g);
      } else {
        start_copy<4>(&note->code, codes + g);
      }
    }
  };
  const auto load_more = [&](int batch) {
    const int s = batch * kTogether + lane / kMore, k = lane % kMore;
    if (lane < kMore * kTogether && s < slots) {
      Note* note = notes + s % Walk::kNotes;
      const int4 group = note->group;
      if (k + 2 < group.z + group.w) {
        start_copy<8>(note->more + k, entries + group.y + 2 + k);
      }
    }
  };
  // Entry k of a slot: {row, weight bits}.
  const auto entry_of = [&](const Note& note, int k) {
    if (k == 0) {
      return make_int2(note.head.x, note.head.y);
    }
    if (k == 1) {
      return make_int2(note.head.z, note.head.w);
    }
    if (k < 2 + kMore) {
      return note.more[k - 2];
    }
    const int4 entry = __ldg(entries + note.group.y + k);
    return make_int2(entry.x, entry.y);
  };
  load_notes(0);
  load_notes(1);
  close_copies();
  wait_for_copies<0>();
  __syncwarp();  // notes of the first slots
  load_more(0);
  close_copies();
  wait_for_copies<0>();

  // The row that is fetched next: 0 of the bank, 1 of its gradient, 2 + k of entry k.
  int next_slot = 0, next_row = 0, next_place = 0;
  const auto fetch = [&]() {
    if (next_slot < slots) {
      if (next_row == 0 && next_slot % kTogether == 0) {
        // These came with rows that have been waited for: at least two of each slot did.
        __syncwarp();  // notes of this batch and groups of the next
        load_more(next_slot / kTogether + 1);
        load_notes(next_slot / kTogether + 2);
      }
      const Note& note = notes[next_slot % Walk::kNotes];
      const char* from;
      if (next_row == 0) {
        const int source = source_row(note.code);
        from = reinterpret_cast<const char*>(
            source >= 0 ? kept.at(source) : not_kept.at(note.group.x)
        );
        next_row = (note.code & kUntouchedBit) != 0 ? 2 : 1;
      } else if (next_row == 1) {
        from = reinterpret_cast<const char*>(grads.at(note.group.x));
        next_row = 2;
      } else {
        const int k = next_row - 2;
        const int row = (entry_of(note, k).x & kRowMask) + (k < note.group.z ? 0 : behind);
        from = reinterpret_cast<const char*>(tokens.at(row));
        start_copy<4>(scale_ring + next_place * Walk::kScaleBytes, scales + row * cut.tiles * 128);
        ++next_row;
        if (k + 1 == note.group.z + note.group.w) {
          next_row = 0;
          ++next_slot;
        }
      }
#pragma unroll
      for (int w = 0; w < kPieces; ++w) {
        start_copy<16>(ring + next_place * kRowBytes + w * 512, from + w * 512, w < own);
      }
    }
    close_copies();
    next_place = next_place + 1 == kDepth ? 0 : next_place + 1;
  };
  wait_for_previous();
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) {
    fetch();
  }

  int place = 0;
  const auto take = [&](Piece<S>(&row)[kPieces]) {
    wait_for_copies<kDepth - 1>();
#pragma unroll
    for (int w = 0; w < kPieces; ++w) {
      row[w].raw = *reinterpret_cast<const uint4*>(ring + place * kRowBytes + w * 512);
    }
  };
  const auto refill = [&]() {
    place = place + 1 == kDepth ? 0 : place + 1;
    fetch();
  };
#pragma unroll 1
  for (int s = 0; s < slots; ++s) {
    Piece<S> row[kPieces];
    float m[kPieces][8], grad_x[kPieces][8];
    take(row);
    const Note& note = notes[s % Walk::kNotes];
    const int4 group = note.group;
    const float decay = note.decay;
    const bool zero = (note.code & kUntouchedBit) != 0;
    refill();
#pragma unroll
    for (int w = 0; w < kPieces; ++w) {
      unpack(row[w], m[w]);
      row[w] = Piece<S>();
    }
    if (!zero) {
      take(row);
      refill();
    }
    float decay_dot = 0.0f;
#pragma unroll
    for (int w = 0; w < kPieces; ++w) {
      unpack(row[w], grad_x[w]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        decay_dot = fmaf(grad_x[w][i], m[w][i], decay_dot);
        grad_x[w][i] *= decay;
      }
    }
    if (group.z > 0) {
      decay_dot = warp_sum(decay_dot);
      if (lane == 0) {
        decay_dots[group_at(s)] = decay_dot;
      }
    }
    const int members = group.z + group.w;
#pragma unroll 1
    for (int k = 0; k < members; ++k) {
      // a write takes dv with its weight turned round, a read dy
      const float weight = __int_as_float(entry_of(note, k).y ^ (k < group.z ? INT32_MIN : 0));
      take(row);
      const uint32_t exponents =
          *reinterpret_cast<const uint32_t*>(scale_ring + place * Walk::kScaleBytes) & own_scales;
      refill();
      float dot = 0.0f;
#pragma unroll
      for (int w = 0; w < kPieces; ++w) {
        const float scale = __uint_as_float((exponents >> (8 * w) & 0xffu) << 23);
        const float factor = weight * scale;
        Piece<__half> halves;
        halves.raw = row[w].raw;
        float token[8];
        unpack(halves, token);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          grad_x[w][i] = fmaf(factor, token[i], grad_x[w][i]);
          sum = fmaf(token[i], m[w][i], sum);
        }
        dot = fmaf(sum, scale, dot);
      }
      dot = warp_sum(dot);
      if (lane == 0) {
        row_dots[group.y + k] = dot;
      }
    }
    S* to = grads.at(group.x);
#pragma unroll
    for (int w = 0; w < kPieces; ++w) {
      store_lane<S, true>(to + w * 256, w < own ? 8 : 0, pack<S>(grad_x[w]));
    }
  }
  wait_for_copies<0>();
}

}  // namespace sdm::cuda
