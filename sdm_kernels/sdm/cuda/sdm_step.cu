// SPDX-License-Identifier: Apache-2.0
//! @file Launcher of the decode step.

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_step.cuh"

namespace sdm {

cudaError_t launch_sdm_step(const SdmCudaFwdParams& params, cudaStream_t stream) {
  using namespace cuda;
  const SdmFwdParams& base = params.base;
  const SdmDims& dims = base.dims;
  const int64_t num_slices = ceil_div(dims.D, slice_columns(base.bank_dtype));
  const int64_t blocks = dims.N * dims.H * num_slices;
  if (blocks == 0 || dims.T == 0) {
    return cudaSuccess;
  }
  const bool aligned = aligned_bank(base.bank, base.bank_dtype, dims.D);
  const SdmStepParams p{
      dims,
      base.tokens,
      params.state_indices,
      params.pool,
      base.bank,
      base.out,
      num_slices,
      aligned && aligned_tokens(base.tokens.v, dims.D)
  };
  // as few threads as still hold all rows in registers; it sets the order of sums, so it depends on
  // the shape alone
  const int64_t rows = dims.W + dims.R;
  const int threads = rows <= 32 * kStepHeld ? 256 : rows <= 64 * kStepHeld ? 512 : 1024;
  return dispatch_bank(base.bank_dtype, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    const int64_t smem = step_smem(dims.W, dims.R, threads, kSliceColumns<S>);
    const auto launch = [&](auto* small, auto* medium, auto* large) {
      return launch_loop(
          threads == 256   ? small
          : threads == 512 ? medium
                           : large,
          p,
          blocks,
          threads,
          smem,
          false,
          stream
      );
    };
    return aligned ? launch(
                         &sdm_step_kernel<S, true, 256>,
                         &sdm_step_kernel<S, true, 512>,
                         &sdm_step_kernel<S, true, 1024>
                     )
                   : launch(
                         &sdm_step_kernel<S, false, 256>,
                         &sdm_step_kernel<S, false, 512>,
                         &sdm_step_kernel<S, false, 1024>
                     );
  });
}

}  // namespace sdm
