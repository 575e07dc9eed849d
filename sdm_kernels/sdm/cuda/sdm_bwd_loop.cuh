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
// holds this block's own rows of e.
template <typename S, bool kAligned>
__device__ __forceinline__ void gather_gradient(
    const SdmLoopParams& p,
    const LoopItem& it,
    int64_t q,
    const ChunkPlace& place,
    const S* grad,
    int own_begin,
    int own_end,
    const float* errors,
    float* x
) {
  constexpr int kTokens = 2;
  const int W = static_cast<int>(p.dims.W);
  const int lanes = static_cast<int>(p.dims.C) * W;
  const int2* writes = p.records.write_post + q * lanes;
  float* dots = p.dots.error_grad + (it.slice * p.records.num_q + q) * lanes;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const int lane = threadIdx.x % kRowLanes;
  const int num_tokens = static_cast<int>(place.num_tokens);
  // whole warps stay together: the sums over lanes are warp operations
  for (int base = own_begin; base < own_end; base += kRowGroups * kTokens) {
    const int first = base + threadIdx.x / kRowLanes;
    float sum[kTokens][kVec<S>] = {};
    for (int a0 = 0; a0 < W; a0 += kRowLanes) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const int i = first + t * kRowGroups;
        const bool inside = i < num_tokens && i < own_end;
        int2 own = make_int2(-1, 0);
        if (inside && a0 + lane < W) {
          own = __ldg(writes + i * W + a0 + lane);
        }
        Piece<S> row[kRowLanes];
        float post[kRowLanes];
#pragma unroll
        for (int u = 0; u < kRowLanes; ++u) {
          const int slot = __shfl_sync(0xffffffffu, own.x, u, kRowLanes);
          post[u] = __int_as_float(__shfl_sync(0xffffffffu, own.y, u, kRowLanes));
          if (slot >= 0) {
            row[u] = load_piece<S, kAligned>(grad + slot * p.grad.stride[2], at);
          }
        }
        float error[kVec<S>] = {};
        if (inside) {
          load_token<S>(errors + i * kTokenStride<S>, error);
        }
        float dot[kRowLanes];
#pragma unroll
        for (int u = 0; u < kRowLanes; ++u) {
          float g[kVec<S>];
          unpack(row[u], g);
          dot[u] = 0.0f;
#pragma unroll
          for (int c = 0; c < kVec<S>; ++c) {
            sum[t][c] = fmaf(post[u], g[c], sum[t][c]);
            dot[u] = fmaf(error[c], g[c], dot[u]);
          }
        }
        const float total = transpose_sum(dot, lane);
        if (inside && a0 + lane < W) {
          dots[i * W + a0 + lane] = total;
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int i = first + t * kRowGroups;
      if (i < own_end) {
        store_token<S>(x + i * kTokenStride<S>, sum[t]);
      }
    }
  }
}

// The walk over this block's share of the touched slots. x holds dv, y holds dy.
template <typename S, bool kAligned>
__device__ __forceinline__ void walk_slots(
    const SdmLoopParams& p,
    const LoopItem& it,
    int64_t q,
    S* bank,
    S* grad,
    const float* x,
    const float* y,
    const SdmSaved& saved,
    int64_t first_row,
    int64_t row_bytes
) {
  constexpr int kUnroll = 2;
  const SdmRecords& r = p.records;
  const int4* groups = r.group + q * r.n;
  const float* decays = r.group_decay + q * r.n;
  const int4* entries = r.entry + q * r.n;
  const int64_t plane = (it.slice * r.num_q + q) * r.n;
  float* dot_row = p.dots.row + plane;
  float* dot_decay = p.dots.decay + plane;
  const int C = static_cast<int>(p.dims.C);
  const int written = r.group_count[q].x;
  const int count = r.group_count[q].y;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const int lane = threadIdx.x % kRowLanes;
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
  for (int base = begin + threadIdx.x / kRowLanes; base < end; base += kRowGroups * kUnroll) {
    int4 group[kUnroll];
    Piece<S> g_row[kUnroll], m_row[kUnroll];
    int4 entry[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int g = base + u * kRowGroups;
      group[u] = g < end ? __ldg(groups + g) : make_int4(-1, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int g = base + u * kRowGroups;
      if (group[u].x >= 0) {
        g_row[u] = load_piece<S, kAligned>(grad + group[u].x * p.grad.stride[2], at);
        m_row[u] = g < written ? load_saved_piece<S, kAligned>(saved, row_bytes, first_row + g, at)
                               : load_piece<S, kAligned>(bank + group[u].x * p.bank.stride[2], at);
        entry[u] = __ldg(entries + group[u].y);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int g = base + u * kRowGroups;
      if (group[u].x < 0) {
        continue;
      }
      float grad_x[kVec<S>], m[kVec<S>];
      unpack(g_row[u], grad_x);
      unpack(m_row[u], m);
      if (g < written) {
        store_piece<S, kAligned>(bank + group[u].x * p.bank.stride[2], at, m_row[u]);
        const float decay = __ldg(decays + g);
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kVec<S>; ++c) {
          dot = fmaf(grad_x[c], m[c], dot);
          grad_x[c] *= decay;
        }
        dot = group_sum(dot);
        if (lane == 0) {
          dot_decay[g] = dot;
        }
      }
      int4 e = entry[u];
      const int total = group[u].z + group[u].w;
      for (int k = 0;;) {
        const bool write = k < group[u].z;
        const float weight = write ? -__int_as_float(e.y) : __int_as_float(e.y);
        const int row = e.x & ~kOwnerBit;
        float token[kVec<S>];
        load_token<S>(write ? x + row * kTokenStride<S> : y + (row - C) * kTokenStride<S>, token);
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kVec<S>; ++c) {
          grad_x[c] = fmaf(weight, token[c], grad_x[c]);
          dot = fmaf(token[c], m[c], dot);
        }
        dot = group_sum(dot);
        if (lane == 0) {
          dot_row[group[u].y + k] = dot;
        }
        if (++k >= total) {
          break;
        }
        e = __ldg(entries + group[u].y + k);
      }
      store_piece<S, kAligned>(grad + group[u].x * p.grad.stride[2], at, pack<S>(grad_x));
    }
  }
}

template <typename S, bool kAligned>
__global__ void __launch_bounds__(kLoopThreads, 1) sdm_bwd_loop_kernel(const SdmLoopParams p) {
  extern __shared__ __align__(16) float smem[];
  const LoopItem it(p);
  const SdmDims& dims = p.dims;
  const int Cp = p.records.Cp;
  float* x = smem;                         // gathered gradient, then dv
  float* y = smem + Cp * kTokenStride<S>;  // errors of own tokens, then dy of all
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
      store_token<S>(y + i * kTokenStride<S>, row);
    }
    gather_gradient<S, kAligned>(p, it, q, place, grad, own_begin, own_end, y, x);
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
    product.template put<true>(x, 0, Cp / 16);
    __syncthreads();  // the gradient of the errors is complete
    product.template run<true>(p.records.inverse + q * Cp * Cp, Cp, x, 0, Cp / 16);
    __syncthreads();  // all warps have read it
    product.template put<false>(x, 0, Cp / 16);
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
    const int64_t first_row =
        replay ? (it.stream * p.window.chunks + k) * reserved
               : it.head * p.saved.rows_per_head + it.sequence->first_row + chunk * reserved;
    walk_slots<S, kAligned>(p, it, q, bank, grad, x, y, saved, first_row, row_bytes);
    finish_rows(p, it, &round);
  }
}

}  // namespace sdm::cuda
