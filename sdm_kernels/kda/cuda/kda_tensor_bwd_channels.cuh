// SPDX-License-Identifier: Apache-2.0
//! @file The part of the token stage in which a thread owns one key channel of the pass and a warp
//! eight rows: decays, operands of the products, pairs of rows inside the eight, gradient of the
//! gate.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_access.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_gate.cuh"

namespace sdm::kda::cuda {

// Two rows in one register.
using PackedRows = uint32_t[kBlockRows / 2];

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
  float term;             // of dbeta of row lane / 4
  uint32_t units[2];      // exponents of what the passes leave of q and k, a byte a pass
  // Of the present pass.
  int pass;
  PackedRows raw;         // g, if it was copied
  ChannelRows p, q, k;    // decays, normalised q and k
  PackedRows xq, xk, yk;  // operands

  __device__ __forceinline__ explicit TokenChannels(const TokenBlock<kK, kV>& in)
      : b(in),
        block(static_cast<int>(threadIdx.x / 32)),
        lane(static_cast<int>(threadIdx.x % 32)),
        live(in.rows - block * kBlockRows),
        rate(1.0f),
        term(0.0f),
        units{},
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
    start_copy<16>(
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

  __device__ __forceinline__ void load(
      ChannelRows& out, int tile, bool copied, const KdaView& view, int64_t head
  ) const {
    if (copied) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        out[i] = widen_pair(*operand(tile, i), view.dtype == DType::kBf16).x;
      }
    } else {
      load_rows(out, view, b.element(view, block * kBlockRows, head) + channel(), live);
    }
  }

  // The elements of g, which are 16-bit numbers.
  __device__ __forceinline__ void keep_raw(DType type) {
#pragma unroll
    for (int i = 0; i < kBlockRows; i += 2) {
      raw[i / 2] = type == DType::kBf16 ? pack_bf16(p[i], p[i + 1]) : pack_f16(p[i], p[i + 1]);
    }
  }

  __device__ __forceinline__ void load_raw(ChannelRows& out) const {
    const KdaView& view = b.p.common.tokens.g;
    if (b.p.aligned_g) {
#pragma unroll
      for (int i = 0; i < kBlockRows; i += 2) {
        const float2 x = widen_pair(raw[i / 2], view.dtype == DType::kBf16);
        out[i] = x.x;
        out[i + 1] = x.y;
      }
    } else {
      load_rows(out, view, b.element(view, block * kBlockRows, b.hv) + channel(), live);
    }
  }

  // The pass's elements of g (as p), q and k.
  __device__ __forceinline__ void load_pass(int number) {
    pass = number;
    wait_for_copies<0>();
    __syncwarp();
    const KdaTokens& tokens = b.p.common.tokens;
    load(p, Memory::kXk, b.p.aligned_g, tokens.g, b.hv);
    if (b.p.aligned_g) {
      keep_raw(tokens.g.dtype);
    }
    load(q, Memory::kXq, b.p.aligned_qk, tokens.q, b.h);
    load(k, Memory::kYk, b.p.aligned_qk, tokens.k, b.h);
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

  // From the planes the gradients of the normalised q and k and of G, and the terms of dbeta.
  __device__ __forceinline__ void finish_rows(ChannelRows& dq, ChannelRows& dk, ChannelRows& dG) {
    const float* d_keys = b.template at<float>(Memory::kDiagonal) + block * 64;
    const float* d_scores = d_keys + kBlocks * 64;
    float strength[kBlockRows];
    load_eight(strength, of_rows(Memory::kBeta));

    ChannelRows decay;   // from row j to the present row
    ChannelRows column;  // what row j gets from later rows of the block
    ChannelRows terms;   // of dbeta
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
      terms[i] = k[i] * key_grad;
      dG[i] = packed_row(xq, i) * q_plane + packed_row(xk, i) * k_plane + q[i] * from_q +
              write * from_k;
    }
    term += sum_spread(terms);
    decay[kBlockRows - 1] = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float later = plane(2, i);
      dk[i] += column[i] + decay[i] * later;
      dG[i] -= packed_row(yk, i) * later + k[i] * column[i];
    }
  }

  // Leaves the gradients of the normalised q (0) or k (1) where the result goes, in fp16, until the
  // sums over their rows are known; those of one value head of several in float.
  __device__ __forceinline__ void keep_grads(int which, const ChannelRows& grad) {
    if (b.p.group_grads != nullptr) {
      float* to = b.p.group_grads + ((b.entry * 2 + which) * kChunkRows + block * kBlockRows) * kK +
                  channel();
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        to[i * kK] = grad[i];
      }
      return;
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      largest = fmaxf(largest, fabsf(grad[i]));
    }
    const KdaUnit unit = unit_of(__float_as_uint(largest));
    units[which] |= __float_as_uint(unit.unit) >> 23 << (8 * pass);
    const int64_t step = b.p.common.dims.H * kK;
    uint16_t* to = static_cast<uint16_t*>(which == 0 ? b.p.d_q : b.p.d_k) +
                   b.result(block * kBlockRows, b.h, b.p.common.dims.H, kK) + channel();
#pragma unroll
    for (int i = 0; i < kBlockRows; i += 2) {
      const uint32_t pair = pack_f16(grad[i] * unit.inverse, grad[i + 1] * unit.inverse);
      store_half_if(to + i * step, pair, i < live);
      store_half_if(to + (i + 1) * step, pair >> 16, i + 1 < live);
    }
  }

  // After the last pass.
  __device__ __forceinline__ void store_units() const {
    uint32_t* to = b.template at<uint32_t>(Memory::kUnits);
    to[block * kPass + lane] = units[0];
    to[(kBlocks + block) * kPass + lane] = units[1];
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void store_gate(
      const ChannelGate& gate, const ChannelRows& dG, float dg, float* d_bias, float* d_rate
  ) const {
    ChannelRows raw_rows;
    load_raw(raw_rows);
    const DType type = b.p.common.tokens.g.dtype;
    const int64_t step = b.p.common.dims.HV * kK;
    const int64_t to = b.result(block * kBlockRows, b.hv, b.p.common.dims.HV, kK) + channel();
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      dg += dG[i];
      const bool exists = i < live;
      const float dz = gate.template gradient<kGate>(raw_rows[i], exists ? dg : 0.0f, d_rate);
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
