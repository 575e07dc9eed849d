// SPDX-License-Identifier: Apache-2.0
//! @file The top-k backward: d_scores[column] = sum of the d_values whose slot uses the column,
//! added in lane order in float32, rounded once.
//!
//! Rows whose N sums fit shared memory get a warp: 32 lanes of the row at a time, lanes that share
//! a column are found by a match, and the first of them adds all of theirs. Other rows get a block:
//! zeros first, then the first lane of every column walks the lanes behind it. No float atomics.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_device.cuh"

namespace sdm::topk {

constexpr int kBwdThreads = 256;

// An id, or -1 if it names no slot.
__device__ __forceinline__ int64_t load_id(const DeviceBwdParams& params, int64_t offset) {
  const int64_t id = params.wide_ids ? static_cast<const int64_t*>(params.indices)[offset]
                                     : static_cast<const int32_t*>(params.indices)[offset];
  return id >= 0 && id < params.num_slots ? id : -1;
}

// Removes the last factor's column from a valid id and returns it.
__device__ __forceinline__ int32_t take_column(int64_t& id, int32_t width) {
  if (id <= UINT32_MAX) {
    const uint32_t narrow = static_cast<uint32_t>(id);
    const uint32_t rest = narrow / static_cast<uint32_t>(width);
    id = rest;
    return static_cast<int32_t>(narrow - rest * static_cast<uint32_t>(width));
  }
  const int64_t rest = id / width;
  const int64_t column = id - rest * width;
  id = rest;
  return static_cast<int32_t>(column);
}

// One warp. sums: [round_up(N, 4)], deltas: [32], both 16-byte aligned.
template <typename T>
__device__ __forceinline__ void scatter_row(
    const DeviceBwdParams& params, int64_t row, float* sums, float* deltas, int lane
) {
  const int num_columns = static_cast<int>(params.num_columns);
  const T* d_values = static_cast<const T*>(params.d_values) + params.d_values_rows.offset(row);
  const int64_t id_offset = params.indices_rows.offset(row);
  for (int at = lane * 4; at < num_columns; at += kWarp * 4) {
    *reinterpret_cast<float4*>(sums + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int first = 0; first < params.num_selected; first += kWarp) {
    const int own = first + lane;
    int64_t id = -1;
    float delta = 0.0f;
    if (own < params.num_selected) {
      id = load_id(params, id_offset + own * params.indices_stride);
      delta = to_f32(d_values[own * params.d_values_stride]);
    }
    const bool valid = id >= 0;
    __syncwarp();  // the lanes before have been added, and the sums are cleared
    deltas[lane] = delta;
    __syncwarp();  // the deltas are there
    int offset = num_columns;
    for (int f = params.num_factors - 1; f >= 0; --f) {
      offset -= params.widths[f];
      const int column = valid ? offset + take_column(id, params.widths[f]) : -1 - lane;
      uint32_t peers = __match_any_sync(kFullMask, column);
      // Factors have columns of their own, so the adding lanes of all factors never meet.
      if (valid && __ffs(static_cast<int>(peers)) - 1 == lane) {
        float sum = sums[column];
        while (peers != 0) {
          sum = __fadd_rn(sum, deltas[__ffs(static_cast<int>(peers)) - 1]);
          peers &= peers - 1;
        }
        sums[column] = sum;
      }
      __syncwarp();  // together again for the next match
    }
  }
  __syncwarp();  // all sums are complete
  T* d_scores = static_cast<T*>(params.d_scores) + row * params.num_columns;
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  if (num_columns % kVector == 0 && reinterpret_cast<uintptr_t>(params.d_scores) % 16 == 0) {
    for (int at = lane * kVector; at < num_columns; at += kWarp * kVector) {
      union {
        uint4 bits;
        T elements[kVector];
      } vector;

#pragma unroll
      for (int v = 0; v < kVector; v += 4) {
        const float4 four = *reinterpret_cast<const float4*>(sums + at + v);
        vector.elements[v] = from_f32<T>(four.x);
        vector.elements[v + 1] = from_f32<T>(four.y);
        vector.elements[v + 2] = from_f32<T>(four.z);
        vector.elements[v + 3] = from_f32<T>(four.w);
      }
      *reinterpret_cast<uint4*>(d_scores + at) = vector.bits;
    }
  } else {
    for (int at = lane; at < num_columns; at += kWarp) {
      d_scores[at] = from_f32<T>(sums[at]);
    }
  }
  __syncwarp();  // the next row clears the sums
}

// Floats of shared memory per warp.
__host__ __device__ constexpr int64_t bwd_warp_floats(int64_t num_columns) {
  return kWarp + round_up(num_columns, 4);
}

template <typename T>
__global__ void __launch_bounds__(kBwdThreads) topk_bwd_warp_kernel(
    const __grid_constant__ DeviceBwdParams params
) {
  extern __shared__ __align__(16) float s_floats[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  float* deltas = s_floats + warp * bwd_warp_floats(params.num_columns);
  const int64_t step = static_cast<int64_t>(gridDim.x) * num_warps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * num_warps + warp; row < params.num_rows;
       row += step) {
    scatter_row<T>(params, row, deltas + kWarp, deltas, lane);
  }
}

struct BwdBlockShared {
  int64_t ids[kMaxTopk];  // what is left of them after the factors behind
  float deltas[kMaxTopk];
  int32_t columns[kMaxTopk];  // -1: no slot
};

template <typename T>
__device__ void scatter_row_block(
    const DeviceBwdParams& params, int64_t row, BwdBlockShared& shared
) {
  const int thread = static_cast<int>(threadIdx.x);
  const T* d_values = static_cast<const T*>(params.d_values) + params.d_values_rows.offset(row);
  const int64_t id_offset = params.indices_rows.offset(row);
  T* d_scores = static_cast<T*>(params.d_scores) + row * params.num_columns;
  for (int64_t at = thread; at < params.num_columns; at += kBwdThreads) {
    d_scores[at] = from_f32<T>(0.0f);
  }
  for (int lane = thread; lane < params.num_selected; lane += kBwdThreads) {
    shared.ids[lane] = load_id(params, id_offset + lane * params.indices_stride);
    shared.deltas[lane] = to_f32(d_values[lane * params.d_values_stride]);
  }
  int64_t offset = params.num_columns;
  for (int f = params.num_factors - 1; f >= 0; --f) {
    offset -= params.widths[f];
    for (int lane = thread; lane < params.num_selected; lane += kBwdThreads) {
      int64_t id = shared.ids[lane];  // written by this thread
      shared.columns[lane] = id >= 0 ? take_column(id, params.widths[f]) : -1;
      shared.ids[lane] = id;
    }
    __syncthreads();  // the columns are there; the zeros of the row are written
    for (int lane = thread; lane < params.num_selected; lane += kBwdThreads) {
      const int32_t column = shared.columns[lane];
      bool first = column >= 0;
      for (int other = 0; first && other < lane; ++other) {
        first = shared.columns[other] != column;
      }
      if (!first) {
        continue;
      }
      float sum = 0.0f;
      for (int other = lane; other < params.num_selected; ++other) {
        if (shared.columns[other] == column) {
          sum = __fadd_rn(sum, shared.deltas[other]);
        }
      }
      d_scores[offset + column] = from_f32<T>(sum);
    }
    __syncthreads();  // the columns of the next factor replace these
  }
}

template <typename T>
__global__ void __launch_bounds__(kBwdThreads) topk_bwd_block_kernel(
    const __grid_constant__ DeviceBwdParams params
) {
  __shared__ BwdBlockShared shared;
  for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    scatter_row_block<T>(params, row, shared);
  }
}

}  // namespace sdm::topk
