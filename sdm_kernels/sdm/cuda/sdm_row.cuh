// SPDX-License-Identifier: Apache-2.0
//! @file Pieces of bank rows, and rows of tokens in shared memory.
//!
//! Eight lanes hold one row of a slice, 16 bytes each: 64 columns of a 16-bit bank, 32 of a float32
//! one, 128 bytes of memory. A warp works on four rows at a time, a lane on kVec columns of its
//! row.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda {

constexpr int kRowLanes = 8;

template <typename S>
constexpr int kVec = 16 / static_cast<int>(sizeof(S));

template <typename S>
constexpr int kSliceColumns = kRowLanes * kVec<S>;

// Row stride of token rows in shared memory, in floats: 8 more than the columns, so that the
// operand loads of the matrix products touch 32 different banks.
template <typename S>
constexpr int kTokenStride = kSliceColumns<S> + 8;

__device__ __forceinline__ float to_float(float x) {
  return x;
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

__device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}

template <typename S>
__device__ __forceinline__ S from_float(float x) {
  if constexpr (sizeof(S) == 4) {
    return x;
  } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

// A lane's part of a row.
template <typename S>
union Piece {
  uint4 raw;
  S x[kVec<S>];

  __device__ __forceinline__ Piece() : raw{0, 0, 0, 0} {}
};

// Where a lane stands in its row.
struct LaneColumns {
  int64_t first;  // first column
  int count;      // columns inside the bank: kVec, less at its right edge
};

template <typename S>
__device__ __forceinline__ LaneColumns lane_columns(int64_t slice, int64_t D) {
  const int64_t first = slice * kSliceColumns<S> + threadIdx.x % kRowLanes * kVec<S>;
  const int64_t rest = D - first;
  return {first, static_cast<int>(rest < 0 ? 0 : rest < kVec<S> ? rest : kVec<S>)};
}

// Bank rows change during a launch and may be written by other blocks: never through L1. kAligned:
// every row starts on a 16-byte boundary and has whole pieces.
template <typename S, bool kAligned>
__device__ __forceinline__ Piece<S> load_piece(const S* row, const LaneColumns& at) {
  Piece<S> piece;
  if constexpr (kAligned) {
    if (at.count > 0) {
      piece.raw = __ldcg(reinterpret_cast<const uint4*>(row + at.first));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec<S>; ++i) {
      if (i < at.count) {
        piece.x[i] = __ldcg(row + at.first + i);
      }
    }
  }
  return piece;
}

template <typename S, bool kAligned>
__device__ __forceinline__ void store_piece(S* row, const LaneColumns& at, const Piece<S>& piece) {
  if constexpr (kAligned) {
    if (at.count > 0) {
      *reinterpret_cast<uint4*>(row + at.first) = piece.raw;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec<S>; ++i) {
      if (i < at.count) {
        row[at.first + i] = piece.x[i];
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void unpack(const Piece<S>& piece, float (&x)[kVec<S>]) {
#pragma unroll
  for (int i = 0; i < kVec<S>; ++i) {
    x[i] = to_float(piece.x[i]);
  }
}

template <typename S>
__device__ __forceinline__ Piece<S> pack(const float (&x)[kVec<S>]) {
  Piece<S> piece;
#pragma unroll
  for (int i = 0; i < kVec<S>; ++i) {
    piece.x[i] = from_float<S>(x[i]);
  }
  return piece;
}

// Where a token's row lies in shared memory: inside every 16, rows four apart are neighbours. The
// products read such rows at once (sdm_product.cuh).
__device__ __forceinline__ int token_row_at(int i) {
  return (i & ~15) | (i & 3) << 2 | (i >> 2 & 3);
}

// Token rows in shared memory. A lane's columns are cut into fours that lie 32 floats apart, so
// that eight lanes reading their fours touch 128 consecutive bytes. The products treat columns
// alike and never see the order.
template <typename S>
__device__ __forceinline__ void load_token(const float* row, float (&x)[kVec<S>]) {
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll
  for (int part = 0; part < kVec<S> / 4; ++part) {
    const float4 four = *reinterpret_cast<const float4*>(row + part * 32 + lane * 4);
    x[part * 4] = four.x;
    x[part * 4 + 1] = four.y;
    x[part * 4 + 2] = four.z;
    x[part * 4 + 3] = four.w;
  }
}

template <typename S>
__device__ __forceinline__ void store_token(float* row, const float (&x)[kVec<S>]) {
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll
  for (int part = 0; part < kVec<S> / 4; ++part) {
    *reinterpret_cast<float4*>(row + part * 32 + lane * 4) =
        make_float4(x[part * 4], x[part * 4 + 1], x[part * 4 + 2], x[part * 4 + 3]);
  }
}

// Columns of a tensor of any float type at data + offset, zero outside the bank. All loads are
// started before the first conversion waits.
template <int kCount>
__device__ __forceinline__ void load_any(
    const void* data, DType dtype, int64_t offset, int count, float (&x)[kCount]
) {
  if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = i < count ? __ldg(static_cast<const float*>(data) + offset + i) : 0.0f;
    }
    return;
  }
  unsigned short raw[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    raw[i] = i < count ? __ldg(static_cast<const unsigned short*>(data) + offset + i) : 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = dtype == DType::kBf16 ? __uint_as_float(static_cast<unsigned>(raw[i]) << 16)
                                 : __half2float(__ushort_as_half(raw[i]));
  }
}

template <int kCount>
__device__ __forceinline__ void store_any(
    void* data, DType dtype, int64_t offset, int count, const float (&x)[kCount]
) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < count) {
      if (dtype == DType::kF32) {
        static_cast<float*>(data)[offset + i] = x[i];
      } else if (dtype == DType::kBf16) {
        static_cast<__nv_bfloat16*>(data)[offset + i] = from_float<__nv_bfloat16>(x[i]);
      } else {
        static_cast<__half*>(data)[offset + i] = from_float<__half>(x[i]);
      }
    }
  }
}

