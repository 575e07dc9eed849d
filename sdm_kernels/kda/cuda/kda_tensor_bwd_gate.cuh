// SPDX-License-Identifier: Apache-2.0
//! @file Eight rows of one key channel in the tensor backward: loads, sums over a warp, the gate
//! and its gradient.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

// One channel of a block of rows.
using ChannelRows = float[kBlockRows];

// Rows past the end are 0.
__device__ __forceinline__ void load_rows(
    ChannelRows& out, const KdaView& view, int64_t from, int rows
) {
  const int64_t stride = view.stride[1];
  if (view.dtype == DType::kF32) {
    const float* data = static_cast<const float*>(view.data) + from;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      out[i] = i < rows ? *data : 0.0f;
      data += stride;
    }
    return;
  }
  const uint16_t* data = static_cast<const uint16_t*>(view.data) + from;
  uint16_t raw[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    raw[i] = i < rows ? *data : static_cast<uint16_t>(0);
    data += stride;
  }
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    out[i] = widen_pair(raw[i], view.dtype == DType::kBf16).x;
  }
}

// Sums kCount (a power of two) values over the warp; a lane gets that of value lane / (32 /
// kCount).
template <int kCount>
__device__ __forceinline__ float sum_spread(const float (&x)[kCount]) {
  float part[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    part[i] = x[i];
  }
  int mask = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(mask)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float send = upper ? part[i] : part[i + half];
      const float keep = upper ? part[i + half] : part[i];
      part[i] = keep + __shfl_xor_sync(kWarpMask, send, mask);
    }
    mask /= 2;
  }
  float sum = part[0];
#pragma unroll
  for (int rest = 16 / kCount; rest > 0; rest /= 2) {
    sum += __shfl_xor_sync(kWarpMask, sum, rest);
  }
  return sum;
}

// Eight consecutive floats, aligned to 16 bytes.
__device__ __forceinline__ void load_eight(float (&out)[kBlockRows], const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  out[0] = low.x;
  out[1] = low.y;
  out[2] = low.z;
  out[3] = low.w;
  out[4] = high.x;
  out[5] = high.y;
  out[6] = high.z;
  out[7] = high.w;
}

__device__ __forceinline__ float fast_sigmoid(float x) {
  return fast_reciprocal(1.0f + fast_exp2(-kLog2e * x));
}

// The gate of one key channel.
struct ChannelGate {
  KdaGate form;
  float rate;   // exp(A_log)
  float bias;   // dt_bias
  float bound;  // lower bound

  __device__ __forceinline__
  ChannelGate(const KdaOptions& options, const KdaTokens& tokens, float exp_A, int64_t channel)
      : form(options.gate),
        rate(exp_A),
        bias(0.0f),
        bound(static_cast<float>(options.lower_bound)) {
    if (form != KdaGate::kActivated && tokens.dt_bias != nullptr) {
      bias = tokens.dt_bias[channel];
    }
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void decays_of(ChannelRows& x) const {
    const KdaGateChannel gate{bias, kGate == KdaGate::kLowerBound ? rate * kLog2e : rate};
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      x[i] = gate.log2_decay<kGate>(x[i], bound * kLog2e);
    }
  }

  // Decays of the rows; rows past the end do not decay.
  __device__ __forceinline__ void decays(ChannelRows& x, int rows) const {
    if (form == KdaGate::kActivated) {
      decays_of<KdaGate::kActivated>(x);
    } else if (form == KdaGate::kSoftplus) {
      decays_of<KdaGate::kSoftplus>(x);
    } else {
      decays_of<KdaGate::kLowerBound>(x);
    }
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      x[i] = fast_exp2(x[i]);
    }
    if (rows < kBlockRows) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        x[i] = i < rows ? x[i] : 1.0f;
      }
    }
  }

  // Gradient of the element of g from that of the log-decay; adds that of A_log.
  template <KdaGate kGate>
  __device__ __forceinline__ float gradient(float raw, float dg, float* d_rate) const {
    if constexpr (kGate == KdaGate::kActivated) {
      return dg;
    } else if constexpr (kGate == KdaGate::kSoftplus) {
      const float z = raw + bias;
      *d_rate -= rate * (softplus2(z * kLog2e) * (1.0f / kLog2e)) * dg;
      return -rate * fast_sigmoid(z) * dg;
    } else {
      // s (1 - s) with e = exp(-rate z) is e / (1 + e)^2, which keeps its digits at both ends
      const float z = raw + bias;
      const float e = fast_exp2(fminf(-kLog2e * rate * z, 126.0f));
      const float s = fast_reciprocal(1.0f + e);
      const float dz = rate * bound * (e * s) * s * dg;
      *d_rate += dz * z;
      return dz;
    }
  }
};

}  // namespace sdm::kda::cuda
