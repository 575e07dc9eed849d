// SPDX-License-Identifier: Apache-2.0
//! @file The part of the token stage in which a thread owns two neighbouring key channels of the
//! pass and a block of four rows: decays, operands of the products, pairs of rows inside the block,
//! gradient of the gate. The halves of a warp have its two blocks.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_access.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_gate.cuh"

namespace sdm::kda::cuda {

// Both channels of a thread, in float or as a pair of 16-bit numbers a row.
using PairRows = ChannelRows[2];
using PackedRows = uint32_t[kBlockRows];

template <int kK, int kV>
struct TokenChannels {
  using Memory = TokenMemory<kK, kV>;
  using Keys = typename Memory::PassKeys;

  const TokenBlock<kK, kV>& b;
  int warp, lane, half;
  int row;            // first of the thread's
  int live;           // how many of them exist
  ChannelRows terms;  // of dbeta
  uint32_t units;     // exponents of what the passes leave of q, a byte a pass
  // Where the lane copies q, k and g of the next pass from.
  const uint16_t *q_from, *k_from, *g_from;
  // Of the present pass.
  int pass;
  PackedRows raw;      // g, if it was copied
  PackedRows p, q, k;  // decays, normalised q and k, in fp16

  __device__ __forceinline__ explicit TokenChannels(const TokenBlock<kK, kV>& in)
      : b(in),
        warp(static_cast<int>(threadIdx.x / 32)),
        lane(static_cast<int>(threadIdx.x % 32)),
        half(static_cast<int>(threadIdx.x % 32 / 16)),
        row(static_cast<int>(threadIdx.x / 16) * kBlockRows),
        live(in.rows - row),
        terms{},
        units(0),
        q_from(from(in, in.p.common.tokens.q, in.h)),
        k_from(from(in, in.p.common.tokens.k, in.h)),
        g_from(from(in, in.p.common.tokens.g, in.hv)),
        pass(0) {}

  // First of the thread's, in the pass and in all.
  __device__ __forceinline__ int column() const { return lane % 16 * 2; }

  __device__ __forceinline__ int channel() const { return pass * kPass + column(); }

  __device__ __forceinline__ ChannelGate gate(int x) const {
    const KdaOptions& options = b.p.common.options;
    return {
        options.gate,
        *b.template at<float>(Memory::kRate),
        b.template at<float>(Memory::kBias)[channel() + x],
        static_cast<float>(options.lower_bound)
    };
  }

  static const __device__ __forceinline__ uint16_t* from(
      const TokenBlock<kK, kV>& b, const KdaView& view, int64_t head
  ) {
    return b.row_pointer(view, static_cast<int>(threadIdx.x / 4), head) + threadIdx.x % 4 * 8;
  }

  // Starts copies of the warp's rows of q, k and g for the next pass to where the operands made of
  // them will be, which must be free.
  __device__ __forceinline__ void start_pass() {
    const int copied = static_cast<int>(threadIdx.x / 4);
    const uint32_t to =
        b.base + static_cast<uint32_t>(Keys::at(copied, static_cast<int>(threadIdx.x % 4) * 8));
    const bool exists = copied < b.rows;
    if (b.p.aligned_qk) {
      start_copy<16>(to + Memory::kXq, q_from, exists);
      start_copy<16>(to + Memory::kYk, k_from, exists);
    }
    if (b.p.aligned_g) {
      start_copy<16>(to + Memory::kXk, g_from, exists);
    }
    close_copies();
    q_from += kPass;
    k_from += kPass;
    g_from += kPass;
  }

  // Both channels of row i of the thread in an operand.
  __device__ __forceinline__ uint32_t& operand(int tile, int i) const {
    return *b.template at<uint32_t>(tile + Keys::at(row + i, column()));
  }

  // One of the numbers of a row that lie in shared memory.
  const __device__ __forceinline__ float* of_rows(int offset) const {
    return b.template at<float>(offset) + row;
  }

  // Of a float [..][32].
  __device__ __forceinline__ float2& of_channels(int offset, int i) const {
    return *b.template at<float2>(offset + i * Memory::kPassFloats + column() * 4);
  }

  __device__ __forceinline__ static void widen(
      PairRows& out, const PackedRows& packed, DType type
  ) {
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float2 x = widen_pair(packed[i], type == DType::kBf16);
      out[0][i] = x.x;
      out[1][i] = x.y;
    }
  }

