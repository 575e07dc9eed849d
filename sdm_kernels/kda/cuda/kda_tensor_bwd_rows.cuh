// SPDX-License-Identifier: Apache-2.0
//! @file The part of the tensor backward in which a warp owns a row: gradients of q, k and beta.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_channels.cuh"

namespace sdm::kda::cuda {

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

// The end of the token stage: what needs sums over all channels of a row. A lane has kK / 32
// channels of each of the warp's rows.
template <int kK, int kV, DType kType>
struct TokenRows {
  using Memory = TokenMemory<kK, kV>;
  using Channels = TokenChannels<kK, kV>;
  static constexpr int kCount = kK / 32;

  const TokenBlock<kK, kV>& b;
  const Channels& channels;

  // d_q (0) or d_k (1) from what the passes left in their place: the gradient of the normalised
  // rows, less its part along them.
  __device__ __forceinline__ void finish_keys(int which) const {
    const KdaTokens& tokens = b.p.common.tokens;
    const int first = channels.block * kBlockRows, col = channels.lane * kCount;
    const int64_t step = b.p.common.dims.H * kK;
    const int64_t raw_step = which == 0 ? tokens.q.stride[1] : tokens.k.stride[1];
    const uint16_t* raw_from =
        (which == 0 ? b.row_pointer(tokens.q, first, b.h) : b.row_pointer(tokens.k, first, b.h)) +
        col;
    uint16_t* out = static_cast<uint16_t*>(which == 0 ? b.p.d_q : b.p.d_k) +
                    b.result(first, b.h, b.p.common.dims.H, kK) + col;
    float grad[kBlockRows][kCount], raw[kBlockRows][kCount], dots[kBlockRows];
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const int64_t at = i < channels.live ? i : 0;  // rows past the end: one that exists
      load_floats<DType::kF16, kCount>(grad[i], out, at * step, true);
      load_floats<kType, kCount>(raw[i], raw_from, at * raw_step, b.p.aligned_qk);
    }
    const uint32_t* words = b.template at<uint32_t>(Memory::kUnits) +
                            (which * kBlocks + channels.block) * kPass + col % kPass;
    float unit[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      unit[c] = __uint_as_float((words[c] >> (8 * (col / kPass)) & 0xffu) << 23);
    }
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      dots[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        grad[i][c] *= unit[c];
        dots[i] += grad[i][c] * raw[i][c];
      }
    }
    const float dot = b.p.common.options.l2norm ? sum_spread(dots) : 0.0f;
    float norm[kBlockRows];
    load_eight(norm, channels.of_rows(which == 0 ? Memory::kQueryNorm : Memory::kKeyNorm));
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float along = __shfl_sync(kWarpMask, dot, i * (32 / kBlockRows)) * norm[i] * norm[i];
      if (i < channels.live) {
        store_row<kType, kCount>(out, i * step, grad[i], raw[i], norm[i], along);
      }
    }
  }

  __device__ __forceinline__ void finish_beta() const {
    const int row = channels.block * kBlockRows + channels.lane / 4;
    if (channels.lane % 4 == 0 && row < b.rows) {
      const KdaView& view = b.p.common.tokens.beta;
      float d_beta = channels.term + b.template at<float>(Memory::kValueSums)[row];
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

  // After the passes and a barrier.
  __device__ __forceinline__ void finish() const {
    finish_beta();
    if (b.p.group_grads == nullptr && channels.live > 0) {
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        finish_keys(which);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
