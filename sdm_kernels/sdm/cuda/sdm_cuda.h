// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of the sparse delta memory kernels on CUDA. Everything is enqueued on the
//! given stream of the current device; memory comes from the caller: ask for its size, then launch.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "sdm_kernels/cuda/device_integers.h"
#include "sdm_kernels/sdm/sdm_params.h"

namespace sdm {

struct SdmCudaFwdParams {
  SdmFwdParams base;  // its host pointers cu_seqlens and state_indices are not used
  DeviceIntegers cu_seqlens;
  DeviceIntegers state_indices;
  int64_t pool;  // rows of the bank that state_indices may name
};

struct SdmCudaBwdParams {
  SdmBwdParams base;
  DeviceIntegers cu_seqlens;
};

[[nodiscard]] cudaError_t sdm_fwd_cuda_workspace(const SdmCudaFwdParams& params, size_t* bytes);
[[nodiscard]] cudaError_t launch_sdm_fwd(
    const SdmCudaFwdParams& params, void* workspace, cudaStream_t stream
);

[[nodiscard]] cudaError_t sdm_bwd_cuda_workspace(const SdmCudaBwdParams& params, size_t* bytes);
[[nodiscard]] cudaError_t launch_sdm_bwd(
    const SdmCudaBwdParams& params, void* workspace, cudaStream_t stream
);

// The exact token recurrence for a few tokens, in place; no workspace.
[[nodiscard]] cudaError_t launch_sdm_step(const SdmCudaFwdParams& params, cudaStream_t stream);

// *result = linear position of the first id outside [0, num_slots), or -1. Contiguous ids.
[[nodiscard]] cudaError_t launch_sdm_check_indices(
    DeviceIntegers ids, int64_t count, int64_t num_slots, int64_t* result, cudaStream_t stream
);

}  // namespace sdm
