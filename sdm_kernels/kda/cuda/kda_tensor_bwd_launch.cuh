// SPDX-License-Identifier: Apache-2.0
//! @file Launch of one kernel of the tensor backward.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"

namespace sdm::kda {

// A grid of one dimension. With `overlap` the kernel calls wait_for_previous_kernel() first.
template <typename Params>
[[nodiscard]] cudaError_t launch_blocks(
    void (*kernel)(Params),
    const Params& params,
    int64_t blocks,
    int threads,
    int shared_bytes,
    cudaStream_t stream,
    bool overlap
) {
  if (blocks == 0) {
    return cudaSuccess;
  }
  if (blocks < 0 || blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(blocks));
  return launch_kernel(kernel, grid, threads, shared_bytes, stream, overlap, params);
}

}  // namespace sdm::kda
