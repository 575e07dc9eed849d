// SPDX-License-Identifier: Apache-2.0
//! @file What the warps of the preparation do with their eight rows: loads and gate, sums over
//! lanes, scaled operands, scores inside the eight rows. Shared memory of the block.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_inverse.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"

namespace sdm::kda::cuda {

constexpr int kPrepThreads = 256;

// What may be loaded whole (several channels at once) instead of element by element.
struct KdaPrepArgs {
  KdaPrepParams params;
  bool whole_q, whole_k, whole_g;
};

template <int kK>
struct PrepShared {
  // Operands in fp16, rows of K, the 16-byte pieces permuted by row % 8.
  static constexpr int kStripKeys = 0;      // 48 rows: strips 1 to 3, times exp from their start
  static constexpr int kStripQueries = 48;  // 48 rows
  static constexpr int kStripColumns = 96;  // 16 + 32 + 48 rows: keys to the start of each strip
  static constexpr int kHalfRows = 192;     // 4 x (8 keys, 8 queries): second half of 16 rows
  static constexpr int kHalfColumns = 256;  // 4 x 8 keys: first half of 16 rows
  static constexpr int kOperandRows = 288;
  // Bytes.
  static constexpr int kLower = kOperandRows * kK * 2;  // float [64][pitch]: diag(beta) F
  static constexpr int kScores = kLower + 64 * kInversePitch * 4;  // fp16 panel
  static constexpr int kSums = kScores + kPanelBytes;  // float [8][K]: log-decay of 8 rows
  static constexpr int kBeta = kSums + 8 * kK * 4;     // float [64]
  static constexpr int kKeyNorm = kBeta + 256;
  static constexpr int kQueryNorm = kKeyNorm + 256;
  static constexpr int kKeyScores = kQueryNorm + 256;  // fp16 panel, when wanted
  static constexpr int kBytes = kKeyScores;
  static constexpr int kBytesWithKeyScores = kKeyScores + kPanelBytes;
  // Over the operands, once they have been multiplied.
  static constexpr int kInverse = 0;  // float [64][pitch]
  static constexpr int kScratch = 64 * kInversePitch * 4;
  static_assert(kScratch + 8 * kMergeScratch * 4 <= kLower);

  __device__ __forceinline__ static int operand(int row, int col) {
    return row * kK + (((col >> 3) ^ (row & 7)) << 3) + (col & 7);
  }

  // First row of the columns of a strip (1 to 3).
  __device__ __forceinline__ static int columns_of(int strip) {
    return kStripColumns + 8 * strip * (strip - 1);
  }
};

// Sums kCount values over groups of 2 kCount lanes: of each value the lower or upper lanes keep a
// half, and the halves of the lanes that stay together are summed further.
template <int kCount>
__device__ __forceinline__ float sum_over_lanes(const float (&x)[kCount]) {
  const bool upper = (threadIdx.x & kCount) != 0;
  if constexpr (kCount == 1) {
    return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
  } else {
    constexpr int kHalf = kCount / 2;
    float half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float low = x[i];
      const float high = x[i + kHalf];
      const float send = upper ? low : high;
      const float keep = upper ? high : low;
      half[i] = keep + __shfl_xor_sync(0xffffffffu, send, kCount);
    }
    return sum_over_lanes<kHalf>(half);
  }
}

// Sums 16 values over the lanes of a warp; lane l gets the sum of value l / 2.
__device__ __forceinline__ float sum_16(const float (&x)[16]) {
  return sum_over_lanes<16>(x);
}

template <int kPairs>
__device__ __forceinline__ void store_pairs(void* to, const uint32_t (&x)[kPairs]) {
  if constexpr (kPairs == 2) {
    *static_cast<uint2*>(to) = make_uint2(x[0], x[1]);
  } else {
    *static_cast<uint32_t*>(to) = x[0];
  }
}

template <int kPairs>
__device__ __forceinline__ void pack_pairs(uint32_t (&to)[kPairs], const float (&x)[2 * kPairs]) {
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    to[c] = pack_f16(x[2 * c], x[2 * c + 1]);
  }
}

// Stores products of neighbouring channels with a factor each.
template <int kPairs>
__device__ __forceinline__ void store_scaled(
    void* to, const uint32_t (&x)[kPairs], const uint32_t (&factor)[kPairs]
) {
  uint32_t scaled[kPairs];
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    scaled[c] = multiply_f16(x[c], factor[c]);
  }
  store_pairs(to, scaled);
}

// Log-decays of the warp's rows in log2 units; rows past the end get 0.
template <DType kType, KdaGate kGate, int kChannels>
__device__ __forceinline__ void load_gate(
    float (&decay)[8][kChannels],
    const KdaPrepArgs& args,
    int64_t offset,
    int rows,
    int hv,
    int channel
) {
  const KdaPrepParams& p = args.params;
  KdaGateChannel gate[kChannels];
  float rate = 1.0f;
  if (kGate != KdaGate::kActivated && p.tokens.A_log != nullptr) {
    rate = expf(p.tokens.A_log[hv]);
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    gate[c].rate = kGate == KdaGate::kLowerBound ? rate * kLog2e : rate;
    gate[c].bias = kGate != KdaGate::kActivated && p.tokens.dt_bias != nullptr
                       ? p.tokens.dt_bias[hv * p.dims.K + channel + c]
                       : 0.0f;
  }
  const float bound = static_cast<float>(p.options.lower_bound) * kLog2e;
  const int64_t stride = p.tokens.g.stride[1];
  if (args.whole_g) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_floats<kType, kChannels>(decay[i], p.tokens.g.data, offset + i * stride, true);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_floats<kType, kChannels>(decay[i], p.tokens.g.data, offset + i * stride, false);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      decay[i][c] = gate[c].template log2_decay<kGate>(decay[i][c], bound);
    }
  }
  if (rows < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        decay[i][c] = i < rows ? decay[i][c] : 0.0f;
      }
    }
  }
}

