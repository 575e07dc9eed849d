// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of the product-key top-k kernels on CUDA.
//!
//! The parameters are those of the CPU; their pointers to tensors are device pointers, all others
//! are read before the call returns. Everything is enqueued on the given stream of the current
//! device, nothing is allocated and nothing waits. Limits: no kF64, at most kTopkCudaMaxFactors
//! factors, at most kTopkCudaMaxDims leading dimensions that cannot be merged.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/topk/topk_params.h"

namespace sdm {

constexpr int kTopkCudaMaxFactors = 512;
constexpr int kTopkCudaMaxDims = 24;

[[nodiscard]] cudaError_t launch_topk_fwd(const TopkFwdParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t launch_topk_bwd(const TopkBwdParams& params, cudaStream_t stream);

}  // namespace sdm
