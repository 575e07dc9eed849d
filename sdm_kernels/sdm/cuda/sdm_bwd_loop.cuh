// SPDX-License-Identifier: Apache-2.0
//! @file The sequential part of the backward as one launch: the chunks of a segment from last to
//! first.
//!
//! Same stages and formulas as sdm_bwd-inl.h. Per chunk a block
//!   gathers:  post-weighted rows of the bank's gradient by token, and the dots <e, G>;
//!   solves:   dv = inverse^T (gathered + qk^T dy), on tensor cores;
//!   walks:    every touched slot once: gradient to the chunk's start, and the dots <dv, M>,
//!             <dy, M>, <G, M> with the bank row of the chunk's start, read where it is kept.
//! The gradient of the bank is kept in the bank's type: each touched row is rounded once a chunk.
//! Bytes per chunk and stream: gradient rows of written slots read twice, of others once, all
//! stored once; bank rows read once.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_save.cuh"

namespace sdm::cuda {

// v[0..8) of eight lanes -> the sum over the lanes of v[lane].
__device__ __forceinline__ float transpose_sum(float (&v)[kRowLanes], int lane) {
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < step; ++i) {
      const float send = upper ? v[i] : v[i + step];
      const float keep = upper ? v[i + step] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, send, step);
    }
  }
  return v[0];
}

// x[token] = sum over writes of post * G[slot]; error_grad[lane] = <e[token], G[slot]>. `errors`
// holds this block's own rows of e. Eight lanes a token, eight write lanes a round; rounds go over
// the tokens of the group first, so that all tokens sweep the slots together.
template <typename S, bool kAligned>
__device__ __forceinline__ void gather_gradient(
    const SdmLoopParams& p,
    const LoopItem& it,
    const Ring& ring,
    int64_t q,
    const ChunkPlace& place,
    const S* grad,
    int own_begin,
    int own_end,
    const float* errors,
    float* x
) {
  static_assert(kRingDepth == kRowLanes);
  constexpr int kTokens = kMaxChunk / kRowGroups;  // most tokens of a group
  const int W = static_cast<int>(p.dims.W);
  const int lanes = static_cast<int>(p.dims.C) * W;
  const int2* writes = p.records.write_post + q * lanes;
  float* dots = p.dots.error_grad + (it.slice * p.records.num_q + q) * lanes;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const LaneRows<S, kAligned> rows(grad, p.grad.stride[2], at);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int first = own_begin + static_cast<int>(threadIdx.x) / kRowLanes;
  const int num_tokens = min(static_cast<int>(place.num_tokens), own_end);
  // whole warps stay together, as the sums over lanes are warp operations: the number of tokens is
  // that of the block's fullest group
  const int tokens = (own_end - own_begin + kRowGroups - 1) / kRowGroups;
  const int rounds = (W + kRowLanes - 1) / kRowLanes * tokens;
  const auto inside = [&](int round) {
    return round < rounds && first + round % tokens * kRowGroups < num_tokens &&
           round / tokens * kRowLanes + lane < W;
  };
  // loaded a round before it is looked at
  const auto record = [&](int round) {
    const int i = first + round % tokens * kRowGroups;
    const int a = round / tokens * kRowLanes + lane;
    return __ldg(writes + (inside(round) ? i * W + a : 0));
  };
  float sum[kTokens][kVec<S>] = {};
  float post[kRingDepth];
  int2 next = record(0);
  const auto check = [&](int round) {
    const bool valid = inside(round);
    next.x = valid ? next.x : -1;
    next.y = valid ? next.y : 0;
  };
  const auto start = [&](int j) {
    const int slot = __shfl_sync(0xffffffffu, next.x, j, kRowLanes);
    fetch_lane<S, kAligned>(ring, j, rows.at(slot < 0 ? 0 : slot), at.count, slot >= 0);
    Ring::close();
    post[j] = __int_as_float(__shfl_sync(0xffffffffu, next.y, j, kRowLanes));
  };
  check(0);
#pragma unroll
  for (int j = 0; j < kRingDepth; ++j) {
    start(j);
  }
  next = record(1);
  for (int round = 0; round < rounds; ++round) {
    check(round + 1);
    const int t = round % tokens;
    const int i = first + t * kRowGroups;
    const int a = round / tokens * kRowLanes + lane;
    float error[kVec<S>] = {};
    if (i < num_tokens) {
      load_token<S>(errors + i * kTokenStride<S>, error);
    }
    float part[kVec<S>] = {};
    float dot[kRowLanes];
#pragma unroll
    for (int j = 0; j < kRingDepth; ++j) {
      Ring::wait<kRingDepth - 1>();
      float g[kVec<S>];
      unpack(fetched_piece<S>(ring, j), g);
      dot[j] = 0.0f;
#pragma unroll
      for (int c = 0; c < kVec<S>; ++c) {
        part[c] = fmaf(post[j], g[c], part[c]);
        dot[j] = fmaf(error[c], g[c], dot[j]);
      }
      start(j);
    }
    next = record(round + 2);
    // constant indices keep the sums in registers
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      if (u == t) {
#pragma unroll
        for (int c = 0; c < kVec<S>; ++c) {
          sum[u][c] += part[c];
        }
      }
    }
    const float total = transpose_sum(dot, lane);
    if (i < num_tokens && a < W) {
      dots[i * W + a] = total;
    }
  }
  Ring::wait<0>();
