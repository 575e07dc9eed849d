// SPDX-License-Identifier: Apache-2.0
//! @file Pieces of eight neighbouring elements of any type, for the tensor backward.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda::cuda {

__device__ __forceinline__ float2 widen_pair(uint32_t x, bool bf16) {
  return bf16 ? unpack_bf16(x) : unpack_f16(x);
}

__device__ __forceinline__ void widen_piece(float (&out)[8], uint4 raw, bool bf16) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = widen_pair(words[i], bf16);
    out[2 * i] = x.x;
    out[2 * i + 1] = x.y;
  }
}

__device__ __forceinline__ float load_element(const void* data, DType type, int64_t offset) {
  switch (type) {
    case DType::kBf16:
      return unpack_bf16(static_cast<const uint16_t*>(data)[offset]).x;
    case DType::kF16:
      return unpack_f16(static_cast<const uint16_t*>(data)[offset]).x;
    default:
      return static_cast<const float*>(data)[offset];
  }
}

__device__ __forceinline__ void store_element(void* data, DType type, int64_t offset, float x) {
  switch (type) {
    case DType::kBf16:
      static_cast<uint16_t*>(data)[offset] = static_cast<uint16_t>(pack_bf16(x, 0.0f));
      return;
    case DType::kF16:
      static_cast<uint16_t*>(data)[offset] = static_cast<uint16_t>(pack_f16(x, 0.0f));
      return;
    default:
      static_cast<float*>(data)[offset] = x;
  }
}

// Eight 16-bit elements as they lie; `aligned`: to 16 bytes and next to each other.
__device__ __forceinline__ uint4
load_raw_piece(const void* data, int64_t offset, int64_t stride, bool aligned) {
  const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
  if (aligned) {
    return *reinterpret_cast<const uint4*>(from);
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = from[2 * i * stride] | static_cast<uint32_t>(from[(2 * i + 1) * stride]) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight elements of any type as floats.
__device__ __forceinline__ void load_piece(
    float (&out)[8], const void* data, DType type, int64_t offset, int64_t stride, bool aligned
) {
  if (type == DType::kF32) {
    const float* from = static_cast<const float*>(data) + offset;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = from[i * stride];
    }
  } else {
    widen_piece(out, load_raw_piece(data, offset, stride, aligned), type == DType::kBf16);
  }
}

__device__ __forceinline__ int64_t
element_of(const KdaView& view, int64_t batch, int64_t token, int64_t head) {
  return batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

__device__ __forceinline__ uint4 pack_piece(const float (&x)[8], float factor) {
  return make_uint4(
      pack_f16(x[0] * factor, x[1] * factor),
      pack_f16(x[2] * factor, x[3] * factor),
      pack_f16(x[4] * factor, x[5] * factor),
      pack_f16(x[6] * factor, x[7] * factor)
  );
}

__device__ __forceinline__ float largest_of_piece(const float (&x)[8]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = fmaxf(largest, fabsf(x[i]));
  }
  return largest;
}

// Whether every row of the view starts at a multiple of 16 bytes (16-bit elements, last stride 1).
inline bool aligned_rows(const KdaView& view, int64_t last_stride) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && last_stride == 1 &&
         view.stride[0] % 8 == 0 && view.stride[1] % 8 == 0 && view.stride[2] % 8 == 0;
}

}  // namespace sdm::kda::cuda
