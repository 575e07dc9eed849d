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
  constexpr int kNumbers = 3 * kChunkRows * 4;  // beta and the norms
  static_assert(Record::kQueryNorm + kChunkRows * 4 == Record::kBeta + kNumbers);
  static_assert(Memory::kQueryNorm + kChunkRows * 4 == Memory::kBeta + kNumbers);
  if (tid < kNumbers / 16) {
    start_copy<16>(to + Memory::kBeta, from + Record::kBeta);
  } else if (tid >= 64 && tid < 64 + kK / 4) {
    start_copy<16>(to - 1024 + Memory::kGamma, from - 1024 + Record::kGamma);
  }
  close_copies();
  const KdaTokens& tokens = b.p.common.tokens;
  const bool raw = b.p.common.options.gate != KdaGate::kActivated;
  if (tid < kK) {
    b.template at<float>(Memory::kBias)[tid] =
        raw && tokens.dt_bias != nullptr ? tokens.dt_bias[b.hv * kK + tid] : 0.0f;
  } else if (tid == kK) {
    *b.template at<float>(Memory::kRate) =
        raw && tokens.A_log != nullptr ? expf(tokens.A_log[b.hv]) : 1.0f;
    *b.template at<uint32_t>(Memory::kGradMax) = 0;
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

// Eight 16-bit elements times a power of two, in fp16.
__device__ __forceinline__ uint4 scale_piece(uint4 raw, float factor, bool bf16) {
  if (!bf16) {
    float x[8];
    widen_piece(x, raw, false);
    return pack_piece(x, factor);
  }
  const uint32_t both = pack_bf16(factor, factor);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack_bf16(multiply_bf16(words[i], both));
    out[i] = pack_f16(x.x, x.y);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
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
    const int at = Memory::kState + Memory::State::at(row(0, 0), col());
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
        const int further = i * kUnitKeys + j * kTurnRows;  // flips bits of the piece
        *b.template at<uint4>((at ^ (further % 8 << 4)) + further * Memory::State::kRowBytes) =
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
  static constexpr int kTurns = kWarpRows / kTurnRows;

  __device__ __forceinline__ static int row(int turn) {
    const unsigned own = threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / kRowSpan;
    return static_cast<int>(own) + turn * kTurnRows;
  }

  __device__ __forceinline__ static int col() {
    return static_cast<int>(threadIdx.x % kRowSpan * 8);
  }

  // Byte offset in a tile; rows further down flip bits of the piece.
  __device__ __forceinline__ static int offset(int turn) {
    using Tile = KdaTile<kChunkRows, kV>;
    return (Tile::at(row(0), col()) ^ (turn * kTurnRows << 4)) + turn * kTurnRows * Tile::kRowBytes;
  }

  // Whether the warp's rows exist.
  __device__ __forceinline__ static bool whole(int rows) {
    return static_cast<int>(threadIdx.x / 32 * kWarpRows) + kWarpRows <= rows;
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
  if (Pieces::whole(b.rows)) {
#pragma unroll
    for (int i = 0; i < Pieces::kTurns; ++i) {
      out[i] = *reinterpret_cast<const uint4*>(from + i * step);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Pieces::kTurns; ++i) {
      out[i] = load_or_zero(from + i * step, row + i * Pieces::kTurnRows < b.rows);
    }
  }
}

// dO, y and v, from their loads until they are converted.
template <int kK, int kV, DType kType>
struct RowLoads {
  using Memory = TokenMemory<kK, kV>;
  using Grads = KdaBwdRecord<kK, kV>;
  using Pieces = RowPieces<kV>;
  static constexpr int kTurns = Pieces::kTurns;
  uint4 out[kTurns];  // if it is aligned
  uint4 y[kTurns], v[kTurns];
  float strength[kTurns];
  float unit, top;  // of y in the thread's columns, and the largest

  __device__ __forceinline__ void load(const TokenBlock<kK, kV>& b) {
    const int col = Pieces::col();
    // a warp's pieces follow each other
    const uint16_t* from = reinterpret_cast<const uint16_t*>(b.grads() + Grads::kY) +
                           (threadIdx.x / 32 * (kWarpRows * kV) + threadIdx.x % 32 * 8);
    const float* units = reinterpret_cast<const float*>(b.grads() + Grads::kYUnit) +
                         threadIdx.x / 64 * Grads::kGroups;
    const float* beta = reinterpret_cast<const float*>(b.record() + KdaRecord<kK>::kBeta);
    if (b.p.aligned_out) {
      load_row_pieces<kK, kV>(out, b, b.p.d_out);
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      y[i] = *reinterpret_cast<const uint4*>(from + i * 256);
    }
    const KdaView& view = b.p.common.tokens.v;
    if (b.p.aligned_v) {
      load_row_pieces<kK, kV>(v, b, view);
    } else {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int row = Pieces::row(i);
        v[i] = row < b.rows ? load_raw_piece(view.data, b.element(view, row, b.hv) + col, 1, false)
                            : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      strength[i] = beta[Pieces::row(i)];
    }
    top = top_of_groups<Grads::kGroups>(units);
    unit = units[col / 32];
  }

  // dO, with one unit for eight rows.
  __device__ __forceinline__ void store_out(const TokenBlock<kK, kV>& b) const {
    const KdaView& view = b.p.d_out;
    float x[kTurns][8], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (b.p.aligned_out) {
        widen_piece(x[i], out[i], view.dtype == DType::kBf16);
      } else if (const int row = Pieces::row(i); row < b.rows) {
        const int64_t at = b.element(view, row, b.hv) + Pieces::col() * view.stride[3];
        load_piece(x[i], view.data, view.dtype, at, view.stride[3], false);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          x[i][n] = 0.0f;
        }
      }
      largest = fmaxf(largest, largest_of_piece(x[i]));
    }
    const KdaUnit of_out = unit_of(__reduce_max_sync(kWarpMask, __float_as_uint(largest)));
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      *b.template at<uint4>(Memory::kOut + Pieces::offset(i)) = pack_piece(x[i], of_out.inverse);
    }
    if (threadIdx.x % 32 == 0) {
      b.template at<float>(Memory::kOutUnit)[threadIdx.x / 32] = of_out.unit;
    }
  }

  // y, with one unit for 16 rows; dv = beta y goes out, and the sums of y v over a row are kept.
  __device__ __forceinline__ void store_values(const TokenBlock<kK, kV>& b) const {
    const uint32_t share = share_pair(unit, top);
    const int64_t step = Pieces::kTurnRows * b.p.common.dims.HV * kV;
    uint16_t* to = static_cast<uint16_t*>(b.p.d_v) +
                   b.result(Pieces::row(0), b.hv, b.p.common.dims.HV, kV) + Pieces::col();
    float sums[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const uint4 scaled = multiply_piece(y[i], share);
      *b.template at<uint4>(Memory::kY + Pieces::offset(i)) = scaled;
      float y_float[8], v_float[8];
      widen_piece(y_float, scaled, false);
      widen_piece(v_float, v[i], kType == DType::kBf16);
      const float factor = strength[i] * top;
      uint32_t dv[4];
      sums[i] = 0.0f;
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        sums[i] += y_float[x] * v_float[x];
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        dv[x] = pack_pair<kType>(factor * y_float[2 * x], factor * y_float[2 * x + 1]);
      }
      store_piece_if(to, make_uint4(dv[0], dv[1], dv[2], dv[3]), Pieces::row(i) < b.rows);
      to += step;
    }
    const float sum = sum_spread<kTurns, Pieces::kRowSpan>(sums) * top;
    constexpr int kShare = Pieces::kRowSpan / kTurns;  // lanes that get one sum
    const int own = static_cast<int>(threadIdx.x % Pieces::kRowSpan);
    if (own % kShare == 0) {
      b.template at<float>(Memory::kValueSums)[Pieces::row(own / kShare)] = sum;
    }
    if (threadIdx.x % 64 == 0) {
      b.template at<float>(Memory::kYUnit)[threadIdx.x / 64] = top;
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
};

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
      const float inverse = inverse_power(b.state_unit(channel));
      if (StateLoads<kK, kV>::is_plain(states)) {
        *b.template at<uint4>(Memory::kState + at) =
            scale_piece(raw[i], inverse, states.dtype == DType::kBf16);
      } else {
        float x[8];
        load_state_piece(x, b, state, channel, col());
        *b.template at<uint4>(Memory::kState + at) = pack_piece(x, inverse);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
