// SPDX-License-Identifier: Apache-2.0
//! @file Launches that may begin before the kernel in front of them has ended (sm_90 and later).
//!
//! A kernel launched with `overlap` starts when every block of the one before it has called
//! allow_next_kernel() or ended; wait_for_previous_kernel() waits until that one has ended and its
//! writes are visible. A kernel that calls neither, or a card below sm_90, gives the usual order.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace sdm::kda {

#ifdef __CUDACC__

namespace cuda {

__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// At the end of a kernel: its grid ends after the one before it. One block waits, so that the
// others leave their place to blocks with work.
__device__ __forceinline__ void end_after_previous_kernel() {
  if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1 && blockIdx.z == gridDim.z - 1) {
    wait_for_previous_kernel();
  }
}

}  // namespace cuda

// Whether the current device lets kernels overlap.
inline bool kernels_overlap() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

// Shared memory that a block may have on the current device; 0: there is none.
inline int shared_limit() {
  int device = 0, bytes = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
                 cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
                     cudaSuccess
             ? bytes
             : 0;
}

// Launches kernel(args), with as much dynamic shared memory as the card can be asked for.
template <typename Args>
[[nodiscard]] cudaError_t launch_kernel(
    void (*kernel)(Args),
    dim3 grid,
    int threads,
    int shared_bytes,
    cudaStream_t stream,
    bool overlap,
    const Args& args
) {
  cudaError_t error = cudaFuncSetAttribute(
      reinterpret_cast<const void*>(kernel),
      cudaFuncAttributeMaxDynamicSharedMemorySize,
      shared_bytes
  );
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, args);
  return error != cudaSuccess ? error : cudaGetLastError();
}

#endif  // __CUDACC__

}  // namespace sdm::kda
