// SPDX-License-Identifier: Apache-2.0
//! @file How everything that the token stage of the tensor backward multiplies gets into shared
//! memory: in fp16, in blocks that have their unit (kda_tensor_scale.cuh).
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_access.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

// Starts what comes unchanged; copies what is small.
template <int kK, int kV>
__device__ __forceinline__ void start_copies(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Record = KdaRecord<kK>;
  const int tid = static_cast<int>(threadIdx.x);
  const char* from = b.record() + tid * 16;
  const uint32_t to = b.base + static_cast<uint32_t>(tid * 16);
#pragma unroll
  for (int i = 0; i < Record::kTileBytes; i += kTokenThreads * 16) {
    start_copy<16>(to + Memory::kWork + i, from + Record::kKd + i);
  }
#pragma unroll
  for (int i = 0; i < kPanelBytes; i += kTokenThreads * 16) {
    start_copy<16>(to + Memory::kInverse + i, from + Record::kInverse + i);
  }
  constexpr int kSmall = kK * 4 + 3 * kChunkRows * 4;  // gamma, beta and the norms
  static_assert(Record::kQueryNorm + kChunkRows * 4 == Record::kGamma + kSmall);
  static_assert(Memory::kQueryNorm + kChunkRows * 4 == Memory::kGamma + kSmall);
  if (tid < kSmall / 16) {
    start_copy<16>(to + Memory::kGamma, from + Record::kGamma);
  }
  close_copies();
  if (tid < 4) {
    b.template at<uint32_t>(Memory::kGradMax)[tid] = 0;
  }
}

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

// Eight value columns of S from row (key channel) `row`, column `col` on.
template <int kK, int kV>
__device__ __forceinline__ void load_state_piece(
    float (&out)[8], const TokenBlock<kK, kV>& b, int64_t state, int row, int col
) {
  const KdaChunkStates& states = b.p.chunk_states;
  if (states.v_first) {
    load_piece(out, states.data, states.dtype, state + col * kK + row, kK, false);
  } else {
    load_piece(out, states.data, states.dtype, state + row * kV + col, 1, true);
  }
}

// S in float, from its loads until its units are known: a warp has groups of four key channels.
template <int kK, int kV>
struct StateLoads {
  using Memory = TokenMemory<kK, kV>;
  static constexpr int kRowSpan = kV / 8;               // pieces of a row
  static constexpr int kTurnRows = 32 / kRowSpan;       // rows that a warp takes at once
  static constexpr int kTurns = kUnitKeys / kTurnRows;  // of a group
  static constexpr int kGroups = kK / kUnitKeys / 8;    // of a warp
  static_assert(kTurns * kTurnRows == kUnitKeys);
  uint4 raw[kGroups][kTurns];
  int64_t state;

  __device__ __forceinline__ static int row(int group, int turn) {
    const unsigned own = threadIdx.x / 32 * (kGroups * kUnitKeys) + threadIdx.x % 32 / kRowSpan;
    return static_cast<int>(own) + group * kUnitKeys + turn * kTurnRows;
  }

  __device__ __forceinline__ static int col() {
    return static_cast<int>(threadIdx.x % kRowSpan * 8);
  }

  __device__ __forceinline__ static bool is_plain(const KdaChunkStates& states) {
    return states.dtype != DType::kF32 && !states.v_first;
  }

  __device__ __forceinline__ void load(const TokenBlock<kK, kV>& b) {
    state = b.state();
    if (!is_plain(b.p.chunk_states)) {
      return;
    }
    // a warp's pieces follow each other
    const uint16_t* from = static_cast<const uint16_t*>(b.p.chunk_states.data) + state +
                           (threadIdx.x / 32 * (kGroups * kUnitKeys * kV) + threadIdx.x % 32 * 8);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < kTurns; ++j) {
        raw[i][j] = *reinterpret_cast<const uint4*>(from + (i * kTurns + j) * 256);
      }
    }
  }

  __device__ __forceinline__ void store(const TokenBlock<kK, kV>& b) const {
    const KdaChunkStates& states = b.p.chunk_states;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float x[kTurns][8], largest = 0.0f;
#pragma unroll
      for (int j = 0; j < kTurns; ++j) {
        if (is_plain(states)) {
          widen_piece(x[j], raw[i][j], states.dtype == DType::kBf16);
        } else {
          load_state_piece(x[j], b, state, row(i, j), col());
        }
        largest = fmaxf(largest, largest_of_piece(x[j]));
      }
      const KdaUnit unit = unit_of(__reduce_max_sync(kWarpMask, __float_as_uint(largest)));
#pragma unroll
      for (int j = 0; j < kTurns; ++j) {
        *b.template at<uint4>(Memory::kState + Memory::State::at(row(i, j), col())) =
            pack_piece(x[j], unit.inverse);
      }
      if (threadIdx.x % 32 == 0) {
        b.template at<float>(Memory::kStateUnit)[row(i, 0) / kUnitKeys] = unit.unit;
      }
    }
  }
};

