// SPDX-License-Identifier: Apache-2.0
//! @file Products of token rows for the gradients of weights: VE = lower(dv e^T) and
//! GE = lower(dy e^T) of every chunk, [q][Cp][Cp] float (sdm_bwd_pairs.cuh uses them).
//!
//! One block of 8 warps makes one 64 x 64 tile of both matrices, lower tiles only: warps 0-3 VE,
//! warps 4-7 GE, 32 x 32 each, on tensor cores with one tf32 term for 16-bit banks and three for
//! float banks. Columns are staged as they lie in memory, 32 at a time, two stages in flight during
//! the products of a third.
//!
//! Order of sums: D is cut into at most kMaxSegments segments, a function of D alone; every segment
//! is summed by itself and the segments are added in order. With few tiles each segment gets its
//! own block and a second kernel adds the segments in the same order, so the bits do not depend on
//! which of the two ran.
//!
//! A chunk of C = 256 and D = 1024 costs 10 tiles: 168 MFLOP (times three for float banks) and
//! 2.5 MB from memory, 6.5 MB from L2. Elements above the diagonal and rows past the last token are
//! not written.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "sdm_kernels/cuda/async_copy.cuh"
#include "sdm_kernels/cuda/mma.cuh"
#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda::pairs {

constexpr int kTile = 64;   // tokens a side
constexpr int kDepth = 32;  // columns a stage
constexpr int kStages = 3;
constexpr int kRowFloats = kDepth + 4;  // the 8 rows of a fragment lie in different banks
constexpr int kDotThreads = 256;
constexpr int64_t kMinSegment = 256;  // columns; shorter sums are not worth a block
constexpr int64_t kMaxSegments = 8;   // bounds the memory of the partial sums
constexpr int64_t kFewTiles = 256;    // fewer than two blocks for each of about 130 processors

inline int64_t segment_columns(int64_t D) {
  const int64_t columns = round_up(ceil_div(D, kMaxSegments), kDepth);
  return columns > kMinSegment ? columns : kMinSegment;
}

inline int64_t lower_tiles(int64_t C) {
  const int64_t side = ceil_div(C, kTile);
  return side * (side + 1) / 2;
}

struct SdmTokenDotsParams {
  SdmDims dims;
  const SdmSequence* sequences;
  SdmWindow window;
  int64_t num_q;
  int32_t Cp;
  int32_t tiles;    // lower tiles of a chunk
  int64_t columns;  // of a segment
  int32_t segments;
  bool split;           // one block a segment; ve and ge are then planes [segment][q][Cp][Cp]
  bool vector_rows;     // dv and e can be read four floats at a time
  bool vector_d_out;    // likewise dy
  const float* d_v;     // [q][C][D]
  const float* errors;  // [B, T, H, D]
  FloatView d_out;      // [B, T, H, D], last stride 1
  float* ve;
  float* ge;
};

__device__ __forceinline__ float load_element(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBf16:
      return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

__device__ __forceinline__ float float_of(float x) {
  return x;
}

__device__ __forceinline__ float float_of(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

__device__ __forceinline__ float float_of(__half x) {
  return __half2float(x);
}

// One row of one operand, as a thread that stages some of its columns sees it.
template <typename T>
struct StagedRow {
  const T* data;
  int64_t D;    // 0 for a token that does not exist
  bool vector;  // four elements at a time

  // Starts the copy of four columns, zeroes past the row's end.
  __device__ __forceinline__ void start(T* to, int64_t column) const {
    if (vector) {
      start_copy<4 * sizeof(T)>(to, data + column, column < D);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = column + i < D ? data[column + i] : T(0.0f);
    }
  }
};

// Rows of a stage: dv and e in float, dy as it is.
template <typename Dy>
struct DotsStage {
  alignas(16) float dv[kTile][kRowFloats];
  alignas(16) float e[kTile][kRowFloats];
  alignas(16) Dy dy[kTile][kRowFloats * 4 / sizeof(Dy)];
};

// Rounds a fragment to tf32, or splits it, as the number of terms asks.
template <int kTerms, int kCount>
__device__ __forceinline__ void take_fragment(
    const float (&x)[kCount], uint32_t (&head)[kCount], uint32_t (&tail)[kCount]
) {
  if constexpr (kTerms == 1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      head[i] = to_tf32(x[i]);
      tail[i] = 0;
    }
  } else {
    split_tf32(x, head, tail);
  }
}

// acc[2 x 16 rows][4 x 8 columns] += x * y^T over one stage, for the warp's 32 x 32 part.
template <int kTerms, typename X, int kWidth>
__device__ __forceinline__ void stage_products(
    const X (*s_x)[kWidth], const float (*s_y)[kRowFloats], float (&acc)[2][4][4]
) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {
    uint32_t bh[4][2], bt[4][2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float b[2] = {s_y[n * 8 + g][k + t], s_y[n * 8 + g][k + t + 4]};
      take_fragment<kTerms>(b, bh[n], bt[n]);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float a[4] = {
          float_of(s_x[m * 16 + g][k + t]),
          float_of(s_x[m * 16 + g + 8][k + t]),
          float_of(s_x[m * 16 + g][k + t + 4]),
          float_of(s_x[m * 16 + g + 8][k + t + 4]),
      };
      uint32_t ah[4], at[4];
      take_fragment<kTerms>(a, ah, at);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if constexpr (kTerms == 3) {
          mma_tf32(acc[m][n], at, bh[n]);
          mma_tf32(acc[m][n], ah, bt[n]);
        }
        mma_tf32(acc[m][n], ah, bh[n]);
      }
    }
  }
}

