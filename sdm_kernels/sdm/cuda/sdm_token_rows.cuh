// SPDX-License-Identifier: Apache-2.0
//! @file Rows of tokens in shared memory, as the update and the backward walk read them.
//!
//! A block has kWide neighbouring slices of every row; a lane reads kVec columns of each. Rows are
//! floats or, kHalves, for a 16-bit bank, halves scaled by a power of two for every row and slice,
//! so that the largest lies in [2^14, 2^15): that rounds to 12 bits, as the products that made the
//! rows did, where the bank keeps 8 (bfloat16) or 11, and lets twice as many slices fit.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"

namespace sdm::cuda {

template <typename S, int kWide, bool kHalves>
class TokenRows {
 public:
  static constexpr bool kScaled = kHalves && sizeof(S) == 2;
  static constexpr int kParts = kScaled ? 1 : kVec<S> / 4;    // 16 bytes of a lane, slice and row
  static constexpr int kPieces = kWide * kParts * kRowLanes;  // of a row

  // Bytes of shared memory of `rows`, a multiple of 16.
  __host__ __device__ static constexpr int64_t bytes(int64_t rows) {
    return rows *
           (kPieces * int64_t{sizeof(uint4)} + (kScaled ? kWide * int64_t{sizeof(float)} : 0));
  }

  __device__ __forceinline__ TokenRows(void* memory, int rows)
      : pieces_(static_cast<uint4*>(memory) + threadIdx.x % kRowLanes),
        scales_(reinterpret_cast<float*>(static_cast<uint4*>(memory) + rows * kPieces)) {}

  // One slice of a row, by whole warps; stored where `live`.
  __device__ __forceinline__ void store(
      int row, int slice, const float (&x)[kVec<S>], bool live
  ) const {
    uint4* to = pieces_ + (row * kWide + slice) * kParts * kRowLanes;
    if constexpr (kScaled) {
      uint32_t most = 0;  // of the finite ones
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        const uint32_t bits = __float_as_uint(x[i]) & 0x7fffffffu;
        most = max(most, bits < 0x7f800000u ? bits : 0u);
      }
#pragma unroll
      for (int step = kRowLanes / 2; step > 0; step /= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
      }
      constexpr uint32_t kLift = 14;
      const uint32_t exponent = max(most >> 23, kLift + 1) - kLift;
      const float inverse = __uint_as_float((254 - exponent) << 23);
      float y[kVec<S>];
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        y[i] = x[i] * inverse;
      }
      if (live) {
        *to = pack<__half>(y).raw;
        if (threadIdx.x % kRowLanes == 0) {
          scales_[row * kWide + slice] = __uint_as_float(exponent << 23);
        }
      }
    } else if (live) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        *reinterpret_cast<float4*>(to + part * kRowLanes) =
            make_float4(x[part * 4], x[part * 4 + 1], x[part * 4 + 2], x[part * 4 + 3]);
      }
    }
  }

  // A lane's columns of one slice of a row, but for the factor scale().
  __device__ __forceinline__ void load(int row, int slice, float (&x)[kVec<S>]) const {
    const uint4* from = pieces_ + (row * kWide + slice) * kParts * kRowLanes;
    if constexpr (kScaled) {
      Piece<__half> piece;
      piece.raw = *from;
      unpack(piece, x);
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Piece<float> piece;
        piece.raw = from[part * kRowLanes];
        float four[4];
        unpack(piece, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[part * 4 + i] = four[i];
        }
      }
    }
  }

  __device__ __forceinline__ float scale(int row, int slice) const {
    if constexpr (kScaled) {
      return scales_[row * kWide + slice];
    } else {
      return 1.0f;
    }
  }

  // Rows [0, num_tokens) of a view into those from `first` on, by a block of kThreads. at: columns
  // of this lane in each slice.
  template <int kThreads, typename RowOf>
  __device__ __forceinline__ void fill(
      const FloatView& from,
      const RowOf& row_of,
      int num_tokens,
      const LaneColumns (&at)[kWide],
      bool vectors,
      int first
  ) const {
    constexpr int kStep = kThreads / kRowLanes;
    constexpr int kBatch = kWide < 4 ? 4 / kWide : 1;
    const int own = static_cast<int>(threadIdx.x) / kRowLanes;
    const int of_warp = own / 4 * 4;  // the warp's first
    for (int base = 0; of_warp + base < num_tokens; base += kBatch * kStep) {
      float row[kBatch][kWide][kVec<S>];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = own + base + k * kStep;
        const int64_t start = row_of(i < num_tokens ? i : 0);
#pragma unroll
        for (int slice = 0; slice < kWide; ++slice) {
          load_token_columns<S>(from, start, at[slice], vectors, row[k][slice]);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = own + base + k * kStep;
#pragma unroll
        for (int slice = 0; slice < kWide; ++slice) {
          store(first + i, slice, row[k][slice], i < num_tokens);
        }
      }
    }
  }

 private:
  uint4* pieces_;  // [row][slice][part][lane]
  float* scales_;  // [row][slice]
};

}  // namespace sdm::cuda
