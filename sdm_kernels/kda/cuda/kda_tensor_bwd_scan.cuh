// SPDX-License-Identifier: Apache-2.0
//! @file Reverse scan of Kimi delta attention over the chunks of a window, on tensor cores.
//!
//! With dS the gradient of the state behind the chunk:
//!   dU = scale scores^T dO + kr dS
//!   y  = inverse^T dU
//!   dS = gamma dS + scale qd^T dO - kd^T (beta y)
//! dS stays in float registers. A block owns a sequence, a value head and kGroups groups of 32
//! value columns; a group is served by four warps, each with 16 rows of the chunk or a quarter of
//! the key columns, and does not notice how many groups share its block.
//!
//! One buffer for every matrix of the record: it is refilled for the next chunk as soon as this one
//! has read it.

#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scale.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_tile.cuh"

namespace sdm::kda::cuda {

constexpr int kChunk = 64;

template <int kK, int kGroups>
struct ScanMemory {
  static constexpr int kCols = 32 * kGroups;
  using Keys = KdaTile<kChunk, kK>;        // kd, qd, kr
  using Square = KdaTile<kChunk, kChunk>;  // inverse, scores
  using Rows = KdaTile<kChunk, kCols>;     // dO, dU, beta y
  using State = KdaTile<kK, kCols>;        // dS
  static constexpr int kKd = 0;
  static constexpr int kQd = kKd + Keys::kBytes;
  static constexpr int kKr = kQd + Keys::kBytes;
  static constexpr int kInverse = kKr + Keys::kBytes;
  static constexpr int kScores = kInverse + Square::kBytes;
  static constexpr int kOut = kScores + Square::kBytes;
  static constexpr int kU = kOut + Rows::kBytes;
  static constexpr int kWrite = kU + Rows::kBytes;
  static constexpr int kState = kWrite + Rows::kBytes;
  static constexpr int kUnits = kState + State::kBytes;
  // Units of dO, dU, beta y, dS: float [4][groups][4 blocks].
  static constexpr int kGamma = kUnits + 4 * kGroups * 4 * 4;  // float [K]
  static constexpr int kBeta = kGamma + kK * 4;                // float [64]
  static constexpr int kBytes = kBeta + kChunk * 4;
};

// Sixteen elements of dO in flight: row lane / 2 of the warp's block, columns lane % 2 * 16.
struct OutRow {
  uint4 raw[2];
  bool live;  // raw holds the row
};

// Copies kBytes by all threads of the block, without a loop that counts.
template <int kBytes, int kThreads>
__device__ __forceinline__ void copy_to_shared(uint32_t to, const char* from) {
  constexpr int kTurn = kThreads * 16;
  const int at = static_cast<int>(threadIdx.x) * 16;
  to += static_cast<uint32_t>(at);
  from += at;
#pragma unroll
  for (int i = 0; i < kBytes / kTurn; ++i) {
    copy_async(to + static_cast<uint32_t>(i * kTurn), from + i * kTurn);
  }
  if constexpr (kBytes % kTurn != 0) {
    constexpr int kDone = kBytes / kTurn * kTurn;
    if (at < kBytes - kDone) {
      copy_async(to + static_cast<uint32_t>(kDone), from + kDone);
    }
  }
}

template <int kK, int kV, int kGroups>
struct Scan {
  using Memory = ScanMemory<kK, kGroups>;
  using Keys = typename Memory::Keys;
  using Square = typename Memory::Square;
  using Rows = typename Memory::Rows;
  using State = typename Memory::State;
  using Record = KdaRecord<kK>;
  using Out = KdaBwdRecord<kK, kV>;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kBlocks = kK / 64;  // 16-row blocks of dS in a warp
  static constexpr int kSlices = kV / 32 / kGroups;

  const KdaBwdScanParams& p;
  char* memory;
  uint32_t base;
  int group, block, g, t, slice;
  int64_t hv;
  KdaSpan span;
  float scale;
  float s[kBlocks][4][4];  // dS: key rows block * kK / 4 + 16 m, value columns 32 group + 8 n
  bool fast_out;

  __device__ __forceinline__ float* units(int kind) const {
    return reinterpret_cast<float*>(memory + Memory::kUnits) + kind * kGroups * 4 + group * 4;
  }

  // The units of the blocks [first, 4) of a kind against the largest of them.
  struct Shares {
    float top;
    uint32_t factor[4];
  };

