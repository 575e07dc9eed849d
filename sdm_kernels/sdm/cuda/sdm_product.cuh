// SPDX-License-Identifier: Apache-2.0
//! @file Products of a chunk's triangular matrices with its token rows: what forward and backward
//! share.
//!
//! m [Cp, Cp] is lower triangular in global memory (every block of a stream reads the same one,
//! through L2), the rows lie in shared memory. Tensor cores in tf32 (mma.cuh); k runs upwards by 16
//! in every row and in one order inside, so a row's bits depend on nothing but the matrix and the
//! column.
//!
//! Rows lie in the order of matrix fragments, so that a lane's part of one is 16 consecutive bytes.
//! Lanes take m in pieces of 16 bytes (transposed: 8): the k (or rows of the result) of a piece are
//! given to fragments as they come, which only renames the fragments' k (or rows).
//!
//! Tensor cores multiply the zeros beyond the diagonal too, and zero times infinity or NaN would
//! carry a bad value to tokens that it has no business with. A block that has one multiplies
//! without it, and then adds its terms one by one where the matrix is not zero.
#pragma once

#include "sdm_kernels/cuda/mma.cuh"
#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"

namespace sdm::cuda {

constexpr int kMaxChunkRows = 256;

// Whether a value is an infinity or NaN for the tensor cores: rounding may carry.
__device__ __forceinline__ bool is_bad(float x) {
  return !isfinite(__uint_as_float(to_tf32(x)));
}

constexpr int kSolveThreads = 512;
constexpr int kSolveWarps = kSolveThreads / 32;

// How the result for kColumns columns is cut. A task is 16 rows by kTiles * 8 columns, for one
// warp.
template <int kTerms, int kColumns>
struct ProductShape {
  static constexpr int kAllTiles = kColumns / 8;
  static constexpr int kTiles = kAllTiles < 4 ? kAllTiles : 4;
  static constexpr int kParts = kAllTiles / kTiles;
  static constexpr int kTasks = kMaxChunkRows / 16 * kParts / kSolveWarps;  // of a warp
  // Blocks of m in flight a warp: the fewer columns, the less work there is to hide the way from
  // L2, and the more registers there are.
  static constexpr int kDepth = kTiles >= 4 || kTerms > 1 ? 2 : 4;
};

// The j-th task of this warp. Tasks are in the order of their rows and dealt back and forth, so
// that a warp with many blocks of k in its first task has few in its second.
template <typename Shape>
struct SolveTask {
  int block, first_tile;  // rows 16 * block + .., columns 8 * first_tile + ..

  __device__ __forceinline__ explicit SolveTask(int j) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int task = j % 2 == 0 ? j * kSolveWarps + warp : (j + 1) * kSolveWarps - 1 - warp;
    block = task / Shape::kParts;
    first_tile = task % Shape::kParts * Shape::kTiles;
  }
};

// Token rows in shared memory: [16 rows][8 columns][lane][4], a lane with four rows of a column.
template <int kColumns>
class FragmentRows {
 public:
  static constexpr int64_t bytes(int64_t Cp) {
    return Cp * kColumns * static_cast<int64_t>(sizeof(float));
  }

  __device__ __forceinline__ explicit FragmentRows(float* memory) : x_(memory) {}

  // Rows 16 * step + 4t .. + 3 of column 8 * tile + g. kBad: zero for bad values.
  template <bool kBad>
  __device__ __forceinline__ float4 fragment(int step, int tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float4 four =
        *reinterpret_cast<const float4*>(x_ + ((step * kAllTiles + tile) * 32 + lane) * 4);
    if constexpr (kBad) {
      four.x = is_bad(four.x) ? 0.0f : four.x;
      four.y = is_bad(four.y) ? 0.0f : four.y;
      four.z = is_bad(four.z) ? 0.0f : four.z;
      four.w = is_bad(four.w) ? 0.0f : four.w;
    }
    return four;
  }

  __device__ __forceinline__ float value(int row, int column) const { return x_[at(row, column)]; }

