// SPDX-License-Identifier: Apache-2.0
//! @file The token stage of the tensor backward: what a block (one chunk and value head) keeps in
//! shared memory, and how it gets there.
//!
//! The 64 rows are eight blocks of 8. A decay from row j to a row i of a later block is cut at the
//! boundaries between blocks: exp(G_i - start of i's block), whole blocks, exp(end of j's block -
//! G_j). All are at most 1, whatever the gates. So the products between blocks have the operands
//!   Xq = q exp(from the start)   Xk = beta k exp(from the start)   Y = k exp(to the end)
//! and whole blocks multiply results as they are handed on, per channel, in float. Pairs inside a
//! block are summed in float (kda_tensor_bwd_channels.cuh).
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

template <int kK, int kV>
struct TokenMemory {
  using Keys = KdaTile<kChunkRows, kK>;
  using Rows = KdaTile<kChunkRows, kV>;
  using Square = KdaTile<kChunkRows, kChunkRows>;
  static constexpr int kThreads = 8 * kK;  // one per block of 8 rows and key channel
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kSplit = kWarps / 4;  // warps that share 16 rows
  static constexpr int kPitch = kK + 8;
  // Pieces of 8 columns that a thread has of a matrix of rows; some threads may have none.
  static constexpr int kRowPieces = kV > kK ? kV / kK : 1;

  static constexpr int kState = 0;                         // S, as chunk_states lies
  static constexpr int kStateGrad = kState + kK * kV * 2;  // dS [K, V]
  static constexpr int kOut = kStateGrad + kK * kV * 2;    // dO
  static constexpr int kY = kOut + Rows::kBytes;           // y
  static constexpr int kWork = kY + Rows::kBytes;          // kd, then beta e, then U
  static constexpr int kValue = kWork + kChunkRows * (kK > kV ? kK : kV) * 2;  // v as it is
  // Three planes float [64][pitch], over all of the above once the products are done.
  static constexpr int kPlanes = 0;
  static constexpr int kPlanesEnd = 3 * kChunkRows * kPitch * 4;
  static constexpr int kValueEnd = kValue + Rows::kBytes;
  static constexpr int kInverse = kPlanesEnd > kValueEnd ? kPlanesEnd : kValueEnd;
  static constexpr int kKeyGrad = kInverse;                      // dL, over the inverse
  static constexpr int kScoreGrad = kInverse + Square::kBytes;   // dM
  static constexpr int kDiagonal = kScoreGrad + Square::kBytes;  // float [2][8][8][8]: dL, dM
  static constexpr int kXq = kDiagonal + 2 * kBlocks * 64 * 4;
  static constexpr int kXk = kXq + Keys::kBytes;
  static constexpr int kYk = kXk + Keys::kBytes;
  static constexpr int kPerBlock = kBlocks * kK * 4;      // float [8][K]
  static constexpr int kDecay = kYk + Keys::kBytes;       // decay over a block
  static constexpr int kToEnd = kDecay + kPerBlock;       // over all blocks after it
  static constexpr int kTotals = kToEnd + kPerBlock;      // sums of dG over a block
  static constexpr int kGateSums = kDecay;                // float [2][8][K], over the decays
  static constexpr int kEndSums = kTotals + kPerBlock;    // float [4][K]: sums of kr dkr
  static constexpr int kEndGrad = kEndSums + 16 * kK;     // float [K]: gamma sum S dS
  static constexpr int kBeta = kEndGrad + 4 * kK;         // float [64]
  static constexpr int kValueSums = kBeta + 256;          // float [64]: sums of y v
  static constexpr int kStateShare = kValueSums + 256;    // fp16 pair [K / 8]: unit against the top
  static constexpr int kStateTop = kStateShare + kK / 2;  // float [4]: the largest unit
  static constexpr int kStateMax = kStateTop + 16;        // uint [K / 8]
  static constexpr int kOutMax = kStateMax + kK / 2;      // uint [4]
  static constexpr int kUMax = kOutMax + 16;              // uint [4]
  static constexpr int kGradMax = kUMax + 16;             // uint [4]
  static constexpr int kYUnit = kGradMax + 16;            // float [4]
  static constexpr int kStateGradUnit = kYUnit + 16;      // float [4]
  static constexpr int kWriteUnit = kStateGradUnit + 16;  // float [4][split]
  static constexpr int kBytes = kWriteUnit + 16 * kSplit;
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

