// SPDX-License-Identifier: Apache-2.0
//! @file What the plain kernels of Kimi delta attention use of the device itself: dynamic shared
//! memory, asynchronous copies, conversions of 16-bit types, launches.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/cuda/async_copy.cuh"

namespace sdm::kda::plain {

__device__ __forceinline__ float* shared_floats() {
  extern __shared__ float4 kda_plain_shared[];
  return reinterpret_cast<float*>(kda_plain_shared);
}

using sdm::cuda::close_copies;
using sdm::cuda::start_copy;
using sdm::cuda::wait_for_copies;

__device__ __forceinline__ float widen(float x) {
  return x;
}

__device__ __forceinline__ float widen(Bf16 x) {
  return to_f32(x);
}

__device__ __forceinline__ float widen(F16 x) {
  return __half2float(__ushort_as_half(x.bits));
}

template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return from_f32<T>(x);
  }
}

template <>
__device__ __forceinline__ F16 narrow<F16>(float x) {
  return F16{__half_as_ushort(__float2half_rn(x))};
}

template <typename Params>
cudaError_t launch(
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
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)
    );
  }
  if (error == cudaSuccess) {
    kernel<<<
        static_cast<unsigned>(blocks),
        static_cast<unsigned>(threads),
        static_cast<size_t>(shared_bytes),
        stream>>>(params);
    error = cudaGetLastError();
  }
  return error;
}

}  // namespace sdm::kda::plain
