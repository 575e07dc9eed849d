// SPDX-License-Identifier: Apache-2.0
//! @file Launches of the stages of a chunk: shapes of blocks and which kernel.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_bwd_solve.cuh"
#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_fwd_solve.cuh"
#include "sdm_kernels/sdm/cuda/sdm_slots.cuh"

namespace sdm::cuda {

template <int kTerms, int kColumns, bool kBackward>
cudaError_t launch_solve_columns(const SdmChunkParams& p, cudaStream_t stream) {
  const int64_t blocks = p.dims.N * p.dims.H * ceil_div(p.dims.D, kColumns);
  if constexpr (kBackward) {
    return launch_blocks(
        &sdm_bwd_solve_kernel<kTerms, kColumns>,
        p,
        blocks,
        kSolveThreads,
        bwd_solve_smem<kColumns>(p.records.Cp),
        stream
    );
  } else {
    return launch_blocks(
        &sdm_fwd_solve_kernel<kTerms, kColumns>,
        p,
        blocks,
        kSolveThreads,
        fwd_solve_smem<kColumns>(p.records.Cp),
        stream
    );
  }
}

// As many columns a block as leave a block for most multiprocessors and fit it.
template <typename S, bool kBackward>
cudaError_t launch_solve_chunk(
    const SdmChunkParams& p, const CardLimits& card, cudaStream_t stream
) {
  constexpr int kTerms = sizeof(S) == 4 ? 3 : 1;
  const auto enough = [&](int64_t columns) {
    return p.dims.N * p.dims.H * ceil_div(p.dims.D, columns) * 4 >= 3 * card.processors;
  };
  if (enough(64) && bwd_solve_smem<64>(p.records.Cp) <= card.shared_memory) {
    return launch_solve_columns<kTerms, 64, kBackward>(p, stream);
  }
  if (enough(32)) {
    return launch_solve_columns<kTerms, 32, kBackward>(p, stream);
  }
  return launch_solve_columns<kTerms, 16, kBackward>(p, stream);
}

// Two slices a block, for longer runs of a row, where there are two and their rows fit. Calls
// f(width, parameters with their parts, blocks, bytes of shared memory), width an integral
// constant.
template <typename S, typename Shape, typename F>
cudaError_t launch_slots(SdmChunkParams p, int64_t token_rows, const CardLimits& card, const F& f) {
  const int64_t streams = p.dims.N * p.dims.H;
  if (p.num_slices >= 2 && slots_smem<S, 2, Shape>(token_rows) <= card.shared_memory) {
    const int64_t blocks = streams * ceil_div(p.num_slices, 2);
    p.parts = parts_of(blocks, card);
    return f(
        std::integral_constant<int, 2>(), p, blocks * p.parts, slots_smem<S, 2, Shape>(token_rows)
    );
  }
  const int64_t blocks = streams * p.num_slices;
  p.parts = parts_of(blocks, card);
  return f(
      std::integral_constant<int, 1>(), p, blocks * p.parts, slots_smem<S, 1, Shape>(token_rows)
  );
}

}  // namespace sdm::cuda
