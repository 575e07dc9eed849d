// SPDX-License-Identifier: Apache-2.0
//! @file The part of the tensor backward in which a warp owns a row: gradients of q, k and beta.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(kWarpMask, x, mask);
  }
  return x;
}

// Gradient of a row of q or k from that of the normalised row. `raw` is the row, `norm` the factor
// that normalises it; a lane has kCount channels.
template <DType kType, int kCount>
__device__ __forceinline__ void store_row(
    void* out,
    int64_t to,
    const float (&grad)[kCount],
    const float (&raw)[kCount],
    float norm,
    bool normalised
) {
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dot += grad[i] * raw[i];
  }
  dot = normalised ? sum_of_warp(dot) * norm * norm : 0.0f;
  uint32_t packed[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    packed[i] = pack_pair<kType>(
        norm * (grad[2 * i] - raw[2 * i] * dot), norm * (grad[2 * i + 1] - raw[2 * i + 1] * dot)
    );
  }
  uint16_t* at = static_cast<uint16_t*>(out) + to;
  if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(at) = make_uint2(packed[0], packed[1]);
  } else {
    *reinterpret_cast<uint32_t*>(at) = packed[0];
  }
}

template <int kK, int kV, DType kType>
__device__ __forceinline__ void finish_tokens(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Record = KdaRecord<kK>;
  constexpr int kCount = kK / 32;
  const KdaDims& dims = b.p.common.dims;
  const KdaTokens& tokens = b.p.common.tokens;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const float* planes = b.template at<float>(Memory::kPlanes) + lane * kCount;
  for (int row = warp; row < b.rows; row += Memory::kWarps) {
    float grad[3][kCount];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float* from = planes + (i * kChunkRows + row) * Memory::kPitch;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        grad[i][c] = from[c];
      }
    }
    float term = 0.0f;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      term += grad[2][c];
    }
    term = sum_of_warp(term);
    if (lane == 0) {
      float d_beta = term + b.template at<float>(Memory::kValueSums)[row];
      const KdaBeta kind = b.p.common.options.beta;
      if (kind != KdaBeta::kActivated) {
        const float x =
            load_element(tokens.beta.data, tokens.beta.dtype, b.element(tokens.beta, row, b.hv));
        // exact where the sigmoid is near 0 or 1
        const float slope = 1.0f / (1.0f + expf(-x)) * (1.0f / (1.0f + expf(x)));
        d_beta *= kind == KdaBeta::kSigmoid ? slope : 2.0f * slope;
      }
      store_element(b.p.d_beta, tokens.beta.dtype, b.result(row, b.hv, dims.HV, 1), d_beta);
    }
    if (b.p.group_grads != nullptr) {
      float* to = b.p.group_grads + (b.entry * 2 * kChunkRows + row) * kK + lane * kCount;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        to[c] = grad[0][c];
        to[kChunkRows * kK + c] = grad[1][c];
      }
      continue;
    }
    float raw[kCount];
    const int64_t at = b.result(row, b.h, dims.H, kK) + lane * kCount;
    const bool normalised = b.p.common.options.l2norm;
    const int64_t q_at = b.element(tokens.q, row, b.h) + lane * kCount;
    load_floats<kType, kCount>(raw, tokens.q.data, q_at, b.p.aligned_qk);
    const float* norms = reinterpret_cast<const float*>(b.record() + Record::kQueryNorm);
    store_row<kType, kCount>(b.p.d_q, at, grad[0], raw, norms[row], normalised);
    const int64_t k_at = b.element(tokens.k, row, b.h) + lane * kCount;
    load_floats<kType, kCount>(raw, tokens.k.data, k_at, b.p.aligned_qk);
    norms = reinterpret_cast<const float*>(b.record() + Record::kKeyNorm);
    store_row<kType, kCount>(b.p.d_k, at, grad[1], raw, norms[row], normalised);
  }
}

}  // namespace sdm::kda::cuda