  __device__ __forceinline__ void load(
      PairRows& out, int tile, bool copied, const KdaView& view, int64_t head
  ) const {
    if (copied) {
      PackedRows packed;
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        packed[i] = operand(tile, i);
      }
      widen(out, packed, view.dtype);
    } else {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        load_rows(out[x], view, b.element(view, row, head) + channel() + x, live);
      }
    }
  }

  __device__ __forceinline__ void load_gates(PairRows& out) const {
    const KdaView& view = b.p.common.tokens.g;
    if (b.p.aligned_g) {
      widen(out, raw, view.dtype);
    } else {
      load(out, 0, false, view, b.hv);
    }
  }

  // Loads the pass's elements of g, q and k and makes decays, normalised q and k, Xq, Xk, Y and the
  // decays over the warp's blocks. What the thread keeps are fp16 numbers, from here on everything
  // uses those, but for the decays over blocks, which have all their digits.
  __device__ __forceinline__ void make_operands(int number) {
    pass = number;
    wait_for_copies<0>();
    __syncwarp();
    const KdaTokens& tokens = b.p.common.tokens;
    if (b.p.aligned_g) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        raw[i] = operand(Memory::kXk, i);
      }
    }
    PairRows p_float, q_float, k_float;
    load_gates(p_float);
    load(q_float, Memory::kXq, b.p.aligned_qk, tokens.q, b.h);
    load(k_float, Memory::kYk, b.p.aligned_qk, tokens.k, b.h);
    float q_norm[kBlockRows], k_norm[kBlockRows], strength[kBlockRows];
    load_four(q_norm, of_rows(Memory::kQueryNorm));
    load_four(k_norm, of_rows(Memory::kKeyNorm));
    load_four(strength, of_rows(Memory::kBeta));
    float decay[2];
    PairRows start, end;  // decays from the start of the block, to its end
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      gate(x).decays(p_float[x], live);
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        q_float[x][i] *= q_norm[i];
        k_float[x][i] *= k_norm[i];
      }
      spread_decays(start[x], end[x], p_float[x]);
      decay[x] = start[x][kBlockRows - 1];
    }
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      p[i] = pack_f16(p_float[0][i], p_float[1][i]);
      q[i] = pack_f16(q_float[0][i], q_float[1][i]);
      k[i] = pack_f16(k_float[0][i], k_float[1][i]);
      operand(Memory::kXq, i) = pack_f16(q_float[0][i] * start[0][i], q_float[1][i] * start[1][i]);
      operand(Memory::kXk, i) = pack_f16(
          k_float[0][i] * strength[i] * start[0][i], k_float[1][i] * strength[i] * start[1][i]
      );
      operand(Memory::kYk, i) = pack_f16(k_float[0][i] * end[0][i], k_float[1][i] * end[1][i]);
    }
    of_channels(Memory::kBlockDecay, warp * 2 + half) = make_float2(decay[0], decay[1]);
    const float other[2] = {
        __shfl_xor_sync(kWarpMask, decay[0], 16), __shfl_xor_sync(kWarpMask, decay[1], 16)
    };
    if (half == 0) {
      of_channels(Memory::kPairDecay, warp) = make_float2(decay[0] * other[0], decay[1] * other[1]);
    }
  }

  // Of each row the decay from the start of the block, and that behind it.
  __device__ __forceinline__ static void spread_decays(
      ChannelRows& start, ChannelRows& end, const ChannelRows& decays
  ) {
    start[0] = decays[0];
#pragma unroll
    for (int i = 1; i < kBlockRows; ++i) {
      start[i] = start[i - 1] * decays[i];
    }
    end[kBlockRows - 1] = 1.0f;
#pragma unroll
    for (int i = kBlockRows - 2; i >= 0; --i) {
      end[i] = i == kBlockRows - 2 ? decays[i + 1] : end[i + 1] * decays[i + 1];
    }
  }

  // From the planes the gradients of the normalised q and k and of G, and the terms of dbeta.
  __device__ __forceinline__ void finish_rows(PairRows& dq, PairRows& dk, PairRows& dG) {
    PairRows planes[3];
#pragma unroll
    for (int which = 0; which < 3; ++which) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        const float2 x = *b.template at<float2>(Memory::plane(which, row + i, column()));
        planes[which][0][i] = x.x;
        planes[which][1][i] = x.y;
      }
    }
    const float* d_keys = b.template at<float>(Memory::kDiagonal) + row * kBlockRows;
    const float* d_scores = d_keys + kBlocks * kBlockRows * kBlockRows;
    float strength[kBlockRows];
    load_four(strength, of_rows(Memory::kBeta));
    PairRows p_float, q_float, k_float;
    widen(p_float, p, DType::kF16);
    widen(q_float, q, DType::kF16);
    widen(k_float, k, DType::kF16);
    PairRows start, end;
    PairRows decay;   // from row j to the present row
    PairRows column;  // what row j gets from later rows of the block
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      spread_decays(start[x], end[x], p_float[x]);
    }
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      float dl[kBlockRows], dm[kBlockRows];
      load_four(dl, d_keys + i * kBlockRows);
      load_four(dm, d_scores + i * kBlockRows);
      const float2 of_q = unpack_f16(operand(Memory::kXq, i));
      const float2 of_k = unpack_f16(operand(Memory::kXk, i));
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float write = strength[i] * k_float[x][i];
        float from_q = 0.0f, from_k = 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) {
          decay[x][j] = j == i - 1 ? p_float[x][i] : decay[x][j] * p_float[x][i];
          const float key = decay[x][j] * k_float[x][j];
          from_q += dm[j] * key;
          from_k += dl[j] * key;
          column[x][j] += decay[x][j] * (dm[j] * q_float[x][i] + dl[j] * write);
        }
        column[x][i] = 0.0f;
        const float q_plane = planes[0][x][i], k_plane = planes[1][x][i];
        const float key_grad = start[x][i] * k_plane + from_k;  // before beta
        dq[x][i] = start[x][i] * q_plane + from_q + dm[i] * k_float[x][i];
        dk[x][i] = strength[i] * key_grad + dm[i] * q_float[x][i];
        terms[i] += k_float[x][i] * key_grad;
        dG[x][i] = (x == 0 ? of_q.x : of_q.y) * q_plane + (x == 0 ? of_k.x : of_k.y) * k_plane +
                   q_float[x][i] * from_q + write * from_k;
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float2 of_y = unpack_f16(operand(Memory::kYk, i));
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float later = planes[2][x][i];
        dk[x][i] += column[x][i] + end[x][i] * later;
        dG[x][i] -= (x == 0 ? of_y.x : of_y.y) * later + k_float[x][i] * column[x][i];
      }
    }
    if (warp == kTokenWarps - 1 && half == 1) {
      const float2 at_end = end_grad();
      dG[0][kBlockRows - 1] += at_end.x;
      dG[1][kBlockRows - 1] += at_end.y;
    }
  }

  // What the state behind the chunk gives to its decay: gamma S dS and kr dkr.
  __device__ __forceinline__ float2 end_grad() const {
    float2 state = of_channels(Memory::kEndGrad, 0), keys = of_channels(Memory::kEndSums, 0);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      const float2 x = of_channels(Memory::kEndGrad, i), y = of_channels(Memory::kEndSums, i);
      state.x += x.x;
      state.y += x.y;
      keys.x += y.x;
      keys.y += y.y;
    }
    const float* gamma = b.template at<float>(Memory::kGamma) + channel();
    return make_float2(gamma[0] * state.x + keys.x, gamma[1] * state.y + keys.y);
  }

  // Gradients of the normalised q (0) or k (1) of one value head of several; the heads are added
  // later.
  __device__ __forceinline__ void keep_of_head(int which, const PairRows& grad, float unit) const {
    float* to = b.p.group_grads + ((b.entry * 2 + which) * kChunkRows + row) * kK + channel();
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      *reinterpret_cast<float2*>(to + i * kK) = make_float2(grad[0][i] * unit, grad[1][i] * unit);
    }
  }

  // Where the thread's rows of d_q and d_k begin.
  __device__ __forceinline__ int64_t key_result() const {
    return b.result(row, b.h, b.p.common.dims.H, kK) + channel();
  }

  // Leaves the gradient of the normalised q where the result goes, in fp16, until the sums over its
  // rows are known.
  __device__ __forceinline__ void keep_queries(const PairRows& grad) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      largest = fmaxf(largest, fmaxf(fabsf(grad[0][i]), fabsf(grad[1][i])));
    }
    const KdaUnit unit = unit_of(__float_as_uint(largest));
    units |= __float_as_uint(unit.unit) >> 23 << (8 * pass);
    const int64_t step = b.p.common.dims.H * kK;
    uint16_t* to = static_cast<uint16_t*>(b.p.d_q) + key_result();
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      store_pair_if(
          to + i * step, pack_f16(grad[0][i] * unit.inverse, grad[1][i] * unit.inverse), i < live
      );
    }
  }

  // d_k from the gradient of the normalised k.
  template <DType kType>
  __device__ __forceinline__ void store_keys(const PairRows& grad, float unit) const {
    float norm[kBlockRows], dot[kBlockRows];
    load_four(norm, of_rows(Memory::kKeyNorm));
    load_four(dot, of_rows(Memory::kKeyDot));
    const int64_t step = b.p.common.dims.H * kK;
    uint16_t* to = static_cast<uint16_t*>(b.p.d_k) + key_result();
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const float factor = norm[i] * unit;
      const float2 of_k = unpack_f16(k[i]);
      store_pair_if(
          to + i * step,
          pack_pair<kType>(
              factor * (grad[0][i] - of_k.x * dot[i]), factor * (grad[1][i] - of_k.y * dot[i])
          ),
          i < live
      );
    }
  }

  // After the last pass.
  __device__ __forceinline__ void store_units() const {
    b.template at<uint32_t>(Memory::kUnits)[threadIdx.x] = units;
  }

  template <KdaGate kGate>
  __device__ __forceinline__ void store_gate(
      const PairRows& dG, float2 dg, float unit, float (&d_bias)[2], float (&d_rate)[2]
  ) const {
    PairRows raw_rows;
    load_gates(raw_rows);
    const ChannelGate gates[2] = {gate(0), gate(1)};
    const DType type = b.p.common.tokens.g.dtype;
    const int64_t step = b.p.common.dims.HV * kK;
    const int64_t to = b.result(row, b.hv, b.p.common.dims.HV, kK) + channel();
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      dg.x += dG[0][i];
      dg.y += dG[1][i];
      const bool exists = i < live;
      const float dz[2] = {
          gates[0].template gradient<kGate>(raw_rows[0][i], exists ? dg.x : 0.0f, unit, &d_rate[0]),
          gates[1].template gradient<kGate>(raw_rows[1][i], exists ? dg.y : 0.0f, unit, &d_rate[1])
      };
      d_bias[0] += dz[0];
      d_bias[1] += dz[1];
      if (type == DType::kF32) {
        if (exists) {
          *reinterpret_cast<float2*>(static_cast<float*>(b.p.d_g) + to + i * step) =
              make_float2(dz[0], dz[1]);
        }
      } else {
        const uint32_t bits =
            type == DType::kBf16 ? pack_bf16(dz[0], dz[1]) : pack_f16(dz[0], dz[1]);
        store_pair_if(static_cast<uint16_t*>(b.p.d_g) + to + i * step, bits, exists);
      }
    }
  }

  // Gradient of g from that of G, and the sums over the warp's rows for dt_bias and A_log. Contains
  // a barrier, after which the planes are free.
  __device__ __forceinline__ void finish_gate(const PairRows& dG, float unit) const {
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      total.x += dG[0][i];
      total.y += dG[1][i];
    }
    const float2 other = make_float2(
        __shfl_xor_sync(kWarpMask, total.x, 16), __shfl_xor_sync(kWarpMask, total.y, 16)
    );
    if (half == 0) {
      of_channels(Memory::kTotals, warp) = make_float2(total.x + other.x, total.y + other.y);
    }
    __syncthreads();
    float2 dg = half == 0 ? other : make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int i = kTokenWarps - 1; i > warp; --i) {
      const float2 x = of_channels(Memory::kTotals, i);
      dg.x += x.x;
      dg.y += x.y;
    }
    float d_bias[2] = {}, d_rate[2] = {};
    const KdaGate form = b.p.common.options.gate;
    if (form == KdaGate::kActivated) {
      store_gate<KdaGate::kActivated>(dG, dg, unit, d_bias, d_rate);
    } else if (form == KdaGate::kSoftplus) {
      store_gate<KdaGate::kSoftplus>(dG, dg, unit, d_bias, d_rate);
    } else {
      store_gate<KdaGate::kLowerBound>(dG, dg, unit, d_bias, d_rate);
    }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      d_bias[x] += __shfl_xor_sync(kWarpMask, d_bias[x], 16);
      d_rate[x] += __shfl_xor_sync(kWarpMask, d_rate[x], 16);
    }
    of_channels(Memory::kGateSums, half * kTokenWarps + warp) =
        half == 0 ? make_float2(d_bias[0], d_bias[1]) : make_float2(d_rate[0], d_rate[1]);
  }

  // After a barrier behind the pass: adds the warps up.
  __device__ __forceinline__ void store_gate_sums(int of_pass) const {
    if (warp >= 2) {
      return;
    }
    const KdaDims& dims = b.p.common.dims;
    const float* sums =
        b.template at<float>(Memory::kGateSums) + warp * (kTokenWarps * kPass) + lane;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTokenWarps; ++i) {
      sum += sums[i * kPass];
    }
    const int64_t at = b.p.common.cu_seqlens.data != nullptr
                           ? b.span.sequence.first_row(dims.T) + b.span.first
                           : b.span.sequence.index * ceil_div(dims.T, kTensorChunk) + b.span.first;
    b.p.gate_sums[((at * dims.HV + b.hv) * 2 + warp) * kK + of_pass * kPass + lane] = sum;
  }
};

}  // namespace sdm::kda::cuda
