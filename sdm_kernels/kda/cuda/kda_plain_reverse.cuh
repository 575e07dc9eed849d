// SPDX-License-Identifier: Apache-2.0
//! @file The recurrence of the state's gradient, from the last tile of a window to its first: the
//! mirror image of the forward scan.
//!
//!     dU <- M^T do + kr dS;  dS <- diag(gamma) dS - w^T diag(beta) dU + qd^T do
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_scan.cuh"

namespace sdm::kda::plain {

struct ReverseScanParams {
  PlainCall call;
  KdaView d_out;
  KdaStateView d_final, d_initial;  // data null: zero; not wanted
  const float* carry_in;            // [lanes, HV, V / 4, K, 4] of the windows after and before
  float* carry_out;
  int64_t slices;
};

// Elements of d_out in the slice of a tile that a thread brings.
template <int kLanes>
constexpr int kGradElements = kTile * ScanShape<kLanes>::kSlice / kThreads;

template <int kLanes>
__device__ __forceinline__ void fetch_grads(
    const ReverseScanParams& p,
    const ScanWork& work,
    int64_t tile,
    float (&x)[kGradElements<kLanes>]
) {
  constexpr int kSlice = ScanShape<kLanes>::kSlice;
  const PlainSequence& sequence = work.item.sequence;
  const int64_t rows = sequence.length - tile * kTile;
  const int64_t base = row_of(p.d_out, sequence.batch, sequence.begin + tile * kTile, work.hv);
  with_dtype(p.d_out.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#pragma unroll
    for (int m = 0; m < kGradElements<kLanes>; ++m) {
      const int e = static_cast<int>(threadIdx.x) + m * kThreads;
      const int row = e / kSlice;
      const int64_t column = work.slice * kSlice + e % kSlice;
      const int64_t at = base + row * p.d_out.stride[1] + column * p.d_out.stride[3];
      x[m] = row < rows && column < p.call.dims.V ? load_as<T>(p.d_out.data, at) : 0.0f;
    }
  });
}

template <int kLanes>
__device__ __forceinline__ void put_grads(float* to, const float (&x)[kGradElements<kLanes>]) {
#pragma unroll
  for (int m = 0; m < kGradElements<kLanes>; ++m) {
    to[static_cast<int>(threadIdx.x) + m * kThreads] = x[m];
  }
}

template <int kLanes>
__device__ __forceinline__ void load_reverse_stage(
    const ReverseScanParams& p, const ScanWork& work, int64_t tile, int stage
) {
  const ForwardScanShared<kLanes> s{shared_floats()};
  constexpr int kKeys = ScanShape<kLanes>::kKeys;
  const PlainRecords& records = p.call.records;
  const int64_t K = p.call.dims.K, slot = work.slot(tile);
  copy_rows<kKeys>(s.w(stage), records.w + slot * kTile * K, K);
  copy_rows<kKeys>(s.kr(stage), records.kr + slot * kTile * K, K);
  copy_rows<kKeys>(s.qd(stage), records.qd + slot * kTile * K, K);
  copy_floats(s.scores(stage), records.scores + slot * kScores, kScores);
  copy_floats(s.gamma(stage), records.gamma + slot * K, K);
  copy_floats(s.beta(stage), records.beta + slot * kTile, kTile);
  close_copies();
}

