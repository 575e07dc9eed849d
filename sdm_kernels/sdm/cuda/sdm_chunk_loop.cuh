// SPDX-License-Identifier: Apache-2.0
//! @file The sequential part of the forward as one launch: gather, solve, update, chunk after
//! chunk.
//!
//! Same stages and formulas as sdm_fwd-inl.h. Per chunk a block
//!   gathers:  eight lanes a token, both kinds of lanes of up to 4 tokens at a time, 8 rows of 128
//!             bytes in flight a group; lanes come in ascending slot order, so all tokens sweep the
//!             bank together and rows that several tokens touch are found in L2;
//!   solves:   e = inverse * (v - retrieved), y = readings + qk * e, on tensor cores;
//!   updates:  eight lanes a written slot, errors from shared memory, one rounding, one store.
//! Bytes per chunk and stream: distinct rows touched once, written rows once more and stored; the
//! records are 3 to 6 % of that. Shared memory: two [Cp, columns + 8] float arrays, 147 KB at C =
//! 256.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_loop.cuh"

namespace sdm::cuda {

// Retrievals and readings of this block's tokens into x and y. Eight lanes a token, kTokens tokens
// at a time: a round covers both kinds of 4 / kTokens lanes of each, kRingDepth rows in all. While
// a round is added up, the rows of the next and the records of the one after are on their way; each
// of the eight lanes fetches the record of one of the eight rows.
template <typename S, bool kAligned, int kTokens>
__device__ __forceinline__ void gather_tokens(
    const SdmLoopParams& p,
    const LoopItem& it,
    const Ring& ring,
    RowNote* notes,
    int64_t q,
    const ChunkPlace& place,
    const S* bank,
    int own_begin,
    int own_end,
    float* x,
    float* y
) {
  static_assert(kRingDepth == kRowLanes);
  constexpr int kLanes = kRingDepth / 2 / kTokens;  // lanes of a token in a round
  const SdmDims& dims = p.dims;
  const int W = static_cast<int>(dims.W), R = static_cast<int>(dims.R);
  const int2* writes = p.records.lane + q * p.records.n;
  const int2* reads = writes + static_cast<int>(dims.C) * W;
  const LaneColumns at = lane_columns<S>(it.slice, dims.D);
  const int num_tokens = static_cast<int>(place.num_tokens);
  const LaneRows<S, kAligned> rows(bank, p.bank.stride[2], at);
  const int widest = W > R ? W : R;
  const int row_group = static_cast<int>(threadIdx.x) / kRowLanes;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  // [round % 3][row group][piece]
  int2* records = reinterpret_cast<int2*>(notes) + row_group * kRingDepth;
  constexpr int kRound = kRowGroups * kRingDepth;
  // Piece j of a round: kind j % 2 of token j / 2 % kTokens, lane j / 2 / kTokens. What this lane
  // fetches for its own piece:
  const int2* lane_records = lane % 2 == 0 ? writes : reads;
  const int lane_width = lane % 2 == 0 ? W : R;
  const int lane_token = lane / 2 % kTokens * kRowGroups;
  const int lane_offset = lane / 2 / kTokens;
  for (int base = own_begin; base < own_end; base += kRowGroups * kTokens) {
    const int first = base + row_group;
    const bool lane_live = first + lane_token < num_tokens;
    const int2* lane_row = lane_records + (first + lane_token) * lane_width;
    const auto fetch_record = [&](int round) {
      const int a = round * kLanes + lane_offset;
      int2* to = records + round % kRecordRounds * kRound + lane;
      if (lane_live && a < lane_width) {
        copy_async<8>(to, lane_row + a);
      } else {
        *to = make_int2(-1, 0);
      }
    };
    float sum[kTokens][2][kVec<S>];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        sum[t][0][i] = sum[t][1][i] = 0.0f;
      }
    }
    float weight[kRingDepth];
    const auto start = [&](int j, const int2* round_records) {
      const int2 record = round_records[j];
      const bool valid = record.x >= 0;
      fetch_lane<S, kAligned>(ring, j, rows.at(valid ? record.x : 0), at.count, valid);
      weight[j] = __int_as_float(record.y);
    };
    const int rounds = (widest + kLanes - 1) / kLanes;
    fetch_record(0);
    fetch_record(1);
    Ring::close();
    Ring::wait<0>();
    __syncwarp();  // records of the first two rounds
#pragma unroll
    for (int j = 0; j < kRingDepth; ++j) {
      start(j, records);
      if (j == 0) {
        fetch_record(2);
      }
      Ring::close();
    }
    for (int round = 0; round < rounds; ++round) {
      const int2* ahead = records + (round + 1) % kRecordRounds * kRound;
#pragma unroll
      for (int j = 0; j < kRingDepth; ++j) {
        Ring::wait<kRingDepth - 1>();
        if (j == 0) {
          __syncwarp();  // records of round + 2 came with the first row; those of round are used up
        }
        float v[kVec<S>];
        unpack(fetched_piece<S>(ring, j), v);
        float (&total)[kVec<S>] = sum[j / 2 % kTokens][j % 2];
#pragma unroll
        for (int i = 0; i < kVec<S>; ++i) {
          total[i] = fmaf(weight[j], v[i], total[i]);
        }
        start(j, ahead);
        if (j == 0) {
          fetch_record(round + 3);
        }
        Ring::close();
      }
    }
    Ring::wait<0>();
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int i = first + t * kRowGroups;
      if (i >= own_end) {
        continue;
      }
      float v[kVec<S>] = {};
      if (i < num_tokens) {
        load_token_columns<S>(p.v, view_row(p.v, place, i), at, p.token_vectors, v);
      }
#pragma unroll
      for (int c = 0; c < kVec<S>; ++c) {
        v[c] -= sum[t][0][c];
      }
      store_token<S>(x + i * kTokenStride<S>, v);
      store_token<S>(y + i * kTokenStride<S>, sum[t][1]);
    }
  }
}