  __device__ __forceinline__ Shares shares(int kind, int first) const {
    const float4 four = *reinterpret_cast<const float4*>(units(kind));
    const float unit[4] = {four.x, four.y, four.z, four.w};
    Shares out;
    out.top = unit[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      out.top = i >= first ? fmaxf(out.top, unit[i]) : out.top;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.factor[i] = share_pair(i >= first ? unit[i] : out.top, out.top);
    }
    return out;
  }

  __device__ __forceinline__ int state_row(int m, int half) const {
    return block * (kK / 4) + m * 16 + half * 8 + g;
  }

  __device__ __forceinline__ int value_column(int n) const {
    return (slice * kGroups + group) * 32 + n * 8 + t * 2;
  }

  __device__ __forceinline__ int64_t out_element(int64_t token) const {
    return element_of(p.d_out, span.sequence.batch, span.sequence.begin + token, hv) +
           ((slice * kGroups + group) * 32 + static_cast<int>(threadIdx.x) % 2 * 16) *
               p.d_out.stride[3];
  }

  __device__ __forceinline__ OutRow fetch_out(int64_t chunk) const {
    OutRow row;
    const int64_t token = chunk * kChunk + block * 16 + static_cast<int>(threadIdx.x) % 32 / 2;
    row.live = token < span.sequence.length;
    row.raw[0] = row.raw[1] = make_uint4(0, 0, 0, 0);
    if (fast_out && row.live) {
      const int64_t at = out_element(token);
      row.raw[0] = load_raw_piece(p.d_out.data, at, 1, true);
      row.raw[1] = load_raw_piece(p.d_out.data, at + 8, 1, true);
    }
    return row;
  }

  __device__ __forceinline__ void put_out(const OutRow& row, int64_t chunk) const {
    float x[2][8];
    if (fast_out || !row.live) {
      widen_piece(x[0], row.raw[0], p.d_out.dtype == DType::kBf16);
      widen_piece(x[1], row.raw[1], p.d_out.dtype == DType::kBf16);
    } else {
      const int64_t token = chunk * kChunk + block * 16 + static_cast<int>(threadIdx.x) % 32 / 2;
      const int64_t at = out_element(token);
      const int64_t stride = p.d_out.stride[3];
      load_piece(x[0], p.d_out.data, p.d_out.dtype, at, stride, false);
      load_piece(x[1], p.d_out.data, p.d_out.dtype, at + 8 * stride, stride, false);
    }
    const float largest = fmaxf(largest_of_piece(x[0]), largest_of_piece(x[1]));
    const KdaUnit unit = unit_of(__reduce_max_sync(kWarpMask, __float_as_uint(largest)));
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int r = block * 16 + lane / 2, c = group * 32 + lane % 2 * 16;
    char* tile = memory + Memory::kOut;
    *reinterpret_cast<uint4*>(tile + Rows::at(r, c)) = pack_piece(x[0], unit.inverse);
    *reinterpret_cast<uint4*>(tile + Rows::at(r, c + 8)) = pack_piece(x[1], unit.inverse);
    if (lane == 0) {
      units(0)[block] = unit.unit;
    }
  }

  // Start the copies from a record; each stage waits for its part.
  __device__ __forceinline__ void copy_first(const char* record) const {
    copy_to_shared<Keys::kBytes, kThreads>(base + Memory::kKr, record + Record::kKr);
    copy_to_shared<Square::kBytes, kThreads>(base + Memory::kScores, record + Record::kScores);
  }

  __device__ __forceinline__ void copy_second(const char* record) const {
    copy_to_shared<Square::kBytes, kThreads>(base + Memory::kInverse, record + Record::kInverse);
    copy_to_shared<Keys::kBytes, kThreads>(base + Memory::kQd, record + Record::kQd);
    static_assert(Record::kBeta == Record::kGamma + kK * 4);
    copy_to_shared<kK * 4 + kChunk * 4, kThreads>(base + Memory::kGamma, record + Record::kGamma);
  }

  __device__ __forceinline__ void copy_third(const char* record) const {
    copy_to_shared<Keys::kBytes, kThreads>(base + Memory::kKd, record + Record::kKd);
  }

