// SPDX-License-Identifier: Apache-2.0
//! @file Rows of dv and dy in global memory, as the walk over whole rows reads them: halves, eight
//! of them scaled by a power of two so that the largest lies in [2^14, 2^15). That rounds to 12
//! bits, as the products that made dv did, where the bank keeps 8 (bfloat16) or 11. A chunk's rows
//! stay in L2 while its slots are walked.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"

namespace sdm::cuda {

// A row is cut into tiles that a warp holds: up to four pieces of eight columns a lane.
struct RowTiles {
  int tiles, pieces;  // of a tile; the last may have fewer

  __host__ __device__ explicit RowTiles(int64_t D) {
    constexpr int kMost = 4 * 32;
    const int all = static_cast<int>(D / 8);
    tiles = (all + kMost - 1) / kMost;
    pieces = (all + tiles - 1) / tiles;
  }

  // Pieces a lane, the most.
  __host__ __device__ int lane_pieces() const { return (pieces + 31) / 32; }
};

// The power of two for the largest magnitude of some values, as the exponent bits of the float that
// brings them back.
__device__ __forceinline__ uint32_t half_exponent(uint32_t most_bits) {
  constexpr uint32_t kLift = 14;
  return max(most_bits >> 23, kLift + 1) - kLift;
}

__device__ __forceinline__ float half_factor(uint32_t exponent) {
  return __uint_as_float((254 - exponent) << 23);
}

// The bits of a magnitude, of finite values.
__device__ __forceinline__ uint32_t finite_bits(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

// Rows of a stream: dv of its tokens, from row Cp on dy.
struct TokenRecord {
  __half* halves;   // [2 Cp][D]
  uint8_t* scales;  // [2 Cp][tiles][32 lanes][4 pieces] exponents

  // Bytes of both for so many rows, a multiple of 16.
  static int64_t half_bytes(int64_t rows, int64_t D) { return rows * D * 2; }

  static int64_t scale_bytes(int64_t rows, int64_t D) { return rows * RowTiles(D).tiles * 128; }

  __device__ __forceinline__ TokenRecord(const SdmChunkParams& p, int64_t stream)
      : halves(p.token_halves + stream * 2 * p.records.Cp * p.dims.D),
        scales(
            p.token_scales + stream * 2 * p.records.Cp * RowTiles(p.dims.D).tiles * int64_t{128}
        ) {}

  __device__ __forceinline__ uint8_t* scale(const RowTiles& cut, int row, int piece) const {
    const int tile = piece / cut.pieces, i = piece % cut.pieces;
    return scales + (row * cut.tiles + tile) * 128 + i % 32 * 4 + i / 32;
  }
};

}  // namespace sdm::cuda
