// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of the Kimi delta attention kernels on CUDA. Everything is enqueued on the
//! given stream of the current device; memory comes from the caller: ask for its size, then launch.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "sdm_kernels/cuda/device_integers.h"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda {

// The host pointers cu_seqlens and state_indices in `base` are not used.
struct KdaCudaFwdParams {
  KdaFwdParams base;
  DeviceIntegers cu_seqlens;
};

struct KdaCudaBwdParams {
  KdaBwdParams base;
  DeviceIntegers cu_seqlens;
};

struct KdaCudaStepParams {
  KdaStepParams base;
  DeviceIntegers cu_seqlens;
  DeviceIntegers state_indices;
};

[[nodiscard]] cudaError_t kda_fwd_cuda_workspace(const KdaCudaFwdParams& params, size_t* bytes);
[[nodiscard]] cudaError_t launch_kda_fwd(
    const KdaCudaFwdParams& params, void* workspace, cudaStream_t stream
);

[[nodiscard]] cudaError_t kda_bwd_cuda_workspace(const KdaCudaBwdParams& params, size_t* bytes);
[[nodiscard]] cudaError_t launch_kda_bwd(
    const KdaCudaBwdParams& params, void* workspace, cudaStream_t stream
);

// No workspace.
[[nodiscard]] cudaError_t launch_kda_step(const KdaCudaStepParams& params, cudaStream_t stream);

}  // namespace sdm::kda