  // c = sum over the 16-row blocks i >= `first` of tile[i, col..]^T rows[i], for 16 columns `col`.
  template <typename Tile>
  __device__ __forceinline__ void transposed_product(
      float (&c)[4][4], int tile, int col, int rows, const Shares& share, int first
  ) const {
    clear(c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= first) {
        uint32_t a[4], b[2][4];
        Tile::load_a_transposed(a, base + static_cast<uint32_t>(tile), i * 16, col);
        multiply_fragment(a, share.factor[i]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Rows::load_b(b[n], base + static_cast<uint32_t>(rows), i * 16, group * 32 + n * 16);
        }
        multiply_add(c, a, b);
      }
    }
  }

  // Stores the warp's 16 x 32 block of a matrix of rows, with its unit.
  __device__ __forceinline__ void put_rows(const float (&c)[4][4], int rows, int kind) const {
    const KdaUnit unit = unit_of_warp(c);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      Rows::store_c(memory + rows, block * 16, group * 32 + n * 8, c[n], unit.inverse);
    }
    if (threadIdx.x % 32 == 0) {
      units(kind)[block] = unit.unit;
    }
  }

  __device__ __forceinline__ void put_state() const {
    uint32_t largest = 0;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      largest = larger(largest, largest_of(s[m]));
    }
    const KdaUnit unit = unit_of(__reduce_max_sync(kWarpMask, largest));
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        State::store_c(
            memory + Memory::kState,
            block * (kK / 4) + m * 16,
            group * 32 + n * 8,
            s[m][n],
            unit.inverse
        );
      }
    }
    if (threadIdx.x % 32 == 0) {
      units(3)[block] = unit.unit;
    }
  }

  // Copies dS from shared memory to the chunk's record.
  __device__ __forceinline__ void save_state(char* out) const {
    constexpr int kPieces = Memory::kCols / 8;  // of a row
    constexpr int kTurnRows = kThreads / kPieces;
    static_assert(kTurnRows % 8 == 0 && kK % kTurnRows == 0);
    const int row = static_cast<int>(threadIdx.x) / kPieces;
    const int col = static_cast<int>(threadIdx.x) % kPieces * 8;
    const char* from = memory + Memory::kState + State::at(row, col);
    char* to = out + Out::kStateGrad + (row * kV + slice * Memory::kCols + col) * 2;
#pragma unroll
    for (int i = 0; i < kK / kTurnRows; ++i) {
      *reinterpret_cast<uint4*>(to + i * kTurnRows * kV * 2) =
          *reinterpret_cast<const uint4*>(from + i * kTurnRows * State::kRowBytes);
    }
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<float*>(
          out + Out::kStateUnit
      )[block * Out::kGroups + slice * kGroups + group] = units(3)[block];
    }
  }

  __device__ __forceinline__ void save_y(char* out, const float (&y)[4][4]) const {
    const KdaUnit unit = unit_of_warp(y);
    uint32_t* to = reinterpret_cast<uint32_t*>(out + Out::kY);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = ((block * 16 + half * 8 + g) * kV + value_column(n)) / 2;
        to[at] = pack_f16(y[n][2 * half] * unit.inverse, y[n][2 * half + 1] * unit.inverse);
      }
    }
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<float*>(out + Out::kYUnit)[block * Out::kGroups + slice * kGroups + group] =
          unit.unit;
    }
  }

  // One chunk: `out` is where the scan leaves its part, `before` the record of the chunk before it
  // (null: there is none).
  __device__ __forceinline__ void chunk_step(
      char* out, const char* before, int64_t chunk, OutRow& next
  ) {
    put_state();
    wait_copies<2>();
    __syncthreads();  // kr, scores, dO and dS are there

    save_state(out);
    float u[4][4];
    {
      const Shares share = shares(3, 0);
      float c[4][4];
      clear(c);
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        uint32_t a[4], b[2][4];
        Keys::load_a(a, base + Memory::kKr, block * 16, k * 16);
        multiply_fragment(a, share.factor[k / kBlocks]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          State::load_b(b[n], base + Memory::kState, k * 16, group * 32 + n * 16);
        }
        multiply_add(c, a, b);
      }
      const Shares out_share = shares(0, block);
      transposed_product<Square>(u, Memory::kScores, block * 16, Memory::kOut, out_share, block);
      const float factor = scale * out_share.top;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          u[n][x] = u[n][x] * factor + c[n][x] * share.top;
        }
      }
    }
    put_rows(u, Memory::kU, 1);
    wait_copies<1>();
    __syncthreads();  // dU, inverse, qd, gamma and beta are there; kr and scores are free
    if (before != nullptr) {
      copy_first(before);
      next = fetch_out(chunk - 1);
    }
    close_copies();

    {
      const Shares share = shares(1, block);
      transposed_product<Square>(u, Memory::kInverse, block * 16, Memory::kU, share, block);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          u[n][x] *= share.top;
        }
      }
    }
    save_y(out, u);
    const float* row_beta = reinterpret_cast<const float*>(memory + Memory::kBeta) + block * 16 + g;
    const float beta[2] = {row_beta[0], row_beta[8]};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        u[n][x] *= beta[x / 2];
      }
    }
    put_rows(u, Memory::kWrite, 2);
    {
      const Shares share = shares(0, 0);
      const float factor = scale * share.top;
      const float* row_gamma = reinterpret_cast<const float*>(memory + Memory::kGamma);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const float gamma[2] = {row_gamma[state_row(m, 0)], row_gamma[state_row(m, 1)]};
        float c[4][4];
        transposed_product<Keys>(c, Memory::kQd, block * (kK / 4) + m * 16, Memory::kOut, share, 0);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            s[m][n][x] = s[m][n][x] * gamma[x / 2] + c[n][x] * factor;
          }
        }
      }
    }
    wait_copies<1>();
    __syncthreads();  // beta y and kd are there; inverse, qd, gamma, beta and dO are free
    if (before != nullptr) {
      copy_second(before);
    }
    close_copies();

    {
      const Shares share = shares(2, 0);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        float c[4][4];
        transposed_product<Keys>(
            c, Memory::kKd, block * (kK / 4) + m * 16, Memory::kWrite, share, 0
        );
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            s[m][n][x] -= c[n][x] * share.top;
          }
        }
      }
    }
    if (before != nullptr) {
      put_out(next, chunk - 1);
    }
    __syncthreads();  // kd is free
    if (before != nullptr) {
      copy_third(before);
    }
    close_copies();
  }

  __device__ __forceinline__ int64_t
  state_element(const KdaStateView& view, int m, int n, int x) const {
    return span.sequence.index * view.stride[0] + hv * view.stride[1] +
           state_row(m, x / 2) * view.stride[2] + (value_column(n) + x % 2) * view.stride[3];
  }

  __device__ __forceinline__ float* carried(float* carry, int64_t index) const {
    return carry + (index * p.common.dims.HV + hv) * kK * kV + slice * kThreads * kBlocks * 16 +
           static_cast<int>(threadIdx.x);
  }

  template <typename F>
  __device__ __forceinline__ void for_state(F&& f) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          f(m, n, x, s[m][n][x]);
        }
      }
    }
  }

  __device__ __forceinline__ void run(int64_t carry_index) {
    const int64_t parity = p.common.window.parity;
    if (!span.ends) {
      const float* from = carried(p.carry[1 - parity], carry_index);
      for_state([&](int m, int n, int x, float& value) {
        value = from[((m * 4 + n) * 4 + x) * kThreads];
      });
    } else if (p.d_final.data != nullptr) {
      for_state([&](int m, int n, int x, float& value) {
        value = load_element(p.d_final.data, p.d_final.dtype, state_element(p.d_final, m, n, x));
      });
    } else {
      for_state([](int, int, int, float& value) { value = 0.0f; });
    }
    if (span.last > span.first) {
      const int64_t HV = p.common.dims.HV;
      const int64_t entry = (span.slot + span.last - 1 - span.first) * HV + hv;
      const char* in = p.common.records.data + entry * p.common.records.stride;
      char* out = p.common.bwd_records + entry * Out::kBytes;
      copy_first(in);
      close_copies();
      copy_second(in);
      close_copies();
      copy_third(in);
      close_copies();
      OutRow next = fetch_out(span.last - 1);
      put_out(next, span.last - 1);
      for (int64_t chunk = span.last - 1; chunk >= span.first; --chunk) {
        const char* before = chunk > span.first ? in - HV * p.common.records.stride : nullptr;
        chunk_step(out, before, chunk, next);
        in = before;
        out -= HV * Out::kBytes;
      }
    }
    if (span.first > 0) {
      float* to = carried(p.carry[parity], carry_index);
      for_state([&](int m, int n, int x, float& value) {
        to[((m * 4 + n) * 4 + x) * kThreads] = value;
      });
    } else if (p.d_initial.data != nullptr) {
      for_state([&](int m, int n, int x, float& value) {
        static_cast<float*>(p.d_initial.data)[state_element(p.d_initial, m, n, x)] = value;
      });
    }
  }
};

}  // namespace sdm::kda::cuda