// kVec columns of a token tensor; one or two 16-byte loads where the layout allows.
template <typename S>
__device__ __forceinline__ void load_token_columns(
    const FloatView& view, int64_t row, const LaneColumns& at, bool vectors, float (&x)[kVec<S>]
) {
  const int64_t offset = row + at.first;
  if (vectors && at.count == kVec<S>) {
    if (view.dtype == DType::kF32) {
      const float4* p =
          reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + offset);
#pragma unroll
      for (int part = 0; part < kVec<S> / 4; ++part) {
        const float4 four = __ldg(p + part);
        x[part * 4] = four.x;
        x[part * 4 + 1] = four.y;
        x[part * 4 + 2] = four.z;
        x[part * 4 + 3] = four.w;
      }
      return;
    }
    if constexpr (kVec<S> == 8) {
      const uint4 raw =
          __ldg(reinterpret_cast<const uint4*>(static_cast<const __half*>(view.data) + offset));
      if (view.dtype == DType::kBf16) {
        Piece<__nv_bfloat16> piece;
        piece.raw = raw;
        unpack(piece, x);
      } else {
        Piece<__half> piece;
        piece.raw = raw;
        unpack(piece, x);
      }
      return;
    }
  }
  load_any(view.data, view.dtype, offset, at.count, x);
}

template <typename S>
__device__ __forceinline__ void store_token_columns(
    void* data,
    DType dtype,
    int64_t row,
    const LaneColumns& at,
    bool vectors,
    const float (&x)[kVec<S>]
) {
  const int64_t offset = row + at.first;
  if (vectors && at.count == kVec<S>) {
    if (dtype == DType::kF32) {
      float4* p = reinterpret_cast<float4*>(static_cast<float*>(data) + offset);
#pragma unroll
      for (int part = 0; part < kVec<S> / 4; ++part) {
        p[part] = make_float4(x[part * 4], x[part * 4 + 1], x[part * 4 + 2], x[part * 4 + 3]);
      }
      return;
    }
    if constexpr (kVec<S> == 8) {
      uint4* p = reinterpret_cast<uint4*>(static_cast<__half*>(data) + offset);
      *p = dtype == DType::kBf16 ? pack<__nv_bfloat16>(x).raw : pack<__half>(x).raw;
      return;
    }
  }
  store_any(data, dtype, offset, at.count, x);
}

}  // namespace sdm::cuda
