// SPDX-License-Identifier: Apache-2.0
//! @file The part of the token stage in which a thread owns one key channel of one block of eight
//! rows: decays, operands of the products, pairs of rows inside the block, gradient of the gate.
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
  ChannelGate(const KdaOptions& options, const KdaTokens& tokens, int64_t K, int64_t hv, int c)
      : form(options.gate), rate(1.0f), bias(0.0f), bound(0.0f) {
    if (form != KdaGate::kActivated) {
      rate = tokens.A_log != nullptr ? expf(tokens.A_log[hv]) : 1.0f;
      bias = tokens.dt_bias != nullptr ? tokens.dt_bias[hv * K + c] : 0.0f;
      bound = static_cast<float>(options.lower_bound);
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
      x[i] = i < rows ? fast_exp2(x[i]) : 1.0f;
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

template <int kK, int kV>
struct TokenChannels {
  using Memory = TokenMemory<kK, kV>;
  using Keys = typename Memory::Keys;
  using Record = KdaRecord<kK>;

  const TokenBlock<kK, kV>& b;
  int block, channel, live;  // live: rows of the block that exist
  ChannelGate gate;

  __device__ __forceinline__ explicit TokenChannels(const TokenBlock<kK, kV>& in)
      : b(in),
        block(static_cast<int>(threadIdx.x) / kK),
        channel(static_cast<int>(threadIdx.x) % kK),
        live(in.rows - block * kBlockRows),
        gate(in.p.common.options, in.p.common.tokens, kK, in.hv, channel) {}

  __device__ __forceinline__ void load(ChannelRows& out, const KdaView& view, int64_t head) const {
    load_rows(out, view, b.element(view, block * kBlockRows, head) + channel, live);
  }

  __device__ __forceinline__ void load_norms(float (&out)[kBlockRows], int offset) const {
    load_eight(out, reinterpret_cast<const float*>(b.record() + offset) + block * kBlockRows);
  }

  __device__ __forceinline__ float beta(int i) const {
    return b.template at<float>(Memory::kBeta)[block * kBlockRows + i];
  }

  __device__ __forceinline__ uint16_t* operand(int tile, int i) const {
    return b.template at<uint16_t>(tile + Keys::at(block * kBlockRows + i, channel));
  }

  __device__ __forceinline__ void put_operand(int tile, int i, float x) const {
    *operand(tile, i) = static_cast<uint16_t>(pack_f16(x, 0.0f));
  }

  __device__ __forceinline__ float operand_value(int tile, int i) const {
    return unpack_f16(*operand(tile, i)).x;
  }

  // Of a float [8][K].
  __device__ __forceinline__ float& per_block(int offset, int i) const {
    return b.template at<float>(offset)[i * kK + channel];
  }

  // Decays, normalised q and k of the rows.
  __device__ __forceinline__ void load_all(ChannelRows& p, ChannelRows& q, ChannelRows& k) const {
    const KdaTokens& tokens = b.p.common.tokens;
    load(p, tokens.g, b.hv);
    load(q, tokens.q, b.h);
    load(k, tokens.k, b.h);
    float norm[kBlockRows];
    load_norms(norm, Record::kQueryNorm);
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      q[i] *= norm[i];
    }
    load_norms(norm, Record::kKeyNorm);
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      k[i] *= norm[i];
    }
    gate.decays(p, live);
  }

  // Xq, Xk, Y and the decay over the block.
  __device__ __forceinline__ void make_operands() const {
    ChannelRows p, q, k, strength;
    load_all(p, q, k);
    load_norms(strength, Record::kBeta);
    float from_start = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      from_start *= p[i];
      put_operand(Memory::kXq, i, q[i] * from_start);
      put_operand(Memory::kXk, i, k[i] * strength[i] * from_start);
    }
    per_block(Memory::kDecay, block) = from_start;
    float to_end = 1.0f;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      put_operand(Memory::kYk, i, k[i] * to_end);
      to_end *= p[i];
    }
  }

  // After a barrier: the decay over all later blocks.
  __device__ __forceinline__ void make_ends() const {
    float to_end = 1.0f;
    for (int i = block + 1; i < kBlocks; ++i) {
      to_end *= per_block(Memory::kDecay, i);
    }
    per_block(Memory::kToEnd, block) = to_end;
  }

  __device__ __forceinline__ float& plane(int which, int i) const {
    return b.template at<float>(
        Memory::kPlanes
    )[(which * kChunkRows + block * kBlockRows + i) * Memory::kPitch + channel];
  }

  // Turns the planes into the gradients of the normalised q (0) and k (1) and the terms of dbeta
  // (2); leaves the gradient of G.
  __device__ __forceinline__ void finish_rows(ChannelRows& dG) const {
    ChannelRows p, q, k;
    load_all(p, q, k);
    const float* d_keys = b.template at<float>(Memory::kDiagonal) + block * 64;
    const float* d_scores = d_keys + kBlocks * 64;

    ChannelRows decay;   // from row j to the present row
    ChannelRows column;  // what row j gets from later rows of the block
    ChannelRows term;    // of dbeta
    float from_start = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      float dl[kBlockRows], dm[kBlockRows];
      load_eight(dl, d_keys + i * kBlockRows);
      load_eight(dm, d_scores + i * kBlockRows);
      const float strength = beta(i), write = strength * k[i];
      from_start *= p[i];
      float from_q = 0.0f, from_k = 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) {
        decay[j] = j == i - 1 ? p[i] : decay[j] * p[i];
        const float key = decay[j] * k[j];
        from_q += dm[j] * key;
        from_k += dl[j] * key;
        column[j] += decay[j] * (dm[j] * q[i] + dl[j] * write);
      }
      column[i] = 0.0f;
      const float q_plane = plane(0, i), k_plane = plane(1, i);
      const float key_grad = from_start * k_plane + from_k;  // before beta
      plane(0, i) = from_start * q_plane + from_q + dm[i] * k[i];
      plane(1, i) = strength * key_grad + dm[i] * q[i];
      term[i] = k[i] * key_grad;
      dG[i] = operand_value(Memory::kXq, i) * q_plane + operand_value(Memory::kXk, i) * k_plane +
              q[i] * from_q + write * from_k;
    }
    decay[kBlockRows - 1] = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float later = plane(2, i);
      plane(1, i) += column[i] + decay[i] * later;
      plane(2, i) = term[i];
      dG[i] -= operand_value(Memory::kYk, i) * later + k[i] * column[i];
    }
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void store_gate(
      const ChannelRows& dG, const ChannelRows& raw, float dg, float* d_bias, float* d_rate
  ) const {
    const DType type = b.p.common.tokens.g.dtype;
    const int64_t heads = b.p.common.dims.HV;
    const int64_t to = b.result(block * kBlockRows, b.hv, heads, kK) + channel;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      dg += dG[i];
      if (i < live) {
        const float dz = gate.gradient<kGate>(raw[i], dg, d_rate);
        *d_bias += dz;
        store_element(b.p.d_g, type, to + i * heads * kK, dz);
      }
    }
  }

  // Gradient of g from that of G, and the sums over the chunk for dt_bias and A_log.
  __device__ __forceinline__ void finish_gate(const ChannelRows& dG) const {
    ChannelRows raw;
    load(raw, b.p.common.tokens.g, b.hv);
    float total = 0.0f;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      total += dG[i];
    }
    per_block(Memory::kTotals, block) = total;
    __syncthreads();
    float dg = per_block(Memory::kEndGrad, 0), d_bias = 0.0f, d_rate = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dg += per_block(Memory::kEndSums, i);
    }
    for (int i = kBlocks - 1; i > block; --i) {
      dg += per_block(Memory::kTotals, i);
    }
    if (gate.form == KdaGate::kActivated) {
      store_gate<KdaGate::kActivated>(dG, raw, dg, &d_bias, &d_rate);
    } else if (gate.form == KdaGate::kSoftplus) {
      store_gate<KdaGate::kSoftplus>(dG, raw, dg, &d_bias, &d_rate);
    } else {
      store_gate<KdaGate::kLowerBound>(dG, raw, dg, &d_bias, &d_rate);
    }
    per_block(Memory::kGateSums, block) = d_bias;
    per_block(Memory::kGateSums, kBlocks + block) = d_rate;
  }

  // After a barrier: adds the blocks up.
  __device__ __forceinline__ void store_gate_sums() const {
    if (block >= 2) {
      return;
    }
    const KdaDims& dims = b.p.common.dims;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      sum += per_block(Memory::kGateSums, block * kBlocks + i);
    }
    const int64_t row = b.p.common.cu_seqlens.data != nullptr
                            ? b.span.sequence.first_row(dims.T) + b.span.first
                            : b.span.sequence.index * ceil_div(dims.T, kTensorChunk) + b.span.first;
    b.p.gate_sums[((row * dims.HV + b.hv) * 2 + block) * kK + channel] = sum;
  }
};

}  // namespace sdm::kda::cuda
