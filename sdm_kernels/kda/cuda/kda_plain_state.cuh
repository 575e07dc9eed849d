// SPDX-License-Identifier: Apache-2.0
//! @file A state, or its gradient, in the registers of a block: who has which part, and its way
//! from and to memory in any layout.
//!
//! A block has a slice of the value columns, each of its warps some columns of it, and kLanes
//! lanes share a column: a lane has 8 key rows (two runs of 4) of 4 value columns.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_tile.cuh"

namespace sdm::kda::plain {

// Key rows are padded to 8 kLanes; what is beyond K is zero.
template <int kLanes>
struct ScanShape {
  static constexpr int kKeys = 8 * kLanes;
  static constexpr int kWarpColumns = 4 * (32 / kLanes);
  static constexpr int kSlice = kWarps * kWarpColumns;
};

// Smallest kLanes that serves K.
inline int scan_lanes(int64_t K) {
  return K <= 32 ? 4 : K <= 64 ? 8 : K <= 128 ? 16 : 32;
}

template <int kLanes>
struct StatePart {
  float s[8][4];
  int lane;         // among the kLanes of its columns
  int warp_column;  // of the first of its 4 columns, in the warp
  int64_t column;   // the same in the state
  int64_t K;
  bool live;  // it has columns of the state

  __device__ __forceinline__ StatePart(int64_t K_, int64_t V, int64_t slice) : K(K_) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread % kLanes;
    warp_column = thread % 32 / kLanes * 4;
    column = slice * ScanShape<kLanes>::kSlice + thread / 32 * ScanShape<kLanes>::kWarpColumns +
             warp_column;
    live = column < V;
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int a = 0; a < 8; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        s[a][b] = 0.0f;
      }
    }
  }

  // Key row of s[a].
  __device__ __forceinline__ int64_t key(int a) const {
    return (a < 4 ? 0 : 4 * kLanes - 4) + 4 * lane + a;
  }

  // `base`: the state of the head; strides of its rows and columns.
  __device__ __forceinline__ void load(
      const void* data, DType dtype, int64_t base, int64_t key_stride, int64_t column_stride
  ) {
    with_dtype(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
#pragma unroll
      for (int a = 0; a < 8; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          s[a][b] =
              live && key(a) < K
                  ? load_as<T>(data, base + key(a) * key_stride + (column + b) * column_stride)
                  : 0.0f;
        }
      }
    });
  }

  __device__ __forceinline__ void store(
      void* data, DType dtype, int64_t base, int64_t key_stride, int64_t column_stride
  ) const {
    if (!live) {
      return;
    }
    with_dtype(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* to = static_cast<T*>(data) + base + column * column_stride;
      if (key_stride == 1) {
#pragma unroll
        for (int a = 0; a < 8; a += 4) {
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            if (key(a) < K) {
              store_run(
                  to + key(a) + b * column_stride, 1, s[a][b], s[a + 1][b], s[a + 2][b], s[a + 3][b]
              );
            }
          }
        }
        return;
      }
#pragma unroll
      for (int a = 0; a < 8; ++a) {
        if (key(a) < K) {
          store_run(to + key(a) * key_stride, column_stride, s[a][0], s[a][1], s[a][2], s[a][3]);
        }
      }
    });
  }

  __device__ __forceinline__ void load(const KdaStateView& view, int64_t row, int64_t head) {
    const int64_t base = row * view.stride[0] + head * view.stride[1];
    load(view.data, view.dtype, base, view.stride[2], view.stride[3]);
  }

  __device__ __forceinline__ void store(const KdaStateView& view, int64_t row, int64_t head) const {
    const int64_t base = row * view.stride[0] + head * view.stride[1];
    store(view.data, view.dtype, base, view.stride[2], view.stride[3]);
  }

  // `index`: row * HV + head.
  __device__ __forceinline__ void load(const KdaChunkStates& states, int64_t index, int64_t V) {
    const int64_t key_stride = states.v_first ? 1 : V, column_stride = states.v_first ? K : 1;
    load(states.data, states.dtype, index * K * V, key_stride, column_stride);
  }

  __device__ __forceinline__ void store(
      const KdaChunkStates& states, int64_t index, int64_t V
  ) const {
    const int64_t key_stride = states.v_first ? 1 : V, column_stride = states.v_first ? K : 1;
    store(states.data, states.dtype, index * K * V, key_stride, column_stride);
  }

  // The layout of the workspace: [V / 4, K, 4] in float32.
  __device__ __forceinline__ void load_packed(const float* data) {
    const float* from = data + column * K;
#pragma unroll
    for (int a = 0; a < 8; ++a) {
      const float4 x = live && key(a) < K ? load4(from + 4 * key(a)) : make_float4(0, 0, 0, 0);
      s[a][0] = x.x;
      s[a][1] = x.y;
      s[a][2] = x.z;
      s[a][3] = x.w;
    }
  }

  __device__ __forceinline__ void store_packed(float* data) const {
    float* to = data + column * K;
#pragma unroll
    for (int a = 0; a < 8; ++a) {
      if (live && key(a) < K) {
        store4(to + 4 * key(a), s[a][0], s[a][1], s[a][2], s[a][3]);
      }
    }
  }

  // One product with 8 rows of a tile: sums[4 row + b] += sum over this lane's keys of
  // rows[row][key] s[key][b].
  __device__ __forceinline__ void multiply_rows(const float* rows, float (&sums)[32]) const {
    constexpr int kKeys = ScanShape<kLanes>::kKeys;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const float4 low = load4(rows + row * kKeys + 4 * lane);
      const float4 high = load4(rows + row * kKeys + 4 * kLanes + 4 * lane);
      const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float sum = 0.0f;
#pragma unroll
        for (int a = 0; a < 8; ++a) {
          sum = fmaf(x[a], s[a][b], sum);
        }
        sums[4 * row + b] = sum;
      }
    }
  }

  // s[key][b] += row[key] y[b].
  __device__ __forceinline__ void add_outer(const float* row, const float4& y) {
    const float4 low = load4(row + 4 * lane);
    const float4 high = load4(row + 4 * kLanes + 4 * lane);
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int a = 0; a < 8; ++a) {
      s[a][0] = fmaf(x[a], y.x, s[a][0]);
      s[a][1] = fmaf(x[a], y.y, s[a][1]);
      s[a][2] = fmaf(x[a], y.z, s[a][2]);
      s[a][3] = fmaf(x[a], y.w, s[a][3]);
    }
  }

  __device__ __forceinline__ void decay(const float* gamma) {
    const float4 low = load4(gamma + 4 * lane), high = load4(gamma + 4 * kLanes + 4 * lane);
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int a = 0; a < 8; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        s[a][b] *= x[a];
      }
    }
  }
};

