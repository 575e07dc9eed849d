// SPDX-License-Identifier: Apache-2.0
//! @file The top-k backward on CUDA: which kernel serves which shape.

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_bwd.cuh"
#include "sdm_kernels/topk/cuda/topk_cuda.h"
#include "sdm_kernels/topk/cuda/topk_device.cuh"

namespace sdm {
namespace {

// What every card grants a block without being asked.
constexpr int64_t kSharedBytes = 48 * 1024;

template <typename T>
cudaError_t launch(const topk::DeviceBwdParams& params, cudaStream_t stream) {
  const int64_t warp_bytes =
      topk::bwd_warp_floats(params.num_columns) * static_cast<int64_t>(sizeof(float));
  // 24 KB a block: several blocks on a multiprocessor; fewer than two warps a block waste it.
  const int64_t num_warps =
      std::min<int64_t>(topk::kBwdThreads / topk::kWarp, kSharedBytes / 2 / warp_bytes);
  if (num_warps >= 2) {
    const unsigned int threads = static_cast<unsigned int>(num_warps * topk::kWarp);
    const unsigned int grid = topk::grid_size(ceil_div(params.num_rows, num_warps));
    const size_t bytes = static_cast<size_t>(num_warps * warp_bytes);
    topk::topk_bwd_warp_kernel<T><<<grid, threads, bytes, stream>>>(params);
  } else {
    const unsigned int grid = topk::grid_size(params.num_rows);
    topk::topk_bwd_block_kernel<T><<<grid, topk::kBwdThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_topk_bwd(const TopkBwdParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) {
    return cudaSuccess;
  }
  topk::DeviceBwdParams device{};
  if (params.num_factors > kTopkCudaMaxFactors || params.num_selected > kMaxTopk ||
      !topk::merge_rows(params.d_values_rows, &device.d_values_rows) ||
      !topk::merge_rows(params.indices_rows, &device.indices_rows)) {
    return cudaErrorInvalidValue;
  }
  device.d_values = params.d_values;
  device.indices = params.indices;
  device.d_scores = params.d_scores;
  device.num_rows = params.num_rows;
  device.num_slots = 1;
  device.d_values_stride = params.d_values_stride;
  device.indices_stride = params.indices_stride;
  device.num_selected = static_cast<int32_t>(params.num_selected);
  device.num_factors = static_cast<int32_t>(params.num_factors);
  device.wide_ids = params.wide_ids;
  for (int64_t f = 0; f < params.num_factors; ++f) {
    if (params.factor_dims[f] > INT32_MAX) {
      return cudaErrorInvalidValue;
    }
    device.widths[f] = static_cast<int32_t>(params.factor_dims[f]);
    device.num_columns += params.factor_dims[f];
    device.num_slots *= params.factor_dims[f];
  }
  switch (params.dtype) {
    case DType::kF32:
      return launch<float>(device, stream);
    case DType::kBf16:
      return launch<Bf16>(device, stream);
    case DType::kF16:
      return launch<F16>(device, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace sdm
