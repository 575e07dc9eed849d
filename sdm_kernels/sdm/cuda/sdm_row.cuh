// SPDX-License-Identifier: Apache-2.0
//! @file Pieces of bank rows, and columns of token tensors.
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

// A lane's part of the rows of a bank, or of saved rows. kAligned: every row starts on a 16-byte
// boundary, has whole pieces, and rows are less than 4 GB apart: one multiplication an address.
template <typename S, bool kAligned>
class LaneRows {
 public:
  __device__ __forceinline__ LaneRows(const void* rows, int64_t stride, const LaneColumns& at)
      : first_(static_cast<const char*>(rows) + at.first * static_cast<int64_t>(sizeof(S))),
        bytes_(static_cast<Stride>(stride * static_cast<int64_t>(sizeof(S)))) {}

  __device__ __forceinline__ S* at(int row) const {
    const auto offset = static_cast<std::make_unsigned_t<Stride>>(bytes_);
    return reinterpret_cast<S*>(
        const_cast<char*>(first_) + static_cast<uint64_t>(static_cast<uint32_t>(row)) * offset
    );
  }

 private:
  using Stride = std::conditional_t<kAligned, uint32_t, int64_t>;
  const char* first_;
  Stride bytes_;
};

// Bank rows change during a launch and may be written by other blocks: never through L1.
template <typename S, bool kAligned>
__device__ __forceinline__ Piece<S> load_lane(const S* lane, int count) {
  Piece<S> piece;
  if constexpr (kAligned) {
    if (count > 0) {
      piece.raw = __ldcg(reinterpret_cast<const uint4*>(lane));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec<S>; ++i) {
      if (i < count) {
        piece.x[i] = __ldcg(lane + i);
      }
    }
  }
  return piece;
}

// The intrinsic keeps the 16 bytes together: of a plain assignment the compiler makes four stores.
template <typename S, bool kAligned>
__device__ __forceinline__ void store_lane(S* lane, int count, const Piece<S>& piece) {
  if constexpr (kAligned) {
    if (count > 0) {
      __stcg(reinterpret_cast<uint4*>(lane), piece.raw);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec<S>; ++i) {
      if (i < count) {
        lane[i] = piece.x[i];
      }
    }
  }
}

template <typename S, bool kAligned>
__device__ __forceinline__ Piece<S> load_piece(const S* row, const LaneColumns& at) {
  return load_lane<S, kAligned>(row + at.first, at.count);
}

template <typename S, bool kAligned>
__device__ __forceinline__ void store_piece(S* row, const LaneColumns& at, const Piece<S>& piece) {
  store_lane<S, kAligned>(row + at.first, at.count, piece);
}

__device__ __forceinline__ float2 unpack_pair(uint32_t two, __nv_bfloat16) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack_pair(uint32_t two, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

template <typename S>
__device__ __forceinline__ void unpack(const Piece<S>& piece, float (&x)[kVec<S>]) {
  const uint32_t words[4] = {piece.raw.x, piece.raw.y, piece.raw.z, piece.raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(S) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 two = unpack_pair(words[i], S());
      x[2 * i] = two.x;
      x[2 * i + 1] = two.y;
    }
  }
}

template <typename S>
__device__ __forceinline__ Piece<S> pack(const float (&x)[kVec<S>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(S) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = pack_pair(x[2 * i], x[2 * i + 1], S());
    }
  }
  Piece<S> piece;
  piece.raw = make_uint4(words[0], words[1], words[2], words[3]);
  return piece;
}

// v[0..kCount) of eight lanes -> the sum over the lanes of v[lane * kCount / 8].
template <int kCount>
__device__ __forceinline__ float transpose_sum(float (&v)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) {
    const bool upper = (lane & step) != 0;
    count /= 2;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float send = upper ? v[i] : v[i + count];
      const float keep = upper ? v[i + count] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, send, step);
    }
    if (count == 0) {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], step);
    }
  }
  return v[0];
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
        __stcg(
            p + part, make_float4(x[part * 4], x[part * 4 + 1], x[part * 4 + 2], x[part * 4 + 3])
        );
      }
      return;
    }
    if constexpr (kVec<S> == 8) {
      uint4* p = reinterpret_cast<uint4*>(static_cast<__half*>(data) + offset);
      __stcg(p, dtype == DType::kBf16 ? pack<__nv_bfloat16>(x).raw : pack<__half>(x).raw);
      return;
    }
  }
  store_any(data, dtype, offset, at.count, x);
}

}  // namespace sdm::cuda
