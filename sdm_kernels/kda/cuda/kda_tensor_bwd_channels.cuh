// SPDX-License-Identifier: Apache-2.0
//! @file The part of the token stage in which a thread owns one key channel of the pass and a warp
//! eight rows: decays, operands of the products, pairs of rows inside the eight, gradient of the
//! gate.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_access.cuh"
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
  ChannelGate(const KdaOptions& options, const KdaTokens& tokens, float exp_A, int64_t channel)
      : form(options.gate),
        rate(exp_A),
        bias(0.0f),
        bound(static_cast<float>(options.lower_bound)) {
    if (form != KdaGate::kActivated && tokens.dt_bias != nullptr) {
      bias = tokens.dt_bias[channel];
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
      x[i] = fast_exp2(x[i]);
    }
    if (rows < kBlockRows) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        x[i] = i < rows ? x[i] : 1.0f;
      }
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

// Two rows in one register.
using PackedRows = uint32_t[kBlockRows / 2];

// What a pass leaves of q or k until the sums over all channels of a row are known; in local
// memory.
struct KeptRows {
  ChannelRows grad;  // of the normalised rows
  PackedRows raw;    // the rows as they came
};

__device__ __forceinline__ float packed_row(const PackedRows& x, int i) {
  return unpack_f16(i % 2 == 0 ? x[i / 2] : x[i / 2] >> 16).x;
}

template <int kK, int kV>
struct TokenChannels {
  using Memory = TokenMemory<kK, kV>;
  using Keys = typename Memory::PassKeys;

  const TokenBlock<kK, kV>& b;
  int block, lane, live;  // live: rows of the block that exist
  float rate;             // exp(A_log)
  // Sums over the passes: terms of dbeta, products of normalised q and k with their gradients.
  ChannelRows term, q_dot, k_dot;
  // Of the present pass.
  int pass;
  ChannelRows raw, p, q, k;  // g, decays, normalised q and k
  PackedRows xq, xk, yk;     // operands

  __device__ __forceinline__ explicit TokenChannels(const TokenBlock<kK, kV>& in)
      : b(in),
        block(static_cast<int>(threadIdx.x / 32)),
        lane(static_cast<int>(threadIdx.x % 32)),
        live(in.rows - block * kBlockRows),
        rate(1.0f),
        term{},
        q_dot{},
        k_dot{},
        pass(0) {
    const float* A_log = in.p.common.tokens.A_log;
    if (in.p.common.options.gate != KdaGate::kActivated && A_log != nullptr) {
      rate = expf(A_log[in.hv]);
    }
  }

  __device__ __forceinline__ int channel() const { return pass * kPass + lane; }

  __device__ __forceinline__ ChannelGate gate() const {
    return ChannelGate(b.p.common.options, b.p.common.tokens, rate, b.hv * kK + channel());
  }

  __device__ __forceinline__ void start_rows(
      int tile, const KdaView& view, int64_t head, int number
  ) const {
    const int row = block * kBlockRows + lane / 4, col = lane % 4 * 8;
    copy_or_zero(
        b.base + static_cast<uint32_t>(tile + Keys::at(row, col)),
        b.row_pointer(view, row, head) + number * kPass + col,
        row < b.rows
    );
  }

  // Starts copies of the warp's rows of q, k and g to where the operands made of them will be,
  // which must be free.
  __device__ __forceinline__ void start_pass(int number) const {
    const KdaTokens& tokens = b.p.common.tokens;
    if (b.p.aligned_qk) {
      start_rows(Memory::kXq, tokens.q, b.h, number);
      start_rows(Memory::kYk, tokens.k, b.h, number);
    }
    if (b.p.aligned_g) {
      start_rows(Memory::kXk, tokens.g, b.hv, number);
    }
    close_copies();
  }

