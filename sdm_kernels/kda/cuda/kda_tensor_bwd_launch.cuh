// SPDX-License-Identifier: Apache-2.0
//! @file Launch of one kernel of the tensor backward.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace sdm::kda {

template <typename Params>
cudaError_t launch_kernel(
    void (*kernel)(Params),
    const Params& params,
    int64_t blocks,
    int threads,
    int64_t shared_bytes,
    cudaStream_t stream
) {
  if (blocks == 0) {
    return cudaSuccess;
  }
  if (blocks < 0 || blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)
    );
    if (error != cudaSuccess) {
      return error;
    }
  }
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(
      function,
      dim3(static_cast<unsigned>(blocks)),
      dim3(static_cast<unsigned>(threads)),
      arguments,
      static_cast<size_t>(shared_bytes),
      stream
  );
}

}  // namespace sdm::kda
