// SPDX-License-Identifier: Apache-2.0
//! @file Between phase 1 and the chunks: qk * inverse.
//!
//! With it errors and readings are two products with the same rows, v - retrieved, and a chunk
//! needs no second pass over its tokens. A block takes 32 columns of a chunk, which lie in shared
//! memory, a warp 16 rows. It costs C^3 / 3 operations a chunk and stream, on tensor cores.

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_merge.h"
#include "sdm_kernels/sdm/cuda/sdm_product.cuh"

namespace sdm {
namespace cuda {
namespace {

constexpr int kMergeColumns = 32;

struct SdmMergeParams {
  SdmDims dims;
  SdmWindow window;
  const SdmSequence* sequences;
  SdmRecords records;
  float* product;
};

// kTerms: 1 for 16-bit banks, whose chunks round the product to tf32, 3 for float32 (mma.cuh).
template <int kTerms>
__global__ void __launch_bounds__(kSolveThreads, kTerms == 1 ? 2 : 1) sdm_merge_kernel(
    const __grid_constant__ SdmMergeParams p
) {
  extern __shared__ __align__(16) float smem[];
  constexpr int kTiles = kMergeColumns / 8;
  using Block = MatrixBlock<false>;
  const int Cp = p.records.Cp;
  const int panels = (Cp + kMergeColumns - 1) / kMergeColumns;
  const int64_t q = blockIdx.x / panels;
  const int first = static_cast<int>(blockIdx.x % panels) * kMergeColumns;
  wait_for_previous();
  ChunkPlace place;
  if (!find_chunk(p.dims, p.sequences, p.window, q, &place) || first >= place.num_tokens) {
    return;
  }
  const int num_tokens = static_cast<int>(place.num_tokens);
  const int row_blocks = (num_tokens + 15) / 16;
  const int columns = Cp - first < kMergeColumns ? Cp - first : kMergeColumns;
  const float* qk = p.records.qk + q * Cp * Cp;
  const float* inverse = p.records.inverse + q * Cp * Cp + first;
  float* product = p.product + q * Cp * Cp + first;
  const int block = static_cast<int>(threadIdx.x) / 32;
  const int first_block = first / 16;
  const int steps = block < row_blocks ? block - first_block + 1 : 0;
  const float* lane = Block::lane(qk, Cp, block * 16, first);
  const auto load = [&](Block* m, int step) { m->load(lane, Cp, step); };
  StepRing<2, Block> ring;
  ring.start(steps, load);
  const FragmentRows<kMergeColumns> x(smem);
  const bool found = x.template load<kTerms>(
      float_rows(inverse),
      [&](int i) { return static_cast<int64_t>(i) * Cp; },
      first,
      num_tokens,
      row_blocks * 16,
      columns,
      true
  );
  const bool bad = __syncthreads_or(found) != 0;  // all is there

  if (steps <= 0) {
    return;
  }
  float acc[kTiles][4] = {};
  const auto run = [&](auto with_bad) {
    ring.run(steps, load, [&](const Block& m, int step) {
      float4 rows[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        rows[n] = x.template fragment<decltype(with_bad)::value>(first_block + step, n);
      }
      m.template multiply<kTerms>(rows, acc);
    });
  };
  if (bad) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int column = n * 8 + 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block * 16 + Block::row(half);
      float two[2] = {acc[n][2 * half], acc[n][2 * half + 1]};
      if (bad) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          two[i] = add_bad_terms<false>(qk, Cp, x, first, num_tokens, row, column + i, two[i]);
        }
      }
      store_two(
          product, DType::kF32, static_cast<int64_t>(row) * Cp + column, columns - column, true, two
      );
    }
  }
}

}  // namespace
}  // namespace cuda

cudaError_t launch_sdm_merge(
    const SdmDims& dims,
    const SdmWindow& window,
    const SdmSequence* sequences,
    const SdmRecords& records,
    DType bank_dtype,
    float* product,
    cudaStream_t stream
) {
  using namespace cuda;
  const SdmMergeParams p{dims, window, sequences, records, product};
  const int64_t blocks = records.num_q * ceil_div(records.Cp, kMergeColumns);
  if (blocks == 0 || records.n == 0) {
    return cudaSuccess;
  }
  void (*const kernel)(SdmMergeParams) =
      bank_dtype == DType::kF32 ? &sdm_merge_kernel<3> : &sdm_merge_kernel<1>;
  bool overlap = false;
  const cudaError_t error = may_overlap(reinterpret_cast<const void*>(kernel), &overlap);
  if (error != cudaSuccess) {
    return error;
  }
  const int64_t bytes = FragmentRows<kMergeColumns>::bytes(records.Cp);
  return launch_blocks(kernel, p, blocks, kSolveThreads, bytes, stream, overlap);
}

}  // namespace sdm
