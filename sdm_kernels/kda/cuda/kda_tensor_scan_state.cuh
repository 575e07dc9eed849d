// SPDX-License-Identifier: Apache-2.0
//! @file The state that a warp carries through the scan of the forward: 16 value columns of S^T as
//! accumulators, their scales, and their ways to and from memory.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_rows.cuh"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda::cuda {

// A power of two and its inverse.
struct PowerOfTwo {
  float factor, inverse;
};

// Brings a largest magnitude into [2^2, 2^6), by a power of 2^4 so that it seldom changes: the
// state may grow by 2^8 within the chunk for which it was measured, and small elements keep their
// bits.
__device__ __forceinline__ PowerOfTwo column_scale(float largest) {
  if (!(largest <= 3.0e38f)) {
    return {1.0f, 1.0f};
  }
  int power = (static_cast<int>(__float_as_uint(largest) >> 23) - 127 - 2) >> 2;
  power = 4 * (power < -30 ? -30 : (power > 30 ? 30 : power));
  return {
      __uint_as_float(static_cast<uint32_t>(127 - power) << 23),
      __uint_as_float(static_cast<uint32_t>(127 + power) << 23)
  };
}

// Of the value columns of fragment rows g and g + 8.
struct ColumnScales {
  PowerOfTwo low, high;
};

struct ColumnPeaks {
  float low, high;  // largest magnitudes

  __device__ __forceinline__ void include(const ColumnPeaks& other) {
    low = fmaxf(low, other.low);
    high = fmaxf(high, other.high);
  }

  // Over the lanes that share the columns.
  __device__ __forceinline__ void share() {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      low = fmaxf(low, __shfl_xor_sync(0xffffffffu, low, lanes));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, lanes));
    }
  }

  // Over all columns of the warp.
  __device__ __forceinline__ void share_all() {
    low = fmaxf(low, high);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      low = fmaxf(low, __shfl_xor_sync(0xffffffffu, low, lanes));
    }
    high = low;
  }

  __device__ __forceinline__ ColumnScales scales() const {
    return {column_scale(low), column_scale(high)};
  }
};

// Whether a half of an operand is about to overflow: 2^15 or more.
template <int kSteps>
__device__ __forceinline__ bool near_overflow(const uint32_t (&a)[kSteps][4]) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = largest_f16(largest, a[k][i]);
    }
  }
  return __any_sync(0xffffffffu, (largest >> 16) >= 0x7800u || (largest & 0xffffu) >= 0x7800u);
}

// Largest magnitudes of transposed rows (kda_tensor_scan_rows.cuh).
__device__ __forceinline__ ColumnPeaks peaks_of_rows(const uint32_t (&x)[8][2], bool bf16) {
  uint32_t low = 0, high = 0;
  if (bf16) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      low = largest_bf16(low, x[n][0]);
      high = largest_bf16(high, x[n][1]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      low = largest_f16(low, x[n][0]);
      high = largest_f16(high, x[n][1]);
    }
  }
  const float2 a = bf16 ? unpack_bf16(low) : unpack_f16(low);
  const float2 b = bf16 ? unpack_bf16(high) : unpack_f16(high);
  return {fmaxf(a.x, a.y), fmaxf(b.x, b.y)};
}

// The 16 value columns of a warp: S^T times the scales of its two rows, as accumulators.
template <int kK>
struct ScanState {
  static constexpr int kCarryFloats = (kK / 2 + 2) * 32;  // of a warp, between windows
  float s[kK / 8][4];
  ColumnScales scale = {{1.0f, 1.0f}, {1.0f, 1.0f}};

