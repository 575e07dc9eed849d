// SPDX-License-Identifier: Apache-2.0
//! @file Launch of the warp-per-row top-k kernel: its instance for a shape. One translation unit
//! per dtype (topk_pair_<dtype>.cu) because there are many.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "sdm_kernels/topk/cuda/topk_device.cuh"
#include "sdm_kernels/topk/cuda/topk_pair.cuh"

namespace sdm::topk {

template <typename T, int kCols, int kSelect>
cudaError_t launch_pair(const DeviceFwdParams& params, cudaStream_t stream) {
  using Traits = PairTraits<T, kCols, kSelect>;
  constexpr int kWarps = pair_warps<Traits>();
  DeviceFwdParams part = params;
  cudaError_t error = cudaSuccess;
  // more rows than a grid has warps take several launches
  for (; error == cudaSuccess && part.first_row < part.num_rows;
       part.first_row += int64_t{INT32_MAX} * kWarps) {
    const int64_t blocks = (part.num_rows - part.first_row + kWarps - 1) / kWarps;
    topk_pair_kernel<Traits><<<grid_size(blocks), kWarps * kWarp, 0, stream>>>(part);
    error = cudaGetLastError();
  }
  return error;
}

template <typename T, int kCols>
cudaError_t launch_pair_select(const DeviceFwdParams& params, cudaStream_t stream) {
  if (params.num_selected <= 32) {
    return launch_pair<T, kCols, 32>(params, stream);
  }
  if (params.num_selected <= 64) {
    return launch_pair<T, kCols, 64>(params, stream);
  }
  if (params.num_selected <= 128) {
    return launch_pair<T, kCols, 128>(params, stream);
  }
  return launch_pair<T, kCols, 256>(params, stream);
}

template <typename T>
cudaError_t launch_pair_width(const DeviceFwdParams& params, cudaStream_t stream) {
  const int32_t widest = std::max(params.widths[0], params.widths[1]);
  if (widest <= 256) {
    return launch_pair_select<T, 16>(params, stream);
  }
  if (widest <= 512) {
    return launch_pair_select<T, 32>(params, stream);
  }
  return launch_pair_select<T, 64>(params, stream);
}

}  // namespace sdm::topk
