// SPDX-License-Identifier: Apache-2.0
//! @file Parameters of the top-k kernels in the form that travels to the device, by value.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/topk/cuda/topk_cuda.h"
#include "sdm_kernels/topk/topk_params.h"

namespace sdm::topk {

constexpr int kWarp = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

// The leading dimensions of a tensor, merged where their strides allow; outermost first.
struct DeviceRows {
  int32_t num_dims;  // 0: every row is at offset 0
  int64_t sizes[kTopkCudaMaxDims];
  int64_t strides[kTopkCudaMaxDims];

  __device__ int64_t offset(int64_t row) const {
    int64_t result = 0;
    for (int dim = num_dims - 1; dim > 0; --dim) {
      const int64_t outer = row / sizes[dim];
      result += (row - outer * sizes[dim]) * strides[dim];
      row = outer;
    }
    return num_dims == 0 ? 0 : result + row * strides[0];
  }
};

// False if more than kTopkCudaMaxDims dimensions are left.
inline bool merge_rows(const TopkRows& rows, DeviceRows* out) {
  *out = DeviceRows{};
  int first = kTopkCudaMaxDims;  // filled from the back
  int64_t sizes[kTopkCudaMaxDims];
  int64_t strides[kTopkCudaMaxDims];
  for (int64_t dim = rows.num_dims - 1; dim >= 0; --dim) {
    if (rows.sizes[dim] == 1) {
      continue;
    }
    if (first < kTopkCudaMaxDims && rows.strides[dim] == strides[first] * sizes[first]) {
      sizes[first] *= rows.sizes[dim];
      continue;
    }
    if (first == 0) {
      return false;
    }
    --first;
    sizes[first] = rows.sizes[dim];
    strides[first] = rows.strides[dim];
  }
  out->num_dims = kTopkCudaMaxDims - first;
  for (int dim = 0; dim < out->num_dims; ++dim) {
    out->sizes[dim] = sizes[first + dim];
    out->strides[dim] = strides[first + dim];
  }
  return true;
}

struct DeviceFwdParams {
  const void* scores;  // rows of num_columns, dense
  void* values;        // [num_rows, num_selected]
  void* indices;       // [num_rows, num_selected]
  int64_t first_row;   // of this launch
  int64_t num_rows;
  int32_t num_selected;  // kk
  int32_t num_factors;   // F
  bool wide_ids;
  bool aligned;  // rows and factors of scores start at multiples of 16 bytes, so do the outputs
  DeviceRows rows;
  int32_t widths[kTopkCudaMaxFactors];  // [F]
};

struct DeviceBwdParams {
  const void* d_values;
  const void* indices;
  void* d_scores;  // [num_rows, num_columns]
  int64_t num_rows;
  int64_t num_columns;  // N
  int64_t num_slots;    // P
  int64_t d_values_stride;
  int64_t indices_stride;
  int32_t num_selected;
  int32_t num_factors;
  bool wide_ids;
  DeviceRows d_values_rows;
  DeviceRows indices_rows;
  int32_t widths[kTopkCudaMaxFactors];  // [F]
};

// Kernel parameters end at 4 KB.
static_assert(sizeof(DeviceFwdParams) <= 4096 && sizeof(DeviceBwdParams) <= 4096);

// The warp-per-row kernels (topk_pair_<dtype>.cu): two factors of at most 1024 columns, at most 256
// selected.
cudaError_t launch_topk_pair_f32(const DeviceFwdParams& params, cudaStream_t stream);
cudaError_t launch_topk_pair_bf16(const DeviceFwdParams& params, cudaStream_t stream);
cudaError_t launch_topk_pair_f16(const DeviceFwdParams& params, cudaStream_t stream);

// Blocks of a launch with one item per block; kernels stride over what is left.
inline unsigned int grid_size(int64_t items) {
  return static_cast<unsigned int>(items < INT32_MAX ? items : INT32_MAX);
}

}  // namespace sdm::topk