// Copies this block's share of the slice of a bank.
template <typename S, bool kAligned>
__device__ __forceinline__ void copy_slice(
    const SdmLoopParams& p, const LoopItem& it, const S* from, int64_t from_stride, S* to
) {
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const int64_t begin = p.dims.S * it.rank / p.group_blocks;
  const int64_t end = p.dims.S * (it.rank + 1) / p.group_blocks;
#pragma unroll 4
  for (int64_t slot = begin + threadIdx.x / kRowLanes; slot < end; slot += kRowGroups) {
    store_piece<S, kAligned>(
        to + slot * p.dims.D, at, load_piece<S, kAligned>(from + slot * from_stride, at)
    );
  }
}

template <typename S>
constexpr int64_t chunk_loop_smem(int64_t Cp) {
  return 2 * Cp * kTokenStride<S> * static_cast<int64_t>(sizeof(float)) + Ring::kBytes + kNoteBytes;
}

template <typename S, bool kAligned, int kTokens>
__global__ void __launch_bounds__(kLoopThreads, 1) sdm_chunk_loop_kernel(
    const __grid_constant__ SdmLoopParams p
) {
  extern __shared__ __align__(16) float smem[];
  const LoopItem it(p);
  const SdmDims& dims = p.dims;
  const int Cp = p.records.Cp;
  float* x = smem;                      // v - retrieved, then errors
  float* y = x + Cp * kTokenStride<S>;  // readings
  const Ring ring(y + Cp * kTokenStride<S>);
  RowNote* notes = loop_notes(y + Cp * kTokenStride<S>);
  if (it.sequence->bank < 0) {
    return;
  }
  S* bank = static_cast<S*>(p.bank.data) + it.sequence->bank * p.bank.stride[0] +
            it.head * p.bank.stride[1];
  const LaneColumns at = lane_columns<S>(it.slice, dims.D);
  int own_begin, own_end;
  own_rows(p, it.rank, &own_begin, &own_end);
  unsigned round = 0;
  for (int64_t k = p.first_k; k < p.end_k; ++k) {
    const int64_t chunk = p.window.first_chunk + k;
    if (chunk >= it.sequence->num_chunks) {
      break;
    }
    const ChunkPlace place = chunk_place(*it.sequence, it.head, chunk, dims.C);
    const int64_t q = it.record(p, k);
    if (p.saved.mode == SdmSave::kReplay && chunk > 0 && chunk % p.saved.segment_chunks == 0) {
      const int64_t index = it.sequence->first_checkpoint + chunk / p.saved.segment_chunks - 1;
      S* checkpoint = static_cast<S*>(p.saved.rows) + (index * dims.H + it.head) * dims.S * dims.D;
      copy_slice<S, kAligned>(p, it, bank, p.bank.stride[2], checkpoint);
    }

    gather_tokens<S, kAligned, kTokens>(
        p, it, ring, notes, q, place, bank, own_begin, own_end, x, y
    );
    exchange_rows<S>(p, it, x, own_begin, own_end, 0, &round);

    Product<S> product;
    product.template run<false>(p.records.inverse + q * Cp * Cp, Cp, x, 0, Cp / 16);
    __syncthreads();  // all warps have read v - retrieved
    product.template put<false, false>(x, 0, Cp / 16);
    __syncthreads();  // errors are complete
    product.template run<false>(p.records.qk + q * Cp * Cp, Cp, x, own_begin / 16, own_end / 16);
    product.template put<false, true>(y, own_begin / 16, own_end / 16);
    __syncthreads();  // readings are complete
    for (int i = own_begin + threadIdx.x / kRowLanes; i < own_end && i < place.num_tokens;
         i += kRowGroups) {
      float row[kVec<S>];
      load_token<S>(y + i * kTokenStride<S>, row);
      const int64_t offset = token_row(dims, place, i);
      store_token_columns<S>(p.out, p.v.dtype, offset, at, p.token_vectors, row);
      if (p.errors != nullptr) {
        load_token<S>(x + i * kTokenStride<S>, row);
        store_token_columns<S>(p.errors, DType::kF32, offset, at, p.token_vectors, row);
      }
    }

    S* rows = p.saved.mode == SdmSave::kRows ? static_cast<S*>(p.saved.rows) : nullptr;
    const int64_t first_row = it.head * p.saved.rows_per_head + it.sequence->first_row +
                              chunk * rows_of_chunk(dims, dims.C);
    update_rows<S, kAligned>(
        p, it, ring, notes, q, bank, x, rows, first_row, rows_of_chunk(dims, place.num_tokens)
    );
    finish_rows(p, it, &round);
  }
}