  // Rows of q or k.
  __device__ __forceinline__ void load(
      ChannelRows& out, PackedRows& packed, int tile, const KdaView& view
  ) const {
    if (b.p.aligned_qk) {
#pragma unroll
      for (int i = 0; i < kBlockRows; i += 2) {
        packed[i / 2] = *operand(tile, i) | static_cast<uint32_t>(*operand(tile, i + 1)) << 16;
      }
    } else {
      const uint16_t* from = b.row_pointer(view, block * kBlockRows, b.h) + channel();
#pragma unroll
      for (int i = 0; i < kBlockRows; i += 2) {
        packed[i / 2] = i < live ? from[i * view.stride[1]] : 0;
        packed[i / 2] |=
            i + 1 < live ? static_cast<uint32_t>(from[(i + 1) * view.stride[1]]) << 16 : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockRows; i += 2) {
      const float2 x = widen_pair(packed[i / 2], view.dtype == DType::kBf16);
      out[i] = x.x;
      out[i + 1] = x.y;
    }
  }

  // The pass's elements of g, q and k; the latter two are also kept.
  __device__ __forceinline__ void load_pass(int number, KeptRows& of_q, KeptRows& of_k) {
    pass = number;
    wait_copies<0>();
    __syncwarp();
    const KdaTokens& tokens = b.p.common.tokens;
    if (b.p.aligned_g) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        raw[i] = widen_pair(*operand(Memory::kXk, i), tokens.g.dtype == DType::kBf16).x;
      }
    } else {
      load_rows(raw, tokens.g, b.element(tokens.g, block * kBlockRows, b.hv) + channel(), live);
    }
    load(q, of_q.raw, Memory::kXq, tokens.q);
    load(k, of_k.raw, Memory::kYk, tokens.k);
  }

  __device__ __forceinline__ uint16_t* operand(int tile, int i) const {
    return b.template at<uint16_t>(tile + Keys::at(block * kBlockRows + i, lane));
  }

  // One of the numbers of a row that lie in shared memory.
  const __device__ __forceinline__ float* of_rows(int offset) const {
    return b.template at<float>(offset) + block * kBlockRows;
  }

  // Of a float [..][32].
  __device__ __forceinline__ float& per_block(int offset, int i) const {
    return b.template at<float>(offset)[i * kPass + lane];
  }

  __device__ __forceinline__ int decays() const {
    return Memory::kDecay + pass % 2 * Memory::kPerBlock;
  }

  __device__ __forceinline__ void put_operand(int tile, const PackedRows& x) const {
    const uint32_t to = b.base + static_cast<uint32_t>(tile);
#pragma unroll
    for (int i = 0; i < kBlockRows; i += 2) {
      const int row = block * kBlockRows + i;
      store_halves(to + Keys::at(row, lane), to + Keys::at(row + 1, lane), x[i / 2]);
    }
  }

  // Decays, normalised q and k, then Xq, Xk, Y and the decay over the block.
  __device__ __forceinline__ void make_operands() {
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      p[i] = raw[i];
    }
    gate().decays(p, live);
    float norm[kBlockRows];
    load_eight(norm, of_rows(Memory::kQueryNorm));
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      q[i] *= norm[i];
    }
    load_eight(norm, of_rows(Memory::kKeyNorm));
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      k[i] *= norm[i];
    }
    float strength[kBlockRows];
    load_eight(strength, of_rows(Memory::kBeta));
    float decay = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; i += 2) {
      const float first = decay * p[i];
      decay = first * p[i + 1];
      xq[i / 2] = pack_f16(q[i] * first, q[i + 1] * decay);
      xk[i / 2] = pack_f16(k[i] * strength[i] * first, k[i + 1] * strength[i + 1] * decay);
    }
    per_block(decays(), block) = decay;
    decay = 1.0f;