template <KdaGate kGate, int kChannels>
__device__ __forceinline__ void load_gate_of_type(
    float (&decay)[8][kChannels],
    const KdaPrepArgs& args,
    int64_t offset,
    int rows,
    int hv,
    int channel
) {
  switch (args.params.tokens.g.dtype) {
    case DType::kBf16:
      load_gate<DType::kBf16, kGate>(decay, args, offset, rows, hv, channel);
      break;
    case DType::kF16:
      load_gate<DType::kF16, kGate>(decay, args, offset, rows, hv, channel);
      break;
    default:
      load_gate<DType::kF32, kGate>(decay, args, offset, rows, hv, channel);
  }
}

// Adds the log-decays of the rows of warps `begin` to `end` - 1.
template <int kChannels>
__device__ __forceinline__ void add_sums(
    float (&x)[kChannels], const float* sums, int begin, int end, int pitch
) {
#pragma unroll 1
  for (int w = begin; w < end; ++w) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      x[c] += sums[w * pitch + c];
    }
  }
}

// The decay over the rows of warps `begin` to `end` - 1, in fp16.
template <int kPairs>
__device__ __forceinline__ void exp2_of_sums(
    uint32_t (&to)[kPairs], const float* sums, int begin, int end, int pitch
) {
  float x[2 * kPairs] = {};
  add_sums(x, sums, begin, end, pitch);
#pragma unroll
  for (int c = 0; c < 2 * kPairs; ++c) {
    x[c] = fast_exp2(x[c]);
  }
  pack_pairs(to, x);
}

// Sums 16 values, whose partial sums fp16 holds, over the lanes of a warp: over four lanes by a
// product with ones, which hands each of them four of the values, then in float. Lanes with bit 2
// clear get the sum of value 4 (lane % 4) + 2 (bit 4 of lane) + (bit 3 of lane).
__device__ __forceinline__ float sum_16_short(const float (&x)[16]) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint32_t a[4] = {
        pack_f16(x[8 * u], x[8 * u + 1]),
        pack_f16(x[8 * u + 2], x[8 * u + 3]),
        pack_f16(x[8 * u + 4], x[8 * u + 5]),
        pack_f16(x[8 * u + 6], x[8 * u + 7])
    };
    constexpr uint32_t kOne = 0x3c00;
    const uint32_t b0 = g == 4 * u ? kOne : (g == 4 * u + 1 ? kOne << 16 : 0);
    const uint32_t b1 = g == 4 * u + 2 ? kOne : (g == 4 * u + 3 ? kOne << 16 : 0);
    mma_f16(c, a, b0, b1);
  }
  const bool upper = (lane & 16) != 0;
  float first = upper ? c[2] : c[0];
  float second = upper ? c[3] : c[1];
  first += __shfl_xor_sync(0xffffffffu, upper ? c[0] : c[2], 16);
  second += __shfl_xor_sync(0xffffffffu, upper ? c[1] : c[3], 16);
  const bool odd = (lane & 8) != 0;
  float sum = odd ? second : first;
  sum += __shfl_xor_sync(0xffffffffu, odd ? first : second, 8);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
}

// The scores of one batch of 16 pairs inside the warp's 8 rows: pair number n^2 + r belongs to row
// n; its first n are k_n k_j, the next n + 1 are q_n k_j.
__device__ __forceinline__ void put_pairs(
    const float (&x)[16],
    int batch,
    const float* beta,
    float* lower,
    uint16_t* scores,
    uint16_t* key_scores,
    int row0
) {
  const float sum = sum_16_short(x);
  const int lane = threadIdx.x % 32;
  if ((lane & 4) != 0) {
    return;
  }
  const int pair = batch * 16 + lane % 4 * 4 + lane / 16 * 2 + lane / 8 % 2;
  int n = 0;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    n += pair >= i * i ? 1 : 0;
  }
  const int r = pair - n * n;
  const uint16_t rounded = static_cast<uint16_t>(pack_f16(sum, 0.0f));
  const int row = row0 + n;
  if (r < n) {
    lower[row * kInversePitch + row0 + r] = beta[row] * sum;
    if (key_scores != nullptr) {
      key_scores[panel_offset(row, row0 + r)] = rounded;
    }
  } else {
    scores[panel_offset(row, row0 + r - n)] = rounded;
  }
}

// The warp's rows of q or k; zero past the end.
template <int kPairs>
__device__ __forceinline__ void load_rows(
    uint32_t (&out)[8][kPairs], const KdaView& view, int64_t offset, int rows, bool whole
) {
  const uint16_t* from = static_cast<const uint16_t*>(view.data) + offset;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int c = 0; c < kPairs; ++c) {
      out[i][c] = 0;
    }
  }
  if (whole) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_pairs<kPairs>(out[i], from + i * view.stride[1], true);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_pairs<kPairs>(out[i], from + i * view.stride[1], false);
      }
    }
  }
}

}  // namespace sdm::kda::cuda