#pragma unroll
  for (int u = 0; u < kTokens; ++u) {
    const int i = first + u * kRowGroups;
    if (i < own_end) {
      store_token<S>(x + i * kTokenStride<S>, sum[u]);
    }
  }
}

// Sums of four values over eight lanes: v[0] of lanes 0 and 1, v[1] of lanes 2 and 3, and so on.
__device__ __forceinline__ float four_sums(const float (&v)[4], int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  const bool high = (lane & 4) != 0, odd = (lane & 2) != 0;
  const float a = (high ? v[2] : v[0]) + __shfl_xor_sync(kAll, high ? v[0] : v[2], 4);
  const float b = (high ? v[3] : v[1]) + __shfl_xor_sync(kAll, high ? v[1] : v[3], 4);
  const float c = (odd ? b : a) + __shfl_xor_sync(kAll, odd ? a : b, 2);
  return c + __shfl_xor_sync(kAll, c, 1);
}

// The walk over this block's share of the touched slots. x holds dv, and y, right behind it, dy.
// The gradient's row of a slot and the bank's as it was at the start of the chunk, where
// sdm_sources.h says that it is kept, are fetched together.
template <typename S, bool kAligned, bool kExact>
__device__ __forceinline__ void walk_slots(
    const SdmLoopParams& p,
    const LoopItem& it,
    const Ring& ring,
    RowNote* notes,
    int64_t q,
    const S* bank,
    S* grad,
    const float* x,
    const SdmSaved& saved,
    int64_t row_bytes
) {
  constexpr int kAhead = kRingDepth / 2;
  const SdmRecords& r = p.records;
  const int4* groups = r.group + q * r.n;
  const int2* places = p.source_rows + q * r.n;
  const int4* entries = r.entry + q * r.n;
  const int64_t plane = (it.slice * r.num_q + q) * r.n;
  float* dot_row = p.dots.row + plane;
  float* dot_decay = p.dots.decay + plane;
  const int written = r.group_count[q].x;
  const int count = r.group_count[q].y;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const LaneRows<S, kAligned> grads(grad, p.grad.stride[2], at);
  const LaneRows<S, kAligned> at_end(bank, p.bank.stride[2], at);
  const LaneRows<S, kAligned> kept(kExact ? saved.rows : nullptr, p.dims.D, at);
  const NoteReader reader(notes, r.head_weight + q * r.n, r.group_decay + q * r.n, groups);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int begin = static_cast<int>(static_cast<int64_t>(count) * it.rank / p.group_blocks);
  const int end = static_cast<int>(static_cast<int64_t>(count) * (it.rank + 1) / p.group_blocks);
  // rows of dy follow those of dv; entries count them from C
  const int C = static_cast<int>(p.dims.C);
  const int behind = r.Cp - C;
  // lane 0 stores <G, M>, lanes 2 and 4 the dots of the first two entries
  float* lane_dots = lane == 0 ? dot_decay : dot_row + lane / 4;

  for_groups<kAhead>(
      begin,
      end,
      [&](int g) { return __ldg(&places[g]); },
      [&](int j, int g, bool valid, int2 place) {
        fetch_lane<S, kAligned>(ring, 2 * j, grads.at(place.x), at.count, valid);
        if (kExact || place.y < 0) {
          const S* from = kExact && place.y >= 0 ? kept.at(place.y) : at_end.at(place.x);
          fetch_lane<S, kAligned>(ring, 2 * j + 1, from, at.count, valid);
        }
        reader.start(j, g, valid);
      },
      [&](int j, int g, bool valid, int2 place) {
        const RowNote& note = reader.note(j);
        const int4 head = valid ? note.head : make_int4(C, 0, 0, 0);
        const float decay = note.decay;
        const int begin_entry = note.begin;
        float grad_x[kVec<S>], m[kVec<S>];
        unpack(fetched_piece<S>(ring, 2 * j), grad_x);
        Piece<S> m_row = fetched_piece<S>(ring, 2 * j + 1);
        if constexpr (!kExact) {
          if (valid && place.y >= 0) {
            m_row = load_saved_piece<S, kAligned>(saved, row_bytes, place.y, at);
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
          load_token<S>(x + (row + (write ? 0 : behind)) * kTokenStride<S>, token);
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
        if (valid && (lane == 2 || (lane == 0 && g < written) || (lane == 4 && second))) {
          lane_dots[lane == 0 ? g : begin_entry] = sum;
        }
        const bool more = (head.x & kMoreBit) != 0;
        if (__any_sync(0xffffffffu, more)) {
          const int4 group = __ldg(groups + (more ? g : 0));
          const int entries_here = more ? group.z + group.w : 0;
#pragma unroll 1
          for (int k = 2; __any_sync(0xffffffffu, k < entries_here); ++k) {
            float one[4] = {};
            if (k < entries_here) {
              const int4 e = __ldg(entries + group.y + k);
              add(k < group.z, e.x & kRowMask, __int_as_float(e.y), &one[0]);
            }
            const float total = four_sums(one, lane);
            if (lane == 0 && k < entries_here) {
              dot_row[group.y + k] = total;
            }
          }
        }
        if (valid) {
          store_lane<S, kAligned>(grads.at(place.x), at.count, pack<S>(grad_x));
        }
      }
  );
}

// kExact: rows were saved as they are, or are replayed.
template <typename S, bool kAligned, bool kExact>
__global__ void __launch_bounds__(kLoopThreads, 1) sdm_bwd_loop_kernel(
    const __grid_constant__ SdmLoopParams p
) {
  extern __shared__ __align__(16) float smem[];
  const LoopItem it(p);
  const SdmDims& dims = p.dims;
  const int Cp = p.records.Cp;
  float* x = smem;                      // gathered gradient, then dv
  float* y = x + Cp * kTokenStride<S>;  // errors of own tokens, then dy of all
  const Ring ring(y + Cp * kTokenStride<S>);
  RowNote* notes = loop_notes(y + Cp * kTokenStride<S>);
  const int64_t n = it.stream / dims.H;
  const S* bank =
      static_cast<const S*>(p.bank.data) + n * p.bank.stride[0] + it.head * p.bank.stride[1];
  S* grad = static_cast<S*>(p.grad.data) + n * p.grad.stride[0] + it.head * p.grad.stride[1];
  const LaneColumns at = lane_columns<S>(it.slice, dims.D);
  const int group = threadIdx.x / kRowLanes;
  const FloatView errors{
      p.errors, DType::kF32, {dims.T * dims.H * dims.D, dims.H * dims.D, dims.D, 1}
  };
  const bool replay = p.saved.mode == SdmSave::kReplay;
  SdmSaved saved = p.saved;
  int64_t row_bytes = dims.D * static_cast<int64_t>(sizeof(S));
  if (replay) {
    saved.mode = SdmSave::kRows;
    saved.rows = p.replay_rows;
  } else if (saved.mode == SdmSave::kBf16) {
    row_bytes = dims.D * 2;
  } else if (saved.mode == SdmSave::kFp8) {
    row_bytes = dims.D;
  } else if (saved.mode == SdmSave::kInt4) {
    row_bytes = ceil_div(dims.D, 2);
  }
  if (!replay) {
    const int64_t first = it.head * saved.rows_per_head;
    saved.rows = static_cast<char*>(saved.rows) + first * row_bytes;
    if (saved.scales != nullptr) {
      saved.scales += first;
    }
  }
  int own_begin, own_end;
  own_rows(p, it.rank, &own_begin, &own_end);
  unsigned round = 0;
  for (int64_t k = p.end_k - 1; k >= p.first_k; --k) {
    const int64_t chunk = p.window.first_chunk + k;
    if (chunk >= it.sequence->num_chunks) {
      continue;
    }
    const ChunkPlace place = chunk_place(*it.sequence, it.head, chunk, dims.C);
    const int64_t q = it.record(p, k);

    // each group reads back only rows that it wrote: no barrier
    for (int i = own_begin + group; i < own_end && i < place.num_tokens; i += kRowGroups) {
      float row[kVec<S>];
      load_token_columns<S>(errors, view_row(errors, place, i), at, p.token_vectors, row);
      store_token<S>(y + i * kTokenStride<S>, row);
    }
    gather_gradient<S, kAligned>(p, it, ring, q, place, grad, own_begin, own_end, y, x);
    exchange_rows<S>(p, it, x, own_begin, own_end, 0, &round);
    for (int i = group; i < Cp; i += kRowGroups) {
      float row[kVec<S>] = {};
      if (i < place.num_tokens) {
        load_token_columns<S>(p.d_out, view_row(p.d_out, place, i), at, p.token_vectors, row);
      }
      store_token<S>(y + i * kTokenStride<S>, row);
    }
    __syncthreads();  // dy is complete

    Product<S> product;
    product.template run<true>(p.records.qk + q * Cp * Cp, Cp, y, 0, Cp / 16);
    product.template put<true, true>(x, 0, Cp / 16);
    __syncthreads();  // the gradient of the errors is complete
    product.template run<true>(p.records.inverse + q * Cp * Cp, Cp, x, 0, Cp / 16);
    __syncthreads();  // all warps have read it
    product.template put<true, false>(x, 0, Cp / 16);
    __syncthreads();  // dv is complete
    for (int i = own_begin + group; i < own_end && i < place.num_tokens; i += kRowGroups) {
      float row[kVec<S>];
      load_token<S>(x + i * kTokenStride<S>, row);
      store_token_columns<S>(
          p.d_v, p.d_out.dtype, token_row(dims, place, i), at, p.token_vectors, row
      );
      store_token_columns<S>(
          p.dots.d_v, DType::kF32, (q * dims.C + i) * dims.D, at, p.token_vectors, row
      );
    }
    walk_slots<S, kAligned, kExact>(p, it, ring, notes, q, bank, grad, x, saved, row_bytes);
    finish_rows(p, it, &round);
  }
}

}  // namespace sdm::cuda
