// SPDX-License-Identifier: Apache-2.0
//! @file Gates and strengths of Kimi delta attention in float32, with their derivatives.
#pragma once

#include <type_traits>

#include "sdm_kernels/kda/cuda/kda_plain_device.cuh"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda::plain {

constexpr float kNormEps = 1e-6f;  // of the L2 norm

// Calls f with a null pointer of the storage type: f(static_cast<T*>(nullptr)).
template <typename F>
__device__ __forceinline__ void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBf16:
      f(static_cast<Bf16*>(nullptr));
      return;
    case DType::kF16:
      f(static_cast<F16*>(nullptr));
      return;
    default:
      f(static_cast<float*>(nullptr));
  }
}

template <typename T>
__device__ __forceinline__ float load_as(const void* data, int64_t at) {
  return widen(static_cast<const T*>(data)[at]);
}

__device__ __forceinline__ float load_any(const void* data, DType dtype, int64_t at) {
  float x = 0.0f;
  with_dtype(dtype, [&](auto* type) {
    x = load_as<std::remove_pointer_t<decltype(type)>>(data, at);
  });
  return x;
}

// An element as it is in memory. Converting it would wait for it; so many are asked for first.
__device__ __forceinline__ uint32_t load_raw(const void* data, DType dtype, int64_t at) {
  return dtype == DType::kF32 ? static_cast<const uint32_t*>(data)[at]
                              : static_cast<const uint16_t*>(data)[at];
}

__device__ __forceinline__ float from_raw(DType dtype, uint32_t raw) {
  return dtype == DType::kF32    ? bits_float(raw)
         : dtype == DType::kBf16 ? bits_float(raw << 16)
                                 : widen(F16{static_cast<uint16_t>(raw)});
}

// Columns first, first + step, ... of a row of `columns`; zero beyond.
template <int kCount>
__device__ __forceinline__ void load_raw_row(
    const KdaView& view, int64_t row, int first, int step, int64_t columns, uint32_t (&raw)[kCount]
) {
  if (view.dtype == DType::kF32) {
    const uint32_t* from = static_cast<const uint32_t*>(view.data) + row;
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      raw[m] = first + m * step < columns ? from[first + m * step] : 0u;
    }
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(view.data) + row;
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      raw[m] = first + m * step < columns ? from[first + m * step] : 0u;
    }
  }
}

__device__ __forceinline__ void store_any(void* data, DType dtype, int64_t at, float x) {
  with_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    static_cast<T*>(data)[at] = narrow<T>(x);
  });
}

__device__ __forceinline__ int64_t
row_of(const KdaView& view, int64_t batch, int64_t token, int64_t head) {
  return batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

struct Gate {
  KdaGate form;
  float rate;  // exp(A_log), or 1
  float lower_bound;
  const float* bias;  // dt_bias of the head, or null

  // The log-decay of key column c.
  __device__ __forceinline__ float value(float raw, int64_t c) const {
    return form == KdaGate::kActivated ? raw : of_biased(bias == nullptr ? raw : raw + bias[c]);
  }

  // The same from the raw gate with its bias.
  __device__ __forceinline__ float of_biased(float z) const {
    if (form == KdaGate::kActivated) {
      return z;
    }
    if (form == KdaGate::kLowerBound) {
      return lower_bound * sigmoid(rate * z);
    }
    return -rate * (z > 20.0f ? z : log1pf(expf(z)));
  }

  // Gradient of `raw` from that of the log-decay; adds that of A_log to *d_rate.
  __device__ __forceinline__ float gradient(float raw, int64_t c, float dg, float* d_rate) const {
    if (form == KdaGate::kActivated) {
      return dg;
    }
    const float z = bias == nullptr ? raw : raw + bias[c];
    if (form == KdaGate::kLowerBound) {
      // 1 - s as a sigmoid of its own keeps its digits where s is near 1
      const float slope = lower_bound * sigmoid(rate * z) * sigmoid(-rate * z);
      const float dz = rate * slope * dg;
      *d_rate += dz * z;
      return dz;
    }
    *d_rate += of_biased(z) * dg;
    return -rate * sigmoid(z) * dg;
  }
};

__device__ __forceinline__ Gate
make_gate(const KdaOptions& options, const KdaTokens& tokens, int64_t K, int64_t hv) {
  Gate gate;
  gate.form = options.gate;
  gate.rate = tokens.A_log != nullptr ? expf(tokens.A_log[hv]) : 1.0f;
  gate.lower_bound = static_cast<float>(options.lower_bound);
  gate.bias = tokens.dt_bias == nullptr ? nullptr : tokens.dt_bias + hv * K;
  return gate;
}

__device__ __forceinline__ float beta_value(KdaBeta form, float raw) {
  return form == KdaBeta::kActivated ? raw
                                     : (form == KdaBeta::kSigmoid ? 1.0f : 2.0f) * sigmoid(raw);
}

__device__ __forceinline__ float beta_gradient(KdaBeta form, float raw, float d_beta) {
  return form == KdaBeta::kActivated
             ? d_beta
             : (form == KdaBeta::kSigmoid ? 1.0f : 2.0f) * sigmoid(raw) * sigmoid(-raw) * d_beta;
}

}  // namespace sdm::kda::plain
