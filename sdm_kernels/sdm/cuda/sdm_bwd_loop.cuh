// SPDX-License-Identifier: Apache-2.0
//! @file The sequential part of the backward as one launch: the chunks of a segment from last to
//! first.
//!
//! Same stages and formulas as sdm_bwd-inl.h. Per chunk a block
//!   gathers:  post-weighted rows of the bank's gradient by token, and the dots <e, G>;
//!   solves:   dv = inverse^T (gathered + qk^T dy), on tensor cores;
//!   walks:    every touched slot once: gradient to the chunk's start, bank back to the chunk's
//!   start
//!             from the saved rows, and the dots <dv, M>, <dy, M>, <G, M>.
//! The gradient of the bank is kept in the bank's type: each touched row is rounded once a chunk.
//! Bytes per chunk and stream: gradient rows of written slots read twice, of others once, all
//! stored once; bank rows read once, written ones stored back.
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
  const int64_t stride = p.grad.stride[2];
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
    fetch_piece<S, kAligned>(ring, j, grad + (slot < 0 ? 0 : slot) * stride, at, slot >= 0);
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
      load_token<S>(errors + token_row_at(i) * kTokenStride<S>, error);
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
      store_token<S>(x + token_row_at(i) * kTokenStride<S>, sum[u]);
    }
  }
}

// The walk over this block's share of the touched slots. x holds dv, y holds dy. Eight lanes take
// every 64th slot, with the rows of kAhead slots in flight: the gradient's and the bank's or the
// saved one.
template <typename S, bool kAligned>
__device__ __forceinline__ void walk_slots(
    const SdmLoopParams& p,
    const LoopItem& it,
    const Ring& ring,
    RowNote* notes,
    int64_t q,
    S* bank,
    S* grad,
    const float* x,
    const float* y,
    const SdmSaved& saved,
    int64_t first_row,
    int64_t row_bytes
) {
  constexpr int kAhead = kRingDepth / 2;
  const SdmRecords& r = p.records;
  const int4* groups = r.group + q * r.n;
  const float* decays = r.group_decay + q * r.n;
  const int4* heads = r.head_weight + q * r.n;
  const int4* entries = r.entry + q * r.n;
  const int64_t plane = (it.slice * r.num_q + q) * r.n;
  float* dot_row = p.dots.row + plane;
  float* dot_decay = p.dots.decay + plane;
  const int C = static_cast<int>(p.dims.C);
  const int written = r.group_count[q].x;
  const int count = r.group_count[q].y;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const unsigned mask = 0xffu << (threadIdx.x % 32 / kRowLanes * kRowLanes);
  const auto group_sum = [&](float v) {
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) {
      v += __shfl_xor_sync(mask, v, step);
    }
    return v;
  };
  const int begin = static_cast<int>(static_cast<int64_t>(count) * it.rank / p.group_blocks);
  const int end = static_cast<int>(static_cast<int64_t>(count) * (it.rank + 1) / p.group_blocks);
  const int row_group = static_cast<int>(threadIdx.x) / kRowLanes;
  const int mine = begin + row_group;
  const bool exact = saved.mode <= SdmSave::kRows;
  const S* exact_rows = static_cast<const S*>(saved.rows);
  constexpr int kRound = kRowGroups * kAhead;

  int slot[kAhead] = {}, next[kAhead] = {}, after[kAhead] = {};
  const auto load_slots = [&](int (&slots)[kAhead], int base) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int g = base + j * kRowGroups;
      slots[j] = __ldg(&groups[g < end ? g : 0].x);
    }
  };
  const auto start = [&](int j, int g) {
    const bool valid = g < end;
    slot[j] = next[j];
    const int64_t row = valid ? slot[j] : 0;
    fetch_piece<S, kAligned>(ring, 2 * j, grad + row * p.grad.stride[2], at, valid);
    if (g >= written) {
      fetch_piece<S, kAligned>(ring, 2 * j + 1, bank + row * p.bank.stride[2], at, valid);
    } else if (exact) {
      const S* from = exact_rows + (first_row + (valid ? g : 0)) * p.dims.D;
      fetch_piece<S, kAligned>(ring, 2 * j + 1, from, at, valid);
    }
    RowNote* note = notes + j * kRowGroups + row_group;
    if (lane == 0 && valid) {
      copy_async<16>(&note->head, heads + g);
    }
    if (lane == 1 && valid) {
      copy_async<4>(&note->decay, decays + g);
    }
    if (lane == 2 && valid) {
      copy_async<4>(&note->begin, &groups[g].y);
    }
    Ring::close();
  };
  // whole warps go round together, as the notes are shared by lanes
  const int warp_first = begin + row_group / 4 * 4;
  load_slots(next, mine);
  load_slots(after, mine + kRound);
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    start(j, mine + j * kRowGroups);
  }
  for (int base = warp_first; base < end; base += kRound) {
    const int own = base - warp_first + mine;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      next[j] = after[j];
    }
    load_slots(after, own + 2 * kRound);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      Ring::wait<kAhead - 1>();
      __syncwarp();  // the notes that other lanes fetched
      const int g = own + j * kRowGroups;
      if (g < end) {
        const RowNote note = notes[j * kRowGroups + row_group];
        float grad_x[kVec<S>], m[kVec<S>];
        unpack(fetched_piece<S>(ring, 2 * j), grad_x);
        const Piece<S> m_row =
            g < written && !exact
                ? load_saved_piece<S, kAligned>(saved, row_bytes, first_row + g, at)
                : fetched_piece<S>(ring, 2 * j + 1);
        unpack(m_row, m);
        if (g < written) {
          store_piece<S, kAligned>(bank + slot[j] * p.bank.stride[2], at, m_row);
          float dot = 0.0f;
#pragma unroll
          for (int c = 0; c < kVec<S>; ++c) {
            dot = fmaf(grad_x[c], m[c], dot);
            grad_x[c] *= note.decay;
          }
          dot = group_sum(dot);
          if (lane == 0) {
            dot_decay[g] = dot;
          }
        }
        const auto add = [&](int64_t at_dot, bool write, int row, int weight_bits) {
          const float weight = write ? -__int_as_float(weight_bits) : __int_as_float(weight_bits);
          float token[kVec<S>];
          load_token<S>(
              write ? x + token_row_at(row) * kTokenStride<S>
                    : y + token_row_at(row - C) * kTokenStride<S>,
              token
          );
          float dot = 0.0f;
#pragma unroll
          for (int c = 0; c < kVec<S>; ++c) {
            grad_x[c] = fmaf(weight, token[c], grad_x[c]);
            dot = fmaf(token[c], m[c], dot);
          }
          dot = group_sum(dot);
          if (lane == 0) {
            dot_row[at_dot] = dot;
          }
        };
        const int begin_entry = note.begin;
        const int4 head = note.head;
        add(begin_entry, (head.x & kOwnerBit) != 0, head.x & kRowMask, head.y);
        if ((head.x & kSecondBit) != 0) {
          add(begin_entry + 1, (head.z & kOwnerBit) != 0, head.z & kRowMask, head.w);
        }
        if ((head.x & kMoreBit) != 0) {
          const int4 group = __ldg(groups + g);
#pragma unroll 1
          for (int k = 2; k < group.z + group.w; ++k) {
            const int4 e = __ldg(entries + group.y + k);
            add(begin_entry + k, k < group.z, e.x & kRowMask, e.y);
          }
        }
        store_piece<S, kAligned>(grad + slot[j] * p.grad.stride[2], at, pack<S>(grad_x));
      }
      __syncwarp();  // the note may be overwritten
      start(j, g + kRound);
    }
  }
  Ring::wait<0>();
}

