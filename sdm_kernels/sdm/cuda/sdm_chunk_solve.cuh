// SPDX-License-Identifier: Apache-2.0
//! @file Second stage of a chunk: its triangular matrices times its token rows.
//!
//! Forward: e = inverse * (v - retrieved), out = readings + qk * e. Backward: dv = inverse^T *
//! (gathered + qk^T * dy). A block takes all tokens of a few columns, which never mix, so that few
//! streams still make a block a multiprocessor; bits do not depend on how many columns it takes.
//! Bytes per block: the triangles of both matrices, 131 KB each at Cp = 256, from L2.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"
#include "sdm_kernels/sdm/cuda/sdm_product.cuh"

namespace sdm::cuda {

template <int kColumns>
constexpr int64_t solve_smem(int64_t Cp) {
  return 2 * Cp * kProductStride<kColumns> * static_cast<int64_t>(sizeof(float));
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
      const int64_t offset = row_of(i) + column;
      value = from.dtype == DType::kF32 ? __ldcg(static_cast<const float*>(from.data) + offset)
              : from.dtype == DType::kBf16
                  ? to_float(static_cast<const __nv_bfloat16*>(from.data)[offset])
                  : to_float(static_cast<const __half*>(from.data)[offset]);
    }
    to[i * kProductStride<kColumns> + column] = value;
  }
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
  load_block<kColumns>(float_rows(p.x), scratch_row, num_tokens, Cp, columns, x);
  if constexpr (kBackward) {
    const auto d_out_row = [&](int i) { return view_row(p.d_out, c.place, i) + first_column; };
    load_block<kColumns>(p.d_out, d_out_row, num_tokens, Cp, columns, y);
  } else {
    load_block<kColumns>(float_rows(p.y), scratch_row, num_tokens, Cp, columns, y);
  }
  __syncthreads();  // both are there

  Product<kTerms, kColumns> product;
  if constexpr (kBackward) {
    product.template run<true>(qk, Cp, y, row_blocks);
    product.template put<true, true>(x, row_blocks);
    __syncthreads();  // the gradient of the errors is complete
    product.template run<true>(inverse, Cp, x, row_blocks);
    __syncthreads();  // all warps have read it
    product.template put<true, false>(x, row_blocks);
    __syncthreads();  // dv is complete
    store_block<kColumns>(p.d_v, p.d_out.dtype, token, num_tokens, columns, x);
    const auto kept = [&](int i) { return (c.q * dims.C + i) * dims.D + first_column; };
    store_block<kColumns>(p.dots.d_v, DType::kF32, kept, num_tokens, columns, x);
  } else {
    product.template run<false>(inverse, Cp, x, row_blocks);
    __syncthreads();  // all warps have read v - retrieved
    product.template put<false, false>(x, row_blocks);
    __syncthreads();  // errors are complete
    product.template run<false>(qk, Cp, x, row_blocks);
    product.template put<false, true>(y, row_blocks);
    store_block<kColumns>(p.x, DType::kF32, scratch_row, num_tokens, columns, x);
    if (p.errors != nullptr) {
      store_block<kColumns>(p.errors, DType::kF32, token, num_tokens, columns, x);
    }
    __syncthreads();  // readings are complete
    store_block<kColumns>(p.out, p.v.dtype, token, num_tokens, columns, y);
  }
}

}  // namespace sdm::cuda
