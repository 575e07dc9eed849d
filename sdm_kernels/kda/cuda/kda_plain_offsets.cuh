// SPDX-License-Identifier: Apache-2.0
//! @file Offsets of the sequences for the device, whatever cu_seqlens holds.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/device_integers.h"
#include "sdm_kernels/kda/cuda/kda_plain_device.cuh"

namespace sdm::kda::plain {

// Copies of cu_seqlens clamped to [0, T] and made increasing, so that no value leads outside.
struct OffsetsParams {
  DeviceIntegers cu_seqlens;
  int64_t N, T;
  int64_t* offsets;  // [N + 1]
};

constexpr int kOffsetThreads = 32;

__global__ void __launch_bounds__(kOffsetThreads) kda_plain_offsets_kernel(
    const __grid_constant__ OffsetsParams p
) {
  const int lane = static_cast<int>(threadIdx.x);
  int64_t largest = 0;
  for (int64_t base = 0; base <= p.N; base += kOffsetThreads) {
    const int64_t n = base + lane;
    int64_t offset = 0;
    if (n <= p.N) {
      offset = p.cu_seqlens.is_int64 ? static_cast<const int64_t*>(p.cu_seqlens.data)[n]
                                     : static_cast<const int32_t*>(p.cu_seqlens.data)[n];
      offset = offset < 0 ? 0 : (offset > p.T ? p.T : offset);
    }
#pragma unroll
    for (int step = 1; step < kOffsetThreads; step *= 2) {
      const int64_t before = __shfl_up_sync(0xffffffffu, offset, step);
      offset = lane >= step && before > offset ? before : offset;
    }
    offset = offset > largest ? offset : largest;
    if (n <= p.N) {
      p.offsets[n] = offset;
    }
    largest = __shfl_sync(0xffffffffu, offset, kOffsetThreads - 1);
  }
}

}  // namespace sdm::kda::plain
