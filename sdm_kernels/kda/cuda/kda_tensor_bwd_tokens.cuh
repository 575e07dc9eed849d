// SPDX-License-Identifier: Apache-2.0
//! @file The token stage of the tensor backward: what a block (one chunk and value head) keeps in
//! shared memory.
//!
//! The 64 rows are eight blocks of 8. A decay from row j to a row i of a later block is cut at the
//! boundaries between blocks: exp(G_i - start of i's block), whole blocks, exp(end of j's block -
//! G_j). All are at most 1, whatever the gates. So the products between blocks have the operands
//!   Xq = q exp(from the start)   Xk = beta k exp(from the start)   Y = k exp(to the end)
//! and whole blocks multiply results as they are handed on, per channel, in float. Pairs inside a
//! block are summed in float (kda_tensor_bwd_channels.cuh).
//!
//! Key channels come in passes of 32, so that two blocks fit on a multiprocessor: one computes
//! while the other waits for memory or at a barrier.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scale.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_tile.cuh"

namespace sdm::kda::cuda {

constexpr int kChunkRows = 64;
constexpr int kBlockRows = 8;
constexpr int kBlocks = 8;
constexpr int kTokenThreads = 256;  // a warp for each block of rows
constexpr int kPass = 32;           // key channels of a pass
constexpr int kUnitKeys = 4;        // key channels of S with one unit

constexpr int larger_of(int a, int b) {
  return a > b ? a : b;
}

template <int kK, int kV>
struct TokenMemory {
  using Keys = KdaTile<kChunkRows, kK>;
  using Rows = KdaTile<kChunkRows, kV>;
  using Square = KdaTile<kChunkRows, kChunkRows>;
  using State = KdaTile<kK, kV>;
  using PassKeys = KdaTile<kChunkRows, kPass>;
  using PassState = KdaTile<kPass, kV>;

  static constexpr int kOut = 0;                   // dO
  static constexpr int kY = kOut + Rows::kBytes;   // y
  static constexpr int kWork = kY + Rows::kBytes;  // kd, then beta e, then U
  static constexpr int kInverse = kWork + larger_of(Keys::kBytes, Rows::kBytes);
  static constexpr int kKeyGrad = kInverse;                      // dL, over the inverse
  static constexpr int kScoreGrad = kInverse + Square::kBytes;   // dM
  static constexpr int kDiagonal = kScoreGrad + Square::kBytes;  // float [2][8][8][8]: dL, dM
  // S for the updates; in a pass its rows of S and dS, then three planes float [64][32] over them,
  // and the operands of the pass.
  static constexpr int kState = kDiagonal + 2 * kBlocks * 64 * 4;
  static constexpr int kPassGrad = kState + PassState::kBytes;
  static constexpr int kPlanes = kState;
  static constexpr int kPlaneBytes = kChunkRows * kPass * 4;
  static constexpr int kXq = kState + larger_of(3 * kPlaneBytes, 2 * PassState::kBytes);
  static constexpr int kXk = kXq + PassKeys::kBytes;
  static constexpr int kYk = kXk + PassKeys::kBytes;
  static constexpr int kPoolEnd = larger_of(kYk + PassKeys::kBytes, kState + State::kBytes);
  static constexpr int kPerBlock = kBlocks * kPass * 4;             // float [8][32]
  static constexpr int kDecay = kPoolEnd;                           // [2]: decay over a block
  static constexpr int kTotals = kDecay + 2 * kPerBlock;            // sums of dG over a block
  static constexpr int kEndSums = kTotals + kPerBlock;              // sums of Y times plane 2
  static constexpr int kGateSums = kEndSums + kPerBlock;            // [2]: for dt_bias and A_log
  static constexpr int kEndGrad = kGateSums + 2 * kPerBlock;        // float [4][32]: sums of S dS
  static constexpr int kGamma = kEndGrad + 4 * kPass * 4;           // float [K]
  static constexpr int kBeta = kGamma + kK * 4;                     // float [64]
  static constexpr int kKeyNorm = kBeta + kChunkRows * 4;           // float [64]
  static constexpr int kQueryNorm = kKeyNorm + kChunkRows * 4;      // float [64]
  static constexpr int kValueSums = kQueryNorm + kChunkRows * 4;    // float [64]: sums of y v
  static constexpr int kStateUnit = kValueSums + kChunkRows * 4;    // float [K / 4]
  static constexpr int kOutUnit = kStateUnit + kK / kUnitKeys * 4;  // float [8]
  static constexpr int kYUnit = kOutUnit + 32;                      // float [4]
  static constexpr int kStateGradUnit = kYUnit + 16;                // float [4]
  static constexpr int kStateGradShare = kStateGradUnit + 16;       // fp16 pair [4][V / 32]
  static constexpr int kWriteUnit = kStateGradShare + 16 * (kV / 32);  // float [4][2]
  static constexpr int kUMax = kWriteUnit + 32;                        // uint [4][2]
  static constexpr int kGradMax = kUMax + 32;                          // uint [4]
  static constexpr int kBytes = kGradMax + 16;
  // Exponents of what the passes leave of q and k, a byte a pass: uint [2][8][32].
  static constexpr int kUnits = kState;
  static_assert(kK != 128 || kV != 128 || kBytes <= 113 * 1024);

  // Element of a plane. Rows are permuted in pieces of 8 columns against bank conflicts.
  __device__ __forceinline__ static constexpr int plane(int which, int row, int col) {
    return kPlanes + which * kPlaneBytes + (row * kPass + (col ^ ((row & 3) << 3))) * 4;
  }
};

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
