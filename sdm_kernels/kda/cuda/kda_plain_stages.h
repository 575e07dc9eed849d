// SPDX-License-Identifier: Apache-2.0
//! @file The stages that the forward and the backward of the plain path share.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_scan.cuh"

namespace sdm::kda::plain {

[[nodiscard]] cudaError_t launch_plain_offsets(
    const DeviceIntegers& cu_seqlens, const KdaDims& dims, int64_t* offsets, cudaStream_t stream
);

[[nodiscard]] cudaError_t launch_plain_prep(const PlainCall& call, cudaStream_t stream);

// Sets the slices of `params`.
[[nodiscard]] cudaError_t launch_plain_forward_scan(ForwardScanParams params, cudaStream_t stream);

// Calls f(std::integral_constant<int, kLanes>) for the lanes that share a column.
template <typename F>
cudaError_t with_scan_lanes(int64_t K, F&& f) {
  switch (scan_lanes(K)) {
    case 4:
      return f(std::integral_constant<int, 4>());
    case 8:
      return f(std::integral_constant<int, 8>());
    case 16:
      return f(std::integral_constant<int, 16>());
    default:
      return f(std::integral_constant<int, 32>());
  }
}

}  // namespace sdm::kda::plain
