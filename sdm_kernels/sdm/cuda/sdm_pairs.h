// SPDX-License-Identifier: Apache-2.0
//! @file Host launchers of the pair stage of the CUDA backward: gradients of weights, strengths and
//! gates of a window of chunks, from the dots that its column walk left.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm {

// Contiguous, shapes and dtypes of the inputs; only tokens of the window's chunks are written.
struct SdmPairGrads {
  void* d_write_val;  // [B, T, H, W]
  void* d_read_val;   // [B, T, H, R]
  void* d_beta;       // [B, T, H]
  void* d_g;          // [B, T, H] or [B, T, H, W]
};

// Bytes of workspace, 256-byte aligned, for a window of that many chunks.
size_t sdm_pairs_workspace(const SdmDims& dims, const SdmWindow& window);

[[nodiscard]] cudaError_t launch_sdm_pairs(
    const SdmCudaInputs& inputs,
    const SdmWindow& window,
    const SdmRecords& records,
    const SdmDots& dots,
    const float* errors,     // [B, T, H, D] contiguous
    const FloatView& d_out,  // [B, T, H, D], last stride 1
    const SdmPairGrads& grads,
    void* workspace,
    cudaStream_t stream
);

}  // namespace sdm
