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
  // Rows of K fp16 numbers; see row_offset().
  static constexpr int kRowBytes = kK * 2;
  static constexpr int kStripKeys = 0;      // 48 rows: strips 1 to 3, times exp from their start
  static constexpr int kStripQueries = 48;  // 48 rows
  static constexpr int kStripColumns = 96;  // 16 + 32 + 48 rows: keys to the start of each strip
  static constexpr int kHalfRows = 192;     // 4 x (8 keys, 8 queries): second half of 16 rows
  static constexpr int kHalfColumns = 256;  // 4 x 8 keys: first half of 16 rows
  static constexpr int kOperandRows = 288;
  // Before the operands, in the same place: decays of each row, which only its warp reads.
  static constexpr int kPrefix = 0;    // 64 rows: from the start of its 8 rows
  static constexpr int kSuffix = 64;   // 64 rows: to their end
  static constexpr int kLevel4 = 128;  // 64 rows: from, or to, the middle of 8 rows
  static constexpr int kLevel2 = 192;  // 64 rows: the middle of 4; then two rows a warp: see below
  static constexpr int kLevel1 = 256;  // 32 rows: the odd rows' own decay
  // Bytes.
  static constexpr int kLower = kOperandRows * kRowBytes;  // float [64][pitch]: diag(beta) F
  static constexpr int kScores = kLower + 64 * kInversePitch * 4;  // fp16 panel
  static constexpr int kSums = kScores + kPanelBytes;  // float [8][K]: log-decay of 8 rows
  static constexpr int kBeta = kSums + 8 * kK * 4;     // float [64]
  static constexpr int kFactors = kBeta + 256;         // 15 rows: decays between blocks of rows
  static constexpr int kKeyScores = kFactors + 15 * kRowBytes;  // fp16 panel, when wanted
  static constexpr int kBytes = kKeyScores;
  static constexpr int kBytesWithKeyScores = kKeyScores + kPanelBytes;
  static_assert(2 * (kBytesWithKeyScores + 1024) <= 228 * 1024, "two blocks a multiprocessor");
  // Over the operands, once they have been multiplied.
  static constexpr int kInverse = 0;  // float [64][pitch]
  static constexpr int kScratch = 64 * kInversePitch * 4;
  static_assert(kScratch + 8 * kMergeScratch * 4 <= kLower);

  // Which 16-byte pieces change places in a row: eight rows put a piece into eight banks, two rows
  // put four neighbouring pieces into eight.
  __device__ __forceinline__ static int swizzle(int row) {
    return ((row & 1) << 2) | ((row & 7) >> 1);
  }

  // Bytes to a piece of a row.
  __device__ __forceinline__ static int row_offset(int row, int piece) {
    return row * kRowBytes + ((piece ^ swizzle(row)) << 4);
  }

  // First row of the columns of a strip (1 to 3).
  __device__ __forceinline__ static int columns_of(int strip) {
    return kStripColumns + 8 * strip * (strip - 1);
  }

  // Bytes of the factor from the end of a warp's rows to a strip, and over the first half of the 16
  // rows whose second half a warp has (3, 5 or 7).
  __device__ __forceinline__ static int factor_to(int strip, int warp) {
    return kFactors + ((strip == 1 ? 0 : (strip == 2 ? 2 : 6)) + warp) * kRowBytes;
  }

  __device__ __forceinline__ static int factor_over(int warp) {
    return kFactors + (12 + (warp - 3) / 2) * kRowBytes;
  }
};

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

// The warp's rows of g; rows past the end are not written.
template <DType kType, int kChannels>
__device__ __forceinline__ void load_gate(
    float (&x)[8][kChannels], const KdaView& g, int64_t offset, int rows, bool whole
) {
  if (whole) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_floats<kType, kChannels>(x[i], g.data, offset + i * g.stride[1], true);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_floats<kType, kChannels>(x[i], g.data, offset + i * g.stride[1], false);
      }
    }
  }
}

// Turns g into log-decays in log2 units.
template <KdaGate kGate, int kChannels>
__device__ __forceinline__ void apply_gate(
    float (&x)[8][kChannels], const KdaPrepParams& p, int hv, int channel
) {
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
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      x[i][c] = gate[c].template log2_decay<kGate>(x[i][c], bound);
    }
  }
}

