// SPDX-License-Identifier: Apache-2.0
//! @file The last sums of the backward, each in one fixed order: gradients of q and k over the
//! value heads of a key head, those of the gate's parameters over all tokens.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_tile.cuh"

namespace sdm::kda::plain {

struct FinishParams {
  PlainCall call;
  void* d_q;
  void* d_k;
};

// x: a row that make_row() has normalised by `factor`; d: the gradient of what it became.
__device__ __forceinline__ void norm_gradient(
    const float (&x)[kLaneColumns], float factor, float (&d)[kLaneColumns]
) {
  float dot = 0.0f;
#pragma unroll
  for (int m = 0; m < kLaneColumns; ++m) {
    dot = fmaf(x[m], d[m], dot);
  }
  dot = warp_sum(dot);
#pragma unroll
  for (int m = 0; m < kLaneColumns; ++m) {
    d[m] = factor * fmaf(-x[m], dot, d[m]);
  }
}

// One block a tile and key head, a warp a row.
__global__ void __launch_bounds__(kThreads) kda_plain_finish_kernel(
    const __grid_constant__ FinishParams p
) {
  const KdaDims& dims = p.call.dims;
  const int64_t K = dims.K, group = dims.HV / dims.H;
  TilePlace place;
  if (!find_tile(p.call, group, &place)) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int job = static_cast<int>(threadIdx.x) / 32; job < 2 * place.rows; job += kWarps) {
    const int i = job / 2;
    const bool is_q = job % 2 == 0;
    const KdaView& view = is_q ? p.call.tokens.q : p.call.tokens.k;
    const float* grads = is_q ? p.call.records.qd : p.call.records.kr;
    uint32_t raw[kLaneColumns];
    const int64_t row = row_of(view, place.batch, place.token + i, place.h);
    load_raw_row(view, row, lane, 32, K, raw);
    float d[kLaneColumns] = {};
    for (int64_t member = 0; member < group; ++member) {
      const float* from = grads + ((place.slot + member) * kTile + i) * K;
#pragma unroll
      for (int m = 0; m < kLaneColumns; ++m) {
        const int64_t c = lane + 32 * m;
        d[m] += c < K ? from[c] : 0.0f;
      }
    }
    if (p.call.options.l2norm) {
      float x[kLaneColumns];
      const float factor = make_row(view.dtype, raw, true, x);
      norm_gradient(x, factor, d);
    }
    const int64_t to = ((place.batch * dims.T + place.token + i) * dims.H + place.h) * K;
    with_dtype(view.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
#pragma unroll
      for (int m = 0; m < kLaneColumns; ++m) {
        const int64_t c = lane + 32 * m;
        if (c < K) {
          static_cast<T*>(is_q ? p.d_q : p.d_k)[to + c] = narrow<T>(d[m]);
        }
      }
    });
  }
}

struct GateSumParams {
  PlainCall call;
  double* bias;  // [lanes, HV, K], lanes: sequences, or one with cu_seqlens
  double* rate;  // [lanes, HV]
};

// Adds the window's tiles, the last one first, as the windows come. One block a lane and head.
__global__ void __launch_bounds__(kThreads) kda_plain_gate_sum_kernel(
    const __grid_constant__ GateSumParams p
) {
  const PlainCall& call = p.call;
  const int64_t K = call.dims.K, HV = call.dims.HV;
  const int64_t lane = blockIdx.x / HV, hv = blockIdx.x % HV;
  const int64_t target = (call.window.first_sequence + lane) * HV + hv;
  for (int64_t c = static_cast<int64_t>(threadIdx.x); c <= K; c += kThreads) {
    double* total = c < K ? p.bias + target * K + c : p.rate + target;
    double sum = *total;
    for (int64_t chunk = call.window.chunks - 1; chunk >= 0; --chunk) {
      const int64_t row = lane * call.window.chunks + chunk;
      PlainSequence sequence;
      int64_t place;
      if (!find_chunk(call, row, &sequence, &place)) {
        continue;
      }
      for (int64_t tile = call.tiles() - 1; tile >= 0; --tile) {
        if (place * call.dims.C + tile * kTile < sequence.length) {
          const int64_t slot = call.slot(row, tile, hv);
          sum += static_cast<double>(
              c < K ? call.records.d_bias[slot * K + c] : call.records.d_rate[slot]
          );
        }
      }
    }
    *total = sum;
  }
}

struct GateStoreParams {
  const double* bias;
  const double* rate;
  int64_t lanes, HV, K;
  float* d_A_log;    // null: not wanted
  float* d_dt_bias;  // null: not wanted
};

// One block a head: the sum over the lanes.
__global__ void __launch_bounds__(kThreads) kda_plain_gate_store_kernel(
    const __grid_constant__ GateStoreParams p
) {
  const int64_t hv = blockIdx.x;
  for (int64_t c = static_cast<int64_t>(threadIdx.x); c <= p.K; c += kThreads) {
    double sum = 0.0;
    for (int64_t lane = 0; lane < p.lanes; ++lane) {
      const int64_t at = lane * p.HV + hv;
      sum += c < p.K ? p.bias[at * p.K + c] : p.rate[at];
    }
    if (c < p.K) {
      if (p.d_dt_bias != nullptr) {
        p.d_dt_bias[hv * p.K + c] = static_cast<float>(sum);
      }
    } else if (p.d_A_log != nullptr) {
      p.d_A_log[hv] = static_cast<float>(sum);
    }
  }
}

}  // namespace sdm::kda::plain