template <typename S, bool kAligned>
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
  S* bank = static_cast<S*>(p.bank.data) + n * p.bank.stride[0] + it.head * p.bank.stride[1];
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
  const int64_t reserved = rows_of_chunk(dims, dims.C);
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
      store_token<S>(y + token_row_at(i) * kTokenStride<S>, row);
    }
    gather_gradient<S, kAligned>(p, it, ring, q, place, grad, own_begin, own_end, y, x);
    exchange_rows<S>(p, it, x, own_begin, own_end, 0, &round);
    for (int i = group; i < Cp; i += kRowGroups) {
      float row[kVec<S>] = {};
      if (i < place.num_tokens) {
        load_token_columns<S>(p.d_out, view_row(p.d_out, place, i), at, p.token_vectors, row);
      }
      store_token<S>(y + token_row_at(i) * kTokenStride<S>, row);
    }
    __syncthreads();  // dy is complete

    Product<S> product;
    product.template run<true>(p.records.qk + q * Cp * Cp, Cp, y, 0, Cp / 16);
    product.template put<true, true>(x, Cp, 0, Cp / 16);
    __syncthreads();  // the gradient of the errors is complete
    product.template run<true>(p.records.inverse + q * Cp * Cp, Cp, x, 0, Cp / 16);
    __syncthreads();  // all warps have read it
    product.template put<true, false>(x, Cp, 0, Cp / 16);
    __syncthreads();  // dv is complete
    for (int i = own_begin + group; i < own_end && i < place.num_tokens; i += kRowGroups) {
      float row[kVec<S>];
      load_token<S>(x + token_row_at(i) * kTokenStride<S>, row);
      store_token_columns<S>(
          p.d_v, p.d_out.dtype, token_row(dims, place, i), at, p.token_vectors, row
      );
      store_token_columns<S>(
          p.dots.d_v, DType::kF32, (q * dims.C + i) * dims.D, at, p.token_vectors, row
      );
    }
    const int64_t first_row =
        replay ? (it.stream * p.window.chunks + k) * reserved
               : it.head * p.saved.rows_per_head + it.sequence->first_row + chunk * reserved;
    walk_slots<S, kAligned>(p, it, ring, notes, q, bank, grad, x, y, saved, first_row, row_bytes);
    finish_rows(p, it, &round);
  }
}

}  // namespace sdm::cuda