  __device__ __forceinline__ void multiply(float low, float high) {
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      s[n][0] *= low;
      s[n][1] *= low;
      s[n][2] *= high;
      s[n][3] *= high;
    }
  }

  __device__ __forceinline__ void rescale(const ColumnScales& next) {
    const bool same = next.low.factor == scale.low.factor && next.high.factor == scale.high.factor;
    if (__builtin_expect(__any_sync(0xffffffffu, !same), 0)) {
      // In two steps, whose product may leave the range of float.
      float low = scale.low.inverse;
      float high = scale.high.inverse;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        multiply(low, high);
        low = next.low.factor;
        high = next.high.factor;
      }
      scale = next;
    }
  }

  __device__ __forceinline__ void unscale() { multiply(scale.low.inverse, scale.high.inverse); }

  // The decay of a chunk; `gamma` is that of the lane's keys.
  __device__ __forceinline__ void decay(const float2* gamma) {
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      const float2 x = gamma[n * 4];
      s[n][0] *= x.x;
      s[n][1] *= x.y;
      s[n][2] *= x.x;
      s[n][3] *= x.y;
    }
  }

  // Without the scales, this lane's part.
  __device__ __forceinline__ ColumnPeaks peaks() const {
    ColumnPeaks out = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      out.include({fmaxf(fabsf(s[n][0]), fabsf(s[n][1])), fmaxf(fabsf(s[n][2]), fabsf(s[n][3]))});
    }
    return {out.low * scale.low.inverse, out.high * scale.high.inverse};
  }

  // The same from the operand that was made of it, where what is too small for fp16 counts as its
  // smallest number: a state that is 0 there and not in float may not be taken for nothing.
  __device__ __forceinline__ ColumnPeaks peaks(const uint32_t (&operand)[kK / 16][4]) const {
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      low = largest_f16(low, operand[k][0]);
      high = largest_f16(high, operand[k][1]);
      low = largest_f16(low, operand[k][2]);
      high = largest_f16(high, operand[k][3]);
    }
    const float2 a = unpack_f16(low);
    const float2 b = unpack_f16(high);
    constexpr float kSmallest = 1.0f / (1 << 24);
    return {
        fmaxf(fmaxf(a.x, a.y), kSmallest) * scale.low.inverse,
        fmaxf(fmaxf(b.x, b.y), kSmallest) * scale.high.inverse
    };
  }

  // To and from the next window, with the peaks that choose the scales of its first chunk.
  __device__ __forceinline__ void put_carry(float* to, const ColumnPeaks& peaks) const {
    const int lane = threadIdx.x % 32;
    to += lane * 4;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      *reinterpret_cast<float4*>(to + n * 128) = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
    }
    *reinterpret_cast<float2*>(to + kK * 16 - lane * 2) = make_float2(peaks.low, peaks.high);
  }

  __device__ __forceinline__ ColumnPeaks take_carry(const float* from) {
    const int lane = threadIdx.x % 32;
    from += lane * 4;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(from + n * 128);
      s[n][0] = x.x;
      s[n][1] = x.y;
      s[n][2] = x.z;
      s[n][3] = x.w;
    }
    const float2 peaks = *reinterpret_cast<const float2*>(from + kK * 16 - lane * 2);
    return {peaks.x, peaks.y};
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = 0.0f;
      }
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
__device__ __forceinline__ void load_elements(
    ScanState<kK>& state, const KdaStateView& from, int64_t row, int64_t hv, int64_t column0
) {
  const Element* data = static_cast<const Element*>(from.data);
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.s[n][i] = to_f32(data[ScanState<kK>::offset(from.stride, row, hv, column0, n, i)]);
    }
  }
}

// A state given by the caller, zero if there is none.
template <int kK>
__device__ __forceinline__ void load_state(
    ScanState<kK>& state, const KdaStateView& from, int64_t row, int64_t hv, int64_t column0
) {
  if (from.data == nullptr) {
    state.clear();
  } else if (from.dtype == DType::kF32) {
    load_elements<float>(state, from, row, hv, column0);
  } else if (from.dtype == DType::kBf16) {
    load_elements<Bf16>(state, from, row, hv, column0);
  } else {
    load_elements<F16>(state, from, row, hv, column0);
  }
}

// To the caller, in float; nothing if it does not want it.
template <int kK>
__device__ __forceinline__ void store_state(
    const ScanState<kK>& state, const KdaStateView& to, int64_t row, int64_t hv, int64_t column0
) {
  if (to.data == nullptr) {
    return;
  }
  float* data = static_cast<float*>(to.data);
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      data[ScanState<kK>::offset(to.stride, row, hv, column0, n, i)] = state.s[n][i];
    }
  }
}

// The state at the start of a chunk, row `row` of the chunk states, in float.
template <int kK>
__device__ __forceinline__ void store_float_state(
    const ScanState<kK>& state,
    const KdaChunkStates& states,
    const KdaDims& dims,
    int64_t row,
    int64_t hv,
    int64_t column0
) {
  const int64_t V = dims.V;
  const int64_t stride[4] = {0, 0, states.v_first ? 1 : V, states.v_first ? kK : 1};
  float* to = static_cast<float*>(states.data) + (row * dims.HV + hv) * kK * V;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[ScanState<kK>::offset(stride, 0, 0, column0, n, i)] =
          state.s[n][i] * (i < 2 ? state.scale.low.inverse : state.scale.high.inverse);
    }
  }
}

// The same in 16 bits, from the operand that was made of the state; [K, V] without kAny.
template <bool kAny, int kK>
__device__ __forceinline__ void store_operand_state(
    const uint32_t (&operand)[kK / 16][4],
    const ColumnScales& scale,
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
  const float low = scale.low.inverse;
  const float high = scale.high.inverse;
  const bool bf16 = states.dtype == DType::kBf16;
  uint16_t* const to = static_cast<uint16_t*>(states.data) + (row * dims.HV + hv) * kK * V;
  uint16_t* const row_low = to + (column0 + column_of_row(g)) * kK + 2 * t;
  uint16_t* const row_high = to + (column0 + column_of_row(g + 8)) * kK + 2 * t;
  uint16_t* const key = to + g * V + column0 + t * 4;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float2 a = unpack_f16(operand[n / 2][n % 2 * 2]);
    const float2 b = unpack_f16(operand[n / 2][n % 2 * 2 + 1]);
    const uint32_t x = bf16 ? pack_bf16(a.x * low, a.y * low) : pack_f16(a.x * low, a.y * low);
    const uint32_t y = bf16 ? pack_bf16(b.x * high, b.y * high) : pack_f16(b.x * high, b.y * high);
    if (kAny && states.v_first) {
      *reinterpret_cast<uint32_t*>(row_low + n * 8) = x;
      *reinterpret_cast<uint32_t*>(row_high + n * 8) = y;
    } else {
      *reinterpret_cast<uint2*>(key + n * 8 * V) =
          make_uint2(transpose_matrix(x), transpose_matrix(y));
    }
  }
}

}  // namespace sdm::kda::cuda
