// SPDX-License-Identifier: Apache-2.0
//! @file Four rows of one key channel in the tensor backward: loads, sums over a warp, the gate and
//! its gradient.
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

// Four consecutive floats, aligned to 16 bytes.
__device__ __forceinline__ void load_four(float (&out)[kBlockRows], const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  out[0] = x.x;
  out[1] = x.y;
  out[2] = x.z;
  out[3] = x.w;
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

  // Gradient of the element of g from that of the log-decay, `dg` * `unit`; adds that of A_log.
  template <KdaGate kGate>
  __device__ __forceinline__ float gradient(float raw, float dg, float unit, float* d_rate) const {
    if constexpr (kGate == KdaGate::kActivated) {
      return dg * unit;
    } else if constexpr (kGate == KdaGate::kSoftplus) {
      const float z = raw + bias;
      const float share = rate * unit * dg;
      *d_rate -= softplus2(z * kLog2e) * (1.0f / kLog2e) * share;
      return -fast_sigmoid(z) * share;
    } else {
      // s (1 - s) with e = exp(-rate z) is e / (1 + e)^2, which keeps its digits at both ends
      const float z = raw + bias;
      const float e = fast_exp2(fminf(-kLog2e * rate * z, 126.0f));
      const float s = fast_reciprocal(1.0f + e);
      const float dz = (e * s) * s * (rate * bound * unit * dg);
      *d_rate += dz * z;
      return dz;
    }
  }
};

}  // namespace sdm::kda::cuda