template <int kTerms, typename Dy>
__global__ void __launch_bounds__(kDotThreads, 2) sdm_token_dots_kernel(
    const __grid_constant__ SdmTokenDotsParams p
) {
  extern __shared__ __align__(16) unsigned char dots_memory[];
  DotsStage<Dy>* s_stages = reinterpret_cast<DotsStage<Dy>*>(dots_memory);
  const SdmDims& dims = p.dims;
  const int64_t planes = p.split ? p.segments : 1;
  const int64_t segment = blockIdx.x % planes;
  const int64_t block = blockIdx.x / planes;
  const int64_t q = block / p.tiles;
  ChunkPlace place;
  if (!find_chunk(dims, p.sequences, p.window, q, &place)) {
    return;
  }
  int tile_j = static_cast<int>(block % p.tiles);
  int tile_i = 0;
  while (tile_j > tile_i) {
    tile_j -= ++tile_i;
  }
  const int row0 = tile_i * kTile, col0 = tile_j * kTile;
  const int num_tokens = static_cast<int>(place.num_tokens);
  if (row0 >= num_tokens) {
    return;
  }

  const int stage_row = threadIdx.x / 4, stage_col = threadIdx.x % 4 * 4;
  const int i = row0 + stage_row, j = col0 + stage_row;
  const int64_t first_token = (place.batch * dims.T + place.token) * dims.H + place.head;
  const int64_t d_out_at = place.batch * p.d_out.stride[0] + (place.token + i) * p.d_out.stride[1] +
                           place.head * p.d_out.stride[2];
  const int64_t D_i = i < num_tokens ? dims.D : 0, D_j = j < num_tokens ? dims.D : 0;
  const StagedRow<float> dv_row = {p.d_v + (q * dims.C + i) * dims.D, D_i, p.vector_rows};
  const StagedRow<float> e_row = {
      p.errors + (first_token + j * dims.H) * dims.D, D_j, p.vector_rows
  };
  const StagedRow<Dy> dy_row = {
      static_cast<const Dy*>(p.d_out.data) + d_out_at, D_i, p.vector_d_out
  };

  const int warp = threadIdx.x / 32;
  const int matrix = warp / 4, part_i = warp % 4 / 2 * 32, part_j = warp % 2 * 32;
  const bool idle = tile_i == tile_j && part_j > part_i;  // all above the diagonal
  const int64_t begin = p.split ? segment * p.columns : 0;
  const int64_t limit = p.split ? begin + p.columns : dims.D;
  const int64_t end = limit < dims.D ? limit : dims.D;
  const auto start = [&](int stage, int64_t column) {
    if (column < end) {
      DotsStage<Dy>& s = s_stages[stage];
#pragma unroll
      for (int half = 0; half < kDepth; half += 16) {
        const int at = stage_col + half;
        dv_row.start(&s.dv[stage_row][at], column + at);
        dy_row.start(&s.dy[stage_row][at], column + at);
        e_row.start(&s.e[stage_row][at], column + at);
      }
    }
    close_copies();
  };

  float acc[2][4][4] = {}, total[2][4][4] = {};
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) {
    start(stage, begin + stage * kDepth);
  }
  int stage = 0;
  int64_t segment_end = begin + p.columns;
  for (int64_t column = begin; column < end; column += kDepth) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the stage is complete, and nobody still reads the one started now
    start(stage == 0 ? kStages - 1 : stage - 1, column + (kStages - 1) * kDepth);
    if (!idle) {
      const DotsStage<Dy>& s = s_stages[stage];
      if (matrix == 0) {
        stage_products<kTerms>(&s.dv[part_i], &s.e[part_j], acc);
      } else {
        stage_products<kTerms>(&s.dy[part_i], &s.e[part_j], acc);
      }
    }
    if (column + kDepth >= end || column + kDepth == segment_end) {
      segment_end += p.columns;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            total[m][n][c] += acc[m][n][c];
            acc[m][n][c] = 0.0f;
          }
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  if (idle) {
    return;
  }

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* out = (matrix == 0 ? p.ve : p.ge) + (segment * p.num_q + q) * p.Cp * p.Cp;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + part_i + m * 16 + half * 8 + g;
        const int col = col0 + part_j + n * 8 + 2 * t;
        float* dst = out + row * p.Cp + col;
        if (row < num_tokens && col + 1 <= row) {
          *reinterpret_cast<float2*>(dst) =
              make_float2(total[m][n][2 * half], total[m][n][2 * half + 1]);
        } else if (row < num_tokens && col <= row) {
          *dst = total[m][n][2 * half];
        }
      }
    }
  }
}

// Adds the segments in order; one block a row of one chunk. `ve` and `ge` of p are the planes.
__global__ void __launch_bounds__(256) sdm_token_dots_sum_kernel(
    const SdmTokenDotsParams p, float* ve, float* ge
) {
  const int64_t q = blockIdx.x / p.dims.C;
  const int64_t i = blockIdx.x % p.dims.C;
  ChunkPlace place;
  if (!find_chunk(p.dims, p.sequences, p.window, q, &place) || i >= place.num_tokens) {
    return;
  }
  const int64_t plane = p.num_q * p.Cp * p.Cp;
  const int64_t row = (q * p.Cp + i) * p.Cp;
  for (int64_t j = threadIdx.x; j <= i; j += blockDim.x) {
    float sum_ve = 0.0f, sum_ge = 0.0f;
    for (int64_t segment = 0; segment < p.segments; ++segment) {
      sum_ve += p.ve[segment * plane + row + j];
      sum_ge += p.ge[segment * plane + row + j];
    }
    ve[row + j] = sum_ve;
    ge[row + j] = sum_ge;
  }
}

}  // namespace sdm::cuda::pairs
