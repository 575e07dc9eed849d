// SPDX-License-Identifier: Apache-2.0
//! @file The part of the token stage in which a thread owns two key channels of one block of eight
//! rows: decays, operands of the products, pairs of rows inside the block, gradient of the gate.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

// Two channels of a block of rows.
using ChannelRows = float[kBlockRows][2];

__device__ __forceinline__ void load_rows_f32(
    ChannelRows& out, const float* from, int64_t stride, int rows, bool aligned
) {
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    if (i >= rows) {
      out[i][0] = out[i][1] = 0.0f;
    } else if (aligned) {
      const float2 x = *reinterpret_cast<const float2*>(from);
      out[i][0] = x.x;
      out[i][1] = x.y;
    } else {
      out[i][0] = from[0];
      out[i][1] = from[1];
    }
    from += stride;
  }
}

__device__ __forceinline__ void load_rows_16(
    ChannelRows& out, const uint16_t* from, int64_t stride, int rows, bool aligned, bool bf16
) {
  uint32_t raw[kBlockRows];
  if (aligned && rows >= kBlockRows) {
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      raw[i] = *reinterpret_cast<const uint32_t*>(from);
      from += stride;
    }
  } else {
    for (int i = 0; i < kBlockRows; ++i) {
      raw[i] = i < rows ? from[0] | static_cast<uint32_t>(from[1]) << 16 : 0;
      from += stride;
    }
  }
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    const float2 x = widen_pair(raw[i], bf16);
    out[i][0] = x.x;
    out[i][1] = x.y;
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

// The gate of two key channels.
struct ChannelGate {
  KdaGate form;
  float rate;     // exp(A_log)
  float bias[2];  // dt_bias
  float bound;    // lower bound

