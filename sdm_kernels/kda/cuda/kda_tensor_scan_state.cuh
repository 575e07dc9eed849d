// SPDX-License-Identifier: Apache-2.0
//! @file The state that a warp carries through the scan of the forward: 16 value columns of S^T as
//! accumulators, their scales, and their ways to and from memory.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda::cuda {

// The value column of fragment row g or g + 8 within the warp's 16: so that a transposed pair of
// 8 x 8 fragments gives each lane four neighbouring columns.
__device__ __forceinline__ int column_of_row(int row) {
  return 4 * (row % 8 / 2) + row % 2 + (row >= 8 ? 2 : 0);
}

// A power of two and its inverse.
struct PowerOfTwo {
  float factor, inverse;
};

// Brings a largest magnitude near 1 unless it is well inside fp16 anyway.
__device__ __forceinline__ PowerOfTwo column_scale(float largest) {
  const bool inside = largest >= 0x1p-14f && largest < 0x1p7f;
  if (inside || !(largest > 0.0f) || largest > 3.0e38f) {
    return {1.0f, 1.0f};
  }
  int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
  exponent = exponent < 1 ? 1 : (exponent > 253 ? 253 : exponent);
  return {__uint_as_float((254u - exponent) << 23), __uint_as_float(unsigned(exponent) << 23)};
}

// The 16 value columns of a warp: S^T times the scales of its two rows, as accumulators.
template <int kK>
struct ScanState {
  float s[kK / 8][4];
  PowerOfTwo low, high;  // scale of fragment rows g and g + 8

  __device__ __forceinline__ void unscale() {
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      s[n][0] *= low.inverse;
      s[n][1] *= low.inverse;
      s[n][2] *= high.inverse;
      s[n][3] *= high.inverse;
    }
    low = {1.0f, 1.0f};
    high = {1.0f, 1.0f};
  }

  __device__ __forceinline__ void rescale(float low_largest, float high_largest) {
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      a = fmaxf(a, fmaxf(fabsf(s[n][0]), fabsf(s[n][1])));
      b = fmaxf(b, fmaxf(fabsf(s[n][2]), fabsf(s[n][3])));
    }
    a = fmaxf(a * low.inverse, low_largest);
    b = fmaxf(b * high.inverse, high_largest);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, lanes));
      b = fmaxf(b, __shfl_xor_sync(0xffffffffu, b, lanes));
    }
    const PowerOfTwo new_low = column_scale(a);
    const PowerOfTwo new_high = column_scale(b);
    const bool same = new_low.factor == low.factor && new_high.factor == high.factor;
    if (__any_sync(0xffffffffu, !same)) {
      unscale();
#pragma unroll
      for (int n = 0; n < kK / 8; ++n) {
        s[n][0] *= new_low.factor;
        s[n][1] *= new_low.factor;
        s[n][2] *= new_high.factor;
        s[n][3] *= new_high.factor;
      }
      low = new_low;
      high = new_high;
    }
  }

  // Offset of element `i` of tile n in a state with the given strides.
  __device__ __forceinline__ static int64_t offset(
      const int64_t (&stride)[4], int64_t row, int64_t head, int64_t column0, int n, int i
  ) {
    const int lane = threadIdx.x % 32;
    const int key = n * 8 + lane % 4 * 2 + i % 2;
    const int64_t value = column0 + column_of_row(lane / 4 + (i >= 2 ? 8 : 0));
    return row * stride[0] + head * stride[1] + key * stride[2] + value * stride[3];
  }
};

template <typename Element, int kK>
__device__ __forceinline__ void load_initial(
    ScanState<kK>& state, const KdaStateView& initial, int64_t row, int64_t hv, int64_t column0
) {
  const Element* from = static_cast<const Element*>(initial.data);
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.s[n][i] = to_f32(from[ScanState<kK>::offset(initial.stride, row, hv, column0, n, i)]);
    }
  }
}

// The state at the start of a chunk: row `row` of the chunk states.
template <int kK>
__device__ __forceinline__ void store_chunk_state(
    const ScanState<kK>& state,
    const KdaChunkStates& states,
    const KdaDims& dims,
    int64_t row,
    int64_t hv,
    int64_t column0
) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t V = dims.V;
  const int64_t base = (row * dims.HV + hv) * kK * V;
  const float low = state.low.inverse;
  const float high = state.high.inverse;
  if (states.dtype == DType::kF32) {
    const int64_t stride[4] = {0, 0, states.v_first ? 1 : V, states.v_first ? kK : 1};
    float* to = static_cast<float*>(states.data) + base;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[ScanState<kK>::offset(stride, 0, 0, column0, n, i)] =
            state.s[n][i] * (i < 2 ? low : high);
      }
    }
    return;
  }
  const bool bf16 = states.dtype == DType::kBf16;
  uint16_t* const to = static_cast<uint16_t*>(states.data) + base;
  uint16_t* const row_low = to + (column0 + column_of_row(g)) * kK + 2 * t;
  uint16_t* const row_high = to + (column0 + column_of_row(g + 8)) * kK + 2 * t;
  uint16_t* const key = to + g * V + column0 + t * 4;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float a[4] = {
        state.s[n][0] * low, state.s[n][1] * low, state.s[n][2] * high, state.s[n][3] * high
    };
    const uint32_t x = bf16 ? pack_bf16(a[0], a[1]) : pack_f16(a[0], a[1]);
    const uint32_t y = bf16 ? pack_bf16(a[2], a[3]) : pack_f16(a[2], a[3]);
    if (states.v_first) {
      *reinterpret_cast<uint32_t*>(row_low + n * 8) = x;
      *reinterpret_cast<uint32_t*>(row_high + n * 8) = y;
    } else {
      *reinterpret_cast<uint2*>(key + n * 8 * V) =
          make_uint2(transpose_matrix(x), transpose_matrix(y));
    }
  }
}

}  // namespace sdm::kda::cuda
