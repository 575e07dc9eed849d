// SPDX-License-Identifier: Apache-2.0
//! @file The part of the token stage in which a thread owns one key channel of one block of 16
//! rows: decays, operands of the products, pairs of rows inside the block, gradient of the gate.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

// kCount elements of one channel, row by row, as floats; rows past the end are 0.
template <int kCount>
__device__ __forceinline__ void load_column(
    float (&out)[kCount], const KdaView& view, int64_t from, int rows
) {
  const int64_t stride = view.stride[1];
  if (view.dtype == DType::kF32) {
    const float* data = static_cast<const float*>(view.data) + from;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i] = i < rows ? data[i * stride] : 0.0f;
    }
  } else {
    const uint16_t* data = static_cast<const uint16_t*>(view.data) + from;
    uint16_t raw[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      raw[i] = i < rows ? data[i * stride] : static_cast<uint16_t>(0);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i] = widen_pair(raw[i], view.dtype == DType::kBf16).x;
    }
  }
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

  // Decays of the rows; rows past the end do not decay.
  template <int kCount>
  __device__ __forceinline__ void decays(float (&x)[kCount], int rows) const {
    if (form == KdaGate::kActivated) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = KdaGateChannel{}.log2_decay<KdaGate::kActivated>(x[i], 0.0f);
      }
    } else if (form == KdaGate::kSoftplus) {
      const KdaGateChannel gate{bias, rate};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = gate.log2_decay<KdaGate::kSoftplus>(x[i], 0.0f);
      }
    } else {
      const KdaGateChannel gate{bias, rate * kLog2e};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = gate.log2_decay<KdaGate::kLowerBound>(x[i], bound * kLog2e);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = i < rows ? fast_exp2(x[i]) : 1.0f;
    }
  }

  // Gradient of the element of g from that of the log-decay; adds that of A_log.
  __device__ __forceinline__ float gradient(float raw, float dg, float* d_rate) const {
    if (form == KdaGate::kActivated) {
      return dg;
    }
    const float z = raw + bias;
    if (form == KdaGate::kSoftplus) {
      *d_rate -= rate * (softplus2(z * kLog2e) / kLog2e) * dg;
      return -rate * fast_sigmoid(z) * dg;
    }
    // 1 - s as a sigmoid of its own keeps its digits where s is near 1
    const float dz = rate * bound * fast_sigmoid(rate * z) * fast_sigmoid(-rate * z) * dg;
    *d_rate += dz * z;
    return dz;
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

  __device__ __forceinline__ void load(
      float (&out)[kBlockRows], const KdaView& view, int64_t head
  ) const {
    load_column(out, view, b.element(view, block * kBlockRows, head) + channel, live);
  }

  const __device__ __forceinline__ float* norms(int offset) const {
    return reinterpret_cast<const float*>(b.record() + offset) + block * kBlockRows;
  }

  __device__ __forceinline__ uint16_t* operand(int tile, int i) const {
    return b.template at<uint16_t>(tile + Keys::at(block * kBlockRows + i, channel));
  }

  __device__ __forceinline__ static uint16_t round(float x) {
    return static_cast<uint16_t>(pack_f16(x, 0.0f));
  }

  // Xq, Xk, Y and the decay over the block.
  __device__ __forceinline__ void make_operands() const {
    const KdaTokens& tokens = b.p.common.tokens;
    float p[kBlockRows], q[kBlockRows], k[kBlockRows];
    load(p, tokens.g, b.hv);
    load(q, tokens.q, b.h);
    load(k, tokens.k, b.h);
    gate.decays(p, live);
    const float* q_norm = norms(Record::kQueryNorm);
    const float* k_norm = norms(Record::kKeyNorm);
    const float* beta = norms(Record::kBeta);
    float from_start = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      from_start *= p[i];
      k[i] *= k_norm[i];
      *operand(Memory::kXq, i) = round(q[i] * q_norm[i] * from_start);
      *operand(Memory::kXk, i) = round(k[i] * beta[i] * from_start);
    }
    b.template at<float>(Memory::kDecay)[block * kK + channel] = from_start;
    float to_end = 1.0f;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      *operand(Memory::kYk, i) = round(k[i] * to_end);
      to_end *= p[i];
    }
  }

  __device__ __forceinline__ float operand_value(int tile, int i) const {
    return unpack_f16(*operand(tile, i)).x;
  }

  __device__ __forceinline__ float* plane(int which, int i) const {
    return b.template at<float>(Memory::kPlanes) +
           (which * kChunkRows + block * kBlockRows + i) * Memory::kPitch + channel;
  }

  // Turns the planes into the gradients of the normalised q (0) and k (1) and the terms of dbeta
  // (2); leaves the gradient of G.
  __device__ __forceinline__ void finish_rows(float (&dG)[kBlockRows]) const {
    const KdaTokens& tokens = b.p.common.tokens;
    float p[kBlockRows], q[kBlockRows], k[kBlockRows];
    load(p, tokens.g, b.hv);
    load(q, tokens.q, b.h);
    load(k, tokens.k, b.h);
    gate.decays(p, live);
    const float* q_norm = norms(Record::kQueryNorm);
    const float* k_norm = norms(Record::kKeyNorm);
    const float* beta = norms(Record::kBeta);
    const float* d_keys = b.template at<float>(Memory::kDiagonal) + block * 256;
    const float* d_scores = d_keys + 4 * 256;

    float decay[kBlockRows];   // from row j to the present row
    float column[kBlockRows];  // what row j gets from later rows of the block
    float term[kBlockRows];    // of dbeta
    float from_start = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      from_start *= p[i];
      k[i] *= k_norm[i];
      const float q_i = q[i] * q_norm[i];
      const float beta_i = beta[i];
      const float write = beta_i * k[i];
      float from_q = 0.0f, from_k = 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) {
        decay[j] = j == i - 1 ? p[i] : decay[j] * p[i];
        const float dl = d_keys[i * 16 + j], dm = d_scores[i * 16 + j];
        const float key = decay[j] * k[j];
        from_q += dm * key;
        from_k += dl * key;
        column[j] += decay[j] * (dm * q_i + dl * write);
      }
      column[i] = 0.0f;
      const float own = d_scores[i * 16 + i];
      const float q_plane = *plane(0, i), k_plane = *plane(1, i);
      const float key_grad = from_start * k_plane + from_k;  // before beta
      *plane(0, i) = from_start * q_plane + from_q + own * k[i];
      *plane(1, i) = beta_i * key_grad + own * q_i;
      term[i] = k[i] * key_grad;
      dG[i] = operand_value(Memory::kXq, i) * q_plane + operand_value(Memory::kXk, i) * k_plane +
              q_i * from_q + write * from_k;
    }
    decay[kBlockRows - 1] = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float later = *plane(2, i);
      *plane(1, i) += column[i] + decay[i] * later;
      *plane(2, i) = term[i];
      dG[i] -= operand_value(Memory::kYk, i) * later + k[i] * column[i];
    }
  }

  // Gradient of g from that of G, and the sums over the chunk for dt_bias and A_log.
  __device__ __forceinline__ void finish_gate(float (&dG)[kBlockRows]) const {
    float total = 0.0f;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      total += dG[i];
    }
    float* totals = b.template at<float>(Memory::kTotals);
    totals[block * kK + channel] = total;
    __syncthreads();
    const float* end_sums = b.template at<float>(Memory::kEndSums);
    float dg = b.template at<float>(Memory::kEndGrad)[channel];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dg += end_sums[i * kK + channel];
    }
    for (int i = 3; i > block; --i) {
      dg += totals[i * kK + channel];
    }
    float raw[kBlockRows];
    load(raw, b.p.common.tokens.g, b.hv);
    const DType type = b.p.common.tokens.g.dtype;
    const int64_t heads = b.p.common.dims.HV;
    const int64_t to = b.result(block * kBlockRows, b.hv, heads, kK) + channel;
    float d_bias = 0.0f, d_rate = 0.0f;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      dg += dG[i];
      if (i < live) {
        const float dz = gate.gradient(raw[i], dg, &d_rate);
        d_bias += dz;
        store_element(b.p.d_g, type, to + i * heads * kK, dz);
      }
    }
    float* sums = b.template at<float>(Memory::kGateSums);
    sums[block * kK + channel] = d_bias;
    sums[(4 + block) * kK + channel] = d_rate;
  }

  // After a barrier: adds the four blocks up.
  __device__ __forceinline__ void store_gate_sums() const {
    if (block >= 2) {
      return;
    }
    const KdaDims& dims = b.p.common.dims;
    const float* sums = b.template at<float>(Memory::kGateSums) + block * 4 * kK + channel;
    const int64_t row = b.p.common.cu_seqlens.data != nullptr
                            ? b.span.sequence.first_row(dims.T) + b.span.first
                            : b.span.sequence.index * ceil_div(dims.T, kTensorChunk) + b.span.first;
    b.p.gate_sums[((row * dims.HV + b.hv) * 2 + block) * kK + channel] =
        sums[0] + sums[kK] + sums[2 * kK] + sums[3 * kK];
  }
};

}  // namespace sdm::kda::cuda
