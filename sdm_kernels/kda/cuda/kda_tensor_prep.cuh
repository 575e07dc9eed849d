// SPDX-License-Identifier: Apache-2.0
//! @file Launch of the token-parallel stage of the tensor path: the records of one window.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/kda/cuda/kda_tensor_records.cuh"

namespace sdm::kda {

struct KdaPrepParams {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  DeviceIntegers cu_seqlens;
  KdaWindow window;
  KdaRecords records;
};

// Dynamic shared memory that a block needs for K = 64 or 128.
int kda_tensor_prep_shared_bytes(int64_t K);

// Whether every row of the view starts at a multiple of `bytes`.
bool kda_rows_aligned(const KdaView& view, int64_t bytes);

// Fills the records of all chunks of the window; unused slots stay as they are. With `overlap` it
// may begin before the kernel in front of it ends (kda_tensor_launch.cuh), so it must not touch
// what that one reads or writes; it ends after it in any case.
[[nodiscard]] cudaError_t launch_kda_tensor_prep(
    const KdaPrepParams& params, cudaStream_t stream, bool overlap = false
);

}  // namespace sdm::kda