  // Fills rows [begin, rows) of `columns` columns, zero from num_rows on; of one term rounded to
  // tf32. row_of(i): offset of a row in the view. Returns whether this thread saw a bad value.
  template <int kTerms, typename RowOf>
  __device__ __forceinline__ bool load(
      const FloatView& from,
      const RowOf& row_of,
      int begin,
      int num_rows,
      int rows,
      int columns,
      bool vectors
  ) const {
    constexpr int kQuads = kColumns / 4;
    constexpr int kLoads = kMaxChunkRows * kQuads / kSolveThreads;  // of a thread
    constexpr int kTogether = kLoads < 4 ? kLoads : 4;
    bool found = false;
#pragma unroll 1
    for (int base = 0; base < kLoads; base += kTogether) {
      float values[kTogether][4];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Place place(base + i);
        const bool inside = place.row >= begin && place.row < num_rows;
        load_four(
            from,
            (inside ? row_of(place.row) : 0) + place.column,
            inside ? columns - place.column : 0,
            vectors,
            values[i]
        );
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Place place(base + i);
        if (place.row >= begin && place.row < rows) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float x = values[i][j];
            x_[at(place.row, place.column + j)] = kTerms == 1 ? __uint_as_float(to_tf32(x)) : x;
            found |= is_bad(x);
          }
        }
      }
    }
    return found;
  }

 private:
  static constexpr int kAllTiles = kColumns / 8;

  // The i-th four columns of a thread. Lanes take 16 rows and two fours, whose stores meet in a
  // bank only in twos.
  struct Place {
    int row, column;

    __device__ __forceinline__ explicit Place(int i) {
      const int thread = i * kSolveThreads + static_cast<int>(threadIdx.x);
      const int lane = thread % 32, tile = thread / 32;
      row = tile / kAllTiles * 16 + lane % 16;
      column = tile % kAllTiles * 8 + lane / 16 * 4;
    }
  };

  __device__ __forceinline__ static int at(int row, int column) {
    return ((row / 16 * kAllTiles + column / 8) * 32 + column % 8 * 4 + row % 16 / 4) * 4 + row % 4;
  }

  // Four columns from an offset on, `count` of them (or more) inside.
  __device__ __forceinline__ static void load_four(
      const FloatView& from, int64_t offset, int count, bool vectors, float (&x)[4]
  ) {
    if (vectors && count >= 4) {
      if (from.dtype == DType::kF32) {
        const float4 four =
            __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + offset));
        x[0] = four.x;
        x[1] = four.y;
        x[2] = four.z;
        x[3] = four.w;
        return;
      }
      const uint2 raw =
          __ldg(reinterpret_cast<const uint2*>(static_cast<const __half*>(from.data) + offset));
      const bool is_bf16 = from.dtype == DType::kBf16;
      const float2 low =
          is_bf16 ? unpack_pair(raw.x, __nv_bfloat16()) : unpack_pair(raw.x, __half());
      const float2 high =
          is_bf16 ? unpack_pair(raw.y, __nv_bfloat16()) : unpack_pair(raw.y, __half());
      x[0] = low.x;
      x[1] = low.y;
      x[2] = high.x;
      x[3] = high.y;
      return;
    }
    load_any(from.data, from.dtype, offset, count, x);
  }

  float* x_;
};

// A lane's part of 16 x 16 of m.
template <bool kTransposed>
struct MatrixBlock {
  float a[2][4];  // k 0 .. 7 and 8 .. 15 as fragments

