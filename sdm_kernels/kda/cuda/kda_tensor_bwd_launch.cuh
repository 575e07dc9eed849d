// SPDX-License-Identifier: Apache-2.0
//! @file Launch of one kernel of the tensor backward.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"

namespace sdm::kda {

// With `overlap` the kernel calls wait_for_previous_kernel() first.
template <typename Params>
[[nodiscard]] cudaError_t launch_blocks(
    void (*kernel)(Params),
    const Params& params,
    int64_t x,
    int64_t y,
    int64_t z,
    int threads,
    int shared_bytes,
    cudaStream_t stream,
    bool overlap
) {
  if (x == 0 || y == 0 || z == 0) {
    return cudaSuccess;
  }
  if (x < 0 || x > INT32_MAX || y < 0 || y > 65535 || z < 0 || z > 65535) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
  return launch_kernel(kernel, grid, threads, shared_bytes, stream, overlap, params);
}

}  // namespace sdm::kda