  // Of a contiguous tensor of `heads` heads with `columns` columns.
  __device__ __forceinline__ int64_t
  result(int row, int64_t head, int64_t heads, int columns) const {
    return ((span.sequence.batch * p.common.dims.T + token) * heads + head) * columns +
           row * (heads * columns);
  }

  __device__ __forceinline__ float state_unit(int block) const {
    return unit_of(at<uint32_t>(Memory::kStateMax)[block]).unit;
  }
};

// atomicMax over the warp's lanes with the same key; `same`: all of them.
__device__ __forceinline__ void raise(uint32_t* largest, uint32_t bits) {
  const uint32_t most = __reduce_max_sync(kWarpMask, bits);
  if (threadIdx.x % 32 == 0) {
    atomicMax(largest, most);
  }
}

// Starts everything that comes unchanged, and clears the maxima.
template <int kK, int kV>
__device__ __forceinline__ void start_copies(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Record = KdaRecord<kK>;
  const int tid = static_cast<int>(threadIdx.x);
  const char* from = b.record() + tid * 16;
  const uint32_t to = b.base + static_cast<uint32_t>(tid * 16);
  static_assert(
      Record::kTileBytes == Memory::kThreads * 16 && kPanelBytes <= Memory::kThreads * 16
  );
  copy_async(to + Memory::kWork, from + Record::kKd);
  if (tid < kPanelBytes / 16) {
    copy_async(to + Memory::kInverse, from + Record::kInverse);
  }
  close_copies();
  if (tid < kK / 8 + 12) {
    b.template at<uint32_t>(Memory::kStateMax)[tid] = 0;
  }
  if (tid < kChunkRows) {
    b.template at<float>(Memory::kBeta)[tid] =
        reinterpret_cast<const float*>(b.record() + Record::kBeta)[tid];
  }
}

// S and dO in float, from their loads until their largest magnitudes are known.
template <int kK, int kV>
struct TokenLoads {
  static constexpr int kThreads = TokenMemory<kK, kV>::kThreads;
  static constexpr int kStatePieces = kV / 64;
  static constexpr int kRowPieces = TokenMemory<kK, kV>::kRowPieces;
  static constexpr int kRowSpan = kV / 8;  // pieces of a row
  float state[kStatePieces][8];
  float out[kRowPieces][8];

  __device__ __forceinline__ static int piece(int i) {
    return static_cast<int>(threadIdx.x) + i * kThreads;
  }

  // Whether piece i of the rows exists; the same in a warp.
  __device__ __forceinline__ static bool has_rows(int i) {
    return piece(i) < kChunkRows * kRowSpan;
  }