// Pieces of eight value columns of a warp's eight rows.
template <int kV>
struct RowPieces {
  static constexpr int kRowSpan = kV / 8;  // of a row
  static constexpr int kTurnRows = 32 / kRowSpan;
  static constexpr int kTurns = kBlockRows / kTurnRows;

  __device__ __forceinline__ static int row(int turn) {
    const unsigned own = threadIdx.x / 32 * kBlockRows + threadIdx.x % 32 / kRowSpan;
    return static_cast<int>(own) + turn * kTurnRows;
  }

  __device__ __forceinline__ static int col() {
    return static_cast<int>(threadIdx.x % kRowSpan * 8);
  }
};

// Of a tensor with the value columns whose rows are aligned.
template <int kK, int kV>
__device__ __forceinline__ void load_row_pieces(
    uint4 (&out)[RowPieces<kV>::kTurns], const TokenBlock<kK, kV>& b, const KdaView& view
) {
  using Pieces = RowPieces<kV>;
  const int row = Pieces::row(0);
  const uint16_t* from = b.row_pointer(view, row, b.hv) + Pieces::col();
  const int64_t step = Pieces::kTurnRows * view.stride[1];
#pragma unroll
  for (int i = 0; i < Pieces::kTurns; ++i) {
    out[i] = load_or_zero(from + i * step, row + i * Pieces::kTurnRows < b.rows);
  }
}

