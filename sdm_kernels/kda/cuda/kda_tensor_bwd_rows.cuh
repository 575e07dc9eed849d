// SPDX-License-Identifier: Apache-2.0
//! @file The part of the tensor backward in which a warp owns a row: gradients of q, k and beta.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

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

// Gradient of a row of q or k from that of the normalised row. `raw` is the row, `norm` the factor
// that normalises it, `dot` the product of the two rows times norm^2 (0 without a norm); a lane has
// kCount channels.
template <DType kType, int kCount>
__device__ __forceinline__ void store_row(
    void* out,
    int64_t to,
    const float (&grad)[kCount],
    const float (&raw)[kCount],
    float norm,
    float dot
) {
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
struct TokenRows {
  using Memory = TokenMemory<kK, kV>;
  using Record = KdaRecord<kK>;
  static constexpr int kCount = kK / 32;                     // channels of a lane
  static constexpr int kRows = kChunkRows / Memory::kWarps;  // rows of a warp
  static_assert(kRows == 2 || kRows == 4);

  const TokenBlock<kK, kV>& b;

  __device__ __forceinline__ void load_plane(float (&out)[kCount], int which, int row) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float* from = b.template at<float>(Memory::kPlanes) +
                        (which * kChunkRows + row) * Memory::kPitch + lane * kCount;
    if constexpr (kCount == 4) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      out[0] = x.x;
      out[1] = x.y;
      out[2] = x.z;
      out[3] = x.w;
    } else {
      const float2 x = *reinterpret_cast<const float2*>(from);
      out[0] = x.x;
      out[1] = x.y;
    }
  }

  // d_q (plane 0) or d_k (plane 1) of the rows from `first` on.
  __device__ __forceinline__ void finish_keys(
      int plane, int first, const KdaView& view, void* out, int norms_at
  ) const {
    const KdaDims& dims = b.p.common.dims;
    const int lane = static_cast<int>(threadIdx.x % 32);
    float grad[kRows][kCount];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      load_plane(grad[i], plane, first + i);
    }
    if (b.p.group_grads != nullptr) {
      float* to =
          b.p.group_grads + ((b.entry * 2 + plane) * kChunkRows + first) * kK + lane * kCount;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          to[i * kK + c] = grad[i][c];
        }
      }
      return;
    }
    const float* norms = reinterpret_cast<const float*>(b.record() + norms_at) + first;
    float raw[kRows][kCount] = {}, dots[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i < b.rows) {
        const int64_t from = b.element(view, first + i, b.h) + lane * kCount;
        load_floats<kType, kCount>(raw[i], view.data, from, b.p.aligned_qk);
      }
      dots[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        dots[i] += grad[i][c] * raw[i][c];
      }
    }
    const float dot = b.p.common.options.l2norm ? sum_spread(dots) : 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float norm = norms[i];
      const float own = __shfl_sync(kWarpMask, dot, i * (32 / kRows)) * norm * norm;
      if (first + i < b.rows) {
        const int64_t to = b.result(first + i, b.h, dims.H, kK) + lane * kCount;
        store_row<kType, kCount>(out, to, grad[i], raw[i], norm, own);
      }
    }
  }

  __device__ __forceinline__ void finish_beta(int first) const {
    float terms[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[kCount];
      load_plane(x, 2, first + i);
      terms[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        terms[i] += x[c];
      }
    }
    const float term = sum_spread(terms);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = first + lane / (32 / kRows);
    if (lane % (32 / kRows) == 0 && row < b.rows) {
      const KdaView& view = b.p.common.tokens.beta;
      float d_beta = term + b.template at<float>(Memory::kValueSums)[row];
      const KdaBeta kind = b.p.common.options.beta;
      if (kind != KdaBeta::kActivated) {
        const float x = load_element(view.data, view.dtype, b.element(view, row, b.hv));
        // exact where the sigmoid is near 0 or 1
        const float slope = 1.0f / (1.0f + expf(-x)) * (1.0f / (1.0f + expf(x)));
        d_beta *= kind == KdaBeta::kSigmoid ? slope : 2.0f * slope;
      }
      const int64_t to = b.result(row, b.hv, b.p.common.dims.HV, 1);
      store_element(b.p.d_beta, view.dtype, to, d_beta);
    }
  }

  __device__ __forceinline__ void finish() const {
    const KdaTokens& tokens = b.p.common.tokens;
    const int first = static_cast<int>(threadIdx.x / 32) * kRows;
    finish_keys(0, first, tokens.q, b.p.d_q, Record::kQueryNorm);
    finish_keys(1, first, tokens.k, b.p.d_k, Record::kKeyNorm);
    finish_beta(first);
  }
};

}  // namespace sdm::kda::cuda