  // Where the lane's part of the block at (row, k) lies: rows `row` of the result, k of the rows.
  const __device__ __forceinline__ static float* lane(const float* m, int Cp, int row, int k) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    return kTransposed ? m + (k + 4 * t) * Cp + row + 2 * g : m + (row + g) * Cp + k + 4 * t;
  }

  // The row of the result that fragment rows g (half 0) and g + 8 (half 1) are.
  __device__ __forceinline__ static int row(int half) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    return kTransposed ? 2 * g + half : 8 * half + g;
  }

  __device__ __forceinline__ void load(const float* lane, int Cp, int step) {
    if constexpr (kTransposed) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 two = __ldg(reinterpret_cast<const float2*>(lane + (step * 16 + e) * Cp));
        a[e / 2][e % 2 * 2] = two.x;
        a[e / 2][e % 2 * 2 + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 four =
            __ldg(reinterpret_cast<const float4*>(lane + half * 8 * Cp + step * 16));
        a[0][half] = four.x;
        a[0][2 + half] = four.y;
        a[1][half] = four.z;
        a[1][2 + half] = four.w;
      }
    }
  }

  // acc += this * rows, with rows as FragmentRows gives them.
  template <int kTerms, int kTiles>
  __device__ __forceinline__ void multiply(
      const float4 (&rows)[kTiles], float (&acc)[kTiles][4]
  ) const {
    if constexpr (kTerms == 1) {
      uint32_t rounded[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        rounded[i / 4][i % 4] = to_tf32(a[i / 4][i % 4]);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma_tf32(acc[n], rounded[0], {__float_as_uint(rows[n].x), __float_as_uint(rows[n].y)});
        mma_tf32(acc[n], rounded[1], {__float_as_uint(rows[n].z), __float_as_uint(rows[n].w)});
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma_f32<kTerms>(acc[n], a[0], {rows[n].x, rows[n].y});
        mma_f32<kTerms>(acc[n], a[1], {rows[n].z, rows[n].w});
      }
    }
  }
};

// Blocks of m on their way to use(blocks, step), kDepth at a time.
template <int kDepth, typename Blocks>
class StepRing {
 public:
  // load(&blocks, step) for the first steps.
  template <typename Load>
  __device__ __forceinline__ void start(int steps, const Load& load) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i < steps) {
        load(&ring_[i], i);
      }
    }
  }

  template <typename Load, typename Use>
  __device__ __forceinline__ void run(int steps, const Load& load, const Use& use) {
#pragma unroll 1
    for (int base = 0; base < steps; base += kDepth) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (base + i < steps) {
          use(ring_[i], base + i);
          if (base + i + kDepth < steps) {
            load(&ring_[i], base + i + kDepth);
          }
        }
      }
    }
  }

 private:
  Blocks ring_[kDepth];
};

// sum += the terms of m that a product without bad values left out, for one row and column, from
// row `begin` of x on.
template <bool kTransposed, typename Rows>
__device__ __forceinline__ float add_bad_terms(
    const float* m, int Cp, const Rows& x, int begin, int num_rows, int row, int column, float sum
) {
#pragma unroll 1
  for (int k = kTransposed ? row : begin; k < (kTransposed ? num_rows : row + 1); ++k) {
    const float value = x.value(k, column);
    const float factor = kTransposed ? m[k * Cp + row] : m[row * Cp + k];
    if (is_bad(value) && factor != 0.0f) {
      sum = fmaf(factor, value, sum);
    }
  }
  return sum;
}

// Two neighbouring columns of a token tensor, `count` of them (or more) inside.
__device__ __forceinline__ void store_two(
    void* data, DType dtype, int64_t offset, int count, bool vectors, const float (&x)[2]
) {
  if (vectors && count >= 2) {
    if (dtype == DType::kF32) {
      __stcg(
          reinterpret_cast<float2*>(static_cast<float*>(data) + offset), make_float2(x[0], x[1])
      );
    } else {
      const uint32_t two = dtype == DType::kBf16 ? pack_pair(x[0], x[1], __nv_bfloat16())
                                                 : pack_pair(x[0], x[1], __half());
      __stcg(reinterpret_cast<unsigned*>(static_cast<__half*>(data) + offset), two);
    }
    return;
  }
  store_any(data, dtype, offset, count, x);
}

// Which columns a block of a solve has.
template <int kColumns>
struct SolvePlace {
  int64_t stream, first;
  int columns;

  __device__ __forceinline__ explicit SolvePlace(const SdmChunkParams& p) {
    const int blocks = quotient(p.dims.D + kColumns - 1, kColumns);  // of a stream
    stream = quotient(blockIdx.x, blocks);
    first = remainder(blockIdx.x, blocks) * kColumns;
    const int64_t rest = p.dims.D - first;
    columns = rest < kColumns ? static_cast<int>(rest) : kColumns;
  }
};

}  // namespace sdm::cuda
