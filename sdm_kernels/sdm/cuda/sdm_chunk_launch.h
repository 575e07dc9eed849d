// SPDX-License-Identifier: Apache-2.0
//! @file Launches of the stages of a chunk: shapes of blocks and which kernel.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_bwd_solve.cuh"
#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_fwd_solve.cuh"
#include "sdm_kernels/sdm/cuda/sdm_slots.cuh"

namespace sdm::cuda {

template <int kTerms, int kColumns, bool kBackward>
cudaError_t launch_solve_columns(
    const SdmChunkParams& p, const CardLimits& card, cudaStream_t stream
) {
  const int64_t blocks = p.dims.N * p.dims.H * ceil_div(p.dims.D, kColumns);
  if constexpr (kBackward) {
    return launch_blocks(
        &sdm_bwd_solve_kernel<kTerms, kColumns>,
        p,
        blocks,
        kSolveThreads,
        bwd_solve_smem<kColumns>(p.records.Cp),
        stream,
        card.overlap
    );
  } else {
    return launch_blocks(
        &sdm_fwd_solve_kernel<kTerms, kColumns>,
        p,
        blocks,
        kSolveThreads,
        fwd_solve_smem<kColumns>(p.records.Cp),
        stream,
        card.overlap
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
    return launch_solve_columns<kTerms, 64, kBackward>(p, card, stream);
  }
  if (enough(32)) {
    return launch_solve_columns<kTerms, 32, kBackward>(p, card, stream);
  }
  return launch_solve_columns<kTerms, 16, kBackward>(p, card, stream);
}

// As many slices a block as there are and fit, for longer runs of a row: kWidest or a smaller power
// of two. Calls f(width, parameters with their parts, blocks, bytes of shared memory), width an
// integral constant.
template <typename S, typename Shape, int kWide = Shape::kWidest, typename F>
cudaError_t launch_slots(SdmChunkParams p, int64_t token_rows, const CardLimits& card, const F& f) {
  const int64_t smem = slots_smem<S, kWide, Shape>(token_rows);
  if constexpr (kWide > 1) {
    if (p.num_slices < kWide || smem > card.shared_memory) {
      return launch_slots<S, Shape, kWide / 2>(p, token_rows, card, f);
    }
  }
  const int64_t blocks = p.dims.N * p.dims.H * ceil_div(p.num_slices, kWide);
  p.parts = parts_of(blocks, card);
  return f(std::integral_constant<int, kWide>(), p, blocks * p.parts, smem);
}

}  // namespace sdm::cuda