// The row updates alone, from saved errors: brings the bank from the start of a segment to its end
// and keeps the rows as they were at the start of each chunk.
template <typename S, bool kAligned>
__global__ void __launch_bounds__(kLoopThreads, 1) sdm_replay_loop_kernel(
    const __grid_constant__ SdmLoopParams p
) {
  extern __shared__ __align__(16) float smem[];
  const LoopItem it(p);
  const SdmDims& dims = p.dims;
  S* bank = static_cast<S*>(p.bank.data) + it.sequence->bank * p.bank.stride[0] +
            it.head * p.bank.stride[1];
  const LaneColumns at = lane_columns<S>(it.slice, dims.D);
  const FloatView errors{
      p.errors, DType::kF32, {dims.T * dims.H * dims.D, dims.H * dims.D, dims.D, 1}
  };
  const Ring ring(smem + 2 * p.records.Cp * kTokenStride<S>);
  RowNote* notes = loop_notes(smem + 2 * p.records.Cp * kTokenStride<S>);
  unsigned round = 0;
  for (int64_t k = p.first_k; k < p.end_k; ++k) {
    const int64_t chunk = p.window.first_chunk + k;
    if (chunk >= it.sequence->num_chunks) {
      break;
    }
    const ChunkPlace place = chunk_place(*it.sequence, it.head, chunk, dims.C);
    for (int i = threadIdx.x / kRowLanes; i < place.num_tokens; i += kRowGroups) {
      float row[kVec<S>];
      load_token_columns<S>(errors, view_row(errors, place, i), at, p.token_vectors, row);
      store_token<S>(smem + i * kTokenStride<S>, row);
    }
    __syncthreads();  // errors are complete
    const int64_t reserved = rows_of_chunk(dims, dims.C);
    update_rows<S, kAligned>(
        p,
        it,
        ring,
        notes,
        it.record(p, k),
        bank,
        smem,
        static_cast<S*>(p.replay_rows),
        (it.stream * p.window.chunks + k) * reserved,
        0
    );
    finish_rows(p, it, &round);
  }
}

}  // namespace sdm::cuda