template <int kLanes>
__device__ __forceinline__ void reverse_tile(
    const ReverseScanParams& p,
    const ScanWork& work,
    int64_t tile,
    int stage,
    StatePart<kLanes>* state
) {
  constexpr int kKeys = ScanShape<kLanes>::kKeys, kSlice = ScanShape<kLanes>::kSlice;
  constexpr int kOwn = 32 / kLanes;
  const ForwardScanShared<kLanes> s{shared_floats()};
  const int64_t V = p.call.dims.V, slot = work.slot(tile);
  const int columns =
      static_cast<int>(threadIdx.x) / 32 * ScanShape<kLanes>::kWarpColumns + state->warp_column;
  float* writes = s.writes();  // -beta dU
  const float *d_out = s.u(stage), *beta = s.beta(stage), *scores = s.scores(stage);
#pragma unroll 1
  for (int first = 0; first < kTile; first += 8) {
    float sums[32];
    state->multiply_rows(s.kr(stage) + first * kKeys, sums);
    reduce_scatter<kLanes, 32>(sums, state->lane);
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
      const int at = state->lane * kOwn + m;
      const int row = first + at / 4, b = at % 4;
      float du = sums[m];
#pragma unroll 4
      for (int i = first; i < kTile; ++i) {
        if (i >= row) {
          du = fmaf(scores[i * kTile + row], d_out[i * kSlice + columns + b], du);
        }
      }
      writes[row * kSlice + columns + b] = -beta[row] * du;
      if (state->live) {
        p.call.records.du[(slot * kTile + row) * V + state->column + b] = du;
      }
    }
  }
  __syncwarp();  // a warp reads its own columns of the writes only
  state->decay(s.gamma(stage));
#pragma unroll 2
  for (int i = 0; i < kTile; ++i) {
    state->add_outer(s.w(stage) + i * kKeys, load4(writes + i * kSlice + columns));
    state->add_outer(s.qd(stage) + i * kKeys, load4(d_out + i * kSlice + columns));
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads, kLanes == 4 ? 2 : 3) kda_plain_reverse_scan_kernel(
    const __grid_constant__ ReverseScanParams p
) {
  using Shared = ForwardScanShared<kLanes>;
  const KdaDims& dims = p.call.dims;
  const int64_t slice = blockIdx.x % p.slices;
  const int64_t hv = blockIdx.x / p.slices % dims.HV;
  const PlainItem item = get_item(p.call, blockIdx.x / p.slices / dims.HV);
  if (!item.live) {
    return;
  }
  const ScanWork work = make_work(p.call, item, hv, slice);
  const int64_t carry = (item.lane * dims.HV + hv) * dims.K * dims.V;

  StatePart<kLanes> state(dims.K, dims.V, slice);
  if (!item.ends) {
    state.load_packed(p.carry_in + carry);
  } else if (p.d_final.data != nullptr) {
    state.load(p.d_final, item.sequence.n, hv);
  }
  float* shared = shared_floats();
  for (int e = static_cast<int>(threadIdx.x); e < Shared::kFloats; e += kThreads) {
    shared[e] = 0.0f;  // what is beyond K stays so
  }
  __syncthreads();

  const Shared s{shared};
  float grads[kGradElements<kLanes>];
  if (work.first_tile < work.end_tile) {
    load_reverse_stage<kLanes>(p, work, work.end_tile - 1, 0);
    fetch_grads<kLanes>(p, work, work.end_tile - 1, grads);
    put_grads<kLanes>(s.u(0), grads);
  }
  for (int64_t tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
    const int64_t step = work.end_tile - 1 - tile;
    const int stage = Shared::kStages == 2 ? static_cast<int>(step % 2) : 0;
    const bool more = tile > work.first_tile;
    if (Shared::kStages == 2 && more) {
      load_reverse_stage<kLanes>(p, work, tile - 1, 1 - stage);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();  // the tile is there
    if (more) {
      fetch_grads<kLanes>(p, work, tile - 1, grads);
    }
    state.store_packed(p.call.records.d_states + work.slot(tile) * dims.K * dims.V);
    reverse_tile<kLanes>(p, work, tile, stage, &state);
    __syncthreads();  // its memory is free
    if (more) {
      put_grads<kLanes>(s.u(Shared::kStages == 2 ? 1 - stage : 0), grads);
      if (Shared::kStages == 1) {
        load_reverse_stage<kLanes>(p, work, tile - 1, 0);
      }
    }
  }
  if (!item.starts) {
    state.store_packed(p.carry_out + carry);
  } else if (p.d_initial.data != nullptr) {
    state.store(p.d_initial, item.sequence.n, hv);
  }
}

}  // namespace sdm::kda::plain
