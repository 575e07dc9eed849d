// SPDX-License-Identifier: Apache-2.0
//! @file The token stage of the tensor backward: what a block of threads (one chunk and value head)
//! keeps in shared memory.
//!
//! The 64 rows are sixteen blocks of 4. A decay from row j to a row i of a later block is cut at
//! the boundaries between blocks: exp(G_i - start of i's block), whole blocks, exp(end of j's block
//! - G_j). All are at most 1, whatever the gates. So the products between blocks have the operands
//!   Xq = q exp(from the start)   Xk = beta k exp(from the start)   Y = k exp(to the end)
//! Between strips of 16 rows (those of a fragment) the whole blocks multiply operands, in fp16,
//! inside a strip results, in float. Pairs inside a block are summed in float
//! (kda_tensor_bwd_channels.cuh).
//!
//! Key channels come in passes of 32, so that two blocks of threads fit on a multiprocessor: one
//! computes while the other waits for memory or at a barrier.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scale.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_tile.cuh"

namespace sdm::kda::cuda {

constexpr int kChunkRows = 64;
constexpr int kBlockRows = 4;
constexpr int kBlocks = 16;
constexpr int kWarpRows = 8;  // a warp has two blocks
constexpr int kTokenWarps = 8;
constexpr int kTokenThreads = 32 * kTokenWarps;
constexpr int kPass = 32;     // key channels of a pass
constexpr int kUnitKeys = 4;  // key channels of S with one unit

constexpr int larger_of(int a, int b) {
  return a > b ? a : b;
}

// An operand of a pass: 64 rows of 32 channels. A line of 128 bytes has row i of both blocks of a
// warp, so that neither the fragments nor the rows of a warp meet bank conflicts.
struct PassTile {
  static constexpr int kBytes = kChunkRows * kPass * 2;

  __device__ __forceinline__ static constexpr int at(int row, int col) {
    return (row >> 3) * 512 + (row & 3) * 128 + (row >> 2 & 1) * 64 +
           (((col >> 3) ^ (row & 3)) << 4) + (col & 7) * 2;
  }

  // Row lane % 16, column lane / 16 * 8 of the fragment at (row, col), multiples of 16.
  __device__ __forceinline__ static uint32_t address(uint32_t tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return tile + static_cast<uint32_t>(row * 64 + (at(lane % 16, lane / 16 * 8) ^ col * 2));
  }

  // B[k, n] = tile[row + k, col + n], 16 x 16: two fragments, b[0..1] and b[2..3].
  __device__ __forceinline__ static void load_b(uint32_t (&b)[4], uint32_t tile, int row, int col) {
    load_matrices_transposed(b, address(tile, row, col));
  }

  // Elements [g][2t] and [g][2t + 1] of the four 8 x 8 parts as a product has them: rows 0-7 and
  // 8-15 of columns 0-7, then of columns 8-15.
  __device__ __forceinline__ static void load_c(uint32_t (&c)[4], uint32_t tile, int row, int col) {
    load_matrices(c, address(tile, row, col));
  }
};

template <int kK, int kV>
struct TokenMemory {
  using Keys = KdaTile<kChunkRows, kK>;
  using Rows = KdaTile<kChunkRows, kV>;
  using Square = KdaTile<kChunkRows, kChunkRows>;
  using State = KdaTile<kK, kV>;
  using PassKeys = PassTile;
  using PassState = KdaTile<kPass, kV>;

