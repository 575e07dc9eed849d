// SPDX-License-Identifier: Apache-2.0
//! @file The part of the tensor backward in which a warp owns a row: gradients of q, k and beta.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_channels.cuh"

namespace sdm::kda::cuda {

// Gradient of a row of q or k from that of the normalised row. `raw` is the row, `norm` the factor
// that normalises it, `dot` the product of the two rows times norm^2 (0 without a norm); a lane has
// kCount channels. Nothing is stored if the row is not `live`.
template <DType kType, int kCount>
__device__ __forceinline__ void store_row(
    void* out,
    int64_t to,
    const float (&grad)[kCount],
    const float (&raw)[kCount],
    float norm,
    float dot,
    bool live
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
    store_two_pairs_if(at, make_uint2(packed[0], packed[1]), live);
  } else {
    store_pair_if(at, packed[0], live);
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
  float grad_unit;  // of what the passes left

  // Of the warp's rows what the passes left in the place of d_q, and q.
  uint2 grad_pairs[kWarpRows], raw_pairs[kWarpRows];

  __device__ __forceinline__ int first_row() const { return channels.warp * kWarpRows; }

  __device__ __forceinline__ uint16_t* result() const {
    return static_cast<uint16_t*>(b.p.d_q) + b.result(first_row(), b.h, b.p.common.dims.H, kK) +
           channels.lane * kCount;
  }

  __device__ __forceinline__ static uint2 load_pairs_of(const uint16_t* from, bool whole) {
    uint32_t x[kCount / 2];
    load_pairs<kCount / 2>(x, from, whole);
    return make_uint2(x[0], kCount == 4 ? x[kCount / 2 - 1] : 0);
  }

  // After the warp has left them.
  __device__ __forceinline__ void load() {
    if (b.p.group_grads != nullptr || first_row() >= b.rows) {
      return;
    }
    const KdaView& view = b.p.common.tokens.q;
    const int last = b.rows - first_row() - 1;
    const uint16_t* grad_from = result();
    const uint16_t* raw_from = b.row_pointer(view, first_row(), b.h) + channels.lane * kCount;
    const int64_t step = b.p.common.dims.H * kK;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      grad_pairs[i] = load_pairs_of(grad_from, true);
      raw_pairs[i] = load_pairs_of(raw_from, b.p.aligned_qk);
      // instead of rows past the end the last one
      grad_from += i < last ? step : 0;
      raw_from += i < last ? view.stride[1] : 0;
    }
  }

  // d_q: the gradient of the normalised rows, less its part along them.
  __device__ __forceinline__ void finish_queries() const {
    const int live = b.rows - first_row(), col = channels.lane * kCount;
    const int64_t step = b.p.common.dims.H * kK;
    float grad[kWarpRows][kCount], raw[kWarpRows][kCount], dots[kWarpRows];
    // of a block of rows and two channels
    const uint32_t* words =
        b.template at<uint32_t>(Memory::kUnits) + channels.warp * 32 + col % kPass / 2;
    float unit[2][kCount / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < kCount / 2; ++c) {
        unit[half][c] =
            __uint_as_float((words[half * 16 + c] >> (8 * (col / kPass)) & 0xffu) << 23) *
            grad_unit;
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      dots[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kCount / 2; ++c) {
        const float2 x = unpack_f16(c == 0 ? grad_pairs[i].x : grad_pairs[i].y);
        const float2 y = unpack_pair<kType>(c == 0 ? raw_pairs[i].x : raw_pairs[i].y);
        grad[i][2 * c] = x.x * unit[i / kBlockRows][c];
        grad[i][2 * c + 1] = x.y * unit[i / kBlockRows][c];
        raw[i][2 * c] = y.x;
        raw[i][2 * c + 1] = y.y;
        dots[i] += grad[i][2 * c] * y.x + grad[i][2 * c + 1] * y.y;
      }
    }
    const float dot = b.p.common.options.l2norm ? sum_spread(dots) : 0.0f;
    const float* norm = b.template at<float>(Memory::kQueryNorm) + first_row();
    uint16_t* out = result();
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const float along = __shfl_sync(kWarpMask, dot, i * (32 / kWarpRows)) * norm[i] * norm[i];
      store_row<kType, kCount>(out, 0, grad[i], raw[i], norm[i], along, i < live);
      out += step;
    }
  }

  __device__ __forceinline__ void finish_beta() const {
    const float term = sum_spread<kBlockRows, 16>(channels.terms) * grad_unit;
    const int row = channels.warp * kWarpRows + channels.lane / 4;
    if (channels.lane % 4 == 0 && row < b.rows) {
      const KdaView& view = b.p.common.tokens.beta;
      float d_beta = term + b.template at<float>(Memory::kValueSums)[row];
      const KdaBeta kind = b.p.common.options.beta;
      if (kind != KdaBeta::kActivated) {
        const float x = load_element(view.data, view.dtype, b.element(view, row, b.hv));
        // s (1 - s) with e = exp(-x) is e / (1 + e)^2, which keeps its digits at both ends
        const float e = fast_exp2(fminf(-kLog2e * x, 126.0f));
        const float s = fast_reciprocal(1.0f + e);
        const float slope = e * s * s;
        d_beta *= kind == KdaBeta::kSigmoid ? slope : 2.0f * slope;
      }
      const int64_t to = b.result(row, b.hv, b.p.common.dims.HV, 1);
      store_element(b.p.d_beta, view.dtype, to, d_beta);
    }
  }

  // After the passes.
  __device__ __forceinline__ void finish() const {
    finish_beta();
    if (b.p.group_grads == nullptr && first_row() < b.rows) {
      finish_queries();
    }
  }
};

}  // namespace sdm::kda::cuda
