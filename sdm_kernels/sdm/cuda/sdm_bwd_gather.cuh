// SPDX-License-Identifier: Apache-2.0
//! @file Backward, first stage of a chunk: the gradient of its errors from that of the bank.
//!
//! x[token] = sum over writes of post * G[slot]; error_grad[lane] = <e[token], G[slot]>. The split
//! of the work is that of sdm_gather.cuh, eight write lanes a round. Bytes per chunk and stream:
//! C W rows.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_gather.cuh"

namespace sdm::cuda {

template <typename S, bool kAligned>
__global__ void __launch_bounds__(kGatherThreads, 4) sdm_bwd_gather_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  static_assert(kRingDepth == kRowLanes);
  __shared__ uint4 ring_memory[kRingDepth * kGatherThreads];
  const GatherPlace at_place(p);
  const StreamChunk c(p, at_place.stream);
  if (!c.exists) {
    wait_for_previous();
    return;
  }
  prefetch_matrices(p, c);
  const SdmDims& dims = p.dims;
  const int W = static_cast<int>(dims.W);
  const int lanes = static_cast<int>(dims.C) * W;
  const int i = at_place.token;
  const bool live = i < c.place.num_tokens;
  const bool inside = at_place.slice < p.num_slices;
  const GatherRing ring(ring_memory);
  const LaneColumns at = lane_columns<S>(at_place.slice, dims.D);
  const S* grad = static_cast<const S*>(p.grad.data) + c.sequence * p.grad.stride[0] +
                  c.head * p.grad.stride[1];
  const LaneRows<S, kAligned> rows(grad, p.grad.stride[2], at);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int2* writes = p.records.write_post + c.q * lanes + (live ? i * W : 0);
  float* dots =
      p.dots.error_grad + ((inside ? at_place.slice : 0) * p.records.num_q + c.q) * lanes + i * W;
  const int rounds = (W + kRowLanes - 1) / kRowLanes;
  float error[kVec<S>] = {};
  if (live) {
    load_token_columns<S>(float_rows(p.errors), token_row(dims, c.place, i), at, kAligned, error);
  }
  // loaded a round before it is looked at
  const auto record = [&](int round) {
    const int a = round * kRowLanes + lane;
    return __ldg(writes + (a < W ? a : 0));
  };
  int2 next = record(0);
  const auto check = [&](int round) {
    const bool valid = live && round * kRowLanes + lane < W;
    next.x = valid ? next.x : -1;
    next.y = valid ? next.y : 0;
  };
  float post[kRingDepth];
  const auto start = [&](int j) {
    const int slot = __shfl_sync(0xffffffffu, next.x, j, kRowLanes);
    fetch_lane<S, kAligned>(ring, j, rows.at(slot < 0 ? 0 : slot), at.count, slot >= 0);
    GatherRing::close();
    post[j] = __int_as_float(__shfl_sync(0xffffffffu, next.y, j, kRowLanes));
  };
  check(0);
  wait_for_previous();
#pragma unroll
  for (int j = 0; j < kRingDepth; ++j) {
    start(j);
  }
  next = record(1);
  float sum[kVec<S>] = {};
  for (int round = 0; round < rounds; ++round) {
    check(round + 1);
    float part[kVec<S>] = {};
    float dot[kRowLanes];
#pragma unroll
    for (int j = 0; j < kRingDepth; ++j) {
      GatherRing::wait<kRingDepth - 1>();
      float g[kVec<S>];
      unpack(fetched_piece<S>(ring, j), g);
      dot[j] = 0.0f;
#pragma unroll
      for (int column = 0; column < kVec<S>; ++column) {
        part[column] = fmaf(post[j], g[column], part[column]);
        dot[j] = fmaf(error[column], g[column], dot[j]);
      }
      start(j);
    }
    next = record(round + 2);
#pragma unroll
    for (int column = 0; column < kVec<S>; ++column) {
      sum[column] += part[column];
    }
    const float total = transpose_sum(dot, lane);
    const int a = round * kRowLanes + lane;
    if (live && inside && a < W) {
      dots[a] = total;
    }
  }
  GatherRing::wait<0>();
  if (live) {
    store_token_columns<S>(p.x, DType::kF32, c.scratch(p) + i * dims.D, at, kAligned, sum);
  }
}

}  // namespace sdm::cuda