  static constexpr int kOut = 0;                   // dO
  static constexpr int kY = kOut + Rows::kBytes;   // y
  static constexpr int kWork = kY + Rows::kBytes;  // kd, then beta e, then U
  static constexpr int kInverse = kWork + larger_of(Keys::kBytes, Rows::kBytes);
  static constexpr int kKeyGrad = kInverse;                      // dL, over the inverse
  static constexpr int kScoreGrad = kInverse + Square::kBytes;   // dM
  static constexpr int kDiagonal = kScoreGrad + Square::kBytes;  // float [2][16][4][4]: dL, dM
  // S for the updates; in a pass its rows of S and dS, then three planes float [64][32] over them,
  // and the operands of the pass.
  static constexpr int kState = kDiagonal + 2 * kBlocks * 16 * 4;
  static constexpr int kPassGrad = kState + PassState::kBytes;
  static constexpr int kPlanes = kState;
  static constexpr int kPlaneBytes = kChunkRows * kPass * 4;
  static constexpr int kXq = kState + larger_of(3 * kPlaneBytes, 2 * PassState::kBytes);
  static constexpr int kXk = kXq + PassKeys::kBytes;
  static constexpr int kYk = kXk + PassKeys::kBytes;
  static constexpr int kPoolEnd = larger_of(kYk + PassKeys::kBytes, kState + State::kBytes);
  static constexpr int kPassFloats = kPass * 4;                           // float [32]
  static constexpr int kBlockDecay = kPoolEnd;                            // [16]: over a block
  static constexpr int kPairDecay = kBlockDecay + kBlocks * kPassFloats;  // [8]: over two
  static constexpr int kTotals = kPairDecay + kTokenWarps * kPassFloats;  // [8]: sums of dG
  static constexpr int kEndSums = kTotals + kTokenWarps * kPassFloats;    // [4]: sums of kr dkr
  static constexpr int kEndGrad = kEndSums + 4 * kPassFloats;             // [4]: sums of S dS
  static constexpr int kGateSums = kEndGrad + 4 * kPassFloats;  // [2][8]: for dt_bias and A_log
  static constexpr int kGamma = kGateSums + 2 * kTokenWarps * kPassFloats;  // float [K]
  static constexpr int kBias = kGamma + kK * 4;                             // float [K]: dt_bias
  static constexpr int kRate = kBias + kK * 4;                              // float: exp(A_log)
  static constexpr int kBeta = kRate + 16;                                  // float [64]
  static constexpr int kKeyNorm = kBeta + kChunkRows * 4;                   // float [64]
  static constexpr int kQueryNorm = kKeyNorm + kChunkRows * 4;              // float [64]
  static constexpr int kValueSums = kQueryNorm + kChunkRows * 4;       // float [64]: sums of y v
  static constexpr int kKeyDot = kValueSums + kChunkRows * 4;          // float [64]: sums of k dk
  static constexpr int kStateUnit = kKeyDot + kChunkRows * 4;          // float [K / 4]
  static constexpr int kOutUnit = kStateUnit + kK / kUnitKeys * 4;     // float [8]
  static constexpr int kYUnit = kOutUnit + 32;                         // float [4]
  static constexpr int kStateGradUnit = kYUnit + 16;                   // float [4]
  static constexpr int kStateGradShare = kStateGradUnit + 16;          // fp16 pair [4][V / 32]
  static constexpr int kWriteUnit = kStateGradShare + 16 * (kV / 32);  // float [4][2]
  static constexpr int kUMax = kWriteUnit + 32;                        // uint [4][2]
  static constexpr int kGradMax = kUMax + 32;                          // uint
  static constexpr int kBytes = kGradMax + 16;
  // Exponents of what the passes leave of q, a byte a pass: uint [threads].
  static constexpr int kUnits = kState;
  static_assert(kK != 128 || kV != 128 || kBytes <= 113 * 1024);
  // as the swizzle of tiles wants
  static_assert(kY % 1024 == 0 && kWork % 1024 == 0 && kState % 1024 == 0 && kPassGrad % 1024 == 0);

  // Element of a plane. Rows are permuted in pieces of 8 columns against bank conflicts.
  __device__ __forceinline__ static constexpr int plane(int which, int row, int col) {
    return kPlanes + which * kPlaneBytes + (row * kPass + (col ^ ((row & 3) << 3))) * 4;
  }
};

// Sums kCount (a power of two) values over groups of kLanes; a lane gets that of value lane %
// kLanes / (kLanes / kCount).
template <int kCount, int kLanes = 32>
__device__ __forceinline__ float sum_spread(const float (&x)[kCount]) {
  float part[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    part[i] = x[i];
  }
  int mask = kLanes / 2;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(mask)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float send = upper ? part[i] : part[i + half];
      const float keep = upper ? part[i + half] : part[i];
      part[i] = keep + __shfl_xor_sync(kWarpMask, send, mask);
    }
    mask /= 2;
  }
  float sum = part[0];
#pragma unroll
  for (int rest = kLanes / 2 / kCount; rest > 0; rest /= 2) {
    sum += __shfl_xor_sync(kWarpMask, sum, rest);
  }
  return sum;
}

// What every part of the stage knows.
template <int kK, int kV>
struct TokenBlock {
  using Memory = TokenMemory<kK, kV>;
  using Record = KdaRecord<kK>;
  using Grads = KdaBwdRecord<kK, kV>;

  const KdaBwdTokenParams& p;
  char* memory;
  uint32_t base;
  KdaSpan span;
  int64_t hv, h, entry;
  int64_t token;  // of row 0
  int rows;       // of the chunk that exist

  template <typename T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory + offset);
  }

  const __device__ __forceinline__ char* record() const {
    return p.common.records.data + entry * p.common.records.stride;
  }

  const __device__ __forceinline__ char* grads() const {
    return p.common.bwd_records + entry * Grads::kBytes;
  }

  // Element of a row of the chunk; `head` must be that of the block.
  __device__ __forceinline__ int64_t element(const KdaView& view, int row, int64_t head) const {
    return span.sequence.batch * view.stride[0] + token * view.stride[1] + head * view.stride[2] +
           row * view.stride[1];
  }

  // The same as a pointer into a tensor of 16-bit elements.
  const __device__ __forceinline__ uint16_t* row_pointer(
      const KdaView& view, int row, int64_t head
  ) const {
    return static_cast<const uint16_t*>(view.data) + element(view, row, head);
  }

  // Of a contiguous tensor of `heads` heads with `columns` columns.
  __device__ __forceinline__ int64_t
  result(int row, int64_t head, int64_t heads, int columns) const {
    return ((span.sequence.batch * p.common.dims.T + token) * heads + head) * columns +
           row * (heads * columns);
  }

  // Of the state before the chunk.
  __device__ __forceinline__ int64_t state() const {
    const int64_t row = span.sequence.first_row(p.common.dims.T) + span.first;
    return (row * p.common.dims.HV + hv) * kK * kV;
  }

  __device__ __forceinline__ float state_unit(int channel) const {
    return at<float>(Memory::kStateUnit)[static_cast<unsigned>(channel) / kUnitKeys];
  }
};

}  // namespace sdm::kda::cuda
