// SPDX-License-Identifier: Apache-2.0
//! @file Decode: pieces of bank rows in registers, and the sums of a block over its groups of
//! lanes.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

// Adds up a warp's groups, kOffset lanes apart. x begins with the kCount sums of a lane; every step
// gives away half of what is left. Returns which of them the first one is that stays; the number
// that stays is step_sums_left().
template <int kOffset, int kCount>
__device__ __forceinline__ int add_groups(float* x) {
  if constexpr (kOffset == 32) {
    return 0;
  } else if constexpr (kCount == 1) {
    x[0] += __shfl_xor_sync(0xffffffffu, x[0], kOffset);
    return add_groups<2 * kOffset, 1>(x);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (threadIdx.x & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? x[i] : x[i + kHalf];
      const float keep = upper ? x[i + kHalf] : x[i];
      x[i] = keep + __shfl_xor_sync(0xffffffffu, give, kOffset);
    }
    return (upper ? kHalf : 0) + add_groups<2 * kOffset, kHalf>(x);
  }
}

__host__ __device__ constexpr int step_sums_left(int lanes, int count) {
  return count * lanes > 32 ? count * lanes / 32 : 1;
}

// sums = the warps' parts of one (kind, column), added in pairs.
template <int kCount, int kStride>
__device__ __forceinline__ float add_parts(const float* parts) {
  if constexpr (kCount == 1) {
    return parts[0];
  } else {
    return add_parts<kCount / 2, kStride>(parts) +
           add_parts<kCount / 2, kStride>(parts + kCount / 2 * kStride);
  }
}

__device__ __forceinline__ float4 add_four(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The same of four columns.
template <int kCount, int kStride>
__device__ __forceinline__ float4 add_parts(const float4* parts) {
  if constexpr (kCount == 1) {
    return parts[0];
  } else {
    return add_four(
        add_parts<kCount / 2, kStride>(parts),
        add_parts<kCount / 2, kStride>(parts + kCount / 2 * (kStride / 4))
    );
  }
}

// to[i] = x[i] for i < kCount; `to` is aligned to the largest of 4, 8 and 16 bytes that fits.
template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float* x) {
  if constexpr (kCount == 1) {
    *to = x[0];
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
}

// Pieces of rows stay packed: as a union of 16-bit values the compiler gives each its own register.
template <typename S, bool kAligned>
__device__ __forceinline__ uint4 load_raw_row(const S* row, const LaneColumns& at) {
  return load_piece<S, kAligned>(row, at).raw;
}

// Without a branch where rows are aligned; *to keeps its value unless `valid`.
template <typename S, bool kAligned>
__device__ __forceinline__ void load_row_if(
    bool valid, const S* row, const LaneColumns& at, uint4* to
) {
  if constexpr (kAligned) {
    if (valid && at.count > 0) {
      *to = __ldcg(reinterpret_cast<const uint4*>(row + at.first));
    }
  } else if (valid) {
    *to = load_raw_row<S, false>(row, at);
  }
}

template <typename S>
__device__ __forceinline__ void unpack_raw(const uint4& raw, float (&x)[kVec<S>]) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(S) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i])));
      x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
}

template <typename S>
__device__ __forceinline__ uint4 pack_raw(const float (&x)[kVec<S>]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(S) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
      words[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[2 * i])) |
                 static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(x[2 * i + 1])))
                     << 16;
    } else {
      words[i] = __half_as_ushort(__float2half_rn(x[2 * i])) |
                 static_cast<unsigned>(__half_as_ushort(__float2half_rn(x[2 * i + 1]))) << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename S, bool kAligned>
__device__ __forceinline__ void store_raw_row(S* row, const LaneColumns& at, const uint4& raw) {
  Piece<S> piece;
  piece.raw = raw;
  store_piece<S, kAligned>(row, at, piece);
}

}  // namespace sdm::cuda
