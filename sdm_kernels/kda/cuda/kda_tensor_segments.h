// SPDX-License-Identifier: Apache-2.0
//! @file Stages that find the states at which the segments of a window start, or in reverse the
//! gradients behind them (kda_tensor_segments.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/kda/cuda/kda_tensor_segments.cuh"

namespace sdm::kda {

struct KdaSegmentParams {
  KdaDims dims;
  KdaOptions options;
  KdaView v;
  KdaStateView initial;
  DeviceIntegers cu_seqlens;
  KdaWindow window;
  KdaRecords records;
  KdaSegments segments;
};

// Both may begin before the kernel in front of them ends (kda_tensor_launch.cuh); they wait for it.
// P, and with `offsets` B, of all segments with another behind them.
[[nodiscard]] cudaError_t launch_kda_segment_scan(
    const KdaSegmentParams& p, bool offsets, cudaStream_t stream
);
// From them the states; in reverse from P and R the gradients.
[[nodiscard]] cudaError_t launch_kda_segment_chain(
    const KdaSegmentParams& p, bool reverse, cudaStream_t stream
);

}  // namespace sdm::kda