#pragma unroll
    for (int i = kBlockRows - 2; i >= 0; i -= 2) {
      const float last = decay;
      decay *= p[i + 1];
      yk[i / 2] = pack_f16(k[i] * decay, k[i + 1] * last);
      decay *= p[i];
    }
    put_operand(Memory::kXq, xq);
    put_operand(Memory::kXk, xk);
    put_operand(Memory::kYk, yk);
  }

  __device__ __forceinline__ float plane(int which, int i) const {
    return *b.template at<float>(Memory::plane(which, block * kBlockRows + i, lane));
  }

  // From the planes the gradients of the normalised q and k and of G, and what is summed up.
  __device__ __forceinline__ void finish_rows(ChannelRows& dq, ChannelRows& dk, ChannelRows& dG) {
    const float* d_keys = b.template at<float>(Memory::kDiagonal) + block * 64;
    const float* d_scores = d_keys + kBlocks * 64;
    float strength[kBlockRows];
    load_eight(strength, of_rows(Memory::kBeta));

    ChannelRows decay;   // from row j to the present row
    ChannelRows column;  // what row j gets from later rows of the block
    float from_start = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      float dl[kBlockRows], dm[kBlockRows];
      load_eight(dl, d_keys + i * kBlockRows);
      load_eight(dm, d_scores + i * kBlockRows);
      const float write = strength[i] * k[i];
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
      dq[i] = from_start * q_plane + from_q + dm[i] * k[i];
      dk[i] = strength[i] * key_grad + dm[i] * q[i];
      term[i] += k[i] * key_grad;
      dG[i] = packed_row(xq, i) * q_plane + packed_row(xk, i) * k_plane + q[i] * from_q +
              write * from_k;
    }
    decay[kBlockRows - 1] = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float later = plane(2, i);
      dk[i] += column[i] + decay[i] * later;
      q_dot[i] += q[i] * dq[i];
      k_dot[i] += k[i] * dk[i];
      dG[i] -= packed_row(yk, i) * later + k[i] * column[i];
    }
  }

  // Those of one value head of several go out as they are.
  __device__ __forceinline__ void store_group_grads(int which, const ChannelRows& grad) const {
    float* to = b.p.group_grads + ((b.entry * 2 + which) * kChunkRows + block * kBlockRows) * kK +
                channel();
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      to[i * kK] = grad[i];
    }
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void store_gate(
      const ChannelGate& gate, const ChannelRows& dG, float dg, float* d_bias, float* d_rate
  ) const {
    const DType type = b.p.common.tokens.g.dtype;
    const int64_t step = b.p.common.dims.HV * kK;
    const int64_t to = b.result(block * kBlockRows, b.hv, b.p.common.dims.HV, kK) + channel();
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      dg += dG[i];
      const bool exists = i < live;
      const float dz = gate.template gradient<kGate>(raw[i], exists ? dg : 0.0f, d_rate);
      *d_bias += dz;
      if (type == DType::kF32) {
        if (exists) {
          static_cast<float*>(b.p.d_g)[to + i * step] = dz;
        }
      } else {
        const uint32_t bits = type == DType::kBf16 ? pack_bf16(dz, 0.0f) : pack_f16(dz, 0.0f);
        store_half_if(static_cast<uint16_t*>(b.p.d_g) + to + i * step, bits, exists);
      }
    }
  }

  // Gradient of g from that of G, and the sums over the block for dt_bias and A_log. Contains a
  // barrier, after which the planes are free.
  __device__ __forceinline__ void finish_gate(const ChannelRows& dG) const {
    float total = 0.0f;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      total += dG[i];
    }
    per_block(Memory::kTotals, block) = total;
    __syncthreads();
    float end = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      end += per_block(Memory::kEndGrad, i);
    }
    float dg = 0.0f;  // of what reaches the end of the chunk through later blocks
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      dg = dg * per_block(decays(), i) + per_block(Memory::kEndSums, i);
    }
    dg += b.template at<float>(Memory::kGamma)[channel()] * end;
    for (int i = kBlocks - 1; i > block; --i) {
      dg += per_block(Memory::kTotals, i);
    }
    const ChannelGate of_channel = gate();
    float d_bias = 0.0f, d_rate = 0.0f;
    if (of_channel.form == KdaGate::kActivated) {
      store_gate<KdaGate::kActivated>(of_channel, dG, dg, &d_bias, &d_rate);
    } else if (of_channel.form == KdaGate::kSoftplus) {
      store_gate<KdaGate::kSoftplus>(of_channel, dG, dg, &d_bias, &d_rate);
    } else {
      store_gate<KdaGate::kLowerBound>(of_channel, dG, dg, &d_bias, &d_rate);
    }
    per_block(Memory::kGateSums, block) = d_bias;
    per_block(Memory::kGateSums, kBlocks + block) = d_rate;
  }

  // After a barrier behind the pass: adds the blocks up.
  __device__ __forceinline__ void store_gate_sums(int of_pass) const {
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
    b.p.gate_sums[((row * dims.HV + b.hv) * 2 + block) * kK + of_pass * kPass + lane] = sum;
  }
};

}  // namespace sdm::kda::cuda
