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

// Retrievals and readings of this block's tokens into x and y.
template <typename S, bool kAligned, int kTokens>
__device__ __forceinline__ void gather_tokens(
    const SdmLoopParams& p,
    const LoopItem& it,
    int64_t q,
    const ChunkPlace& place,
    const S* bank,
    int own_begin,
    int own_end,
    float* x,
    float* y
) {
  constexpr int kUnroll = 4 / kTokens;
  const SdmDims& dims = p.dims;
  const int W = static_cast<int>(dims.W), R = static_cast<int>(dims.R),
            C = static_cast<int>(dims.C);
  const int2* writes = p.records.lane + q * p.records.n;
  const int2* reads = writes + C * W;
  const LaneColumns at = lane_columns<S>(it.slice, dims.D);
  const int group = threadIdx.x / kRowLanes;
  const int num_tokens = static_cast<int>(place.num_tokens);
  const int64_t stride = p.bank.stride[2];
  for (int first = own_begin + group; first < own_end; first += kRowGroups * kTokens) {
    float sum[kTokens][2][kVec<S>];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        sum[t][0][i] = sum[t][1][i] = 0.0f;
      }
    }
    const int widest = W > R ? W : R;
    for (int a0 = 0; a0 < widest; a0 += kUnroll) {
      Piece<S> row[kUnroll][kTokens][2];
      float weight[kUnroll][kTokens][2];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const int a = a0 + u;
          const int i = first + t * kRowGroups;
          const bool inside = i < num_tokens;
          const int2 none = make_int2(-1, 0);
          const int2 w = inside && a < W ? __ldg(writes + i * W + a) : none;
          const int2 r = inside && a < R ? __ldg(reads + i * R + a) : none;
          weight[u][t][0] = __int_as_float(w.y);
          weight[u][t][1] = __int_as_float(r.y);
          if (w.x >= 0) {
            row[u][t][0] = load_piece<S, kAligned>(bank + w.x * stride, at);
          }
          if (r.x >= 0) {
            row[u][t][1] = load_piece<S, kAligned>(bank + r.x * stride, at);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
          for (int kind = 0; kind < 2; ++kind) {
            float v[kVec<S>];
            unpack(row[u][t][kind], v);
#pragma unroll
            for (int i = 0; i < kVec<S>; ++i) {
              sum[t][kind][i] = fmaf(weight[u][t][kind], v[i], sum[t][kind][i]);
            }
          }
        }
      }
    }
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
  return 2 * Cp * kTokenStride<S> * static_cast<int64_t>(sizeof(float));
}

template <typename S, bool kAligned, int kTokens>
__global__ void __launch_bounds__(kLoopThreads, 1) sdm_chunk_loop_kernel(const SdmLoopParams p) {
  extern __shared__ __align__(16) float smem[];
  const LoopItem it(p);
  const SdmDims& dims = p.dims;
  const int Cp = p.records.Cp;
  float* x = smem;                         // v - retrieved, then errors
  float* y = smem + Cp * kTokenStride<S>;  // readings
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

    gather_tokens<S, kAligned, kTokens>(p, it, q, place, bank, own_begin, own_end, x, y);
    exchange_rows<S>(p, it, x, own_begin, own_end, 0, &round);

    Product<S> product;
    product.template run<false>(p.records.inverse + q * Cp * Cp, Cp, x, 0, Cp / 16);
    __syncthreads();  // all warps have read v - retrieved
    product.template put<false>(x, 0, Cp / 16);
    __syncthreads();  // errors are complete
    product.template run<false>(p.records.qk + q * Cp * Cp, Cp, x, own_begin / 16, own_end / 16);
    product.template put<true>(y, own_begin / 16, own_end / 16);
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
        p, it, q, bank, x, rows, first_row, rows_of_chunk(dims, place.num_tokens)
    );
    finish_rows(p, it, &round);
  }
}

// The row updates alone, from saved errors: brings the bank from the start of a segment to its end
// and keeps the rows as they were at the start of each chunk.
template <typename S, bool kAligned>
__global__ void __launch_bounds__(kLoopThreads, 1) sdm_replay_loop_kernel(const SdmLoopParams p) {
  extern __shared__ __align__(16) float smem[];
  const LoopItem it(p);
  const SdmDims& dims = p.dims;
  S* bank = static_cast<S*>(p.bank.data) + it.sequence->bank * p.bank.stride[0] +
            it.head * p.bank.stride[1];
  const LaneColumns at = lane_columns<S>(it.slice, dims.D);
  const FloatView errors{
      p.errors, DType::kF32, {dims.T * dims.H * dims.D, dims.H * dims.D, dims.D, 1}
  };
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
