// SPDX-License-Identifier: Apache-2.0
//! @file The part of the tensor backward in which a warp owns a row: gradients of q, k and beta.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_channels.cuh"

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

// The end of the token stage: what needs sums over all channels of a row.
template <int kK, int kV, DType kType>
struct TokenRows {
  using Memory = TokenMemory<kK, kV>;
  using Channels = TokenChannels<kK, kV>;

  const TokenBlock<kK, kV>& b;
  const Channels& channels;

  // d_q or d_k: the gradient of the normalised rows, less its part along them. `dots`: of a lane.
  __device__ __forceinline__ void finish_keys(
      const KeptRows (&kept)[kK / kPass], const ChannelRows& dots, int norms_at, void* out
  ) const {
    const int64_t step = b.p.common.dims.H * kK;
    uint16_t* to = static_cast<uint16_t*>(out) +
                   b.result(channels.block * kBlockRows, b.h, b.p.common.dims.H, kK) +
                   channels.lane;
    const float dot = b.p.common.options.l2norm ? sum_spread(dots) : 0.0f;
    float norm[kBlockRows], along[kBlockRows];
    load_eight(norm, channels.of_rows(norms_at));
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      along[i] = __shfl_sync(kWarpMask, dot, i * (32 / kBlockRows)) * norm[i];
    }
#pragma unroll 1
    for (int pass = 0; pass < kK / kPass; ++pass) {
#pragma unroll
      for (int i = 0; i < kBlockRows; i += 2) {
        const float2 raw = widen_pair(kept[pass].raw[i / 2], kType == DType::kBf16);
        const uint32_t pair = pack_pair<kType>(
            norm[i] * (kept[pass].grad[i] - raw.x * along[i]),
            norm[i + 1] * (kept[pass].grad[i + 1] - raw.y * along[i + 1])
        );
        store_half_if(to + i * step, pair, i < channels.live);
        store_half_if(to + (i + 1) * step, pair >> 16, i + 1 < channels.live);
      }
      to += kPass;
    }
  }

  __device__ __forceinline__ void finish_beta() const {
    const float term = sum_spread(channels.term);
    const int row = channels.block * kBlockRows + channels.lane / 4;
    if (channels.lane % 4 == 0 && row < b.rows) {
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
};

}  // namespace sdm::kda::cuda