// Copies a [16, K] record into rows of kKeys floats.
template <int kKeys>
__device__ __forceinline__ void copy_rows(float* to, const float* from, int64_t K) {
  constexpr int kPieces = kKeys / 4;
#pragma unroll
  for (int e = static_cast<int>(threadIdx.x); e < kTile * kPieces; e += kThreads) {
    const int row = e / kPieces, c = e % kPieces * 4;
    if (c < K) {
      start_copy<16>(to + row * kKeys + c, from + row * K + c, true);
    }
  }
}

// Copies the columns of a slice of a [16, V] record; zeroes beyond V.
template <int kSlice>
__device__ __forceinline__ void copy_slice(float* to, const float* from, int64_t slice, int64_t V) {
  constexpr int kPieces = kSlice / 4;
#pragma unroll
  for (int e = static_cast<int>(threadIdx.x); e < kTile * kPieces; e += kThreads) {
    const int row = e / kPieces, c = e % kPieces * 4;
    const int64_t column = slice * kSlice + c;
    const bool valid = column < V;
    start_copy<16>(to + row * kSlice + c, valid ? from + row * V + column : from, valid);
  }
}

__device__ __forceinline__ void copy_floats(float* to, const float* from, int64_t count) {
  for (int64_t e = 4 * static_cast<int64_t>(threadIdx.x); e < count; e += 4 * kThreads) {
    start_copy<16>(to + e, from + e, true);
  }
}

}  // namespace sdm::kda::plain
