// SPDX-License-Identifier: Apache-2.0
//! @file Loads of neighbouring channels as floats, and the gate in log2 units, for the tensor path.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda::cuda {

constexpr float kLog2e = 1.4426950408889634f;

// Two 16-bit elements of the type in one register.
template <DType kType>
__device__ __forceinline__ float2 unpack_pair(uint32_t x) {
  static_assert(kType == DType::kBf16 || kType == DType::kF16);
  if constexpr (kType == DType::kBf16) {
    return unpack_bf16(x);
  } else {
    return unpack_f16(x);
  }
}

template <DType kType>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  static_assert(kType == DType::kBf16 || kType == DType::kF16);
  if constexpr (kType == DType::kBf16) {
    return pack_bf16(low, high);
  } else {
    return pack_f16(low, high);
  }
}

// kPairs pairs of 16-bit elements at `from`; with `whole` they are aligned to their total size.
template <int kPairs>
__device__ __forceinline__ void load_pairs(
    uint32_t (&out)[kPairs], const uint16_t* from, bool whole
) {
  static_assert(kPairs == 1 || kPairs == 2);
  if (whole) {
    if constexpr (kPairs == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      out[0] = x.x;
      out[1] = x.y;
    } else {
      out[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      out[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
    }
  }
}

// kCount neighbouring elements as floats; `whole` as above.
template <DType kType, int kCount>
__device__ __forceinline__ void load_floats(
    float (&out)[kCount], const void* data, int64_t offset, bool whole
) {
  if constexpr (kType == DType::kF32) {
    const float* from = static_cast<const float*>(data) + offset;
    if (whole) {
      if constexpr (kCount == 4) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        out[0] = x.x;
        out[1] = x.y;
        out[2] = x.z;
        out[3] = x.w;
      } else {
        static_assert(kCount == 2);
        const float2 x = *reinterpret_cast<const float2*>(from);
        out[0] = x.x;
        out[1] = x.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        out[i] = from[i];
      }
    }
  } else {
    uint32_t raw[kCount / 2];
    load_pairs<kCount / 2>(raw, static_cast<const uint16_t*>(data) + offset, whole);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 x = unpack_pair<kType>(raw[i]);
      out[2 * i] = x.x;
      out[2 * i + 1] = x.y;
    }
  }
}

// log2(1 + 2^x) without loss for very negative x, where 1 + 2^x would round the answer away.
__device__ __forceinline__ float softplus2(float x) {
  if (x > 29.0f) {
    return x;
  }
  const float e = fast_exp2(x);
  if (e > 0x1p-6f) {
    return fast_log2(1.0f + e);
  }
  return kLog2e * e * (1.0f + e * (-0.5f + e * (1.0f / 3.0f - 0.25f * e)));
}

// Log-decay of one channel in log2 units, from the element of g.
struct KdaGateChannel {
  float bias;  // dt_bias
  float rate;  // of the exponent (lower bound) or of the answer (softplus), in log2 units

  template <KdaGate kGate>
  __device__ __forceinline__ float log2_decay(float g, float bound) const {
    if constexpr (kGate == KdaGate::kActivated) {
      return g * kLog2e;
    } else if constexpr (kGate == KdaGate::kSoftplus) {
      return -rate * softplus2(fmaf(g, kLog2e, bias * kLog2e));
    } else {
      return bound * fast_reciprocal(1.0f + fast_exp2(fmaf(-rate, g, -rate * bias)));
    }
  }
};

__device__ __forceinline__ float kda_beta(float x, KdaBeta kind) {
  if (kind == KdaBeta::kActivated) {
    return x;
  }
  const float s = fast_reciprocal(1.0f + fast_exp2(-kLog2e * x));
  return kind == KdaBeta::kSigmoid ? s : 2.0f * s;
}

}  // namespace sdm::kda::cuda
