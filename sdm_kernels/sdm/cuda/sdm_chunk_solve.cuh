// SPDX-License-Identifier: Apache-2.0
//! @file Second stage of a chunk: its triangular matrices times its token rows.
//!
//! Forward: e = inverse * (v - retrieved), out = readings + qk * e. Backward: dv = inverse^T *
//! (gathered + qk^T * dy). A block takes all tokens of a few columns, which never mix, so that few
//! streams still make a block a multiprocessor; bits do not depend on how many columns it takes.
//!
//! Tensor cores multiply the zeros above the diagonal too, and zero times infinity or NaN would
//! carry a bad value to earlier tokens. A block that has one multiplies without it, and then adds
//! its terms one by one where the matrix is not zero. Bytes per block: the triangles of both
//! matrices, 131 KB each at Cp = 256, from L2.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"
#include "sdm_kernels/sdm/cuda/sdm_product.cuh"

namespace sdm::cuda {

template <int kColumns>
constexpr int64_t solve_smem(int64_t Cp) {
  return 2 * Cp * kProductStride<kColumns> * static_cast<int64_t>(sizeof(float));
}

__device__ __forceinline__ float load_scalar_as_float(const FloatView& from, int64_t offset) {
  switch (from.dtype) {
    case DType::kF32:
      return __ldcg(static_cast<const float*>(from.data) + offset);
    case DType::kBf16:
      return to_float(static_cast<const __nv_bfloat16*>(from.data)[offset]);
    default:
      return to_float(static_cast<const __half*>(from.data)[offset]);
  }
}

// Rows [0, num_rows) of `columns` columns from a view; rows up to Cp are zero.
template <int kColumns, typename RowOf>
__device__ __forceinline__ void load_block(
    const FloatView& from, const RowOf& row_of, int num_rows, int Cp, int columns, float* to
) {
#pragma unroll 8
  for (int at = threadIdx.x; at < Cp * kColumns; at += kSolveThreads) {
    const int i = at / kColumns, column = at % kColumns;
    float value = 0.0f;
    if (i < num_rows && column < columns) {
      value = load_scalar_as_float(from, row_of(i) + column);
    }
    to[i * kProductStride<kColumns> + column] = value;
  }
}

// Whether a block of rows in shared memory holds an infinity or NaN. Every thread gets the answer,
// and what was written before is visible to all after.
template <int kColumns>
__device__ __forceinline__ bool any_bad(const float* x, int num_rows) {
  bool bad = false;
#pragma unroll 4
  for (int at = threadIdx.x; at < num_rows * kColumns; at += kSolveThreads) {
    bad |= !isfinite(x[at / kColumns * kProductStride<kColumns> + at % kColumns]);
  }
  return __syncthreads_or(bad) != 0;
}

template <int kColumns>
__device__ __forceinline__ void clear_bad(float* x, int num_rows) {
  for (int at = threadIdx.x; at < num_rows * kColumns; at += kSolveThreads) {
    float* p = x + at / kColumns * kProductStride<kColumns> + at % kColumns;
    *p = isfinite(*p) ? *p : 0.0f;
  }
  __syncthreads();
}

// y[i] += the terms of m that clear_bad() left out; original(r, column) is x as it was.
template <bool kTransposed, int kColumns, typename Original>
__device__ void add_bad_terms(
    const float* m, int Cp, const Original& original, int num_rows, int columns, float* y
) {
  for (int at = threadIdx.x; at < num_rows * kColumns; at += kSolveThreads) {
    const int i = at / kColumns, column = at % kColumns;
    if (column >= columns) {
      continue;
    }
    float sum = y[i * kProductStride<kColumns> + column];
    for (int r = kTransposed ? i : 0; r < (kTransposed ? num_rows : i + 1); ++r) {
      const float x = original(r, column);
      const float factor = kTransposed ? m[r * Cp + i] : m[i * Cp + r];
      if (!isfinite(x) && factor != 0.0f) {
        sum = fmaf(factor, x, sum);
      }
    }
    y[i * kProductStride<kColumns> + column] = sum;
  }
  __syncthreads();
}

template <int kColumns, typename RowOf>
__device__ __forceinline__ void store_block(
    void* to, DType dtype, const RowOf& row_of, int num_rows, int columns, const float* from
) {
#pragma unroll 4
  for (int at = threadIdx.x; at < num_rows * kColumns; at += kSolveThreads) {
    const int i = at / kColumns, column = at % kColumns;
    if (column < columns) {
      store_any<1>(to, dtype, row_of(i) + column, 1, {from[i * kProductStride<kColumns> + column]});
    }
  }
}

// kTerms: 1 for 16-bit banks, 3 for float32 (mma.cuh).
template <int kTerms, int kColumns, bool kBackward>
__global__ void __launch_bounds__(kSolveThreads, 1) sdm_solve_chunk_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  const SdmDims& dims = p.dims;
  const int64_t blocks = ceil_div(dims.D, kColumns);  // of a stream
  const StreamChunk c(p, blockIdx.x / blocks);
  if (!c.exists) {
    return;
  }
  const int64_t first_column = blockIdx.x % blocks * kColumns;
  const int64_t rest = dims.D - first_column;
  const int columns = rest < kColumns ? static_cast<int>(rest) : kColumns;
  const int Cp = p.records.Cp;
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  float* x = smem;
  float* y = smem + Cp * kProductStride<kColumns>;
  const float* inverse = p.records.inverse + c.q * Cp * Cp;
  const float* qk = p.records.qk + c.q * Cp * Cp;
  const int row_blocks = (num_tokens + 15) / 16;  // the matrices are zero beyond
  const auto scratch_row = [&](int i) { return c.scratch(p) + i * dims.D + first_column; };
  const auto token = [&](int i) { return token_row(dims, c.place, i) + first_column; };
  const auto scratch_value = [&](int i, int column) {
    return __ldcg(p.x + scratch_row(i) + column);
  };
  load_block<kColumns>(float_rows(p.x), scratch_row, num_tokens, Cp, columns, x);
  Product<kTerms, kColumns> product;
  if constexpr (kBackward) {
    const auto d_out_row = [&](int i) { return view_row(p.d_out, c.place, i) + first_column; };
    load_block<kColumns>(p.d_out, d_out_row, num_tokens, Cp, columns, y);
    __syncthreads();  // both are there
    bool bad = any_bad<kColumns>(y, num_tokens);
    if (bad) {
      clear_bad<kColumns>(y, num_tokens);
    }
    product.template run<true>(qk, Cp, y, row_blocks);
    product.template put<true, true>(x, row_blocks);
    __syncthreads();  // the gradient of the errors is complete
    if (bad) {
      const auto d_out = [&](int i, int column) {
        return load_scalar_as_float(p.d_out, d_out_row(i) + column);
      };
      add_bad_terms<true, kColumns>(qk, Cp, d_out, num_tokens, columns, x);
    }
    bad = any_bad<kColumns>(x, num_tokens);
    if (bad) {
      store_block<kColumns>(p.x, DType::kF32, scratch_row, num_tokens, columns, x);
      __syncthreads();  // x may change
      clear_bad<kColumns>(x, num_tokens);
    }
    product.template run<true>(inverse, Cp, x, row_blocks);
    __syncthreads();  // all warps have read it
    product.template put<true, false>(x, row_blocks);
    __syncthreads();  // dv is complete
    if (bad) {
      add_bad_terms<true, kColumns>(inverse, Cp, scratch_value, num_tokens, columns, x);
    }
    store_block<kColumns>(p.d_v, p.d_out.dtype, token, num_tokens, columns, x);
    const auto kept = [&](int i) { return (c.q * dims.C + i) * dims.D + first_column; };
    store_block<kColumns>(p.dots.d_v, DType::kF32, kept, num_tokens, columns, x);
  } else {
    load_block<kColumns>(float_rows(p.y), scratch_row, num_tokens, Cp, columns, y);
    __syncthreads();  // both are there
    bool bad = any_bad<kColumns>(x, num_tokens);
    if (bad) {
      clear_bad<kColumns>(x, num_tokens);
    }
    product.template run<false>(inverse, Cp, x, row_blocks);
    __syncthreads();  // all warps have read v - retrieved
    product.template put<false, false>(x, row_blocks);
    __syncthreads();  // errors are complete
    if (bad) {
      add_bad_terms<false, kColumns>(inverse, Cp, scratch_value, num_tokens, columns, x);
    }
    store_block<kColumns>(p.x, DType::kF32, scratch_row, num_tokens, columns, x);
    if (p.errors != nullptr) {
      store_block<kColumns>(p.errors, DType::kF32, token, num_tokens, columns, x);
    }
    bad = any_bad<kColumns>(x, num_tokens);  // all have stored it
    if (bad) {
      clear_bad<kColumns>(x, num_tokens);
    }
    product.template run<false>(qk, Cp, x, row_blocks);
    product.template put<false, true>(y, row_blocks);
    __syncthreads();  // readings are complete
    if (bad) {
      add_bad_terms<false, kColumns>(qk, Cp, scratch_value, num_tokens, columns, y);
    }
    store_block<kColumns>(p.out, p.v.dtype, token, num_tokens, columns, y);
  }
}

}  // namespace sdm::cuda
