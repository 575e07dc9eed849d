// SPDX-License-Identifier: Apache-2.0
//! @file The top-k forward on CUDA: which kernel serves which shape.

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cuda/topk_block.cuh"
#include "sdm_kernels/topk/cuda/topk_cuda.h"
#include "sdm_kernels/topk/cuda/topk_device.cuh"

namespace sdm {
namespace {

// Largest factors and k of the warp-per-row kernel.
constexpr int32_t kMaxPairWidth = 1024;
constexpr int32_t kMaxPairSelected = 256;

bool fits_pair(const topk::DeviceFwdParams& params) {
  return params.num_factors == 2 && params.num_selected <= kMaxPairSelected &&
         std::max(params.widths[0], params.widths[1]) <= kMaxPairWidth;
}

template <typename T>
cudaError_t launch_block(const topk::DeviceFwdParams& params, cudaStream_t stream) {
  const unsigned int grid = topk::grid_size(params.num_rows);
  topk::topk_block_kernel<T><<<grid, topk::kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

// All rows and both factors of a pair start at multiples of 16 bytes.
bool is_aligned(const TopkFwdParams& params, const topk::DeviceRows& rows) {
  const uintptr_t pointers = reinterpret_cast<uintptr_t>(params.scores) |
                             reinterpret_cast<uintptr_t>(params.values) |
                             reinterpret_cast<uintptr_t>(params.indices);
  const int64_t size = element_size(params.dtype);
  bool aligned = pointers % 16 == 0;
  for (int64_t f = 0; f < params.num_factors; ++f) {
    aligned = aligned && params.factor_dims[f] * size % 16 == 0;
  }
  for (int dim = 0; dim < rows.num_dims; ++dim) {
    aligned = aligned && rows.strides[dim] * size % 16 == 0;
  }
  return aligned;
}

}  // namespace

cudaError_t launch_topk_fwd(const TopkFwdParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) {
    return cudaSuccess;
  }
  topk::DeviceFwdParams device{};
  if (params.num_factors > kTopkCudaMaxFactors || params.num_selected > kMaxTopk ||
      !topk::merge_rows(params.scores_rows, &device.rows)) {
    return cudaErrorInvalidValue;
  }
  device.scores = params.scores;
  device.values = params.values;
  device.indices = params.indices;
  device.num_rows = params.num_rows;
  device.num_selected = static_cast<int32_t>(params.num_selected);
  device.num_factors = static_cast<int32_t>(params.num_factors);
  device.wide_ids = params.wide_ids;
  device.aligned = is_aligned(params, device.rows);
  for (int64_t f = 0; f < params.num_factors; ++f) {
    if (params.factor_dims[f] > INT32_MAX) {
      return cudaErrorInvalidValue;
    }
    device.widths[f] = static_cast<int32_t>(params.factor_dims[f]);
  }
  const bool pair = fits_pair(device);
  switch (params.dtype) {
    case DType::kF32:
      return pair ? topk::launch_topk_pair_f32(device, stream)
                  : launch_block<float>(device, stream);
    case DType::kBf16:
      return pair ? topk::launch_topk_pair_bf16(device, stream)
                  : launch_block<Bf16>(device, stream);
    case DType::kF16:
      return pair ? topk::launch_topk_pair_f16(device, stream) : launch_block<F16>(device, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace sdm