  __device__ __forceinline__ void load(const TokenBlock<kK, kV>& b) {
    const KdaChunkStates& states = b.p.chunk_states;
    const int64_t row = b.span.sequence.first_row(b.p.common.dims.T) + b.span.first;
    const int64_t from = (row * b.p.common.dims.HV + b.hv) * kK * kV;
#pragma unroll
    for (int i = 0; i < kStatePieces; ++i) {
      load_piece(state[i], states.data, states.dtype, from + piece(i) * 8, 1, true);
    }
    const KdaView& view = b.p.d_out;
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      const int r = piece(i) / kRowSpan;
      if (r < b.rows) {
        const int64_t at = b.element(view, r, b.hv) + piece(i) % kRowSpan * 8 * view.stride[3];
        load_piece(out[i], view.data, view.dtype, at, view.stride[3], b.p.aligned_out);
      } else {
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          out[i][x] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void find_maxima(const TokenBlock<kK, kV>& b) const {
    using Memory = TokenMemory<kK, kV>;
    uint32_t* state_max = b.template at<uint32_t>(Memory::kStateMax);
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kStatePieces; ++i) {
      uint32_t bits = __float_as_uint(largest_of_piece(state[i]));
      if (b.p.chunk_states.v_first) {
        // pieces of a row hold different key blocks
        if constexpr (kK == 64) {
          bits = larger(bits, __shfl_xor_sync(kWarpMask, bits, 8));
        }
        bits = larger(bits, __shfl_xor_sync(kWarpMask, bits, 16));
        if (lane < kK / 8) {
          atomicMax(&state_max[piece(i) % (kK / 8)], bits);
        }
      } else {
        raise(&state_max[piece(i) / (8 * kRowSpan)], bits);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      if (has_rows(i)) {
        raise(
            &b.template at<uint32_t>(Memory::kOutMax)[piece(i) / (16 * kRowSpan)],
            __float_as_uint(largest_of_piece(out[i]))
        );
      }
    }
  }

  __device__ __forceinline__ void store(const TokenBlock<kK, kV>& b) const {
    using Memory = TokenMemory<kK, kV>;
    const uint32_t* state_max = b.template at<uint32_t>(Memory::kStateMax);
    if (threadIdx.x < 32) {
      const uint32_t own = threadIdx.x < kK / 8 ? state_max[threadIdx.x] : 0;
      const float top = unit_of(__reduce_max_sync(kWarpMask, own)).unit;
      if (threadIdx.x < kK / 8) {
        b.template at<uint32_t>(Memory::kStateShare)[threadIdx.x] =
            share_pair(unit_of(own).unit, top);
      }
      if (threadIdx.x == 0) {
        *b.template at<float>(Memory::kStateTop) = top;
      }
    }
#pragma unroll
    for (int i = 0; i < kStatePieces; ++i) {
      const int n = piece(i);
      if (b.p.chunk_states.v_first) {
        const float factor = unit_of(state_max[n % (kK / 8)]).inverse;
        *b.template at<uint4>(
            Memory::kState + KdaTile<kV, kK>::at(n / (kK / 8), n % (kK / 8) * 8)
        ) = pack_piece(state[i], factor);
      } else {
        const float factor = unit_of(state_max[n / (8 * kRowSpan)]).inverse;
        *b.template at<uint4>(
            Memory::kState + KdaTile<kK, kV>::at(n / kRowSpan, n % kRowSpan * 8)
        ) = pack_piece(state[i], factor);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      const int n = piece(i);
      if (!has_rows(i)) {
        continue;
      }
      const uint32_t largest = b.template at<uint32_t>(Memory::kOutMax)[n / (16 * kRowSpan)];
      *b.template at<uint4>(Memory::kOut + Memory::Rows::at(n / kRowSpan, n % kRowSpan * 8)) =
          pack_piece(out[i], unit_of(largest).inverse);
    }
  }
};

// Eight fp16 numbers times a power of two.
__device__ __forceinline__ uint4 multiply_piece(uint4 x, uint32_t factor) {
  return make_uint4(
      multiply_pair(x.x, factor),
      multiply_pair(x.y, factor),
      multiply_pair(x.z, factor),
      multiply_pair(x.w, factor)
  );
}

// Largest of the units of a block of rows, whose columns come in groups of 32.
template <int kGroups>
__device__ __forceinline__ float top_of_groups(const float* unit) {
  float top = unit[0];
#pragma unroll
  for (int i = 1; i < kGroups; ++i) {
    top = fmaxf(top, unit[i]);
  }
  return top;
}

// dS into shared memory, with one unit for each block of K / 4 rows.
template <int kK, int kV>
__device__ __forceinline__ void load_state_grad(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Grads = KdaBwdRecord<kK, kV>;
  const uint4* from = reinterpret_cast<const uint4*>(b.grads() + Grads::kStateGrad);
  const float* units = reinterpret_cast<const float*>(b.grads() + Grads::kStateUnit);
#pragma unroll
  for (int i = 0; i < kV / 64; ++i) {
    const int n = static_cast<int>(threadIdx.x) + i * Memory::kThreads;
    const int row = n / (kV / 8), col = n % (kV / 8) * 8;
    const float* unit = units + row / (kK / 4) * Grads::kGroups;
    const float top = top_of_groups<Grads::kGroups>(unit);
    *b.template at<uint4>(Memory::kStateGrad + KdaTile<kK, kV>::at(row, col)) =
        multiply_piece(from[n], share_pair(unit[col / 32], top));
  }
  if (threadIdx.x < 4) {
    b.template at<float>(Memory::kStateGradUnit)[threadIdx.x] =
        top_of_groups<Grads::kGroups>(units + threadIdx.x * Grads::kGroups);
  }
}

// y and v into shared memory; dv = beta y goes out, and the sums of y v over a row are kept.
template <int kK, int kV, DType kType>
__device__ __forceinline__ void load_values(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Grads = KdaBwdRecord<kK, kV>;
  constexpr int kRowSpan = kV / 8;
  const uint4* from = reinterpret_cast<const uint4*>(b.grads() + Grads::kY);
  const float* units = reinterpret_cast<const float*>(b.grads() + Grads::kYUnit);
  const float* beta = reinterpret_cast<const float*>(b.record() + KdaRecord<kK>::kBeta);
  const KdaView& view = b.p.common.tokens.v;
#pragma unroll
  for (int i = 0; i < Memory::kRowPieces; ++i) {
    const int n = static_cast<int>(threadIdx.x) + i * Memory::kThreads;
    if (n >= kChunkRows * kRowSpan) {
      continue;  // all threads of a warp
    }
    const int row = n / kRowSpan, col = n % kRowSpan * 8;
    const float* unit = units + row / 16 * Grads::kGroups;
    const float top = top_of_groups<Grads::kGroups>(unit);
    const uint4 y = multiply_piece(from[n], share_pair(unit[col / 32], top));
    *b.template at<uint4>(Memory::kY + Memory::Rows::at(row, col)) = y;
    const bool live = row < b.rows;
    const uint4 v =
        live ? load_raw_piece(view.data, b.element(view, row, b.hv) + col, 1, b.p.aligned_v)
             : make_uint4(0, 0, 0, 0);
    *b.template at<uint4>(Memory::kValue + Memory::Rows::at(row, col)) = v;
    float y_float[8], v_float[8];
    widen_piece(y_float, y, false);
    widen_piece(v_float, v, kType == DType::kBf16);
    float sum = 0.0f;
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      y_float[x] *= top;
      sum += y_float[x] * v_float[x];
    }
#pragma unroll
    for (int mask = kRowSpan / 2; mask > 0; mask /= 2) {
      sum += __shfl_xor_sync(kWarpMask, sum, mask);
    }
    if (col == 0) {
      b.template at<float>(Memory::kValueSums)[row] = sum;
    }
    if (live) {
      const float strength = beta[row];
      uint32_t out[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        out[x] = pack_pair<kType>(strength * y_float[2 * x], strength * y_float[2 * x + 1]);
      }
      *reinterpret_cast<uint4*>(
          static_cast<uint16_t*>(b.p.d_v) + b.result(row, b.hv, b.p.common.dims.HV, kV) + col
      ) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
  if (threadIdx.x < 4) {
    b.template at<float>(Memory::kYUnit)[threadIdx.x] =
        top_of_groups<Grads::kGroups>(units + threadIdx.x * Grads::kGroups);
  }
}

}  // namespace sdm::kda::cuda