  __device__ __forceinline__
  ChannelGate(const KdaOptions& options, const KdaTokens& tokens, int64_t K, int64_t hv, int c)
      : form(options.gate), rate(1.0f), bias{0.0f, 0.0f}, bound(0.0f) {
    if (form != KdaGate::kActivated) {
      rate = tokens.A_log != nullptr ? expf(tokens.A_log[hv]) : 1.0f;
      if (tokens.dt_bias != nullptr) {
        bias[0] = tokens.dt_bias[hv * K + c];
        bias[1] = tokens.dt_bias[hv * K + c + 1];
      }
      bound = static_cast<float>(options.lower_bound);
    }
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void decays_of(ChannelRows& x) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const KdaGateChannel gate{bias[c], kGate == KdaGate::kLowerBound ? rate * kLog2e : rate};
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        x[i][c] = gate.log2_decay<kGate>(x[i][c], bound * kLog2e);
      }
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
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        x[i][c] = i < rows ? fast_exp2(x[i][c]) : 1.0f;
      }
    }
  }

  // Gradient of the element of g from that of the log-decay; adds that of A_log.
  template <KdaGate kGate>
  __device__ __forceinline__ float gradient(int c, float raw, float dg, float* d_rate) const {
    if constexpr (kGate == KdaGate::kActivated) {
      return dg;
    } else if constexpr (kGate == KdaGate::kSoftplus) {
      const float z = raw + bias[c];
      *d_rate -= rate * (softplus2(z * kLog2e) * (1.0f / kLog2e)) * dg;
      return -rate * fast_sigmoid(z) * dg;
    } else {
      // 1 - s as a sigmoid of its own keeps its digits where s is near 1
      const float z = raw + bias[c];
      const float dz = rate * bound * fast_sigmoid(rate * z) * fast_sigmoid(-rate * z) * dg;
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
        block(static_cast<int>(threadIdx.x) / (kK / 2)),
        channel(static_cast<int>(threadIdx.x) % (kK / 2) * 2),
        live(in.rows - block * kBlockRows),
        gate(in.p.common.options, in.p.common.tokens, kK, in.hv, channel) {}

  __device__ __forceinline__ void load(
      ChannelRows& out, const KdaView& view, int64_t head, bool aligned
  ) const {
    const int64_t from = b.element(view, block * kBlockRows, head) + channel;
    const int64_t stride = view.stride[1];
    if (view.dtype == DType::kF32) {
      load_rows_f32(out, static_cast<const float*>(view.data) + from, stride, live, aligned);
    } else {
      load_rows_16(
          out,
          static_cast<const uint16_t*>(view.data) + from,
          stride,
          live,
          aligned,
          view.dtype == DType::kBf16
      );
    }
  }

  __device__ __forceinline__ void load_norms(float (&out)[kBlockRows], int offset) const {
    load_eight(out, reinterpret_cast<const float*>(b.record() + offset) + block * kBlockRows);
  }

  __device__ __forceinline__ uint32_t* operand(int tile, int i) const {
    return b.template at<uint32_t>(tile + Keys::at(block * kBlockRows + i, channel));
  }

  // Decays, normalised q and k, beta of the rows.
  __device__ __forceinline__ void load_all(
      ChannelRows& p, ChannelRows& q, ChannelRows& k, float (&beta)[kBlockRows]
  ) const {
    const KdaTokens& tokens = b.p.common.tokens;
    load(p, tokens.g, b.hv, b.p.aligned_g);
    load(q, tokens.q, b.h, b.p.aligned_qk);
    load(k, tokens.k, b.h, b.p.aligned_qk);
    float q_norm[kBlockRows], k_norm[kBlockRows];
    load_norms(q_norm, Record::kQueryNorm);
    load_norms(k_norm, Record::kKeyNorm);
    load_norms(beta, Record::kBeta);
    gate.decays(p, live);
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        q[i][c] *= q_norm[i];
        k[i][c] *= k_norm[i];
      }
    }
  }

  // Xq, Xk, Y and the decay over the block.
  __device__ __forceinline__ void make_operands() const {
    ChannelRows p, q, k;
    float beta[kBlockRows];
    load_all(p, q, k, beta);
    float2 from_start = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      from_start.x *= p[i][0];
      from_start.y *= p[i][1];
      *operand(Memory::kXq, i) = pack_f16(q[i][0] * from_start.x, q[i][1] * from_start.y);
      *operand(Memory::kXk, i) =
          pack_f16(k[i][0] * beta[i] * from_start.x, k[i][1] * beta[i] * from_start.y);
    }
    *b.template at<float2>(Memory::kDecay + (block * kK + channel) * 4) = from_start;
    float2 to_end = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      *operand(Memory::kYk, i) = pack_f16(k[i][0] * to_end.x, k[i][1] * to_end.y);
      to_end.x *= p[i][0];
      to_end.y *= p[i][1];
    }
  }

  // After a barrier: the decay over all later blocks.
  __device__ __forceinline__ void make_ends() const {
    float2 to_end = make_float2(1.0f, 1.0f);
    for (int i = block + 1; i < kBlocks; ++i) {
      const float2 m = *b.template at<float2>(Memory::kDecay + (i * kK + channel) * 4);
      to_end.x *= m.x;
      to_end.y *= m.y;
    }
    *b.template at<float2>(Memory::kToEnd + (block * kK + channel) * 4) = to_end;
  }

  __device__ __forceinline__ float2* plane(int which, int i) const {
    return b.template at<float2>(
        Memory::kPlanes +
        ((which * kChunkRows + block * kBlockRows + i) * Memory::kPitch + channel) * 4
    );
  }

  // Turns the planes into the gradients of the normalised q (0) and k (1) and the terms of dbeta
  // (2); leaves the gradient of G.
  __device__ __forceinline__ void finish_rows(ChannelRows& dG) const {
    ChannelRows p, q, k;
    float beta[kBlockRows];
    load_all(p, q, k, beta);
    const float* d_keys = b.template at<float>(Memory::kDiagonal) + block * 64;
    const float* d_scores = d_keys + kBlocks * 64;

    ChannelRows decay;   // from row j to the present row
    ChannelRows column;  // what row j gets from later rows of the block
    ChannelRows term;    // of dbeta
    float from_start[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      float dl[kBlockRows], dm[kBlockRows];
      load_eight(dl, d_keys + i * kBlockRows);
      load_eight(dm, d_scores + i * kBlockRows);
      const float2 planes[2] = {*plane(0, i), *plane(1, i)};
      const float2 x_q = unpack_f16(*operand(Memory::kXq, i));
      const float2 x_k = unpack_f16(*operand(Memory::kXk, i));
      float q_out[2], k_out[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        from_start[c] *= p[i][c];
        const float q_plane = c == 0 ? planes[0].x : planes[0].y;
        const float k_plane = c == 0 ? planes[1].x : planes[1].y;
        const float q_i = q[i][c], write = beta[i] * k[i][c];
        float from_q = 0.0f, from_k = 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) {
          decay[j][c] = j == i - 1 ? p[i][c] : decay[j][c] * p[i][c];
          const float key = decay[j][c] * k[j][c];
          from_q += dm[j] * key;
          from_k += dl[j] * key;
          column[j][c] += decay[j][c] * (dm[j] * q_i + dl[j] * write);
        }
        column[i][c] = 0.0f;
        const float key_grad = from_start[c] * k_plane + from_k;  // before beta
        q_out[c] = from_start[c] * q_plane + from_q + dm[i] * k[i][c];
        k_out[c] = beta[i] * key_grad + dm[i] * q_i;
        term[i][c] = k[i][c] * key_grad;
        dG[i][c] = (c == 0 ? x_q.x : x_q.y) * q_plane + (c == 0 ? x_k.x : x_k.y) * k_plane +
                   q_i * from_q + write * from_k;
      }
      *plane(0, i) = make_float2(q_out[0], q_out[1]);
      *plane(1, i) = make_float2(k_out[0], k_out[1]);
    }
    decay[kBlockRows - 1][0] = decay[kBlockRows - 1][1] = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float2 later = *plane(2, i);
      const float2 y = unpack_f16(*operand(Memory::kYk, i));
      float2 out = *plane(1, i);
      out.x += column[i][0] + decay[i][0] * later.x;
      out.y += column[i][1] + decay[i][1] * later.y;
      *plane(1, i) = out;
      *plane(2, i) = make_float2(term[i][0], term[i][1]);
      dG[i][0] -= y.x * later.x + k[i][0] * column[i][0];
      dG[i][1] -= y.y * later.y + k[i][1] * column[i][1];
    }
  }

  __device__ __forceinline__ void add_pair(float (&sum)[2], int offset) const {
    const float2 x = *b.template at<float2>(offset + channel * 4);
    sum[0] += x.x;
    sum[1] += x.y;
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void store_gate(
      const ChannelRows& dG,
      const ChannelRows& raw,
      float (&dg)[2],
      float (&d_bias)[2],
      float (&d_rate)[2]
  ) const {
    const DType type = b.p.common.tokens.g.dtype;
    const int64_t heads = b.p.common.dims.HV;
    const int64_t to = b.result(block * kBlockRows, b.hv, heads, kK) + channel;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      dg[0] += dG[i][0];
      dg[1] += dG[i][1];
      if (i < live) {
        const float low = gate.gradient<kGate>(0, raw[i][0], dg[0], &d_rate[0]);
        const float high = gate.gradient<kGate>(1, raw[i][1], dg[1], &d_rate[1]);
        d_bias[0] += low;
        d_bias[1] += high;
        const int64_t at = to + i * heads * kK;
        if (type == DType::kF32) {
          *reinterpret_cast<float2*>(static_cast<float*>(b.p.d_g) + at) = make_float2(low, high);
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(b.p.d_g) + at) =
              type == DType::kBf16 ? pack_bf16(low, high) : pack_f16(low, high);
        }
      }
    }
  }

  // Gradient of g from that of G, and the sums over the chunk for dt_bias and A_log.
  __device__ __forceinline__ void finish_gate(const ChannelRows& dG) const {
    ChannelRows raw;
    load(raw, b.p.common.tokens.g, b.hv, b.p.aligned_g);
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      total.x += dG[i][0];
      total.y += dG[i][1];
    }
    *b.template at<float2>(Memory::kTotals + (block * kK + channel) * 4) = total;
    __syncthreads();
    float dg[2] = {0.0f, 0.0f}, d_bias[2] = {0.0f, 0.0f}, d_rate[2] = {0.0f, 0.0f};
    add_pair(dg, Memory::kEndGrad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      add_pair(dg, Memory::kEndSums + i * kK * 4);
    }
    for (int i = kBlocks - 1; i > block; --i) {
      add_pair(dg, Memory::kTotals + i * kK * 4);
    }
    if (gate.form == KdaGate::kActivated) {
      store_gate<KdaGate::kActivated>(dG, raw, dg, d_bias, d_rate);
    } else if (gate.form == KdaGate::kSoftplus) {
      store_gate<KdaGate::kSoftplus>(dG, raw, dg, d_bias, d_rate);
    } else {
      store_gate<KdaGate::kLowerBound>(dG, raw, dg, d_bias, d_rate);
    }
    *b.template at<float2>(Memory::kGateSums + (block * kK + channel) * 4) =
        make_float2(d_bias[0], d_bias[1]);
    *b.template at<float2>(Memory::kGateSums + ((kBlocks + block) * kK + channel) * 4) =
        make_float2(d_rate[0], d_rate[1]);
  }

  // After a barrier: adds the blocks up.
  __device__ __forceinline__ void store_gate_sums() const {
    const int which = static_cast<int>(threadIdx.x) / kK, c = static_cast<int>(threadIdx.x) % kK;
    if (which >= 2) {
      return;
    }
    const KdaDims& dims = b.p.common.dims;
    const float* sums = b.template at<float>(Memory::kGateSums) + which * kBlocks * kK + c;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      sum += sums[i * kK];
    }
    const int64_t row = b.p.common.cu_seqlens.data != nullptr
                            ? b.span.sequence.first_row(dims.T) + b.span.first
                            : b.span.sequence.index * ceil_div(dims.T, kTensorChunk) + b.span.first;
    b.p.gate_sums[((row * dims.HV + b.hv) * 2 + which) * kK + c] = sum;
  }
};

}  // namespace sdm::kda::cuda
