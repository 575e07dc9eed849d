// SPDX-License-Identifier: Apache-2.0
//! @file Makes qk * inverse, between phase 1 and the chunks. Host side.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm {

// Floats of the product of a window.
inline int64_t merge_cells(const SdmDims& dims, const SdmWindow& window) {
  const int64_t Cp = round_up(dims.C, 16);
  return dims.N * window.chunks * dims.H * Cp * Cp;
}

// product [q][Cp][Cp] = qk * inverse of a window's records, in 16 x 16 blocks: those on the
// diagonal and below it, up to the chunk's last token; the others stay as they are.
[[nodiscard]] cudaError_t launch_sdm_merge(
    const SdmDims& dims,
    const SdmWindow& window,
    const SdmSequence* sequences,
    const SdmRecords& records,
    DType bank_dtype,
    float* product,
    cudaStream_t stream
);

}  // namespace sdm