// Log-decays of the warp's rows in log2 units; rows past the end get 0.
template <int kChannels>
__device__ __forceinline__ void load_decays(
    float (&x)[8][kChannels], const KdaPrepArgs& args, int64_t offset, int rows, int hv, int channel
) {
  const KdaPrepParams& p = args.params;
  const KdaView& g = p.tokens.g;
  switch (g.dtype) {
    case DType::kBf16:
      load_gate<DType::kBf16>(x, g, offset, rows, args.whole_g);
      break;
    case DType::kF16:
      load_gate<DType::kF16>(x, g, offset, rows, args.whole_g);
      break;
    default:
      load_gate<DType::kF32>(x, g, offset, rows, args.whole_g);
  }
  switch (p.options.gate) {
    case KdaGate::kActivated:
      apply_gate<KdaGate::kActivated>(x, p, hv, channel);
      break;
    case KdaGate::kSoftplus:
      apply_gate<KdaGate::kSoftplus>(x, p, hv, channel);
      break;
    default:
      apply_gate<KdaGate::kLowerBound>(x, p, hv, channel);
  }
  if (rows < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        x[i][c] = i < rows ? x[i][c] : 0.0f;
      }
    }
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

// The second layout of the warp's rows: lane (g, t) has row g and the pieces 4 c + t of 8 channels,
// which is at once an operand of a product with the 8 rows as its rows or as its columns.
template <int kK>
struct RowPart {
  static constexpr int kPieces = kK / 32;
  uint32_t x[kPieces * 4];

  // One row of q or k, of 16-bit elements; zero if not valid.
  __device__ __forceinline__ void load_global(const uint16_t* from, bool whole, bool valid) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) {
      x[i] = 0;
    }
    if (valid && whole) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const uint4 piece = *reinterpret_cast<const uint4*>(from + (4 * c + t) * 8);
        x[4 * c] = piece.x;
        x[4 * c + 1] = piece.y;
        x[4 * c + 2] = piece.z;
        x[4 * c + 3] = piece.w;
      }
    } else if (valid) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t* pair = from + (4 * c + t) * 8 + 2 * i;
          x[4 * c + i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
        }
      }
    }
  }

  // `at` is the place of piece t; the others' places differ by bits 6 and 7.
  __device__ __forceinline__ void load_shared(const unsigned char* memory, int at) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const uint4 piece = *reinterpret_cast<const uint4*>(memory + (at ^ (c << 6)));
      x[4 * c] = piece.x;
      x[4 * c + 1] = piece.y;
      x[4 * c + 2] = piece.z;
      x[4 * c + 3] = piece.w;
    }
  }

  __device__ __forceinline__ void store_shared(unsigned char* memory, int at) const {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      *reinterpret_cast<uint4*>(memory + (at ^ (c << 6))) =
          make_uint4(x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]);
    }
  }

  // Into a matrix of a record; `at` is the place of piece t in the first panel.
  __device__ __forceinline__ void store_record(char* matrix, int at) const {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      *reinterpret_cast<uint4*>(matrix + c / 2 * kPanelBytes + (at ^ ((c & 1) << 6))) =
          make_uint4(x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]);
    }
  }

  __device__ __forceinline__ RowPart operator*(const RowPart& factor) const {
    RowPart y;
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) {
      y.x[i] = multiply_f16(x[i], factor.x[i]);
    }
    return y;
  }

  // Raw 16-bit elements become fp16 numbers of norm 1; returns the factor.
  template <DType kType>
  __device__ __forceinline__ float normalise(bool l2norm) {
    float norm = 1.0f;
    if (l2norm) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces * 4; ++i) {
        const float2 y = unpack_pair<kType>(x[i]);
        sum += y.x * y.x;
        sum += y.y * y.y;
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      norm = rsqrtf(sum + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) {
      const float2 y = unpack_pair<kType>(x[i]);
      x[i] = pack_f16(y.x * norm, y.y * norm);
    }
    return norm;
  }
};

// Products of the warp's 8 rows: c[0], c[1] of keys and c[2], c[3] of queries (row g) with the
// columns' keys 2 t and 2 t + 1.
template <int kK>
__device__ __forceinline__ void multiply_rows(
    float (&c)[4], const RowPart<kK>& keys, const RowPart<kK>& queries, const RowPart<kK>& columns
) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    c[i] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < RowPart<kK>::kPieces * 4; s += 2) {
    const uint32_t a[4] = {keys.x[s], queries.x[s], keys.x[s + 1], queries.x[s + 1]};
    mma_f16(c, a, columns.x[s], columns.x[s + 1]);
  }
}

}  // namespace sdm::kda::cuda
