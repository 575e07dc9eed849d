// SPDX-License-Identifier: Apache-2.0
//! @file The two ways through Kimi delta attention on CUDA, between which kda_chunk.cu chooses:
//! tensor cores for 16-bit inputs of tuned sizes, plain float32 arithmetic for everything else.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "sdm_kernels/kda/cuda/kda_cuda.h"

namespace sdm::kda {

// Chunk length of the tensor path.
inline constexpr int64_t kTensorChunk = 64;

// Calls with at most so many value heads scan long sequences in segments of so many chunks, side by
// side (kda_tensor_segments.cuh). Bits depend on both.
inline constexpr int64_t kSegmentHeads = 8;
inline constexpr int64_t kSegmentChunks = 16;

// Whether the tensor path serves these sizes and types. `dtype` is that of q, k and v.
bool kda_tensor_supports(const KdaDims& dims, DType dtype);

[[nodiscard]] size_t kda_tensor_fwd_workspace(const KdaCudaFwdParams& params);
[[nodiscard]] cudaError_t launch_kda_tensor_fwd(
    const KdaCudaFwdParams& params, void* workspace, cudaStream_t stream
);
[[nodiscard]] size_t kda_tensor_bwd_workspace(const KdaCudaBwdParams& params);
[[nodiscard]] cudaError_t launch_kda_tensor_bwd(
    const KdaCudaBwdParams& params, void* workspace, cudaStream_t stream
);

[[nodiscard]] size_t kda_plain_fwd_workspace(const KdaCudaFwdParams& params);
[[nodiscard]] cudaError_t launch_kda_plain_fwd(
    const KdaCudaFwdParams& params, void* workspace, cudaStream_t stream
);
[[nodiscard]] size_t kda_plain_bwd_workspace(const KdaCudaBwdParams& params);
[[nodiscard]] cudaError_t launch_kda_plain_bwd(
    const KdaCudaBwdParams& params, void* workspace, cudaStream_t stream
);

}  // namespace sdm::kda