// dO, with one unit for eight rows.
template <int kK, int kV>
__device__ __forceinline__ void load_out(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Pieces = RowPieces<kV>;
  const KdaView& view = b.p.d_out;
  float x[Pieces::kTurns][8], largest = 0.0f;
  if (b.p.aligned_out) {
    uint4 raw[Pieces::kTurns];
    load_row_pieces<kK, kV>(raw, b, view);
#pragma unroll
    for (int i = 0; i < Pieces::kTurns; ++i) {
      widen_piece(x[i], raw[i], view.dtype == DType::kBf16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Pieces::kTurns; ++i) {
      const int row = Pieces::row(i);
      if (row < b.rows) {
        const int64_t at = b.element(view, row, b.hv) + Pieces::col() * view.stride[3];
        load_piece(x[i], view.data, view.dtype, at, view.stride[3], false);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          x[i][n] = 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Pieces::kTurns; ++i) {
    largest = fmaxf(largest, largest_of_piece(x[i]));
  }
  const KdaUnit unit = unit_of(__reduce_max_sync(kWarpMask, __float_as_uint(largest)));
#pragma unroll
  for (int i = 0; i < Pieces::kTurns; ++i) {
    *b.template at<uint4>(Memory::kOut + Memory::Rows::at(Pieces::row(i), Pieces::col())) =
        pack_piece(x[i], unit.inverse);
  }
  if (threadIdx.x % 32 == 0) {
    b.template at<float>(Memory::kOutUnit)[threadIdx.x / 32] = unit.unit;
  }
}

// y, with one unit for 16 rows; dv = beta y goes out, and the sums of y v over a row are kept.
template <int kK, int kV, DType kType>
__device__ __forceinline__ void load_values(const TokenBlock<kK, kV>& b) {
  using Memory = TokenMemory<kK, kV>;
  using Grads = KdaBwdRecord<kK, kV>;
  using Pieces = RowPieces<kV>;
  const int warp = static_cast<int>(threadIdx.x / 32), col = Pieces::col();
  // a warp's pieces follow each other
  const uint16_t* from = reinterpret_cast<const uint16_t*>(b.grads() + Grads::kY) +
                         (threadIdx.x / 32 * (kBlockRows * kV) + threadIdx.x % 32 * 8);
  const float* units = reinterpret_cast<const float*>(b.grads() + Grads::kYUnit);
  const float* beta = reinterpret_cast<const float*>(b.record() + KdaRecord<kK>::kBeta);
  const KdaView& view = b.p.common.tokens.v;
  const float* unit = units + warp / 2 * Grads::kGroups;
  const float top = top_of_groups<Grads::kGroups>(unit);
  const uint32_t share = share_pair(unit[col / 32], top);
  uint4 y[Pieces::kTurns], v[Pieces::kTurns];
#pragma unroll
  for (int i = 0; i < Pieces::kTurns; ++i) {
    y[i] = *reinterpret_cast<const uint4*>(from + i * 256);
  }
  if (b.p.aligned_v) {
    load_row_pieces<kK, kV>(v, b, view);
  } else {
#pragma unroll
    for (int i = 0; i < Pieces::kTurns; ++i) {
      const int row = Pieces::row(i);
      v[i] = row < b.rows ? load_raw_piece(view.data, b.element(view, row, b.hv) + col, 1, false)
                          : make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < Pieces::kTurns; ++i) {
    const int row = Pieces::row(i);
    const uint4 scaled = multiply_piece(y[i], share);
    *b.template at<uint4>(Memory::kY + Memory::Rows::at(row, col)) = scaled;
    float y_float[8], v_float[8];
    widen_piece(y_float, scaled, false);
    widen_piece(v_float, v[i], kType == DType::kBf16);
    float sum = 0.0f;
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      y_float[x] *= top;
      sum += y_float[x] * v_float[x];
    }
#pragma unroll
    for (int mask = Pieces::kRowSpan / 2; mask > 0; mask /= 2) {
      sum += __shfl_xor_sync(kWarpMask, sum, mask);
    }
    if (col == 0) {
      b.template at<float>(Memory::kValueSums)[row] = sum;
    }
    if (row < b.rows) {
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
  if (threadIdx.x % 64 == 0) {
    b.template at<float>(Memory::kYUnit)[warp / 2] = top;
  }
  if (threadIdx.x < 4 * Grads::kGroups) {
    const unsigned block = threadIdx.x / Grads::kGroups;
    const float* of_state = reinterpret_cast<const float*>(b.grads() + Grads::kStateUnit);
    const float largest = top_of_groups<Grads::kGroups>(of_state + block * Grads::kGroups);
    b.template at<float>(Memory::kStateGradUnit)[block] = largest;
    b.template at<uint32_t>(Memory::kStateGradShare)[threadIdx.x] =
        share_pair(of_state[threadIdx.x], largest);
  }
}

// The pass's rows of S and dS, in the units that are known by now.
template <int kK, int kV>
struct PassLoads {
  using Memory = TokenMemory<kK, kV>;
  using Grads = KdaBwdRecord<kK, kV>;
  using Tile = typename Memory::PassState;
  static constexpr int kTurns = kPass * kV / 8 / kTokenThreads;
  static constexpr int kTurnRows = kTokenThreads / (kV / 8);
  static_assert(kTurns * kTurnRows == kPass && kTurnRows % 8 == 0);
  uint4 grad[kTurns], raw[kTurns];

  // Of the first piece of a thread; the others are kTurnRows rows further down each.
  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x / (kV / 8)); }

  __device__ __forceinline__ static int col() {
    return static_cast<int>(threadIdx.x % (kV / 8) * 8);
  }

  __device__ __forceinline__ void load(const TokenBlock<kK, kV>& b, int64_t state, int pass) {
    const unsigned at = static_cast<unsigned>(pass) * (kPass * kV) + threadIdx.x * 8;
    const uint16_t* from = reinterpret_cast<const uint16_t*>(b.grads() + Grads::kStateGrad) + at;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      grad[i] = *reinterpret_cast<const uint4*>(from + i * (kTokenThreads * 8));
    }
    if (StateLoads<kK, kV>::is_plain(b.p.chunk_states)) {
      from = static_cast<const uint16_t*>(b.p.chunk_states.data) + state + at;
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        raw[i] = *reinterpret_cast<const uint4*>(from + i * (kTokenThreads * 8));
      }
    }
  }

  __device__ __forceinline__ void store(
      const TokenBlock<kK, kV>& b, int64_t state, int pass
  ) const {
    const uint32_t* shares =
        b.template at<uint32_t>(Memory::kStateGradShare) + threadIdx.x % (kV / 8) / 4;
    const KdaChunkStates& states = b.p.chunk_states;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int at = Tile::at(row(), col()) + i * kTurnRows * Tile::kRowBytes;
      const int channel = pass * kPass + row() + i * kTurnRows;
      const int block = static_cast<int>(static_cast<unsigned>(channel) / (kK / 4));
      *b.template at<uint4>(Memory::kPassGrad + at) =
          multiply_piece(grad[i], shares[block * Grads::kGroups]);
      float x[8];
      if (StateLoads<kK, kV>::is_plain(states)) {
        widen_piece(x, raw[i], states.dtype == DType::kBf16);
      } else {
        load_state_piece(x, b, state, channel, col());
      }
      *b.template at<uint4>(Memory::kState + at) =
          pack_piece(x, inverse_power(b.state_unit(channel)));
    }
  }
};

}  // namespace sdm::kda::cuda
